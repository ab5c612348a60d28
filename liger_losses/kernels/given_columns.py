"""Softmax statistics over given columns of the vocabulary, and their gradients: of a head, only these rows are read.

Given columns are P pairs of a token and one of its columns, token after token: pair i has token ``t_i`` and column
``v_i``, and the softmax of token t is over its own pairs alone. T tokens, H hidden size, V vocabulary size.

- Projections: ``x_i = sum_f hidden_f[t_i] . rows_f[v_i]``, ``z_i = transform(x_i + bias[v_i])``. The factors f are the
  head's matrix, of which parts may be dequantized one after another, and those of adapters.
- Statistics of token t: ``lse = log sum_i exp z_i``, ``logp = z_label - lse``, ``entropy = -sum_i p_i log p_i``.
- Gradients: ``dz_i = [v_i = label] g_logp + g_i + p_i (g_lse - g_logp - sum_j g_j - g_entropy (log p_i + entropy))``,
  where ``g_i`` is that by ``log p_i``; then ``dhidden_f[t] = sum_i dx_i rows_f[v_i]`` over the pairs of a token, and
  ``drows_f[v] = sum_i dx_i hidden_f[t_i]`` over those of a column, to which pairs are sorted.

Nothing of the size ``[P, H]`` or ``[T, V]`` is in memory. Sums are taken in fp32 (fp64 of fp64 inputs) in a fixed order
without atomics, and gradients are rounded once. Tokens with very many columns take products with blocks of the head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import with_contiguous_rows
from liger_losses.kernels._triton import device_of, jit, tl, triton
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.logit_transform import (
    LogitTransform,
    inverse_temperature,
    transform_block,
    transform_gradient,
)
from liger_losses.kernels.matmul import matmul_into

#: Bytes of the rows that the reference gathers at a time.
GATHERED_BYTES = 64 * 2**20
#: Pairs and hidden dimensions of one step, and warps, of projections and of sums of rows. (On an H200, 8192 tokens of
#: H 4096 with 20 or 64 columns, bf16: forward 1.11 and 1.85 ms, where (16, 256, 4) takes 1.26 and 2.19; all 1.64 and
#: 3.15 ms, where sums by (4, 512, 1) take 2.42 and 3.59.)
_PROJECT_STEP, _SUM_STEP = (32, 128, 4), (2, 1024, 2)
#: Sums go on in parts of as many terms, or of so many that there are about _MOST_PARTS / 2 parts. (There, forward and
#: backward: 3.1 to 3.3 and 4.3 to 4.5 ms for all of 64 to 512 terms and 1024 to 4096 parts.)
_PART, _MOST_PARTS = 128, 2048
#: The log-sum-exp over no columns where other ranks have some: finite, so that it can be merged.
NO_COLUMNS = -1e30


class Facts(NamedTuple):
    """What is found about each token with loss, ``[T]`` int32 each; or of how many tokens it is true.

    It is ``cut``, or has no ids: ``uncut``. All others are errors: tokens ``lacking`` their label, ids that are no
    columns, ids twice, and labels that are no column.
    """

    cut: Any
    uncut: Any
    lacking: Any
    no_columns: Any
    twice: Any
    no_labels: Any
    wide: Any = 0  # beside these: tokens with so many columns that products are faster


class Sums(NamedTuple):
    """Sums of rows of a matrix: number s is ``sum_i values_i matrix[rows_i]``, ``starts[s] <= i < starts[s + 1]``."""

    rows: Tensor  # [P] int32; -1 for none
    starts: Tensor  # [S + 1] int64
    sums: Tensor  # [P] int32, the number of the sum that a term is part of; S or more for none
    longest: int  # the most terms of a sum, or a bound


@dataclass(frozen=True, eq=False)
class GivenColumns:
    """The pairs of all tokens, token after token. Those before ``starts[0]`` do not count."""

    ids: Tensor  # [P], of the whole vocabulary; -1 for none, others below 0 or beyond V are wrong
    columns: Tensor  # [P] int32, counted from the first that is computed here; -1 for one that does not count
    tokens: Tensor  # [P] int32
    starts: Tensor  # [T + 1] int64: token t has the pairs starts[t] to starts[t + 1]
    labels: Tensor  # [T] int64, of the whole vocabulary
    ignore_index: int  # the label of tokens without loss
    computed: range  # the columns that are computed here
    vocab_size: int  # V, of all ranks
    longest: int  # the most pairs of a token, or a bound
    wide: Tensor | None  # [T] bool, tokens with so many columns that products are faster; None where none has

    @classmethod
    def of(
        cls,
        ids: Tensor,
        offsets: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        computed: range,
        vocab_size: int,
        *,
        shift: int = 0,
        add_label: bool = False,
        most: int | None = None,
    ) -> GivenColumns:
        """From ids ``[T, K]`` padded with -1, or ``[P]`` with offsets ``[T + 1]``, int32 or int64; labels contiguous.

        Token t has row ``t + shift``; the last ``shift`` tokens have no loss. ``add_label`` adds the label to a token's
        columns where they lack it. Tokens with more than ``most`` columns are wide.
        """
        count, device, longest = len(labels), ids.device, ids.shape[-1] + add_label
        if offsets is None:
            starts = torch.arange(count + 1, device=device) * ids.shape[1]
            tokens = (
                torch.arange(count, dtype=torch.int32, device=device)[:, None].expand(ids.shape).contiguous().view(-1)
            )
            ids = (ids.roll(-shift, 0) if shift else ids).reshape(-1)
        else:
            starts, beyond = offsets.long().clamp(0, len(ids)).cummax(0).values, min(shift, count)
            starts = torch.cat([starts[beyond:], starts[-1:].expand(beyond)])
            found = torch.searchsorted(starts, torch.arange(len(ids), device=device), right=True) - 1
            ids = torch.where(found < 0, -1, torch.where(ids == -1, -2, ids))  # there is no padding
            tokens = found.clamp(0, max(count - 1, 0)).int()
        if add_label:
            ids, tokens, starts = _with_labels(ids, tokens, starts, labels)
        active, wide = labels != ignore_index, None
        inside = (ids >= computed.start) & (ids < computed.stop) & active[tokens]
        if most is not None and longest > most:
            before = torch.cat([starts.new_zeros(1), (ids != -1).cumsum(0)])
            wide = active & (before[starts].diff() > most)
        columns = torch.where(inside, ids - computed.start if computed.start else ids, -1).int()
        return cls(ids, columns, tokens, starts, labels, ignore_index, computed, vocab_size, longest, wide)

    @cached_property
    def near(self) -> Tensor:
        """``columns`` whose rows are read one by one: -1 for those of wide tokens."""
        return self.columns if self.wide is None else self.columns.masked_fill(self.wide[self.tokens], -1)

    @cached_property
    def sorted(self) -> tuple[Tensor, Tensor]:
        """``[P]`` each: the columns in increasing order, those that do not count last, and the pairs they are of."""
        columns, order = self.columns.masked_fill(self.columns < 0, len(self.computed)).sort(stable=True)
        return columns, order

    def by_token(self, first: int, count: int) -> Sums:
        """For each token, sums of so many rows from the column ``first`` on."""
        here = self.near - first if first else self.near
        if count < len(self.computed):
            here = torch.where((here >= 0) & (here < count), here, -1)
        return Sums(here, self.starts, self.tokens, self.longest)

    def by_column(self) -> Sums:
        """For each column, sums of its tokens' rows, in the order of :attr:`sorted`."""
        ordered, order = self.sorted
        every = torch.arange(len(self.computed) + 1, dtype=torch.int32, device=order.device)
        rows = self.tokens if self.wide is None else self.tokens.masked_fill(self.near < 0, -1)
        return Sums(rows[order], torch.searchsorted(ordered, every), ordered, len(self.labels))

    def by_present_column(self) -> tuple[Sums, Tensor]:
        """As :meth:`by_column`, for the columns that some token has, and these; the host waits for their number."""
        ordered, order = self.sorted
        present, numbers, lengths = ordered.unique_consecutive(return_inverse=True, return_counts=True)
        count = int((present < len(self.computed)).sum())
        starts = torch.cat([lengths.new_zeros(1), lengths[:count].cumsum(0)])
        return Sums(self.tokens[order], starts, numbers.int(), len(self.labels)), present[:count].long()


