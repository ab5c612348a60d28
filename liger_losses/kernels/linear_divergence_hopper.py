"""The kernel of :mod:`liger_losses.kernels.linear_divergence` on Hopper: products and divergences overlap.

Programs have the three parts of :mod:`liger_losses.kernels.linear_exp_hopper`. While one group multiplies, the other
takes the terms of the divergence of its tile, a quarter of it at a time, as they take many registers. It reads the
teacher's projections straight into the registers that hold the student's product of the same entries: the first quarter
before the group's turn to multiply, each other one while the terms of the quarter before are taken.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from liger_losses.kernels._tiles import Tiles, aligned, descriptor, processors
from liger_losses.kernels.divergence import load_hard, projection_gradient_block
from liger_losses.kernels.divergence_forms import terms_block
from liger_losses.kernels.linear_exp_hopper import (
    _COLUMNS,
    _DEPTH,
    _REGISTERS,
    _ROWS,
    AVAILABLE,
    _layout,
    _next,
    _pieces,
    _position,
    _previous,
    _produce,
    _serves,
    _store,
    gluon_jit,
)
from liger_losses.kernels.logit_transform import inverse_temperature, transform_block

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

#: Buffers of the ring, as many as shared memory has room for.
_STAGES = 6


def hopper_tiles(hidden: Tensor, weight: Tensor, teacher: Tensor, out: Tensor | None) -> Tiles | None:
    """The launch of :func:`hopper_divergence_kernel`, or ``None`` where it does not serve the call.

    It serves compute capability 9.0, and matrices that the tensor memory accelerator supports.
    """
    if not AVAILABLE or hidden.device.type != "cuda" or not _serves(hidden.device):
        return None
    return _tiles(hidden, weight, teacher, out)


def _tiles(hidden: Tensor, weight: Tensor, teacher: Tensor, out: Tensor | None) -> Tiles | None:
    if not all(aligned(matrix) for matrix in (hidden, weight, teacher, *([] if out is None else [out]))):
        return None
    row_tiles, column_tiles = -(-len(hidden) // _ROWS), -(-len(weight) // _COLUMNS)
    arguments = {
        "hidden": descriptor(hidden, _ROWS, _DEPTH, _layout(hidden.dtype.itemsize)),
        "weight": descriptor(weight, _ROWS, _DEPTH, _layout(weight.dtype.itemsize)),
        "teacher": teacher,
        "teacher_stride": teacher.stride(0),
        "out": None if out is None else descriptor(out, _ROWS, _COLUMNS // 4, _quarter_layout()),
        "tokens": len(hidden),
        "vocab_size": len(weight),
        "hidden_size": hidden.shape[1],
        "BLOCK_N": _ROWS,
        "BLOCK_V": _COLUMNS,
        "BLOCK_H": _DEPTH,
        "STAGES": _STAGES,
        "REGISTERS": _REGISTERS,
        "num_warps": 4,
    }
    return Tiles(row_tiles, column_tiles, min(processors(hidden.device), row_tiles * column_tiles), arguments)


@cache
def _quarter_layout() -> Any:
    """How a quarter of a tile in half precision lies in shared memory before it is stored."""
    return gl.NVMMASharedLayout(_COLUMNS // 2, 16, 2)


@gluon_jit
def _fourths(z, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr):
    """The columns of (half) a tile in four parts, which stay in the registers in which they are."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 4, 16])
    left, right = _pieces(z, BLOCK_N, COLUMNS // 2, half)
    first, second = _pieces(left, BLOCK_N, COLUMNS // 4, quarter)
    third, fourth = _pieces(right, BLOCK_N, COLUMNS // 4, quarter)
    return first, second, third, fourth


@gluon_jit
def _load_teacher(teacher_rows, columns, valid, vocab_size):
    """The teacher's projections at ``columns``, two at a time, as a thread has two adjacent ones.

    A row's last column may be the first of two: the other is in the same 8 bytes, as rows are 16-byte aligned.
    """
    inside = (columns // 2 * 2 < vocab_size)[None, :] & valid[:, None]
    return gl.load(teacher_rows[:, None] + columns[None, :], mask=inside, other=0.0)


@gluon_jit
def _consume_divergence(
    hidden_buffers, weight_buffers, full, empty, turns, staging, out, teacher, teacher_stride, bias, transform,
    teacher_bias, teacher_transform, student_rows, teacher_rows, h_sum, coef, labels, hard_p, hard_label, hard_lse,
    temperature, series, first_column, partial, tiles, steps, group, row_tiles, column_tiles, tokens, vocab_size,
    FORM: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """One of the two groups that multiply, in turn: every other tile of the program."""
    STAGES: gl.constexpr = hidden_buffers.shape[0]
    BLOCK_N: gl.constexpr = hidden_buffers.shape[1]
    BLOCK_V: gl.constexpr = weight_buffers.shape[1]
    # Parts of a tile whose terms fit the registers: sums are of two terms.
    PARTS: gl.constexpr = 8 if out is None else 4
    COLUMNS: gl.constexpr = BLOCK_V // PARTS
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V // 2, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    used = steps * PART  # buffers, by both groups
    turn = gl.to_tensor(1 - PART)  # the first tile waits for nothing
    for tile in range(program + programs * PART, tiles, programs * 2):
        row_tile, column_tile = _position(tile, row_tiles, column_tiles, group)
        first_row = row_tile * BLOCK_N
        rows = first_row + gl.arange(0, BLOCK_N, by_row)
        valid = rows < tokens
        column = column_tile * BLOCK_V + gl.arange(0, COLUMNS, by_column)
        projected = teacher + rows.to(gl.int64) * teacher_stride
        ahead = _load_teacher(projected, column, valid, vocab_size)
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
        z = warpgroup_mma_wait(0, deps=[z])
        mbarrier.arrive(empty.index(_previous(stage, STAGES)))
        inverse = 1.0
        if transform.temperature is not None:  # of both models
            inverse = inverse_temperature(transform, rows, valid, 1)
        s_row = gl.load(student_rows + rows, mask=valid, other=0.0)[:, None]
        t_row = gl.load(teacher_rows + rows, mask=valid, other=0.0)[:, None]
        hard = (None, None, None)
        label = gl.full((BLOCK_N,), -1, gl.int32, by_row)
        if out is not None:
            row_coef = gl.load(coef + rows, mask=valid, other=0.0)[:, None]
            if hard_p is not None:
                hard = load_hard(hard_p, hard_label, hard_lse, rows[:, None], valid[:, None])
                label = gl.load(labels + rows, mask=valid, other=-1).to(gl.int32) - first_column
            if h_sum is not None:
                total = gl.load(h_sum + rows, mask=valid, other=0.0)[:, None]
        f_sum = gl.zeros((BLOCK_N,), gl.float32, by_row)
        other_sum = gl.zeros((BLOCK_N,), gl.float32, by_row)
        if PARTS == 4:
            parts = _fourths(z, BLOCK_N, BLOCK_V)
        else:
            left, right = _pieces(z, BLOCK_N, BLOCK_V // 2, half)
            parts = _fourths(left, BLOCK_N, BLOCK_V // 2), _fourths(right, BLOCK_N, BLOCK_V // 2)
        for part in gl.static_range(PARTS):
            columns = (column + part * COLUMNS)[None, :]
            s = parts[part] if PARTS == 4 else parts[part // 4][part % 4]
            t = ahead
            if out is None:
                ahead = _load_teacher(projected, column + (part + 1) % PARTS * COLUMNS, valid, vocab_size)
            inside = columns < vocab_size
            if bias is not None or transform.factor is not None:
                s = transform_block(s, bias, columns, inside, transform, inverse)
            if teacher_bias is not None or teacher_transform.factor is not None:
                t = transform_block(t, teacher_bias, columns, inside, teacher_transform, inverse)
            if column_tile == column_tiles - 1:  # nowhere else are columns beyond the vocabulary
                s = gl.where(inside, s, float("-inf"))
                t = gl.where(inside, t, float("-inf"))
            p, f, grad = terms_block(s, t, s_row, t_row, series, FORM)
            if out is not None:  # there are no registers for it before
                ahead = _load_teacher(projected, column + (part + 1) % PARTS * COLUMNS, valid, vocab_size)
            if h_sum is None:
                f_sum += gl.sum(f, 1)
                if out is None:
                    other_sum += gl.sum(grad, 1)
            if out is not None:
                if h_sum is not None:
                    grad = grad - p * total
                at_label = columns == label[:, None]
                grad = projection_gradient_block(grad * row_coef, s, at_label, hard, temperature, transform, inverse)
                buffer = staging.index(part % 2)
                tma.store_wait(1)
                buffer.store(grad.to(out.dtype))
                fence_async_shared()
                _store(out, [first_row, column_tile * BLOCK_V + part * COLUMNS], buffer)
        if h_sum is None:
            sums = partial + column_tile * tokens + rows
            gl.store(sums, f_sum, mask=valid)
            if out is None:
                gl.store(sums + column_tiles * tokens, other_sum, mask=valid)
    if out is not None:
        tma.store_wait(0)


#: Arguments whose alignment is no reason to compile again: slices of vectors begin anywhere.
_VECTORS = ["student_rows", "teacher_rows", "h_sum", "coef", "labels", "hard_p", "hard_label", "hard_lse", "partial"]


@gluon_jit(
    do_not_specialize=["tokens", "vocab_size", "hidden_size", "first_column"],
    do_not_specialize_on_alignment=_VECTORS,
)
def hopper_divergence_kernel(
    hidden, weight, teacher, teacher_stride, out, tokens, vocab_size, hidden_size,
    bias, transform, teacher_bias, teacher_transform,
    student_rows, teacher_rows, h_sum, coef, labels, hard_p, hard_label, hard_lse, temperature, series,
    first_column, partial,
    FORM: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent programs: each takes every ``programs``-th tile.

    ``partial`` is ``[2, column tiles, tokens]``: each tile writes the sums of its rows, and their bits do not depend on
    which program took it.
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
    steps = gl.cdiv(hidden_size, BLOCK_H)
    if out is None:
        staging = (None, None)
    else:
        staging = (
            gl.allocate_shared_memory(out.dtype, [2, BLOCK_N, BLOCK_V // 4], out.layout),
            gl.allocate_shared_memory(out.dtype, [2, BLOCK_N, BLOCK_V // 4], out.layout),
        )
    gl.warp_specialize(
        [
            (_consume_divergence, (
                hidden_buffers, weight_buffers, full, empty, turns, staging[0], out, teacher, teacher_stride, bias,
                transform, teacher_bias, teacher_transform, student_rows, teacher_rows, h_sum, coef, labels, hard_p,
                hard_label, hard_lse, temperature, series, first_column, partial, tiles, steps, GROUP, row_tiles,
                column_tiles, tokens, vocab_size, FORM, 0,
            )),
            (_consume_divergence, (
                hidden_buffers, weight_buffers, full, empty, turns, staging[1], out, teacher, teacher_stride, bias,
                transform, teacher_bias, teacher_transform, student_rows, teacher_rows, h_sum, coef, labels, hard_p,
                hard_label, hard_lse, temperature, series, first_column, partial, tiles, steps, GROUP, row_tiles,
                column_tiles, tokens, vocab_size, FORM, 1,
            )),
            (_produce, (
                hidden, weight, hidden_buffers, weight_buffers, full, empty, tiles, steps, GROUP, row_tiles,
                column_tiles, BLOCK_N, BLOCK_V, BLOCK_H,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
