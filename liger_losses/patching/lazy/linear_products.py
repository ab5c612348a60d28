"""``F.linear`` with a head's rows, also if they are quantized, or shared by the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine import QuantizedWeight
from liger_losses.chunked.engine.ranks import ALONE, Ranks
from liger_losses.kernels.autograd import once_differentiable


def linear(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    quantized: QuantizedWeight | None = None,
    ranks: Ranks = ALONE,
    cast: torch.dtype | None = None,
) -> Tensor:
    """``hidden_states @ [quantized, weight].T + bias`` of all ranks' rows, ``[..., V]``, the same on each rank.

    Args:
        hidden_states: ``[..., H]``, or ``[..., H + r]``; the same on each rank.
        weight, bias: ``[V_r, H]``, ``[V_r]``; beside a quantized weight ``[V_r, r]``.
        quantized: ``[V_r, H]``, which gets no gradient.
        ranks: which rows these are.
        cast: autocast's dtype, or ``None``.
    """
    if quantized is None and ranks.size == 1:
        return F.linear(hidden_states, weight, bias)
    dtype = cast or hidden_states.dtype
    hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    if quantized is not None:
        weight = torch.cat([quantized.rows(0, len(weight)).to(dtype), weight], 1)
    with torch.autocast(hidden_states.device.type, enabled=False):
        hidden_states = _OnEachRank.apply(ranks, hidden_states) if ranks.size > 1 else hidden_states
        logits = F.linear(hidden_states, weight, None if bias is None else bias.to(dtype))
        return _OfAllRanks.apply(ranks, logits) if ranks.size > 1 else logits


class _OnEachRank(torch.autograd.Function):
    """The hidden states, whose gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, hidden_states: Tensor) -> Tensor:
        ctx.ranks = ranks
        return hidden_states.view_as(hidden_states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.ranks.sum_(gradient.clone())


class _OfAllRanks(torch.autograd.Function):
    """The columns of all ranks, from each rank's ``[..., V_r]``."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, logits: Tensor) -> Tensor:
        ctx.ranks = ranks
        columns = ranks.whole(logits.flatten(0, -2).t())
        return columns.t().contiguous().view(*logits.shape[:-1], len(columns))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient[..., ctx.ranks.columns(gradient.shape[-1])]
