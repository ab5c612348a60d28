"""Sums and gathers over the batches of all data-parallel processes, without gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.kernels.tracing import state


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_processes(values: Tensor) -> Tensor:
    """All processes' values, added up entry by entry; the values themselves where there is one."""
    if world_size() > 1 and not state.shapes_only:
        values = values.clone()
        dist.all_reduce(values)
    return values


def gather_over_processes(values: Tensor) -> Tensor:
    """All processes' values ``[n]``, of which each may have another number."""
    if world_size() == 1 or state.shapes_only:
        return values
    gathered: list[Tensor] = [values] * world_size()
    dist.all_gather_object(gathered, values.cpu())
    return torch.cat(gathered).to(values.device)
