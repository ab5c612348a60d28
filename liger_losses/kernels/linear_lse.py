"""The log-sum-exps of a product's rows, and the product itself in fp32: what a divergence needs of each model.

N tokens, H hidden size, V vocabulary size.

:mod:`liger_losses.kernels.linear_exp` takes them relative to the labels' logits, which are computed before, and checked
after. Where there is no label, each tile's own maximum serves as well: one kernel for the product, and one for the sums
of all tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import tile_position, with_contiguous_rows
from liger_losses.kernels._triton import jit, tl, triton
from liger_losses.kernels.hopper_pipeline import (
    AVAILABLE,
    finish,
    first_turn,
    give_up,
    gluon_jit,
    load_tiles,
    multiply,
    pipeline_tiles,
    set_up,
    store_half,
)
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, transform_block

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import tma
except ImportError:
    gl = tma = None

#: Rows of a program that adds up the tiles' sums, and the tiles that it reads at once.
_SUM_ROWS, _SUM_TILES = 8, 512
#: Columns of a row of projections in memory, whose exponentials one program of `_row_sums_kernel` adds up.
_COLUMNS = 4096


def log_sum_exps_into(
    lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    out: Tensor,
    epilogue: Epilogue = Epilogue(),
    *,
    backend: str = "torch",
) -> bool:
    """``lse_n = log sum_v exp(z_nv)`` of the logits ``z = epilogue(hidden @ weight.T)``, if there is a kernel for it.

    Args:
        lse: ``[N]`` fp32, the tensor to write them into.
        hidden: ``[N, H]``, fp16 or bf16 for ``triton``.
        weight: ``[V, H]``, rows contiguous, of the same dtype.
        out: ``[N, V]`` fp32, rows contiguous, which gets ``hidden @ weight.T``.
        epilogue: from projections to logits.
        backend: ``torch`` holds all logits twice; ``triton`` serves compute capability 9.0, and matrices that the
            tensor memory accelerator supports.

    Returns:
        Whether the kernel has run; nothing is written otherwise. Where this version of Triton cannot run it, a warning
        says why, once.
    """
    if backend == "torch":
        torch.mm(hidden.to(out.dtype), weight.to(out.dtype).t(), out=out)
        lse.copy_(epilogue(out.clone()).logsumexp(1))
        return True
    tiles = pipeline_tiles(with_contiguous_rows(hidden), weight, epilogue, out) if AVAILABLE else None
    if tiles is None:
        return False
    row_tiles, column_tiles, programs, arguments = tiles
    group, tokens = arguments.pop("group"), len(hidden)
    if not tokens:
        return True
    partial = torch.empty(2, column_tiles, tokens, device=hidden.device)
    try:
        _hopper_projections_kernel[(min(programs, row_tiles * column_tiles),)](
            **arguments, partial=partial, GROUP=group
        )
    except Exception as error:
        give_up(error)
        return log_sum_exps_into(lse, hidden, weight, out, epilogue, backend=backend)  # warns
    _sum_tiles(lse, partial)
    return True


def row_log_sum_exps_into(
    lse: Tensor, projected: Tensor, epilogue: Epilogue = Epilogue(), *, backend: str = "torch"
) -> None:
    """``lse_n = log sum_v exp(z_nv)`` of the logits ``z = epilogue(projected)``; several programs share a row.

    Args:
        lse: ``[N]`` fp32, the tensor to write them into.
        projected: ``[N, V]`` fp32, rows contiguous.
        epilogue: from projections to logits.
        backend: ``torch`` holds all logits once more; ``triton`` holds none.
    """
    if backend == "torch":
        lse.copy_(epilogue(projected).logsumexp(1))
        return
    rows, columns = projected.shape
    if not rows:
        return
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    partial = torch.empty(2, triton.cdiv(columns, block), rows, device=projected.device)
    _row_sums_kernel[(rows, partial.shape[1])](
        partial, projected, projected.stride(0), columns, epilogue.bias, epilogue.transform.for_kernel(), BLOCK=block
    )
    _sum_tiles(lse, partial)


@jit(do_not_specialize_on_alignment=["partial"])
def _row_sums_kernel(partial, projected, stride, columns, bias, transform, BLOCK: tl.constexpr):
    """Of a block of a row: the maximum of its logits, and the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0
    if transform.temperature is not None:
        inverse = inverse_temperature(transform, row, True, 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    z = tl.load(projected + row * stride + at, mask=inside, other=0.0)
    if bias is not None or transform.factor is not None:
        z = transform_block(z, bias, at, inside, transform, inverse)
    z = tl.where(inside, z, float("-inf"))
    # Finite where all are -inf, and where one is inf: the sum is inf then, as torch's is.
    top = tl.minimum(tl.maximum(tl.max(z, 0), -3.0e38), 3.4028234663852886e38)
    place = partial + tl.program_id(1) * tl.num_programs(0) + row
    tl.store(place, top)
    tl.store(place + tl.num_programs(1) * tl.num_programs(0), tl.sum(tl.exp(z - top), 0))


def _sum_tiles(lse: Tensor, partial: Tensor) -> None:
    """The log-sum-exps of rows, from ``partial [2, column tiles, tokens]``."""
    _, column_tiles, tokens = partial.shape
    _sum_tiles_kernel[(triton.cdiv(tokens, _SUM_ROWS),)](
        lse, partial, column_tiles, tokens, BLOCK=_SUM_ROWS, TILES=_SUM_TILES, num_warps=8
    )


@jit(do_not_specialize=["column_tiles", "tokens"], do_not_specialize_on_alignment=["lse"])
def _sum_tiles_kernel(lse, partial, column_tiles, tokens, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """``partial [2, column tiles, tokens]`` are maxima of logits, and sums of exponentials relative to them."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tokens
    top = tl.zeros((BLOCK,), tl.float32) - 3.0e38
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, column_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        mask = (tile < column_tiles)[:, None] & inside[None, :]
        at = partial + tile[:, None] * tokens + rows[None, :]
        tops = tl.load(at, mask=mask, other=-3.0e38)
        sums = tl.load(at + column_tiles * tokens, mask=mask, other=0.0)
        highest = tl.maximum(top, tl.max(tops, 0))
        total = total * tl.exp(top - highest) + tl.sum(sums * tl.exp(tops - highest[None, :]), 0)
        top = highest
    tl.store(lse + rows, top + tl.log(tl.where(inside, total, 1.0)), mask=inside)


class _Arguments(NamedTuple):
    """What :func:`_hopper_projections_kernel` takes for its sums."""

    bias: Any
    transform: Any
    partial: Any


@gluon_jit
def _consume(ring, grid, out, staging, arguments, PART: gl.constexpr):
    """One of the two groups that multiply, in turn: every other tile of the program."""
    BLOCK_N: gl.constexpr = ring.hidden.shape[1]
    BLOCK_V: gl.constexpr = ring.weight.shape[1]
    HALF: gl.constexpr = BLOCK_V // 2
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, half)
    bias, transform, partial = arguments
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    used, turn = first_turn(grid, PART)
    for tile in range(program + programs * PART, grid.tiles, programs * 2):
        row_tile, column_tile = tile_position(tile, grid.row_tiles, grid.column_tiles, grid.group)
        rows = row_tile * BLOCK_N + gl.arange(0, BLOCK_N, by_row)
        inside = rows < grid.tokens
        inverse = 1.0
        if transform.temperature is not None:
            inverse = inverse_temperature(transform, rows, inside, 1)
        z, stage, used, turn = multiply(ring, grid, used, turn, PART)
        tops = gl.full((BLOCK_N,), -3.0e38, gl.float32, by_row)
        sums = gl.zeros((BLOCK_N,), gl.float32, by_row)
        left, right = finish(z, ring, stage)
        for part in gl.static_range(2):
            start = column_tile * BLOCK_V + part * HALF
            columns = (start + gl.arange(0, HALF, gl.SliceLayout(0, half)))[None, :]
            x = left if part == 0 else right
            store_half(out, staging, x, row_tile * BLOCK_N, start)
            if bias is not None or transform.factor is not None:
                x = transform_block(x, bias, columns, columns < grid.vocab_size, transform, inverse)
            if column_tile == grid.column_tiles - 1:  # nowhere else are columns beyond the vocabulary
                x = gl.where(columns < grid.vocab_size, x, float("-inf"))
            x = x * 1.4426950408889634
            highest = gl.minimum(gl.maximum(tops, gl.max(x, 1)), 3.0e38)  # inf - inf would be NaN
            sums = sums * gl.exp2(tops - highest) + gl.sum(gl.exp2(x - highest[:, None]), 1)
            tops = highest
        at = partial + column_tile * grid.tokens + rows
        gl.store(at, tops * 0.6931471805599453, mask=inside)
        gl.store(at + grid.column_tiles * grid.tokens, sums, mask=inside)
    tma.store_wait(0)


@gluon_jit(
    do_not_specialize=["tokens", "vocab_size", "hidden_size"],
    do_not_specialize_on_alignment=["partial"],
)
def _hopper_projections_kernel(
    hidden, weight, out, tokens, vocab_size, hidden_size, bias, transform, partial,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Stores the product, and of each tile's rows, the maxima of their logits and the sums of exponentials."""
    arguments = _Arguments(bias, transform, partial)
    ring, grid = set_up(hidden, weight, tokens, vocab_size, hidden_size, None, GROUP, BLOCK_N, BLOCK_V, BLOCK_H, STAGES)
    first_staging = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    second_staging = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    gl.warp_specialize(
        [
            (_consume, (ring, grid, out, first_staging, arguments, 0)),
            (_consume, (ring, grid, out, second_staging, arguments, 1)),
            (load_tiles, (hidden, weight, ring, grid, BLOCK_N, BLOCK_V, BLOCK_H)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
