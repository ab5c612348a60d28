"""The kernels of :mod:`liger_losses.kernels.exponential_rows`.

T rows (tokens), V columns (vocabulary), H hidden size.
"""

from __future__ import annotations

from liger_losses.kernels._tiles import project_tile
from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.label_rows import check_known, count_active, dot_product
from liger_losses.kernels.linear_exp import add_sums, log1p
from liger_losses.kernels.linear_stats import merged_splits
from liger_losses.kernels.logit_transform import transform_block
from liger_losses.kernels.masked_rows import copy_row, label_of

#: Arguments whose alignment is no reason to compile again.
_VECTORS = ["labels", "label_logit", "unsafe", "lse", "logp", "mean_logit", "ratio", "others", "upstream"]
_VECTORS += ["rank", "ordered", "source"]


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


@jit
def _sorted_by(labels, rows, inside, ignore_index, columns):
    """What labels are sorted by: V for masked tokens."""
    label = tl.load(labels + rows, mask=inside, other=ignore_index)
    return tl.where((label != ignore_index) & (label >= 0) & (label < columns), label, columns)


@jit(
    do_not_specialize=["column_tiles", "tokens", "ignore_index", "parts", "group"],
    do_not_specialize_on_alignment=_VECTORS,
)
def sums_kernel(
    partial, logit_sums, labels, label_logit, unsafe, logp, mean_logit, lse, ratio, others, ordered, source, rank,
    facts, column_tiles, tokens, columns, ignore_index, parts, group, limit,
    BLOCK: tl.constexpr, TILES: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """Log-probabilities from the tiles' sums over all columns but the label's; the order of the labels.

    A row whose sum is larger than the ``limit`` is ``unsafe``: the first of ``facts`` says whether there is one.
    """
    first_row = tl.program_id(0) * BLOCK
    rows = first_row + tl.arange(0, BLOCK)
    inside = rows < tokens
    rest, total, _moment = add_sums(
        partial, logit_sums, None, first_row, rows, inside, column_tiles, tokens, parts, group, BLOCK, TILES
    )
    active = tl.load(labels + rows, mask=inside, other=ignore_index) != ignore_index
    z = tl.load(label_logit + rows, mask=inside, other=0.0)
    too_large = active & ((rest <= limit) == 0)  # NaN is too large
    tl.store(unsafe + rows, too_large.to(tl.int64), mask=inside)
    if tl.max(too_large.to(tl.int32), 0) > 0:
        tl.store(facts, 1)
    if mean_logit is not None:
        tl.store(mean_logit + rows, tl.where(active, total / columns, 0.0), mask=inside)
    log_total = log1p(rest)
    tl.store(lse + rows, tl.where(active, z + log_total, 0.0), mask=inside)
    tl.store(logp + rows, tl.where(active, -log_total, 0.0), mask=inside)
    tl.store(ratio + rows, tl.where(active, 1.0 / (1.0 + rest), 0.0), mask=inside)
    tl.store(others + rows, tl.where(active, rest / (1.0 + rest), 0.0), mask=inside)
    own = _sorted_by(labels, rows, inside, ignore_index, columns)
    place = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, tokens, LABELS):
        other = start + tl.arange(0, LABELS)
        key = _sorted_by(labels, other, other < tokens, ignore_index, columns)
        before = (key[:, None] < own[None, :]) | ((key[:, None] == own[None, :]) & (other[:, None] < rows[None, :]))
        place += tl.sum((before & (other < tokens)[:, None]).to(tl.int32), 0)
    tl.store(rank + rows, place, mask=inside)
    tl.store(ordered + place, own, mask=inside)
    tl.store(source + place, rows.to(tl.int64), mask=inside)


@jit(do_not_specialize=["splits", "tokens"], do_not_specialize_on_alignment=_VECTORS)
def again_kernel(
    hidden, weight, weight_stride, labels, label_logit, unsafe, partial, splits, values, values_stride,
    logp, lse, ratio, others, facts, tokens, columns, hidden_size, transform, sums,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Persistent programs: rows that are ``unsafe`` get exponentials relative to the log-sum-exp, whose sum is 1."""
    if tl.load(facts) == 0:
        return
    row_tiles = tl.cdiv(tokens, BLOCK_N)
    for tile in range(tl.program_id(0), row_tiles * tl.cdiv(columns, BLOCK_V), tl.num_programs(0)):
        first_row = tile % row_tiles * BLOCK_N
        first_column = tile // row_tiles * BLOCK_V
        rows = first_row + tl.arange(0, BLOCK_N)
        inside = rows < tokens
        again = inside & (tl.load(unsafe + rows, mask=inside, other=0) != 0)
        if tl.max(again.to(tl.int32), 0) > 0:
            state, _label_logit = merged_splits(partial, rows, splits, tokens, sums, BLOCK_N, SPLITS)
            _best, _logit_sum, _moment, _squares, top, total, _weight_sum, _weighted_sum = state
            offset = top + tl.log(tl.where(inside, total, 1.0))
            offset = tl.where(offset == float("-inf"), -1.0e38, offset)  # all logits are -inf: finite, also in base 2
            z = project_tile(
                hidden, weight, hidden_size, weight_stride, first_row, first_column, tokens, columns, hidden_size,
                BLOCK_N, BLOCK_V, BLOCK_H,
            )  # fmt: skip
            at = first_column + tl.arange(0, BLOCK_V)
            if transform.factor is not None:
                z = transform_block(z, None, at, at < columns, transform, 1.0)
            label = tl.load(labels + rows, mask=inside, other=-1)
            e = tl.exp2(z * 1.4426950408889634 - offset[:, None] * 1.4426950408889634)
            e = tl.where(at[None, :] != label[:, None], e, 0.0)
            places = values + rows.to(tl.int64)[:, None] * values_stride + at[None, :]
            tl.store(places, e.to(values.dtype.element_ty), mask=again[:, None] & (at < columns)[None, :])
            if first_column == 0:
                label_z = tl.load(label_logit + rows, mask=inside, other=0.0)
                tl.store(lse + rows, offset, mask=again)
                tl.store(logp + rows, label_z - offset, mask=again)
                tl.store(ratio + rows, 1.0, mask=again)
                tl.store(others + rows, 1.0 - tl.exp(label_z - offset), mask=again)


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
