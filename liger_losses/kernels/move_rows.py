"""Rows of a matrix: move them within it or to another matrix, and find which of them are to move.

N rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import jit, kinds, tl, triton

#: Elements of a row that a program moves at once; and bytes of rows that exist twice without Triton.
_COLUMNS = 8192
_BYTES = 2**26
#: The most rows that one program puts in order.
_MOST_ROWS = 2**15


class Moves(NamedTuple):
    """The number of rows that count, 0-dim int64; ``[N // 2]`` rows that move, N for none, and where to; and ``[N]``,
    which row is where after that, all int64."""

    total: Tensor
    sources: Tensor
    targets: Tensor
    order: Tensor


def put_first(counts: Tensor, rounded: int, *, backend: str = "torch") -> Moves:
    """Put rows that count first.

    Of as many rows as count, rounded up, those that do not count are taken; what is not taken keeps its place.

    Args:
        counts: ``[N]`` bool.
        rounded: what the number is rounded up to a multiple of.
        backend: ``torch`` or ``triton``.
    """
    n, device = len(counts), counts.device
    if backend == "triton" and 0 < n <= _MOST_ROWS:
        sizes = [n // 2, n // 2, n, 1]
        sources, targets, order, total = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
        block = triton.next_power_of_2(n)
        _put_first_kernel[(1,)](
            counts.contiguous().view(torch.uint8), total, sources, targets, order, n,
            ROUNDED=rounded, BLOCK=block, num_warps=max(4, min(32, block // 256)), kind=(device, rounded, block),
        )  # fmt: skip
        return Moves(total[0], sources, targets, order)
    total = counts.sum()
    first = torch.arange(n, device=device) < (total + rounded - 1) // rounded * rounded
    sources, targets = (
        torch.nonzero_static(found, size=n // 2, fill_value=n).squeeze(-1)
        for found in (counts & ~first, first & ~counts)
    )
    targets, order = targets.masked_fill(sources == n, n), torch.arange(n + 1, device=device)
    order = order.index_copy_(0, targets, sources).index_copy_(0, sources, targets)[:n]
    return Moves(total, sources, targets, order)


def move_rows_(
    matrix: Tensor, sources: Tensor, targets: Tensor, *, into: Tensor | None = None, backend: str = "torch"
) -> None:
    """``into[targets_i] = matrix[sources_i]``, where ``sources_i`` is a row of the matrix: others are left out.

    No row may be a target twice. Without ``into``, no row may be both a source and a target.

    Args:
        matrix: ``[N, C]``, rows contiguous, in any dtype.
        sources, targets: ``[M]`` int64.
        into: ``[K, C]``, rows contiguous, in this dtype; ``matrix`` itself by default.
        backend: ``torch`` or ``triton``.
    """
    columns, itemsize = matrix.shape[1], matrix.element_size()
    into = matrix if into is None else into
    if backend == "torch":
        size, moves = max(1, _BYTES // max(columns * itemsize, 1)), (sources >= 0) & (sources < len(matrix))
        sources, targets = sources[moves], targets[moves]
        for rows, places in zip(sources.split(size), targets.split(size), strict=True):
            into.index_copy_(0, places, matrix.index_select(0, rows))
    elif len(sources):
        _move_rows_kernel[(len(sources),)](
            into, into.stride(0), matrix, matrix.stride(0), sources, targets, *matrix.shape,
            BLOCK=_COLUMNS, num_warps=8, kind=(matrix.device, columns, kinds(into, matrix)),
        )  # fmt: skip


@jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["counts", "total", "sources", "targets", "order"])
def _put_first_kernel(counts, total, sources, targets, order, rows, ROUNDED: tl.constexpr, BLOCK: tl.constexpr):
    """One program for all rows."""
    at = tl.arange(0, BLOCK)
    counted = tl.load(counts + at, mask=at < rows, other=0).to(tl.int32)
    found = tl.sum(counted, 0)
    first = (found + ROUNDED - 1) // ROUNDED * ROUNDED
    free = (at < rows) & (at < first) & (counted == 0)
    moved = (at >= first) & (counted != 0)
    moves = tl.sum(moved.to(tl.int32), 0)
    into = tl.cumsum(free.to(tl.int32), 0) - 1
    number = tl.cumsum(moved.to(tl.int32), 0) - 1
    tl.store(total, found.to(tl.int64))
    tl.store(order + at, at.to(tl.int64), mask=at < rows)
    tl.store(sources + at, rows.to(tl.int64), mask=(at >= moves) & (at < rows // 2))
    tl.store(targets + at, rows.to(tl.int64), mask=(at >= moves) & (at < rows // 2))
    tl.store(targets + into, at.to(tl.int64), mask=free & (into < moves))
    tl.store(sources + number, at.to(tl.int64), mask=moved)
    tl.debug_barrier()  # all of them are in memory
    source = tl.load(sources + at, mask=at < moves, other=0)
    target = tl.load(targets + at, mask=at < moves, other=0)
    tl.store(order + target, source, mask=at < moves)
    tl.store(order + source, target, mask=at < moves)


@jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["sources", "targets"])
def _move_rows_kernel(into, into_stride, matrix, row_stride, sources, targets, rows, columns, BLOCK: tl.constexpr):
    """One program for each move."""
    source, target = tl.load(sources + tl.program_id(0)), tl.load(targets + tl.program_id(0))
    if (source >= 0) & (source < rows):
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            row = tl.load(matrix + source * row_stride + at, mask=at < columns)
            tl.store(into + target * into_stride + at, row, mask=at < columns)
