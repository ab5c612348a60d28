"""``F.linear`` with a head's rows, also if they are quantized, or shared by the ranks of a process group.

V vocabulary size, V_r rows of this rank, H hidden size, r columns of an ordinary weight beside a quantized one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine import QuantizedWeight
from liger_losses.chunked.engine.plan import blocks
from liger_losses.chunked.engine.ranks import ALONE, Ranks
from liger_losses.chunked.engine.weights import weights_of
from liger_losses.kernels.autograd import once_differentiable

#: Bytes of the rows that are dequantized at once.
_ROWS_BYTES = 64 * 2**20


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
    tensors = [None if t is None else t.to(dtype) for t in (hidden_states, weight, bias)]
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits: Tensor = _Linear.apply(quantized, ranks, *tensors)
    return logits


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, quantized: Any, ranks: Any, hidden_states: Tensor, weight: Tensor, bias: Any) -> Tensor:
        ctx.quantized, ctx.ranks, ctx.with_bias = quantized, ranks, bias is not None
        ctx.save_for_backward(hidden_states, weight)
        weights = weights_of(weight, quantized)
        logits = hidden_states.new_empty(*hidden_states.shape[:-1], len(weight))
        for rows in _blocks(quantized, len(weight)):
            part = None if bias is None else bias[rows]
            logits[..., rows] = F.linear(hidden_states, weights.rows(rows, weight.dtype), part)
        columns = ranks.whole(logits.flatten(0, -2).t())
        return columns.t().contiguous().view(*logits.shape[:-1], len(columns))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        hidden_states, weight = ctx.saved_tensors
        weights, flat = weights_of(weight, ctx.quantized), gradient.flatten(0, -2)
        flat = flat[:, ctx.ranks.columns(flat.shape[1])]
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[2]:
            wide = torch.promote_types(torch.float32, hidden_states.dtype)
            total = hidden_states.new_zeros(len(flat), hidden_states.shape[-1], dtype=wide)
            for rows in _blocks(ctx.quantized, len(weight)):
                total += flat[:, rows] @ weights.rows(rows, weight.dtype)
            grad_hidden = ctx.ranks.sum_(total.to(hidden_states.dtype).view(hidden_states.shape))
        if ctx.needs_input_grad[3]:
            frozen = weights.shape[1] - weight.shape[1]
            grad_weight = flat.t() @ hidden_states.flatten(0, -2)[:, frozen:]
        return None, None, grad_hidden, grad_weight, flat.sum(0) if ctx.with_bias else None


def _blocks(quantized: QuantizedWeight | None, count: int) -> list[slice]:
    """The rows that are there at once."""
    return blocks(count, count if quantized is None else max(1, _ROWS_BYTES // (8 * quantized.shape[1])))
