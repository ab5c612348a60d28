"""The k largest entries of each row, and what the others add up to. R rows, C columns.

The k largest are all in the k groups of columns whose maxima are largest, and the least of these maxima is a bound that
at least k entries reach. One pass over the rows finds the maxima of groups; another reads the k groups of each row, and
keeps the entries that reach the bound. There are hardly more of them than k, and they are put in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, jit, tl, triton
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, load_logits
from liger_losses.kernels.row_lse import sums_of_groups
from liger_losses.kernels.softmax_stats import row_slices

#: Columns of a group.
COLUMNS, GROUP = 128, 64
#: How many logits are computed at a time, where no kernel chooses.
_SORTED = 2**21
#: The largest k that kernels serve; how many entries of a row they keep for each of the k (rounded up to a power of
#: two), and how many at least.
_MOST, _KEPT, _FEW = 1024, 4, 256
#: Entries that a program reads at a time, and how many of those that it keeps are compared with as many at a time.
_READ, _COMPARED = 1024, 16
#: By which share of itself the bound is lowered, because maxima may come rounded: the kernel that takes them together
#: with log-sum-exps multiplies by log2(e) and by its inverse.
_ROUNDING = 1e-6


class Found(NamedTuple):
    """The k largest of each row and their columns; ``[R]``, the log-probability of all others where tiles told it."""

    values: Tensor
    ids: Tensor
    rest: Tensor | None = None


def largest(
    projected: Tensor,
    epilogue: Epilogue,
    k: int,
    backend: str | None = None,
    *,
    tiles: Tensor | None = None,
    lse: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    rest: bool = False,
) -> Found:
    """The k largest logits of each row, in descending order, and their columns, ``[R, k]`` each.

    Args:
        projected: ``[R, C]`` fp32 or fp64, rows contiguous.
        epilogue: from projections to logits.
        k: at most C.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.
        tiles: what :func:`~liger_losses.kernels.row_lse.log_sum_exps_into` returned; read where the kernels choose
            among groups of as many columns.
        lse: ``[R]``, the log-sum-exps: log-probabilities are returned.
        out: the tensors to write into, rows contiguous; columns are int64.
        rest: with ``lse``, also return the log-probability of all other columns, where the tiles are read.
    """
    rows, columns = projected.shape
    most = columns // (4 * k) if 0 < k <= _MOST else 0  # otherwise, most groups would be kept
    group = next((group for group in (COLUMNS, GROUP) if group <= most), 0)
    if group and choose_backend(backend, [projected], dtypes=LOGIT_DTYPES) == "triton":
        if tiles is None or group != COLUMNS:
            group, tiles = GROUP, sums_of_groups(projected, epilogue, GROUP, maxima_alone=True, backend="triton")
        told = rest and lse is not None and len(tiles) > 1
        if out is None:
            shape = rows, k
            out = projected.new_empty(shape, dtype=torch.float32), projected.new_empty(shape, dtype=torch.int64)
        found = Found(*out, projected.new_empty(rows, dtype=torch.float32) if told else None)
        if rows:
            _largest_triton(found, projected, epilogue, k, tiles, group, lse)
        return found
    size, every = max(1, _SORTED // max(columns, 1)), list[tuple[Tensor, Tensor]]()
    for start in range(0, max(rows, 1), size):
        at = slice(start, start + size)
        every.append(epilogue.rows(at)(projected[at]).topk(k, -1))
    values, ids = (torch.cat(parts) for parts in zip(*every, strict=True))
    values = values if lse is None else values - lse[:, None]
    return Found(values, ids) if out is None else Found(out[0].copy_(values), out[1].copy_(ids))


def _largest_triton(
    found: Found, projected: Tensor, epilogue: Epilogue, k: int, tiles: Tensor, group: int, lse: Tensor | None
) -> None:
    """:func:`largest`, from the maxima of groups and maybe their sums, ``[1 or 2, C / group, R]``."""
    (rows, columns), width = projected.shape, triton.next_power_of_2(k)
    kept = min(max(_KEPT * width, _FEW), group * width)
    groups = projected.new_empty(rows, k, dtype=torch.int32)
    bounds = projected.new_empty(rows, dtype=torch.float32)
    maxima, *sums = tiles
    values, ids, rest = found
    _largest_groups_kernel[(rows,)](
        groups, bounds, rest, maxima, None if rest is None else sums[0], lse, *maxima.stride(), len(maxima), k,
        _ROUNDING, BLOCK=triton.next_power_of_2(len(maxima)), num_warps=2 if len(maxima) <= 1024 else 4,
    )  # fmt: skip
    scratch = projected.new_empty(2, rows, kept, dtype=torch.int32)
    _largest_of_groups_kernel[(rows,)](
        values, ids, rest, *scratch, projected, projected.stride(0), epilogue.bias, epilogue.transform.for_kernel, lse,
        groups, bounds, columns, k, values.stride(0), ids.stride(0),
        GROUP=group, GROUPS=min(_READ // group, width), KEPT=kept, PIECE=_COMPARED, num_warps=1,
    )  # fmt: skip


def sum_of_probabilities(
    projected: Tensor, lse: Tensor, epilogue: Epilogue, *, scratch: int, backend: str | None = None
) -> Tensor:
    """``sum_v exp(z_v - lse)`` over the columns of each row whose projection is not -inf, ``[R]``.

    Args:
        projected, epilogue, backend: as in :func:`largest`.
        lse: ``[R]``.
        scratch: bytes that temporaries may take.
    """
    backend, found = choose_backend(backend, [projected], dtypes=LOGIT_DTYPES), [projected.new_empty(0)]
    for at in row_slices(projected, None if backend == "triton" else scratch):
        rows, of_rows = projected[at], epilogue.rows(at)
        tops, sums = sums_of_groups(rows, of_rows, without_absent=True, backend=backend)
        found.append((sums * (tops - lse[at]).exp()).sum(0))
    return torch.cat(found)


@jit
def _ordered(x, inside):
    """Integers in the order of fp32 numbers, NaN above all of them, as in torch; the smallest outside."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return tl.where(inside, bits, -0x80000000).to(tl.int32)


