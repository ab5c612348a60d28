"""Products of hidden states with given columns of a head, a few of each token: of the head, only these rows are read.

T tokens, H hidden size, C columns that are computed here, K places for a token's columns, of which some are empty.

- Projections ``x [T, K]``: ``x_tk = sum_f hidden_f[t] . rows_f[v_tk] + bias[v_tk]`` of column ``v_tk``. The factors f
  are the head's matrix, which may be dequantized in parts, and the matrices of adapters.
- Softmax statistics of a token's logits and their gradients ``dx``, by :mod:`~liger_losses.kernels.softmax_stats` and
  :mod:`~liger_losses.kernels.softmax_grad`.
- ``dhidden_f[t] = sum_k dx_tk rows_f[v_tk]``, and ``drows_f[v] = sum_tk dx_tk hidden_f[t]`` over the places of a
  column, to which places are sorted.

Nothing of the size ``[T, K, H]`` or ``[T, V]`` is in memory. Sums are taken in fp32 (fp64 of fp64 inputs) in a fixed
order without atomics, and gradients are rounded once. Tokens with very many columns take products with blocks of the
head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import with_contiguous_rows
from liger_losses.kernels._triton import device_of, jit, tl, triton
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.given_ids import EMPTY, Found
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.matmul import matmul_into
from liger_losses.kernels.row_sums import Sums, gathered_slices, step_options, sum_rows
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics

#: Places and hidden dimensions of one step of projections, and warps. (On an H200, 8192 tokens of H 4096 with 20 or 64
#: columns, bf16: forward 1.11 and 1.85 ms, where (16, 256, 4) takes 1.26 and 2.19.)
_PROJECT_STEP = (32, 128, 4)


@dataclass(frozen=True, eq=False)
class GivenColumns:
    """The columns ``[T, K]`` int32 of each token, contiguous, of so many that are computed here; below 0 for none."""

    columns: Tensor
    size: int

    def part(self, first: int, count: int) -> GivenColumns:
        """The part for ``count`` consecutive columns, counted from ``first``."""
        if count == self.size:
            return self
        here = self.columns - first
        return GivenColumns(torch.where((here >= 0) & (here < count), here, -1), count)

    @cached_property
    def sorted(self) -> tuple[Tensor, Tensor]:
        """``[T K]`` each: the columns in increasing order, empty places first, and the place of each."""
        ordered, order = self.columns.view(-1).sort(stable=True)
        return ordered, order

    def by_token(self) -> Sums:
        """For each token, sums of its columns' rows."""
        count, width = self.columns.shape
        starts = torch.arange(0, (count + 1) * width, width, device=self.columns.device)
        return Sums(self.columns.view(-1), starts, width)

    def by_column(self) -> Sums:
        """For each column, sums of its tokens' rows, in the order of :attr:`sorted`."""
        ordered, order = self.sorted
        every = torch.arange(self.size + 1, dtype=torch.int32, device=order.device)
        return Sums(self.tokens(order), torch.searchsorted(ordered, every), len(self.columns), ordered)

    def tokens(self, places: Tensor) -> Tensor:
        """Whose places these are, int32."""
        return (places // self.columns.shape[1]).int()


@dataclass(frozen=True)
class ByRows:
    """Products of hidden states ``[T, H]`` with given columns: their rows are read, and no others."""

    backend: str

    def project_(self, projected: Tensor, hidden: Tensor, rows: Tensor, given: GivenColumns) -> None:
        """Add ``hidden[t] . rows[v_tk]`` to ``projected [T, K]``."""
        (_project_torch_ if self.backend == "torch" else _project_triton_)(projected, hidden, rows, given.columns)

    def grad_hidden(self, values: Tensor, rows: Tensor, given: GivenColumns, dtype: torch.dtype) -> Tensor:
        """``[T, H]``: ``sum_k values_tk rows[v_tk]``."""
        return self.sum_rows(values.view(-1), given.by_token(), rows, dtype)

    def grad_rows(self, values: Tensor, hidden: Tensor, given: GivenColumns, dtype: torch.dtype) -> Tensor:
        """``[C, H]``: ``sum_tk values_tk hidden[t]`` over the places of a column."""
        return self.sum_rows(values.view(-1)[given.sorted[1]], given.by_column(), hidden, dtype)

    def sparse_grad_rows(self, values: Tensor, hidden: Tensor, given: GivenColumns, dtype: torch.dtype) -> Tensor:
        """:meth:`grad_rows` as a sparse tensor of the rows that some token has; the host waits for their number."""
        (ordered, order), count = given.sorted, len(given.columns)
        present, numbers, lengths = ordered.unique_consecutive(return_inverse=True, return_counts=True)
        none = int((present < 0).sum())  # one for each mark of places without a column
        starts, present = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])[none:], present[none:].long()
        sums = Sums(given.tokens(order), starts, count, numbers.int() - none)
        found, shape = (self.sum_rows(values.view(-1)[order], sums, hidden, dtype), (given.size, hidden.shape[1]))
        return torch.sparse_coo_tensor(present[None], found, shape, is_coalesced=True, check_invariants=False)

    def sum_rows(self, values: Tensor, sums: Sums, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        """The sums ``[S, H]``, rounded to this dtype."""
        return sum_rows(values, sums, matrix, dtype, backend=self.backend)


@dataclass(frozen=True)
class ByBlocks:
    """The same, of all rows, a block after the other; the tokens' columns are taken of each product."""

    dtype: torch.dtype  # of the operands
    block_bytes: int  # of a product

    def _blocks(self, rows: Tensor, given: GivenColumns) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Which rows, these as operands, and the places' columns among them ``[T, K]``: their number for others."""
        width = max(128, self.block_bytes // (4 * max(len(given.columns), 1)) // 128 * 128)
        for start in range(0, len(rows), width):
            block, at = rows[start : start + width].to(self.dtype), given.columns.long() - start
            yield slice(start, start + len(block)), block, torch.where((at >= 0) & (at < len(block)), at, len(block))

    def _dense(self, values: Tensor, at: Tensor, count: int) -> Tensor:
        """``[T, C]``: the values at their columns; values of other blocks are written behind the end of a row."""
        dense = torch.zeros(len(values), count + 8, dtype=self.dtype, device=values.device)
        return dense.scatter_(1, at, values.to(self.dtype))[:, :count]

    def project_(self, projected: Tensor, hidden: Tensor, rows: Tensor, given: GivenColumns) -> None:
        operand = hidden.to(self.dtype)
        for _, block, at in self._blocks(rows, given):
            product = matmul_into(projected.new_empty(len(operand), len(block)), operand, block.t())
            projected += torch.where(at < len(block), product.gather(1, at.clamp(max=len(block) - 1)), 0.0)

    def grad_hidden(self, values: Tensor, rows: Tensor, given: GivenColumns, dtype: torch.dtype) -> Tensor:
        grad = values.new_zeros(len(values), rows.shape[1])
        for _, block, at in self._blocks(rows, given):
            matmul_into(grad, self._dense(values, at, len(block)), block, accumulate=True)
        return grad.to(dtype)

    def grad_rows(self, values: Tensor, hidden: Tensor, given: GivenColumns, dtype: torch.dtype) -> Tensor:
        # Tokens without columns may hold anything: 0 times NaN would be NaN.
        operand = hidden.to(self.dtype).masked_fill((given.columns < 0).all(1)[:, None], 0)
        grad = torch.empty(given.size, hidden.shape[1], dtype=dtype, device=hidden.device)
        for part, block, at in self._blocks(grad, given):
            matmul_into(grad[part], self._dense(values, at, len(block)).t(), operand)
        return grad


@dataclass(frozen=True, eq=False)
class GivenCall:
    """All of a call but the tensors that autograd tracks."""

    given: GivenColumns
    found: Found
    products: ByRows | ByBlocks
    transform: LogitTransform = LogitTransform()  # from projections to logits
    #: Of a factor whose rows are computed: yields the column of a part's first row, and its rows, part by part.
    computed: tuple[Callable[[], Iterable[tuple[int, Tensor]]] | None, ...] = ()
    backend: str = "torch"
    sparse_grad: bool = False  # the weight's gradient is a sparse tensor of the rows that some token has
    #: Replaces projections by their sum over ranks that share the vocabulary.
    sum_: Callable[[Tensor], Any] | None = None
    #: Begins to do so with the hidden states' gradients; returns what to ``wait()`` for.
    start_sum_: Callable[[Tensor], Any] | None = None

    @property
    def empty(self) -> Tensor:
        """Which places ``[T, K]`` have no column of any rank."""
        return self.found.columns == EMPTY

    def computes(self, number: int) -> bool:
        """Whether a factor's rows are computed, part by part."""
        return number < len(self.computed) and self.computed[number] is not None

    def parts(self, number: int, rows: Any) -> Iterable[tuple[GivenColumns, Tensor]]:
        """A factor's rows, and the columns among them."""
        parts = self.computed[number]() if self.computes(number) else [(0, rows)]  # type: ignore[misc]
        return ((self.given.part(first, len(part)), part) for first, part in parts)


class Evaluated(NamedTuple):
    """Logits ``[T, K]``, -inf at empty places, and statistics ``[T]``, 0 of tokens without columns; fp32 or fp64."""

    logits: Tensor
    values: dict[str, Tensor]  # what was asked for of logp and entropy, and lse

    def log_probabilities(self, empty: Tensor) -> Tensor:
        """``[T, K]``, one for each place; 0 for empty ones."""
        return (self.logits - self.values["lse"][:, None]).masked_fill_(empty, 0.0)


def project_(call: GivenCall, bias: Tensor | None, *factors: Tensor | None) -> None:
    """Add the products with the columns that are computed here to the call's projections, without gradients.

    Args:
        call: the columns, and how to compute.
        bias: ``[C]`` or ``None``.
        factors: hidden states ``[T, H]`` and rows ``[C, H]`` of each factor, one after another; ``None`` for rows that
            are computed. Those of tokens without columns are not read.
    """
    projected, columns = call.found.projected, call.given.columns
    with device_of(columns), torch.no_grad():
        for number, hidden, rows in _factors(factors):
            for given, part in call.parts(number, rows):
                call.products.project_(projected, hidden, part, given)
        if bias is not None:
            projected += torch.where(columns >= 0, bias[columns.clamp(min=0)].to(projected.dtype), 0.0)


def evaluate(call: GivenCall, names: tuple[str, ...]) -> Evaluated:
    """Logits and the named statistics of the call's projections, which are written over."""
    logits = call.found.projected
    if call.sum_ is not None:
        call.sum_(logits)
    with device_of(logits), torch.no_grad():
        if call.transform.for_kernel.factor is not None:  # of an infinite logit, a soft-cap makes a finite one
            logits = call.transform(logits).masked_fill_(call.empty, float("-inf"))
        asked = frozenset(names) & {"logp", "entropy"}
        return Evaluated(logits, softmax_statistics(logits, call.found.label_at, asked, backend=call.backend))


def with_gradients(
    call: GivenCall, found: Evaluated, names: tuple[str, ...], bias: Tensor | None, *factors: Tensor | None
) -> dict[str, Tensor]:
    """The named values that :func:`evaluate` has found, or ``selected_logps``, the log-probabilities of the places:
    differentiable by bias and factors."""
    return dict(zip(names, _GivenStatistics.apply(call, found, names, bias, *factors), strict=True))


class _GivenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: GivenCall,
        found: Evaluated,
        names: tuple[str, ...],
        bias: Tensor | None,
        *factors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.names, values = call, names, found.values
        outputs = [found.log_probabilities(call.empty) if name == "selected_logps" else values[name] for name in names]
        # What backward needs must not change where users change an output in place.
        kept = [values[name].clone() if name in names else values.get(name) for name in ("lse", "entropy")]
        ctx.save_for_backward(found.logits, *kept, bias, *factors)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        logits, lse, entropy, bias, *factors = ctx.saved_tensors
        call, waits, grads, grad_bias = ctx.call, list[Any](), list[Any]([None] * len(factors)), None
        needs_bias, *needs = ctx.needs_input_grad[3:]
        given = {name: g for name, g in zip(ctx.names, upstream, strict=True) if g is not None}
        with device_of(logits):
            values = _gradient(call, logits, {"lse": lse, "entropy": entropy}, given)
            for number, hidden, rows in _factors(factors):
                if needs[2 * number]:
                    grads[2 * number] = total = _grad_hidden(values, call, number, hidden, rows)
                    waits += [] if call.start_sum_ is None else [call.start_sum_(total)]
            for number, hidden, rows in _factors(factors):
                if needs[2 * number + 1]:
                    sparse = call.sparse_grad and number == 0  # and not of adapters
                    of_rows = ByRows(call.backend).sparse_grad_rows if sparse else call.products.grad_rows
                    grads[2 * number + 1] = of_rows(values, hidden, call.given, rows.dtype)
            if needs_bias:
                sums, ordered = call.given.by_column(), values.view(-1)[call.given.sorted[1]]
                ones = sums._replace(rows=torch.zeros_like(sums.rows)), values.new_ones(1, 1)
                grad_bias = ByRows(call.backend).sum_rows(ordered, *ones, bias.dtype)[:, 0]
        for wait in waits:
            wait.wait()
        grads[::2] = [None if g is None else g.to(x.dtype) for g, x in zip(grads[::2], factors[::2], strict=True)]
        return None, None, None, grad_bias, *grads


def _factors(factors: Sequence[Any]) -> Iterator[tuple[int, Tensor, Any]]:
    for number in range(len(factors) // 2):
        yield number, factors[2 * number], factors[2 * number + 1]


def _gradient(call: GivenCall, logits: Tensor, values: Mapping[str, Tensor], upstream: dict[str, Tensor]) -> Tensor:
    """``d loss / d projections [T, K]``, of any value at empty places, which no sum reads."""
    of_places = upstream.pop("selected_logps", None)
    if of_places is not None:
        of_places = of_places.masked_fill(call.empty, 0.0)
        upstream["lse"] = upstream.get("lse", 0.0) - of_places.sum(1)
    grad, coefficients = torch.empty_like(logits), SoftmaxGradient.of(upstream, values)
    softmax_gradient_into(grad, logits, values["lse"], call.found.label_at, coefficients, backend=call.backend)
    grad = grad if of_places is None else grad.add_(of_places)
    return call.transform.chain_(grad, logits)


def _grad_hidden(values: Tensor, call: GivenCall, number: int, hidden: Tensor, rows: Tensor | None) -> Tensor:
    """``[T, H]``, rounded unless it is one of several parts."""
    total, once = None, not call.computes(number) and call.start_sum_ is None
    for given, part in call.parts(number, rows):
        found = call.products.grad_hidden(values, part, given, hidden.dtype if once else values.dtype)
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


# --- Reference --------------------------------------------------------------------------------------------------------


def _project_torch_(projected: Tensor, hidden: Tensor, rows: Tensor, columns: Tensor) -> None:
    wide, (_, width) = projected.dtype, columns.shape
    for at in gathered_slices(columns.numel(), hidden.shape[1], wide):
        column = columns.view(-1)[at]
        tokens = torch.arange(at.start, at.stop, device=columns.device) // width
        products = hidden[tokens].to(wide) * rows[column.clamp(min=0)].to(wide)
        projected.view(-1)[at] += torch.where(column >= 0, products.sum(-1), 0.0)


# --- Triton -----------------------------------------------------------------------------------------------------------


def _project_triton_(projected: Tensor, hidden: Tensor, rows: Tensor, columns: Tensor) -> None:
    hidden, rows, places = with_contiguous_rows(hidden), with_contiguous_rows(rows), columns.numel()
    if places:
        _project_kernel[(triton.cdiv(places, _PROJECT_STEP[0]),)](
            projected, hidden, rows, hidden.stride(0), rows.stride(0), columns, columns.shape[1], places,
            hidden.shape[1], **step_options(_PROJECT_STEP, hidden.shape[1]),
        )  # fmt: skip


#: Pointers of which no kernel is compiled for an alignment.
_UNALIGNED = ["projected", "hidden", "columns"]


@jit(do_not_specialize=["width", "places"], do_not_specialize_on_alignment=_UNALIGNED)
def _project_kernel(
    projected, hidden, weight, hidden_stride, stride, columns, width, places, hidden_size,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per ``BLOCK_P`` places, of one token or several."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.load(columns + at, mask=at < places, other=-1).to(tl.int64)
    token = at // width
    counts = column >= 0
    products = tl.zeros((BLOCK_P, BLOCK_H), tl.float32)
    # Nothing is to be read for tokens without loss.
    depth = tl.where(tl.max(column, 0) >= 0, hidden_size, 0)
    for k in range(0, depth, BLOCK_H):
        ks = k + tl.arange(0, BLOCK_H)
        inside = counts[:, None] & (ks < hidden_size)[None, :]
        h = tl.load(hidden + token[:, None] * hidden_stride + ks[None, :], mask=inside, other=0.0)
        w = tl.load(weight + column[:, None] * stride + ks[None, :], mask=inside, other=0.0)
        products += w.to(tl.float32) * h.to(tl.float32)
    before = tl.load(projected + at, mask=counts, other=0.0)
    tl.store(projected + at, before + tl.sum(products, 1), mask=counts)
