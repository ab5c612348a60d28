"""The divergence kernel of :mod:`liger_losses.kernels.linear_divergence` on Hopper, with both models' products in it.

For each tile, the student's product is computed first, and kept in a scratch of the program, which stays in the L2
cache; then the teacher's, whose epilogue reads the student's again. No projection of the teacher reaches memory.

Programs have the three parts of :mod:`liger_losses.kernels.linear_exp_hopper`. The two groups that multiply take turns
with every product: while one multiplies, the other stores the student's projections of its tile, or takes the terms of
the divergence.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from liger_losses.kernels._tiles import Tiles, aligned, descriptor, processors, with_contiguous_rows
from liger_losses.kernels.divergence import load_hard, projection_gradient_block
from liger_losses.kernels.divergence_forms import terms_block
from liger_losses.kernels.linear_exp_hopper import (
    _COLUMNS,
    _DEPTH,
    _REGISTERS,
    _ROWS,
    AVAILABLE,
    _layout,
    _load,
    _next,
    _pieces,
    _position,
    _previous,
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
#: Columns that the epilogue takes at a time, whose terms take many registers.
_PART = 32


def serves_products(*heads: Tensor) -> bool:
    """Whether there is a kernel that computes both models' products, of heads ``[V, H]`` with these weights.

    (They may have no memory yet, as torch.compile plans a call with their shapes.)
    """
    in_16_bytes = all(w.stride(0) % 8 == w.shape[1] % 8 == w.storage_offset() % 8 == 0 for w in heads)
    return in_16_bytes and _has_kernel(heads[0].device)


def scratch_bytes(device: torch.device) -> int:
    """Bytes of the student's projections that all programs keep."""
    return processors(device) * 2 * _ROWS * _COLUMNS * 4