def _with_labels(ids: Tensor, tokens: Tensor, starts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, tokens and starts of one more pair for each token: the label, or -1 where it is there already."""
    count, numbers = len(labels), torch.arange(len(starts), device=ids.device)
    kinds = torch.stack([ids != -1, ids == labels[tokens]])
    some, there = kinds.new_zeros(2, count + 1).scatter_(1, torch.where(kinds, tokens, count).long(), True)[:, :-1]
    tokens, order = torch.cat([tokens, numbers[:-1].int()]).sort(stable=True)
    return torch.cat([ids, torch.where(some & ~there, labels, -1)])[order], tokens, starts + numbers


@dataclass(frozen=True, eq=False)
class Products:
    """Products of N wide tokens with blocks of C rows after another, of which their P' pairs are taken."""

    tokens: Tensor  # [N]
    pairs: Tensor  # [P']
    slots: Tensor  # [P'], which of the N tokens a pair is of
    columns: Tensor  # [P']
    dtype: torch.dtype  # of the operands
    block_bytes: int  # of the logits of a block

    @classmethod
    def of(cls, given: GivenColumns, number: int, dtype: torch.dtype, block_bytes: int) -> Products:
        """Of the wide tokens, so many."""
        assert given.wide is not None
        tokens, pairs = torch.nonzero_static(given.wide, size=number)[:, 0], given.wide[given.tokens].nonzero()[:, 0]
        slots = torch.searchsorted(tokens, given.tokens[pairs].long())
        return cls(tokens, pairs, slots, given.columns[pairs], dtype, block_bytes)

    def blocks(self, rows: Tensor, first: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Which rows, these as operands, and where the pairs are in the flattened ``[N, C]``: N C for those of others.

        ``first`` is the column of the first row.
        """
        width = max(128, self.block_bytes // (4 * len(self.tokens)) // 128 * 128)
        for start in range(0, len(rows), width):
            block, columns = rows[start : start + width].to(self.dtype), self.columns - first - start
            inside = (columns >= 0) & (columns < len(block))
            at = torch.where(inside, self.slots * len(block) + columns, len(self.tokens) * len(block))
            yield slice(start, start + len(block)), block, at

    def project_(self, projected: Tensor, hidden: Tensor, rows: Tensor, first: int) -> None:
        operand, found = hidden.index_select(0, self.tokens).to(self.dtype), projected.new_zeros(len(self.pairs))
        for _, block, at in self.blocks(rows, first):
            product = projected.new_empty(len(operand) * len(block) + 1)
            product[-1] = 0
            matmul_into(product[:-1].view(len(operand), -1), operand, block.t())
            found += product[at]
        projected.index_add_(0, self.pairs, found)

    def dense(self, values: Tensor, at: Tensor, block: Tensor) -> Tensor:
        """``[N, C]``: the pairs' values at their columns of a block."""
        dense = torch.zeros(len(self.tokens) * len(block) + 1, dtype=self.dtype, device=values.device)
        # Pairs of other blocks are all written to one place, behind the end.
        return dense.scatter_(0, at, values[self.pairs].to(self.dtype))[:-1].view(-1, len(block))

    def add_grad_hidden_(self, grad: Tensor, values: Tensor, rows: Tensor, first: int) -> None:
        found = values.new_zeros(len(self.tokens), rows.shape[1])
        for _, block, at in self.blocks(rows, first):
            matmul_into(found, self.dense(values, at, block), block, accumulate=True)
        grad.index_add_(0, self.tokens, found)

    def add_grad_rows_(self, grad: Tensor, values: Tensor, hidden: Tensor, rows: Tensor) -> None:
        operand = hidden.index_select(0, self.tokens).to(self.dtype)
        for part, block, at in self.blocks(rows, 0):
            matmul_into(grad[part], self.dense(values, at, block).t(), operand, accumulate=True)


@dataclass(frozen=True, eq=False)
class GivenCall:
    """All of a call but the tensors that autograd tracks."""

    given: GivenColumns
    transform: LogitTransform = LogitTransform()  # from projections to logits
    #: For each factor whose rows are dequantized: what yields some rows after others, and the column of their first.
    slabs: tuple[Callable[[], Iterable[tuple[int, Tensor]]] | None, ...] = (None,)
    backend: str = "torch"
    sparse_grad: bool = False  # the weight's gradient is a sparse tensor of the rows that some token has
    no_columns: float = 0.0  # the log-sum-exp over none
    #: Begins to replace a tensor by its sum over ranks that share the vocabulary; returns what to ``wait()`` for.
    start_sum_: Callable[[Tensor], Any] | None = None
    products: Products | None = None  # of wide tokens

    def parts(self, factor: int, rows: Tensor | None) -> Iterable[tuple[int, Tensor]]:
        """``(first column, rows)`` of a factor, of all its columns."""
        slabs = self.slabs[factor]
        assert slabs is not None or rows is not None
        return [(0, rows)] if slabs is None else slabs()  # type: ignore[list-item]


class Evaluated(NamedTuple):
    """Projections ``[P]``, statistics ``[T]`` in fp32 or fp64, 0 for tokens without columns, and :class:`Facts`."""

    projected: Tensor
    logp: Tensor
    entropy: Tensor
    lse: Tensor
    facts: Tensor  # [F, T] int32

    def pairs(self, call: GivenCall, bias: Tensor | None) -> Tensor:
        """Each pair's log-probability ``[P]``, 0 of one that does not count."""
        logits = _logits(self.projected, None if bias is None else bias.detach(), call)
        return torch.where(call.given.columns >= 0, logits - self.lse[call.given.tokens], 0.0)


def evaluate(
    call: GivenCall, bias: Tensor | None, *factors: Tensor | None, before: Evaluated | None = None
) -> Evaluated:
    """Projections, statistics and facts, without gradients; with ``before``, those of wide tokens are added to these.

    Args:
        call: the columns, and how to compute.
        bias: ``[V]`` or ``None``.
        factors: hidden states ``[T, H]`` and rows ``[V, H]`` of each factor, one after another; ``None`` for rows that
            are dequantized. Those of tokens without columns are not read.
    """
    given, backend = call.given, _BACKENDS[call.backend]
    wide = functools.reduce(torch.promote_types, [f.dtype for f in factors if f is not None], torch.float32)
    with device_of(given.ids), torch.no_grad():
        projected = torch.zeros(len(given.ids), dtype=wide, device=given.ids.device)
        projected = projected if before is None else before.projected
        for number, hidden, rows in _factors(factors):
            for first, part in call.parts(number, rows):
                if before is None:
                    backend.project_(projected, hidden, part, given.by_token(first, len(part)))
                elif call.products is not None:
                    call.products.project_(projected, hidden, part, first)
        found = Evaluated(projected, *backend.summarize(projected, bias, call))
        if call.products is not None:
            found.facts[Facts._fields.index("twice")] += _twice(given, call.products.pairs)
    return found


def with_gradients(
    call: GivenCall, found: Evaluated, pairs: Tensor | None, bias: Tensor | None, *factors: Tensor | None
) -> Any:
    """``logp``, ``entropy`` and ``lse``, which :func:`evaluate` has found, and the log-probabilities ``pairs`` of all
    ranks' columns, if they are given: differentiable by bias and factors."""
    return _GivenStatistics.apply(call, found, pairs, bias, *factors)


class _GivenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: GivenCall,
        found: Evaluated,
        pairs: Tensor | None,
        bias: Tensor | None,
        *factors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        # What backward needs must not change where users change an output in place.
        ctx.save_for_backward(found.projected, found.entropy.clone(), found.lse.clone(), bias, *factors)
        return found.logp, found.entropy, found.lse, pairs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        projected, entropy, lse, bias, *factors = ctx.saved_tensors
        call, sums_over, waits = ctx.call, ctx.call.start_sum_, list[Any]()
        needs_bias, *needs = ctx.needs_input_grad[3:]
        grads, grad_bias = list[Any]([None] * len(factors)), None
        with device_of(projected):
            g_logp, g_entropy, g_lse, g_pairs = (None if g is None else g.contiguous() for g in upstream)
            if g_pairs is not None:
                # Of all ranks' columns, which all of them have here.
                inside = torch.where(call.given.ids >= 0, g_pairs, 0.0)
                g_sum = torch.segment_reduce(inside, "sum", offsets=call.given.starts)
                g_lse = -g_sum if g_lse is None else g_lse - g_sum
            softmax = _Softmax(g_logp, g_entropy, g_lse, entropy, lse, g_pairs)
            values = _BACKENDS[call.backend].differentiate(projected, bias, call, softmax)
            for number, hidden, rows in _factors(factors):
                if needs[2 * number]:
                    grads[2 * number] = total = _grad_hidden(values, call, number, hidden, rows)
                    waits += [] if sums_over is None else [sums_over(total)]
            for number, hidden, rows in _factors(factors):
                if needs[2 * number + 1]:
                    grads[2 * number + 1] = _grad_rows(values, call, hidden, rows)
            if needs_bias:
                sums, order = call.given.by_column(), call.given.sorted[1]
                ones = sums._replace(rows=torch.zeros_like(sums.rows)), values.new_ones(1, 1)
                grad_bias = _BACKENDS[call.backend].sum_rows(values[order], *ones, bias.dtype)[:, 0]
        for wait in waits:
            wait.wait()
        grads[::2] = [None if g is None else g.to(x.dtype) for g, x in zip(grads[::2], factors[::2], strict=True)]
        return None, None, None, grad_bias, *grads


def _factors(factors: Sequence[Any]) -> Iterator[tuple[int, Tensor, Any]]:
    for number in range(len(factors) // 2):
        yield number, factors[2 * number], factors[2 * number + 1]


def _grad_hidden(values: Tensor, call: GivenCall, number: int, hidden: Tensor, rows: Tensor | None) -> Tensor:
    """``[T, H]``, rounded unless it is one of several parts."""
    given, total = call.given, None
    once = call.slabs[number] is None and call.products is None and call.start_sum_ is None
    for first, part in call.parts(number, rows):
        sums = given.by_token(first, len(part))
        found = _BACKENDS[call.backend].sum_rows(values, sums, part, hidden.dtype if once else values.dtype)
        if call.products is not None:
            call.products.add_grad_hidden_(found, values, part, first)
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


def _grad_rows(values: Tensor, call: GivenCall, hidden: Tensor, rows: Tensor) -> Tensor:
    """``[V, H]``, dense or sparse."""
    given, sum_rows = call.given, _BACKENDS[call.backend].sum_rows
    ordered = values[given.sorted[1]]
    if call.sparse_grad:
        sums, present = given.by_present_column()
        found = sum_rows(ordered, sums, hidden, rows.dtype)
        return torch.sparse_coo_tensor(present[None], found, rows.shape, is_coalesced=True, check_invariants=False)
    found = sum_rows(ordered, given.by_column(), hidden, rows.dtype)
    if call.products is not None:
        call.products.add_grad_rows_(found, values, hidden, rows)
    return found


# --- Reference --------------------------------------------------------------------------------------------------------


class _Softmax(NamedTuple):
    """``[T]`` each: the gradients by the statistics (or ``None``), and what the softmax's gradient needs of these.

    ``grad_lse`` includes those by pairs, ``grad_pairs [P]``, with a minus.
    """

    grad_logp: Tensor | None
    grad_entropy: Tensor | None
    grad_lse: Tensor | None
    entropy: Tensor
    lse: Tensor
    grad_pairs: Tensor | None


def _slices(rows: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of so many rows that two matrices of them fit :data:`GATHERED_BYTES`."""
    size = max(1, GATHERED_BYTES // (2 * columns * dtype.itemsize))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _project_torch_(projected: Tensor, hidden: Tensor, rows: Tensor, pairs: Sums) -> None:
    wide = projected.dtype
    for at in _slices(len(projected), hidden.shape[1], wide):
        columns = pairs.rows[at]
        products = hidden[pairs.sums[at]].to(wide) * rows[columns.clamp(min=0)].to(wide)
        projected[at] += torch.where(columns >= 0, products.sum(-1), 0.0)


def _logits(projected: Tensor, bias: Tensor | None, call: GivenCall) -> Tensor:
    """``[P]``, -inf of pairs that do not count."""
    columns = call.given.columns
    own = call.transform.rows(call.given.tokens)
    logits = own(projected, None if bias is None else bias[columns.clamp(min=0)].to(projected.dtype))
    return torch.where(columns >= 0, logits, float("-inf"))


def _summarize_torch(projected: Tensor, bias: Tensor | None, call: GivenCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given, logits = call.given, _logits(projected, bias, call)
    tokens, ids, labels = given.tokens, given.ids, given.labels

    def total(values: Tensor) -> Tensor:
        return torch.segment_reduce(values.to(projected.dtype), "sum", offsets=given.starts)

    top = torch.segment_reduce(logits, "max", offsets=given.starts)
    top = torch.where(top > float("-inf"), top, 0.0)
    shifted = logits - top[tokens]
    exp = shifted.exp()
    sums, hits = total(exp), ids == labels[tokens]
    some = sums != 0  # also where they are NaN
    sums = torch.where(some, sums, 1.0)
    logp = total(torch.where(hits & (given.columns >= 0), shifted, 0.0)) - sums.log()
    entropy = sums.log() - total(torch.where(exp > 0, exp * shifted, 0.0)) / sums
    active, full = labels != given.ignore_index, total(ids != -1) > 0
    facts = Facts(
        cut=active & full,
        uncut=active & ~full,
        lacking=active & full & (total(hits) == 0),
        no_columns=active & (total((ids < -1) | (ids >= given.vocab_size)) > 0),
        twice=_twice(given, (given.near >= 0).nonzero()[:, 0]),
        no_labels=active & ((labels < 0) | (labels >= given.vocab_size)),
    )
    lse = torch.where(some, top + sums.log(), call.no_columns)
    return logp, entropy, lse, torch.stack([fact.int() for fact in facts[:-1]])


def _twice(given: GivenColumns, pairs: Tensor) -> Tensor:
    """``[T]`` int32: 1 for tokens that have a column twice, among these pairs."""
    size = len(given.computed) + 1  # columns that do not count are -1
    keys = (given.tokens[pairs].long() * size + given.columns[pairs] + 1).sort().values
    again = (keys[1:] == keys[:-1]) & (keys[1:] % size > 0)
    found = torch.zeros(len(given.labels) + 1, dtype=torch.int32, device=keys.device)
    return found.index_fill_(0, torch.where(again, keys[1:] // size, len(given.labels)), 1)[:-1]


def _differentiate_torch(projected: Tensor, bias: Tensor | None, call: GivenCall, softmax: _Softmax) -> Tensor:
    given = call.given
    counts, logits = given.columns >= 0, _logits(projected, bias, call)
    g_logp, g_entropy, g_lse, entropy, lse = (0.0 if v is None else v[given.tokens] for v in softmax[:5])
    log_p = logits - lse
    p = log_p.exp()
    grad = torch.where(given.ids == given.labels[given.tokens], g_logp, 0.0) + p * (g_lse - g_logp)
    grad = grad - torch.where(p > 0, g_entropy * p * (log_p + entropy), 0.0)
    grad = grad if softmax.grad_pairs is None else grad + softmax.grad_pairs
    own = call.transform.rows(given.tokens)
    return own.chain_(torch.where(counts, grad, 0.0), torch.where(counts, logits, 0.0))


def _sum_rows_torch(values: Tensor, sums: Sums, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    number, size = len(sums.starts) - 1, matrix.shape[1]
    total = values.new_zeros(number + 1, size)  # the last for terms of no sum
    for at in _slices(len(values), size, values.dtype):
        rows = sums.rows[at]
        terms = torch.where(rows >= 0, values[at], 0.0)[:, None] * matrix[rows.clamp(min=0)].to(values.dtype)
        total.index_add_(0, sums.sums[at].clamp(max=number), terms)
    return total[:-1].to(dtype)


# --- Triton -----------------------------------------------------------------------------------------------------------


def _step(step: tuple[int, int, int], columns: int) -> dict[str, int]:
    """A step's launch options, for a matrix of so many columns."""
    terms, depth, warps = step
    return {"BLOCK_P": terms, "BLOCK_H": min(depth, triton.next_power_of_2(columns)), "num_warps": warps}


def _project_triton_(projected: Tensor, hidden: Tensor, rows: Tensor, pairs: Sums) -> None:
    hidden, rows = with_contiguous_rows(hidden), with_contiguous_rows(rows)
    if len(projected):
        _project_kernel[(triton.cdiv(len(projected), _PROJECT_STEP[0]),)](
            projected, hidden, rows, hidden.stride(0), rows.stride(0), pairs.rows, pairs.sums, len(projected),
            hidden.shape[1], **_step(_PROJECT_STEP, hidden.shape[1]),
        )  # fmt: skip


def _summarize_triton(projected: Tensor, bias: Tensor | None, call: GivenCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = call.given
    count, device = len(given.labels), projected.device
    logp, entropy, lse = (torch.empty(count, device=device) for _ in range(3))
    facts = torch.empty(len(Facts._fields) - 1, count, dtype=torch.int32, device=device)
    if count:
        _summarize_kernel[(count,)](
            logp, entropy, lse, facts, projected, given.columns, given.near, given.ids.contiguous(), given.starts,
            given.labels, None if bias is None else bias.contiguous(), call.transform.for_kernel(), count,
            given.vocab_size, given.ignore_index, call.no_columns, BLOCK=32, num_warps=1,
        )  # fmt: skip
    return logp, entropy, lse, facts


def _differentiate_triton(projected: Tensor, bias: Tensor | None, call: GivenCall, softmax: _Softmax) -> Tensor:
    given, values = call.given, torch.zeros_like(projected)
    if len(given.labels):
        _differentiate_kernel[(len(given.labels),)](
            values, projected, *softmax, given.columns, given.ids.contiguous(), given.starts, given.labels,
            None if bias is None else bias.contiguous(), call.transform.for_kernel(), BLOCK=128, num_warps=1,
        )  # fmt: skip
    return values


def _sum_rows_triton(values: Tensor, sums: Sums, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    matrix, terms, number = with_contiguous_rows(matrix), len(values), len(sums.starts) - 1
    out = torch.empty(number, matrix.shape[1], dtype=dtype, device=values.device)
    step = _step(_SUM_STEP, matrix.shape[1])
    programs = triton.cdiv(matrix.shape[1], step["BLOCK_H"])
    # The terms are cut into parts in their order. What a sum has beyond the part that it begins in, other programs add
    # up: one for each part, as only one sum goes on at its start.
    part = max(_PART, triton.next_power_of_2(2 * terms // _MOST_PARTS))
    given, parts = (values, sums.rows, sums.starts, matrix, matrix.stride(0), matrix.shape[1], part), None
    if sums.longest > part and terms > part:
        parts = torch.empty(triton.cdiv(terms, part), matrix.shape[1], device=values.device)
        _part_kernel[(len(parts), programs)](parts, sums.sums, number, *given, **step)
    if number:
        _sum_rows_kernel[(number, programs)](out, parts, *given, **step)
    return out


#: Pointers of which no kernel is compiled for an alignment.
_UNALIGNED = ["projected", "hidden", "columns", "near", "tokens", "ids", "starts", "labels", "logp", "entropy", "lse"]
_UNALIGNED += ["facts", "grad_logp", "grad_entropy", "grad_lse", "grad_pairs", "values", "rows", "sums", "matrix"]


@jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=_UNALIGNED)
def _project_kernel(
    projected, hidden, weight, hidden_stride, stride, columns, tokens, pairs, hidden_size,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per ``BLOCK_P`` pairs, of one token or several: a token may have any number of columns."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.load(columns + at, mask=at < pairs, other=-1).to(tl.int64)
    token = tl.load(tokens + at, mask=at < pairs, other=0).to(tl.int64)
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


@jit
def _load_logits(projected, columns, at, last, bias, transform, inverse):
    """The columns of a token's pairs, and their logits: -inf of pairs that do not count."""
    column = tl.load(columns + at, mask=at < last, other=-1)
    x = tl.load(projected + at, mask=column >= 0, other=0.0)
    if bias is not None or transform.factor is not None:
        x = transform_block(x, bias, column, column >= 0, transform, inverse)
    return column, tl.where(column >= 0, x, float("-inf"))


@jit(
    do_not_specialize=["count", "vocab_size", "ignore_index"],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def _summarize_kernel(
    logp, entropy, lse, facts, projected, columns, near, ids, starts, labels, bias, transform, count, vocab_size,
    ignore_index, no_columns, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + token)
    last = tl.load(starts + token + 1)
    label = tl.load(labels + token)
    inverse = 1.0
    if transform.temperature is not None:
        inverse = inverse_temperature(transform, token, True, 0)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    full = tl.zeros((BLOCK,), tl.int32)
    hits = tl.zeros((BLOCK,), tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    ends = tl.zeros((BLOCK,), tl.int64)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        _, z = _load_logits(projected, columns, at, last, bias, transform, inverse)
        largest = tl.maximum(largest, z)
        some = tl.load(ids + at, mask=at < last, other=-1).to(tl.int64)
        full += (some != -1).to(tl.int32)
        hits += ((at < last) & (some == label)).to(tl.int32)
        wrong += ((some < -1) | (some >= vocab_size)).to(tl.int32)
        ends = tl.maximum(ends, tl.where(some != -1, at + 1, 0))
    top = tl.max(largest, 0)
    top = tl.where(top > float("-inf"), top, 0.0)
    end = tl.max(ends, 0)  # padding behind all ids is not compared
    sums = tl.zeros((BLOCK,), tl.float32)
    moments = tl.zeros((BLOCK,), tl.float32)
    at_label = tl.zeros((BLOCK,), tl.float32)
    twice = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        column, z = _load_logits(projected, columns, at, last, bias, transform, inverse)
        shifted = z - top
        e = tl.exp(shifted)
        sums += e
        moments += e * tl.where(e > 0, shifted, 0.0)
        own = tl.load(ids + at, mask=at < last, other=-1).to(tl.int64) == label
        at_label += tl.where(own & (column >= 0), shifted, 0.0)
        small = tl.load(near + at, mask=at < last, other=-1)
        here = tl.arange(0, BLOCK)  # places in int32 take half the registers
        for ahead in range(0, (end - start).to(tl.int32), BLOCK):
            others = tl.load(near + at + ahead, mask=at + ahead < last, other=-1)
            later = here[:, None] < ahead + here[None, :]
            same = (small[:, None] == others[None, :]) & (small >= 0)[:, None] & later
            twice += tl.sum(same.to(tl.int32), 1)
    total = tl.sum(sums, 0)
    found = total != 0.0  # also where it is NaN
    total = tl.where(found, total, 1.0)
    log_total = tl.log(total)
    tl.store(logp + token, tl.sum(at_label, 0) - log_total)
    tl.store(entropy + token, log_total - tl.sum(moments, 0) / total)
    tl.store(lse + token, tl.where(found, top + log_total, no_columns))
    active = label != ignore_index
    cut = active & (tl.sum(full, 0) > 0)
    facts += token
    tl.store(facts, cut.to(tl.int32))
    tl.store(facts + count, (active & (cut == 0)).to(tl.int32))
    tl.store(facts + 2 * count, (cut & (tl.sum(hits, 0) == 0)).to(tl.int32))
    tl.store(facts + 3 * count, (active & (tl.sum(wrong, 0) > 0)).to(tl.int32))
    tl.store(facts + 4 * count, (tl.sum(twice, 0) > 0).to(tl.int32))
    tl.store(facts + 5 * count, (active & ((label < 0) | (label >= vocab_size))).to(tl.int32))


@jit(do_not_specialize_on_alignment=_UNALIGNED)
def _differentiate_kernel(
    values, projected, grad_logp, grad_entropy, grad_lse, entropy, lse, grad_pairs, columns, ids, starts, labels, bias,
    transform, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + token)
    last = tl.load(starts + token + 1)
    label = tl.load(labels + token)
    of_logp = 0.0 if grad_logp is None else tl.load(grad_logp + token)
    of_lse = 0.0 if grad_lse is None else tl.load(grad_lse + token)
    log_sum = tl.load(lse + token)
    inverse = 1.0
    if transform.temperature is not None:
        inverse = inverse_temperature(transform, token, True, 0)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        column, z = _load_logits(projected, columns, at, last, bias, transform, inverse)
        own = tl.load(ids + at, mask=at < last, other=-1).to(tl.int64) == label
        log_p = z - log_sum
        p = tl.exp(log_p)
        grad = tl.where(own, of_logp, 0.0) + p * (of_lse - of_logp)
        if grad_entropy is not None:
            grad -= tl.load(grad_entropy + token) * p * tl.where(p > 0, log_p + tl.load(entropy + token), 0.0)
        if grad_pairs is not None:
            grad += tl.load(grad_pairs + at, mask=at < last, other=0.0)
        if transform.factor is not None:
            grad = transform_gradient(grad, tl.where(column >= 0, z, 0.0), transform, inverse)
        tl.store(values + at, tl.where(column >= 0, grad, 0.0), mask=at < last)


@jit
def _sum_terms(values, rows, matrix, stride, first, last, ks, inside, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr):
    """``sum_i values_i matrix[rows_i, ks]``, i from ``first`` to ``last``."""
    terms = tl.zeros((BLOCK_P, BLOCK_H), tl.float32)
    for start in range(first, last, BLOCK_P):
        at = start + tl.arange(0, BLOCK_P)
        row = tl.load(rows + at, mask=at < last, other=-1).to(tl.int64)
        value = tl.load(values + at, mask=row >= 0, other=0.0)
        x = tl.load(matrix + row[:, None] * stride + ks[None, :], mask=(row >= 0)[:, None] & inside[None, :], other=0.0)
        terms += value[:, None] * x.to(tl.float32)
    return tl.sum(terms, 0)


@jit(do_not_specialize=["number", "part"], do_not_specialize_on_alignment=_UNALIGNED)
def _part_kernel(
    parts, sums, number, values, rows, starts, matrix, stride, hidden_size, part,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per part of the terms, for the sum that goes on at its start."""
    begin = tl.program_id(0).to(tl.int64) * part
    which = tl.load(sums + begin).to(tl.int64)
    if which < number:
        last = tl.load(starts + which + 1)
        if (tl.load(starts + which) < begin) & (begin < last):
            ks = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
            last = tl.minimum(last, begin + part)
            total = _sum_terms(values, rows, matrix, stride, begin, last, ks, ks < hidden_size, BLOCK_P, BLOCK_H)
            tl.store(parts + tl.program_id(0).to(tl.int64) * hidden_size + ks, total, mask=ks < hidden_size)


@jit(do_not_specialize=["part"], do_not_specialize_on_alignment=_UNALIGNED)
def _sum_rows_kernel(
    out, parts, values, rows, starts, matrix, stride, hidden_size, part,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per sum and part of the columns of the matrix."""
    which = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + which)
    last = tl.load(starts + which + 1)
    ks = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    stop = last
    if parts is not None:
        stop = tl.minimum(last, (first // part + 1) * part)
    total = _sum_terms(values, rows, matrix, stride, first, stop, ks, ks < hidden_size, BLOCK_P, BLOCK_H)
    if parts is not None:
        for number in range(first // part + 1, (last + part - 1) // part):
            total += tl.load(parts + number * hidden_size + ks, mask=ks < hidden_size, other=0.0)
    tl.store(out + which * hidden_size + ks, total.to(out.dtype.element_ty), mask=ks < hidden_size)


class _Kernels(NamedTuple):
    """One backend's: projections of all pairs, each token's statistics, the projections' gradients, sums of rows."""

    project_: Callable[..., None]
    summarize: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    differentiate: Callable[..., Tensor]
    sum_rows: Callable[..., Tensor]


_BACKENDS = {
    "torch": _Kernels(_project_torch_, _summarize_torch, _differentiate_torch, _sum_rows_torch),
    "triton": _Kernels(_project_triton_, _summarize_triton, _differentiate_triton, _sum_rows_triton),
}
