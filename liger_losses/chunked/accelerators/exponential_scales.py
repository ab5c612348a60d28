"""What products with exponentials are scaled by, to be gradients of a loss on log-probabilities.

See :mod:`liger_losses.chunked.accelerators.linear_exp`. N tokens, H hidden size, k selected columns of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.linear_exp import Exponentials
from liger_losses.chunked.accelerators.tiles import with_contiguous_rows
from liger_losses.kernels._triton import jit, power_of_two, tl
from liger_losses.kernels.logit_transform import LogitTransform, capped_tanh, inverse_temperature, transform_gradient


class Selected(NamedTuple):
    """Columns of each token whose log-probabilities have derivatives, of which some may be the same, or the label."""

    out: Tensor | None = None  # [N, V], exponentials
    stride: int = 0  # of its rows
    labels: Tensor | None = None  # [N] int64
    columns: Tensor | None = None  # [N, k] int64, contiguous as the others
    logps: Tensor | None = None  # [N, k]
    upstream: Tensor | None = None  # [N, k], the loss's derivatives by these
    width: int = 0  # k


def gradient_scales(
    of_logp: Tensor | None,
    of_lse: Tensor | None,
    values: Exponentials,
    hidden: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),
    here: Tensor | None = None,
    selected: Selected = Selected(),
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of products with exponentials, from ``d loss / d z = (of_lse - of_logp) p + of_logp onehot``.

    ``d loss / d projection = scale out`` at all columns but the label's, with ``out`` of :func:`linear_exponentials`;
    at the label's, it is ``at_label``. Selected columns add ``sum_j upstream_j (onehot_j - p)`` to ``d loss / d z``.
    Terms may cancel there: they are added before they are rounded, and written into ``out``, as the label's are then.

    Args:
        of_logp, of_lse: the loss's derivatives by both statistics, ``[N]`` fp32; ``None`` for 0.
        values: what :func:`linear_exponentials` returned.
        hidden: ``[N, H]``, to be scaled, or ``None``.
        transform: from projections to logits.
        here: ``[N]`` bool, whose label is among these columns; another has ``logp`` of another column, and at all of
            them ``d loss / d z = (of_lse - of_logp) p``. ``None`` for all.
        selected: other columns with derivatives; not with ``here``.

    Returns:
        ``scale [N]``, ``at_label [N]``, and ``scale hidden [N, H]``, rounded once, in its dtype (or ``None``).
    """
    scaled = None if hidden is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    scale, at_label = torch.empty_like(values.lse), torch.empty_like(values.lse)
    hidden = None if hidden is None else with_contiguous_rows(hidden)
    if tokens := scale.shape[0]:
        sizes = (0, 0) if hidden is None else (hidden.stride(0), hidden.shape[1])
        vectors = [None if g is None else g.contiguous() for g in (of_logp, of_lse)]
        _scales_kernel[(tokens,)](
            scale, at_label, scaled, hidden, *sizes, *vectors, *values[:3], here, *selected,
            transform.for_kernel, BLOCK=1024, BLOCK_K=power_of_two(selected.width + 1),
        )  # fmt: skip
    return scale, at_label, scaled


@jit
def expm1(x):
    """``exp(x) - 1`` for x <= 0, exact for small x (Kahan's method)."""
    u = tl.exp(x)
    return tl.where(u == 1.0, x, tl.where(u < 1e-7, u - 1.0, (u - 1.0) * x / tl.log(u)))


#: Arguments whose alignment is no reason to compile again: slices of vectors begin anywhere.
_VECTORS = ["offset", "lse", "logp", "of_logp", "of_lse", "at_label_out", "here", "hidden"]
_VECTORS += ["out", "labels", "columns", "logps", "upstream"]


@jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_VECTORS)
def _scales_kernel(
    scale_out, at_label_out, scaled, hidden, hidden_stride, hidden_size,
    of_logp, of_lse, offset, lse, logp, here, out, out_stride, labels, columns, logps, upstream, count, transform,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    row = tl.program_id(0).to(tl.int64)
    label_c = tl.zeros((), tl.float32)
    lse_c = tl.zeros((), tl.float32)
    if of_logp is not None:
        label_c = tl.load(of_logp + row)
    if of_lse is not None:
        lse_c = tl.load(of_lse + row)
    place = tl.arange(0, BLOCK_K)
    if upstream is not None:
        upstream += row * count
        g = tl.load(upstream + place, mask=place < count, other=0.0)
        lse_c -= tl.sum(g, 0)
        least = tl.maximum(tl.abs(label_c), tl.max(tl.abs(g), 0)) * 6e-5 + 1e-30
    p_c = lse_c - label_c
    if upstream is not None:  # what is divided by it stays finite, and changes by less than the rounding of gradients
        p_c = tl.where(tl.abs(p_c) < least, least, p_c)
    if here is not None:
        label_c = tl.where(tl.load(here + row), label_c, 0.0)
    row_lse = tl.load(lse + row)
    row_logp = tl.load(logp + row)
    row_offset = tl.load(offset + row)
    inverse = inverse_temperature(transform, row, True, 0)
    s = p_c * tl.exp(row_offset - row_lse)
    # p_coef p + label_coef with p = 1 + expm1(logp), so that p - 1 keeps its digits.
    at_label = (p_c + label_c) + p_c * expm1(row_logp)
    if transform.factor is not None:
        s *= transform.factor
        if transform.temperature is not None:
            s *= inverse
        at_label = transform_gradient(at_label, row_logp + row_lse, transform, inverse)
    tl.store(scale_out + row, s)
    if upstream is not None:
        at_label = 0.0
        columns += row * count
        label = tl.load(labels + row)
        column = tl.load(columns + place, mask=place < count, other=-1)
        column = tl.where(place == count, label, column)
        total = tl.where(column == label, label_c, 0.0)
        for i in range(count):  # of all that are the same column
            total += tl.where(column == tl.load(columns + i), tl.load(upstream + i), 0.0)
        log_p = tl.load(logps + row * count + place, mask=place < count, other=0.0)
        log_p = tl.where(column == label, row_logp, log_p)
        there = tl.where(log_p > -0.7, (p_c + total) + p_c * expm1(log_p), p_c * tl.exp(log_p) + total)
        there = there / p_c * tl.exp(row_lse - row_offset)
        if transform.cap is not None:
            tanh = capped_tanh(log_p + row_lse, transform, inverse)
            there *= 1 - tanh * tanh
        # Of a column that is there twice, the same number is stored twice.
        tl.store(out + row * out_stride + column, there.to(out.dtype.element_ty), mask=place <= count)
    tl.store(at_label_out + row, at_label)
    if hidden is not None:
        for start in range(0, hidden_size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < hidden_size
            h = tl.load(hidden + row * hidden_stride + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(scaled + row * hidden_size + at, (s * h).to(scaled.dtype.element_ty), mask=inside)
