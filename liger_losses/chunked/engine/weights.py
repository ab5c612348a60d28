"""What multiplies hidden states into projections: a matrix, or rows that are dequantized when they are needed.

T tokens, H hidden size, V vocabulary size, C columns of a slice of the vocabulary. A head's adapters become columns of
its weight (:mod:`liger_losses.chunked.engine.adapters`), so that there are two kinds: :class:`Weights` and
:class:`Quantized`. Nothing outside this file asks which of them a head has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from liger_losses.chunked.core.quantizers import QuantizedWeight
from liger_losses.kernels.matmul import HALF_DTYPES, matmul_into, wide_dtype

#: Rows and columns of the products of a :class:`Projection` that is fixed, on a CPU and elsewhere; and what the hidden
#: size is padded to a multiple of: BLAS sums the last rows of a product of odd sizes in another order than the first.
_FIXED_PRODUCT, _FIXED_PRODUCT_GPU, _FIXED_DEPTH = (64, 1024), (512, 8192), 8
#: How many parts a range of rows is dequantized in. The temporaries of a part are small, and stay in a GPU's cache.
PARTS = 5


class Factor(NamedTuple):
    """Rows of some of the hidden states' columns: a tensor that may get a gradient, or part after part."""

    columns: slice
    rows: Tensor | None
    #: Yields the column of a part's first row, and its rows.
    parts: Callable[[], Iterator[tuple[int, Tensor]]] | None = None


