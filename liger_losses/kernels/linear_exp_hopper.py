"""The exponentials of :mod:`liger_losses.kernels.linear_exp` on Hopper, and the log-sum-exps and projections of
:mod:`liger_losses.kernels.linear_lse`: loads, products and exponentials overlap.

See :mod:`liger_losses.kernels.hopper_pipeline`: while one group of warps multiplies, the other takes the exponentials
of its tile and stores them, or the projections.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from liger_losses.kernels._tiles import Tiles, tile_position
from liger_losses.kernels.hopper_pipeline import (
    finish,
    first_turn,
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

#: Further numbers of row tiles that walk the vocabulary together, for :func:`group_of_sums`.
_OTHER_GROUPS = (4, 8, 6, 12)


def hopper_tiles(hidden: Tensor, weight: Tensor, epilogue: Epilogue, out: Tensor | None) -> Tiles | None:
    """The launch of :func:`hopper_exponentials_kernel`, or ``None`` where it does not serve the call: as
    :func:`~liger_losses.kernels.hopper_pipeline.pipeline_tiles` says, and logits with a soft-cap, whose derivative
    takes more registers than there are.
    """
    return None if epilogue.transform.softcap is not None else pipeline_tiles(hidden, weight, epilogue, out)


def group_of_sums(row_tiles: int, column_tiles: int, parts: int, usual: int) -> int | None:
    """How many row tiles walk the vocabulary together, so that a part's tiles in a group all have the same rows.

    Each of ``parts`` takes every ``parts``-th tile. If ``parts`` is a multiple of the number of row tiles of each
    group, it then has one sum for each row, which it writes once: ``[groups, parts, rows of a tile]`` in all, where one
    sum for each tile would be ``[column tiles, tokens]``. ``None`` where no number of row tiles does that, or some part
    would have no tile of a group. The ``usual`` number is tried first.
    """
    for group in (usual, *_OTHER_GROUPS):
        sizes = {min(group, row_tiles), row_tiles % group or group if row_tiles > group else row_tiles}
        if all(parts % size == 0 and size * column_tiles >= parts for size in sizes):
            return group
    return None


def sums_on_hopper(tiles: Tiles, tokens: int, usual: int, of_tiles: bool) -> tuple[tuple[int, int], int, int | None]:
    """The shape of ``partial`` of :func:`hopper_exponentials_kernel`, its ``group``, and the number of parts.

    That is ``None`` where there is one sum for each tile: with ``of_tiles``, and where :func:`group_of_sums` is.
    """
    row_tiles, column_tiles, programs, arguments = tiles
    parts = 2 * min(programs, row_tiles * column_tiles)
    group = None if of_tiles else group_of_sums(row_tiles, column_tiles, parts, usual)
    if group is None:
        return (column_tiles, tokens), usual, None
    return (-(-row_tiles // group) * parts, arguments["BLOCK_N"]), group, parts


class _Arguments(NamedTuple):
    """What :func:`hopper_exponentials_kernel` takes for its exponentials."""

    bias: Any
    labels: Any
    offset: Any
    partial: Any
    tops: Any
    logit_sums: Any
    moments: Any
    transform: Any
    projections: Any
    sums_of_tiles: Any
    slots: Any
    kept: Any


@gluon_jit
def _add_below_largest(x, tops, sums, columns, inside, masked, bias, transform, inverse):
    """The rows' largest logits times log2(e), and sums of exponentials relative to them, including ``x``."""
    if bias is not None or transform.factor is not None:
        x = transform_block(x, bias, columns, inside, transform, inverse)
    if masked:
        x = gl.where(inside, x, float("-inf"))
    x = x * 1.4426950408889634
    highest = gl.minimum(gl.maximum(tops, gl.max(x, 1)), 3.0e38)  # inf - inf would be NaN
    sums = sums * gl.exp2(tops - highest) + gl.sum(gl.exp2(x - highest[:, None]), 1)
    return highest, sums


