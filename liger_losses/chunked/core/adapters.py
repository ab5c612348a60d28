"""LoRA on a head: its product is added without merging it into the weight.

r rank, V vocabulary size, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_losses.chunked.core.weights import Weights
from liger_losses.kernels.autograd import autocast_dtype


@dataclass(frozen=True, eq=False)
class LowRank:
    """``scale (dropout(h) A^T) B^T``, which is added to a head's products ``h W^T``.

    Args:
        a, b: ``[r, H]``, ``[V, r]``, both differentiable.
        scale: ``lora_alpha / r``, for example.
        dropout: the probability with which hidden states are dropped before A.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    dropout: float = 0.0


def check_adapters(base: Weights, adapters: tuple[LowRank, ...]) -> None:
    """Raise ValueError unless adapters fit the matrix that they are added to."""
    for adapter in adapters:
        if adapter.a.shape[1:] != (base.hidden_size,) or adapter.b.shape != (base.columns, len(adapter.a)):
            raise ValueError(
                f"the adapter's a {tuple(adapter.a.shape)} and b {tuple(adapter.b.shape)} must be [rank, hidden_size] "
                f"and [vocab_size, rank], for a weight {(base.columns, base.hidden_size)}."
            )


def side_by_side(hidden_states: Tensor, adapters: tuple[LowRank, ...]) -> tuple[Tensor, Tensor]:
    """``[h, scale dropout(h) A^T]``, and the columns ``B`` that multiply what is added."""
    autocast = None if hidden_states.dtype == torch.float64 else autocast_dtype(hidden_states.device)
    parts, dtype = [hidden_states], autocast or hidden_states.dtype
    for adapter in adapters:
        dropped = F.dropout(hidden_states, adapter.dropout) if adapter.dropout else hidden_states
        parts.append(F.linear(dropped.to(adapter.a.dtype), adapter.a) * adapter.scale)
    # Adapters may be wider than the model, as PEFT's are: they are rounded to the dtype in which products are taken.
    hidden, columns = torch.cat([part.to(dtype) for part in parts], -1), [adapter.b for adapter in adapters]
    return hidden, columns[0] if len(columns) == 1 else torch.cat(columns, -1)


def adapters_of(layer: Any) -> tuple[nn.Module, tuple[LowRank, ...]]:
    """The layer inside PEFT's LoRA layer, and the active adapters, as its forward adds them.

    Raises:
        TypeError: another kind of adapter than plain LoRA (DoRA, biases, embeddings).
    """
    base = layer.base_layer
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    if layer.disable_adapters or layer.merged:
        return base, ()
    adapters, kind = [], type(layer).__name__
    for name in layer.active_adapters:
        if name in getattr(layer, "lora_embedding_A", ()):
            raise TypeError(
                f"the adapter {name!r} of {kind} belongs to an embedding: it is added to embeddings, not to logits. "
                "Pass the head's layer, or Head(merged_weight, bias)."
            )
        if name not in layer.lora_A:
            continue
        a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        plain = type(dropout) in (nn.Identity, nn.Dropout) and isinstance(a, nn.Linear) and isinstance(b, nn.Linear)
        if not plain or a.bias is not None or b.bias is not None or name in getattr(layer, "lora_variant", {}):
            raise TypeError(
                f"the adapter {name!r} of {kind} is not plain LoRA (it is DoRA, or has a bias); patch the model "
                "(liger_losses.patch), or pass Head(merged_weight, bias)."
            )
        p = dropout.p if isinstance(dropout, nn.Dropout) and layer.training else 0.0
        adapters.append(LowRank(a.weight, b.weight, layer.scaling[name], p))
    return base, tuple(adapters)
