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
from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.label_rows import label_logits
from liger_losses.kernels.linear_stats import log_sum_exp_where
from liger_losses.kernels.logit_transform import LogitTransform, transform_block

#: Two programs per processor: one's exponentials hide behind the other's products.
_TILING = Tiling(tokens=128, columns=128, depth=64, group=8, programs=2, warps=4, stages=3)
#: Sums of e beyond this are computed again: e reaches 1e26 where p_label is below 1e-26, and fp32 and bf16 end at 3e38.
_LARGEST_SUM = 1e26


class Exponentials(NamedTuple):
    """What belongs to ``e = exp(z - offset)``: ``[N]`` fp32 each."""

    offset: Tensor
    lse: Tensor
    logp: Tensor


def linear_exponentials(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    out: Tensor | None = None,
    *,
    transform: LogitTransform = LogitTransform(),
    bias: Tensor | None = None,
    backend: str = "torch",
) -> Exponentials:
    """``out_nv = exp(z_nv - offset_n) dz_nv``, and 0 at the label, for ``z = transform(hidden @ weight.T + bias)``.

    ``dz`` is what the soft-cap multiplies gradients by at this logit, 1 without one.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, rows contiguous, of the same dtype.
        labels: ``[N]`` int64 in ``[0, V)``.
        out: ``[N, V]``, rows contiguous; without it only the statistics are computed.
        transform: from projections to logits.
        bias: ``[V]``, added to the projections.
        backend: ``torch`` holds all logits at once; ``triton`` holds none, for fp16 and bf16.

    Returns:
        :class:`Exponentials`, in fp32.
    """
    if backend == "torch":
        return _exponentials_torch(hidden, weight, labels, out, transform, bias)
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    label_logit = _label_logits(hidden, weight, labels, transform, bias)
    rest = _sums_triton(hidden, weight, labels, label_logit, out, transform, bias)
    unsafe = ~(rest <= _LARGEST_SUM)
    needed = unsafe.any().int()
    lse = log_sum_exp_where(needed, hidden, weight, labels, transform=transform, bias=bias)
    offset = torch.where(unsafe, lse, label_logit)
    if out is None:
        log_rest = rest.log1p()
        return Exponentials(
            offset,
            torch.where(unsafe, lse, label_logit + log_rest),
            torch.where(unsafe, label_logit - lse, -log_rest),
        )
    rest = torch.where(needed != 0, _sums_triton(hidden, weight, labels, offset, out, transform, bias, needed), rest)
    return _finish(label_logit, offset, rest, unsafe)


def _finish(label_logit: Tensor, offset: Tensor, rest: Tensor, unsafe: Tensor) -> Exponentials:
    """From the sums over all columns but the label's."""
    log_total = torch.where(unsafe, (rest + (label_logit - offset).exp()).log(), rest.log1p())
    return Exponentials(offset, offset + log_total, label_logit - offset - log_total)


def _exponentials_torch(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    out: Tensor | None,
    transform: LogitTransform,
    bias: Tensor | None,
) -> Exponentials:
    """The reference."""
    logits = transform(hidden.float() @ weight.float().t(), None if bias is None else bias.float())
    label_logit = logits.gather(1, labels[:, None])[:, 0]

    def exponentials(offset: Tensor) -> Tensor:
        return (logits - offset[:, None]).exp().scatter(1, labels[:, None], 0.0)

    unsafe = ~(exponentials(label_logit).sum(1) <= _LARGEST_SUM)
    offset = torch.where(unsafe, logits.logsumexp(1), label_logit)
    e = exponentials(offset)
    found = _finish(label_logit, offset, e.sum(1), unsafe)
    if out is not None:
        out.copy_(e if transform.softcap is None else e * transform.slope(logits))
    return found


def _label_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, transform: LogitTransform, bias: Tensor | None
) -> Tensor:
    projected = label_logits(hidden, weight, labels, backend="triton")[:, None]
    return transform(projected, None if bias is None else bias[labels, None].float())[:, 0]


def _sums_triton(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    offset: Tensor,
    out: Tensor | None,
    transform: LogitTransform,
    bias: Tensor | None,
    needed: Tensor | None = None,
) -> Tensor:
    """Sums of e ``[N]``, and e itself into ``out``; only if ``needed``, where that is given (0 otherwise)."""
    tokens = len(hidden)
    row_tiles, column_tiles = -(-tokens // _TILING.tokens), -(-len(weight) // _TILING.columns)
    group = _group(row_tiles)
    lanes = max(1, min(_TILING.programs * processors(hidden.device) // group, column_tiles))
    partial = torch.zeros(lanes, tokens, device=hidden.device)
    if not tokens:
        return partial.sum(0)
    operands = product_arguments(hidden, weight, _TILING)
    tma_store = out is not None and operands["TMA"] and aligned(out)
    _exponentials_kernel[(lanes * group,)](
        **operands,
        out=descriptor(out, _TILING.tokens, _TILING.columns // 2) if out is not None and tma_store else out,
        out_stride=0 if out is None else out.stride(0),
        bias=bias,
        labels=labels,
        offset=offset,
        partial=partial,
        needed=needed,
        group=group,
        lanes=lanes,
        **transform.kernel_arguments(),
        HAS_BIAS=bias is not None,
        CONDITIONAL=needed is not None,
        STORE=out is not None,
        TMA_STORE=tma_store,
        **_TILING.constants(),
        **_TILING.launch(),
    )
    return partial.sum(0)


def _group(row_tiles: int) -> int:
    """Row tiles that walk the vocabulary together: about as many as the tiling says, and groups as even as can be."""
    sizes = range(min(row_tiles, _TILING.group // 2 + 1), min(row_tiles, 2 * _TILING.group) + 1)
    return min(sizes, key=lambda size: (-row_tiles % size, abs(size - _TILING.group)), default=1)


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
            if STORE:
                if TMA_STORE:
                    out.store([first_row, start], e.to(out.dtype))
                else:
                    pointers = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
                    inside = (rows < tokens)[:, None] & (columns < vocab_size)[None, :]
                    tl.store(pointers, e.to(out.dtype.element_ty), mask=inside)
        tl.store(partial + program // group * tokens + rows, sums, mask=rows < tokens)
