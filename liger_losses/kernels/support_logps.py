"""Log-probabilities over a few columns of the vocabulary per token: only these rows of the head are read.

N tokens, H hidden size, V vocabulary size, P pairs of a token and one of its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

#: Bytes of the rows of the head, and of hidden states, that the reference gathers at a time.
_GATHERED_BYTES = 64 * 2**20
#: A sum of more rows is divided among programs, each of which takes _PART rows, or so many that there are about
#: _MOST_PARTS parts.
_PART, _MOST_PARTS = 128, 2048
#: Pairs and hidden dimensions of one step, and warps, of projections and of sums of rows.
_PROJECT_STEP, _SUM_STEP = (16, 256, 4), (8, 1024, 4)


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """The columns of N tokens, as P pairs, token after token.

    Args:
        columns: ``[P]`` int32; -1 for a pair that does not count.
        offsets: ``[N + 1]`` int64: token n has the pairs ``offsets[n]`` to ``offsets[n + 1]``, all different, at least
            one of which counts.
        labels: ``[N]`` int64, one of each token's columns.
        vocab_size: V.
        longest: the most pairs of a token, or a bound.
    """

    columns: Tensor
    offsets: Tensor
    labels: Tensor
    vocab_size: int
    longest: int

    @cached_property
    def owners(self) -> Tensor:
        """``[P]`` int32, each pair's token."""
        tokens = torch.arange(len(self.labels), dtype=torch.int32, device=self.labels.device)
        return tokens.repeat_interleave(self.offsets.diff(), output_size=len(self.columns))

    @property
    def by_token(self) -> RowSums:
        """What is summed for each token: rows of the head."""
        return RowSums(self.columns, self.offsets, None, self.longest)

    @cached_property
    def by_column(self) -> RowSums:
        """What is summed for each column: hidden states, in the order of the tokens."""
        columns, order = self.sorted
        starts = torch.searchsorted(
            columns, torch.arange(self.vocab_size + 1, dtype=torch.int32, device=columns.device)
        )
        return RowSums(self.owners[order], starts, order, len(self.labels))

    @cached_property
    def sorted(self) -> tuple[Tensor, Tensor]:
        """``[P]`` each: the columns in increasing order, those that do not count last, and the pairs they are of."""
        columns, order = self.columns.masked_fill(self.columns < 0, self.vocab_size).sort(stable=True)
        return columns, order


class RowSums(NamedTuple):
    """Sums of rows of a matrix: number s is ``sum_i values_i matrix[rows_i]``, ``starts[s] <= i < starts[s + 1]``.

    Args:
        rows: ``[P]`` int32; -1 for none.
        starts: ``[S + 1]`` int64.
        order: ``[P]`` int64, which pair's value ``values_i`` is; ``None`` for the i-th's.
        longest: the most terms of a sum, or a bound.
    """

    rows: Tensor
    starts: Tensor
    order: Tensor | None
    longest: int


class SupportOptions(NamedTuple):
    """What turns projections into logits; ``torch`` or ``triton``."""

    transform: LogitTransform = LogitTransform()
    backend: str = "torch"