@gluon_jit
def _consume(ring, grid, out, staging, arguments, PART: gl.constexpr):
    """One of the two parts that multiply: every other tile of the program."""
    BLOCK_N: gl.constexpr = ring.hidden.shape[1]
    BLOCK_V: gl.constexpr = ring.weight.shape[1]
    HALF: gl.constexpr = BLOCK_V // 2
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, half)
    by_column: gl.constexpr = gl.SliceLayout(0, half)
    bias, labels, offset, partial, tops, logit_sums, moments, transform, PROJECTIONS, SUMS_OF_TILES, slots, kept = (
        arguments
    )
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    used, turn = first_turn(grid, PART)
    sums = gl.zeros((BLOCK_N,), gl.float32, by_row)
    totals = gl.zeros((BLOCK_N,), gl.float32, by_row)
    moment = gl.zeros((BLOCK_N,), gl.float32, by_row)
    for tile in range(program + programs * PART, grid.tiles, programs * 2):
        row_tile, column_tile = tile_position(tile, grid.row_tiles, grid.column_tiles, grid.group)
        first_column = column_tile * BLOCK_V
        first_row = row_tile * BLOCK_N
        rows = first_row + gl.arange(0, BLOCK_N, by_row)
        inside = rows < grid.tokens
        if offset is not None:
            row_offset = gl.load(offset + rows, mask=inside, other=0.0) * 1.4426950408889634
            label = gl.load(labels + rows, mask=inside, other=-1).to(gl.int32) - first_column
        inverse = 1.0
        if offset is None and transform.temperature is not None:
            inverse = inverse_temperature(transform, rows, inside, 1)
        factor = 1.0
        if transform.temperature is not None:
            factor = transform.factor / gl.load(transform.temperature + rows, mask=inside, other=1.0)
        elif transform.factor is not None:
            factor = transform.factor
        # An exponent is one fused multiplication and addition, whatever the temperature and the variant are.
        scale = factor * 1.4426950408889634
        if transform.temperature is not None:
            scale = gl.expand_dims(scale, 1)
        z, stage, used, turn = multiply(ring, grid, used, turn, PART)
        # While the last product runs: whether the tile has a label, or columns beyond the vocabulary. One branch for
        # both, because the compiler masks without a branch, in every tile, where there are two.
        if offset is None:
            masked = column_tile == grid.column_tiles - 1
        else:
            masked = gl.max(((label >= 0) & (label < BLOCK_V)).to(gl.int32), 0) > 0
            masked |= column_tile == grid.column_tiles - 1
        if SUMS_OF_TILES:
            complete = inside
            place = column_tile * grid.tokens + rows
            # Whatever the last tile had in rows beyond the tokens, which are never stored.
            sums = gl.zeros((BLOCK_N,), gl.float32, by_row)
            totals = gl.zeros((BLOCK_N,), gl.float32, by_row)
            moment = gl.zeros((BLOCK_N,), gl.float32, by_row)
        else:  # added up until the last tile of this group of row tiles
            in_group = grid.group * grid.column_tiles
            of_group = tile // in_group
            following = tile + programs * 2
            complete = (rows >= 0) & (following >= gl.minimum((of_group + 1) * in_group, grid.tiles))
            place = (of_group * programs * 2 + program + programs * PART) * BLOCK_N + rows - first_row
        highest = gl.full((BLOCK_N,), -3.0e38, gl.float32, by_row)
        left, right = finish(z, ring, stage)
        for part in gl.static_range(2):
            start = first_column + part * HALF
            columns = gl.arange(0, HALF, by_column)
            inside_vocab = start + columns < grid.vocab_size
            x = left if part == 0 else right
            if PROJECTIONS and out is not None:
                store_half(out, staging, x, first_row, start)
            if slots is not None:  # halves of tiles that a row keeps
                at = rows.to(gl.int64) * (grid.column_tiles * 2) + column_tile * 2 + part
                slot = gl.load(slots + at, mask=inside, other=-1).to(gl.int64)
                into = kept + (slot * HALF)[:, None] + columns[None, :]
                gl.store(into, x, mask=(slot >= 0)[:, None] & (columns >= 0)[None, :])
            if offset is None:
                highest, sums = _add_below_largest(
                    x,
                    highest,
                    sums,
                    (start + columns)[None, :],
                    inside_vocab[None, :],
                    masked,
                    bias,
                    transform,
                    inverse,
                )
            else:
                z = x
                if bias is not None:
                    z += gl.load(bias + start + columns, mask=inside_vocab, other=0.0).to(gl.float32)[None, :]
                if logit_sums is not None:
                    totals += gl.sum(z, 1)  # beyond the vocabulary they are 0
                exponent = gl.fma(z, scale, -row_offset[:, None])
                others = inside_vocab[None, :] & ((columns + part * HALF)[None, :] != label[:, None])
                if moments is not None and masked:  # before the exponentials are taken: registers need not hold both
                    exponent = gl.where(others, exponent, float("-inf"))
                e = gl.exp2(exponent)
                if moments is None and masked:
                    e = gl.where(others, e, 0.0)
                sums += gl.sum(e, 1)
                if moments is not None:
                    moment += gl.sum(e * gl.maximum(exponent, -200.0), 1)  # not 0 * -inf
                if not PROJECTIONS and out is not None:
                    store_half(out, staging, e, first_row, start)
        gl.store(partial + place, sums, mask=complete)
        sums = gl.where(complete, 0.0, sums)
        if offset is None:
            gl.store(tops + place, highest * 0.6931471805599453, mask=complete)
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
    do_not_specialize_on_alignment=["labels", "offset", "partial", "tops", "logit_sums", "moments", "needed"],
)
def hopper_exponentials_kernel(
    hidden, weight, out, tokens, vocab_size, hidden_size,
    bias, labels, offset, partial, tops, logit_sums, moments, needed, group, transform,
    PROJECTIONS: gl.constexpr, SUMS_OF_TILES: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, slots=None, kept=None,
):  # fmt: skip
    """Persistent programs: each takes every ``programs``-th tile.

    ``partial``, ``logit_sums`` and ``moments`` are ``[column tiles, tokens]`` with ``SUMS_OF_TILES``: each tile writes
    the sums of its rows, and their bits do not depend on which program took it. Otherwise each part adds up those of
    its tiles in a group of row tiles: see :func:`group_of_sums`. With x the exponent of 2 in e, moments are the sums of
    e x.

    Without an ``offset``, exponentials are relative to the largest logit of a tile's row, which ``tops`` gets: with
    ``SUMS_OF_TILES``, and no labels, exponentials to store, sums of logits or moments.

    ``slots`` and ``kept`` are the ``slots`` and ``projections`` of :class:`~liger_losses.kernels.linear_lse.Kept`.
    """
    arguments = _Arguments(
        bias, labels, offset, partial, tops, logit_sums, moments, transform, PROJECTIONS, SUMS_OF_TILES, slots, kept
    )
    ring, grid = set_up(
        hidden, weight, tokens, vocab_size, hidden_size, needed, group, BLOCK_N, BLOCK_V, BLOCK_H, STAGES
    )
    if out is None:
        staging = (None, None)
    else:
        staging = (
            gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout),
            gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout),
        )
    gl.warp_specialize(
        [
            (_consume, (ring, grid, out, staging[0], arguments, 0)),
            (_consume, (ring, grid, out, staging[1], arguments, 1)),
            (load_tiles, (hidden, weight, ring, grid, BLOCK_N, BLOCK_V, BLOCK_H)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
