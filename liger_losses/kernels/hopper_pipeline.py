"""``hidden @ weight.T`` in tiles on Hopper: loads, products and what a kernel makes of each product overlap.

A program has three parts that run at the same time. One warp loads parts of ``hidden`` and ``weight`` into a ring of
buffers in shared memory. Two groups of four warps take tiles in turn: while one multiplies, the other works on the
product of its last tile.

Written in Gluon, the part of Triton in which a kernel places its own data; it serves compute capability 9.0, and
matrices that the tensor memory accelerator supports. The kernel calls :func:`set_up`, and runs :func:`load_tiles`
beside two groups, which call :func:`first_turn`, and for each of their tiles :func:`multiply` and :func:`finish`.
:func:`launch` launches it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import Tiles, aligned, processors, tile_position
from liger_losses.kernels._triton import INTERPRETED, warn_once, with_options
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.targets import target_of

#: Why kernels in Gluon cannot run with this version of Triton: what Gluon offers changes from version to version.
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
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError as error:
    gluon = gl = tma = None
    unusable.append(error)

#: Triton's interpreter has no Gluon.
AVAILABLE = not INTERPRETED
#: Rows, columns and depth of a tile. Two groups of four warps that take tiles of 128 x 128 in turn take 0.93 to 0.98 of
#: cuBLAS's time on an H200 (benchmarks/results/exponentials_kernel.txt); tiles of 64 x 256, 0.97 to 0.99; two groups
#: that share tiles of 128 x 256, and whose exponentials nothing runs beside, 0.98 to 1.00.
ROWS, COLUMNS, _DEPTH = 128, 128, 64
#: Buffers of the ring, by the bytes of what a call stores (0: nothing): as many as shared memory has room for.
_STAGES = {0: 6, 2: 6, 4: 5}
#: Registers of a thread that multiplies.
_REGISTERS = 240


def pipeline_tiles(hidden: Tensor, weight: Tensor, epilogue: Epilogue, out: Tensor | None) -> Tiles | None:
    """What the kernel that calls :func:`set_up` is launched with, or ``None`` where it does not serve the call.

    It serves compute capability 9.0, and matrices that the tensor memory accelerator supports. Where this version of
    Triton cannot compile it, a warning says why.
    """
    if not _serves(hidden.device):
        return None
    if not aligned(hidden) or not aligned(weight) or not (out is None or aligned(out)):
        return None
    try:
        descriptors = operands(hidden, weight, out)
    except (AttributeError, ImportError, TypeError) as error:  # descriptors of another version of Triton
        _give_up(error)
        return pipeline_tiles(hidden, weight, epilogue, out)  # warns
    arguments = {
        **descriptors,
        "tokens": len(hidden),
        "vocab_size": len(weight),
        "hidden_size": hidden.shape[1],
        "bias": epilogue.bias,
        "transform": epilogue.transform.for_kernel,
        "BLOCK_N": ROWS,
        "BLOCK_V": COLUMNS,
        "BLOCK_H": _DEPTH,
        "STAGES": _STAGES[0 if out is None else out.dtype.itemsize],
        "REGISTERS": _REGISTERS,
        "num_warps": 4,
    }
    return Tiles(-(-len(hidden) // ROWS), -(-len(weight) // COLUMNS), processors(hidden.device), arguments)


def operands(hidden: Tensor, weight: Tensor, out: Tensor | None) -> dict[str, object]:
    """The arguments that are matrices."""
    return {
        "hidden": _descriptor(hidden, _DEPTH),
        "weight": _descriptor(weight, _DEPTH),
        "out": None if out is None else _descriptor(out, COLUMNS // 2),
    }


def _give_up(error: Exception) -> None:
    """Let other kernels serve all calls of this process: this one cannot be compiled."""
    unusable.append(error)
    _serves.cache_clear()


class NotCompiledError(Exception):
    """Triton cannot compile the kernel, and :func:`pipeline_tiles` returns ``None`` from now on."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> Any:
    """Launch a kernel, and return it compiled; what the device raises, such as too little memory, is raised as it is.

    Raises:
        NotCompiledError: Triton cannot compile the kernel for these arguments, or the GPU cannot hold it.
    """
    try:
        return kernel[grid](*arguments, **named)
    except Exception as error:
        if not _cannot_be_built(kernel, grid, arguments, named, error):
            raise
        _give_up(error)
        raise NotCompiledError from error


class Launchable:
    """A kernel for :class:`~liger_losses.kernels._triton.Launcher`, which :func:`launch` launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(launch, self.kernel, grid)


def _cannot_be_built(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any], error: Exception
) -> bool:
    """Whether a launch raised the error because the kernel does not compile, or has too many registers to be loaded."""
    import triton

    if isinstance(error, triton.OutOfResources):
        return True
    try:
        kernel.warmup(*arguments, **named, grid=grid)  # compiles what is not compiled yet, and launches nothing
    except Exception:
        return True
    return False


@cache
def _serves(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU, for which Triton compiles the kernels; warns once where it does not."""
    hopper = target_of(device).warp_groups
    if hopper and unusable:
        import triton

        warn_once(
            "A slower Triton kernel runs instead of the one for Hopper GPUs, with the same results: Triton "
            f"{triton.__version__} cannot run it ({type(unusable[0]).__name__}: {unusable[0]})."
        )
    return hopper and not unusable


def _descriptor(matrix: Tensor, columns: int) -> object:
    """As :func:`~liger_losses.kernels._tiles.descriptor`, in blocks of :data:`ROWS` rows and so many columns."""
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [ROWS, columns], _layout(matrix.dtype.itemsize))


