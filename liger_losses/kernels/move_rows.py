"""Rows of a matrix that move to other rows of it."""

from __future__ import annotations

from torch import Tensor

from liger_losses.kernels._triton import jit, tl

#: Elements of a row that a program moves at once; and bytes of rows that exist twice without Triton.
_COLUMNS = 8192
_BYTES = 2**26


def move_rows_(matrix: Tensor, sources: Tensor, targets: Tensor, *, backend: str = "torch") -> None:
    """``matrix[targets_i] = matrix[sources_i]``, in place, where both are rows of it: others are left out.

    No row may be both a source and a target, or a target twice.

    Args:
        matrix: ``[N, C]``, rows contiguous, in any dtype.
        sources, targets: ``[M]`` int64.
        backend: ``torch`` or ``triton``.
    """
    columns, itemsize = matrix.shape[1], matrix.element_size()
    if backend == "torch":
        size, moves = max(1, _BYTES // max(columns * itemsize, 1)), sources < len(matrix)
        sources, targets = sources[moves], targets[moves]
        for rows, into in zip(sources.split(size), targets.split(size), strict=True):
            matrix.index_copy_(0, into, matrix.index_select(0, rows))
    elif len(sources):
        _move_rows_kernel[(len(sources),)](
            matrix, matrix.stride(0), sources, targets, *matrix.shape, BLOCK=_COLUMNS, num_warps=8
        )  # fmt: skip


@jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["sources", "targets"])
def _move_rows_kernel(matrix, row_stride, sources, targets, rows, columns, BLOCK: tl.constexpr):
    """One program for each move."""
    source, target = tl.load(sources + tl.program_id(0)), tl.load(targets + tl.program_id(0))
    if source < rows:
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            row = tl.load(matrix + source * row_stride + at, mask=at < columns)
            tl.store(matrix + target * row_stride + at, row, mask=at < columns)
