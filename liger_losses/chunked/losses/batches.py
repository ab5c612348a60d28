"""Batches that a loss's own state depends on: sums over all data-parallel processes, and which ones it has counted."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.chunked.engine.agreement import all_gather


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_processes(values: Tensor) -> Tensor:
    """All processes' values, added up entry by entry; the values themselves where there is one."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def gather_over_processes(values: Tensor) -> Tensor:
    """All processes' values ``[n]``, of which each may have another number."""
    if world_size() == 1:
        return values
    sizes = values.new_zeros(world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = len(values)
    counts = sum_over_processes(sizes).tolist()
    padded = values.new_zeros(max(1, *counts))
    padded[: len(values)] = values
    gathered = padded.new_empty(len(counts), len(padded))
    all_gather(gathered.view(-1), padded)
    return torch.cat([row[:count] for row, count in zip(gathered, counts, strict=True)])


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
