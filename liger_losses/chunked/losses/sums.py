"""Sums over ranks: over all data-parallel processes, and over the ranks that hold slices of the same sequences.

With slices (context parallelism), each rank of a process group has the whole ``lm_head``, and sums over a sequence's
tokens, and over a batch's, are sums over the ranks too. B sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.checks import check_group


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 of fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    rank, sizes = dist.get_rank(), values.new_zeros(world_size(), dtype=torch.int64)
    sizes[rank] = len(values)
    ends = sum_over_processes(sizes).cumsum(0).tolist()
    gathered = values.new_zeros(ends[-1])
    gathered[ends[rank] - len(values) : ends[rank]] = values
    return sum_over_processes(gathered)


class _Sum(torch.autograd.Function):
    """All ranks' values, added up. Backward adds up the ranks' gradients, or passes them through."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any, sum_gradients: bool) -> Tensor:
        ctx.group = group if sum_gradients else None
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.group is not None:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


def sum_over_group(group: Any, *values: Tensor, sum_gradients: bool = False) -> tuple[Tensor, ...]:
    """Each tensor's sum over the ranks, entry by entry, in its shape and dtype; one collective for all of them.

    Args:
        group: the process group; without one, the values are the sums.
        values: of the same shapes on all ranks; added up in fp64.
        sum_gradients: what follows differs between the ranks (a sum over each rank's own tokens), so that the gradient
            is the sum of all ranks'. Otherwise all ranks compute the same loss from the sums, and each rank's gradient
            is that of the one loss already.
    """
    if group is None:
        return values
    flat = torch.cat([value.reshape(-1).to(torch.float64) for value in values])
    parts = _Sum.apply(flat, group, sum_gradients).split([value.numel() for value in values])
    return tuple(part.view(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True))


def check_sliced(group: Any, shift: bool, reads_order: str | None) -> None:
    """Raise TypeError or ValueError unless a loss can be taken of slices that the ranks of this group hold.

    Args:
        shift: whether the loss shifts labels, which it cannot.
        reads_order: what in the loss depends on the order of a sequence's tokens, which it does not know.
    """
    check_group(group, "cp")
    if shift:
        raise ValueError(
            "with group=, each rank has a slice of the sequences, and the label of its last token is on another "
            "rank: shift the labels before you cut the sequences, and pass shift=False."
        )
    if reads_order is not None:
        raise ValueError(
            f"{reads_order} depends on the position of tokens in their sequences: pass whole sequences, and no group=."
        )
