"""The exponentials of :mod:`liger_losses.kernels.linear_exp` on Hopper: loads, products and exponentials overlap.

A program has three parts that run at the same time. One warp loads parts of ``hidden`` and ``weight`` into a ring of
buffers in shared memory. Two groups of four warps take tiles in turn: while one multiplies, the other takes and stores
the exponentials of its tile.

Written in Gluon, the part of Triton in which a kernel places its own data; it serves compute capability 9.0, and
matrices that the tensor memory accelerator supports.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..kernels._tiles import Tiles, aligned, descriptor, processors
from ..kernels._triton import INTERPRETED, warn_once
from ..kernels.logit_transform import Epilogue

#: Why the kernel cannot run with this version of Triton: what Gluon offers changes from version to version.
unusable: list[Exception] = []
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
except ImportError as error:
    gluon = gl = tma = None
    unusable.append(error)


#: Triton's interpreter has no Gluon.
AVAILABLE = not INTERPRETED
#: Rows, columns and depth of a tile. Two groups of four warps that take tiles of 128 x 128 in turn take 0.93 to 0.98 of
#: cuBLAS's time on an H200 (benchmarks/results/exponentials_kernel.txt); tiles of 64 x 256, 0.97 to 0.99; two groups
#: that share tiles of 128 x 256, and whose exponentials nothing runs beside, 0.98 to 1.00.
_ROWS, _COLUMNS, _DEPTH = 128, 128, 64
#: Buffers of the ring, by the bytes of what a call stores (0: nothing): as many as shared memory has room for.
_STAGES = {0: 6, 2: 6, 4: 5}
#: Row tiles that walk the vocabulary together; further numbers, for :func:`group_of_sums`.
_GROUP, _OTHER_GROUPS = 8, (6, 12, 4)
#: Registers of a thread that multiplies.
_REGISTERS = 240


def hopper_tiles(hidden: Tensor, weight: Tensor, epilogue: Epilogue, out: Tensor | None) -> Tiles | None:
    """The launch of :func:`hopper_exponentials_kernel`, or ``None`` where it does not serve the call.

    It serves compute capability 9.0, matrices that the tensor memory accelerator supports, and logits without a
    soft-cap, whose derivative takes more registers than there are. Where this version of Triton cannot run it, a
    warning says why.
    """
    if epilogue.transform.softcap is not None or not _serves(hidden.device):
        return None
    if not aligned(hidden) or not aligned(weight) or not (out is None or aligned(out)):
        return None
    try:
        descriptors = {
            "hidden": _descriptor(hidden, _DEPTH),
            "weight": _descriptor(weight, _DEPTH),
            "out": None if out is None else _descriptor(out, _COLUMNS // 2),
        }
    except Exception as error:
        give_up(error)
        return hopper_tiles(hidden, weight, epilogue, out)
    arguments = {
        **descriptors,
        "tokens": len(hidden),
        "vocab_size": len(weight),
        "hidden_size": hidden.shape[1],
        "bias": epilogue.bias,
        "transform": epilogue.transform.for_kernel(),
        "BLOCK_N": _ROWS,
        "BLOCK_V": _COLUMNS,
        "BLOCK_H": _DEPTH,
        "STAGES": _STAGES[0 if out is None else out.dtype.itemsize],
        "REGISTERS": _REGISTERS,
        "num_warps": 4,
    }
    return Tiles(-(-len(hidden) // _ROWS), -(-len(weight) // _COLUMNS), processors(hidden.device), arguments)


def give_up(error: Exception) -> None:
    """Let the other kernel serve all calls of this process: this one cannot be compiled or launched."""
    unusable.append(error)
    _serves.cache_clear()


def group_of_sums(row_tiles: int, column_tiles: int, parts: int) -> int | None:
    """How many row tiles walk the vocabulary together, so that a part's tiles in a group all have the same rows.

    Each of ``parts`` takes every ``parts``-th tile. If ``parts`` is a multiple of the number of row tiles of each
    group, it then has one sum for each row, which it writes once: ``[groups, parts, rows of a tile]`` in all, where one
    sum for each tile would be ``[column tiles, tokens]``. ``None`` where no number of row tiles does that, or some part
    would have no tile of a group.
    """
    for group in (_GROUP, *_OTHER_GROUPS):
        sizes = {min(group, row_tiles), row_tiles % group or group if row_tiles > group else row_tiles}
        if all(parts % size == 0 and size * column_tiles >= parts for size in sizes):
            return group
    return None


@cache
def _serves(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU (an AMD GPU may have the same number), for which Triton compiles the kernel.

    Warns once where it does not.
    """
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
    if hopper and unusable:
        import triton

        warn_once(
            "A slower Triton kernel runs instead of the one for Hopper GPUs, with the same results: Triton "
            f"{triton.__version__} cannot run it ({type(unusable[0]).__name__}: {unusable[0]})."
        )
    return hopper and not unusable


