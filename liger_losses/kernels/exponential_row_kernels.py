"""The kernels of :mod:`liger_losses.kernels.exponential_rows`.

T rows (tokens), V columns (vocabulary), H hidden size.
"""

from __future__ import annotations

from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.label_rows import check_known, count_active, dot_product, label_of
from liger_losses.kernels.logit_transform import transform_block
from liger_losses.kernels.masked_rows import copy_row

#: Arguments whose alignment is no reason to compile again.
_VECTORS = ["labels", "label_logit", "logp", "ratio", "others", "rank", "facts", "upstream"]


@jit(do_not_specialize=["tokens", "ignore_index"], do_not_specialize_on_alignment=_VECTORS)
def start_kernel(
    hidden, hidden_stride, weight, weight_stride, labels, right, clean, label_logit, facts,
    tokens, columns, hidden_size, ignore_index, transform,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program per row: hidden states without what masked tokens may hold, and the label's logit."""
    row = tl.program_id(0).to(tl.int64)
    label, active, known = label_of(labels, row, ignore_index, columns)
    check_known(right, known | (active == 0))
    copy_row(clean, hidden, hidden_stride, row, active, hidden_size, BLOCK)
    read = tl.where(active, hidden_size, 0)
    z = dot_product(hidden + row * hidden_stride, weight + label * weight_stride, read, BLOCK)
    if transform.factor is not None:
        z = transform_block(z, None, label, True, transform, 1.0)
    tl.store(label_logit + row, tl.where(active, z, 0.0))
    if row == 0:
        tl.store(facts, 0)
        tl.store(facts + 1, count_active(labels, tokens, ignore_index, AT_ONCE))


@jit(do_not_specialize=["tokens", "ignore_index", "coefficient"], do_not_specialize_on_alignment=_VECTORS)
def scales_kernel(
    labels, logp, ratio, others, rank, facts, upstream, clean, scale_out, coef_out, ordered_coef, scaled, loss,
    tokens, hidden_size, ignore_index, coefficient, factor,
    MEAN: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program per row: what its exponentials and its hidden states are multiplied by, and the label's derivative.
    The first one adds up the loss."""
    row = tl.program_id(0).to(tl.int64)
    active = tl.load(labels + row) != ignore_index
    if upstream is not None:
        g = tl.load(upstream + row)
    else:
        g = coefficient * 1.0
        if MEAN:
            g = g / tl.load(facts + 1).to(tl.float32)
        if row == 0:
            terms = tl.zeros((AT_ONCE,), tl.float32)
            for start in range(0, tokens, AT_ONCE):
                at = start + tl.arange(0, AT_ONCE)
                terms += tl.load(logp + at, mask=at < tokens, other=0.0)
            tl.store(loss, g * tl.sum(terms, 0))
    if factor is not None:
        g *= factor
    g = tl.where(active, g, 0.0)
    scale = -g * tl.load(ratio + row)
    coef = g * tl.load(others + row)
    tl.store(scale_out + row, scale)
    tl.store(coef_out + row, coef)
    tl.store(ordered_coef + tl.load(rank + row), coef)
    for start in range(0, hidden_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        h = tl.load(clean + row * hidden_size + at, mask=at < hidden_size, other=0.0).to(tl.float32)
        tl.store(scaled + row * hidden_size + at, (scale * h).to(scaled.dtype.element_ty), mask=at < hidden_size)
