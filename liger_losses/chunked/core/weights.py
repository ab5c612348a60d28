"""A head's matrix in whatever form: products with some of its columns of the vocabulary, and gradients.

R tokens, H hidden size, C columns of the vocabulary, K columns of each token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.core.buffers import Gradients, local_part
from liger_losses.kernels.matmul import matmul_into, wide_dtype

#: Columns of a vocabulary that a process has: a slice of them, or ids ``[R, K]``, K for each token.
Columns = slice | Tensor
#: Tensors that may get a gradient, and whether all ranks have the same one.
Trained = tuple[tuple[Tensor, bool], ...]
ALL = slice(None)
#: Rows and columns of the products of a batch-invariant call, by which BLAS chooses an algorithm; and what the hidden
#: size is padded to a multiple of: the last rows of a product of odd sizes are summed in another order than the first.
FIXED_CPU, FIXED_GPU, FIXED_DEPTH = (64, 1024), (512, 8192), 8


#: Steps in which all rows are dequantized before the products.
STEPS = 8


class Products(NamedTuple):
    """How a call takes products: the operands' dtype, how many columns' rows of a head are copied (cast, or
    dequantized) at a time where any are, and whether all products have one size (batch invariance)."""

    dtype: torch.dtype
    columns: int
    fixed: bool = False


class Weights(Protocol):
    """A matrix ``[columns, H]``, in whatever form. The core knows these names and nothing else of it.

    ``copied_bytes`` of a dtype is what a row takes while it is copied; 0 where rows are read as they are.
    """

    @property
    def columns(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def trained(self) -> Trained: ...
    def copied_bytes(self, dtype: torch.dtype) -> int: ...
    def open(self, products: Products) -> Weights: ...
    def logits(self, out: Tensor, hidden: Tensor, columns: Columns) -> Tensor: ...
    def hidden_gradient(self, grad: Tensor, columns: Columns, out: Tensor | None = None) -> Tensor: ...
    def add_gradients(self, grads: Gradients, grad: Tensor, hidden: Tensor, columns: Columns) -> None: ...


@dataclass(frozen=True, eq=False)
class Dense:
    """A floating-point matrix, which may be a DTensor sharded by rows.

    ``copy`` is all of it in the operands' dtype (itself, if it has that), where it is not copied by steps; ``last`` is
    the copy of the last step, which both products of a tile read.
    """

    weight: Tensor
    products: Products | None = None
    copy: Tensor | None = None
    last: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False)
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", local_part(self.weight).shape[0])

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    @property
    def trained(self) -> Trained:
        return ((self.weight, False),)

    def copied_bytes(self, dtype: torch.dtype) -> int:
        if self.weight.dtype == dtype:
            return 0
        return self.hidden_size * (dtype.itemsize + wide_dtype(dtype).itemsize)

    def open(self, products: Products) -> Dense:
        """The same for one call, with all of it in the operands' dtype unless it is copied by steps."""
        by_steps = products.columns < self.columns and self.copied_bytes(products.dtype)
        return replace(self, products=products, copy=None if by_steps else self.whole(products.dtype))

    def whole(self, dtype: torch.dtype) -> Tensor:
        """All rows."""
        return local_part(self.weight).detach().to(dtype)

    def rows(self, columns: Columns) -> Tensor:
        """Rows ``[C, H]`` or ``[R, K, H]`` in the operands' dtype."""
        if self.copy is not None:
            return self.copy if columns is ALL else self.copy[columns]
        if self.products is None or not isinstance(columns, slice):
            return self.copied(columns)
        start, stop, _ = columns.indices(self.columns)
        if (start, stop) not in self.last:
            self.last.clear()  # its memory is free before the next step is copied
            self.last[start, stop] = self.copied(columns)
        return self.last[start, stop]

    def copied(self, columns: Columns) -> Tensor:
        """The same from the matrix itself."""
        rows = local_part(self.weight).detach()[columns]
        return rows if self.products is None else rows.to(self.products.dtype)

    def steps(self, columns: slice) -> list[tuple[slice, slice]]:
        """Some columns at a time: where they are among ``columns``, and in the vocabulary."""
        start, stop, _ = columns.indices(self.columns)
        size = stop - start if self.products is None or self.copy is not None else self.products.columns
        if size >= stop - start > 0:
            return [(ALL, ALL if stop - start == self.columns else columns)]
        parts = [(first, min(first + size, stop)) for first in range(start, stop, max(size, 1))]
        return [(slice(first - start, last - start), slice(first, last)) for first, last in parts]

    def logits(self, out: Tensor, hidden: Tensor, columns: Columns) -> Tensor:
        """``out = hidden @ rows.T``, ``[R, C]`` or ``[R, K]``."""
        if not isinstance(columns, slice):
            return out.copy_(torch.einsum("rh,rkh->rk", hidden, self.rows(columns)))
        if self.products is not None and self.products.fixed:
            return self._fixed_logits(out, hidden, columns)
        for place, part in self.steps(columns):
            matmul_into(out if place is ALL else out[:, place], hidden, self.rows(part).t())
        return out

    def _fixed_logits(self, out: Tensor, hidden: Tensor, columns: slice) -> Tensor:
        """The same by products of one size, whatever the number of tokens and the workspace."""
        (count, size), (start, stop, _) = hidden.shape, columns.indices(self.columns)
        most, width = FIXED_CPU if hidden.device.type == "cpu" else FIXED_GPU
        extra = -size % FIXED_DEPTH
        hidden, product = F.pad(hidden, (0, extra, 0, -count % most)), out.new_empty(most, width)
        for first in range(start, stop, width):
            rows = F.pad(self.rows(slice(first, min(first + width, stop))), (0, extra))
            place = first - start
            for at in range(0, count, most):
                of_rows = matmul_into(product[:, : len(rows)], hidden[at : at + most], rows.t())
                out[at : at + most, place : place + len(rows)] = of_rows[: count - at]
        return out

    def hidden_gradient(self, grad: Tensor, columns: Columns, out: Tensor | None = None) -> Tensor:
        """``grad @ rows``, ``[R, H]``: of all columns in the operands' dtype, of some in fp32, as more are added; to
        ``out`` where that is given, which is fp32."""
        if not isinstance(columns, slice):
            return torch.einsum("rk,rkh->rh", grad, self.rows(columns).to(grad.dtype))
        whole = self.copy is not None and grad.shape[1] == self.columns and grad.is_cuda
        holds = out is not None or not grad.shape[1]
        if out is None:
            dtype = grad.dtype if whole else wide_dtype(grad.dtype)
            out = (grad.new_empty if grad.shape[1] else grad.new_zeros)(len(grad), self.hidden_size, dtype=dtype)
        for place, part in self.steps(columns):
            matmul_into(out, grad if place is ALL else grad[:, place], self.rows(part), accumulate=holds)
            holds = True
        return out

    def add_gradients(self, grads: Gradients, grad: Tensor, hidden: Tensor, columns: Columns) -> None:
        if (buffer := grads.of(self.weight)) is None:
            return
        if not isinstance(columns, slice):
            buffer.add_rows(columns.flatten(), outer(grad, hidden))
            return
        for place, part in self.steps(columns):  # a CPU multiplies half precision in fp32, of that size
            buffer.add_product(part, grad if place is ALL else grad[:, place], hidden)


