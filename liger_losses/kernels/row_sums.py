"""Sums of rows of a matrix, each row with a factor: many short sums, and a few long ones.

P terms of all sums together, S sums, H columns of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import with_contiguous_rows
from liger_losses.kernels._triton import jit, tl, triton

#: Bytes of the rows that the reference gathers at a time.
GATHERED_BYTES = 64 * 2**20
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

    @property
    def numbers(self) -> Tensor:
        """``sums``."""
        if self.sums is not None:
            return self.sums
        return torch.arange(len(self.rows), dtype=torch.int32, device=self.rows.device) // self.longest


def sum_rows(values: Tensor, sums: Sums, matrix: Tensor, dtype: torch.dtype, *, backend: str = "torch") -> Tensor:
    """The sums ``[S, H]`` of the rows of ``matrix [*, H]`` times ``values [P]``, rounded to this dtype."""
    return (_sum_rows_torch if backend == "torch" else _sum_rows_triton)(values, sums, matrix, dtype)


def gathered_slices(rows: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of so many rows that two matrices of them fit :data:`GATHERED_BYTES`."""
    size = max(1, GATHERED_BYTES // (2 * max(columns, 1) * dtype.itemsize))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _sum_rows_torch(values: Tensor, sums: Sums, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    number, size, numbers = len(sums.starts) - 1, matrix.shape[1], sums.numbers
    total = values.new_zeros(number + 1, size)  # the last for terms of no sum
    for at in gathered_slices(len(values), size, values.dtype):
        rows = sums.rows[at]
        terms = torch.where(rows >= 0, values[at], 0.0)[:, None] * matrix[rows.clamp(min=0)].to(values.dtype)
        which = numbers[at]
        total.index_add_(0, torch.where((which >= 0) & (which < number), which, number), terms)
    return total[:-1].to(dtype)


# --- Triton -----------------------------------------------------------------------------------------------------------


def step_options(step: tuple[int, int, int], columns: int) -> dict[str, int]:
    """A step's launch options, for a matrix of so many columns."""
    terms, depth, warps = step
    return {"BLOCK_P": terms, "BLOCK_H": min(depth, triton.next_power_of_2(columns)), "num_warps": warps}


def _sum_rows_triton(values: Tensor, sums: Sums, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    matrix, terms, number = with_contiguous_rows(matrix), len(values), len(sums.starts) - 1
    out = torch.empty(number, matrix.shape[1], dtype=dtype, device=values.device)
    step = step_options(_STEP, matrix.shape[1])
    programs = triton.cdiv(matrix.shape[1], step["BLOCK_H"])
    # The terms are cut into parts in their order. What a sum has beyond the part that it begins in, other programs add
    # up: one for each part, as only one sum goes on at its start.
    part = max(_PART, triton.next_power_of_2(2 * terms // _MOST_PARTS))
    given, parts = (values, sums.rows, sums.starts, matrix, matrix.stride(0), matrix.shape[1], part), None
    if sums.longest > part and terms > part:
        parts = torch.empty(triton.cdiv(terms, part), matrix.shape[1], dtype=torch.float32, device=values.device)
        _part_kernel[(len(parts), programs)](parts, sums.numbers, number, *given, **step)
    if number:
        _sum_rows_kernel[(number, programs)](out, parts, *given, **step)
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
