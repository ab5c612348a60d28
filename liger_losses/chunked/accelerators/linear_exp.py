"""``exp(logit - offset)`` of ``hidden @ weight.T`` in the product's epilogue: a softmax without a separate pass.

N tokens, H hidden size, V vocabulary size.

With e = exp(z - offset), one offset per token, and s = sum(e), every gradient of a loss on log-probabilities is a
product with e itself, because softmax = e / s and 1 / s scales rows:
``grad_hidden = (g / s) (e @ weight)``, ``grad_weight = e.T @ ((g / s) hidden)``; the labels' own terms are added
separately. The offset is the label's logit: it is known before the product, and keeps confident tokens exact, as
``logp = -log1p(sum of the other columns' e)``. If a label is so unlikely that e could overflow, the kernels run again
with the log-sum-exp as offset; the device decides that, without a synchronization.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.label_rows import logits_of_columns
from liger_losses.chunked.accelerators.tiles import (
    Tiles,
    project_tile,
    split_tile,
    store_tile,
    tile_position,
    tiles_of,
    with_contiguous_rows,
)
from liger_losses.chunked.core.plan import Signature, padded
from liger_losses.chunked.core.target import Target
from liger_losses.chunked.core.weights import ALL, Dense, Quantized
from liger_losses.kernels._triton import jit, power_of_two, tl
from liger_losses.kernels.logit_transform import Epilogue, capped_tanh, inverse_temperature, transform_block
from liger_losses.kernels.online_softmax import Sums, log1p, online_start, online_step

#: Tokens of one launch without exponentials, which bounds the memory of the tiles' sums: 16 MiB for 131072 columns,
#: each of log-sum-exp, mean logit and entropy, and 32 MiB of the maxima.
_MAX_TOKENS = 8192
#: Row tiles that walk the vocabulary together, so that the cache serves each part of the head to all of them.
_GROUP = 8
#: Rows of a program that adds up the tiles' sums.
_ROWS = 32
#: Row tiles that walk the vocabulary together where rows are computed again, and tokens of a program that merges their
#: splits.
_HARD_GROUP, _MERGED = 16, 64
#: Larger sums of e are computed again: e reaches 1e26 if p_label is below 1e-26, and fp32 and bf16 end at 3e38.
LARGEST_SUM = 1e26
#: Arguments whose alignment is no reason to compile again: slices of vectors begin anywhere.
_VECTORS = ["maxima", "labels", "label_logit", "offset", "lse", "logp", "mean_logit", "entropy", "argmax", "flags"]


class Exponentials(NamedTuple):
    """The offset of ``e = exp(z - offset)``, the log-sum-exp and the label's log-probability, and the mean logit, the
    entropy and the first column of the largest logit (or ``None``): ``[N]`` each, fp32 but the last, which is int64.
    Without exponentials, the offset and ``logp`` may be ``None`` too."""

    offset: Tensor | None
    lse: Tensor
    logp: Tensor | None
    mean_logit: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None


# --- What kernels over a whole head are given: its matrix, and memory of statistics ----------------------------------


def matrix_of(part: Target) -> Tensor:
    """The head's rows in the operands' dtype: a copy only of a matrix whose rows are not contiguous."""
    assert isinstance(part.head.weights, Dense)
    return with_contiguous_rows(part.head.weights.rows(ALL))


def labels_of(part: Target) -> tuple[Tensor, Tensor | None]:
    """The labels' rows of the matrix, and which of them are this rank's (``None`` for all): any row for another's."""
    places, here = part.head.ranks.local(part.labels)
    return places.contiguous(), here


def epilogue_of(part: Target) -> Epilogue:
    """From projections to logits."""
    weight = part.class_weight
    weight = None if weight is None else weight.detach().float().contiguous()
    return Epilogue(part.transform(part.temperature), part.head.local_bias(ALL), weight)


