"""Which batches a loss has counted in its own state: activation checkpointing runs its forward again in backward."""

from __future__ import annotations

import torch
from torch import Tensor

#: How many batches are remembered: so many forwards may lie between a batch's own forward and its backward.
REMEMBERED = 64


def no_batches(width: int) -> Tensor:
    """A memory ``[REMEMBERED, width]`` of no batch. It is int64, which no cast of a module to another dtype changes."""
    return torch.full((REMEMBERED, width), -1, dtype=torch.int64)


def bits_of(values: Tensor) -> Tensor:
    """Floating-point numbers as int64."""
    return values.view({4: torch.int32, 8: torch.int64}[values.element_size()]).long()


def find_batch(memory: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a batch is remembered, 0-dim bool, and the rest of its row; the host does not wait for them.

    Args:
        memory: ``[REMEMBERED, width]``, a row for each batch.
        key: ``[n]`` int64, what a row begins with.
    """
    same = (memory[:, : len(key)] == key).all(1)
    return same.any(), torch.where(same[:, None], memory[:, len(key) :], 0).sum(0)


def with_batch(memory: Tensor, row: Tensor, new: Tensor) -> Tensor:
    """The memory with another batch in the place of the oldest, where ``new`` (0-dim bool) is true."""
    return torch.where(new, torch.cat([memory[1:], row[None]]), memory)
