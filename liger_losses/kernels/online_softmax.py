"""The statistics of a softmax from sums over its columns, read once, relative to a running maximum.

R rows (tokens), C columns of a block, V vocabulary size, S splits of the vocabulary.

A new statistic is added here: its name in :data:`STATISTICS` and :data:`STORED`, its formula in
:func:`reference_statistics`, :func:`merge` and :func:`store_statistics` and, if it needs a sum that is not there yet, a
field of :class:`Sums` and a line in :func:`online_step`. If it can be differentiated, its gradient is a row of the
table in :mod:`liger_losses.kernels.softmax_grad`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.logit_transform import Epilogue

#: What a loss may ask for. All but ``argmax`` can be differentiated.
STATISTICS = ("logp", "entropy", "lse", "mean_logp", "log_sum_sq_probs", "mean_logit", "argmax")
#: What :func:`store_statistics` writes. ``max_logit`` is for the engine.
STORED = ("lse", "logp", "entropy", "mean_logp", "log_sum_sq_probs", "mean_logit", "max_logit", "argmax")


#: What a kernel merges, of parts of the vocabulary.
MERGED = ("lse", "logp", "entropy")
_OF_PARTS = [*MERGED, "lse_out", "logp_out", "entropy_out"]


class Sums(NamedTuple):
    """Which sums a kernel takes besides the maximum and the sum of exponentials: 1 for those needed, else ``None``."""

    moment: int | None = None  # sum e (z - top), for the entropy
    squares: int | None = None  # sum e^2
    logits: int | None = None  # sum z
    weighted: int | None = None  # sum c z and sum c, with class weights c
    argmax: int | None = None  # the first column of the maximum

    @classmethod
    def needed(cls, names: frozenset[str], class_weight: Tensor | None) -> Sums:
        """The sums that the named statistics need."""
        weighted = class_weight is not None
        logits = "mean_logit" in names or ("mean_logp" in names and not weighted)
        weights = "mean_logp" in names and weighted
        needs = ("entropy" in names, "log_sum_sq_probs" in names, logits, weights, "argmax" in names)
        return cls(*[1 if need else None for need in needs])


def reference_statistics(
    projected: Tensor, labels: Tensor, names: frozenset[str], epilogue: Epilogue
) -> dict[str, Tensor]:
    """The reference implementation in torch: the named statistics, and others that cost nothing more."""
    values: dict[str, Tensor] = {}
    logits, class_weight = epilogue(projected), epilogue.class_weight
    if "argmax" in names:
        top, values["argmax"] = logits.max(-1)
    else:
        top = logits.amax(-1)
    # Finite, so that some columns whose logits are all -inf have the log-sum-exp -inf, and not NaN.
    top = values["max_logit"] = top.clamp(min=-3.0e38)
    shifted = logits - top[:, None]
    label_shifted = shifted.gather(-1, labels[:, None]).squeeze(-1)
    mean_shifted = shifted.mean(-1) if "mean_logit" in names or "mean_logp" in names else top
    values["mean_logit"] = mean_shifted + top
    if class_weight is not None:
        weighted_shifted = (shifted @ class_weight) / logits.shape[-1]

    exp = shifted.exp_()
    total = exp.sum(-1)
    log_total = total.log()
    values["lse"] = top + log_total
    # Subtracting the row's maximum first keeps log-probs near 0 exact however large the logits are.
    values["logp"] = label_shifted - log_total
    if class_weight is None:
        values["mean_logp"] = mean_shifted - log_total
    else:
        values["mean_logp"] = weighted_shifted - log_total * class_weight.mean()
    if "log_sum_sq_probs" in names:
        values["log_sum_sq_probs"] = (exp * exp).sum(-1).log() - 2 * log_total
    if "entropy" in names:
        values["entropy"] = torch.special.entr(exp.div_(total[:, None])).sum(-1)
    return values


def stored(values: Mapping[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    """The argument of kernels that store statistics, ``[R]`` each by name, in the order of :data:`STORED`.

    Triton compiles a kernel again if an element of a tuple has another alignment.
    """
    return tuple(map(values.get, STORED))


def empty_statistics(names: frozenset[str], rows: int, device: torch.device) -> dict[str, Tensor]:
    """New tensors ``[R]`` for the named statistics and ``lse``."""
    wanted = [name for name in STORED[:-1] if name in names or name == "lse"]
    values = dict(zip(wanted, torch.empty(len(wanted), rows, dtype=torch.float32, device=device).unbind(), strict=True))
    if "argmax" in names:
        values["argmax"] = torch.empty(rows, dtype=torch.int64, device=device)
    return values


def merge(
    parts: Mapping[str, Tensor],
    sizes: Sequence[int],
    class_weight: Tensor | None = None,
    *,
    backend: str = "torch",
) -> dict[str, Tensor]:
    """Merge the statistics of W groups of columns into the statistics of a softmax over all columns.

    With ``w_r = exp(lse_r - lse)``, the probability of the columns of part r, the log-sum-exp is the log-sum-exp of the
    parts' log-sum-exps, the entropy is ``sum_r w_r (H_r - log w_r)``, and so on.

    Args:
        parts: ``[W, R]`` each: the statistics of each part's columns, by name, ``lse`` among them. ``logp`` is inf in
            parts that do not have the label. ``argmax`` comes with ``max_logit``. ``selected_logps [W, R, k]`` are
            logits here, 0 for the columns of other parts.
        sizes: the number of columns of each of the W parts.
        class_weight: ``[V]``, the weights in ``mean_logp``.
        backend: ``torch`` or ``triton``, which has a kernel for :data:`MERGED`; it takes parts of one stride whose
            tokens are adjacent.

    Returns:
        ``[R]`` (``selected_logps``: ``[R, k]``) for each name.
    """
    local_lse = parts["lse"]
    if backend == "triton" and parts.keys() <= {*MERGED} and local_lse.numel():
        count, rows = local_lse.shape
        merged = dict(zip(parts, local_lse.new_empty(len(parts), rows).unbind(), strict=True))
        of_parts, out = ([values.get(name) for name in MERGED] for values in (parts, merged))
        _merge_parts_kernel[(-(-rows // 256),)](*out, *of_parts, local_lse.stride(0), count, rows, BLOCK=256)
        return merged
    log_share = local_lse.log_softmax(0)
    lse = local_lse.logsumexp(0)
    merged = {"lse": lse}
    if "logp" in parts:
        elsewhere = parts["logp"] == torch.inf
        # Where the other parts have little, log-probabilities near 0 keep their digits however large the logits are.
        others = torch.where(elsewhere, log_share.exp(), 0.0).sum(0)
        share = torch.where(others < 0.5, torch.log1p(-others), torch.where(elsewhere, 0.0, log_share).sum(0))
        merged["logp"] = torch.where(elsewhere, 0.0, parts["logp"]).sum(0) + share
    if parts.keys() <= {"lse", "logp"}:
        return merged
    counts = torch.tensor(sizes, device="cpu").to(lse.device, non_blocking=True)  # nobody waits for it
    ends = counts.cumsum(0)
    fractions = counts.to(lse.dtype)[:, None] / ends[-1]
    if "entropy" in parts:
        share = log_share.exp()  # 0 of a part whose logits are all -inf, and which has no entropy
        merged["entropy"] = torch.where(share == 0, 0.0, share * (parts["entropy"] - log_share)).sum(0)
    if "log_sum_sq_probs" in parts:
        squares = torch.where(log_share == -torch.inf, -torch.inf, parts["log_sum_sq_probs"] + 2 * log_share)
        merged["log_sum_sq_probs"] = squares.logsumexp(0)
    if "mean_logit" in parts:
        merged["mean_logit"] = (parts["mean_logit"] * fractions).sum(0)
    if "mean_logp" in parts:
        weights = fractions
        if class_weight is not None:
            totals = torch.nn.functional.pad(class_weight.to(lse.dtype).cumsum(0), (1, 0))
            weights = (totals[ends] - totals[ends - counts])[:, None] / ends[-1]
        merged["mean_logp"] = (parts["mean_logp"] * fractions + log_share * weights).sum(0)
    if "argmax" in parts:
        columns, tops = parts["argmax"].long() + (ends - counts)[:, None], parts["max_logit"]
        merged["max_logit"] = tops.amax(0)
        # Not ==, of which NaN logits would make a column that there is not.
        merged["argmax"] = torch.where(tops < merged["max_logit"], ends[-1], columns).amin(0)
    if "selected_logps" in parts:
        merged["selected_logps"] = parts["selected_logps"].sum(0) - lse[:, None]
    return merged


@jit
def log1p(x):
    """``log(1 + x)``, exact for small x: the rounding error of 1 + x is divided out (Kahan's method)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))


@jit(do_not_specialize=["count", "tokens"], do_not_specialize_on_alignment=_OF_PARTS)
def _merge_parts_kernel(lse_out, logp_out, entropy_out, lse, logp, entropy, stride, count, tokens, BLOCK: tl.constexpr):
    """:func:`merge`: parts are ``[count, tokens]``, ``stride`` elements apart."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tokens
    top = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(count):
        z = tl.load(lse + part * stride + rows, mask=inside, other=0.0)
        new_top = tl.maximum(top, z)
        total = total * tl.exp(top - new_top) + tl.exp(z - new_top)
        top = new_top
    log_total = tl.log(total)
    tl.store(lse_out + rows, top + log_total, mask=inside)
    others = tl.zeros((BLOCK,), tl.float32)
    label_share = tl.zeros((BLOCK,), tl.float32)
    label = tl.zeros((BLOCK,), tl.float32)
    nats = tl.zeros((BLOCK,), tl.float32)
    for part in range(count):
        log_share = (tl.load(lse + part * stride + rows, mask=inside, other=0.0) - top) - log_total
        share = tl.exp(log_share)
        if logp is not None:
            x = tl.load(logp + part * stride + rows, mask=inside, other=0.0)
            elsewhere = x == float("inf")
            others += tl.where(elsewhere, share, 0.0)
            label_share += tl.where(elsewhere, 0.0, log_share)
            label += tl.where(elsewhere, 0.0, x)
        if entropy is not None:
            h = tl.load(entropy + part * stride + rows, mask=inside, other=0.0)
            nats += tl.where(share == 0, 0.0, share * (h - log_share))
    if logp is not None:
        label += tl.where(others < 0.5, log1p(-tl.where(others < 0.5, others, 0.0)), label_share)
        tl.store(logp_out + rows, label, mask=inside)
    if entropy is not None:
        tl.store(entropy_out + rows, nats, mask=inside)


@jit
def online_start(zero):
    """The sums of no columns, in the shape of ``zero``: () for one row, ``[R]`` for a tile."""
    # A finite maximum, so that the first rescaling is exp(-huge) = 0 and not exp(-inf + inf).
    return zero.to(tl.int32), zero, zero, zero, zero - 3.0e38, zero, tl.zeros((), tl.float32), zero


@jit
def online_step(z, first_column, columns, inside, class_weight, state, sums, AXIS: tl.constexpr):
    """Add a block of logits to the sums: ``[C]`` of one row (``AXIS`` 0), or a tile ``[R, C]`` (``AXIS`` 1).

    The sums are relative to the largest logit so far, and are rescaled when it rises. ``columns [C]``, those ``inside``
    the vocabulary, begin with ``first_column``; ``class_weight`` is a pointer.
    """
    best, logit_sum, moment, squares, top, total, weight_sum, weighted_sum = state
    if sums.logits is not None:
        logit_sum += tl.sum(tl.where(inside, z, 0.0), AXIS)
    if sums.weighted is not None:
        c = tl.load(class_weight + columns, mask=inside, other=0.0)
        weighted_sum += tl.sum(tl.where(inside, z * c, 0.0), AXIS)
        weight_sum += tl.sum(c, 0)
    z = tl.where(inside, z, float("-inf"))
    block_top = tl.max(z, AXIS)
    if sums.argmax is not None:
        best = tl.where(block_top > top, first_column + tl.argmax(z, AXIS), best)
    new_top = tl.maximum(top, block_top)
    rescale = tl.exp(top - new_top)
    z -= new_top[:, None] if AXIS == 1 else new_top
    e = tl.exp(z)
    if sums.moment is not None:
        moment = rescale * (moment + total * (top - new_top)) + tl.sum(tl.where(e > 0, e * z, 0.0), AXIS)
    if sums.squares is not None:
        squares = squares * rescale * rescale + tl.sum(e * e, AXIS)
    total = total * rescale + tl.sum(e, AXIS)
    return best, logit_sum, moment, squares, new_top, total, weight_sum, weighted_sum


@jit
def store_statistics(out, at, mask, label_logit, state, sums, vocab_size):
    """The statistics of a row, or of several; return the log-sum-exp.

    ``out`` are pointers in the order of :data:`STORED`, ``None`` for what is not asked for; ``at`` is the row.
    """
    lse_out, logp_out, entropy_out, mean_logp_out, squares_out, mean_logit_out, top_out, argmax_out = out
    best, logit_sum, moment, squares, top, total, weight_sum, weighted_sum = state
    log_total = tl.log(total)
    lse = top + log_total
    tl.store(lse_out + at, lse, mask=mask)
    if logp_out is not None:
        tl.store(logp_out + at, (label_logit - top) - log_total, mask=mask)
    if entropy_out is not None:
        tl.store(entropy_out + at, log_total - moment / total, mask=mask)
    if mean_logp_out is not None:
        if sums.weighted is not None:
            mean_logp = (weighted_sum - lse * weight_sum) / vocab_size
        else:
            mean_logp = logit_sum / vocab_size - lse
        tl.store(mean_logp_out + at, mean_logp, mask=mask)
    if squares_out is not None:
        tl.store(squares_out + at, tl.log(squares) - 2 * log_total, mask=mask)
    if mean_logit_out is not None:
        tl.store(mean_logit_out + at, logit_sum / vocab_size, mask=mask)
    if top_out is not None:
        tl.store(top_out + at, top, mask=mask)
    if argmax_out is not None:
        tl.store(argmax_out + at, best.to(tl.int64), mask=mask)
    return lse
