"""``exp(logit - offset)`` of ``hidden @ weight.T`` in the product's epilogue: the softmax without a pass of its own.

N tokens, H hidden size, V vocabulary size.

With e = exp(z - offset), one offset per token, and s = sum(e), every gradient of a loss on log-probabilities is a
product with e itself, because softmax = e / s and 1 / s scales rows:
``grad_hidden = (g / s) (e @ weight)``, ``grad_weight = e.T @ ((g / s) hidden)``, the labels' own terms apart.
The offset is the label's logit: it is known before the product, and leaves confident tokens exact, as
``logp = -log1p(sum of the others' e)``. Tokens whose label is so unlikely that this could overflow are found and
computed again with their log-sum-exp for an offset, without asking the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import (
    Tiling,
    aligned,
    descriptor,
    processors,
    product_arguments,
    project_tile,
)
from liger_losses.kernels._triton import jit, tl, triton
from liger_losses.kernels.label_rows import label_logits
from liger_losses.kernels.linear_stats import partial_sums_where
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform, transform_block

_TILING = Tiling(tokens=128, columns=256, depth=64, group=8, programs=1, warps=8, stages=3)
#: Sums of e beyond this are computed again: e reaches 1e26 where p_label is below 1e-26, and fp32 and bf16 end at 3e38.
_LARGEST_SUM = 1e26
#: Arguments whose alignment is no reason to compile again: slices of vectors begin anywhere.
_VECTORS = ["offset", "lse", "logp", "p_coef", "label_coef", "at_label_out"]


class Exponentials(NamedTuple):
    """What belongs to ``e = exp(z - offset)``: ``[N]`` fp32 each."""

    offset: Tensor
    lse: Tensor
    logp: Tensor

    @classmethod
    def into(cls, values: Mapping[str, Tensor]) -> Exponentials:
        """Where ``lse`` and ``logp`` are the values' own memory, as far as they have it."""
        offset, logp = torch.empty(2, len(values["lse"]), device=values["lse"].device)
        return cls(offset, values["lse"], values.get("logp", logp))


def linear_exponentials(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    out: Tensor | None = None,
    epilogue: Epilogue = Epilogue(),
    *,
    found: Exponentials | None = None,
    projections: bool = False,
    backend: str = "torch",
) -> Exponentials:
    """``out_nv = exp(z_nv - offset_n) dz_nv``, and 0 at the label, for ``z = transform(hidden @ weight.T + bias)``.

    ``dz`` is what the soft-cap multiplies gradients by at this logit, 1 without one. With ``projections``, ``out`` gets
    ``hidden @ weight.T`` as it is, before bias and transform.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, rows contiguous, of the same dtype.
        labels: ``[N]`` int64 in ``[0, V)``.
        out: ``[N, V]``, rows contiguous; without it only the statistics are computed.
        epilogue: from projections to logits.
        found: where they go; new tensors by default.
        projections: what ``out`` gets.
        backend: ``torch`` holds all logits at once; ``triton`` holds none, for fp16 and bf16.

    Returns:
        :class:`Exponentials`, in fp32.
    """
    transform, bias, _ = epilogue
    found = Exponentials(*torch.empty(3, len(hidden), device=hidden.device)) if found is None else found
    if backend == "torch":
        for mine, reference in zip(
            found, _exponentials_torch(hidden, weight, labels, out, transform, bias, projections), strict=True
        ):
            mine.copy_(reference)
        return found
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    label_logit = label_logits(hidden, weight, labels, epilogue, backend=backend)
    if not len(hidden):
        return found
    needed = torch.zeros((), dtype=torch.int32, device=hidden.device)
    common = (hidden, weight, labels, label_logit, out, transform, bias, found, needed)
    _launch(*common, projections=projections, conditional=False)
    # What follows returns at once unless `needed` was set: an exception costs neither a synchronisation nor time.
    sums = partial_sums_where(needed, hidden, weight, labels, epilogue)
    splits = triton.next_power_of_2(processors(hidden.device))  # the most there are: the same for every N
    _offsets_kernel[(triton.cdiv(len(hidden), 128),)](
        needed, found.offset, sums, sums.shape[1], len(hidden), BLOCK=128, SPLITS=splits
    )
    _launch(*common, projections=projections, conditional=True)
    return found