def _descriptor(matrix: Tensor, columns: int, rows: int = _ROWS) -> object:
    """The matrix as the tensor memory accelerator takes it, in blocks of so many rows and columns."""
    return descriptor(matrix, rows, columns, _layout(matrix.dtype.itemsize))


@cache
def _layout(size: int) -> Any:
    """How products expect a block of elements of ``size`` bytes, whose rows have at least 128, in shared memory."""
    return gl.NVMMASharedLayout(128, 8 * size, 2)


def gluon_jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``gluon.jit`` with its options; without Gluon, the bare function, which is never launched."""
    if function is None:
        return lambda function: gluon_jit(function, **options)
    try:
        return function if gluon is None else gluon.jit(function, **options)
    except Exception as error:
        unusable.append(error)
        return function


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
    moments, transform, tiles, steps, group, row_tiles, column_tiles, tokens, vocab_size,
    PROJECTIONS: gl.constexpr, SUMS_OF_TILES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """One of the two parts that multiply: every other tile of the program."""
    STAGES: gl.constexpr = hidden_buffers.shape[0]
    BLOCK_N: gl.constexpr = hidden_buffers.shape[1]
    BLOCK_V: gl.constexpr = weight_buffers.shape[1]
    HALF: gl.constexpr = BLOCK_V // 2
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, half)
    by_column: gl.constexpr = gl.SliceLayout(0, half)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    used = steps * PART  # buffers, by both parts
    turn = gl.to_tensor(1 - PART)  # the first tile waits for nothing
    sums = gl.zeros((BLOCK_N,), gl.float32, by_row)
    totals = gl.zeros((BLOCK_N,), gl.float32, by_row)
    moment = gl.zeros((BLOCK_N,), gl.float32, by_row)
    for tile in range(program + programs * PART, tiles, programs * 2):
        row_tile, column_tile = _position(tile, row_tiles, column_tiles, group)
        first_column = column_tile * BLOCK_V
        first_row = row_tile * BLOCK_N
        rows = first_row + gl.arange(0, BLOCK_N, by_row)
        inside = rows < tokens
        row_offset = gl.load(offset + rows, mask=inside, other=0.0) * 1.4426950408889634
        label = gl.load(labels + rows, mask=inside, other=-1).to(gl.int32) - first_column
        factor = 1.0
        if transform.temperature is not None:
            factor = transform.factor / gl.load(transform.temperature + rows, mask=inside, other=1.0)
        elif transform.factor is not None:
            factor = transform.factor
        # An exponent is one fused multiplication and addition, whatever the temperature and the variant are.
        scale = factor * 1.4426950408889634
        if transform.temperature is not None:
            scale = gl.expand_dims(scale, 1)
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
        at_label = gl.max(((label >= 0) & (label < BLOCK_V)).to(gl.int32), 0) > 0  # while the last product runs
        if SUMS_OF_TILES:
            complete = inside
            place = column_tile * tokens + rows
            # Whatever the last tile had in rows beyond the tokens, which are never stored.
            sums = gl.zeros((BLOCK_N,), gl.float32, by_row)
            totals = gl.zeros((BLOCK_N,), gl.float32, by_row)
            moment = gl.zeros((BLOCK_N,), gl.float32, by_row)
        else:  # added up until the last tile of this group of row tiles
            of_group = tile // (group * column_tiles)
            following = tile + programs * 2
            complete = (rows >= 0) & ((following >= tiles) | (following // (group * column_tiles) != of_group))
            place = (of_group * programs * 2 + program + programs * PART) * BLOCK_N + rows - first_row
        z = warpgroup_mma_wait(0, deps=[z])
        mbarrier.arrive(empty.index(_previous(stage, STAGES)))
        left, right = _pieces(z, BLOCK_N, HALF, half)
        for part in gl.static_range(2):
            start = first_column + part * HALF
            columns = gl.arange(0, HALF, by_column)
            inside_vocab = start + columns < vocab_size
            x = left if part == 0 else right
            z = x
            if bias is not None:
                z += gl.load(bias + start + columns, mask=inside_vocab, other=0.0).to(gl.float32)[None, :]
            if logit_sums is not None:
                totals += gl.sum(z, 1)  # beyond the vocabulary they are 0
            exponent = gl.fma(z, scale, -row_offset[:, None])
            last = column_tile == column_tiles - 1  # nowhere else are columns beyond the vocabulary
            other_columns = (columns + part * HALF)[None, :] != label[:, None]
            if moments is not None:  # masked before the exponentials are taken: the registers need not hold both
                if last:
                    exponent = gl.where(inside_vocab[None, :], exponent, float("-inf"))
                if at_label:
                    exponent = gl.where(other_columns, exponent, float("-inf"))
            e = gl.exp2(exponent)
            if moments is None:
                if last:
                    e = gl.where(inside_vocab[None, :], e, 0.0)
                if at_label:
                    e = gl.where(other_columns, e, 0.0)
            sums += gl.sum(e, 1)
            if moments is not None:
                moment += gl.sum(e * gl.maximum(exponent, -200.0), 1)  # not 0 * -inf
            if PROJECTIONS:
                e = x
            if out is not None:
                tma.store_wait(0)
                staging.store(e.to(staging.dtype))
                fence_async_shared()
                _store(out, [first_row, start], staging)
        gl.store(partial + place, sums, mask=complete)
        sums = gl.where(complete, 0.0, sums)
        if logit_sums is not None:
            gl.store(logit_sums + place, totals * factor, mask=complete)
            totals = gl.where(complete, 0.0, totals)
        if moments is not None:
            gl.store(moments + place, moment, mask=complete)
            moment = gl.where(complete, 0.0, moment)
    if out is not None:
        tma.store_wait(0)


@gluon_jit(
    do_not_specialize=["tokens", "vocab_size", "hidden_size", "group"],
    do_not_specialize_on_alignment=["labels", "offset", "partial", "logit_sums", "moments", "needed"],
)
def hopper_exponentials_kernel(
    hidden, weight, out, tokens, vocab_size, hidden_size,
    bias, labels, offset, partial, logit_sums, moments, needed, group, transform,
    PROJECTIONS: gl.constexpr, SUMS_OF_TILES: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent programs: each takes every ``programs``-th tile.

    ``partial``, ``logit_sums`` and ``moments`` are ``[column tiles, tokens]`` with ``SUMS_OF_TILES``: each tile writes
    the sums of its rows, and their bits do not depend on which program took it. Otherwise each part adds up those of
    its tiles in a group of row tiles: see :func:`group_of_sums`. With x the exponent of 2 in e, moments are the sums of
    e x.
    """
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
                logit_sums, moments, transform, tiles, steps, group, row_tiles, column_tiles, tokens, vocab_size,
                PROJECTIONS, SUMS_OF_TILES, 0,
            )),
            (_consume, (
                hidden_buffers, weight_buffers, full, empty, turns, staging[1], out, bias, labels, offset, partial,
                logit_sums, moments, transform, tiles, steps, group, row_tiles, column_tiles, tokens, vocab_size,
                PROJECTIONS, SUMS_OF_TILES, 1,
            )),
            (_produce, (
                hidden, weight, hidden_buffers, weight_buffers, full, empty, tiles, steps, group, row_tiles,
                column_tiles, BLOCK_N, BLOCK_V, BLOCK_H,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
