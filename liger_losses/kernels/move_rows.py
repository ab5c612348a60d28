"""Rows of a matrix that move to other rows of it."""

from __future__ import annotations

from torch import Tensor

from liger_losses.kernels._triton import jit, tl, triton

#: Elements of a row that a program moves; and bytes of rows that exist twice without Triton.
_COLUMNS = 8192
_BYTES = 2**26


def move_rows_(matrix: Tensor, sources: Tensor, targets: Tensor, *, backend: str = "torch") -> None:
    """``matrix[targets_i] = matrix[sources_i]``, in place. No row may be both a source and a target, or a target twice.

    Args:
        matrix: ``[N, C]``, rows contiguous, in any dtype.
        sources, targets: ``[M]`` int64.
        backend: ``torch`` or ``triton``.
    """
    columns, itemsize = matrix.shape[1], matrix.element_size()
    if backend == "torch":
        size = max(1, _BYTES // max(columns * itemsize, 1))
        for rows, into in zip(sources.split(size), targets.split(size), strict=True):
            matrix.index_copy_(0, into, matrix.index_select(0, rows))
    elif len(sources):
        grid = (len(sources), triton.cdiv(columns, _COLUMNS))
        _move_rows_kernel[grid](
            matrix, matrix.stride(0), sources, targets, columns, BLOCK=_COLUMNS, num_warps=8
        )  # fmt: skip


@jit(do_not_specialize_on_alignment=["sources", "targets"])
def _move_rows_kernel(matrix, row_stride, sources, targets, columns, BLOCK: tl.constexpr):
    move = tl.program_id(0)
    source, target = tl.load(sources + move), tl.load(targets + move)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(matrix + source * row_stride + at, mask=at < columns)
    tl.store(matrix + target * row_stride + at, row, mask=at < columns)
