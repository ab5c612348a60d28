"""What kernels over rows share: tensors as rows, tile sizes, launches, and parts of the kernels.

R rows (all leading dimensions of a tensor), C columns. A tile is a block of whole rows; C is padded to a power of two
in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from liger_losses.kernels._triton import choose_backend, jit, power_of_two, tl
from liger_losses.kernels.targets import target_of
from liger_losses.layers.launches import launch

_Tensors = Sequence[Tensor | None]
_Dtypes = Sequence[torch.dtype | None]
# Measured on an H200: elements of a tile, and programs per multiprocessor; columns and warps of a program that adds up
# partial sums.
_FORWARD_ELEMENTS, _BACKWARD_ELEMENTS, _BACKWARD_PROGRAMS = 2048, 4096, 2
_SUM_COLUMNS, _SUM_WARPS = 16, 8


def tile_of(columns: int, elements: int) -> tuple[int, int]:
    """Rows and columns (a power of two) of a tile of about ``elements``."""
    width = power_of_two(columns)
    return max(1, elements // width), width


def choose_row_backend(backend: str | None, tensors: Sequence[Tensor | None], **vectors: Tensor | None) -> bool:
    """Whether Triton runs; raise ValueError unless the vectors have one entry for each column of the first tensor."""
    x = cast(Tensor, tensors[0])
    columns = x.shape[-1]
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (columns,):
            raise ValueError(
                f"{name} must have one entry for each of the {columns} of x's last dimension, "
                f"got {tuple(vector.shape)}."
            )
    longest = target_of(x.device).tiling.longest_row
    reason = f"rows of {columns} entries are longer than {longest}" if columns > longest else None
    return choose_backend(backend, (*tensors, *vectors.values()), unsupported_reason=reason) == "triton"


def as_rows(tensor: Tensor) -> Tensor:
    """``[..., C]`` as ``[R, C]`` with adjacent columns, copied only if the strides require it."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty(0, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def wide(tensor: Tensor) -> Tensor:
    """The tensor in fp64 if it is fp64, else in fp32: the dtype that reference implementations compute in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def as_output(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor, contiguous and in ``dtype`` (by default unchanged), to be returned by an autograd function.

    A tensor that already is both is returned as it is, without a call of ``to`` or ``contiguous``: under torch.compile,
    torch 2.11 computes a gradient of 0 for an output that such a call returned unchanged.
    """
    if dtype is not None and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


# --- Launches ---------------------------------------------------------------------------------------------------------