def gradient_scales(
    p_coef: Tensor | None,
    label_coef: Tensor | None,
    found: Exponentials,
    hidden: Tensor | None = None,
    at_label: Tensor | None = None,
    *,
    transform: LogitTransform = LogitTransform(),
    backend: str = "torch",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From ``d loss / d z = p_coef p + label_coef onehot`` to what products with exponentials are scaled by.

    ``d loss / d projection = scale out`` at all columns but the label's, with ``out`` of :func:`linear_exponentials`;
    there, it is ``at_label``.

    Args:
        p_coef, label_coef: ``[N]`` fp32, or ``None`` for 0.
        found: what :func:`linear_exponentials` returned.
        hidden: ``[N, H]``, if it is wanted scaled.
        at_label: ``[N]`` fp32, where that goes; a new tensor by default.
        transform: as there.
        backend: ``torch`` or ``triton``.

    Returns:
        ``scale [N]``, ``at_label [N]``, and ``scale hidden [N, H]``, rounded once, in its dtype (or ``None``).
    """
    zero = found.lse.new_zeros(()).expand_as(found.lse)
    p_coef, label_coef = (zero if coef is None else coef for coef in (p_coef, label_coef))
    scaled = None if hidden is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    at_label = torch.empty_like(found.lse) if at_label is None else at_label
    if backend == "torch":
        offset, lse, logp = found
        scale = p_coef * (offset - lse).exp() * transform.factor
        # p_coef p + label_coef with p = 1 + expm1(logp), so that p - 1 keeps its digits.
        total = (p_coef + label_coef) + p_coef * logp.expm1()
        at_label.copy_(total * transform.slope(logp + lse) * transform.factor)
        if scaled is not None and hidden is not None:
            scaled.copy_(scale[:, None] * hidden)
        return scale, at_label, scaled
    scale = torch.empty_like(found.lse)
    hidden = hidden if hidden is None or hidden.stride(1) == 1 else hidden.contiguous()
    if len(scale):
        _scales_kernel[(len(scale),)](
            scale,
            at_label,
            scaled,
            hidden,
            0 if hidden is None else hidden.stride(0),
            0 if hidden is None else hidden.shape[1],
            p_coef.contiguous(),
            label_coef.contiguous(),
            *found,
            **transform.kernel_arguments(),
            HAS_HIDDEN=hidden is not None,
            BLOCK=1024,
        )
    return scale, at_label, scaled


def _exponentials_torch(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    out: Tensor | None,
    transform: LogitTransform,
    bias: Tensor | None,
    projections: bool,
) -> Exponentials:
    """The reference."""
    projected = hidden.float() @ weight.float().t()
    if out is not None and projections:
        out.copy_(projected)
    logits = transform(projected, None if bias is None else bias.float())
    label_logit = logits.gather(1, labels[:, None])[:, 0]

    def exponentials(offset: Tensor) -> Tensor:
        return (logits - offset[:, None]).exp().scatter(1, labels[:, None], 0.0)

    unsafe = ~(exponentials(label_logit).sum(1) <= _LARGEST_SUM)
    offset = torch.where(unsafe, logits.logsumexp(1), label_logit)
    e = exponentials(offset)
    if out is not None and not projections:
        out.copy_(e if transform.softcap is None else e * transform.slope(logits))
    rest = e.sum(1)
    log_total = torch.where(unsafe, (rest + (label_logit - offset).exp()).log(), rest.log1p())
    return Exponentials(offset, offset + log_total, label_logit - offset - log_total)


def _launch(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_logit: Tensor,
    out: Tensor | None,
    transform: LogitTransform,
    bias: Tensor | None,
    found: Exponentials,
    needed: Tensor,
    projections: bool,
    conditional: bool,
) -> None:
    """Exponentials and statistics: with the label's logit as offset, or (where needed) with what ``found`` holds."""
    tokens = len(hidden)
    row_tiles, column_tiles = -(-tokens // _TILING.tokens), -(-len(weight) // _TILING.columns)
    group = _group(row_tiles)
    lanes = max(1, min(_TILING.programs * processors(hidden.device) // group, column_tiles))
    partial = torch.empty(lanes, tokens, device=hidden.device)
    operands = product_arguments(hidden, weight, _TILING)
    if conditional and projections:
        out = None  # they are there
    tma_store = out is not None and operands["TMA"] and aligned(out)
    _exponentials_kernel[(lanes * group,)](
        **operands,
        out=descriptor(out, _TILING.tokens, _TILING.columns // 2) if out is not None and tma_store else out,
        out_stride=0 if out is None else out.stride(0),
        bias=bias,
        labels=labels,
        offset=found.offset if conditional else label_logit,
        partial=partial,
        needed=needed,
        group=group,
        lanes=lanes,
        **transform.kernel_arguments(),
        HAS_BIAS=bias is not None,
        CONDITIONAL=conditional,
        STORE=out is not None,
        PROJECTIONS=projections,
        TMA_STORE=tma_store,
        **_TILING.launch(),
    )
    _row_statistics_kernel[(triton.cdiv(tokens, 128),)](
        partial,
        label_logit,
        *found,
        needed,
        lanes,
        tokens,
        _LARGEST_SUM,
        CONDITIONAL=conditional,
        BLOCK=128,
        LANES=32,
    )


def _group(row_tiles: int) -> int:
    """Row tiles that walk the vocabulary together: about as many as the tiling says, and groups as even as can be."""
    sizes = range(min(row_tiles, _TILING.group // 2 + 1), min(row_tiles, 2 * _TILING.group) + 1)
    return min(sizes, key=lambda size: (-row_tiles % size, abs(size - _TILING.group)), default=1)


@jit
def log1p(x):
    """``log(1 + x)``, exact for small x: what 1 + x rounds away is divided out (Kahan's)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))


@jit
def expm1(x):
    """``exp(x) - 1`` for x <= 0, exact for small x (Kahan's)."""
    u = tl.exp(x)
    return tl.where(u == 1.0, x, tl.where(u < 1e-7, u - 1.0, (u - 1.0) * x / tl.log(u)))


@jit(do_not_specialize=["lanes", "tokens", "limit"], do_not_specialize_on_alignment=_VECTORS)
def _row_statistics_kernel(
    partial,
    label_logit,
    offset,
    lse,
    logp,
    needed,
    lanes,
    tokens,
    limit,
    CONDITIONAL: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """From what the lanes left, sums over all columns but the label's, to log-sum-exp and log-probability."""
    if CONDITIONAL:  # noqa: SIM102, as `and` would not keep them apart here
        if tl.load(needed) == 0:
            return
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tokens
    rest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, lanes, LANES):
        lane = start + tl.arange(0, LANES)
        mask = (lane < lanes)[:, None] & inside[None, :]
        rest += tl.sum(tl.load(partial + lane[:, None] * tokens + rows[None, :], mask=mask, other=0.0), 0)
    z = tl.load(label_logit + rows, mask=inside, other=0.0)
    if CONDITIONAL:
        used = tl.load(offset + rows, mask=inside, other=0.0)
        log_total = tl.where(used == z, log1p(rest), tl.log(rest + tl.exp(z - used)))
    else:
        used = z
        log_total = log1p(rest)
        unsafe = inside & ((rest <= limit) == 0)  # NaN is not safe
        tl.store(offset + rows, tl.where(unsafe, float("nan"), z), mask=inside)
        tl.atomic_max(needed, tl.max(unsafe.to(tl.int32), 0))
    tl.store(lse + rows, used + log_total, mask=inside)
    tl.store(logp + rows, z - used - log_total, mask=inside)


@jit(do_not_specialize=["splits", "tokens"], do_not_specialize_on_alignment=_VECTORS)
def _offsets_kernel(needed, offset, sums, splits, tokens, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Where there is none, the log-sum-exp becomes the offset; ``sums`` are (maximum, sum) of each split."""
    if tl.load(needed) != 0:
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        split = tl.arange(0, SPLITS)
        mask = (split < splits)[:, None] & (rows < tokens)[None, :]
        at = split[:, None] * tokens + rows[None, :]
        top = tl.load(sums + at, mask=mask, other=-3.0e38)
        total = tl.load(sums + splits * tokens + at, mask=mask, other=0.0)
        highest = tl.max(top, 0)
        lse = highest + tl.log(tl.sum(total * tl.exp(top - highest[None, :]), 0))
        old = tl.load(offset + rows, mask=rows < tokens, other=0.0)
        tl.store(offset + rows, tl.where(old == old, old, lse), mask=rows < tokens)


@jit(do_not_specialize_on_alignment=[*_VECTORS, "hidden"])
def _scales_kernel(
    scale_out,
    at_label_out,
    scaled,
    hidden,
    hidden_stride,
    hidden_size,
    p_coef,
    label_coef,
    offset,
    lse,
    logp,
    scale,
    softcap,
    inverse_temperature,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token."""
    row = tl.program_id(0).to(tl.int64)
    p_c = tl.load(p_coef + row)
    label_c = tl.load(label_coef + row)
    row_lse = tl.load(lse + row)
    row_logp = tl.load(logp + row)
    s = p_c * tl.exp(tl.load(offset + row) - row_lse)
    # p_coef p + label_coef with p = 1 + expm1(logp), so that p - 1 keeps its digits.
    at_label = (p_c + label_c) + p_c * expm1(row_logp)
    if HAS_SOFTCAP:
        t = (row_logp + row_lse) / (softcap * inverse_temperature)
        at_label *= 1 - t * t
    if HAS_SCALE:
        s *= scale * inverse_temperature
        at_label *= scale * inverse_temperature
    tl.store(scale_out + row, s)
    tl.store(at_label_out + row, at_label)
    if HAS_HIDDEN:
        for start in range(0, hidden_size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < hidden_size
            h = tl.load(hidden + row * hidden_stride + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(scaled + row * hidden_size + at, (s * h).to(scaled.dtype.element_ty), mask=inside)


@jit(
    do_not_specialize=["tokens", "group", "lanes"],
    do_not_specialize_on_alignment=["labels", "offset", "partial", "needed", "hidden", "out"],
)
def _exponentials_kernel(
    hidden,
    weight,
    hidden_stride,
    weight_stride,
    tokens,
    vocab_size,
    hidden_size,
    out,
    out_stride,
    bias,
    labels,
    offset,
    partial,
    needed,
    group,
    lanes,
    scale,
    softcap,
    inverse_temperature,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CONDITIONAL: tl.constexpr,
    STORE: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Persistent programs: one has the same row tile of every group of row tiles, and every ``lanes``-th column tile.

    Exponentials are taken and stored in two halves of a tile, which takes fewer registers.
    """
    program = tl.program_id(0)
    column_tiles = tl.cdiv(vocab_size, BLOCK_V)
    in_group = group * column_tiles
    tiles = tl.cdiv(tl.cdiv(tokens, BLOCK_N), group) * in_group
    if CONDITIONAL:
        tiles = tiles * tl.load(needed)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for tile in tl.range(program, tiles, group * lanes, flatten=True):
        column_tile = tile % in_group // group
        first_row = (tile // in_group * group + program % group) * BLOCK_N
        if column_tile < lanes:  # the first of this program in this group
            sums = tl.zeros((BLOCK_N,), tl.float32)
        first_column = column_tile * BLOCK_V
        z = project_tile(
            hidden,
            weight,
            hidden_stride,
            weight_stride,
            first_row,
            first_column,
            tokens,
            vocab_size,
            hidden_size,
            TMA,
            UPCAST,
            BLOCK_N,
            BLOCK_V,
            BLOCK_H,
        )
        rows = first_row + tl.arange(0, BLOCK_N)
        row_offset = tl.load(offset + rows, mask=rows < tokens, other=0.0) * 1.4426950408889634
        label = tl.load(labels + rows, mask=rows < tokens, other=-1).to(tl.int32)
        left, right = tl.split(tl.permute(tl.reshape(z, (BLOCK_N, 2, BLOCK_V // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            start = first_column + half * (BLOCK_V // 2)
            columns = start + tl.arange(0, BLOCK_V // 2)
            z = left if half == 0 else right
            x = z
            if HAS_BIAS:
                z += tl.load(bias + columns, mask=columns < vocab_size, other=0.0).to(tl.float32)[None, :]
            z = transform_block(z, scale, softcap, inverse_temperature, HAS_SCALE, HAS_SOFTCAP)
            if column_tile == column_tiles - 1:  # nowhere else are columns beyond the vocabulary
                z = tl.where((columns < vocab_size)[None, :], z, float("-inf"))
            e = tl.exp2(z * 1.4426950408889634 - row_offset[:, None])
            e = tl.where(columns[None, :] != label[:, None], e, 0.0)
            sums += tl.sum(e, 1)
            if HAS_SOFTCAP:
                t = z / (softcap * inverse_temperature)
                e *= tl.where(z > float("-inf"), 1 - t * t, 0.0)
            if PROJECTIONS:
                e = x
            if STORE:
                if TMA_STORE:
                    out.store([first_row, start], e.to(out.dtype))
                else:
                    pointers = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
                    inside = (rows < tokens)[:, None] & (columns < vocab_size)[None, :]
                    tl.store(pointers, e.to(out.dtype.element_ty), mask=inside)
        tl.store(partial + program // group * tokens + rows, sums, mask=rows < tokens)
