"""What objectives of policy losses are made of: ratios, estimates of KL divergences, masks, sums of later tokens,
divisors, and the weights that correct for a sampler.

B completions, T tokens of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_losses.checks import check_alike, check_names, check_number, check_range, checked_mask
from liger_losses.chunked.losses.completion_loss import MAX_EXPONENT
from liger_losses.chunked.losses.sums import wide

#: What a function of whole completions may read: ``PolicyInputs``, whose module imports this one.
Batch: TypeAlias = Any


def ratio_of(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, finite in fp32."""
    return log_ratio.clamp(max=MAX_EXPONENT).exp()


def discounted_sums(values: Tensor, discount: float) -> Tensor:
    """``sum_(u >= t) g^(u - t) v_u`` of values ``[B, T]`` with the discount ``g``, in their shape."""
    length = 1
    while length < values.shape[1]:  # sums of 1, 2, 4 ... terms, each of two of half the length
        later = torch.zeros_like(values)
        later[:, :-length] = values[:, length:]
        values, length = values + discount**length * later, 2 * length
    return values


def minillm_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0, length_normalization: bool = True) -> Tensor:
    """``R_t = sum_{u > t} gamma^(u - t - 1) r_u``, 0 for the last token (MiniLLM, arXiv:2306.08543, eq. 5).

    Args:
        rewards, mask: ``[B, T]``: ``log q - log p`` of each token, 0 where the mask (bool) is false.
        gamma: discount.
        length_normalization: whether to divide by the number of later tokens.

    Returns:
        ``[B, T]``, in the dtype of the rewards.
    """
    check_alike(rewards=rewards)
    mask = checked_mask("mask", mask, "rewards", rewards)
    check_range("gamma", gamma, 0.0, 1.0)
    compute = _returns_operator if torch.compiler.is_compiling() else _returns
    return compute(rewards, mask, gamma, length_normalization)


def _returns(rewards: Tensor, mask: Tensor, gamma: float, length_normalization: bool) -> Tensor:
    later = torch.cat([rewards[:, 1:], torch.zeros_like(rewards[:, :1])], 1)
    out = discounted_sums(later, gamma)
    if length_normalization:
        after = mask.flip(1).cumsum(1).flip(1) - mask.long()
        out = out / after.clamp(min=1)
    return out


#: In a graph of torch.compile, how often the loop runs would bind the graph to one number of tokens.
_returns_operator = torch.library.custom_op("liger_losses::minillm_returns", _returns, mutates_args=())


@_returns_operator.register_fake
def _(rewards: Tensor, mask: Tensor, gamma: float, length_normalization: bool) -> Tensor:
    return torch.empty_like(rewards)


def k3(log_ratio: Tensor) -> Tensor:
    """``exp(d) - d - 1`` of ``d = log p_ref - log p``, any shape: an estimate of KL(p || p_ref) from samples of p.

    It is unbiased and never negative (joschu.net/blog/kl-approx.html).
    """
    d = log_ratio.clamp(max=MAX_EXPONENT)
    return torch.expm1(d) - d


def _reverse_of_samples(log_ratio: Tensor) -> Tensor:
    """``r log r - r + 1``."""
    return log_ratio * log_ratio.exp() - torch.expm1(log_ratio)


