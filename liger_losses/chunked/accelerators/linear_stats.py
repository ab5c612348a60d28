"""Statistics of the softmax of ``hidden @ weight.T``, whose logits never leave the registers.

N tokens, H hidden size, V vocabulary size, S splits of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.split_sums import PARTIAL_SUMS, merge_sums, store_sums
from liger_losses.chunked.accelerators.tiles import (
    Tiles,
    project_tile,
    tile_position,
    tiles_of,
    with_contiguous_rows,
)
from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, transform_block
from liger_losses.kernels.online_softmax import Sums, empty_statistics, online_start, online_step

#: Row tiles that walk the vocabulary together, so that the cache serves each part of the head to all of them.
_GROUP = 16
#: Tokens of one launch, which bounds the memory of the splits' sums (8 MiB of 8 splits).
_MAX_TOKENS = 32768


def linear_softmax_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    names: frozenset[str],
    epilogue: Epilogue = Epilogue(),
) -> dict[str, Tensor]:
    """:func:`softmax_statistics` of ``hidden @ weight.T``, fp32 from fp32 sums.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, rows contiguous, of the same half-precision dtype.
        labels: ``[N]`` int64 in ``[0, V)``.
        names, epilogue: as in :func:`~liger_losses.kernels.softmax_stats.softmax_statistics`.

    Returns:
        One fp32 tensor ``[N]`` per name (``argmax``: int64).
    """
    hidden, values = with_contiguous_rows(hidden), empty_statistics(names, len(hidden), hidden.device)
    sums = Sums.needed(names, epilogue.class_weight)
    for start in range(0, len(hidden), _MAX_TOKENS):
        rows = slice(start, start + _MAX_TOKENS)
        partial = partial_sums(hidden[rows], weight, labels[rows], sums, epilogue.rows(rows))
        merge_sums({name: value[rows] for name, value in values.items()}, partial, len(weight), sums)
    return values


def partial_sums(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    sums: Sums,
    epilogue: Epilogue,
    needed: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Each split's sums ``[K, S, N]``, K in the order of :data:`PARTIAL_SUMS`, of which the first three always exist.

    With ``needed`` (int32), they are computed only if the device finds its first set, and are undefined otherwise.
    ``tiles`` are the tiles of this product, if they are known.
    """
    tokens = hidden.shape[0]
    row_tiles, column_tiles, programs, arguments = tiles or tiles_of(hidden, weight, epilogue)
    group = max(1, min(row_tiles, _GROUP))
    splits = max(1, min(programs // group, column_tiles))
    shape = len(PARTIAL_SUMS) if any(sums) else 3, splits, tokens
    partial = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    if tokens:
        _linear_statistics_kernel[(row_tiles * splits,)](
            **arguments, labels=labels, class_weight=epilogue.class_weight, partial=partial, needed=needed,
            splits=splits, group=group, sums=sums,
        )  # fmt: skip
    return partial


@jit(
    do_not_specialize=["tokens", "splits", "group"],
    do_not_specialize_on_alignment=["labels", "partial", "needed"],
)
def _linear_statistics_kernel(
    hidden, weight, hidden_stride, weight_stride, tokens, vocab_size, hidden_size,
    labels, bias, class_weight, partial, needed, splits, group, transform, sums,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per tile of tokens and split: it walks the split's columns with the softmax's sums in registers."""
    if needed is not None:  # noqa: SIM102, because Triton resolves only the outer condition while compiling
        if tl.load(needed) == 0:
            return
    row_tile, split = tile_position(tl.program_id(0), tl.cdiv(tokens, BLOCK_N), splits, group)
    first_row = row_tile * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    valid = rows < tokens
    label = tl.load(labels + rows, mask=valid, other=-1).to(tl.int32)
    inverse = inverse_temperature(transform, rows, valid, 1)
    column_tiles = tl.cdiv(vocab_size, BLOCK_V)
    per_split = tl.cdiv(column_tiles, splits)
    first_tile = split * per_split
    last_tile = tl.minimum(first_tile + per_split, column_tiles)
    state = online_start(tl.zeros((BLOCK_N,), tl.float32))
    label_logit = tl.zeros((BLOCK_N,), tl.float32)
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
        label_logit += tl.sum(tl.where(columns[None, :] == label[:, None], z, 0.0), 1)
        state = online_step(z, first_column, columns, inside, class_weight, state, sums, 1)
    store_sums(partial + split * tokens + rows, splits * tokens, valid, label_logit, state, sums)
