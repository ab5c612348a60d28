"""What a sampler's probabilities, which are not the trainer's, are corrected by. B completions, T tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.checks import check_alike, check_names, check_range, checked_mask
from liger_losses.chunked.losses.policy_estimates import k3, ratio_of

#: Log ratios that a weight is taken of: (log ratios ``[B, T]``, their sums ``[B, 1]``, lengths ``[B, 1]``) to
#: ``[B, T]`` or ``[B, 1]``.
LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": lambda tokens, sums, lengths: tokens,
    "sequence": lambda tokens, sums, lengths: sums,
    "geometric": lambda tokens, sums, lengths: sums / lengths.clamp(min=1),
}
#: What becomes of ratios out of bounds: (ratios, low, high) to weights.
BOUNDS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "truncate": lambda ratio, low, high: ratio.clamp(low, high),
    "mask": lambda ratio, low, high: torch.where((ratio >= low) & (ratio <= high), ratio, 0.0),
    "reject": lambda ratio, low, high: ((ratio >= low) & (ratio <= high)).to(ratio.dtype),
}
#: All kinds of weights.
KINDS = tuple(f"{level}_{bound}" for level in LEVELS for bound in BOUNDS)


class SamplerMetrics(NamedTuple):
    """Metrics of :func:`sampler_weights`, detached and 0-dim. Ratios are before clipping, at the level of the weights.

    Args:
        kl: the mean of ``log p_sampler - log p`` over tokens: KL(sampler || trainer) per token.
        kl_k3: the mean of ``r - log r - 1``, an estimate of the same KL with less variance.
        masked: share of the tokens whose weight is 0.
        out_of_bounds: share of the tokens whose ratio is outside of the bounds.
        effective_sample_size: ``(sum w)^2 / (n sum w^2)``, 1 where all weights are equal.
        mean_ratio, min_ratio, max_ratio: mean, minimum and maximum over tokens, or over completions.
    """

    kl: Tensor
    kl_k3: Tensor
    masked: Tensor
    out_of_bounds: Tensor
    effective_sample_size: Tensor
    mean_ratio: Tensor
    min_ratio: Tensor
    max_ratio: Tensor


class SamplerWeights(NamedTuple):
    """The result of :func:`sampler_weights`: weights and metrics."""

    weights: Tensor
    metrics: SamplerMetrics


@torch.no_grad()
def sampler_weights(
    logps: Tensor,
    sampling_logps: Tensor,
    mask: Tensor,
    kind: str = "token_truncate",
    *,
    low: float = 0.0,
    high: float = 2.0,
    normalize: bool = False,
) -> SamplerWeights:
    """The importance weights ``p / p_sampler`` of sampled tokens, within bounds, and metrics to log.

    The weights are the ``is_ratio`` of :func:`grpo_loss` (``vllm_is_ratio=`` of losses). ``kind`` combines a level and
    a bound, such as ``token_truncate`` (TIS), ``token_mask`` (IcePop, arXiv:2510.18855), ``sequence_mask`` (TRL's
    default) or ``geometric_reject``:

    - ``token`` is the ratio of each token, ``sequence`` the product over the completion, and ``geometric`` the
      geometric mean over the completion.
    - ``truncate`` clips ratios to ``[low, high]``. ``mask`` sets ratios outside to 0. ``reject`` sets ratios outside to
      0 and all others to 1.

    Args:
        logps: ``[B, T]``, the trainer's log-probabilities of the tokens, under the policy that was sampled.
        sampling_logps: ``[B, T]``, the sampler's log-probabilities; where they are NaN, the ratio is 1.
        mask: ``[B, T]``, 0 for padding.
        kind: one of :data:`KINDS`.
        low, high: the bounds of the ratio.
        normalize: divide the weights by their mean over tokens, or completions.

    Returns:
        The weights, ``[B, T]`` with 0 for padding, or ``[B, 1]``, in the dtype of ``logps`` (fp32 at least); and
        :class:`SamplerMetrics`, all 0 for a batch without tokens.

    Raises:
        TypeError, ValueError: shapes that do not fit together, an unknown kind, bounds that are no range.
    """
    check_alike(logps=logps, sampling_logps=sampling_logps)
    mask = checked_mask("mask", mask, "logps", logps) if not mask.is_floating_point() else mask != 0
    check_names([kind], KINDS, "kind")
    check_range("low", low, 0.0, math.inf)
    if not (isinstance(high, float) and high == math.inf):
        check_range("high", high, low, math.inf)
    level, bound = kind.split("_")
    wide = torch.promote_types(logps.dtype, torch.float32)
    log_ratio = torch.where(mask & ~sampling_logps.isnan(), logps.to(wide) - sampling_logps.to(wide), 0.0)
    lengths = mask.sum(-1, keepdim=True)
    ratio = ratio_of(LEVELS[level](log_ratio, log_ratio.sum(-1, keepdim=True), lengths))
    of = mask if level == "token" else lengths > 0
    weights = torch.where(of, BOUNDS[bound](ratio, low, high), 0.0)
    tokens, count = lengths.sum().clamp(min=1), of.sum().clamp(min=1)
    mean_weight, squares = weights.sum() / count, weights.square().sum() / count
    outside = (ratio < low) | (ratio > high)
    shares = [(x & mask).sum() / tokens for x in (weights == 0, outside)]
    # One more ratio of each, for batches without any.
    lowest = torch.cat([torch.where(of, ratio, math.inf).flatten(), ratio.new_full((1,), math.inf)]).amin()
    highest = torch.cat([torch.where(of, ratio, 0.0).flatten(), ratio.new_zeros(1)]).amax()
    metrics = SamplerMetrics(
        kl=-log_ratio.sum() / tokens,
        kl_k3=k3(log_ratio).sum() / tokens,
        masked=shares[0],
        out_of_bounds=shares[1],
        effective_sample_size=mean_weight.square() / squares.clamp(min=torch.finfo(wide).tiny),
        mean_ratio=torch.where(of, ratio, 0.0).sum() / count,
        min_ratio=torch.where(lowest.isinf(), 0.0, lowest),
        max_ratio=highest,
    )
    if normalize:
        weights = weights / torch.where(mean_weight > 0, mean_weight, 1.0)
    return SamplerWeights(weights, metrics)
