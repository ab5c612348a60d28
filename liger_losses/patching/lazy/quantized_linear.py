"""A linear layer whose weight is quantized: its logits, with some rows dequantized at a time.

V vocabulary size, H hidden size, r columns of an ordinary weight beside the quantized one (adapters).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine import QuantizedWeight
from liger_losses.chunked.engine.plan import blocks
from liger_losses.kernels.autograd import once_differentiable

#: Bytes of the rows that are dequantized at once.
_ROWS_BYTES = 64 * 2**20


def quantized_linear(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, quantized: QuantizedWeight, cast: torch.dtype | None
) -> Tensor:
    """``F.linear(hidden_states, [quantized, weight], bias)``, differentiable by all but the quantized weight.

    Args:
        hidden_states: ``[..., H + r]``.
        weight, bias: ``[V, r]``, ``[V]``.
        quantized: ``[V, H]``.
        cast: autocast's dtype, or ``None``.
    """
    dtype = cast or hidden_states.dtype
    tensors = [None if t is None else t.to(dtype) for t in (hidden_states, weight, bias)]
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits: Tensor = _QuantizedLinear.apply(quantized, *tensors)
    return logits


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, quantized: QuantizedWeight, hidden_states: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.quantized, ctx.with_bias = quantized, bias is not None
        ctx.save_for_backward(hidden_states, weight)
        logits = hidden_states.new_empty(*hidden_states.shape[:-1], len(weight))
        for rows in _slabs(quantized):
            part = None if bias is None else bias[rows]
            logits[..., rows] = F.linear(hidden_states, _rows(quantized, weight, rows), part)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        hidden_states, weight = ctx.saved_tensors
        grad_hidden, flat = None, gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(torch.float32, hidden_states.dtype)
            total = hidden_states.new_zeros(len(flat), hidden_states.shape[-1], dtype=wide)
            for rows in _slabs(ctx.quantized):
                total += flat[:, rows] @ _rows(ctx.quantized, weight, rows)
            grad_hidden = total.to(hidden_states.dtype).view(hidden_states.shape)
        inputs = hidden_states.flatten(0, -2)[:, ctx.quantized.shape[1] :]
        return None, grad_hidden, flat.t() @ inputs, flat.sum(0) if ctx.with_bias else None


def _slabs(quantized: QuantizedWeight) -> list[slice]:
    return blocks(quantized.shape[0], _ROWS_BYTES // (8 * quantized.shape[1]))


def _rows(quantized: QuantizedWeight, weight: Tensor, rows: slice) -> Tensor:
    dequantized = quantized.rows(rows.start, rows.stop).to(weight.dtype)
    return torch.cat([dequantized, weight[rows]], 1) if weight.shape[1] else dequantized
