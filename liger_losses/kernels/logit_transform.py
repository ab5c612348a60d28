"""How projections become logits: bias, scale, soft-cap and temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.tracing import record


@record
@dataclass(frozen=True)
class LogitTransform:
    """``logits = softcap(logit_scale * (hidden_states @ weight.T + bias)) / temperature``

    with ``softcap(x) = softcap * tanh(x / softcap)`` where a soft-cap is given.

    Args:
        temperature: divisor of the logits, applied last (> 0).
        logit_scale: factor of the projection (Cohere's ``logit_scale``, 1 / Granite's ``logits_scaling``).
        softcap: Gemma's ``final_logit_softcapping`` (> 0) or ``None``.

    Raises:
        TypeError: a value is not a number.
        ValueError: a number is out of its range.
    """

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "logit_scale", "softcap"):
            value = getattr(self, name)
            if value is None and name == "softcap":
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {value!r}.")
            object.__setattr__(self, name, float(value))  # NumPy's numbers too: kernels take Python's
            if name != "logit_scale" and not 0 < float(value) < math.inf:
                raise ValueError(f"{name} must be a positive finite number, got {value!r}.")
        if not math.isfinite(self.logit_scale):
            raise ValueError(f"logit_scale must be finite, got {self.logit_scale!r}.")

    def __call__(self, projected: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits ``[R, C]`` of projections ``[R, C]``, which are returned themselves where there is nothing to do."""
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
        """``d logits / d projection`` where the soft-cap is flat."""
        return self.logit_scale / self.temperature

    def slope(self, logits: Tensor) -> Tensor:
        """The soft-cap's derivative ``1 - tanh^2``, computed from the logits; 1 without a soft-cap."""
        if self.softcap is None:
            return torch.ones_like(logits)
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1.0)

    def chain_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn d loss / d logits into d loss / d projection, in place."""
        if self.softcap is not None:
            grad.mul_(self.slope(logits))
        if self.factor != 1.0:
            grad.mul_(self.factor)
        return grad

    def for_kernel(self) -> KernelTransform:
        """The transform as a kernel argument."""
        if self.softcap is None:
            return KernelTransform(None if self.factor == 1.0 else float(self.factor), None)
        return KernelTransform(float(self.factor), float(self.softcap / self.temperature))


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


class KernelTransform(NamedTuple):
    """A :class:`LogitTransform` in a kernel: ``logits = cap tanh(factor / cap x)``, or ``factor x`` without a cap.

    Kernels ask what is ``None`` in it: Triton 3.6 cannot compare a tuple that holds ``None``.
    """

    factor: float | None  # logit_scale / temperature; None for 1 without a cap
    cap: float | None  # softcap / temperature


@jit
def transform_block(x, bias, columns, inside, transform):
    """Logits of projections ``x [..., C]`` (or one of them): ``bias`` is a pointer or None, read at ``columns [C]``."""
    if bias is not None:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if transform.cap is not None:
        x = transform.cap * (2 * tl.sigmoid(2 * transform.factor / transform.cap * x) - 1)
    elif transform.factor is not None:
        x = x * transform.factor
    return x


@jit
def load_logits(projected, bias, columns, inside, transform):
    """Logits at ``columns`` of a row whose projections begin at ``projected``."""
    x = tl.load(projected + columns, mask=inside, other=0.0)
    if bias is not None or transform.factor is not None:
        x = transform_block(x, bias, columns, inside, transform)
    return x


@jit
def transform_gradient(grad, logits, transform):
    """From d loss / d logits to d loss / d projections."""
    if transform.cap is not None:
        tanh = logits / transform.cap
        grad *= 1 - tanh * tanh
    if transform.factor is not None:
        grad *= transform.factor
    return grad