def support_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: TokenColumns,
    options: SupportOptions = SupportOptions(),
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the softmax over each token's own columns, differentiable.

    ``logp_n = z_n[label_n] - lse_n``, ``lse_n = log sum_{v in S_n} exp z_n[v]`` and ``entropy_n = -sum p log p``, where
    ``z_n[v] = transform(hidden_n . weight_v + bias_v)`` and ``S_n`` are the columns of token n.

    Nothing of the size ``[P, H]`` or ``[N, V]`` is in memory. Sums are taken in fp32 (fp64 by ``torch`` for fp64
    inputs) in a fixed order, and gradients are rounded once.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]`` or ``None``.
        columns: whose log-probabilities.
        options: the logits' transform and the backend; ``triton`` serves fp16, bf16 and fp32.

    Returns:
        ``logp``, ``entropy`` (in nats) and ``lse``, ``[N]`` each, fp32 or fp64.
    """
    return _SupportStatistics.apply(hidden, weight, bias, columns, options)


class _SupportStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: TokenColumns, options: SupportOptions
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        kernels = _BACKENDS[options.backend]
        with device_of(hidden):
            logits = kernels.project(hidden, weight, bias, columns, options.transform)
            logp, entropy, lse = kernels.summarize(logits, columns)
        ctx.columns, ctx.options, ctx.bias_dtype = columns, options, None if bias is None else bias.dtype
        # What backward needs must not change where users change an output in place.
        ctx.save_for_backward(hidden, weight, logits, entropy.clone(), lse.clone(), columns.labels)
        return logp, entropy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, logits, entropy, lse, _ = ctx.saved_tensors
        columns, kernels = ctx.columns, _BACKENDS[ctx.options.backend]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        g_logp, g_entropy, g_lse = (torch.zeros_like(lse) if g is None else g.contiguous() for g in upstream)
        softmax = _Softmax(g_logp, g_entropy, g_lse, entropy, lse)
        grad_hidden = grad_weight = grad_bias = None
        with device_of(hidden):
            values = kernels.differentiate(logits, columns, ctx.options.transform, softmax)
            if needs_hidden:
                grad_hidden = kernels.sum_rows(values, columns.by_token, weight, hidden.dtype)
            if needs_weight:
                grad_weight = kernels.sum_rows(values, columns.by_column, hidden, weight.dtype)
            if needs_bias:
                grad_bias = kernels.sum_values(values, columns.by_column, ctx.bias_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


class _Softmax(NamedTuple):
    """``[N]`` each: the gradients by the statistics, and the statistics that the softmax's gradient needs."""

    grad_logp: Tensor
    grad_entropy: Tensor
    grad_lse: Tensor
    entropy: Tensor
    lse: Tensor


# --- Reference --------------------------------------------------------------------------------------------------------