def hopper_pairs(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, out: Tensor | None
) -> Tiles | None:
    """The launch of :func:`hopper_divergence_kernel`, or ``None`` where it does not serve the call.

    It serves compute capability 9.0, and matrices that the tensor memory accelerator supports.
    """
    if not _has_kernel(hidden.device):
        return None
    hidden, teacher_hidden = (with_contiguous_rows(h, True) for h in (hidden, teacher_hidden))
    matrices = {"hidden": hidden, "weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    if not all(aligned(matrix) for matrix in (*matrices.values(), *([] if out is None else [out]))):
        return None
    row_tiles, column_tiles = -(-len(hidden) // _ROWS), -(-len(weight) // _COLUMNS)
    programs = min(processors(hidden.device), row_tiles * column_tiles)
    layout = _layout(hidden.dtype.itemsize)
    arguments = {name: descriptor(matrix, _ROWS, _DEPTH, layout) for name, matrix in matrices.items()}
    arguments |= {
        "out": None if out is None else descriptor(out, _ROWS, _PART, _narrow_layout()),
        "scratch": torch.empty(programs, 2, _ROWS * _COLUMNS, device=hidden.device),
        "tokens": len(hidden),
        "vocab_size": len(weight),
        "hidden_size": hidden.shape[1],
        "teacher_hidden_size": teacher_hidden.shape[1],
        "BLOCK_N": _ROWS,
        "BLOCK_V": _COLUMNS,
        "BLOCK_H": _DEPTH,
        "STAGES": _STAGES,
        "REGISTERS": _REGISTERS,
        "num_warps": 4,
    }
    return Tiles(row_tiles, column_tiles, programs, arguments)


def _has_kernel(device: torch.device) -> bool:
    return AVAILABLE and device.type == "cuda" and _serves(device)


@cache
def _narrow_layout() -> object:
    """How :data:`_PART` columns of half precision lie in shared memory before they are stored."""
    return gl.NVMMASharedLayout(2 * _PART, 16, 2)


@gluon_jit
def _load_product(
    hidden, weight, hidden_buffers, weight_buffers, full, empty, stage, phase, tile, steps, group, row_tiles,
    column_tiles,
):  # fmt: skip
    """Load the operands of one tile, one step of the hidden size after the other."""
    STAGES: gl.constexpr = hidden_buffers.shape[0]
    BLOCK_N: gl.constexpr = hidden_buffers.shape[1]
    BLOCK_V: gl.constexpr = weight_buffers.shape[1]
    BLOCK_H: gl.constexpr = hidden_buffers.shape[2]
    row_tile, column_tile = _position(tile, row_tiles, column_tiles, group)
    for k in range(steps):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, (BLOCK_N + BLOCK_V) * BLOCK_H * 2)
        _load(hidden, [row_tile * BLOCK_N, k * BLOCK_H], bar, hidden_buffers.index(stage))
        _load(weight, [column_tile * BLOCK_V, k * BLOCK_H], bar, weight_buffers.index(stage))
        stage, phase = _next(stage, phase, STAGES)
    return stage, phase


@gluon_jit
def _produce_pairs(
    hidden, weight, teacher_hidden, teacher_weight, hidden_buffers, weight_buffers, full, empty, tiles, steps,
    teacher_steps, group, row_tiles, column_tiles,
):  # fmt: skip
    """Load in the order of the turns: of two tiles, both students' operands, then both teachers'."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first use of a buffer waits for nothing
    programs = gl.num_programs(0)
    for tile in range(gl.program_id(0), tiles, programs * 2):
        is_pair = (tile + programs < tiles).to(gl.int32)
        other = tile + programs * is_pair
        stage, phase = _load_product(
            hidden, weight, hidden_buffers, weight_buffers, full, empty, stage, phase, tile, steps, group, row_tiles,
            column_tiles,
        )  # fmt: skip
        stage, phase = _load_product(
            hidden, weight, hidden_buffers, weight_buffers, full, empty, stage, phase, other, steps * is_pair, group,
            row_tiles, column_tiles,
        )  # fmt: skip
        stage, phase = _load_product(
            teacher_hidden, teacher_weight, hidden_buffers, weight_buffers, full, empty, stage, phase, tile,
            teacher_steps, group, row_tiles, column_tiles,
        )  # fmt: skip
        stage, phase = _load_product(
            teacher_hidden, teacher_weight, hidden_buffers, weight_buffers, full, empty, stage, phase, other,
            teacher_steps * is_pair, group, row_tiles, column_tiles,
        )  # fmt: skip


@gluon_jit
def _multiply(hidden_buffers, weight_buffers, full, empty, used, steps, next_turn):
    """A tile's product of the operands in the buffers from the ``used``-th on; the other group's turn is next."""
    STAGES: gl.constexpr = hidden_buffers.shape[0]
    BLOCK_N: gl.constexpr = hidden_buffers.shape[1]
    BLOCK_V: gl.constexpr = weight_buffers.shape[1]
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    stage = used % STAGES
    phase = used // STAGES & 1
    z = gl.zeros((BLOCK_N, BLOCK_V), gl.float32, whole)
    for k in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a, b = hidden_buffers.index(stage), weight_buffers.index(stage)
        z = warpgroup_mma(a, b.permute((1, 0)), z, use_acc=k > 0, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])
        mbarrier.arrive(empty.index(_previous(stage, STAGES)), pred=k > 0)
        stage, phase = _next(stage, phase, STAGES)
    mbarrier.arrive(next_turn)
    z = warpgroup_mma_wait(0, deps=[z])
    mbarrier.arrive(empty.index(_previous(stage, STAGES)))
    return z


@gluon_jit
def _quarters(z, BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr):
    """A tile's columns in four parts, which stay in the registers in which they are."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V // 2, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V // 4, 16])
    left, right = _pieces(z, BLOCK_N, BLOCK_V // 2, half)
    first, second = _pieces(left, BLOCK_N, BLOCK_V // 4, quarter)
    third, fourth = _pieces(right, BLOCK_N, BLOCK_V // 4, quarter)
    return first, second, third, fourth


@gluon_jit
def _consume_pairs(
    hidden_buffers, weight_buffers, full, empty, turns, staging, out, scratch, bias, transform, teacher_bias,
    teacher_transform, student_rows, teacher_rows, h_sum, coef, labels, hard_p, hard_label, hard_lse, temperature,
    series, first_column, partial, tiles, steps, teacher_steps, group, row_tiles, column_tiles, tokens, vocab_size,
    FORM: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """One of the two groups that multiply: every other tile of the program."""
    BLOCK_N: gl.constexpr = hidden_buffers.shape[1]
    BLOCK_V: gl.constexpr = weight_buffers.shape[1]
    QUARTER: gl.constexpr = BLOCK_V // 4
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, quarter)
    by_column: gl.constexpr = gl.SliceLayout(0, quarter)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    row = gl.arange(0, BLOCK_N, by_row)
    column = gl.arange(0, QUARTER, by_column)
    # Each thread reads what it has written. A warp writes 8 rows of 8 columns at once, which follow each other.
    scratch += (program * 2 + PART) * (BLOCK_N * BLOCK_V)
    at = scratch + ((row * 8)[:, None] + (column // 8 * (8 * BLOCK_N) + column % 8)[None, :])
    used = gl.to_tensor(0)
    turn = gl.to_tensor(1 - PART)  # the first product waits for nothing
    for tile in range(program + programs * PART, tiles, programs * 2):
        is_pair = gl.to_tensor(True)
        if PART == 0:
            is_pair = tile + programs < tiles
        first_used = used + steps * PART
        second_used = used + steps * (1 + is_pair.to(gl.int32)) + teacher_steps * PART
        used += (steps + teacher_steps) * 2
        # A phase has no number, only a parity: nobody waits for one before its predecessor is over.
        mbarrier.wait(turns.index(PART), turn)
        s_parts = _quarters(
            _multiply(hidden_buffers, weight_buffers, full, empty, first_used, steps, turns.index(1 - PART)),
            BLOCK_N, BLOCK_V,
        )  # fmt: skip
        for part in gl.static_range(4):
            gl.store(at + part * (BLOCK_N * QUARTER), s_parts[part])
        mbarrier.wait(turns.index(PART), turn ^ 1, pred=is_pair)
        t_parts = _quarters(
            _multiply(hidden_buffers, weight_buffers, full, empty, second_used, teacher_steps, turns.index(1 - PART)),
            BLOCK_N, BLOCK_V,
        )  # fmt: skip
        row_tile, column_tile = _position(tile, row_tiles, column_tiles, group)
        first_row = row_tile * BLOCK_N
        rows = first_row + row
        valid = rows < tokens
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
        for part in gl.static_range(4):
            start = column_tile * BLOCK_V + part * QUARTER
            columns = (start + column)[None, :]
            inside = columns < vocab_size
            s = gl.load(at + part * (BLOCK_N * QUARTER))
            t = t_parts[part]
            if bias is not None or transform.factor is not None:
                s = transform_block(s, bias, columns, inside, transform, inverse)
            if teacher_bias is not None or teacher_transform.factor is not None:
                t = transform_block(t, teacher_bias, columns, inside, teacher_transform, inverse)
            if column_tile == column_tiles - 1:  # nowhere else are columns beyond the vocabulary
                s = gl.where(inside, s, float("-inf"))
                t = gl.where(inside, t, float("-inf"))
            p, f, grad = terms_block(s, t, s_row, t_row, series, FORM)
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
                _store(out, [first_row, start], buffer)
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
    do_not_specialize=["tokens", "vocab_size", "hidden_size", "teacher_hidden_size", "first_column"],
    do_not_specialize_on_alignment=_VECTORS,
)
def hopper_divergence_kernel(
    hidden, weight, teacher_hidden, teacher_weight, out, scratch, tokens, vocab_size, hidden_size, teacher_hidden_size,
    bias, transform, teacher_bias, teacher_transform,
    student_rows, teacher_rows, h_sum, coef, labels, hard_p, hard_label, hard_lse, temperature, series,
    first_column, partial,
    FORM: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent programs: each takes every ``programs``-th tile, in pairs.

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
    teacher_steps = gl.cdiv(teacher_hidden_size, BLOCK_H)
    if out is None:
        staging = (None, None)
    else:
        staging = (
            gl.allocate_shared_memory(out.dtype, [2, BLOCK_N, BLOCK_V // 4], out.layout),
            gl.allocate_shared_memory(out.dtype, [2, BLOCK_N, BLOCK_V // 4], out.layout),
        )
    gl.warp_specialize(
        [
            (_consume_pairs, (
                hidden_buffers, weight_buffers, full, empty, turns, staging[0], out, scratch, bias, transform,
                teacher_bias, teacher_transform, student_rows, teacher_rows, h_sum, coef, labels, hard_p, hard_label,
                hard_lse, temperature, series, first_column, partial, tiles, steps, teacher_steps, GROUP, row_tiles,
                column_tiles, tokens, vocab_size, FORM, 0,
            )),
            (_consume_pairs, (
                hidden_buffers, weight_buffers, full, empty, turns, staging[1], out, scratch, bias, transform,
                teacher_bias, teacher_transform, student_rows, teacher_rows, h_sum, coef, labels, hard_p, hard_label,
                hard_lse, temperature, series, first_column, partial, tiles, steps, teacher_steps, GROUP, row_tiles,
                column_tiles, tokens, vocab_size, FORM, 1,
            )),
            (_produce_pairs, (
                hidden, weight, teacher_hidden, teacher_weight, hidden_buffers, weight_buffers, full, empty, tiles,
                steps, teacher_steps, GROUP, row_tiles, column_tiles,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