def empty_values(names: set[str], part: Target) -> dict[str, Tensor]:
    """Memory ``[R]`` of what :func:`linear_exponentials` writes, by name."""
    wanted = [name for name in Exponentials._fields[:-1] if name in names]
    memory = torch.empty(len(wanted), len(part.hidden), dtype=torch.float32, device=part.hidden.device)
    values = dict(zip(wanted, memory.unbind(), strict=True))
    return values | ({"argmax": torch.empty_like(part.labels)} if "argmax" in names else {})


def exponentials_of(values: dict[str, Tensor]) -> Exponentials:
    return Exponentials._make(map(values.get, Exponentials._fields))


def bytes_of_sums(call: Signature) -> int:
    """Of a token: what kernels write of each tile of 128 columns (Hopper's are wider), a number for each sum in fp32,
    and two maxima."""
    names = call.statistics | call.metrics
    numbers = 1 + len(names & {"mean_logit", "entropy"}) + 2 * (call.largest > 0 or "argmax" in names)
    return padded(call.columns) // 32 * numbers


def has_matrix(call: Signature) -> bool:
    """Whether kernels may read the head as one matrix; their sums depend on the number of tokens."""
    return call.weights in ((Dense,), (Quantized,)) and call.backend == "triton" and not call.batch_invariant


# --- The product ------------------------------------------------------------------------------------------------------


