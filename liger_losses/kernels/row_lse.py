"""The log-sum-exps of rows of projections in memory. N tokens, V vocabulary size."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.kernels._triton import jit, kinds, tl, triton
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, transform_block
from liger_losses.kernels.online_softmax import merge_sums
from liger_losses.kernels.rows import power_of_two

#: Columns of a row of projections in memory, whose exponentials one program adds up.
_COLUMNS = 4096
#: Maxima are finite, so that differences to them are numbers.
_LOWEST, _HIGHEST = -3.0e38, torch.finfo(torch.float32).max


def row_log_sum_exps_into(
    lse: Tensor, projected: Tensor, epilogue: Epilogue = Epilogue(), *, backend: str = "torch"
) -> None:
    """``lse_n = log sum_v exp(z_nv)`` of the logits ``z = epilogue(projected)``; several programs share a row.

    Args:
        lse: ``[N]`` fp32, the tensor to write them into.
        projected: ``[N, V]`` fp32, rows contiguous.
        epilogue: from projections to logits.
        backend: ``torch`` holds all logits once more; ``triton`` holds none.
    """
    if backend == "torch":
        lse.copy_(epilogue(projected).logsumexp(1))
    elif len(projected):
        merge_sums({"lse": lse}, sums_of_groups(projected, epilogue, backend=backend), projected.shape[1])


def sums_of_groups(
    projected: Tensor,
    epilogue: Epilogue,
    size: int | None = None,
    *,
    maxima_alone: bool = False,
    without_absent: bool = False,
    backend: str = "torch",
) -> Tensor:
    """The largest logit of each group of ``size`` columns, and the sum of exponentials relative to it: ``[2, G, N]``.

    Args:
        projected, epilogue, backend: as in :func:`row_log_sum_exps_into`; also fp64 for ``torch``.
        size: a power of two; as many columns as a program takes at a time by default.
        maxima_alone: return ``[1, G, N]``, where NaN counts as infinite.
        without_absent: leave out columns whose projection is -inf, of which a soft-cap would make a finite logit.
    """
    rows, columns = projected.shape
    size = size or min(_COLUMNS, power_of_two(columns))
    groups = -(-columns // size)
    if backend == "torch":
        logits = epilogue(projected)
        logits = logits.masked_fill(projected == -torch.inf, -torch.inf) if without_absent else logits
        padded = torch.nn.functional.pad(logits, (0, groups * size - columns), value=-torch.inf)
        of_groups = padded.view(rows, groups, size)
        tops = of_groups.amax(-1).clamp(_LOWEST, _HIGHEST)
        of_each = [tops.nan_to_num(_HIGHEST)] if maxima_alone else [tops, (of_groups - tops[..., None]).exp().sum(-1)]
        return torch.stack([part.t() for part in of_each])
    # Of small groups, a program reads several of a row, whose maxima are side by side.
    shape = (rows, groups) if maxima_alone else (2, groups, rows)
    at_once, found = 1, torch.empty(shape, dtype=torch.float32, device=projected.device)
    if maxima_alone:
        at_once, found = max(1, _COLUMNS // 2 // size), found.t()[None]
    if rows:
        tops, *sums = found
        _group_sums_kernel[(rows, triton.cdiv(groups, at_once))](
            *tops.stride(), tops, sums[0] if sums else None, projected, projected.stride(0), columns, groups,
            epilogue.bias, epilogue.transform.for_kernel, WITHOUT_ABSENT=without_absent, SIZE=size, GROUPS=at_once,
            kind=(projected.device, kinds(projected), epilogue.kind, maxima_alone, without_absent, size, columns),
        )  # fmt: skip
    return found


@jit(
    do_not_specialize=["group_stride", "row_stride", "groups"],
    do_not_specialize_on_alignment=["tops", "sums"],
)
def _group_sums_kernel(
    group_stride, row_stride, tops, sums, projected, stride, columns, groups, bias, transform,
    WITHOUT_ABSENT: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program for some groups of a row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    inverse = inverse_temperature(transform, row, True, 0)
    at = first * SIZE + tl.arange(0, GROUPS * SIZE)
    inside = at < columns
    x = tl.load(projected + row * stride + at, mask=inside, other=0.0)
    z = x
    if bias is not None or transform.factor is not None:
        z = transform_block(x, bias, at, inside, transform, inverse)
    if WITHOUT_ABSENT:
        inside = inside & (x > float("-inf"))
    z = tl.where(inside, z, float("-inf"))
    if sums is None:
        z = tl.where(z == z, z, float("inf"))  # a maximum leaves NaN out
    z = tl.reshape(z, (GROUPS, SIZE))
    # Finite where all are -inf, and where one is inf: the sum is inf then, as torch's is.
    top = tl.minimum(tl.maximum(tl.max(z, 1), -3.0e38), 3.4028234663852886e38)
    group = first + tl.arange(0, GROUPS)
    place = row * row_stride + group.to(tl.int64) * group_stride
    tl.store(tops + place, top, mask=group < groups)
    if sums is not None:
        tl.store(sums + place, tl.sum(tl.exp(z - top[:, None]), 1), mask=group < groups)
