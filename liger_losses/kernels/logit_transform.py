"""What a model does to the projection before the softmax: bias, scale, soft-cap, temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_losses.kernels._triton import jit, tl


@dataclass(frozen=True)
class LogitTransform:
    """``logits = softcap(logit_scale * (hidden_states @ weight.T + bias)) / temperature``

    with ``softcap(x) = softcap * tanh(x / softcap)`` where a soft-cap is given.

    Args:
        temperature: what the logits are divided by, after everything else (> 0).
        logit_scale: what the projection is multiplied by (Cohere's ``logit_scale``, 1 / Granite's ``logits_scaling``).
        softcap: Gemma's ``final_logit_softcapping`` (> 0) or ``None``.

    Raises:
        ValueError: a number is out of its range.
    """

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "softcap"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {value!r}.")
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"{name} must be a positive finite number, got {value!r}.")
        if not math.isfinite(self.logit_scale):
            raise ValueError(f"logit_scale must be finite, got {self.logit_scale!r}.")

    def __call__(self, projected: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits ``[R, C]`` of a projection ``[R, C]``; the projection itself where there is nothing to do."""
        logits = projected if bias is None else projected + bias
        factor = self.logit_scale / (self.softcap or self.temperature)
        if factor != 1.0:
            logits = logits * factor if bias is None else logits.mul_(factor)
        if self.softcap is None:
            return logits
        logits = torch.tanh(logits) if logits is projected else logits.tanh_()
        return logits.mul_(self.softcap / self.temperature)

    def chain_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """From d loss / d logits to d loss / d projection, in place."""
        if self.softcap is not None:
            # d (softcap * tanh(x / softcap)) / dx = 1 - tanh^2, and tanh is what the logits still hold.
            grad.mul_((logits * (self.temperature / self.softcap)).square_().neg_().add_(1.0))
        if self.logit_scale != self.temperature:
            grad.mul_(self.logit_scale / self.temperature)
        return grad

    def kernel_arguments(self) -> dict[str, float | bool]:
        """What :func:`transform_block` takes besides the projection."""
        return {
            "scale": self.logit_scale,
            "softcap": self.softcap or 1.0,
            "inverse_temperature": 1.0 / self.temperature,
            "HAS_SOFTCAP": self.softcap is not None,
        }


@jit
def transform_block(x, scale, softcap, inverse_temperature, HAS_SOFTCAP: tl.constexpr):
    """Logits of a block of projections, in a kernel."""
    x = x * scale
    if HAS_SOFTCAP:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
    return x * inverse_temperature
