"""Modules over the kernels, with the parameter names of transformers: state dicts load both ways."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_losses.kernels.glu import glu, glu_linear
from liger_losses.kernels.layer_norm import layer_norm
from liger_losses.kernels.plain import is_plain_linear
from liger_losses.kernels.rms_norm import gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """``xhat (offset + weight)`` with ``xhat = x / sqrt(mean(x^2) + eps)``.

    Args:
        hidden_size: H, of the last dimension.
        eps: added to the mean square.
        offset: added to the weight; Gemma's is 1. The weight begins at ``1 - offset``.
        multiply: ``cast_first`` (Llama) or ``fp32`` (Gemma, OLMo 2), as explained in
            :func:`liger_losses.kernels.rms_norm.rms_norm`.
        elementwise_affine: whether there is a weight.
        device, dtype: of the weight.

    Shape:
        ``[..., H]`` to ``[..., H]``.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        multiply: str = "cast_first",
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.offset, self.multiply = hidden_size, eps, offset, multiply
        weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The norm alone, without a scale."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, multiply=self.multiply)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, multiply={self.multiply!r}"


class GatedRMSNorm(nn.Module):
    """``rms_norm(x) silu(gate)`` (Qwen3-Next), or ``rms_norm(x silu(gate))`` with ``gate_first`` (Mamba 2).

    Args:
        hidden_size: H, of the last dimension.
        eps: added to the mean square.
        gate_first: whether the gate is applied before the norm.
        multiply: ``cast_first`` or ``fp32``.
        device, dtype: of the weight.

    Shape:
        ``x`` and ``gate`` ``[..., H]`` to ``[..., H]``.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        gate_first: bool = False,
        multiply: str = "cast_first",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.gate_first, self.multiply = hidden_size, eps, gate_first, multiply
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps, gate_first=self.gate_first, multiply=self.multiply)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, gate_first={self.gate_first}, multiply={self.multiply!r}"


class LayerNorm(nn.Module):
    """``(x - mean(x)) / sqrt(var(x) + eps) weight + bias``, over the last dimension.

    Args:
        hidden_size: H, of the last dimension.
        eps: added to the variance.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias, where there is a weight.
        device, dtype: of the parameters.

    Shape:
        ``[..., H]`` to ``[..., H]``.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        for name, value, used in (("weight", 1.0, elementwise_affine), ("bias", 0.0, elementwise_affine and bias)):
            vector = torch.full((hidden_size,), value, device=device, dtype=dtype or torch.get_default_dtype())
            self.register_parameter(name, nn.Parameter(vector) if used else None)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class _GatedMLP(nn.Module):
    activation: str

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not is_plain_linear(self.down_proj):
            return self.down_proj(glu(gate, up, self.activation))
        return glu_linear(gate, up, self.down_proj.weight, self.down_proj.bias, self.activation)


class SwiGLUMLP(_GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, as in Llama.

    Args:
        hidden_size: H, of the last dimension.
        intermediate_size: I, of what is gated.
        bias: whether the projections have biases.
        device, dtype: of the parameters.

    Shape:
        ``[..., H]`` to ``[..., H]``.

    Source: Shazeer, arXiv:2002.05202.
    """

    activation = "silu"


class GeGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))`` with the tanh approximation of GELU, as in Gemma.

    Args:
        hidden_size, intermediate_size, bias, device, dtype: as in :class:`SwiGLUMLP`.
        approximate: ``tanh``, or ``none`` for the exact GELU.

    Shape:
        ``[..., H]`` to ``[..., H]``.

    Raises:
        ValueError: another ``approximate``.

    Source: Shazeer, arXiv:2002.05202.
    """

    activation = "gelu_tanh"
    _ACTIVATIONS: ClassVar[dict[str, str]] = {"tanh": "gelu_tanh", "none": "gelu"}

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        approximate: str = "tanh",
    ) -> None:
        if approximate not in self._ACTIVATIONS:
            raise ValueError(f"approximate must be one of {', '.join(self._ACTIVATIONS)}, got {approximate!r}.")
        super().__init__(hidden_size, intermediate_size, bias, device, dtype)
        self.activation = self._ACTIVATIONS[approximate]
