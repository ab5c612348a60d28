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
        tensors = hidden_states, weight, None if bias is None else bias.to(dtype)
        return F.linear(*tensors) if ranks.size == 1 else _OfAllRanks.apply(ranks, *tensors)


class _OfAllRanks(torch.autograd.Function):
    """The columns of all ranks; the gradient of the hidden states is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.ranks = ranks
        ctx.save_for_backward(hidden_states, weight)
        columns = ranks.whole(F.linear(hidden_states, weight, bias).flatten(0, -2).t())
        return columns.t().contiguous().view(*hidden_states.shape[:-1], len(columns))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_states, weight), (_, needs_hidden, needs_weight, needs_bias) = ctx.saved_tensors, ctx.needs_input_grad
        gradient = gradient[..., ctx.ranks.columns(gradient.shape[-1])]
        rows = gradient.flatten(0, -2)
        return (
            None,
            ctx.ranks.sum_(gradient @ weight) if needs_hidden else None,
            rows.t() @ hidden_states.flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )
