"""Softmaxes over columns that each token keeps: their rows of the head are read where they lie, and no copy is made.

The core's block, on products that gather nothing: the core copies ``[R, K, H]`` rows, and adds as many to the gradient.
On an H200, 8192 x 4096 x 128256 in bf16 (benchmarks/results/accelerators.txt), calls over 8, 64 and 256 kept columns
take 0.55, 0.16 and 0.09 of the time, and 4 to 74 MiB instead of 2 GiB.

R tokens, K kept columns of a token, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.label_rows import project_columns
from liger_losses.chunked.accelerators.tiles import with_contiguous_rows
from liger_losses.chunked.core.block import Block
from liger_losses.chunked.core.buffers import Gradients, local_part
from liger_losses.chunked.core.plan import Plan, Signature, by_blocks, padded
from liger_losses.chunked.core.weights import ALL, Columns, Dense, WithAdapters
from liger_losses.kernels._triton import jit, tl, triton


@dataclass(frozen=True, eq=False)
class RowsInPlace(Dense):
    """A matrix whose products with columns of each token are kernels'."""

    def logits(self, out: Tensor, hidden: Tensor, columns: Columns) -> Tensor:
        if isinstance(columns, slice):
            return super().logits(out, hidden, columns)
        return project_columns(out, hidden, local_part(self.weight.detach()), columns)

    def hidden_gradient(self, grad: Tensor, columns: Columns, out: Tensor | None = None) -> Tensor:
        if isinstance(columns, slice):
            return super().hidden_gradient(grad, columns, out)
        count, width = columns.shape
        starts = torch.arange(0, (count + 1) * width, width, device=columns.device)
        sums = Sums(columns.reshape(-1).int(), starts, width)
        weight = local_part(self.weight.detach())
        return sum_rows(grad.reshape(-1), sums, weight, weight.new_empty(count, self.hidden_size))

    def add_gradients(self, grads: Gradients, grad: Tensor, hidden: Tensor, columns: Columns) -> None:
        if isinstance(columns, slice):
            return super().add_gradients(grads, grad, hidden, columns)
        if (buffer := grads.of(self.weight)) is None:
            return None
        # By the places of each column, which are sorted; places of no column come first.
        ordered, order = columns.reshape(-1).int().sort(stable=True)
        tokens, values = (order // columns.shape[1]).int(), grad.reshape(-1)[order]
        if buffer.lists_rows:
            ids, numbers, lengths = ordered.unique_consecutive(return_inverse=True, return_counts=True)
            starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            rows = grad.new_empty(len(ids), self.hidden_size)
            sums = Sums(tokens, starts, len(grad), numbers.int())
            buffer.add_rows(ids.long(), sum_rows(values, sums, hidden, rows))
            return None
        total, holds = buffer.rows(ALL)
        every = torch.arange(len(total) + 1, dtype=torch.int32, device=columns.device)
        sums = Sums(tokens, torch.searchsorted(ordered, every), len(grad), ordered)
        sum_rows(values, sums, hidden, total, accumulate=holds)
        return None


@dataclass(eq=False)
class KeptBlock(Block):
    """The core's, with rows in place."""

    @property
    def weights(self) -> Any:
        return _in_place(self.part.head.weights)


def _in_place(weights: Any) -> Any:
    if isinstance(weights, WithAdapters):
        return replace(weights, base=_in_place(weights.base))
    return RowsInPlace(weights.weight, weights.products)


def row_bytes(call: Signature) -> int:
    """Of a token: logits, places and their order; its hidden state and the gradient of that."""
    return 4 * padded(call.columns + 1) + 64 * call.columns + call.hidden_size * (call.operand.itemsize + 8)


def planned(call: Signature) -> Plan | None:
    """Of calls whose rows of a matrix can be read as they are."""
    plain = call.weights[-1] is Dense and {*call.weights[:-1]} <= {WithAdapters} and not call.copied_bytes
    if not (call.kept and plain) or call.backend != "triton" or call.batch_invariant or call.teacher_columns:
        return None
    return by_blocks(call, "kept", KeptBlock.of, row_bytes(call))


# --- Sums of rows of a matrix, each row with a factor: many short sums, and a few long ones ---------------------------
# P terms of all sums together, S sums, H columns of the matrix

#: Terms and columns of one step, and warps. (On an H200, 8192 tokens of H 4096 with 20 or 64 given columns, bf16,
#: forward and backward 1.64 and 3.15 ms, where sums by (4, 512, 1) take 2.42 and 3.59.)
_STEP = (2, 1024, 2)
#: Sums go on in parts of as many terms, or of so many that there are about _MOST_PARTS / 2 parts. (There, forward and
#: backward: 3.1 to 3.3 and 4.3 to 4.5 ms for all of 64 to 512 terms and 1024 to 4096 parts.)
_PART, _MOST_PARTS = 128, 2048


class Sums(NamedTuple):
    """Sums of rows of a matrix: number s is ``sum_i values_i matrix[rows_i]``, ``starts[s] <= i < starts[s + 1]``."""

    rows: Tensor  # [P] int32; -1 for none
    starts: Tensor  # [S + 1] int64
    longest: int  # the most terms of a sum, or a bound; without ``sums``, the terms of each
    sums: Tensor | None = None  # [P] int32, the number of the sum that a term is part of; below 0 for none


def sum_rows(values: Tensor, sums: Sums, matrix: Tensor, out: Tensor, *, accumulate: bool = False) -> Tensor:
    """``out [S, H]`` gets the sums of the rows of ``matrix [*, H]`` times ``values [P]``, or is added to; each is
    rounded once."""
    matrix, terms, number = with_contiguous_rows(matrix), len(values), len(sums.starts) - 1
    block, depth, warps = _STEP
    step = {"BLOCK_P": block, "BLOCK_H": min(depth, triton.next_power_of_2(matrix.shape[1])), "num_warps": warps}
    programs = triton.cdiv(matrix.shape[1], step["BLOCK_H"])
    # The terms are cut into parts in their order. What a sum has beyond the part that it begins in, other programs add
    # up: one for each part, as only one sum goes on at its start.
    part = max(_PART, triton.next_power_of_2(2 * terms // _MOST_PARTS))
    shared, parts = (values, sums.rows, sums.starts, matrix, matrix.stride(0), matrix.shape[1], part), None
    if sums.longest > part and terms > part:
        numbers = sums.sums
        if numbers is None:
            numbers = torch.arange(terms, dtype=torch.int32, device=values.device) // sums.longest
        parts = torch.empty(triton.cdiv(terms, part), matrix.shape[1], dtype=torch.float32, device=values.device)
        _part_kernel[(len(parts), programs)](parts, numbers, number, *shared, **step)
    if number:
        _sum_rows_kernel[(number, programs)](out, out.stride(0), parts, *shared, ADDS=accumulate, **step)
    return out


#: Pointers of which no kernel is compiled for an alignment.
_UNALIGNED = ["starts", "values", "rows", "sums", "matrix"]


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
    if (which >= 0) & (which < number):
        last = tl.load(starts + which + 1)
        if (tl.load(starts + which) < begin) & (begin < last):
            ks = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
            last = tl.minimum(last, begin + part)
            total = _sum_terms(values, rows, matrix, stride, begin, last, ks, ks < hidden_size, BLOCK_P, BLOCK_H)
            tl.store(parts + tl.program_id(0).to(tl.int64) * hidden_size + ks, total, mask=ks < hidden_size)


@jit(do_not_specialize=["part"], do_not_specialize_on_alignment=_UNALIGNED)
def _sum_rows_kernel(
    out, out_stride, parts, values, rows, starts, matrix, stride, hidden_size, part,
    ADDS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
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
    out += which * out_stride
    there = ks < hidden_size
    if ADDS:  # nothing is read and written of no terms
        there = ks < tl.where(first < last, hidden_size, 0)
        total += tl.load(out + ks, mask=there, other=0.0).to(tl.float32)
    tl.store(out + ks, total.to(out.dtype.element_ty), mask=there)