def linear_exponentials(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    values: Exponentials,
    epilogue: Epilogue = Epilogue(),
    out: Tensor | None = None,
    k: int = 0,
) -> Tensor | None:
    """``out_nv = exp(z_nv - offset_n) dz_nv``, and 0 at the label, for the logits ``z = epilogue(hidden @ weight.T)``.

    ``dz`` is the soft-cap's derivative at this logit, 1 without one.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, rows contiguous, of the same half-precision dtype.
        labels: ``[N]`` int64 in ``[0, V)``.
        values: the tensors to write statistics into. ``argmax`` may be the column of a logit that is smaller than the
            largest by up to 2e-5.
        epilogue: from projections to logits.
        out: ``[N, V]``, rows contiguous; without it only the statistics are computed.
        k: how many columns of the largest logits to return, of a linear epilogue.

    Returns:
        The columns ``[N, k]`` of the largest ``out``, the label's among them; ``None`` for ``k = 0``.
    """
    tokens, columns, hidden = hidden.shape[0], weight.shape[0], with_contiguous_rows(hidden)
    if out is None and tokens > _MAX_TOKENS:
        for start in range(0, tokens, _MAX_TOKENS):
            rows = slice(start, start + _MAX_TOKENS)
            part = Exponentials._make(None if value is None else value[rows] for value in values)
            linear_exponentials(hidden[rows], weight, labels[rows], part, epilogue.rows(rows))
        return None
    if not tokens:
        return labels.new_empty(0, k) if k else None
    label_logit = logits_of_columns(hidden, weight, labels, epilogue)
    row_tiles, column_tiles, programs, arguments = tiles_of(hidden, weight, epilogue, out)
    same = Tiles(
        row_tiles, column_tiles, programs, {n: v for n, v in arguments.items() if n not in ("out", "out_stride")}
    )
    partial = torch.empty(column_tiles, tokens, dtype=torch.float32, device=hidden.device)
    logit_sums = None if values.mean_logit is None else torch.empty_like(partial)
    moments = None if values.entropy is None else torch.empty_like(partial)
    largest = k or values.argmax is not None
    maxima = torch.empty(2 * column_tiles, tokens, dtype=torch.int32, device=hidden.device) if largest else None
    arguments |= {"labels": labels, "partial": partial, "logit_sums": logit_sums, "moments": moments, "maxima": maxima}
    arguments["group"] = _GROUP
    width = arguments["BLOCK_V"] // 2
    product = _exponentials_kernel[(min(programs, row_tiles * column_tiles),)]
    product(**arguments, offset=label_logit, needed=None)
    flags = hidden.new_zeros(1 + tokens, dtype=torch.int32)  # allocated once the product is queued
    _row_exponentials_kernel[(-(-tokens // _ROWS),)](
        partial, logit_sums, moments, maxima, labels, label_logit, *values, flags,
        column_tiles, tokens, columns, LARGEST_SUM, width, BLOCK=_ROWS, TILES=32,
    )  # fmt: skip
    # These kernels return at once unless the device has flagged a row: without a synchronization, and in no time.
    compute_hard_rows(values, label_logit, flags, same)
    if out is not None:
        product(**arguments, offset=values.offset, needed=flags)
    if out is None or not k:
        return None
    top, most = labels.new_empty(tokens, k), power_of_two(k)
    _largest_kernel[(tokens,)](
        top, out, out.stride(0), maxima, labels, *values[:3], tokens, columns, 2 * column_tiles, k,
        TILES=power_of_two(2 * column_tiles), WIDTH=width, MOST=most, num_warps=min(max(most * width // 1024, 4), 16),
    )  # fmt: skip
    return top


@jit
def _key(value, place):
    """An integer that is the larger, the larger a value not below 0 is, rounded to bf16; of the same, the first's."""
    return value.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True) | (65535 - place)


@jit
def _places(keys, k, MOST: tl.constexpr):
    """The places of the k largest keys; -1 where no key is left."""
    places = tl.full((MOST,), -1, tl.int32)
    for i in range(k):
        best = tl.max(keys)
        places = tl.where((tl.arange(0, MOST) == i) & (best >= 0), 65535 - (best & 65535), places)
        keys = tl.where(keys == best, -1, keys)
    return places


@jit(
    do_not_specialize=["tokens", "columns", "tiles"],
    do_not_specialize_on_alignment=["maxima", "labels", "offset", "lse", "logp"],
)
def _largest_kernel(
    largest, e, stride, maxima, labels, offset, lse, logp, tokens, columns, tiles, k,
    TILES: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One program per token: its k largest exponentials are in the k half tiles whose maxima are the largest."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row).to(tl.int32)
    of_label = tl.exp(tl.load(logp + row) + tl.load(lse + row) - tl.load(offset + row))
    tile = tl.arange(0, TILES)
    most = (tl.load(maxima + tile * tokens + row, mask=tile < tiles, other=0) & -128).to(tl.float32, bitcast=True)
    most = tl.where(tile == label // WIDTH, tl.maximum(most, of_label), most)
    tile = _places(tl.where(tile < tiles, _key(most, tile), -1), k, MOST)
    column = tl.where(tile < 0, columns, tile * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    value = tl.load(e + row * stride + column, mask=column < columns, other=0.0).to(tl.float32)
    value = tl.where(column == label, of_label, value)
    place = tl.arange(0, MOST)
    at = place[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = tl.maximum(_places(tl.where(column < columns, _key(value, at), -1), k, MOST), 0)
    first = tl.sum(tl.where(at[:, None] // WIDTH == place[None, :], tile[None, :] * WIDTH, 0), 1)
    tl.store(largest + row * k + place, first + at % WIDTH, mask=place < k)


@jit(
    do_not_specialize=["column_tiles", "tokens", "columns"],
    do_not_specialize_on_alignment=_VECTORS,
)
def _row_exponentials_kernel(
    partial, logit_sums, moments, maxima, labels, label_logit, offset, lse, logp, mean_logit, entropy, argmax, flags,
    column_tiles, tokens, columns, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp and log-probability from the tiles' sums over all columns but the label's; the mean of all logits;
    the entropy, ``log sum(e) - sum(e (z - offset)) / sum(e)``, with the same rounding errors as ``logp``; the column of
    the largest logit from the ``maxima`` of half tiles of ``WIDTH`` columns, as :func:`_exponentials_kernel` has them.

    Rows whose sum is larger than the ``limit`` are flagged: ``flags`` are as :func:`compute_hard_rows` takes them.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tokens
    rest = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, column_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        mask = (tile < column_tiles)[:, None] & inside[None, :]
        at = tile[:, None] * tokens + rows[None, :]
        rest += tl.sum(tl.load(partial + at, mask=mask, other=0.0), 0)
        if logit_sums is not None:
            total += tl.sum(tl.load(logit_sums + at, mask=mask, other=0.0), 0)
        if moments is not None:
            moment += tl.sum(tl.load(moments + at, mask=mask, other=0.0), 0)
    z = tl.load(label_logit + rows, mask=inside, other=0.0)
    too_large = inside & ((rest <= limit) == 0)  # NaN is too large
    tl.store(flags + 1 + rows, too_large.to(tl.int32), mask=inside)
    if tl.max(too_large.to(tl.int32), 0) > 0:
        tl.store(flags, 1)
    log_total = log1p(rest)
    if offset is not None:
        tl.store(offset + rows, z, mask=inside)
    tl.store(lse + rows, z + log_total, mask=inside)
    if logp is not None:
        tl.store(logp + rows, -log_total, mask=inside)
    if mean_logit is not None:
        tl.store(mean_logit + rows, total / columns, mask=inside)
    if entropy is not None:
        nats = log_total - moment * 0.6931471805599453 / (1.0 + rest)
        tl.store(entropy + rows, tl.where(nats < 0, 0.0, nats), mask=inside)  # NaN stays
    if argmax is not None:
        top = tl.full((BLOCK,), 0x3F800000 >> 7, tl.int32)  # the label's exponential is 1
        best = tl.load(labels + rows, mask=inside, other=0).to(tl.int32)
        for start in range(0, 2 * column_tiles, TILES):
            tile = start + tl.arange(0, TILES)
            mask = (tile < 2 * column_tiles)[:, None] & inside[None, :]
            key = tl.load(maxima + tile[:, None] * tokens + rows[None, :], mask=mask, other=0)
            value = tl.max(key >> 7, 0)
            column = tile[:, None] * WIDTH + (127 - (key & 127))
            column = tl.min(tl.where(key >> 7 == value[None, :], column, columns), 0)
            best = tl.where(value == top, tl.minimum(best, column), tl.where(value > top, column, best))
            top = tl.maximum(top, value)
        tl.store(argmax + rows, best.to(tl.int64), mask=inside)


@jit(
    do_not_specialize=["tokens", "group"],
    do_not_specialize_on_alignment=["labels", "offset", "partial", "logit_sums", "moments", "maxima", "needed"],
)
def _exponentials_kernel(
    hidden, weight, hidden_stride, weight_stride, tokens, vocab_size, hidden_size,
    bias, labels, offset, partial, logit_sums, moments, maxima, needed, group, transform,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    out=None, out_stride=None,
):  # fmt: skip
    """Persistent programs: each takes every ``programs``-th tile, and groups of row tiles walk the vocabulary one after
    the other.

    ``partial``, ``logit_sums`` and ``moments`` are ``[column tiles, tokens]``: each tile writes the sums of its rows,
    so that their bits depend neither on the program that took it nor on the other rows. Exponentials are taken and
    stored in two halves of a tile, whose ``maxima`` are ``[2 column tiles, tokens]``: the bits of the largest e, of
    which the last 7 are 127 minus its place. With x the exponent of 2 in e, moments are the sums of e x.
    """
    tl.static_assert(BLOCK_V <= 256, "maxima have 7 bits for a place in half a tile")
    row_tiles = tl.cdiv(tokens, BLOCK_N)
    column_tiles = tl.cdiv(vocab_size, BLOCK_V)
    tiles = row_tiles * column_tiles
    if needed is not None:
        tiles = tiles * tl.load(needed)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, group)
        first_row = row_tile * BLOCK_N
        first_column = column_tile * BLOCK_V
        z = project_tile(
            hidden, weight, hidden_stride, weight_stride, first_row, first_column, tokens, vocab_size, hidden_size,
            BLOCK_N, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        rows = first_row + tl.arange(0, BLOCK_N)
        row_offset = tl.load(offset + rows, mask=rows < tokens, other=0.0) * 1.4426950408889634
        label = tl.load(labels + rows, mask=rows < tokens, other=-1).to(tl.int32)
        inverse = inverse_temperature(transform, rows, rows < tokens, 1)
        sums = tl.zeros((BLOCK_N,), tl.float32)
        totals = tl.zeros((BLOCK_N,), tl.float32)
        moment = tl.zeros((BLOCK_N,), tl.float32)
        left, right = split_tile(z, BLOCK_N, BLOCK_V)
        for half in tl.static_range(2):
            start = first_column + half * (BLOCK_V // 2)
            columns = start + tl.arange(0, BLOCK_V // 2)
            x = left if half == 0 else right
            z = x
            if bias is not None or transform.factor is not None:
                z = transform_block(x, bias, columns, columns < vocab_size, transform, inverse)
            if logit_sums is not None:
                totals += tl.sum(z, 1)  # beyond the vocabulary they are 0
            if column_tile == column_tiles - 1:  # nowhere else are columns beyond the vocabulary
                z = tl.where((columns < vocab_size)[None, :], z, float("-inf"))
            exponent = z * 1.4426950408889634 - row_offset[:, None]
            e = tl.exp2(exponent)
            # Columns counted in the half tile are constants: in fewer registers and instructions than `columns`.
            e = tl.where(tl.arange(0, BLOCK_V // 2)[None, :] != (label - start)[:, None], e, 0.0)
            sums += tl.sum(e, 1)
            if maxima is not None:
                key = (e.to(tl.int32, bitcast=True) & -128) | (127 - tl.arange(0, BLOCK_V // 2))[None, :]
                tl.store(maxima + (2 * column_tile + half) * tokens + rows, tl.max(key, 1), mask=rows < tokens)
            if moments is not None:
                moment += tl.sum(e * tl.maximum(exponent, -200.0), 1)  # not 0 * -inf
            if transform.cap is not None:
                tanh = capped_tanh(z, transform, inverse)
                e *= tl.where(z > float("-inf"), 1 - tanh * tanh, 0.0)
            if out is not None:
                store_tile(out, out_stride, e, rows, columns, first_row, start, tokens, vocab_size)
        at = column_tile * tokens + rows
        tl.store(partial + at, sums, mask=rows < tokens)
        if logit_sums is not None:
            tl.store(logit_sums + at, totals, mask=rows < tokens)
        if moments is not None:
            tl.store(moments + at, moment, mask=rows < tokens)


# --- Rows whose exponentials overflow: their statistics, taken again from logits that never leave the registers -------
# The device decides whether there are any: without, both kernels return at once. S splits of the vocabulary.


def compute_hard_rows(values: Exponentials, label_logit: Tensor, flags: Tensor, tiles: Tiles) -> None:
    """Compute the statistics of the rows n with ``flags[1 + n] != 0``, from fp32 sums relative to the largest logit.

    Args:
        values: the tensors to write them into, but the mean logit; ``offset`` gets a finite log-sum-exp.
        label_logit: ``[N]``, the labels' logits.
        flags: ``[1 + N]`` int32; ``flags[0]`` is 0 if there are no such rows.
        tiles: the tiles of the product whose logits these are.
    """
    sums = Sums(moment=None if values.entropy is None else 1, argmax=None if values.argmax is None else 1)
    row_tiles, column_tiles, programs, arguments = tiles
    group, tokens = max(1, min(row_tiles, _HARD_GROUP)), len(label_logit)
    splits = max(1, min(programs // group, column_tiles))
    partial = torch.empty(4 if any(sums) else 2, splits, tokens, dtype=torch.float32, device=flags.device)
    _hard_rows_kernel[(row_tiles * splits,)](
        **arguments, partial=partial, needed=flags, splits=splits, group=group, sums=sums
    )
    _merge_kernel[(-(-tokens // _MERGED),)](
        partial, label_logit, flags, values.offset, values.lse, values.logp, values.entropy, values.argmax,
        splits, tokens, BLOCK=_MERGED,
    )  # fmt: skip


@jit(do_not_specialize=["tokens", "splits", "group"], do_not_specialize_on_alignment=["partial", "needed"])
def _hard_rows_kernel(
    hidden, weight, hidden_stride, weight_stride, tokens, vocab_size, hidden_size,
    bias, partial, needed, splits, group, transform, sums,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per tile of tokens and split: it walks the split's columns with the softmax's sums in registers."""
    if tl.load(needed) == 0:
        return
    row_tile, split = tile_position(tl.program_id(0), tl.cdiv(tokens, BLOCK_N), splits, group)
    first_row = row_tile * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    valid = rows < tokens
    inverse = inverse_temperature(transform, rows, valid, 1)
    column_tiles = tl.cdiv(vocab_size, BLOCK_V)
    per_split = tl.cdiv(column_tiles, splits)
    first_tile = split * per_split
    last_tile = tl.minimum(first_tile + per_split, column_tiles)
    state = online_start(tl.zeros((BLOCK_N,), tl.float32))
    for tile in tl.range(first_tile, last_tile, flatten=True):
        first_column = tile * BLOCK_V
        columns = first_column + tl.arange(0, BLOCK_V)
        z = project_tile(
            hidden, weight, hidden_stride, weight_stride, first_row, first_column, tokens, vocab_size, hidden_size,
            BLOCK_N, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        inside = columns < vocab_size
        if bias is not None or transform.factor is not None:
            z = transform_block(z, bias, columns, inside, transform, inverse)
        state = online_step(z, first_column, columns, inside, None, state, sums, 1)
    best, _, moment, _, top, total, _, _ = state
    at = partial + split * tokens + rows
    step = splits.to(tl.int64) * tokens
    tl.store(at, top, mask=valid)
    tl.store(at + step, total, mask=valid)
    if sums.moment is not None:
        tl.store(at + 2 * step, moment, mask=valid)
    if sums.argmax is not None:
        tl.store(at + 3 * step, best.to(tl.float32), mask=valid)


@jit(do_not_specialize=["splits", "tokens"], do_not_specialize_on_alignment=["partial", *_VECTORS])
def _merge_kernel(
    partial, label_logit, flags, offset, lse, logp, entropy, argmax, splits, tokens, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of tokens; the order of the sums depends on the number of splits alone."""
    if tl.load(flags) == 0:
        return
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < tokens) & (tl.load(flags + 1 + rows, mask=rows < tokens, other=0) != 0)
    step = splits.to(tl.int64) * tokens
    zero = tl.zeros((BLOCK,), tl.float32)
    best, _, moment, _, top, total, _, _ = online_start(zero)
    for split in range(splits):
        at = partial + split * tokens + rows
        part_top = tl.load(at, mask=mask, other=-3.0e38)
        part_total = tl.load(at + step, mask=mask, other=0.0)
        new_top = tl.maximum(top, part_top)
        rescale = tl.exp(top - new_top)
        scale = tl.exp(part_top - new_top)
        if entropy is not None:
            part_moment = tl.load(at + 2 * step, mask=mask, other=0.0) + part_total * (part_top - new_top)
            moment = rescale * (moment + total * (top - new_top)) + scale * part_moment
        if argmax is not None:
            best = tl.where(part_top > top, tl.load(at + 3 * step, mask=mask, other=0.0).to(tl.int32), best)
        total = total * rescale + part_total * scale
        top = new_top
    log_total = tl.log(total)
    row_lse = top + log_total
    tl.store(lse + rows, row_lse, mask=mask)
    if logp is not None:
        z = tl.load(label_logit + rows, mask=mask, other=0.0)
        tl.store(logp + rows, (z - top) - log_total, mask=mask)
    if entropy is not None:
        tl.store(entropy + rows, log_total - moment / total, mask=mask)
    if argmax is not None:
        tl.store(argmax + rows, best.to(tl.int64), mask=mask)
    if offset is not None:  # finite, also in base 2, where all logits are -inf
        tl.store(offset + rows, tl.where(row_lse == float("-inf"), -1.0e38, row_lse), mask=mask)
