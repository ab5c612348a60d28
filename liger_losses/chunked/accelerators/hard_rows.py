"""Statistics of rows whose exponentials overflow, taken again from logits that never leave the registers.

The device decides whether there are any: without, both kernels return at once. N tokens, H hidden size, V vocabulary
size, S splits of the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.tiles import Tiles, project_tile, tile_position
from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.logit_transform import inverse_temperature, transform_block
from liger_losses.kernels.online_softmax import Sums, online_start, online_step

if TYPE_CHECKING:
    from liger_losses.chunked.accelerators.linear_exp import Exponentials

#: Row tiles that walk the vocabulary together, so that the cache serves each part of the head to all of them.
_GROUP = 16
#: Tokens of a program that merges splits.
_MERGED = 64


def compute_hard_rows(values: Exponentials, label_logit: Tensor, flags: Tensor, tiles: Tiles) -> None:
    """Compute the statistics of the rows n with ``flags[1 + n] != 0``, from fp32 sums relative to the largest logit.

    Args:
        values: the tensors to write them into, but the mean logit; ``offset`` gets a finite log-sum-exp.
        label_logit: ``[N]``, the labels' logits.
        flags: ``[1 + N]`` int32; ``flags[0]`` is 0 if there are no such rows.
        tiles: the tiles of the product whose logits these are.
    """
    sums = Sums(moment=None if values.entropy is None else 1, argmax=None if values.argmax is None else 1)
    row_tiles, column_tiles, programs, arguments = tiles
    group, tokens = max(1, min(row_tiles, _GROUP)), len(label_logit)
    splits = max(1, min(programs // group, column_tiles))
    partial = torch.empty(4 if any(sums) else 2, splits, tokens, dtype=torch.float32, device=flags.device)
    _hard_rows_kernel[(row_tiles * splits,)](
        **arguments, partial=partial, needed=flags, splits=splits, group=group, sums=sums
    )
    _merge_kernel[(-(-tokens // _MERGED),)](
        partial, label_logit, flags, values.offset, values.lse, values.logp, values.entropy, values.argmax,
        splits, tokens, BLOCK=_MERGED,
    )  # fmt: skip


@jit(do_not_specialize=["tokens", "splits", "group"], do_not_specialize_on_alignment=["partial", "needed"])
def _hard_rows_kernel(
    hidden, weight, hidden_stride, weight_stride, tokens, vocab_size, hidden_size,
    bias, partial, needed, splits, group, transform, sums,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per tile of tokens and split: it walks the split's columns with the softmax's sums in registers."""
    if tl.load(needed) == 0:
        return
    row_tile, split = tile_position(tl.program_id(0), tl.cdiv(tokens, BLOCK_N), splits, group)
    first_row = row_tile * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    valid = rows < tokens
    inverse = inverse_temperature(transform, rows, valid, 1)
    column_tiles = tl.cdiv(vocab_size, BLOCK_V)
    per_split = tl.cdiv(column_tiles, splits)
    first_tile = split * per_split
    last_tile = tl.minimum(first_tile + per_split, column_tiles)
    state = online_start(tl.zeros((BLOCK_N,), tl.float32))
    for tile in tl.range(first_tile, last_tile, flatten=True):
        first_column = tile * BLOCK_V
        columns = first_column + tl.arange(0, BLOCK_V)
        z = project_tile(
            hidden, weight, hidden_stride, weight_stride, first_row, first_column, tokens, vocab_size, hidden_size,
            BLOCK_N, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        inside = columns < vocab_size
        if bias is not None or transform.factor is not None:
            z = transform_block(z, bias, columns, inside, transform, inverse)
        state = online_step(z, first_column, columns, inside, None, state, sums, 1)
    best, _, moment, _, top, total, _, _ = state
    at = partial + split * tokens + rows
    step = splits.to(tl.int64) * tokens
    tl.store(at, top, mask=valid)
    tl.store(at + step, total, mask=valid)
    if sums.moment is not None:
        tl.store(at + 2 * step, moment, mask=valid)
    if sums.argmax is not None:
        tl.store(at + 3 * step, best.to(tl.float32), mask=valid)


#: Arguments whose alignment is no reason to compile again: slices of vectors begin anywhere.
_VECTORS = ["partial", "label_logit", "flags", "offset", "lse", "logp", "entropy", "argmax"]


@jit(do_not_specialize=["splits", "tokens"], do_not_specialize_on_alignment=_VECTORS)
def _merge_kernel(
    partial, label_logit, flags, offset, lse, logp, entropy, argmax, splits, tokens, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of tokens; the order of the sums depends on the number of splits alone."""
    if tl.load(flags) == 0:
        return
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < tokens) & (tl.load(flags + 1 + rows, mask=rows < tokens, other=0) != 0)
    step = splits.to(tl.int64) * tokens
    zero = tl.zeros((BLOCK,), tl.float32)
    best, _, moment, _, top, total, _, _ = online_start(zero)
    for split in range(splits):
        at = partial + split * tokens + rows
        part_top = tl.load(at, mask=mask, other=-3.0e38)
        part_total = tl.load(at + step, mask=mask, other=0.0)
        new_top = tl.maximum(top, part_top)
        rescale = tl.exp(top - new_top)
        scale = tl.exp(part_top - new_top)
        if entropy is not None:
            part_moment = tl.load(at + 2 * step, mask=mask, other=0.0) + part_total * (part_top - new_top)
            moment = rescale * (moment + total * (top - new_top)) + scale * part_moment
        if argmax is not None:
            best = tl.where(part_top > top, tl.load(at + 3 * step, mask=mask, other=0.0).to(tl.int32), best)
        total = total * rescale + part_total * scale
        top = new_top
    log_total = tl.log(total)
    row_lse = top + log_total
    tl.store(lse + rows, row_lse, mask=mask)
    if logp is not None:
        z = tl.load(label_logit + rows, mask=mask, other=0.0)
        tl.store(logp + rows, (z - top) - log_total, mask=mask)
    if entropy is not None:
        tl.store(entropy + rows, log_total - moment / total, mask=mask)
    if argmax is not None:
        tl.store(argmax + rows, best.to(tl.int64), mask=mask)
    if offset is not None:  # finite, also in base 2, where all logits are -inf
        tl.store(offset + rows, tl.where(row_lse == float("-inf"), -1.0e38, row_lse), mask=mask)
