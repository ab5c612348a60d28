"""How projections become logits: bias, scale, soft-cap and temperature. R rows (tokens), C columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import jit, tl


class KernelTransform(NamedTuple):
    """A :class:`LogitTransform` in a kernel: ``logits = cap tanh(factor / cap x)``, or ``factor x`` without a cap.

    With a temperature per token, factor and cap are for temperature 1, and what :func:`inverse_temperature` loads
    multiplies both.

    Kernels ask what is ``None`` in it: Triton 3.6 cannot compare a tuple that holds ``None``.
    """

    factor: float | None  # logit_scale / temperature; None for 1 without a cap
    cap: float | None  # softcap / temperature
    temperature: Tensor | None = None  # [R] in fp32, of the launch's tokens


@dataclass(frozen=True)
class LogitTransform:
    """``logits = softcap(logit_scale * (hidden_states @ weight.T + bias)) / temperature``

    where ``softcap(x) = softcap * tanh(x / softcap)`` if a soft-cap is given, and ``x`` otherwise.

    Args:
        temperature: divides the logits, after scale and soft-cap (> 0): a number, or a floating-point tensor ``[...]``
            with one for each hidden state. It is a constant; at masked tokens, it may have any value.
        logit_scale: factor of the projection (Cohere's ``logit_scale``, 1 / Granite's ``logits_scaling``).
        softcap: Gemma's ``final_logit_softcapping`` (> 0) or ``None``.

    Raises:
        TypeError: a value is not a number; a temperature per token that is not floating point.
        ValueError: a number is out of its range; a temperature per token that requires a gradient.
    """

    temperature: float | Tensor = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    #: The transform as a kernel argument.
    for_kernel: KernelTransform = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("temperature", "logit_scale", "softcap"):
            value = getattr(self, name)
            if value is None and name == "softcap":
                continue
            if name == "temperature" and isinstance(value, Tensor):
                _check_temperatures(value)
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {value!r}.")
            object.__setattr__(self, name, float(value))  # NumPy's numbers too: kernels take Python's
            if name != "logit_scale" and not 0 < float(value) < math.inf:
                raise ValueError(f"{name} must be a positive finite number, got {value!r}.")
        if not -math.inf < self.logit_scale < math.inf:
            raise ValueError(f"logit_scale must be finite, got {self.logit_scale!r}.")
        object.__setattr__(self, "for_kernel", self._for_kernel())

    def __call__(self, projected: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits ``[R, C]`` of projections ``[R, C]``, which are returned themselves where there is nothing to do."""
        logits, temperature = projected if bias is None else projected + bias, self.column(projected)
        factor = self.logit_scale / (self.softcap or temperature)
        if isinstance(factor, Tensor) or factor != 1.0:
            logits = logits * factor if bias is None else logits.mul_(factor)
        if self.softcap is None:
            return logits
        logits = torch.tanh(logits) if logits is projected else logits.tanh_()
        return logits.mul_(self.softcap / temperature)

    def rows(self, rows: slice | Tensor) -> LogitTransform:
        """The transform of some tokens, where each has a temperature of its own."""
        return replace(self, temperature=self.temperature[rows]) if isinstance(self.temperature, Tensor) else self

    def column(self, logits: Tensor) -> Any:
        """The temperature, which divides logits ``[R, ...]``."""
        temperature = self.temperature
        return temperature.view(-1, *[1] * (logits.dim() - 1)) if isinstance(temperature, Tensor) else temperature

    def factor(self, logits: Tensor) -> Any:
        """``d logits / d projection`` where the soft-cap is flat, a number or a tensor that broadcasts with logits."""
        return self.logit_scale / self.column(logits)

    def slope(self, logits: Tensor) -> Tensor:
        """The soft-cap's derivative ``1 - tanh^2``, computed from the logits; 1 without a soft-cap."""
        if self.softcap is None:
            return torch.ones_like(logits)
        return (logits * (self.column(logits) / self.softcap)).square_().neg_().add_(1.0)

    def chain_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn d loss / d logits into d loss / d projection, in place."""
        if self.softcap is not None:
            grad.mul_(self.slope(logits))
        factor = self.factor(logits)
        if isinstance(factor, Tensor) or factor != 1.0:
            grad.mul_(factor)
        return grad

    @property
    def said(self) -> str:
        """In words, for messages; ranks that share a vocabulary compare these, without a tensor's values."""
        return f"temperature {said(self.temperature)}, logit_scale {self.logit_scale}, softcap {self.softcap}"

    def _for_kernel(self) -> KernelTransform:
        if isinstance(self.temperature, Tensor):
            return KernelTransform(float(self.logit_scale), self.softcap, self.temperature)
        if self.softcap is None:
            factor = self.logit_scale / self.temperature
            return KernelTransform(None if factor == 1.0 else float(factor), None)
        return KernelTransform(float(self.logit_scale / self.temperature), float(self.softcap / self.temperature))


