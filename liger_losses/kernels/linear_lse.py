"""The log-sum-exps of a product's rows, and the product itself in fp32: what a divergence needs of each model.

N tokens, H hidden size, V vocabulary size.

:mod:`liger_losses.kernels.linear_exp` takes them relative to the labels' logits, which are computed before, and checked
after. Where there is no label, each tile's own maximum serves as well: one kernel for the product, and one for the sums
of all tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import with_contiguous_rows
from liger_losses.kernels._triton import jit, kinds, tl, triton
from liger_losses.kernels.hopper_pipeline import AVAILABLE, COLUMNS, ROWS, NotCompiledError, launch, pipeline_tiles
from liger_losses.kernels.linear_exp_hopper import hopper_exponentials_kernel
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, transform_block
from liger_losses.kernels.online_softmax import merge_sums
from liger_losses.kernels.rows import power_of_two
from liger_losses.kernels.targets import target_of

#: Log-sum-exps of so few tokens, if half of the kernels' last tiles of rows would be empty: cuBLAS multiplies, and a
#: kernel reads its product. (On an H200, 192 tokens, V 151936, H 2048 and 4096: 216 and 392 us; tiles: 367 and 689.)
_FEW_ROWS = 2 * ROWS + ROWS // 2
#: Columns of a row of projections in memory, whose exponentials one program adds up.
_COLUMNS = 4096
#: Maxima are finite, so that differences to them are numbers.
_LOWEST, _HIGHEST = -3.0e38, torch.finfo(torch.float32).max


#: Tokens that keep groups of columns, at a time, on GPUs with less memory bandwidth: without stores that they wait for,
#: programs move further apart in longer products. (An H100, hidden size 8192: 1.07 of cuBLAS's product, and 1.20 for
#: twice as many. An H200 takes as long for any number.)
_KEPT_ROWS = 1024


def most_kept_rows(device: torch.device) -> int:
    """The most tokens that a product which keeps groups of columns is to have."""
    return 2**20 if target_of(device).orders.large is None else _KEPT_ROWS


class Kept(NamedTuple):
    """Which groups of half a tile's columns a token keeps the projections of: ``slots [N, 2 V / 128]`` int32 (rounded
    up), the group's place in ``projections [places, 64]`` fp32, or -1."""

    slots: Tensor
    projections: Tensor

    @classmethod
    def of(cls, columns: Tensor, vocab_size: int) -> Kept:
        """Room for the groups of ``columns [N, k]``: each token has k places, the same one for columns of a group."""
        (tokens, k), device = columns.shape, columns.device
        groups = 2 * -(-vocab_size // COLUMNS)
        slots = torch.full((tokens, groups), -1, dtype=torch.int32, device=device)
        every = torch.arange(tokens * k, dtype=torch.int32, device=device).view(tokens, k)
        slots.scatter_(1, columns // (COLUMNS // 2), every)  # of one group, any of its columns' places
        return cls(slots, torch.empty(tokens * k, COLUMNS // 2, dtype=torch.float32, device=device))

    def at(self, columns: Tensor) -> Tensor:
        """The projections ``[N, k]`` of the columns."""
        half = COLUMNS // 2
        places = self.slots.gather(1, columns // half).long()
        return self.projections.flatten()[places * half + columns % half]


def few_rows(tokens: int) -> bool:
    """Whether a product in memory, which :func:`row_log_sum_exps_into` reads, takes less time than tiles."""
    return tokens <= _FEW_ROWS and 0 < tokens % ROWS <= ROWS // 2


def log_sum_exps_into(
    lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    out: Tensor | None,
    epilogue: Epilogue = Epilogue(),
    *,
    kept: Kept | None = None,
    backend: str = "torch",
) -> Tensor | None:
    """``lse_n = log sum_v exp(z_nv)`` of the logits ``z = epilogue(hidden @ weight.T)``, if there is a kernel for it.

    Args:
        lse: ``[N]`` fp32, the tensor to write them into.
        hidden: ``[N, H]``, fp16 or bf16 for ``triton``.
        weight: ``[V, H]``, rows contiguous, of the same dtype.
        out: ``[N, V]`` fp32, rows contiguous, which gets ``hidden @ weight.T``; or ``None``.
        epilogue: from projections to logits.
        kept: groups of columns, which get ``hidden @ weight.T`` too.
        backend: ``torch`` holds all logits twice; ``triton`` serves compute capability 9.0, and matrices that the
            tensor memory accelerator supports.

    Returns:
        ``[2, V / 128, N]``: the largest logit of each 128 columns, in their order (of nearly equal ones, rounding may
        make equals), and the sum of their exponentials relative to it. ``None`` where no kernel has run, and nothing is
        written. Where this version of Triton cannot run it, a warning says why, once.
    """
    if backend == "torch":
        wide = lse.dtype if out is None else out.dtype
        projected = torch.mm(hidden.to(wide), weight.to(wide).t(), out=out)
        if kept is not None:
            padded, there = torch.nn.functional.pad(projected, (0, -len(weight) % COLUMNS)), kept.slots >= 0
            kept.projections[kept.slots[there].long()] = padded.unflatten(1, (-1, COLUMNS // 2))[there]
        logits = epilogue(projected.clone())
        lse.copy_(logits.logsumexp(1))
        padded = torch.nn.functional.pad(logits, (0, -len(weight) % COLUMNS), value=-torch.inf)
        tiles = padded.unflatten(1, (-1, COLUMNS))
        tops = tiles.amax(-1).clamp(min=-3.0e38)
        return torch.stack([tops.t(), (tiles - tops[..., None]).exp().sum(-1).t()])
    tiles = pipeline_tiles(with_contiguous_rows(hidden), weight, epilogue, out) if AVAILABLE else None
    if tiles is None:
        return None
    row_tiles, column_tiles, programs, arguments = tiles
    partial = torch.empty(2, column_tiles, len(hidden), dtype=torch.float32, device=hidden.device)
    if not len(hidden):
        return partial
    grid, tops_and_sums = (min(programs, row_tiles * column_tiles),), {"tops": partial[0], "partial": partial[1]}
    orders = target_of(hidden.device).orders
    together = (orders.alone if out is None else orders.stored).together
    nothing = dict.fromkeys(["labels", "offset", "logit_sums", "moments", "needed"])
    of_kept = {} if kept is None else {"slots": kept.slots, "kept": kept.projections}
    try:
        launch(
            hopper_exponentials_kernel, grid, **arguments, **tops_and_sums, **nothing, **of_kept,
            group=together, PROJECTIONS=True, SUMS_OF_TILES=True,
        )  # fmt: skip
    except NotCompiledError:
        return log_sum_exps_into(lse, hidden, weight, out, epilogue, backend=backend)  # warns
    merge_sums({"lse": lse}, partial, len(weight))
    return partial


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