@torch.no_grad()
def iw_opd_advantages(teacher_logps: Tensor, logps: Tensor, mask: Tensor, *, gamma: float = 0.5) -> Tensor:
    """``w_t a_t`` with ``a_t = log q_t - log p_t`` and ``w_t = 1 + gamma (1 - sum_(u < t) |a_u| / sum_u |a_u|)``: the
    advantages of IW-OPD (arXiv:2606.22600), for ``loss_type="reinforce"``.

    Args:
        teacher_logps, logps: ``[B, T]``, log-probabilities of the tokens under the teacher, and under the policy that
            sampled them.
        mask: ``[B, T]``, 0 for padding, whose values have no influence.
        gamma: how much more the first tokens weigh, at least 0.

    Returns:
        ``[B, T]``, 0 at padding.
    """
    check_alike(teacher_logps=teacher_logps, logps=logps)
    check_number("gamma", gamma, 0.0, math.inf)
    advantages = torch.where(checked_mask("mask", mask, "logps", logps), teacher_logps - logps, 0.0)
    sizes = advantages.abs().to(wide(advantages.dtype))  # sums overflow fp16
    before = (sizes.cumsum(1) - sizes) / sizes.sum(1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
    return (1 + gamma * (1 - before)).to(advantages.dtype) * advantages


#: Estimates of KL(p || p_ref) from ``d = log p_ref - log p`` of samples of p (joschu.net/blog/kl-approx.html). A name
#: with ``+`` has the value of its estimate and the gradient of k2, whose mean is the gradient of the divergence.
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": k3,
    "abs": lambda d: d.abs(),
    "k1+": lambda d: d.square() / 2 - (d.square() / 2 + d).detach(),
    # Of samples of p_ref: KL(p_ref || p), whose gradient the first has exactly, and KL(p || p_ref).
    "sampled_k1": lambda d: d,
    "sampled_forward": lambda d: k3(-d),
    "sampled_reverse": lambda d: _reverse_of_samples(-d.clamp(min=-MAX_EXPONENT)),
    "k3+": lambda d: d.square() / 2 + (k3(d) - d.square() / 2).detach(),
}


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``p log(p / q) + (1 - p) log((1 - p) / (1 - q))``, of a token and all others together."""
    p = log_p.exp()
    rest_p, rest_q = (-torch.expm1(x.clamp(max=0.0)) for x in (log_p, log_q))
    others = rest_p * (rest_p / rest_q.clamp(min=torch.finfo(p.dtype).tiny)).log()
    return p * (log_p - log_q) + torch.where(rest_p > 0, others, 0.0)


# --- Ratios -----------------------------------------------------------------------------------------------------------


def _sequence(log_ratio: Tensor, inputs: Batch) -> Tensor:
    """The geometric mean over the completion: GSPO (arXiv:2507.18071, eq. 7)."""
    return inputs.sequence_sums(log_ratio) / inputs.lengths


def _sequence_token(log_ratio: Tensor, inputs: Batch) -> Tensor:
    """The same number, with each token's gradient: GSPO-token (arXiv:2507.18071, eq. 14)."""
    return _sequence(log_ratio.detach(), inputs) + log_ratio - log_ratio.detach()


def _geometric(log_ratio: Tensor, inputs: Batch) -> Tensor:
    """The geometric mean of ratios that are clipped token by token: GMPO (arXiv:2507.20673)."""
    clipped = log_ratio.clamp(-inputs.options.epsilon_low, inputs.options.epsilon_high)
    lower, higher = torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped)
    return _sequence(torch.where(inputs.advantages > 0, lower, higher), inputs)


#: How the importance ratio is taken: (log ratios of tokens ``[B, T]``, inputs) to ``[B, T]`` or ``[B, 1]``.
RATIOS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "token": lambda log_ratio, inputs: log_ratio,
    "sequence": _sequence,
    "sequence_token": _sequence_token,
    # the completion's own probability ratio: RLOO (arXiv:2402.14740)
    "sequence_sum": lambda log_ratio, inputs: inputs.sequence_sums(log_ratio),
    "geometric": _geometric,
}


# --- Masks ------------------------------------------------------------------------------------------------------------


