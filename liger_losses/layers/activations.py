"""Activations of gated linear units and their derivatives: in PyTorch by name, and in Triton."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.kernels._triton import jit, tl


class Activation(NamedTuple):
    """A function of the gate and alpha (which only silu uses), and its derivative with respect to the gate."""

    value: Callable[[Tensor, float], Tensor]
    slope: Callable[[Tensor, float], Tensor]


def _silu(gate: Tensor, alpha: float) -> Tensor:
    return F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(gate * alpha)


def _silu_slope(gate: Tensor, alpha: float) -> Tensor:
    sigmoid = torch.sigmoid(alpha * gate)
    return sigmoid * (1 + alpha * gate * (1 - sigmoid))


def _gelu_slope(gate: Tensor, alpha: float) -> Tensor:
    density = torch.exp(-gate.square() / 2) * (1 / math.sqrt(2 * math.pi))
    return torch.special.ndtr(gate) + gate * density


def _gelu_tanh_slope(gate: Tensor, alpha: float) -> Tensor:
    # (1 + tanh(z)) / 2 = sigmoid(2 z)
    scale, square = 2 * math.sqrt(2 / math.pi), gate.square()
    z = scale * gate * (1 + 0.044715 * square)
    return torch.sigmoid(z) * (1 + torch.sigmoid(-z) * scale * gate * (1 + 3 * 0.044715 * square))


ACTIVATIONS = {
    "silu": Activation(_silu, _silu_slope),
    "gelu": Activation(lambda gate, alpha: F.gelu(gate), _gelu_slope),
    "gelu_tanh": Activation(lambda gate, alpha: F.gelu(gate, approximate="tanh"), _gelu_tanh_slope),
}


@jit
def activate(gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """The activation and its derivative in fp32, as in :data:`ACTIVATIONS`."""
    if ACTIVATION == "gelu":
        below = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        return gate * below, below + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    else:
        if ACTIVATION == "gelu_tanh":
            square = gate * gate
            z = 1.5957691216057308 * gate * (1 + 0.044715 * square)
            gate_slope = 1.5957691216057308 * gate * (1 + 0.134145 * square)
        else:
            z = ALPHA * gate
            gate_slope = z
        e = tl.exp(-z)
        sigmoid = 1 / (1 + e)
        # 1 - sigmoid without cancellation; e is bounded because inf * 0 is NaN.
        complement = tl.minimum(e, 3.0e38) * sigmoid
        return gate * sigmoid, sigmoid * (1 + complement * gate_slope)
