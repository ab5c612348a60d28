"""The log-sum-exps of a product's rows, and the product itself in fp32: what a divergence needs of each model.

N tokens, H hidden size, V vocabulary size.

:mod:`liger_losses.kernels.linear_exp` takes them relative to the labels' logits, which are computed before, and checked
after. Where there is no label, each tile's own maximum serves as well: one kernel for the product, and one for the sums
of all tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels._tiles import Tiles, aligned, processors, with_contiguous_rows
from ..kernels._triton import jit, tl, triton
from ..kernels.linear_exp_hopper import (
    _COLUMNS,
    _DEPTH,
    _REGISTERS,
    _ROWS,
    _STAGES,
    AVAILABLE,
    _descriptor,
    _next,
    _pieces,
    _position,
    _previous,
    _produce,
    _serves,
    _store,
    give_up,
    gluon_jit,
)
from ..kernels.logit_transform import Epilogue, inverse_temperature, transform_block

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
except ImportError:
    gl = tma = None

#: Of few rows: the rows and columns of tiles, and the buffers of their ring, where half of the last tiles of
#: :data:`_ROWS` rows would be none.
_FLAT, _FLAT_STAGES, _MOST_FLAT_ROWS = (64, 256), 4, 512
#: Row tiles that walk the vocabulary together, so that the cache serves each part of the head to all of them.
_GROUP = 8
#: Rows of a program that adds up the tiles' sums, and the tiles that it reads at once.
_SUM_ROWS, _SUM_TILES = 8, 512


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
    tiles = _tiles(with_contiguous_rows(hidden), weight, out)
    if tiles is None:
        return False
    row_tiles, column_tiles, programs, arguments = tiles
    tokens = len(hidden)
    if not tokens:
        return True
    partial = torch.empty(2, column_tiles, tokens, device=hidden.device)
    arguments |= {"bias": epilogue.bias, "transform": epilogue.transform.for_kernel(), "partial": partial}
    try:
        _hopper_projections_kernel[(min(programs, row_tiles * column_tiles),)](**arguments, GROUP=_GROUP)
    except Exception as error:
        give_up(error)
        return log_sum_exps_into(lse, hidden, weight, out, epilogue, backend=backend)  # warns
    _sum_tiles_kernel[(triton.cdiv(tokens, _SUM_ROWS),)](
        lse, partial, column_tiles, tokens, BLOCK=_SUM_ROWS, TILES=_SUM_TILES, num_warps=8
    )
    return True


def _tiles(hidden: Tensor, weight: Tensor, out: Tensor) -> Tiles | None:
    """The launch of the product, or ``None`` where the kernel does not serve it."""
    if not AVAILABLE or not _serves(hidden.device):
        return None
    if not (aligned(hidden) and aligned(weight) and aligned(out)):
        return None
    (rows, columns), stages = (_ROWS, _COLUMNS), _STAGES[out.dtype.itemsize]
    if 0 < len(hidden) % _ROWS <= _FLAT[0] and len(hidden) <= _MOST_FLAT_ROWS:
        (rows, columns), stages = _FLAT, _FLAT_STAGES
    try:
        descriptors = {
            "hidden": _descriptor(hidden, _DEPTH, rows),
            "weight": _descriptor(weight, _DEPTH, columns),
            "out": _descriptor(out, columns // 2, rows),
        }
    except Exception as error:
        give_up(error)
        return _tiles(hidden, weight, out)  # warns
    arguments = {
        **descriptors,
        "tokens": len(hidden),
        "vocab_size": len(weight),
        "hidden_size": hidden.shape[1],
        "BLOCK_N": rows,
        "BLOCK_V": columns,
        "BLOCK_H": _DEPTH,
        "STAGES": stages,
        "REGISTERS": _REGISTERS,
        "num_warps": 4,
    }
    return Tiles(-(-len(hidden) // rows), -(-len(weight) // columns), processors(hidden.device), arguments)


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


@gluon_jit
def _consume_projections(
    hidden_buffers, weight_buffers, full, empty, turns, staging, out, bias, partial, transform, tiles, steps, group,
    row_tiles, column_tiles, tokens, vocab_size, PART: gl.constexpr,
):  # fmt: skip
    """One of the two groups that multiply, in turn: every other tile of the program."""
    STAGES: gl.constexpr = hidden_buffers.shape[0]
    BLOCK_N: gl.constexpr = hidden_buffers.shape[1]
    BLOCK_V: gl.constexpr = weight_buffers.shape[1]
    HALF: gl.constexpr = BLOCK_V // 2
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, half)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    used = steps * PART  # buffers, by both groups
    turn = gl.to_tensor(1 - PART)  # the first tile waits for nothing
    for tile in range(program + programs * PART, tiles, programs * 2):
        row_tile, column_tile = _position(tile, row_tiles, column_tiles, group)
        rows = row_tile * BLOCK_N + gl.arange(0, BLOCK_N, by_row)
        inside = rows < tokens
        inverse = 1.0
        if transform.temperature is not None:
            inverse = inverse_temperature(transform, rows, inside, 1)
        stage = used % STAGES
        phase = used // STAGES & 1
        z = gl.zeros((BLOCK_N, BLOCK_V), gl.float32, whole)
        # A phase has no number, only a parity: nobody waits for one before its predecessor is over.
        mbarrier.wait(turns.index(PART), turn)
        turn ^= 1
        for k in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a, b = hidden_buffers.index(stage), weight_buffers.index(stage)
            z = warpgroup_mma(a, b.permute((1, 0)), z, use_acc=k > 0, is_async=True)
            z = warpgroup_mma_wait(1, deps=[z])
            mbarrier.arrive(empty.index(_previous(stage, STAGES)), pred=k > 0)
            stage, phase = _next(stage, phase, STAGES)
        mbarrier.arrive(turns.index(1 - PART))
        used += steps * 2
        tops = gl.full((BLOCK_N,), -3.0e38, gl.float32, by_row)
        sums = gl.zeros((BLOCK_N,), gl.float32, by_row)
        z = warpgroup_mma_wait(0, deps=[z])
        mbarrier.arrive(empty.index(_previous(stage, STAGES)))
        left, right = _pieces(z, BLOCK_N, HALF, half)
        for part in gl.static_range(2):
            start = column_tile * BLOCK_V + part * HALF
            columns = (start + gl.arange(0, HALF, gl.SliceLayout(0, half)))[None, :]
            x = left if part == 0 else right
            tma.store_wait(0)
            staging.store(x)
            fence_async_shared()
            _store(out, [row_tile * BLOCK_N, start], staging)
            if bias is not None or transform.factor is not None:
                x = transform_block(x, bias, columns, columns < vocab_size, transform, inverse)
            if column_tile == column_tiles - 1:  # nowhere else are columns beyond the vocabulary
                x = gl.where(columns < vocab_size, x, float("-inf"))
            x = x * 1.4426950408889634
            highest = gl.maximum(tops, gl.max(x, 1))
            sums = sums * gl.exp2(tops - highest) + gl.sum(gl.exp2(x - highest[:, None]), 1)
            tops = highest
        at = partial + column_tile * tokens + rows
        gl.store(at, tops * 0.6931471805599453, mask=inside)
        gl.store(at + column_tiles * tokens, sums, mask=inside)
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
    """Warps as in :func:`~liger_losses.kernels.linear_exp_hopper.hopper_exponentials_kernel`: one loads both
    matrices' tiles, and two groups multiply them in turn."""
    hidden_buffers = gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK_N, BLOCK_H], hidden.layout)
    weight_buffers = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_V, BLOCK_H], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for part in gl.static_range(2):
        mbarrier.init(turns.index(part), count=1)
    fence_async_shared()
    row_tiles = gl.cdiv(tokens, BLOCK_N)
    column_tiles = gl.cdiv(vocab_size, BLOCK_V)
    tiles = row_tiles * column_tiles
    steps = gl.cdiv(hidden_size, BLOCK_H)
    first_staging = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    second_staging = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    gl.warp_specialize(
        [
            (_consume_projections, (
                hidden_buffers, weight_buffers, full, empty, turns, first_staging, out, bias, partial, transform, tiles,
                steps, GROUP, row_tiles, column_tiles, tokens, vocab_size, 0,
            )),
            (_consume_projections, (
                hidden_buffers, weight_buffers, full, empty, turns, second_staging, out, bias, partial, transform,
                tiles, steps, GROUP, row_tiles, column_tiles, tokens, vocab_size, 1,
            )),
            (_produce, (
                hidden, weight, hidden_buffers, weight_buffers, full, empty, tiles, steps, GROUP, row_tiles,
                column_tiles, BLOCK_N, BLOCK_V, BLOCK_H,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
