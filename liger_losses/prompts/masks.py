"""Which tokens of a packed row see which, as a mask function of FlexAttention and as a dense mask.

T tokens of a row, n blocks of :data:`~liger_losses.prompts.packing.BLOCK` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_losses.prompts.packing import BLOCK, PackedCompletions

#: ``mask_function(batch, head, query, key)``, as transformers' and FlexAttention's.
MaskFunction = Callable[..., Tensor]
#: Blocks of queries whose keys are compared at once, which bounds the memory.
_BLOCKS = 8


def mask_function(rows: Tensor, positions_see: MaskFunction | None) -> MaskFunction:
    """Which keys a query sees. It reads tensors alone: Python numbers would compile a kernel for every length.

    Args:
        rows: ``[4, T]`` int32: ``starts``, ``prompt_starts``, ``prompt_ends`` and the positions.
        positions_see: the model's mask function, of positions, such as a sliding window; ``None`` if it is causal.
    """
    starts, prompt_starts, prompt_ends, positions = rows.unbind()

    def sees(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        same = (key >= starts[query]) & (key <= query)
        seen = same | ((key >= prompt_starts[query]) & (key < prompt_ends[query]))
        return seen if positions_see is None else seen & positions_see(batch, head, positions[query], positions[key])

    return sees


class RowMask:
    """The mask function of a packed row, with the tensors that it reads."""

    def __init__(self, packed: PackedCompletions, positions_see: MaskFunction | None) -> None:
        positions = packed.position_ids[0].to(torch.int32)
        self.rows = torch.stack([packed.starts, packed.prompt_starts, packed.prompt_ends, positions])
        self.positions_see = positions_see
        self._sees = mask_function(self.rows, positions_see)

    def __call__(self, batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return self._sees(batch, head, query, key)


def block_mask(sees: RowMask) -> Any:
    """FlexAttention's BlockMask. Its own ``create_block_mask`` would compile, or compare all T x T tokens at once."""
    from torch.nn.attention.flex_attention import BlockMask

    queries = torch.arange(sees.rows.shape[1], dtype=torch.int32, device=sees.rows.device).split(_BLOCKS * BLOCK)
    number = torch.cat([_pairs(sees, part) for part in queries])
    full = number == BLOCK * BLOCK
    partly, fully = _ordered((number > 0) & ~full), _ordered(full)
    return BlockMask.from_kv_blocks(*partly, *fully, BLOCK, sees)


def _pairs(sees: RowMask, queries: Tensor) -> Tensor:
    """The number of pairs of a query and a key that it sees, of each pair of blocks ``[blocks of queries, n]``."""
    size = sees.rows.shape[1]
    if sees.positions_see is None:  # two ranges of keys: their part of a block needs no look at its tokens
        starts, prompt_starts, prompt_ends, _ = sees.rows[:, queries, None]
        first = torch.arange(0, size, BLOCK, dtype=torch.int32, device=queries.device)
        ranges = (starts, queries[:, None] + 1), (prompt_starts, prompt_ends)
        seen = sum((stop.minimum(first + BLOCK) - start.maximum(first)).clamp(min=0) for start, stop in ranges)
    else:
        zero, keys = queries.new_zeros(()), torch.arange(size, dtype=torch.int32, device=queries.device)
        seen = sees(zero, zero, queries[:, None], keys).expand(-1, size).unflatten(1, (-1, BLOCK)).sum(2)
    return seen.unflatten(0, (-1, BLOCK)).sum(1)


def _ordered(dense: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each row's blocks ``[1, 1, n]``, and their indices, these first ``[1, 1, n, n]``."""
    number, indices = dense.sum(-1), dense.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return number[None, None].to(torch.int32), indices[None, None].to(torch.int32)
