"""The last layer, in the dtype that the hardware multiplies in. T tokens, H hidden size, V vocabulary size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_losses.kernels.matmul import HALF_DTYPES, matmul_into


@dataclass(frozen=True)
class Projection:
    """``hidden_states @ weight.T``.

    Args:
        weight: ``[V, H]``.
        operand_dtype: what both sides of a product are cast to.
        slab: how many rows of the weight are cast at once; V when no cast is needed.
    """

    weight: Tensor
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

    def into(self, out: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
        """The projection on the vocabulary's columns ``start`` to ``stop``.

        Args:
            out: ``[T, stop - start]``, fp32 or fp64.
            hidden: ``[T, H]`` in the operand dtype.
        """
        for first, last, weight in self.weight_slabs(start, stop):
            matmul_into(out[:, first - start : last - start], hidden, weight.t())
        return out

    def back_into(self, out: Tensor, grad: Tensor, start: int, *, accumulate: bool = False) -> Tensor:
        """The product of gradients on the vocabulary's columns from ``start`` with the head: of the hidden states.

        Args:
            out: ``[T, H]``.
            grad: ``[T, C]`` in the operand dtype.
            accumulate: add to ``out`` instead of overwriting it.
        """
        for first, last, weight in self.weight_slabs(start, start + grad.shape[1]):
            matmul_into(out, grad[:, first - start : last - start], weight, accumulate=accumulate or first > start)
        return out


def can_fuse(weight: Tensor, operand: torch.dtype, backend: str) -> bool:
    """Whether one Triton kernel takes the product with this weight and what follows it."""
    return backend == "triton" and weight.dtype == operand and operand in HALF_DTYPES and weight.stride(1) == 1


def operand_dtype(compute_dtype: torch.dtype, device: torch.device, backend: str | None = None) -> torch.dtype:
    """Half precision is multiplied as it is on CUDA; elsewhere in fp32, where products would be rounded.

    So it is where Triton's kernels were asked for elsewhere, in their interpreter.
    """
    if compute_dtype in HALF_DTYPES and device.type != "cuda" and backend != "triton":
        return torch.float32
    return compute_dtype
