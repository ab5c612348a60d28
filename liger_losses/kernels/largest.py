"""The k largest entries of each row. R rows, C columns.

The k largest are all in the k groups of columns whose maxima are largest: one pass over the rows finds the maxima of
groups, and sorting is left to R x (C / 64) maxima and R x 64 k entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, jit, tl, triton
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, load_logits

#: Columns of a group, and groups that a program reads at a time.
GROUP = 64
_GROUPS = 32
#: Entries that are gathered and sorted at a time.
_SORTED = 2**21


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
            transform = epilogue.transform.for_kernel()
            _group_maxima_kernel[grid](
                out, projected, projected.stride(0), epilogue.bias, transform, columns, groups, GROUP, _GROUPS
            )
        return out
    logits = epilogue(projected)
    padded = torch.nn.functional.pad(logits, (0, groups * GROUP - columns), value=-torch.inf)
    return padded.view(rows, groups, GROUP).amax(-1)


def largest(projected: Tensor, epilogue: Epilogue, k: int, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row, in descending order, and their columns, ``[R, k]`` each.

    Args:
        projected, epilogue, backend: as in :func:`group_maxima`.
        k: at most C.
    """
    rows, columns = projected.shape
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