def _check_temperatures(temperature: Tensor) -> None:
    """Raise TypeError or ValueError for a temperature per token that can be none, whatever its values."""
    if not temperature.is_floating_point():
        raise TypeError(
            f"temperature must be a number, or a floating-point tensor with one for each token, got "
            f"{temperature.dtype} of shape {tuple(temperature.shape)}; convert it with .float()."
        )
    if temperature.requires_grad:
        raise ValueError("temperature requires a gradient, but temperatures get none; pass temperature.detach().")


def said(temperature: float | Tensor) -> str:
    """A temperature in messages."""
    return "one per token" if isinstance(temperature, Tensor) else str(temperature)


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

    def rows(self, rows: slice) -> Epilogue:
        """The epilogue of some tokens, where each has a temperature of its own."""
        return self._replace(transform=self.transform.rows(rows))

    def columns(self, columns: slice) -> Epilogue:
        """The epilogue of a slice of the vocabulary."""
        if self.bias is None and self.class_weight is None:
            return self
        vectors = [None if vector is None else vector[columns] for vector in (self.bias, self.class_weight)]
        return Epilogue(self.transform, *vectors)

    def __call__(self, projected: Tensor) -> Tensor:
        """Logits ``[R, C]``; the projections themselves where there is nothing to do."""
        return self.transform(projected, self.bias)


@jit
def inverse_temperature(transform, rows, valid, AXIS: tl.constexpr):
    """1 / temperature of the ``rows`` that are ``valid``, for a temperature per token; otherwise an unused 1.

    Of one row or of a vector of rows (``AXIS`` 0), or ``[R, 1]`` of a tile's (``AXIS`` 1).
    """
    inverse = 1.0
    if transform.temperature is not None:
        inverse = 1.0 / tl.load(transform.temperature + rows, mask=valid, other=1.0)
        if AXIS == 1:
            inverse = inverse[:, None]
    return inverse


@jit
def transform_block(x, bias, columns, inside, transform, inverse):
    """Logits of projections ``x [..., C]`` (or one of them): ``bias`` is a pointer or None, read at ``columns [C]``.

    ``inverse`` is what :func:`inverse_temperature` returned.
    """
    if bias is not None:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if transform.cap is not None:
        capped = 2 * tl.sigmoid(2 * transform.factor / transform.cap * x) - 1
        if transform.temperature is not None:
            x = transform.cap * inverse * capped
        else:
            x = transform.cap * capped
    elif transform.temperature is not None:
        x = x * (transform.factor * inverse)
    elif transform.factor is not None:
        x = x * transform.factor
    return x


@jit
def load_logits(projected, bias, columns, inside, transform, inverse):
    """Logits at ``columns`` of a row whose projections begin at ``projected``."""
    x = tl.load(projected + columns, mask=inside, other=0.0)
    if bias is not None or transform.factor is not None:
        x = transform_block(x, bias, columns, inside, transform, inverse)
    return x


@jit
def capped_tanh(logits, transform, inverse):
    """The soft-cap's tanh, from the logits."""
    if transform.temperature is not None:
        tanh = logits / (transform.cap * inverse)
    else:
        tanh = logits / transform.cap
    return tanh


@jit
def transform_gradient(grad, logits, transform, inverse):
    """From d loss / d logits to d loss / d projections."""
    if transform.cap is not None:
        tanh = capped_tanh(logits, transform, inverse)
        grad *= 1 - tanh * tanh
    if transform.temperature is not None:
        grad *= transform.factor * inverse
    elif transform.factor is not None:
        grad *= transform.factor
    return grad
