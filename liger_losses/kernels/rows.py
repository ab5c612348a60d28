"""What kernels over rows share: tensors as rows, tile sizes, and sums of columns in a fixed order.

R rows, C columns. A tile is a block of whole rows; C is padded to a power of two in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import processors
from liger_losses.kernels._triton import jit, tl

#: A tile of one row must fit the registers of one program.
LONGEST_ROW = 65536
#: Of shared memory, for one program's tiles in flight.
SHARED_BYTES = 96 * 1024


class Tile(NamedTuple):
    """Rows and columns (a power of two) of a tile, and the warps that work on it."""

    rows: int
    columns: int
    warps: int


def tile_of(columns: int, elements: int, per_thread: int) -> Tile:
    """A tile of about ``elements`` elements, ``per_thread`` of them in each thread where 32 warps suffice."""
    width = power_of_two(columns)
    rows = max(1, elements // width)
    return Tile(rows, width, min(32, max(1, rows * width // (32 * per_thread))))


def power_of_two(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(number - 1, 0).bit_length()


def obstacle_of_row(columns: int) -> str | None:
    """Why the row-wise Triton kernels cannot serve rows of this length, or None."""
    return f"rows of {columns} entries are longer than {LONGEST_ROW}" if columns > LONGEST_ROW else None


def as_rows(tensor: Tensor) -> Tensor:
    """``[..., C]`` as ``[R, C]`` with adjacent columns; a copy only where the strides leave no choice."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty(0, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def wide(tensor: Tensor) -> Tensor:
    """In fp32, or fp64 where it is fp64: what the torch twins compute in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def as_output(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An autograd function's output, contiguous and in a dtype.

    Nothing is called where nothing changes: torch.compile in torch 2.11 takes the gradient of what
    ``to`` and ``contiguous`` return unchanged for 0.
    """
    if dtype is not None and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def stages_of(tile: Tile, tensors: tuple[Tensor | None, ...]) -> int:
    """How many tiles ahead the next rows are loaded: as shared memory allows with two programs per multiprocessor."""
    entry = sum(tensor.element_size() for tensor in tensors if tensor is not None)
    return 3 if 3 * tile.rows * tile.columns * entry <= SHARED_BYTES else 1


def persistent_programs(tiles: int, device: torch.device, per_processor: int) -> int:
    """How many programs share the tiles: some for each multiprocessor, however many tiles there are."""
    return min(tiles, processors(device) * per_processor)


def column_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """``[P, C]`` fp32 summed over P, always in the same order, and rounded once, to ``[C]``."""
    programs, columns = partial.shape
    out = partial.new_empty(columns, dtype=dtype)
    block = 16
    _column_sums_kernel[(-(-columns // block),)](
        partial, out, programs, columns, min(512, power_of_two(programs)), block, num_warps=8
    )
    return out


@jit(do_not_specialize=["programs"])
def _column_sums_kernel(partial, out, programs, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, programs, ROWS):
        r = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial + r.to(tl.int64) * columns + c, mask=(r < programs) & (c < columns), other=0.0)
    tl.store(out + c, tl.sum(total, 0)[None, :].to(out.dtype.element_ty), mask=c < columns)