@jit(
    do_not_specialize=["row_stride", "group_stride", "groups", "k"],
    do_not_specialize_on_alignment=["rest", "maxima", "sums", "lse"],
)
def _largest_groups_kernel(
    out, bounds, rest, maxima, sums, lse, group_stride, row_stride, groups, k,
    rounding: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row: the k groups of the largest maxima, in their order, the least of these maxima, and the
    probability of all other groups.

    The k-th largest is found bit by bit, from the highest, until exactly k are as large. Of equal ones, the first ones
    are taken.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < groups
    top = tl.load(maxima + row * row_stride + at * group_stride, mask=inside, other=0.0)
    key = _ordered(top, inside)
    count = tl.sum((key >= 0).to(tl.int32), 0)
    threshold = tl.where(count >= k, 0, -0x80000000).to(tl.int32)
    count = tl.where(count >= k, count, BLOCK)
    bit = 0x40000000
    while (bit > 0) & (count != k):
        higher = threshold + bit
        found = tl.sum((key >= higher).to(tl.int32), 0)
        threshold = tl.where(found >= k, higher, threshold)
        count = tl.where(found >= k, found, count)
        bit = bit // 2
    above = key > threshold
    equal = (key == threshold).to(tl.int32)
    taken = inside & (above | ((equal > 0) & (tl.cumsum(equal, 0) <= k - tl.sum(above.to(tl.int32), 0))))
    tl.store(out + row * k + tl.cumsum(taken.to(tl.int32), 0) - 1, at, mask=taken)
    bound = tl.min(tl.where(taken, top, float("inf")), 0)
    tl.store(bounds + row, bound - tl.abs(bound) * rounding)
    if rest is not None:
        total = tl.load(sums + row * row_stride + at * group_stride, mask=inside, other=0.0)
        others = tl.where(inside & (taken == 0), total * tl.exp(top - tl.load(lse + row)), 0.0)
        tl.store(rest + row, tl.sum(others, 0))


@jit
def _number(key):
    """The fp32 number of an integer of :func:`_ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _entries(row, first, k, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Logits of some of the groups that a row has chosen, ``[GROUPS, GROUP]``, their columns, and which exist."""
    projected, bias, transform, inverse, chosen, columns = row
    slot = first + tl.arange(0, GROUPS)
    group = tl.load(chosen + slot, mask=slot < k, other=0)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (slot < k)[:, None] & (at < columns)
    return load_logits(projected, bias, at, inside, transform, inverse), at, inside


@jit
def _keep_reaching(
    keys, ids, row, bound, row_lse, k,
    REST: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Write the entries that reach a bound, in any order, as long as there is room; return their number, and with
    ``REST`` the probability of the others.

    The largest of each group first: hardly any group has another one.
    """
    count = 0
    others = 0.0
    for first in range(0, k, GROUPS):
        z, at, inside = _entries(row, first, k, GROUP, GROUPS)
        key = _ordered(z, inside)
        if REST:
            others += tl.sum(tl.sum(tl.where(inside & (key < bound), tl.exp(z - row_lse), 0.0), 1), 0)
        key = tl.where(key >= bound, key, -0x80000000)
        top = tl.max(key, 1)
        while (tl.max(top, 0) > -0x80000000) & (count <= KEPT):
            column = tl.min(tl.where(key == top[:, None], at, 0x7FFFFFFF), 1)
            there = top > -0x80000000
            place = count + tl.cumsum(there.to(tl.int32), 0) - 1
            tl.store(keys + place, top, mask=there & (place < KEPT))
            tl.store(ids + place, column, mask=there & (place < KEPT))
            count += tl.sum(there.to(tl.int32), 0)
            key = tl.where(at == column[:, None], -0x80000000, key)
            top = tl.max(key, 1)
    return count, others


@jit
def _keep_largest(keys, ids, row, threshold, row_lse, k, REST: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Write the entries above a threshold, fewer than k, and the first k that equal it; return as above."""
    above = 0
    equal = 0
    others = 0.0
    for first in range(0, k, GROUPS):
        z, at, inside = _entries(row, first, k, GROUP, GROUPS)
        key = _ordered(z, inside)
        # Both numbers in one: of those above in the lower half, of equal ones in the upper half.
        both = (key > threshold).to(tl.int32) + ((key == threshold).to(tl.int32) << 16)
        of_group = tl.sum(both, 1)
        before = (tl.cumsum(of_group, 0) - of_group)[:, None] + tl.cumsum(both, 1)
        equals = equal + (before >> 16)
        taken = (key > threshold) | ((key == threshold) & (equals <= k))
        place = above + (before & 0xFFFF) + tl.minimum(equals, k) - 1
        tl.store(keys + place, key, mask=taken)
        tl.store(ids + place, at, mask=taken)
        every = tl.sum(of_group, 0)
        above += every & 0xFFFF
        equal += every >> 16
        if REST:
            others += tl.sum(tl.sum(tl.where(inside & (taken == 0), tl.exp(z - row_lse), 0.0), 1), 0)
    return above + tl.minimum(equal, k), others


@jit
def _reaching(row, threshold, k, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """How many entries reach a threshold."""
    count = 0
    for first in range(0, k, GROUPS):
        z, _, inside = _entries(row, first, k, GROUP, GROUPS)
        count += tl.sum(tl.sum((_ordered(z, inside) >= threshold).to(tl.int32), 1), 0)
    return count


@jit(
    do_not_specialize=["k"],
    do_not_specialize_on_alignment=["values", "ids", "rest", "lse", "values_stride", "ids_stride"],
)
def _largest_of_groups_kernel(
    values, ids, rest, kept_keys, kept_ids, projected, stride, bias, transform, lse, chosen, bounds, columns, k,
    values_stride, ids_stride,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One program for each row, of one warp.

    Where the entries that reach the bound are more than ``KEPT``, or, as the bound is rounded, fewer than k, the k-th
    largest is found bit by bit.
    """
    at_row = tl.program_id(0).to(tl.int64)
    inverse = inverse_temperature(transform, at_row, True, 0)
    row = (projected + at_row * stride, bias, transform, inverse, chosen + at_row * k, columns)
    kept_keys += at_row * KEPT
    kept_ids += at_row * KEPT
    row_lse = 0.0
    if lse is not None:
        row_lse = tl.load(lse + at_row)
    outside = 0.0
    if rest is not None:
        outside = tl.load(rest + at_row)
    bound = _ordered(tl.load(bounds + at_row), True)
    SLOW: tl.constexpr = 2  # groups at a time, so that the usual way needs no registers for the other
    count, others = _keep_reaching(kept_keys, kept_ids, row, bound, row_lse, k, rest is not None, GROUP, GROUPS, KEPT)
    if (count < k) | (count > KEPT):
        threshold = tl.where(_reaching(row, 0, k, GROUP, SLOW) >= k, 0, -0x80000000).to(tl.int32)
        bit = 0x40000000
        while bit > 0:
            higher = threshold + bit
            threshold = tl.where(_reaching(row, higher, k, GROUP, SLOW) >= k, higher, threshold)
            bit = bit // 2
        tl.debug_barrier()  # what was kept is overwritten
        count, others = _keep_largest(kept_keys, kept_ids, row, threshold, row_lse, k, rest is not None, GROUP, SLOW)
    tl.debug_barrier()  # all of it is in memory
    for first in range(0, count, PIECE):
        slot = first + tl.arange(0, PIECE)
        inside = slot < count
        key = tl.load(kept_keys + slot, mask=inside, other=0)
        at = tl.load(kept_ids + slot, mask=inside, other=0)
        preceding = tl.zeros((PIECE, PIECE), tl.int32)
        for start in range(0, count, PIECE):
            other = start + tl.arange(0, PIECE)
            keys = tl.load(kept_keys + other, mask=other < count, other=-0x80000000)[None, :]
            before = tl.load(kept_ids + other, mask=other < count, other=0)[None, :] < at[:, None]
            preceding += ((keys > key[:, None]) | ((keys == key[:, None]) & before)).to(tl.int32)
        place = tl.sum(preceding, 1)
        z = _number(key) - row_lse
        if rest is not None:
            others += tl.sum(tl.where(inside & (place >= k), tl.exp(z), 0.0), 0)
        inside = inside & (place < k)
        tl.store(values + at_row * values_stride + place, z, mask=inside)
        tl.store(ids + at_row * ids_stride + place, at.to(tl.int64), mask=inside)
    if rest is not None:
        tl.store(rest + at_row, tl.log(outside + others))
