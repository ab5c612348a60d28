"""The k largest entries of each row, and what the others add up to. R rows, C columns.

The k largest are all in the k groups of columns whose maxima are largest: one pass over the rows finds the maxima of
groups, and choosing is left to R x (C / 64) maxima and R x 64 k entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, jit, tl, triton
from liger_losses.kernels.hopper_pipeline import COLUMNS
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, load_logits, transform_block

#: Columns of a group, and groups that a program reads at a time.
GROUP = 64
_GROUPS = 32
#: How many entries are gathered and sorted at a time, and among how many entries of a row one program chooses.
_SORTED = 2**21
_MOST = 2**13


def group_maxima(projected: Tensor, epilogue: Epilogue, backend: str | None = None) -> Tensor:
    """The largest logit of each group of :data:`GROUP` columns, ``[R, ceil(C / 64)]``.

    Args:
        projected: ``[R, C]`` fp32 or fp64, rows contiguous.
        epilogue: from projections to logits.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.
    """
    rows, columns = projected.shape
    groups = -(-columns // GROUP)
    if choose_backend(backend, [projected], dtypes=LOGIT_DTYPES) == "triton":
        out = torch.empty(rows, groups, dtype=torch.float32, device=projected.device)
        if rows:
            grid = (rows, triton.cdiv(groups, _GROUPS))
            transform = epilogue.transform.for_kernel
            _group_maxima_kernel[grid](
                out, projected, projected.stride(0), epilogue.bias, transform, columns, groups, GROUP, _GROUPS
            )
        return out
    logits = epilogue(projected)
    padded = torch.nn.functional.pad(logits, (0, groups * GROUP - columns), value=-torch.inf)
    return padded.view(rows, groups, GROUP).amax(-1)


def largest(
    projected: Tensor, epilogue: Epilogue, k: int, backend: str | None = None, *, maxima: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row, in descending order, and their columns, ``[R, k]`` each.

    Args:
        projected, epilogue, backend: as in :func:`group_maxima`.
        k: at most C.
        maxima: what :func:`~liger_losses.kernels.linear_lse.log_sum_exps_into` returned; read only where the group of
            :func:`group_of_kernels` has as many columns.
    """
    rows, columns = projected.shape
    group = group_of_kernels(k, columns)
    if group and rows and choose_backend(backend, [projected], dtypes=LOGIT_DTYPES) == "triton":
        if maxima is None or group != COLUMNS:
            group, maxima = GROUP, group_maxima(projected, epilogue, "triton").t()
        return _largest_triton(projected, epilogue, k, maxima, group)
    size = max(1, _SORTED // (GROUP * k))
    if rows > size:
        parts = [slice(start, start + size) for start in range(0, rows, size)]
        found = [largest(projected[at], epilogue.rows(at), k, backend) for at in parts]
        return torch.cat([part[0] for part in found]), torch.cat([part[1] for part in found])
    if columns <= 4 * GROUP * k:  # most groups would be kept
        return tuple(epilogue(projected).topk(k, -1))  # type: ignore[return-value]
    groups = group_maxima(projected, epilogue, backend).topk(k, -1, sorted=False).indices
    ids = (groups[:, :, None] * GROUP + torch.arange(GROUP, device=groups.device)).flatten(1)
    inside, ids = ids < columns, ids.clamp(max=columns - 1)
    bias = None if epilogue.bias is None else epilogue.bias[ids]
    logits = epilogue.transform(projected.gather(1, ids), bias).masked_fill(~inside, -torch.inf)
    values, at = logits.topk(k, -1)
    return values, ids.gather(1, at)


def group_of_kernels(k: int, columns: int) -> int:
    """The most columns of a group among whose entries one program can choose; 0 where the entries are sorted."""
    most = min(_MOST >> (k - 1).bit_length(), columns // (4 * k)) if k else 0
    return next((group for group in (COLUMNS, GROUP) if group <= most), 0)


def _largest_triton(projected: Tensor, epilogue: Epilogue, k: int, maxima: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """:func:`largest`, from the maxima ``[C / group, R]`` of groups."""
    (rows, columns), device = projected.shape, projected.device
    groups, entries = torch.empty(rows, k, dtype=torch.int32, device=device), group * triton.next_power_of_2(k)
    _largest_groups_kernel[(rows,)](
        groups, maxima, *maxima.stride(), len(maxima), k, BLOCK=triton.next_power_of_2(len(maxima)), num_warps=4
    )
    values, ids = torch.empty(rows, k, device=device), torch.empty(rows, k, dtype=torch.int64, device=device)
    _largest_of_groups_kernel[(rows,)](
        values, ids, projected, projected.stride(0), epilogue.bias, epilogue.transform.for_kernel, groups, columns, k,
        GROUP=group, GROUPS=triton.next_power_of_2(k), num_warps=4 if entries <= 2048 else 8 if entries <= 4096 else 16,
    )  # fmt: skip
    values, order = values.sort(-1, descending=True)
    return values, ids.gather(1, order)


def sum_of_probabilities(
    projected: Tensor, lse: Tensor, epilogue: Epilogue, *, scratch: int, backend: str | None = None
) -> Tensor:
    """``sum_v exp(z_v - lse)`` over the columns of each row whose projection is not -inf, ``[R]``.

    Args:
        projected, epilogue, backend: as in :func:`group_maxima`.
        lse: ``[R]``.
        scratch: bytes that temporaries may take.
    """
    rows, columns = projected.shape
    if choose_backend(backend, [projected], dtypes=LOGIT_DTYPES) == "triton":
        out = torch.empty(rows, device=projected.device)
        if rows:
            _sum_of_probabilities_kernel[(rows,)](
                out, projected, projected.stride(0), lse, epilogue.bias, epilogue.transform.for_kernel, columns,
                BLOCK=4096, num_warps=8,
            )  # fmt: skip
        return out
    found = [projected.new_empty(0)]
    size = max(1, scratch // (4 * columns * projected.element_size()))
    for start in range(0, rows, size):
        at = slice(start, start + size)
        p = (epilogue.rows(at)(projected[at]) - lse[at, None]).exp()
        found.append(p.masked_fill(projected[at] == -torch.inf, 0.0).sum(1))
    return torch.cat(found)


@jit(do_not_specialize_on_alignment=["lse"])
def _sum_of_probabilities_kernel(out, projected, stride, lse, bias, transform, columns, BLOCK: tl.constexpr):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0
    if transform.temperature is not None:
        inverse = inverse_temperature(transform, row, True, 0)
    row_lse = tl.load(lse + row)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(projected + row * stride + at, mask=at < columns, other=-float("inf"))
        z = x
        if bias is not None or transform.factor is not None:
            z = transform_block(x, bias, at, at < columns, transform, inverse)
        sums += tl.where(x > -float("inf"), tl.exp(z - row_lse), 0.0)
    tl.store(out + row, tl.sum(sums, 0))


@jit
def _ordered(x, inside):
    """Integers in the order of fp32 numbers; the smallest outside."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000).to(tl.int32)


@jit
def _places_of_largest(key, k):
    """Which entries are the k largest, the first ones of equal ones, and the place of each among them, in their order.

    The k-th largest is found bit by bit, from the highest.
    """
    threshold = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= k, 0, -0x80000000).to(tl.int32)
    bit = 0x40000000
    while bit > 0:
        higher = threshold + bit
        threshold = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= k, higher, threshold)
        bit = bit // 2
    above = key > threshold
    equal = (key == threshold).to(tl.int32)
    taken = above | ((equal > 0) & (tl.cumsum(equal, 0) <= k - tl.sum(above.to(tl.int32), 0)))
    return taken, tl.cumsum(taken.to(tl.int32), 0) - 1


@jit(do_not_specialize=["row_stride", "group_stride", "groups", "k"])
def _largest_groups_kernel(out, maxima, group_stride, row_stride, groups, k, BLOCK: tl.constexpr):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < groups
    key = _ordered(tl.load(maxima + row * row_stride + at * group_stride, mask=inside, other=0.0), inside)
    taken, place = _places_of_largest(key, k)
    tl.store(out + row * k + place, at, mask=taken & inside)


@jit(do_not_specialize=["k"])
def _largest_of_groups_kernel(
    values, ids, projected, stride, bias, transform, chosen, columns, k, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, GROUPS * GROUP)
    inside = slot // GROUP < k
    at = tl.load(chosen + row * k + slot // GROUP, mask=inside, other=0) * GROUP + slot % GROUP
    inside = inside & (at < columns)
    inverse = 1.0
    if transform.temperature is not None:
        inverse = inverse_temperature(transform, row, True, 0)
    z = load_logits(projected + row * stride, bias, at, inside, transform, inverse)
    taken, place = _places_of_largest(_ordered(z, inside), k)
    tl.store(values + row * k + place, z, mask=taken & inside)
    tl.store(ids + row * k + place, at.to(tl.int64), mask=taken & inside)


@jit
def _group_maxima_kernel(
    out, projected, stride, bias, transform, columns, groups, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """One program for some groups of a row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    at = first * GROUP + tl.arange(0, GROUPS * GROUP)
    inside = at < columns
    inverse = 1.0
    if transform.temperature is not None:
        inverse = inverse_temperature(transform, row, True, 0)
    z = tl.where(inside, load_logits(projected + row * stride, bias, at, inside, transform, inverse), -float("inf"))
    maxima = tl.max(tl.reshape(z, (GROUPS, GROUP)), 1)
    group = first + tl.arange(0, GROUPS)
    tl.store(out + row * groups + group, maxima, mask=group < groups)
