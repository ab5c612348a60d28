"""How much of the softmax rows of projections have. R tokens, V vocabulary size."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.kernels._tiles import power_of_two
from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, jit, tl
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, transform_block
from liger_losses.kernels.softmax_stats import row_slices

#: Columns of a row of projections in memory, whose exponentials one program adds up.
_COLUMNS = 4096
#: Maxima are finite, so that differences to them are numbers.
_LOWEST, _HIGHEST = -3.0e38, torch.finfo(torch.float32).max


def sum_of_probabilities(
    projected: Tensor, lse: Tensor, epilogue: Epilogue, *, scratch: int, backend: str | None = None
) -> Tensor:
    """``sum_v exp(z_v - lse)`` over the columns of each row whose projection is not -inf, ``[R]``.

    Args:
        projected: ``[R, V]`` fp32 or fp64, rows contiguous.
        epilogue: from projections to logits.
        lse: ``[R]``.
        scratch: bytes that temporaries may take.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.
    """
    backend, found = choose_backend(backend, [projected], dtypes=LOGIT_DTYPES), [projected.new_empty(0)]
    for at in row_slices(projected, None if backend == "triton" else scratch):
        tops, sums = _sums_of_groups(projected[at], epilogue.rows(at), backend=backend)
        found.append((sums * (tops - lse[at]).exp()).sum(0))
    return torch.cat(found)


def _sums_of_groups(projected: Tensor, epilogue: Epilogue, *, backend: str) -> Tensor:
    """The largest logit of each group of columns, and the sum of exponentials relative to it: ``[2, G, N]``.

    Args:
        projected, epilogue, backend: as in :func:`sum_of_probabilities`; fp64 for ``torch`` alone.

    Columns whose projection is -inf are left out, of which a soft-cap would make a finite logit.
    """
    rows, columns = projected.shape
    size = min(_COLUMNS, power_of_two(columns))
    groups = -(-columns // size)
    if backend == "torch":
        logits = epilogue(projected).masked_fill(projected == -torch.inf, -torch.inf)
        padded = torch.nn.functional.pad(logits, (0, groups * size - columns), value=-torch.inf)
        of_groups = padded.view(rows, groups, size)
        tops = of_groups.amax(-1).clamp(_LOWEST, _HIGHEST)
        return torch.stack([part.t() for part in (tops, (of_groups - tops[..., None]).exp().sum(-1))])
    found = torch.empty(2, groups, rows, dtype=torch.float32, device=projected.device)
    if rows:
        _group_sums_kernel[(rows, groups)](
            *found, projected, projected.stride(0), columns, epilogue.bias, epilogue.transform.for_kernel,
            SIZE=size,
        )  # fmt: skip
    return found


@jit(do_not_specialize_on_alignment=["tops", "sums"])
def _group_sums_kernel(tops, sums, projected, stride, columns, bias, transform, SIZE: tl.constexpr):
    """One program for a group of a row."""
    row = tl.program_id(0).to(tl.int64)
    inverse = inverse_temperature(transform, row, True, 0)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < columns
    x = tl.load(projected + row * stride + at, mask=inside, other=0.0)
    z = x
    if bias is not None or transform.factor is not None:
        z = transform_block(x, bias, at, inside, transform, inverse)
    z = tl.where(inside & (x > float("-inf")), z, float("-inf"))
    # Finite where all are -inf, and where one is inf: the sum is inf then, as torch's is.
    top = tl.minimum(tl.maximum(tl.max(z, 0), -3.0e38), 3.4028234663852886e38)
    place = tl.program_id(1) * tl.num_programs(0) + row
    tl.store(tops + place, top)
    tl.store(sums + place, tl.sum(tl.exp(z - top), 0))
