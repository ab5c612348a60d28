"""Layers for ``kernels.kernelize``: only a ``forward`` each, which reads the attributes of the module it is put into.

A layer has no constructor and no attributes of its own but the two flags, and as many arguments as the ``forward`` it
replaces: ``kernels`` refuses others.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, cat, nn

from liger_losses.chunked.losses.cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_losses.layers.glu import glu, glu_mlp
from liger_losses.layers.layer_norm import layer_norm
from liger_losses.layers.plain import plain_linear
from liger_losses.layers.rms_norm import gated_rms_norm, rms_norm
from liger_losses.layers.rope import rope

__all__ = [
    "GatedRMSNorm",
    "GeGLUMLP",
    "LayerNorm",
    "LinearCrossEntropy",
    "RMSNorm",
    "RMSNormFP32",
    "RMSNormZeroCentered",
    "RotaryPosEmb",
    "SwiGLUMLP",
]

_cross_entropy = LigerFusedLinearCrossEntropyLoss()


def _eps(module: Any) -> float:
    eps: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return eps


class RMSNorm(nn.Module):
    """Llama's: ``weight * xhat.to(x.dtype)``. Reads ``weight`` and ``variance_epsilon`` or ``eps``."""

    can_torch_compile = True
    weight: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, _eps(self))


class RMSNormFP32(nn.Module):
    """OLMo 2's: ``(weight * xhat).to(x.dtype)``. Reads the same attributes as :class:`RMSNorm`."""

    can_torch_compile = True
    weight: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, _eps(self), multiply="fp32")


class RMSNormZeroCentered(nn.Module):
    """Gemma's and Qwen3-Next's: ``((1 + weight) * xhat).to(x.dtype)``. Reads the same attributes."""

    can_torch_compile = True
    weight: Any

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, _eps(self), offset=1.0, multiply="fp32")


class GatedRMSNorm(nn.Module):
    """Qwen3-Next's ``rms_norm(x) silu(gate)``. Reads the same attributes, and ``activation`` if there is one."""

    can_torch_compile = True
    weight: Any

    def forward(self, hidden_states: Tensor, gate: Any = None) -> Tensor:
        activation = getattr(self, "activation", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(
                f"GatedRMSNorm gates with silu, this module with {activation!r}; leave the layer out here."
            )
        return gated_rms_norm(hidden_states, gate, self.weight, _eps(self))


class LayerNorm(nn.Module):
    """``torch.nn.LayerNorm``; PyTorch's own where it normalizes several dimensions."""

    can_torch_compile = True
    normalized_shape: Any
    weight: Any
    bias: Any
    eps: Any

    def forward(self, input: Tensor) -> Tensor:
        if len(self.normalized_shape) > 1:
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return layer_norm(input, self.weight, self.bias, self.eps)


def _mlp(module: Any, x: Tensor, activation: str) -> Any:
    gate, up, down = map(plain_linear, (module.gate_proj, module.up_proj, module.down_proj))
    if gate is not None and up is not None and down is not None:
        return glu_mlp(x, gate, up, down, activation)
    return module.down_proj(glu(module.gate_proj(x), module.up_proj(x), activation))


class SwiGLUMLP(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``. Reads the three projections."""

    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _mlp(self, x, "silu")
        return out


class GeGLUMLP(nn.Module):
    """:class:`SwiGLUMLP` with the tanh approximation of GELU, as in Gemma."""

    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _mlp(self, x, "gelu_tanh")
        return out


class RotaryPosEmb(nn.Module):
    """transformers' ``apply_rotary_pos_emb`` with halves ``(-x2, x1)``; results have the dtypes of q and k.

    cos and sin are as wide as the heads, or half as wide where they hold each angle once (gpt-oss). Pairs
    ``(x[2i], x[2i+1])`` are not told from halves.
    """

    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if 2 * cos.shape[-1] == q.shape[-1]:
            cos, sin = cat((cos, cos), -1), cat((sin, sin), -1)
        if cos.shape[-1] != q.shape[-1]:
            raise ValueError(f"cos must be as wide as the heads, {q.shape[-1]}, or half as wide, got {cos.shape[-1]}.")
        rotated = rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotated[0].to(q.dtype), rotated[1].to(k.dtype)


class LinearCrossEntropy(nn.Module):
    """The mean cross-entropy of ``hidden_states @ weight.T + bias`` at the labels, which are shifted already."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor, weight: Tensor, labels: Tensor, bias: Any = None) -> Tensor:
        loss: Tensor = _cross_entropy(weight, hidden_states, labels, bias)
        return loss
