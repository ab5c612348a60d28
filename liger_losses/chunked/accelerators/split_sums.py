"""The sums of a softmax's parts: of splits of the vocabulary, which other programs have read, merged in one launch.

N tokens, S splits of the vocabulary, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.online_softmax import Sums, online_start, store_statistics, stored

#: The sums of one split that :func:`store_sums` writes, with e = exp(z - top).
PARTIAL_SUMS = ("top", "total", "label_logit", "moment", "squares", "logit_sum", "weighted_sum", "weight_sum", "argmax")
_TOP, _TOTAL, _LABEL_LOGIT, _MOMENT, _SQUARES, _LOGIT_SUM, _WEIGHTED_SUM, _WEIGHT_SUM, _ARGMAX = (
    range(9) if tl is None else map(tl.constexpr, range(9))  # kernels read no global that is no constexpr
)
#: Tokens of a program that merges sums, the splits that it reads at a time, and warps; of more splits than the number.
_MERGED, _MERGED_TILES, _FEW_SPLITS = (64, 32, 4), (8, 512, 8), 128


def merge_sums(
    values: Mapping[str, Tensor | None],
    partial: Tensor,
    columns: int,
    sums: Sums = Sums(),
    *,
    flags: Tensor | None = None,
    label_logit: Tensor | None = None,
    offset: Tensor | None = None,
) -> None:
    """Compute statistics from the sums of all splits, in an order that depends on their number alone (Triton only).

    Args:
        values: the tensors ``[R]`` to write them into, by name, ``lse`` among them.
        partial: ``[K, S, R]``, the splits' :data:`PARTIAL_SUMS`, the first two at least.
        columns: V.
        sums: which sums there are.
        flags: ``[2 + R]`` int32. Only the statistics of rows n with ``flags[2 + n] != 0`` are computed; ``flags[0]`` is
            0 if there are none. ``None`` for all rows.
        label_logit: ``[R]``, the labels' logits, where they are not among the sums.
        offset: ``[R]``, which gets a finite log-sum-exp.
    """
    _, splits, tokens = partial.shape
    if tokens:
        out, (block, step, warps) = stored(values), _MERGED if splits <= _FEW_SPLITS else _MERGED_TILES
        _merge_kernel[(-(-tokens // block),)](
            partial, label_logit, flags, offset, out, splits, tokens, columns, sums, block, step, num_warps=warps
        )


@jit
def store_sums(out, step, valid, label_logit, state, sums):
    """The sums of a tile's rows, in the order of :data:`PARTIAL_SUMS`, ``step`` elements apart."""
    best, logit_sum, moment, squares, top, total, weight_sum, weighted_sum = state
    tl.store(out + _TOP * step, top, mask=valid)
    tl.store(out + _TOTAL * step, total, mask=valid)
    tl.store(out + _LABEL_LOGIT * step, label_logit, mask=valid)
    if sums.moment is not None:
        tl.store(out + _MOMENT * step, moment, mask=valid)
    if sums.squares is not None:
        tl.store(out + _SQUARES * step, squares, mask=valid)
    if sums.logits is not None:
        tl.store(out + _LOGIT_SUM * step, logit_sum, mask=valid)
    if sums.weighted is not None:
        tl.store(out + _WEIGHTED_SUM * step, weighted_sum, mask=valid)
        tl.store(out + _WEIGHT_SUM * step, tl.zeros_like(top) + weight_sum, mask=valid)
    if sums.argmax is not None:
        tl.store(out + _ARGMAX * step, best.to(tl.float32), mask=valid)


@jit
def merged_splits(partial, rows, splits, tokens, sums, LABELS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """The sums of all splits, in an order that depends on their number alone; with ``LABELS``, and the label's logit.

    ``splits`` times ``tokens`` are the elements from one of the :data:`PARTIAL_SUMS` to the next.
    """
    step = splits.to(tl.int64) * tokens
    zero = tl.zeros((BLOCK,), tl.float32)
    best, logit_sum, moment, squares, top, total, _, weighted_sum = online_start(zero)
    weight_sum = zero
    label_logit = zero
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        mask = (split < splits)[:, None] & (rows < tokens)[None, :]
        at = partial + split[:, None] * tokens + rows[None, :]
        tops = tl.load(at + _TOP * step, mask=mask, other=-3.0e38)
        totals = tl.load(at + _TOTAL * step, mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        rescale = tl.exp(top - new_top)
        below = tops - new_top[None, :]
        scale = tl.exp(below)
        if LABELS:
            label_logit += tl.sum(tl.load(at + _LABEL_LOGIT * step, mask=mask, other=0.0), 0)
        if sums.moment is not None:
            moments = tl.load(at + _MOMENT * step, mask=mask, other=0.0)
            moment = rescale * (moment + total * (top - new_top)) + tl.sum((moments + totals * below) * scale, 0)
        if sums.squares is not None:
            of_splits = tl.sum(tl.load(at + _SQUARES * step, mask=mask, other=0.0) * scale * scale, 0)
            squares = squares * rescale * rescale + of_splits
        if sums.logits is not None:
            logit_sum += tl.sum(tl.load(at + _LOGIT_SUM * step, mask=mask, other=0.0), 0)
        if sums.weighted is not None:
            weighted_sum += tl.sum(tl.load(at + _WEIGHTED_SUM * step, mask=mask, other=0.0), 0)
            weight_sum += tl.sum(tl.load(at + _WEIGHT_SUM * step, mask=mask, other=0.0), 0)
        if sums.argmax is not None:
            column = tl.load(at + _ARGMAX * step, mask=mask, other=3.0e38)
            first = tl.min(tl.where(below == 0.0, column, 3.0e38), 0).to(tl.int32)
            best = tl.where(new_top > top, first, best)
        total = total * rescale + tl.sum(totals * scale, 0)
        top = new_top
    return (best, logit_sum, moment, squares, top, total, weight_sum, weighted_sum), label_logit


#: Arguments whose alignment is no reason to compile again.
_VECTORS = ["partial", "label_logit", "flags", "offset"]


@jit(do_not_specialize=["splits", "tokens", "columns"], do_not_specialize_on_alignment=_VECTORS)
def _merge_kernel(
    partial, label_logit, flags, offset, out, splits, tokens, columns, sums,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program per block of tokens; see :func:`merge_sums`."""
    if flags is not None:  # noqa: SIM102, because Triton resolves only the outer condition while compiling
        if tl.load(flags) == 0:
            return
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < tokens
    has_logp: tl.constexpr = out[1] is not None
    state, z = merged_splits(partial, rows, splits, tokens, sums, has_logp and label_logit is None, BLOCK, SPLITS)
    if label_logit is not None:
        z = tl.load(label_logit + rows, mask=mask, other=0.0)
    if flags is not None:
        mask = mask & (tl.load(flags + 2 + rows, mask=mask, other=0) != 0)
    row_lse = store_statistics(out, rows, mask, z, state, sums, columns)
    if offset is not None:  # finite, also in base 2, where all logits are -inf
        tl.store(offset + rows, tl.where(row_lse == float("-inf"), -1.0e38, row_lse), mask=mask)
