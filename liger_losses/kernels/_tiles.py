"""Shared by the kernels that multiply hidden states by the head: the order of tiles, one tile's product, its store.

N tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels._triton import INTERPRETED, jit, tl, warn_once


@dataclass(frozen=True)
class Tiling:
    """Sizes of one program's tile, and how programs share a multiprocessor.

    Args:
        tokens, columns, depth: tokens, columns of the vocabulary and hidden dimensions of a tile.
        group: row tiles that walk the vocabulary together, so that the cache serves each part of the head to all.
        programs: programs per multiprocessor.
        warps, stages: warps and pipeline stages of one program.
    """

    tokens: int
    columns: int
    depth: int
    group: int
    programs: int
    warps: int
    stages: int


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tile_counts(hidden: Tensor, weight: Tensor, tiling: Tiling) -> tuple[int, int, int]:
    """How many tiles cover the tokens, how many the vocabulary, and how many programs run at a time."""
    programs = tiling.programs * processors(hidden.device)
    return -(-len(hidden) // tiling.tokens), -(-len(weight) // tiling.columns), programs


def with_contiguous_rows(matrix: Tensor) -> Tensor:
    """The matrix, copied only if its columns are not adjacent."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def product_arguments(hidden: Tensor, weight: Tensor, tiling: Tiling) -> dict[str, Any]:
    """The operands, sizes and launch options that every kernel over tiles of ``hidden @ weight.T`` takes.

    The tensor memory accelerator (Hopper and later) loads matrices with 16-byte aligned rows, as descriptors, whose
    stride is ``None``; others are pointers.
    """
    tma = has_tma(hidden.device) and all(aligned(operand) for operand in (hidden, weight))
    # Devices without it have less shared memory.
    depth = tiling.depth if tma else tiling.depth // 2
    return {
        "hidden": descriptor(hidden, tiling.tokens, depth) if tma else hidden,
        "weight": descriptor(weight, tiling.columns, depth) if tma else weight,
        "hidden_stride": None if tma else hidden.stride(0),
        "weight_stride": None if tma else weight.stride(0),
        "tokens": len(hidden),
        "vocab_size": len(weight),
        "hidden_size": hidden.shape[1],
        "BLOCK_N": tiling.tokens,
        "BLOCK_V": tiling.columns,
        "BLOCK_H": depth,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


def output_arguments(out: Tensor | None, tiling: Tiling) -> dict[str, Any]:
    """``out`` and ``out_stride`` as :func:`store_tile` takes them, for halves of tiles; both ``None`` without one."""
    if out is None:
        return {"out": None, "out_stride": None}
    if has_tma(out.device) and aligned(out):
        return {"out": descriptor(out, tiling.tokens, tiling.columns // 2), "out_stride": None}
    return {"out": out, "out_stride": out.stride(0)}


def aligned(matrix: Tensor) -> bool:
    """Whether the tensor memory accelerator supports the matrix: 16-byte aligned, contiguous rows."""
    row_bytes = matrix.stride(0) * matrix.dtype.itemsize
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


@cache
def has_tma(device: torch.device) -> bool:
    """Whether a device has a tensor memory accelerator; warns once if it has none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9:
        return True
    warn_once(
        f"{torch.cuda.get_device_name(device)} has no tensor memory accelerator (Hopper and later have): the fused "
        "kernels load through pointers there, with the same results, more slowly."
    )
    return False


def descriptor(matrix: Tensor, rows: int, columns: int) -> object:
    """The matrix as the tensor memory accelerator takes it, in blocks of ``rows`` and ``columns``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, columns])


#: The interpreter cannot multiply bf16.
_UPCAST = INTERPRETED if tl is None else tl.constexpr(INTERPRETED)


@jit
def tile_position(tile, row_tiles, column_tiles, group):
    """(row tile, column tile): groups of row tiles walk the vocabulary one after the other."""
    in_group = group * column_tiles
    first = tile // in_group * group
    size = tl.minimum(row_tiles - first, group)
    return first + tile % in_group % size, tile % in_group // size


@jit
def project_tile(
    hidden, weight, hidden_stride, weight_stride, first_row, first_column, tokens, vocab_size, hidden_size,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A tile of ``hidden @ weight.T``, in fp32; 0 outside of both."""
    z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for k in tl.range(0, hidden_size, BLOCK_H):
        if hidden_stride is None:
            a = hidden.load([first_row, k])
            b = weight.load([first_column, k])
        else:
            rows = first_row + tl.arange(0, BLOCK_N)
            columns = first_column + tl.arange(0, BLOCK_V)
            ks = k + tl.arange(0, BLOCK_H)
            a = tl.load(
                hidden + rows.to(tl.int64)[:, None] * hidden_stride + ks[None, :],
                mask=(rows < tokens)[:, None] & (ks < hidden_size)[None, :],
                other=0.0,
            )
            b = tl.load(
                weight + columns.to(tl.int64)[:, None] * weight_stride + ks[None, :],
                mask=(columns < vocab_size)[:, None] & (ks < hidden_size)[None, :],
                other=0.0,
            )
        if _UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        z = tl.dot(a, b.T, z)
    return z


@jit
def split_tile(z, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    """The left and the right half of a tile ``[BLOCK_N, BLOCK_V]``: what follows takes fewer registers on a half."""
    return tl.split(tl.permute(tl.reshape(z, (BLOCK_N, 2, BLOCK_V // 2)), (0, 2, 1)))


@jit
def store_tile(out, out_stride, value, rows, columns, first_row, first_column, tokens, vocab_size):
    """Store a tile whose rows and columns begin at ``first_row`` and ``first_column``; see :func:`output_arguments`."""
    if out_stride is None:
        out.store([first_row, first_column], value.to(out.dtype))
    else:
        pointers = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        inside = (rows < tokens)[:, None] & (columns < vocab_size)[None, :]
        tl.store(pointers, value.to(out.dtype.element_ty), mask=inside)
