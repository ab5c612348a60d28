"""Products with the head's weight, in the dtype that the hardware multiplies. T tokens, H hidden size, V vocabulary."""

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
        operand_dtype: dtype that both operands of a product are cast to.
        weight_chunk: rows of the weight that are cast at once; V when no cast is needed.
    """

    weight: Tensor
    operand_dtype: torch.dtype
    weight_chunk: int

    def weight_chunks(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """``(first, last, weight[first:last])`` in the operand dtype, over vocabulary rows ``start`` to ``stop``."""
        for first in range(start, stop, self.weight_chunk):
            last = min(first + self.weight_chunk, stop)
            yield first, last, self.weight[first:last].to(self.operand_dtype)

    def into(self, out: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
        """``hidden @ weight[start:stop].T``.

        Args:
            out: ``[T, stop - start]``, fp32 or fp64.
            hidden: ``[T, H]`` in the operand dtype.
        """
        for first, last, weight in self.weight_chunks(start, stop):
            matmul_into(out[:, first - start : last - start], hidden, weight.t())
        return out

    def back_into(self, out: Tensor, grad: Tensor, start: int, *, accumulate: bool = False) -> Tensor:
        """``grad @ weight[start : start + C]``: the gradient of the hidden states.

        Args:
            out: ``[T, H]``.
            grad: ``[T, C]`` in the operand dtype.
            accumulate: add to ``out`` instead of overwriting it.
        """
        for first, last, weight in self.weight_chunks(start, start + grad.shape[1]):
            matmul_into(out, grad[:, first - start : last - start], weight, accumulate=accumulate or first > start)
        return out


def can_fuse(weight: Tensor, operand: torch.dtype, backend: str) -> bool:
    """Whether one Triton kernel can compute both the product with this weight and its epilogue."""
    return backend == "triton" and weight.dtype == operand and operand in HALF_DTYPES and weight.stride(1) == 1


def operand_dtype(compute_dtype: torch.dtype, device: torch.device, backend: str | None = None) -> torch.dtype:
    """The dtype of the products' operands: half precision on CUDA, and fp32 where CPU libraries would round products.

    Triton's kernels multiply half precision on the CPU too, in their interpreter.
    """
    if compute_dtype in HALF_DTYPES and device.type != "cuda" and backend != "triton":
        return torch.float32
    return compute_dtype