@cache
def _layout(size: int) -> Any:
    """How products expect a block of elements of ``size`` bytes, whose rows have at least 128, in shared memory."""
    return gl.NVMMASharedLayout(128, 8 * size, 2)


def gluon_jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``gluon.jit`` with its options; without Gluon, the bare function, which is never launched."""
    if function is None:
        return lambda function: gluon_jit(function, **options)
    try:
        return function if gluon is None else with_options(gluon.jit(function, **options))
    except Exception as error:
        unusable.append(error)
        return function


# Their names in newer versions of Triton, and in 3.6.
_load: Any = getattr(tma, "async_load", None) or getattr(tma, "async_copy_global_to_shared", None)
_store: Any = getattr(tma, "async_store", None) or getattr(tma, "async_copy_shared_to_global", None)


class Ring(NamedTuple):
    """Shared memory: buffers of both matrices, a barrier of each that is full or empty, and of each group's turn."""

    hidden: Any
    weight: Any
    full: Any
    empty: Any
    turns: Any


class Grid(NamedTuple):
    """The tiles of a product: how many there are, of which ``tiles`` are taken in groups of ``group`` row tiles, and
    how many steps of the hidden size each takes."""

    tiles: Any
    steps: Any
    group: Any
    row_tiles: Any
    column_tiles: Any
    tokens: Any
    vocab_size: Any


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
def load_tiles(hidden, weight, ring, grid, BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr):
    """Load the operands of all tiles, one step of the hidden size after the other."""
    STAGES: gl.constexpr = ring.hidden.shape[0]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first use of a buffer waits for nothing
    for tile in range(gl.program_id(0), grid.tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_position(tile, grid.row_tiles, grid.column_tiles, grid.group)
        for k in range(grid.steps):
            mbarrier.wait(ring.empty.index(stage), phase)
            bar = ring.full.index(stage)
            mbarrier.expect(bar, (BLOCK_N + BLOCK_V) * BLOCK_H * 2)
            _load(hidden, [row_tile * BLOCK_N, k * BLOCK_H], bar, ring.hidden.index(stage))
            _load(weight, [column_tile * BLOCK_V, k * BLOCK_H], bar, ring.weight.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon_jit
def first_turn(grid, PART: gl.constexpr):
    """What a group's first :func:`multiply` takes: how many buffers both groups have used, and a parity."""
    return grid.steps * PART, gl.to_tensor(1 - PART)  # the first tile waits for nothing


@gluon_jit
def multiply(ring, grid, used, turn, PART: gl.constexpr):
    """The product of the group's next tile, of which the last step may still run; the ring's next buffer; and what the
    next call takes."""
    STAGES: gl.constexpr = ring.hidden.shape[0]
    BLOCK_N: gl.constexpr = ring.hidden.shape[1]
    BLOCK_V: gl.constexpr = ring.weight.shape[1]
    stage = used % STAGES
    phase = used // STAGES & 1
    z = gl.zeros((BLOCK_N, BLOCK_V), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16]))
    # A phase has no number, only a parity: nobody waits for one before its predecessor is over.
    mbarrier.wait(ring.turns.index(PART), turn)
    # The first step adds to nothing, which saves setting the registers to 0 during the turn.
    mbarrier.wait(ring.full.index(stage), phase)
    z = warpgroup_mma(
        ring.hidden.index(stage), ring.weight.index(stage).permute((1, 0)), z, use_acc=False, is_async=True
    )
    z = warpgroup_mma_wait(1, deps=[z])
    stage, phase = _next(stage, phase, STAGES)
    for _ in range(1, grid.steps):
        mbarrier.wait(ring.full.index(stage), phase)
        a, b = ring.hidden.index(stage), ring.weight.index(stage)
        z = warpgroup_mma(a, b.permute((1, 0)), z, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])
        mbarrier.arrive(ring.empty.index(_previous(stage, STAGES)))
        stage, phase = _next(stage, phase, STAGES)
    mbarrier.arrive(ring.turns.index(1 - PART))
    return z, stage, used + grid.steps * 2, turn ^ 1


@gluon_jit
def finish(z, ring, stage):
    """The left and the right half of a product, once it is complete; both stay in the registers in which they are."""
    BLOCK_N: gl.constexpr = z.shape[0]
    HALF: gl.constexpr = z.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    z = warpgroup_mma_wait(0, deps=[z])
    mbarrier.arrive(ring.empty.index(_previous(stage, ring.hidden.shape[0])))
    left, right = gl.split(gl.permute(gl.reshape(z, (BLOCK_N, 2, HALF)), (0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon_jit
def store_half(out, staging, value, first_row, first_column):
    """Store half a tile, through shared memory, once the half before it has left there."""
    tma.store_wait(0)
    staging.store(value.to(staging.dtype))
    fence_async_shared()
    _store(out, [first_row, first_column], staging)


@gluon_jit
def set_up(
    hidden, weight, tokens, vocab_size, hidden_size, needed, group,
    BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The ring of a program, and its tiles: none if ``needed`` is 0."""
    ring = Ring(
        gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK_N, BLOCK_H], hidden.layout),
        gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_V, BLOCK_H], weight.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
        mbarrier.init(ring.empty.index(stage), count=1)
    for part in gl.static_range(2):
        mbarrier.init(ring.turns.index(part), count=1)
    fence_async_shared()
    row_tiles = gl.cdiv(tokens, BLOCK_N)
    column_tiles = gl.cdiv(vocab_size, BLOCK_V)
    tiles = row_tiles * column_tiles
    if needed is not None:
        tiles = tiles * gl.load(needed)
    steps = gl.cdiv(hidden_size, BLOCK_H)
    return ring, Grid(tiles, steps, group, row_tiles, column_tiles, tokens, vocab_size)