def _slices(rows: int, hidden_size: int, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of so many rows that two matrices of them fit :data:`_GATHERED_BYTES`."""
    size = max(1, _GATHERED_BYTES // (2 * hidden_size * dtype.itemsize))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _project_torch(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: TokenColumns, transform: LogitTransform
) -> Tensor:
    wide = torch.promote_types(torch.float32, torch.promote_types(hidden.dtype, weight.dtype))
    safe = columns.columns.clamp(min=0)
    logits = torch.empty(len(safe), dtype=wide, device=hidden.device)
    for at in _slices(len(safe), hidden.shape[1], wide):
        projected = (hidden[columns.owners[at]].to(wide) * weight[safe[at]].to(wide)).sum(-1)
        own = transform.rows(columns.owners[at])
        logits[at] = own(projected, None if bias is None else bias[safe[at]].to(wide))
    return logits.masked_fill_(columns.columns < 0, float("-inf"))


def _summarize_torch(logits: Tensor, columns: TokenColumns) -> tuple[Tensor, Tensor, Tensor]:
    def total(values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", offsets=columns.offsets)

    owners = columns.owners
    shifted = logits - torch.segment_reduce(logits, "max", offsets=columns.offsets)[owners]
    exp = shifted.exp()
    sums, hits = total(exp), columns.columns == columns.labels[owners]
    logp = total(torch.where(hits, shifted, 0.0)) - sums.log()
    entropy = sums.log() - total(torch.where(exp > 0, exp * shifted, 0.0)) / sums
    return logp, entropy, torch.segment_reduce(logits, "max", offsets=columns.offsets) + sums.log()


def _differentiate_torch(logits: Tensor, columns: TokenColumns, transform: LogitTransform, softmax: _Softmax) -> Tensor:
    g_logp, g_entropy, g_lse, entropy, lse = (values[columns.owners] for values in softmax)
    log_p = logits - lse
    p = log_p.exp()
    grad = torch.where(columns.columns == columns.labels[columns.owners], g_logp, 0.0) + p * (g_lse - g_logp)
    grad -= torch.where(p > 0, g_entropy * p * (log_p + entropy), 0.0)
    counts = columns.columns >= 0
    own = transform.rows(columns.owners)
    return own.chain_(torch.where(counts, grad, 0.0), torch.where(counts, logits, 0.0))


def _sum_rows_torch(values: Tensor, sums: RowSums, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    values, starts = values if sums.order is None else values[sums.order], sums.starts.tolist()
    lengths, size = sums.starts.diff(), matrix.shape[1]
    out = torch.empty(len(lengths), size, dtype=dtype, device=values.device)
    for some in _slices(len(out), size, values.dtype):
        first, last = starts[some.start], starts[some.stop]
        which = torch.arange(len(lengths[some]), device=values.device).repeat_interleave(lengths[some])
        total = values.new_zeros(len(lengths[some]), size)
        for part in _slices(last - first, size, values.dtype):
            at = slice(first + part.start, first + part.stop)
            rows = matrix[sums.rows[at].clamp(min=0)].to(values.dtype)
            total.index_add_(0, which[part], values[at, None] * rows)
        out[some] = total
    return out


def _sum_values_torch(values: Tensor, sums: RowSums, dtype: torch.dtype) -> Tensor:
    ordered = values[sums.order][: int(sums.starts[-1])]
    return torch.segment_reduce(ordered, "sum", offsets=sums.starts).to(dtype)


# --- Triton -----------------------------------------------------------------------------------------------------------


def _step(step: tuple[int, int, int], matrix: Tensor) -> dict[str, int]:
    pairs, depth, warps = step
    return {"BLOCK_P": pairs, "BLOCK_H": min(depth, triton.next_power_of_2(matrix.shape[1])), "num_warps": warps}


def _project_triton(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: TokenColumns, transform: LogitTransform
) -> Tensor:
    hidden, weight = with_contiguous_rows(hidden), with_contiguous_rows(weight)
    pairs = len(columns.columns)
    logits = torch.empty(pairs, device=hidden.device)
    if pairs:
        _project_kernel[(triton.cdiv(pairs, _PROJECT_STEP[0]),)](
            logits, hidden, weight, hidden.stride(0), weight.stride(0), bias, columns.columns, columns.owners, pairs,
            hidden.shape[1], transform.for_kernel(),
            **_step(_PROJECT_STEP, hidden),
        )  # fmt: skip
    return logits


def _summarize_triton(logits: Tensor, columns: TokenColumns) -> tuple[Tensor, Tensor, Tensor]:
    logp, entropy, lse = (torch.empty(len(columns.labels), device=logits.device) for _ in range(3))
    if len(logp):
        _summarize_kernel[(len(logp),)](
            logp, entropy, lse, logits, columns.columns, columns.offsets, columns.labels, BLOCK=128, num_warps=1
        )
    return logp, entropy, lse


def _differentiate_triton(
    logits: Tensor, columns: TokenColumns, transform: LogitTransform, softmax: _Softmax
) -> Tensor:
    values = torch.empty_like(logits)
    if len(columns.labels):
        _differentiate_kernel[(len(columns.labels),)](
            values, logits, *softmax, columns.columns, columns.offsets, columns.labels, transform.for_kernel(),
            BLOCK=128, num_warps=1,
        )  # fmt: skip
    return values


def _sum_rows_triton(values: Tensor, sums: RowSums, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    values, matrix, size = (
        values if sums.order is None else values[sums.order],
        with_contiguous_rows(matrix),
        len(values),
    )
    out = torch.empty(len(sums.starts) - 1, matrix.shape[1], dtype=dtype, device=values.device)
    if not len(out):
        return out
    step = _step(_SUM_STEP, matrix)
    terms = (values, sums.rows, sums.starts, matrix, matrix.stride(0), matrix.shape[1])
    programs = triton.cdiv(matrix.shape[1], step["BLOCK_H"])
    part = max(_PART, triton.next_power_of_2(2 * size // _MOST_PARTS))
    parts = first_parts = None
    if sums.longest > part and size > part:
        # How many parts there are stays on the device; a long sum has fewer than twice its length / part.
        most = 2 * size // part
        lengths = sums.starts.diff()
        counts = torch.where(lengths > part, (lengths + part - 1) // part, 0)
        first_parts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        sum_of_part = torch.searchsorted(first_parts, torch.arange(most, device=values.device), right=True) - 1
        parts = torch.empty(most, matrix.shape[1], device=values.device)
        _part_kernel[(most, programs)](parts, sum_of_part, first_parts, len(out), *terms, part, **step)
    _sum_rows_kernel[(len(out), programs)](out, parts, first_parts, *terms, part, **step)
    return out


def _sum_values_triton(values: Tensor, sums: RowSums, dtype: torch.dtype) -> Tensor:
    out = torch.empty(len(sums.starts) - 1, dtype=dtype, device=values.device)
    _sum_values_kernel[(len(out),)](out, values[sums.order], sums.starts, BLOCK=256, num_warps=1)
    return out


@jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["logits", "hidden", "columns", "owners"])
def _project_kernel(
    logits, hidden, weight, hidden_stride, weight_stride, bias, columns, owners, pairs, hidden_size, transform,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per ``BLOCK_P`` pairs, of one token or several: a token may have any number of columns."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.load(columns + at, mask=at < pairs, other=-1).to(tl.int64)
    token = tl.load(owners + at, mask=at < pairs, other=0).to(tl.int64)
    counts = column >= 0
    products = tl.zeros((BLOCK_P, BLOCK_H), tl.float32)
    for k in range(0, hidden_size, BLOCK_H):
        ks = k + tl.arange(0, BLOCK_H)
        inside = counts[:, None] & (ks < hidden_size)[None, :]
        h = tl.load(hidden + token[:, None] * hidden_stride + ks[None, :], mask=inside, other=0.0)
        w = tl.load(weight + column[:, None] * weight_stride + ks[None, :], mask=inside, other=0.0)
        products += w.to(tl.float32) * h.to(tl.float32)
    z = tl.sum(products, 1)
    if bias is not None or transform.factor is not None:
        inverse = 1.0
        if transform.temperature is not None:
            inverse = inverse_temperature(transform, token, counts, 0)
        z = transform_block(z, bias, column, counts, transform, inverse)
    tl.store(logits + at, tl.where(counts, z, float("-inf")), mask=at < pairs)


@jit(do_not_specialize_on_alignment=["logp", "entropy", "lse", "logits", "columns", "offsets", "labels"])
def _summarize_kernel(logp, entropy, lse, logits, columns, offsets, labels, BLOCK: tl.constexpr):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets + token)
    last = tl.load(offsets + token + 1)
    label = tl.load(labels + token)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(logits + at, mask=at < last, other=float("-inf")))
    top = tl.max(largest, 0)
    sums = tl.zeros((BLOCK,), tl.float32)
    moments = tl.zeros((BLOCK,), tl.float32)
    hits = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        shifted = tl.load(logits + at, mask=at < last, other=float("-inf")) - top
        e = tl.exp(shifted)
        sums += e
        moments += e * tl.where(e > 0, shifted, 0.0)
        hits += tl.where(tl.load(columns + at, mask=at < last, other=-1) == label, shifted, 0.0)
    total = tl.sum(sums, 0)
    log_total = tl.log(total)
    tl.store(logp + token, tl.sum(hits, 0) - log_total)
    tl.store(entropy + token, log_total - tl.sum(moments, 0) / total)
    tl.store(lse + token, top + log_total)


@jit(do_not_specialize_on_alignment=["values", "logits", "columns", "offsets", "labels"])
def _differentiate_kernel(
    values, logits, grad_logp, grad_entropy, grad_lse, entropy, lse, columns, offsets, labels, transform,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token: the gradients of its projections."""
    token = tl.program_id(0).to(tl.int64)
    last = tl.load(offsets + token + 1)
    label = tl.load(labels + token)
    of_logp = tl.load(grad_logp + token)
    of_entropy = tl.load(grad_entropy + token)
    of_lse = tl.load(grad_lse + token)
    own_entropy = tl.load(entropy + token)
    log_sum = tl.load(lse + token)
    inverse = 1.0
    if transform.temperature is not None:
        inverse = inverse_temperature(transform, token, True, 0)
    for start in range(tl.load(offsets + token), last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        column = tl.load(columns + at, mask=at < last, other=-1)
        z = tl.load(logits + at, mask=at < last, other=float("-inf"))
        log_p = z - log_sum
        p = tl.exp(log_p)
        grad = tl.where(column == label, of_logp, 0.0) + p * (of_lse - of_logp)
        grad -= of_entropy * p * tl.where(p > 0, log_p + own_entropy, 0.0)
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


@jit(do_not_specialize=["sums", "part"], do_not_specialize_on_alignment=["values", "rows", "starts", "matrix"])
def _part_kernel(
    parts, sum_of_part, first_parts, sums, values, rows, starts, matrix, stride, hidden_size, part,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per part of a long sum, and part of the columns of the matrix."""
    number = tl.program_id(0).to(tl.int64)
    if number < tl.load(first_parts + sums):
        which = tl.load(sum_of_part + number)
        first = tl.load(starts + which) + (number - tl.load(first_parts + which)) * part
        last = tl.minimum(first + part, tl.load(starts + which + 1))
        ks = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = ks < hidden_size
        total = _sum_terms(values, rows, matrix, stride, first, last, ks, inside, BLOCK_P, BLOCK_H)
        tl.store(parts + number * hidden_size + ks, total, mask=inside)


@jit(do_not_specialize=["part"], do_not_specialize_on_alignment=["values", "rows", "starts", "matrix"])
def _sum_rows_kernel(
    out, parts, first_parts, values, rows, starts, matrix, stride, hidden_size, part,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per sum and part of the columns of the matrix. The parts of a long sum are there already."""
    which = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + which)
    last = tl.load(starts + which + 1)
    ks = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = ks < hidden_size
    if parts is not None:
        last = tl.where(last - first > part, first, last)
    total = _sum_terms(values, rows, matrix, stride, first, last, ks, inside, BLOCK_P, BLOCK_H)
    if parts is not None:
        for number in range(tl.load(first_parts + which), tl.load(first_parts + which + 1)):
            total += tl.load(parts + number * hidden_size + ks, mask=inside, other=0.0)
    tl.store(out + which * hidden_size + ks, total.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize_on_alignment=["out", "values", "starts"])
def _sum_values_kernel(out, values, starts, BLOCK: tl.constexpr):
    """One program per sum."""
    which = tl.program_id(0).to(tl.int64)
    last = tl.load(starts + which + 1)
    terms = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.load(starts + which), last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        terms += tl.load(values + at, mask=at < last, other=0.0)
    tl.store(out + which, tl.sum(terms, 0).to(out.dtype.element_ty))


class _Kernels(NamedTuple):
    """What one backend computes: logits of all pairs, each token's statistics, the gradients of the projections, and
    from them those of hidden states, weight and bias."""

    project: Callable[..., Tensor]
    summarize: Callable[..., tuple[Tensor, Tensor, Tensor]]
    differentiate: Callable[..., Tensor]
    sum_rows: Callable[..., Tensor]
    sum_values: Callable[..., Tensor]


_BACKENDS = {
    "torch": _Kernels(_project_torch, _summarize_torch, _differentiate_torch, _sum_rows_torch, _sum_values_torch),
    "triton": _Kernels(_project_triton, _summarize_triton, _differentiate_triton, _sum_rows_triton, _sum_values_triton),
}
