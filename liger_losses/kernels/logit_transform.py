"""What a model does to the projection before the softmax: bias, scale, soft-cap, temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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

    @property
    def factor(self) -> float:
        """``d logits / d projection`` where the soft-cap is flat: what every gradient is multiplied by."""
        return self.logit_scale / self.temperature

    def slope(self, logits: Tensor) -> Tensor:
        """What the soft-cap multiplies gradients by besides: ``1 - tanh^2``, and tanh is what the logits still hold."""
        if self.softcap is None:
            return torch.ones_like(logits)
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1.0)

    def chain_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """From d loss / d logits to d loss / d projection, in place."""
        if self.softcap is not None:
            grad.mul_(self.slope(logits))
        if self.factor != 1.0:
            grad.mul_(self.factor)
        return grad

    def kernel_arguments(self) -> dict[str, float | bool]:
        """What :func:`transform_block` takes besides the projection."""
        return {
            "scale": self.logit_scale,
            "softcap": self.softcap or 1.0,
            "inverse_temperature": 1.0 / self.temperature,
            "HAS_SCALE": self.factor != 1.0,
            "HAS_SOFTCAP": self.softcap is not None,
        }


class Epilogue(NamedTuple):
    """What turns projections ``[R, C]`` into logits: ``logits = transform(projected + bias)``.

    Args:
        transform: scale, soft-cap and temperature.
        bias: ``[C]``, added to the projections.
        class_weight: ``[C]`` in the logits' dtype, the weights ``c`` of the statistic ``mean_logp``.
    """

    transform: LogitTransform = LogitTransform()
    bias: Tensor | None = None
    class_weight: Tensor | None = None

    def columns(self, columns: slice) -> Epilogue:
        """The epilogue of a slice of the vocabulary."""
        vectors = (None if vector is None else vector[columns] for vector in (self.bias, self.class_weight))
        return Epilogue(self.transform, *vectors)

    def __call__(self, projected: Tensor) -> Tensor:
        """Logits ``[R, C]``; the projections themselves where there is nothing to do."""
        return self.transform(projected, self.bias)


@jit
def transform_block(x, scale, softcap, inverse_temperature, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Logits of a block of projections, in a kernel."""
    if HAS_SOFTCAP:
        x = softcap * inverse_temperature * (2 * tl.sigmoid(2 * scale / softcap * x) - 1)
    elif HAS_SCALE:
        x = x * (scale * inverse_temperature)
    return x
