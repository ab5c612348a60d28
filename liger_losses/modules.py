"""Modules over the kernels, with transformers' parameter names: state dicts load in both directions.

All of them map ``[..., H]`` to ``[..., H]``, and take ``device`` and ``dtype`` of their parameters as keywords.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.layers.glu import glu, glu_mlp
from liger_losses.layers.layer_norm import layer_norm
from liger_losses.layers.plain import plain_linear
from liger_losses.layers.rms_norm import gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """``xhat (offset + weight)`` with ``xhat = x / sqrt(mean(x^2) + eps)``, over the last dimension.

    Args:
        hidden_size: H.
        eps: added to the mean square.
        offset: added to the weight, which is initialized to ``1 - offset``; Gemma's is 1.
        multiply: ``cast_first`` (Llama) or ``fp32`` (Gemma, OLMo 2), as in
            :func:`liger_losses.layers.rms_norm.rms_norm`.
        elementwise_affine: whether there is a weight.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        multiply: str = "cast_first",
        elementwise_affine: bool = True,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.offset, self.multiply = hidden_size, eps, offset, multiply
        weight = nn.Parameter(torch.empty(hidden_size, **factory)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight so that the module only normalizes."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, multiply=self.multiply)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, multiply={self.multiply!r}"


class GatedRMSNorm(nn.Module):
    """``rms_norm(x) silu(gate)`` (Qwen3-Next), or ``rms_norm(x silu(gate))`` with ``gate_first`` (Mamba 2).

    Args:
        hidden_size, eps, multiply: as in :class:`RMSNorm`.
        gate_first: whether the gate is applied before the norm.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, gate_first: bool = False, multiply: str = "cast_first", **kwargs: Any
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.gate_first, self.multiply = hidden_size, eps, gate_first, multiply
        self.weight = nn.Parameter(torch.ones(hidden_size, **kwargs))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps, gate_first=self.gate_first, multiply=self.multiply)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, gate_first={self.gate_first}, multiply={self.multiply!r}"


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over a last dimension of ``hidden_size``; the other arguments are the same."""

    def __init__(self, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__((hidden_size,), *args, **kwargs)
        self.hidden_size = hidden_size

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class SwiGLUMLP(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, as in Llama.

    Args:
        hidden_size: H.
        intermediate_size: I, the width of the product.
        bias: whether the projections have biases.

    Source: Shazeer, arXiv:2002.05202.
    """

    activation = "silu"

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, **factory: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, **factory)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = map(plain_linear, (self.gate_proj, self.up_proj, self.down_proj))
        if gate is not None and up is not None and down is not None:
            return glu_mlp(x, gate, up, down, self.activation)
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x), self.activation))


class GeGLUMLP(SwiGLUMLP):
    """:class:`SwiGLUMLP` with GELU, as in Gemma: ``approximate`` is ``tanh``, or ``none`` for the exact GELU.

    Raises:
        ValueError: ``approximate`` is neither.
    """

    def __init__(self, *args: Any, approximate: str = "tanh", **kwargs: Any) -> None:
        if approximate not in ("tanh", "none"):
            raise ValueError(f"approximate must be one of tanh, none, got {approximate!r}.")
        super().__init__(*args, **kwargs)
        self.activation = "gelu_tanh" if approximate == "tanh" else "gelu"
