"""The exponentials of :mod:`liger_losses.kernels.linear_exp` on Hopper: loads, products and exponentials overlap.

A program has three parts that run at the same time. One warp loads tiles of ``hidden`` and ``weight`` into a ring of
buffers in shared memory. Two groups of four warps multiply them, each into 64 rows of a tile, and take exponentials of
their rows while the other group multiplies.

Written in Gluon, the part of Triton in which a kernel places its own data; it serves compute capability 9.0, and
matrices that the tensor memory accelerator supports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import Tiles, aligned, processors
from liger_losses.kernels._triton import INTERPRETED
from liger_losses.kernels.logit_transform import Epilogue

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
except ImportError:
    gluon = gl = tma = None


class Shape(NamedTuple):
    """Rows, columns and depth of a tile; buffers of the ring; whether the groups take tiles in turn or share each."""

    rows: int
    columns: int
    depth: int
    stages: int
    in_turn: bool


#: By what a call stores: nothing, or elements of so many bytes.
_SHAPES = {
    0: Shape(128, 256, 64, 4, in_turn=False),
    2: Shape(128, 256, 64, 4, in_turn=False),
    4: Shape(128, 256, 64, 3, in_turn=False),
}
#: Registers of a thread that multiplies.
_REGISTERS = 240


def hopper_tiles(hidden: Tensor, weight: Tensor, epilogue: Epilogue, out: Tensor | None) -> Tiles | None:
    """The launch of :func:`hopper_exponentials_kernel`, or ``None`` where it does not serve the call.

    It serves compute capability 9.0, matrices that the tensor memory accelerator supports, and logits without a
    soft-cap, whose derivative takes more registers than there are.
    """
    stored = [] if out is None else [out]
    if gluon is None or INTERPRETED or epilogue.transform.softcap is not None:
        return None
    if torch.cuda.get_device_capability(hidden.device) != (9, 0) or not all(map(aligned, (hidden, weight, *stored))):
        return None
    shape = _SHAPES[0 if out is None else out.dtype.itemsize]
    arguments = {
        "hidden": _descriptor(hidden, shape.rows, shape.depth),
        "weight": _descriptor(weight, shape.columns, shape.depth),
        "out": None,
        "tokens": len(hidden),
        "vocab_size": len(weight),
        "hidden_size": hidden.shape[1],
        "bias": epilogue.bias,
        "transform": epilogue.transform.for_kernel(),
        "BLOCK_N": shape.rows,
        "BLOCK_V": shape.columns,
        "BLOCK_H": shape.depth,
        "STAGES": shape.stages,
        "IN_TURN": shape.in_turn,
        "REGISTERS": _REGISTERS,
        "num_warps": 4,
    }
    if out is not None:
        arguments["out"] = _descriptor(out, shape.rows if shape.in_turn else shape.rows // 2, shape.columns // 2)
    row_tiles, column_tiles = -(-len(hidden) // shape.rows), -(-len(weight) // shape.columns)
    return Tiles(row_tiles, column_tiles, processors(hidden.device), arguments)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> object:
    """The matrix as the tensor memory accelerator takes it, in blocks, which lie in shared memory as products need."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    size = matrix.dtype.itemsize
    layout = gl.NVMMASharedLayout(min(128, columns * size), 8 * size, 2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


def gluon_jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``gluon.jit`` with its options; without Gluon, the bare function, which is never launched."""
    if function is None:
        return lambda function: gluon_jit(function, **options)
    return function if gluon is None else gluon.jit(function, **options)


# Their names in newer versions of Triton, and in 3.6.
_load: Any = getattr(tma, "async_load", None) or getattr(tma, "async_copy_global_to_shared", None)
_store: Any = getattr(tma, "async_store", None) or getattr(tma, "async_copy_shared_to_global", None)


@gluon_jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The ring's next buffer, and the parity of its use."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon_jit
def _previous(stage, STAGES: gl.constexpr):
    """The ring's buffer before this one.

    A loop must not keep it in a variable that begins as ``previous = stage``: Triton carries a variable through a loop
    if the loop's first pass changes its value, and takes these two for one.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon_jit
def _position(tile, row_tiles, column_tiles, group):
    """(row tile, column tile): groups of row tiles walk the vocabulary one after the other."""
    in_group = group * column_tiles
    first = tile // in_group * group
    size = gl.minimum(row_tiles - first, group)
    return first + tile % in_group % size, tile % in_group // size


@gluon_jit
def _produce(
    hidden, weight, hidden_buffers, weight_buffers, full, empty, tiles, steps, group, row_tiles, column_tiles,
    BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr,
):  # fmt: skip
    """Load the operands of all tiles, one step of the hidden size after the other."""
    STAGES: gl.constexpr = hidden_buffers.shape[0]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first use of a buffer waits for nothing
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, column_tile = _position(tile, row_tiles, column_tiles, group)
        for k in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (BLOCK_N + BLOCK_V) * BLOCK_H * 2)
            _load(hidden, [row_tile * BLOCK_N, k * BLOCK_H], bar, hidden_buffers.index(stage))
            _load(weight, [column_tile * BLOCK_V, k * BLOCK_H], bar, weight_buffers.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon_jit
def _pieces(z, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """The left and the right half of ``z``; both stay in the registers in which they are."""
    left, right = gl.split(gl.permute(gl.reshape(z, (ROWS, 2, COLUMNS)), (0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon_jit
def _consume(
    hidden_buffers, weight_buffers, full, empty, turns, staging, out, bias, labels, offset, partial, logit_sums,
    transform, tiles, steps, group, row_tiles, column_tiles, tokens, vocab_size,
    PROJECTIONS: gl.constexpr, PART: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    """One of the two parts that multiply: rows of each tile, or, with ``IN_TURN``, every other tile."""
    STAGES: gl.constexpr = hidden_buffers.shape[0]
    BLOCK_N: gl.constexpr = hidden_buffers.shape[1]
    BLOCK_V: gl.constexpr = weight_buffers.shape[1]
    ROWS: gl.constexpr = BLOCK_N if IN_TURN else BLOCK_N // 2
    START: gl.constexpr = 0 if IN_TURN else PART * ROWS
    PARTS: gl.constexpr = 2 if IN_TURN else 1
    HALF: gl.constexpr = BLOCK_V // 2
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, half)
    by_column: gl.constexpr = gl.SliceLayout(0, half)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    skipped = steps if IN_TURN else 0
    used = skipped * PART
    turn = gl.to_tensor(1 - PART)  # the first tile waits for nothing
    for tile in range(program + (programs * PART if IN_TURN else 0), tiles, programs * PARTS):
        row_tile, column_tile = _position(tile, row_tiles, column_tiles, group)
        first_column = column_tile * BLOCK_V
        first_row = row_tile * BLOCK_N + START
        rows = first_row + gl.arange(0, ROWS, by_row)
        inside = rows < tokens
        row_offset = gl.load(offset + rows, mask=inside, other=0.0) * 1.4426950408889634
        label = gl.load(labels + rows, mask=inside, other=-1).to(gl.int32) - first_column
        stage = used % STAGES
        phase = used // STAGES & 1
        z = gl.zeros((ROWS, BLOCK_V), gl.float32, whole)
        if IN_TURN:  # a phase has no number, only a parity: nobody waits for one before its predecessor is over
            mbarrier.wait(turns.index(PART), turn)
            turn ^= 1
        for k in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a = hidden_buffers.index(stage).slice(START, ROWS, 0)
            z = warpgroup_mma(a, weight_buffers.index(stage).permute((1, 0)), z, use_acc=k > 0, is_async=True)
            z = warpgroup_mma_wait(1, deps=[z])
            mbarrier.arrive(empty.index(_previous(stage, STAGES)), pred=k > 0)
            stage, phase = _next(stage, phase, STAGES)
        if IN_TURN:
            mbarrier.arrive(turns.index(1 - PART))
        used += steps + skipped
        at_label = gl.max(((label >= 0) & (label < BLOCK_V)).to(gl.int32), 0) > 0  # while the last product runs
        sums = gl.zeros((ROWS,), gl.float32, by_row)
        totals = gl.zeros((ROWS,), gl.float32, by_row)
        z = warpgroup_mma_wait(0, deps=[z])
        mbarrier.arrive(empty.index(_previous(stage, STAGES)))
        left, right = _pieces(z, ROWS, HALF, half)
        for part in gl.static_range(2):
            start = first_column + part * HALF
            columns = gl.arange(0, HALF, by_column)
            inside_vocab = start + columns < vocab_size
            x = left if part == 0 else right
            z = x
            if bias is not None:
                z += gl.load(bias + start + columns, mask=inside_vocab, other=0.0).to(gl.float32)[None, :]
            if transform.factor is not None:
                z = z * transform.factor
            if logit_sums is not None:
                totals += gl.sum(z, 1)  # beyond the vocabulary they are 0
            if column_tile == column_tiles - 1:  # nowhere else are columns beyond the vocabulary
                z = gl.where(inside_vocab[None, :], z, float("-inf"))
            e = gl.exp2(z * 1.4426950408889634 - row_offset[:, None])
            if at_label:
                e = gl.where((columns + part * HALF)[None, :] != label[:, None], e, 0.0)
            sums += gl.sum(e, 1)
            if PROJECTIONS:
                e = x
            if out is not None:
                tma.store_wait(0)
                staging.store(e.to(staging.dtype))
                fence_async_shared()
                _store(out, [first_row, start], staging)
        gl.store(partial + column_tile * tokens + rows, sums, mask=inside)
        if logit_sums is not None:
            gl.store(logit_sums + column_tile * tokens + rows, totals, mask=inside)
    if out is not None:
        tma.store_wait(0)


@gluon_jit(
    do_not_specialize=["tokens", "vocab_size", "hidden_size", "group"],
    do_not_specialize_on_alignment=["labels", "offset", "partial", "logit_sums", "needed"],
)
def hopper_exponentials_kernel(
    hidden, weight, out, tokens, vocab_size, hidden_size,
    bias, labels, offset, partial, logit_sums, needed, group, transform,
    PROJECTIONS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr,
    STAGES: gl.constexpr, IN_TURN: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent programs: each takes every ``programs``-th tile.

    ``partial`` and ``logit_sums`` are ``[column tiles, tokens]``: each tile writes the sums of its rows, and their bits
    do not depend on which program took it.
    """
    hidden_buffers = gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK_N, BLOCK_H], hidden.layout)
    weight_buffers = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_V, BLOCK_H], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1 if IN_TURN else 2)
    for part in gl.static_range(2):
        mbarrier.init(turns.index(part), count=1)
    fence_async_shared()
    row_tiles = gl.cdiv(tokens, BLOCK_N)
    column_tiles = gl.cdiv(vocab_size, BLOCK_V)
    tiles = row_tiles * column_tiles
    if needed is not None:
        tiles = tiles * gl.load(needed)
    steps = gl.cdiv(hidden_size, BLOCK_H)
    if out is None:
        staging = (None, None)
    else:
        staging = (
            gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout),
            gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout),
        )
    gl.warp_specialize(
        [
            (_consume, (
                hidden_buffers, weight_buffers, full, empty, turns, staging[0], out, bias, labels, offset, partial,
                logit_sums, transform, tiles, steps, group, row_tiles, column_tiles, tokens, vocab_size,
                PROJECTIONS, 0, IN_TURN,
            )),
            (_consume, (
                hidden_buffers, weight_buffers, full, empty, turns, staging[1], out, bias, labels, offset, partial,
                logit_sums, transform, tiles, steps, group, row_tiles, column_tiles, tokens, vocab_size,
                PROJECTIONS, 1, IN_TURN,
            )),
            (_produce, (
                hidden, weight, hidden_buffers, weight_buffers, full, empty, tiles, steps, group, row_tiles,
                column_tiles, BLOCK_N, BLOCK_V, BLOCK_H,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