@dataclass(frozen=True, eq=False)
class Weights:
    """Rows ``[V, H]`` of a head: a floating-point matrix, unless it is :class:`Quantized`."""

    trained: Tensor  # [V, r], the last r columns of the rows, which get a gradient

    @property
    def shape(self) -> tuple[int, int]:
        return self.trained.shape[0], self.trained.shape[1]

    def columns(self, part: slice) -> Weights:
        """The weights of some columns of the vocabulary."""
        return Weights(self.trained[part])

    def rows(self, ids: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows ``[C, H]`` in this dtype; the memory is shared where that needs no copy."""
        whole = isinstance(ids, slice) and ids in (slice(None), slice(0, self.trained.shape[0]))
        rows = self.trained if whole else self.trained[ids]
        return rows if rows.dtype == dtype else rows.to(dtype)

    def factors(self, dtype: torch.dtype, memory: int) -> list[Factor]:
        """All rows, of which those that are computed in this dtype take at most so many bytes at a time."""
        return [Factor(slice(None), self.trained)]

    def matrix(self, dtype: torch.dtype) -> Tensor | None:
        """All rows, if they are in memory in this dtype, as fused kernels read them."""
        return self.trained if self.trained.dtype == dtype and self.trained.stride(1) == 1 else None

    def copied_row_bytes(self, dtype: torch.dtype) -> int:
        """What :meth:`rows` allocates for each row: the row in this dtype, and temporaries; 0 for a matrix."""
        if self.trained.dtype == dtype:
            return 0
        # A part of grad_weight is computed wide before it is rounded.
        return self.trained.shape[1] * (dtype.itemsize + wide_dtype(dtype).itemsize)

    def dequantized_bytes(self, dtype: torch.dtype) -> int:
        """The size of a copy that is made of all rows, where the workspace has room for it; 0 for a matrix."""
        return 0

    def dequantized(self, dtype: torch.dtype) -> Weights:
        """The same rows as a matrix, without a gradient where they were quantized."""
        return self


@dataclass(frozen=True, eq=False)
class Quantized(Weights):
    """``[codes, trained]``: frozen columns that are dequantized, and beside them the columns of adapters,
    ``[V, r]``."""

    codes: QuantizedWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.trained.shape[0], self.codes.shape[1] + self.trained.shape[1]

    def columns(self, part: slice) -> Quantized:
        start, stop, _ = part.indices(len(self.trained))
        return Quantized(self.trained[part], self.codes.part(start, stop))

    def rows(self, ids: slice | Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(ids, Tensor):
            # Formats dequantize ranges: of ids, the range from the first to the last one of each run is read.
            return torch.cat([self.rows(slice(i, i + 1), dtype) for i in ids.tolist()])
        start, stop, _ = ids.indices(len(self.trained))
        found = torch.empty(stop - start, self.shape[1], dtype=dtype, device=self.trained.device)
        size, step = self.codes.shape[1], -(-(stop - start) // PARTS)
        for first in range(start, stop, max(step, 1)):
            last = min(first + step, stop)
            found[first - start : last - start, :size].copy_(self.codes.rows(first, last))
        if self.trained.shape[1]:
            found[:, size:].copy_(self.trained[ids])
        return found

    def factors(self, dtype: torch.dtype, memory: int) -> list[Factor]:
        count, size = self.codes.shape
        step = max(1, memory // (size * (self.codes.temporary_bytes + dtype.itemsize)))

        def parts() -> Iterator[tuple[int, Tensor]]:
            for first in range(0, count, step):
                yield first, self.codes.rows(first, min(first + step, count)).to(dtype)

        beside = [Factor(slice(size, None), self.trained)] if self.trained.shape[1] else []
        return [Factor(slice(size), None, parts), *beside]

    def matrix(self, dtype: torch.dtype) -> None:
        return None

    def copied_row_bytes(self, dtype: torch.dtype) -> int:
        temporaries = -(-self.codes.temporary_bytes // PARTS)
        return self.shape[1] * dtype.itemsize + self.codes.shape[1] * temporaries + super().copied_row_bytes(dtype)

    def dequantized_bytes(self, dtype: torch.dtype) -> int:
        return self.shape[0] * self.shape[1] * dtype.itemsize

    def dequantized(self, dtype: torch.dtype) -> Weights:
        return Weights(self.rows(slice(None), dtype).detach())


def weights_of(weight: Tensor, quantized: QuantizedWeight | None) -> Weights:
    """``[quantized, weight]``."""
    return Weights(weight) if quantized is None else Quantized(weight, quantized)


def can_fuse(weights: Weights, operand: torch.dtype, backend: str, dequantized: bool = False) -> bool:
    """Whether one Triton kernel can compute both the product with these weights and its epilogue.

    ``dequantized`` says that quantized weights are a matrix by then, in the operand dtype.
    """
    ready = weights.matrix(operand) is not None or (dequantized and weights.dequantized_bytes(operand) > 0)
    return backend == "triton" and ready and operand in HALF_DTYPES


@dataclass(frozen=True)
class Projection:
    """Products with weights in the operand dtype, of which ``chunk`` rows at a time are copied, where any are."""

    weights: Weights
    dtype: torch.dtype
    chunk: int
    fixed: bool = False  # projections are products of one size, so that a token's bits are the same in any batch
    fused: bool = False  # whether a Triton kernel can compute a product together with its epilogue

    def columns(self, part: slice) -> Projection:
        """The products with some columns of the vocabulary, whose rows are copied once, if they are few enough."""
        weights = self.weights.columns(part)
        if weights.copied_row_bytes(self.dtype) and weights.shape[0] <= self.chunk:
            weights = Weights(weights.rows(slice(None), self.dtype))
        return replace(self, weights=weights)

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """Where the columns ``start`` to ``stop`` are in a product with them, and their rows."""
        for first in range(start, stop, self.chunk):
            last = min(first + self.chunk, stop)
            yield slice(first - start, last - start), self.weights.rows(slice(first, last), self.dtype)

    def into(self, out: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
        """``out [T, C] = hidden @ rows[start:stop].T``, from hidden states ``[T, H]`` in the operand dtype."""
        if self.fixed:
            return self._into_fixed(out, hidden, start, stop)
        if stop - start <= self.chunk:
            return matmul_into(out, hidden, self.weights.rows(slice(start, stop), self.dtype).t())
        for part, rows in self._chunks(start, stop):
            matmul_into(out[:, part], hidden, rows.t())
        return out

    def _into_fixed(self, out: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
        """The same by products of one size: BLAS chooses an algorithm, and with it the bits, by the shapes."""
        count, size = hidden.shape
        most, columns = _FIXED_PRODUCT if hidden.device.type == "cpu" else _FIXED_PRODUCT_GPU
        extra = -size % _FIXED_DEPTH
        block, product = hidden.new_zeros(most, size + extra), out.new_empty(most, columns)
        for first in range(start, stop, columns):
            rows = self.weights.rows(slice(first, min(first + columns, stop)), self.dtype)
            rows = nn.functional.pad(rows, (0, extra)) if extra else rows
            found = product[:, : len(rows)]
            for at in range(0, count, most):
                part = hidden[at : at + most]
                block[: len(part), :size] = part
                matmul_into(found, block, rows.t())
                out[at : at + most, first - start : first - start + len(rows)] = found[: len(part)]
        return out

    def back_into(self, out: Tensor, grad: Tensor, start: int, *, accumulate: bool = False) -> Tensor:
        """``out [T, H] = grad @ rows[start : start + C]`` (``accumulate``: ``+=``), of ``grad [T, C]``."""
        stop = start + grad.shape[1]
        if stop - start <= self.chunk:
            rows = self.weights.rows(slice(start, stop), self.dtype)
            return matmul_into(out, grad, rows, accumulate=accumulate)
        for part, rows in self._chunks(start, stop):
            matmul_into(out, grad[:, part], rows, accumulate=accumulate or part.start > 0)
        return out
