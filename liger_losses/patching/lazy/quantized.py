"""Lazy logits of a layer whose weight is quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.chunked.engine import Head, QuantizedWeight
from liger_losses.patching.lazy.deferred import DeferredLogits
from liger_losses.patching.lazy.tensor import LazyLogits, autocast_of


def lazy_quantized_linear(
    hidden_states: Tensor, quantized: QuantizedWeight, bias: Tensor | None, compute_dtype: torch.dtype | None = None
) -> Tensor:
    """Lazy logits ``[..., V]`` of a frozen quantized layer, in the dtype of the hidden states, or autocast's.

    Args:
        hidden_states: ``[..., H]``.
        quantized: ``[V, H]``.
        bias: ``[V]`` or ``None``.
        compute_dtype: what the layer rounds hidden states to, before the product; its result has their own dtype then.
    """
    autocast = autocast_of(hidden_states)
    dtype = hidden_states.dtype if compute_dtype is not None else autocast or hidden_states.dtype
    operand = compute_dtype or hidden_states.dtype
    # A copy: a bias that is trained may have changed by the time that the logits are read.
    bias = None if bias is None else bias.to(operand, copy=True)
    head = Head(quantized, bias)  # type: ignore[arg-type]
    deferred = DeferredLogits(hidden_states.to(operand), head, autocast=autocast)
    return LazyLogits.make(deferred, dtype)
