"""Statistics of the softmax of ``hidden @ weight.T``, the logits never leaving the registers.

N tokens, H hidden size, V vocabulary size, S splits of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.kernels._tiles import Tiling, processors, product_arguments, project_tile, tile_position
from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform, transform_block
from liger_losses.kernels.matmul import HALF_DTYPES
from liger_losses.kernels.softmax_stats import softmax_statistics

_TILING = Tiling(tokens=128, columns=256, depth=64, group=16, programs=1, warps=8, stages=3)
#: Tokens of one launch, so that what the splits leave stays small (8 MiB of 8 splits).
_MAX_TOKENS = 32768


def linear_softmax_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    names: frozenset[str],
    epilogue: Epilogue = Epilogue(),
    *,
    backend: str = "torch",
) -> dict[str, Tensor]:
    """:func:`softmax_statistics` of ``hidden @ weight.T``, fp32 from fp32 sums.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, rows contiguous, of the same dtype.
        labels: ``[N]`` int64 in ``[0, V)``.
        names, epilogue: as in :func:`softmax_statistics`.
        backend: ``torch`` holds all logits at once; ``triton`` holds none, for fp16 and bf16.

    Returns:
        One fp32 tensor ``[N]`` per name (``argmax``: int64).
    """
    if backend == "torch":
        projected = hidden.float() @ weight.float().t()
        return softmax_statistics(projected, labels, names, epilogue, backend=backend)
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    if hidden.dtype not in HALF_DTYPES or weight.dtype != hidden.dtype:
        raise ValueError(f"the kernel multiplies fp16 or bf16, got {hidden.dtype} and {weight.dtype}.")
    return _linear_statistics_triton(hidden, weight, labels, names, *epilogue)


def partial_sums_where(
    needed: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    epilogue: Epilogue,
) -> Tensor:
    """What each split of the vocabulary leaves, (maximum, sum of exponentials, label's logit) ``[3, S, N]``.

    Only if the device finds ``needed`` (int32, 0-dim) set; else nothing is computed, and the memory holds anything.
    """
    return _launch(hidden, weight, labels, frozenset(), epilogue.transform, epilogue.bias, None, needed)


def _linear_statistics_triton(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    names: frozenset[str],
    transform: LogitTransform,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> dict[str, Tensor]:
    found = []
    for start in range(0, max(len(hidden), 1), _MAX_TOKENS):
        rows = slice(start, start + _MAX_TOKENS)
        partial = _launch(hidden[rows], weight, labels[rows], names, transform, bias, class_weight)
        found.append(_combine(dict(zip(_PARTIAL, partial, strict=False)), names, len(weight), class_weight))
    return found[0] if len(found) == 1 else {name: torch.cat([part[name] for part in found]) for name in found[0]}


def _launch(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    names: frozenset[str],
    transform: LogitTransform,
    bias: Tensor | None,
    class_weight: Tensor | None,
    needed: Tensor | None = None,
) -> Tensor:
    """What each split leaves, in the order of :data:`_PARTIAL`."""
    tokens, vocab_size = len(hidden), len(weight)
    flags = {
        "HAS_ENTROPY": "entropy" in names,
        "HAS_SUM_SQ": "log_sum_sq_probs" in names,
        "HAS_MEAN": "mean_logit" in names or ("mean_logp" in names and class_weight is None),
        "HAS_CLASS_WEIGHT": "mean_logp" in names and class_weight is not None,
        "HAS_ARGMAX": "argmax" in names,
    }
    row_tiles, column_tiles = -(-tokens // _TILING.tokens), -(-vocab_size // _TILING.columns)
    group = max(1, min(row_tiles, _TILING.group))
    splits = max(1, min(processors(hidden.device) // group, column_tiles))
    partial = torch.empty(len(_PARTIAL) if any(flags.values()) else 3, splits, tokens, device=hidden.device)
    if tokens:
        operands = product_arguments(hidden, weight, _TILING)
        _linear_statistics_kernel[(row_tiles * splits,)](
            **operands,
            labels=labels,
            bias=bias,
            class_weight=class_weight,
            partial=partial,
            needed=needed,
            splits=splits,
            group=group,
            **transform.kernel_arguments(),
            **flags,
            HAS_BIAS=bias is not None,
            CONDITIONAL=needed is not None,
            **_TILING.launch(),
        )
    return partial


#: What each split leaves of a token: sums over its columns of e = exp(z - top), e (z - top), e^2, z, c z ...
_PARTIAL = ("top", "total", "label_logit", "moment", "squares", "logit_sum", "weighted_sum", "argmax")


def _combine(
    partial: dict[str, Tensor], names: frozenset[str], vocab_size: int, class_weight: Tensor | None
) -> dict[str, Tensor]:
    """Statistics ``[N]`` from what the splits left, ``[S, N]`` each."""
    tops = partial["top"]
    top = tops.amax(0)
    below = tops - top
    scale = below.exp()
    total = (partial["total"] * scale).sum(0)
    log_total = total.log()
    label_logit = partial["label_logit"].sum(0)
    values = {"lse": top + log_total, "logp": (label_logit - top) - log_total}
    if "entropy" in names:
        moment = ((partial["moment"] + partial["total"] * below) * scale).sum(0)
        values["entropy"] = log_total - moment / total
    if "log_sum_sq_probs" in names:
        values["log_sum_sq_probs"] = (partial["squares"] * scale.square()).sum(0).log() - 2 * log_total
    if "mean_logit" in names:
        values["mean_logit"] = partial["logit_sum"].sum(0) / vocab_size
    if "mean_logp" in names and class_weight is None:
        values["mean_logp"] = partial["logit_sum"].sum(0) / vocab_size - values["lse"]
    elif "mean_logp" in names and class_weight is not None:
        values["mean_logp"] = (partial["weighted_sum"].sum(0) - values["lse"] * class_weight.sum()) / vocab_size
    if "argmax" in names:
        values["argmax"] = partial["argmax"].gather(0, tops.argmax(0, keepdim=True))[0].long()
    return {name: value for name, value in values.items() if name in names or name == "lse"}


@jit(
    do_not_specialize=["tokens", "splits", "group"],
    do_not_specialize_on_alignment=["hidden", "labels", "partial", "needed"],
)
def _linear_statistics_kernel(
    hidden,
    weight,
    hidden_stride,
    weight_stride,
    tokens,
    vocab_size,
    hidden_size,
    labels,
    bias,
    class_weight,
    partial,
    needed,
    splits,
    group,
    scale,
    softcap,
    inverse_temperature,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SUM_SQ: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CONDITIONAL: tl.constexpr,
    TMA: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per tile of tokens and split: it walks the split's columns, the softmax's sums in registers."""
    row_tile, split = tile_position(tl.program_id(0), tl.cdiv(tokens, BLOCK_N), splits, group)
    first_row = row_tile * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    valid = rows < tokens
    label = tl.load(labels + rows, mask=valid, other=-1).to(tl.int32)
    column_tiles = tl.cdiv(vocab_size, BLOCK_V)
    per_split = tl.cdiv(column_tiles, splits)
    first_tile = split * per_split
    last_tile = tl.minimum(first_tile + per_split, column_tiles)
    if CONDITIONAL:
        last_tile = last_tile * tl.load(needed)
    # Finite, so that the first rescaling is exp(-huge) = 0 and not exp(-inf + inf).
    top = tl.full((BLOCK_N,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    label_logit = tl.zeros((BLOCK_N,), tl.float32)
    moment = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    logit_sum = tl.zeros((BLOCK_N,), tl.float32)
    weighted_sum = tl.zeros((BLOCK_N,), tl.float32)
    best = tl.zeros((BLOCK_N,), tl.int32)
    for tile in tl.range(first_tile, last_tile, flatten=True):
        first_column = tile * BLOCK_V
        columns = first_column + tl.arange(0, BLOCK_V)
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
        inside = columns < vocab_size
        if HAS_BIAS:
            z += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        z = transform_block(z, scale, softcap, inverse_temperature, HAS_SCALE, HAS_SOFTCAP)
        label_logit += tl.sum(tl.where(columns[None, :] == label[:, None], z, 0.0), 1)
        if HAS_MEAN:
            logit_sum += tl.sum(tl.where(inside[None, :], z, 0.0), 1)
        if HAS_CLASS_WEIGHT:
            c = tl.load(class_weight + columns, mask=inside, other=0.0)
            weighted_sum += tl.sum(tl.where(inside[None, :], z * c[None, :], 0.0), 1)
        z = tl.where(inside[None, :], z, float("-inf"))
        tile_top = tl.max(z, 1)
        if HAS_ARGMAX:
            best = tl.where(tile_top > top, first_column + tl.argmax(z, 1), best)
        new_top = tl.maximum(top, tile_top)
        rescale = tl.exp(top - new_top)
        z -= new_top[:, None]
        e = tl.exp(z)
        if HAS_ENTROPY:
            moment = rescale * (moment + total * (top - new_top)) + tl.sum(tl.where(e > 0, e * z, 0.0), 1)
        if HAS_SUM_SQ:
            squares = squares * rescale * rescale + tl.sum(e * e, 1)
        total = total * rescale + tl.sum(e, 1)
        top = new_top

    out = partial + split * tokens + rows
    step = splits * tokens
    tl.store(out, top, mask=valid)
    tl.store(out + step, total, mask=valid)
    tl.store(out + 2 * step, label_logit, mask=valid)
    if HAS_ENTROPY:
        tl.store(out + 3 * step, moment, mask=valid)
    if HAS_SUM_SQ:
        tl.store(out + 4 * step, squares, mask=valid)
    if HAS_MEAN:
        tl.store(out + 5 * step, logit_sum, mask=valid)
    if HAS_CLASS_WEIGHT:
        tl.store(out + 6 * step, weighted_sum, mask=valid)
    if HAS_ARGMAX:
        tl.store(out + 7 * step, best.to(tl.float32), mask=valid)