def _tv(log_p: Tensor, log_q: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """DPPO's total variation of a token and all others (arXiv:2602.04879, eq. 13)."""
    change = log_p.exp() - log_q.exp()
    return ~(((a > 0) & (change > high)) | ((a < 0) & (-change > low)))


def _kl(log_p: Tensor, log_q: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """DPPO's KL divergence of a token and all others (arXiv:2602.04879, eq. 14)."""
    kl = binary_kl(log_q, log_p)
    higher, lower = (a > 0) & (log_p > log_q), (a < 0) & (log_p < log_q)
    return ~((higher & (kl > high)) | (lower & (kl > low)))


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)


def _kpop(log_p: Tensor, log_q: Tensor, a: Tensor, low: Any, high: float) -> Tensor:
    """``k = p_old / p_sampler`` where both binary KL divergences of the two are small, else 0: KPop
    (ringtech.notion.site/kpop)."""
    kl = torch.maximum(binary_kl(log_p, log_q), binary_kl(log_q, log_p))
    return torch.where(kl <= high, ratio_of(log_p - log_q), 0.0)


class Mask(NamedTuple):
    """A row of :data:`MASKS`.

    Args:
        weights: what a token's objective is multiplied by, without gradient, from (log p, log p_sampler, advantages,
            mask_low, mask_high); bool, or a number.
        bounds: the values of ``mask_low`` and ``mask_high`` where the options have none.
        of_sampler: its p is the old policy's, not the current one's, and it needs the sampler's log-probabilities.
    """

    weights: Callable[[Tensor, Tensor, Tensor, Any, Any], Tensor] | None
    bounds: Mapping[str, float] = {}
    of_sampler: bool = False


#: Which tokens have an objective. Without the sampler's log-probabilities, the old policy is the sampler.
MASKS = {
    "none": Mask(None),
    "tv": Mask(_tv, {"mask_low": 0.15, "mask_high": 0.15}),
    "kl": Mask(_kl, {"mask_low": 0.05, "mask_high": 0.05}),
    # |p - p_sampler| <= mask_high, whatever the advantage: prime-rl's IPO
    "change": Mask(lambda log_p, log_q, a, low, high: (log_p.exp() - log_q.exp()).abs() <= high, {"mask_high": 0.1}),
    # p_sampler - p <= mask_low, whatever the advantage: prime-rl's ref_kl
    "fall": Mask(lambda log_p, log_q, a, low, high: log_q.exp() - log_p.exp() <= low, {"mask_low": 0.2}),
    # mask_low <= p / p_sampler <= mask_high (INTELLECT-3, arXiv:2512.16144, eq. 1)
    "ratio": Mask(
        lambda log_p, log_q, a, low, high: _inside(ratio_of(log_p - log_q), low, high),
        {"mask_low": 0.2, "mask_high": 5.0},
    ),
    # k = p_old / p_sampler where that is within the bounds, else 0: IcePop (arXiv:2510.18855)
    "icepop": Mask(
        lambda log_p, log_q, a, low, high: BOUNDS["mask"](ratio_of(log_p - log_q), low, high),
        {"mask_low": 0.5, "mask_high": 5.0},
        of_sampler=True,
    ),
    "kpop": Mask(_kpop, {"mask_high": 0.1}, of_sampler=True),
}


# --- Divisors ---------------------------------------------------------------------------------------------------------


#: What tokens are divided by, a number or ``[B, 1]``.
NORMALIZERS: dict[str, Callable[[Batch], Tensor | int]] = {
    "sequence_mean": lambda s: s.lengths * max(len(s.mask), 1),
    "sequence_sum": lambda s: max(len(s.mask), 1),
    "token_mean": lambda s: s.counted,
    "limit": lambda s: max(len(s.mask), 1) * (s.options.max_completion_length or 1),
    "items": lambda s: s.items,
    # the sum over all tokens, as verl's token-sum
    "token_sum": lambda s: 1,
    # the mean over a prompt's tokens, then over prompts: ScaleRL (arXiv:2510.13786)
    "prompt_mean": lambda s: s.tokens_of_prompts().clamp(min=1),
}


# --- Weights that correct for a sampler, whose probabilities are not the trainer's ------------------------------------


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
    "mask": lambda ratio, low, high: torch.where(_inside(ratio, low, high), ratio, 0.0),
    "reject": lambda ratio, low, high: _inside(ratio, low, high).to(ratio.dtype),
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
    dtype = wide(logps.dtype)
    log_ratio = torch.where(mask & ~sampling_logps.isnan(), logps.to(dtype) - sampling_logps.to(dtype), 0.0)
    lengths = mask.sum(-1, keepdim=True)
    ratio = ratio_of(LEVELS[level](log_ratio, log_ratio.sum(-1, keepdim=True), lengths))
    of = mask if level == "token" else lengths > 0
    weights = torch.where(of, BOUNDS[bound](ratio, low, high), 0.0)
    tokens, count = lengths.sum().clamp(min=1), of.sum().clamp(min=1)
    mean_weight, squares = weights.sum() / count, weights.square().sum() / count
    shares = [(x & mask).sum() / tokens for x in (weights == 0, ~_inside(ratio, low, high))]
    of_tokens = torch.where(of, ratio, 0.0)
    # One more ratio of each, for batches without any.
    lowest = pad(torch.where(of, ratio, math.inf).flatten(), (0, 1), value=math.inf).amin()
    metrics = SamplerMetrics(
        kl=-log_ratio.sum() / tokens,
        kl_k3=k3(log_ratio).sum() / tokens,
        masked=shares[0],
        out_of_bounds=shares[1],
        effective_sample_size=mean_weight.square() / squares.clamp(min=torch.finfo(dtype).tiny),
        mean_ratio=of_tokens.sum() / count,
        min_ratio=torch.where(lowest.isinf(), 0.0, lowest),
        max_ratio=pad(of_tokens.flatten(), (0, 1)).amax(),
    )
    if normalize:
        weights = weights / torch.where(mean_weight > 0, mean_weight, 1.0)
    return SamplerWeights(weights, metrics)
