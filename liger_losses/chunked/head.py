"""The last layer: from hidden states to logits, and from gradients of logits back.

T tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_losses.kernels.matmul import HALF_DTYPES, matmul_into


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its projection before the softmax.

    ``logits = softcap(logit_scale * (hidden_states @ weight.T + bias)) / temperature``
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
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"{name} must be a positive finite number, got {value!r}.")
        if not math.isfinite(self.logit_scale):
            raise ValueError(f"logit_scale must be finite, got {self.logit_scale!r}.")

    def apply_(self, projected: Tensor) -> Tensor:
        """From projections to logits, in place."""
        if self.softcap is not None:
            return projected.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        if self.logit_scale != self.temperature:
            projected.mul_(self.logit_scale / self.temperature)
        return projected

    def chain_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """From d loss / d logits to d loss / d projection, in place."""
        if self.softcap is not None:
            # d (softcap * tanh(x / softcap)) / dx = 1 - tanh^2, and tanh is what the logits still hold.
            grad.mul_((logits * (self.temperature / self.softcap)).square_().neg_().add_(1.0))
        if self.logit_scale != self.temperature:
            grad.mul_(self.logit_scale / self.temperature)
        return grad


@dataclass(frozen=True)
class Projection:
    """``lm_head`` in the dtype that the hardware multiplies in.

    Args:
        weight: ``[V, H]``.
        bias: ``[V]`` or ``None``.
        transform: from projections to logits.
        operand_dtype: what both sides of a product are cast to.
        slab: how many rows of the weight are cast at once; V when no cast is needed.
    """

    weight: Tensor
    bias: Tensor | None
    transform: LogitTransform
    operand_dtype: torch.dtype
    slab: int

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def weight_slabs(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """``(first, last, weight[first:last])`` in the operand dtype, over vocabulary rows ``start`` to ``stop``."""
        for first in range(start, stop, self.slab):
            last = min(first + self.slab, stop)
            yield first, last, self.weight[first:last].to(self.operand_dtype)

    def logits_into(self, out: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Logits of the vocabulary's columns ``start`` to ``stop``.

        Args:
            out: ``[T, stop - start]``, fp32 or fp64.
            hidden: ``[T, H]`` in the operand dtype.
        """
        for first, last, weight in self.weight_slabs(start, stop):
            matmul_into(out[:, first - start : last - start], hidden, weight.t())
        if self.bias is not None:
            out.add_(self.bias[start:stop])
        return self.transform.apply_(out)


def operand_dtype(compute_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Half precision is multiplied as it is on CUDA; elsewhere in fp32, where products would be rounded."""
    if compute_dtype in HALF_DTYPES and device.type != "cuda":
        return torch.float32
    return compute_dtype