def launch_forward(
    kernel: Any, per_thread: int, inputs: _Tensors, vectors: _Tensors, outputs: _Tensors, per_row: int, *options: Any
) -> list[Tensor]:
    """Launch a kernel with one program per tile of rows.

    Args:
        kernel: takes the inputs, each with its row stride, the vectors, the outputs, ``[R]`` in fp32 for each of
            ``per_row``, R, C, the options, and the number of rows and columns of a tile.
        per_thread: elements of a tile that each thread works on.
        inputs: ``[..., C]``, all of the same shape, or None; the first is not None.
        vectors: ``[C]``, or None.
        outputs: contiguous tensors ``[..., C]``.

    Returns:
        The ``per_row`` outputs ``[R]``.
    """
    x = cast(Tensor, inputs[0])
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    height, width = tile_of(columns, _FORWARD_ELEMENTS)
    row_outputs = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(per_row)]
    if x.numel():
        arguments = [*with_strides(inputs), *_contiguous(vectors), *outputs, *row_outputs, rows, columns, *options]
        warps = target_of(x.device).warps(height * width // per_thread)
        launch(kernel, -(-rows // height), *arguments, height, width, num_warps=warps)
    return row_outputs


def launch_backward(
    kernel: Any, inputs: _Tensors, vectors: _Tensors, others: _Tensors, sum_dtypes: _Dtypes, *options: Any
) -> list[Tensor | None]:
    """Launch a kernel whose persistent programs share the tiles, and add up the sums over rows that each one writes.

    Args:
        kernel: takes the inputs, each with its row stride, the vectors, the others, ``[programs, C]`` fp32 for each
            sum (or None), R, C, the number of programs, the options, the number of rows and columns of a tile, and how
            many tiles ahead rows are loaded.
        inputs, vectors: as in :func:`launch_forward`.
        others: contiguous tensors to be read or written, or None.
        sum_dtypes: the dtype of each sum over rows, or None for one that is not needed.

    Returns:
        The sums, ``[C]``; the order of summation is always the same.
    """
    x = cast(Tensor, inputs[0])
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    make = torch.empty if x.numel() else torch.zeros
    sums = [None if dtype is None else make(columns, dtype=dtype, device=x.device) for dtype in sum_dtypes]
    if not x.numel():
        return sums
    target, (height, width) = target_of(x.device), tile_of(columns, _BACKWARD_ELEMENTS)
    tiles = -(-rows // height)
    # No more programs than share the tiles in as few rounds: each writes sums that are read again.
    programs = -(-tiles // -(-tiles // (target.processors * _BACKWARD_PROGRAMS)))
    # Rows are loaded two tiles ahead if shared memory holds three tiles of each of two programs per multiprocessor.
    entry_bytes = sum([tensor.element_size() for tensor in inputs if tensor is not None])
    stages = 3 if 3 * height * width * entry_bytes <= target.shared_memory // _BACKWARD_PROGRAMS else 1
    partials = [None if s is None else s.new_empty(programs, columns, dtype=torch.float32) for s in sums]
    arguments = [*with_strides(inputs), *_contiguous(vectors), *others, *partials, rows, columns, programs, *options]
    warps = target.warps(height * width // target.tiling.row_entries)
    launch(kernel, programs, *arguments, height, width, stages, num_warps=warps)
    of_sums = programs, columns, min(512, power_of_two(programs)), _SUM_COLUMNS
    for total, partial in zip(sums, partials, strict=True):
        if total is not None:  # always in the same order, and rounded once
            launch(_column_sums_kernel, -(-columns // _SUM_COLUMNS), partial, total, *of_sums, num_warps=_SUM_WARPS)
    return sums


def with_strides(tensors: _Tensors) -> list[Any]:
    """Each tensor with adjacent columns, followed by the stride from one of its rows to the next."""
    arguments: list[Any] = []
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            tensor = as_rows(tensor)
            arguments += [tensor, tensor.stride(0)]
        else:
            arguments += [tensor, 0 if tensor is None else tensor.shape[-1]]
    return arguments


def _contiguous(vectors: _Tensors) -> list[Tensor | None]:
    return [None if vector is None else vector.contiguous() for vector in vectors]


# --- Triton -----------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["programs"])
def _column_sums_kernel(partial, out, programs, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, programs, ROWS):
        r = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial + r.to(tl.int64) * columns + c, mask=(r < programs) & (c < columns), other=0.0)
    tl.store(out + c, tl.sum(total, 0)[None, :].to(out.dtype.element_ty), mask=c < columns)


@jit
def tile_indices(first_row, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row numbers ``[ROWS, 1]`` and column numbers ``[1, COLUMNS]`` of a tile, and the mask of entries that exist."""
    r = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    return r, c, (r < rows) & (c < columns)


@jit
def load_tile(tensor, stride, r, c, inside):
    """A tile in fp32, 0 outside of the tensor."""
    return tl.load(tensor + r * stride + c, mask=inside, other=0.0).to(tl.float32)


@jit
def load_vector(vector, c, columns):
    """One entry per column in fp32, 0 beyond the last."""
    return tl.load(vector + c, mask=c < columns, other=0.0).to(tl.float32)


@jit
def store_partial_sum(partial, total, c, columns):
    """Write this program's sum over the rows of ``total``."""
    at = tl.program_id(0).to(tl.int64) * columns + c
    tl.store(partial + at, tl.sum(total, 0)[None, :], mask=c < columns)
