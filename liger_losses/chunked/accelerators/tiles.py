"""Shared by the kernels that multiply hidden states by the head: the order of tiles, one tile's product, its store.

N tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import INTERPRETED, jit, tl, triton, warn_once
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.targets import target_of

if triton is not None:
    from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """How many tiles cover the tokens, how many the vocabulary, how many programs run at a time, and the arguments
    and launch options that every kernel over tiles of ``hidden @ weight.T`` takes."""

    row_tiles: int
    column_tiles: int
    programs: int
    arguments: dict[str, Any]


def with_contiguous_rows(matrix: Tensor) -> Tensor:
    """The matrix, copied only if its columns are not adjacent."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def tiles_of(hidden: Tensor, weight: Tensor, epilogue: Epilogue, out: Tensor | None = None) -> Tiles:
    """The launch over ``hidden @ weight.T``; ``out`` is what :func:`store_tile` writes, in halves of tiles.

    The tensor memory accelerator (Hopper and later) loads and stores matrices with 16-byte aligned rows, as
    descriptors, whose stride is ``None``; others are pointers.
    """
    (tokens, hidden_size), (vocab_size, _), device = hidden.shape, weight.shape, hidden.device
    target, accelerated = target_of(device), has_tma(device)
    tma = accelerated and aligned(hidden) and aligned(weight)
    height, width, depth, warps, stages = target.tiling.by_descriptors if tma else target.tiling.by_pointers
    arguments = {
        "hidden": descriptor(hidden, height, depth) if tma else hidden,
        "weight": descriptor(weight, width, depth) if tma else weight,
        "hidden_stride": None if tma else hidden.stride(0),
        "weight_stride": None if tma else weight.stride(0),
        "tokens": tokens,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "bias": epilogue.bias,
        "transform": epilogue.transform.for_kernel,
        "BLOCK_N": height,
        "BLOCK_V": width,
        "BLOCK_H": depth,
        "num_warps": warps,
        "num_stages": stages,
    }
    if out is not None and accelerated and aligned(out):
        arguments["out"] = descriptor(out, height, width // 2)
    elif out is not None:
        arguments.update(out=out, out_stride=out.stride(0))
    return Tiles(-(-tokens // height), -(-vocab_size // width), target.processors, arguments)


def aligned(matrix: Tensor) -> bool:
    """Whether the tensor memory accelerator supports the matrix: not empty, with 16-byte aligned, contiguous rows, of
    which none is the same memory as another (as elements of an ``expand`` are)."""
    stride, adjacent = matrix.stride()
    in_16_bytes = stride * matrix.dtype.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0
    return in_16_bytes and adjacent == 1 and stride >= matrix.shape[1] > 0 and matrix.shape[0] > 0


def has_tma(device: torch.device) -> bool:
    """Whether kernels load by descriptors: :attr:`Target.no_descriptors`; warns once if not."""
    reason = target_of(device).no_descriptors
    if reason is not None:
        warn_once(
            f"{torch.cuda.get_device_name(device)} {reason}: the fused kernels load through pointers there, with the "
            "same results, more slowly."
        )
    return reason is None


def descriptor(matrix: Tensor, rows: int, columns: int) -> object:
    """The matrix as the tensor memory accelerator takes it, in blocks of ``rows`` and ``columns``."""
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [rows, columns])


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
    """Store a tile whose rows and columns begin at ``first_row`` and ``first_column``; see :func:`tiles_of`."""
    if out_stride is None:
        out.store([first_row, first_column], value.to(out.dtype))
    else:
        pointers = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        inside = (rows < tokens)[:, None] & (columns < vocab_size)[None, :]
        tl.store(pointers, value.to(out.dtype.element_ty), mask=inside)
