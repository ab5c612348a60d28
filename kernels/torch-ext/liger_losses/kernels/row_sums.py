"""Sums of weighted rows of a matrix, a different number of them each: deterministic, without atomics.

P terms, S sums, H columns of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels._tiles import with_contiguous_rows
from ..kernels._triton import jit, tl, triton

#: Bytes of the rows that the reference gathers at a time.
GATHERED_BYTES = 64 * 2**20
#: A sum of more than _PART terms, or of so many that all terms are about _MOST_PARTS / 2 parts, is divided among
#: programs. (On an H200, 8192 tokens with 20 or 64 columns, forward and backward: 3.1 to 3.3 and 4.3 to 4.5 ms for all
#: of 64 to 512 terms and 1024 to 4096 parts.)
_PART, _MOST_PARTS = 128, 2048
#: Terms and columns of the matrix of one step, and warps. (There, at H 4096: 1.64 and 3.15 ms, where (4, 512, 1) takes
#: 2.42 and 3.59, (2, 512, 1) 1.88 and 3.03.)
_STEP = (2, 1024, 2)


class RowSums(NamedTuple):
    """Sums of rows of a matrix: number s is ``sum_i values_i matrix[rows_i]``, ``starts[s] <= i < starts[s + 1]``.

    Args:
        rows: ``[P]`` int32; -1 for none.
        starts: ``[S + 1]`` int64; ``None`` where sum s has the terms ``s width`` to ``(s + 1) width``.
        sums: ``[P]`` int32, the number of the sum that a term is part of, S or more for none; ``None`` with ``width``.
        width: how many terms each sum has, or ``None``.
        number: S.
        longest: the most terms of a sum, or a bound.
    """

    rows: Tensor
    starts: Tensor | None
    sums: Tensor | None
    width: int | None
    number: int
    longest: int

    @property
    def edges(self) -> Tensor:
        """``starts``, also where there is a width."""
        if self.starts is not None:
            return self.starts
        assert self.width is not None
        return torch.arange(self.number + 1, device=self.rows.device) * self.width


def sum_rows(values: Tensor, sums: RowSums, matrix: Tensor, dtype: torch.dtype, *, backend: str = "torch") -> Tensor:
    """The sums, taken in the dtype of the values, in a fixed order, and rounded once.

    Args:
        values: ``[P]`` fp32 (or fp64 with ``torch``).
        sums: which rows each sum has.
        matrix: ``[R, H]``.
        dtype: of the result.
        backend: ``torch`` or ``triton``.

    Returns:
        ``[S, H]``.
    """
    return (_sum_rows_torch if backend == "torch" else _sum_rows_triton)(values, sums, matrix, dtype)


def sum_values(values: Tensor, sums: RowSums, dtype: torch.dtype, *, backend: str = "torch") -> Tensor:
    """``out_s``, the sum of the values of sum s alone; arguments as in :func:`sum_rows`."""
    if backend == "torch":
        ordered, starts = values[: int(sums.edges[-1])], sums.edges
        return torch.segment_reduce(ordered, "sum", offsets=starts).to(dtype)
    out = torch.empty(sums.number, dtype=dtype, device=values.device)
    if sums.number:
        _sum_values_kernel[(sums.number,)](out, values, sums.edges, BLOCK=256, num_warps=1)
    return out


def slices(rows: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of so many rows that two matrices of them fit :data:`GATHERED_BYTES`."""
    size = max(1, GATHERED_BYTES // (2 * columns * dtype.itemsize))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _sum_rows_torch(values: Tensor, sums: RowSums, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    edges, size = sums.edges, matrix.shape[1]
    starts, lengths = edges.tolist(), edges.diff()
    out = torch.empty(sums.number, size, dtype=dtype, device=values.device)
    for some in slices(sums.number, size, values.dtype):
        first, last = starts[some.start], starts[some.stop]
        which = torch.arange(len(lengths[some]), device=values.device).repeat_interleave(lengths[some])
        total = values.new_zeros(len(lengths[some]), size)
        for part in slices(last - first, size, values.dtype):
            at = slice(first + part.start, first + part.stop)
            rows = matrix[sums.rows[at].clamp(min=0)].to(values.dtype)
            total.index_add_(0, which[part], values[at, None] * rows)
        out[some] = total
    return out


def step_of(step: tuple[int, int, int], columns: int) -> dict[str, int]:
    """A step's launch options, for a matrix of so many columns."""
    terms, depth, warps = step
    return {"BLOCK_P": terms, "BLOCK_H": min(depth, triton.next_power_of_2(columns)), "num_warps": warps}


def _sum_rows_triton(values: Tensor, sums: RowSums, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    matrix, terms = with_contiguous_rows(matrix), len(values)
    out = torch.empty(sums.number, matrix.shape[1], dtype=dtype, device=values.device)
    if not sums.number:
        return out
    step = step_of(_STEP, matrix.shape[1])
    programs = triton.cdiv(matrix.shape[1], step["BLOCK_H"])
    # Chunks of the terms in their order. Of a sum that is longer, each chunk has a part: that which begins before the
    # chunk, or at its start, and that which goes on behind it. How many sums are long stays on the device.
    part = max(_PART, triton.next_power_of_2(2 * terms // _MOST_PARTS))
    parts = None
    given = (values, sums.rows, sums.starts, sums.width, matrix, matrix.stride(0), matrix.shape[1], part)
    if sums.longest > part and terms > part:
        chunks = triton.cdiv(terms, part)
        parts = torch.empty(2 * chunks, matrix.shape[1], device=values.device)
        _part_kernel[(2 * chunks, programs)](parts, sums.sums, sums.number, terms, *given, **step)
    _sum_rows_kernel[(sums.number, programs)](out, parts, *given, **step)
    return out


@jit
def edges_of(starts, width, number):
    """The first term of a sum, and the first that is no longer one of its."""
    if starts is None:
        first = number * width
        last = first + width
    else:
        first = tl.load(starts + number)
        last = tl.load(starts + number + 1)
    return first, last


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


_INTEGERS = ["width", "part", "sum_count", "terms"]
_POINTERS = ["values", "rows", "starts", "sums", "matrix"]


@jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_POINTERS)
def _part_kernel(
    parts, sums, sum_count, terms, values, rows, starts, width, matrix, stride, hidden_size, part,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Two programs per chunk of the terms: the long sum at its first term, and that at its last."""
    number = tl.program_id(0).to(tl.int64)
    begin = number // 2 * part
    end = tl.minimum(begin + part, terms)
    at = tl.where(number % 2 == 0, begin, end - 1)
    which = at // width if sums is None else tl.load(sums + at).to(tl.int64)
    if which < sum_count:
        first, last = edges_of(starts, width, which)
        # A sum that begins with the chunk is the first program's alone.
        other = (number % 2 == 1) & (first <= begin)
        if (last - first > part) & (at >= first) & (at < last) & (other == 0):
            ks = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
            inside = ks < hidden_size
            first = tl.maximum(first, begin)
            last = tl.minimum(last, end)
            total = _sum_terms(values, rows, matrix, stride, first, last, ks, inside, BLOCK_P, BLOCK_H)
            tl.store(parts + number * hidden_size + ks, total, mask=inside)


@jit(do_not_specialize=_INTEGERS[:2], do_not_specialize_on_alignment=["values", "rows", "starts", "matrix"])
def _sum_rows_kernel(
    out, parts, values, rows, starts, width, matrix, stride, hidden_size, part,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per sum and part of the columns of the matrix. The parts of a long sum are there already."""
    which = tl.program_id(0).to(tl.int64)
    first, last = edges_of(starts, width, which)
    ks = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = ks < hidden_size
    if parts is not None:
        behind = tl.where(last - first > part, (last - 1) // part + 1, first // part)
        last = tl.where(last - first > part, first, last)
    total = _sum_terms(values, rows, matrix, stride, first, last, ks, inside, BLOCK_P, BLOCK_H)
    if parts is not None:
        for chunk in range(first // part, behind):
            number = 2 * chunk + (first > chunk * part).to(tl.int64)
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
