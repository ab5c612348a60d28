"""What the kernels share that multiply hidden states by the head: the order of their tiles, and one tile's product.

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
    """Sizes of one program's tile and how programs share a processor.

    Args:
        tokens, columns, depth: tokens, columns of the vocabulary and hidden dimensions of a tile.
        group: row tiles that walk the vocabulary together, so that the cache serves them each part of the head.
        programs: of one processor.
        warps, stages: of one program.
    """

    tokens: int
    columns: int
    depth: int
    group: int
    programs: int
    warps: int
    stages: int

    def launch(self) -> dict[str, int]:
        """What a launch takes."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def product_arguments(hidden: Tensor, weight: Tensor, tiling: Tiling) -> dict[str, Any]:
    """The operands and sizes as :func:`project_tile` takes them.

    The tensor memory accelerator (Hopper and later) loads them where rows are 16-byte aligned; elsewhere pointers do.
    """
    tma = has_tma(hidden.device) and all(aligned(operand) for operand in (hidden, weight))
    # Devices without it have less shared memory.
    depth = tiling.depth if tma else tiling.depth // 2
    return {
        "hidden": descriptor(hidden, tiling.tokens, depth) if tma else hidden,
        "weight": descriptor(weight, tiling.columns, depth) if tma else weight,
        "hidden_stride": hidden.stride(0),
        "weight_stride": weight.stride(0),
        "tokens": len(hidden),
        "vocab_size": len(weight),
        "hidden_size": hidden.shape[1],
        "BLOCK_N": tiling.tokens,
        "BLOCK_V": tiling.columns,
        "BLOCK_H": depth,
        "TMA": tma,
        # The interpreter multiplies no bf16.
        "UPCAST": INTERPRETED and hidden.dtype == torch.bfloat16,
    }


def aligned(matrix: Tensor) -> bool:
    """Whether the tensor memory accelerator takes the matrix: 16-byte aligned, contiguous rows."""
    row_bytes = matrix.stride(0) * matrix.dtype.itemsize
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


@cache
def has_tma(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9:
        return True
    warn_once(
        f"{torch.cuda.get_device_name(device)} has no tensor memory accelerator (Hopper and later have): the fused "
        "kernels load through pointers there, with the same results, more slowly."
    )
    return False


def descriptor(matrix: Tensor, rows: int, columns: int) -> object:
    """How the tensor memory accelerator sees a matrix."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@jit
def tile_position(tile, row_tiles, column_tiles, group):
    """(row tile, column tile): groups of row tiles walk the vocabulary one after the other."""
    in_group = group * column_tiles
    first = tile // in_group * group
    size = tl.minimum(row_tiles - first, group)
    return first + tile % in_group % size, tile % in_group // size


@jit
def project_tile(
    hidden,
    weight,
    hidden_stride,
    weight_stride,
    first_row,
    first_column,
    tokens,
    vocab_size,
    hidden_size,
    TMA: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A tile of ``hidden @ weight.T``, in fp32; 0 outside of both."""
    z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for k in tl.range(0, hidden_size, BLOCK_H):
        if TMA:
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
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        z = tl.dot(a, b.T, z)
    return z