def outer(grad: Tensor, hidden: Tensor) -> Tensor:
    """``[R K, H]``: what each of ``grad [R, K]`` adds to its row."""
    return (grad[..., None] * hidden[:, None].to(grad.dtype)).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Quantized(Dense):
    """Frozen codes, of which rows are dequantized when they are needed."""

    weight: Any  # a QuantizedWeight

    @property
    def trained(self) -> Trained:
        return ()

    def copied_bytes(self, dtype: torch.dtype) -> int:
        return self.hidden_size * (dtype.itemsize + self.weight.temporary_bytes)

    def whole(self, dtype: torch.dtype) -> Tensor:
        whole = torch.empty(self.columns, self.hidden_size, dtype=dtype, device=self.weight.device)
        size = -(-self.columns // STEPS)
        for start in range(0, self.columns, size):
            whole[start : start + size] = self.weight.rows(start, min(start + size, self.columns))
        return whole

    def copied(self, columns: Columns) -> Tensor:
        dtype = self.weight.dtype if self.products is None else self.products.dtype
        if isinstance(columns, slice):
            start, stop, _ = columns.indices(self.columns)
            return self.weight.rows(start, stop).to(dtype)
        # Codes are dequantized by ranges: each range gives the rows that are in it.
        rows = torch.zeros(*columns.shape, self.hidden_size, dtype=dtype, device=self.weight.device)
        for _, part in self.steps(ALL):
            start, stop, _ = part.indices(self.columns)
            inside = (columns >= start) & (columns < stop)
            of_part = self.rows(part)[(columns - start).clamp(0, stop - start - 1)]
            rows = torch.where(inside[..., None], of_part, rows)
        return rows


@dataclass(frozen=True, eq=False)
class Concatenated:
    """``[base, extra]``: the last columns of hidden states ``[R, H + r]`` are multiplied by ``extra [columns, r]``."""

    base: Weights
    extra: Dense

    @property
    def columns(self) -> int:
        return self.base.columns

    @property
    def hidden_size(self) -> int:
        return self.base.hidden_size + self.extra.hidden_size

    @property
    def trained(self) -> Trained:
        return (*self.base.trained, *self.extra.trained)

    def copied_bytes(self, dtype: torch.dtype) -> int:
        return self.base.copied_bytes(dtype) + self.extra.copied_bytes(dtype)

    def open(self, products: Products) -> Any:
        whole = products._replace(columns=self.columns)  # `extra` is small
        return replace(self, base=self.base.open(products), extra=self.extra.open(whole))

    def parts(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the base multiplies, and what ``extra`` does."""
        first, last = hidden.split((self.base.hidden_size, self.extra.hidden_size), -1)
        return first.contiguous(), last.contiguous()

    def logits(self, out: Tensor, hidden: Tensor, columns: Columns) -> Tensor:
        first, last = self.parts(hidden)
        out, rows = self.base.logits(out, first, columns), self.extra.rows(columns)
        if isinstance(columns, slice):
            return matmul_into(out, last, rows.t(), accumulate=True)
        return out.add_(torch.einsum("rh,rkh->rk", last, rows))

    def hidden_gradient(self, grad: Tensor, columns: Columns, out: Tensor | None = None) -> Tensor:
        parts = self.base.hidden_gradient(grad, columns), self.extra.hidden_gradient(grad, columns)
        both = torch.cat([part.to(wide_dtype(grad.dtype)) for part in parts], -1)
        return both if out is None else out.add_(both)

    def add_gradients(self, grads: Gradients, grad: Tensor, hidden: Tensor, columns: Columns) -> None:
        first, last = self.parts(hidden)
        self.base.add_gradients(grads, grad, first, columns)
        self.extra.add_gradients(grads, grad, last.to(grad.dtype), columns)


@dataclass(frozen=True, eq=False)
class WithAdapters(Concatenated):
    """``base + scale b a``, whatever the base is: LoRA on a head, without merging it. ``extra`` is ``b``, and what it
    multiplies is made of the hidden states: ``scale hidden a.T``."""

    a: Tensor  # [r, H]
    scale: float = 1.0
    opened: Any = None  # scale a in the operands' dtype

    @property
    def hidden_size(self) -> int:
        return self.base.hidden_size

    @property
    def trained(self) -> Trained:
        return (*super().trained, (self.a, True))

    def copied_bytes(self, dtype: torch.dtype) -> int:
        return self.base.copied_bytes(dtype)

    def open(self, products: Products) -> Any:
        return replace(super().open(products), opened=(self.a.detach() * self.scale).to(products.dtype))

    def parts(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, matmul_into(hidden.new_empty(len(hidden), len(self.a)), hidden, self.opened.t())

    def hidden_gradient(self, grad: Tensor, columns: Columns, out: Tensor | None = None) -> Tensor:
        wide = wide_dtype(grad.dtype)
        low = self.extra.hidden_gradient(grad, columns)
        return self.base.hidden_gradient(grad, columns, out).to(wide).addmm_(low.to(wide), self.opened.to(wide))

    def add_gradients(self, grads: Gradients, grad: Tensor, hidden: Tensor, columns: Columns) -> None:
        super().add_gradients(grads, grad, hidden, columns)
        if (buffer := grads.of(self.a)) is not None:
            low = self.extra.hidden_gradient(grad, columns) * self.scale
            buffer.add_product(ALL, low.to(hidden.dtype), hidden)
