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

from liger_losses.chunked.accelerators.hard_rows import compute_hard_rows
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
from liger_losses.kernels._triton import jit, power_of_two, tl
from liger_losses.kernels.logit_transform import Epilogue, capped_tanh, inverse_temperature, transform_block
from liger_losses.kernels.online_softmax import log1p

#: Tokens of one launch without exponentials, which bounds the memory of the tiles' sums: 16 MiB for 131072 columns,
#: each of log-sum-exp, mean logit and entropy, and 32 MiB of the maxima.
_MAX_TOKENS = 8192
#: Row tiles that walk the vocabulary together, so that the cache serves each part of the head to all of them.
_GROUP = 8
#: Rows of a program that adds up the tiles' sums.
_ROWS = 32
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
