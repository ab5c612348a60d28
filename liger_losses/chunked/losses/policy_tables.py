"""What policy losses are made of, as tables of pure functions: a row for each variant, with its paper and equation.

B completions, T tokens of the longest; r = p / p_old is the importance ratio, A the advantage. A loss is a row of
:data:`LOSS_TYPES`: one of :data:`OBJECTIVES`, of :data:`NORMALIZERS`, and where it has them of :data:`RATIOS` and
:data:`MASKS`, which ``policy_estimates.py`` has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from liger_losses.checks import FiniteFloat, NonNegativeFloat, PositiveFloat, check_fields, check_range
from liger_losses.chunked.losses.policy_estimates import (
    KL_ESTIMATORS,
    MASKS,
    NORMALIZERS,
    RATIOS,
    Batch,
    Mask,
    discounted_sums,
    ratio_of,
)
from liger_losses.chunked.losses.sums import sum_over_group
from liger_losses.kernels.divergence_forms import Divergence

# --- Objectives -------------------------------------------------------------------------------------------------------


def _clipped(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: Any) -> Tensor:
    """``min(min(r, delta) A, clip(r, 1 - e_low, 1 + e_high) A)``: PPO (arXiv:1707.06347, eq. 7), GRPO
    (arXiv:2402.03300, eq. 3), with DAPO's two bounds (arXiv:2503.14476) and INTELLECT-2's ``delta`` (arXiv:2505.07291).
    """
    ratio, low, high, delta = ratio_of(log_ratio), 1 - o.epsilon_low, 1 + o.epsilon_high, o.delta
    if delta is not None:
        return torch.minimum(ratio.clamp(max=delta) * advantages, ratio.clamp(low, high) * advantages)
    # Where the clipped ratio makes the smaller product, it is a bound, which has no gradient.
    gain, bound = ratio * advantages, ratio.detach().clamp(low, high) * advantages
    return torch.where(gain <= bound, gain, bound)


def _is_clipped(ratio: Tensor, a: Tensor, o: Any) -> Tensor:
    return (ratio - ratio.clamp(1 - o.epsilon_low, 1 + o.epsilon_high)) * a > 0


def _importance(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: Any) -> Tensor:
    """``min(r, delta) A``, whose gradient is ``min(r, delta) A d log r``: truncated importance sampling."""
    weight, delta = ratio_of(log_ratio.detach()), o.delta
    weight = weight if delta is None else weight.clamp(max=delta)
    return weight * advantages * (1 + log_ratio - log_ratio.detach())


def _sapo(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: Any) -> Tensor:
    """``4 / t sigmoid(t (r - 1)) A``, ``t`` by the advantage's sign: SAPO (arXiv:2511.20347)."""
    t = torch.where(advantages > 0, o.sapo_temperature_pos, o.sapo_temperature_neg)
    return torch.sigmoid(t * (ratio_of(log_ratio) - 1)) * 4 / t * advantages


@torch.no_grad()
def vespo_weights(
    log_ratio: Tensor,
    mask: Tensor,
    advantages: Tensor,
    is_ratio: Tensor | None,
    o: PolicyOptions,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``phi(w) = e^lambda w^k e^(-lambda w)`` of the completion's importance ratio ``w``, ``[B, 1]`` or ``[B, T]``.

    Args:
        log_ratio, mask: ``[B, T]``.
        advantages: ``[B, 1]`` or ``[B, T]``; their sign selects k and lambda.
        is_ratio: correction of the sampler's probabilities, ``[B, 1]`` or ``[B, T]``, or ``None``.
        o: the options, whose ``vespo_`` fields are k and lambda.
        group: the ranks that hold slices of these completions.
    """
    lowest, highest = math.log(1e-8), 20.0
    total = (log_ratio.clamp(-highest, highest) * mask).sum(-1, keepdim=True)
    (total,) = sum_over_group(group, total)
    if is_ratio is not None:
        correction = is_ratio.log().clamp(lowest, highest)
        # One factor per token, or one for the whole completion.
        if is_ratio.shape[1] > 1:
            (correction,) = sum_over_group(group, torch.where(mask != 0, correction, 0.0).sum(-1, keepdim=True))
        total = total + correction
    log_w = total.clamp(lowest, highest)
    gains = advantages >= 0
    k = torch.where(gains, o.vespo_k_pos, o.vespo_k_neg)
    rate = torch.where(gains, o.vespo_lambda_pos, o.vespo_lambda_neg).clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp()


def _vespo(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: PolicyOptions, inputs: Batch) -> Tensor:
    """``detach(phi(w)) A log p``: VESPO (arXiv:2602.10693)."""
    number = inputs.mask.to(log_ratio.dtype)
    weights = vespo_weights(log_ratio, number, inputs.advantages, inputs.is_ratio, o, inputs.group)
    # The correction of a completion without tokens may be anything.
    return torch.where(inputs.mask, weights, 0.0) * advantages * logps


@torch.no_grad()
def fipo_weights(log_ratio: Tensor, mask: Tensor, advantages: Tensor, o: PolicyOptions) -> Tensor:
    """``clip(exp(sum_(u >= t) g^(u - t) log r_u), fipo_low, fipo_high)``, ``g = 2^(-1 / half life)``: FIPO
    (arXiv:2603.19835).

    Tokens whose ratio is above ``delta`` are left out of the sum. Where the advantage is negative and the ratio above
    ``fipo_safe_ratio``, the weight is at most 1.

    Args:
        log_ratio, mask, advantages: ``[B, T]``; the mask is bool.
        o: the options.

    Returns:
        ``[B, T]``.
    """
    ratio, delta = ratio_of(log_ratio), o.delta
    counted = torch.where(mask if delta is None else mask & (ratio <= delta), log_ratio, 0.0)
    sums = discounted_sums(counted, 2.0 ** (-1.0 / o.fipo_half_life))
    weights = ratio_of(sums).clamp(o.fipo_low, o.fipo_high)
    return torch.where((advantages < 0) & (ratio > o.fipo_safe_ratio), weights.clamp(max=1.0), weights)


def _fipo(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: Any, inputs: Batch) -> Tensor:
    """``f min(r A, clip(r) A)`` with the weights of :func:`fipo_weights` (arXiv:2603.19835)."""
    weights = fipo_weights(log_ratio, inputs.mask, inputs.advantages, o)
    return weights * _clipped(log_ratio, logps, advantages, o)


def _real(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: PolicyOptions, inputs: Batch) -> Tensor:
    """``-(log(1 + sum_neg e^(s / t)) + log(1 + sum_pos e^(-s / t)))`` over a prompt's completions, whose scores ``s``
    are mean log ratios; averaged over prompts: REAL (arXiv:2602.05630).

    Completions of positive advantage are positives. Prompts without one, or without any other, count as 0. The
    ``[B, 1]`` are equal shares of each prompt's objective, for the normalizer ``sequence_mean``.
    """
    same, of_prompt = inputs.of_one_prompt()  # [B, B] bool, and how many completions the prompt has
    positive = (inputs.sequence_sums(inputs.advantages) > 0)[:, 0]
    scores, terms = log_ratio[:, 0] / o.real_temperature, []
    for chosen, signed in ((~positive, scores), (positive, -scores)):
        members = same & chosen
        # One score for "else", of which every row has a finite maximum.
        rows = pad(torch.where(members, signed, -math.inf), (0, 1))
        terms.append((rows.logsumexp(1), members.any(1)))
    (negatives, has_negative), (positives, has_positive) = terms
    prompts = inputs.number_of_prompts(of_prompt).clamp(min=1)
    share = len(scores) / (of_prompt.clamp(min=1) * prompts)
    return -(torch.where(has_negative & has_positive, negatives + positives, 0.0) * share)[:, None]


@torch.no_grad()
def covariances(logps: Tensor, inputs: Batch) -> Tensor:
    """``(log p - mean log p) (A - mean A)`` of each token ``[B, T]`` of this batch (arXiv:2505.22617)."""
    number = inputs.mask.sum().clamp(min=1)
    centered = [x - torch.where(inputs.mask, x, 0.0).sum() / number for x in (logps.detach(), inputs.advantages)]
    return centered[0] * centered[1]


def _chosen(keys: Tensor, eligible: Tensor, share: float, mask: Tensor) -> Tensor:
    """The eligible tokens with the largest keys: ``share`` of all tokens, at least one; bool."""
    flat = torch.where(eligible, keys, -math.inf).flatten()
    count = (mask.sum() * share).long().clamp(min=1)
    rank = flat.argsort(descending=True, stable=True).argsort()
    return (rank < count).view_as(mask) & eligible


def _clip_cov(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: Any, inputs: Batch) -> Tensor:
    """The clipped objective, less ``cov_share`` of the tokens whose covariance is within bounds: Clip-Cov
    (arXiv:2505.22617). The choice is derived from the covariances: calls are repeatable."""
    covariance = covariances(logps, inputs)
    clipped = _is_clipped(ratio_of(log_ratio.detach()), advantages, o)
    eligible = inputs.mask & ~clipped & (covariance > o.cov_low) & (covariance < o.cov_high)
    places = torch.arange(covariance.numel(), device=covariance.device).view_as(covariance)
    digits = covariance.float().view(torch.int32).long() + places
    drawn = ((digits * 2654435761) % 2**32 >> 8).to(covariance.dtype)  # below 2^24, which fp32 holds
    dropped = _chosen(drawn, eligible, o.cov_share, inputs.mask)
    return torch.where(dropped, 0.0, _clipped(log_ratio, logps, advantages, o))


def _kl_cov(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: Any, inputs: Batch) -> Tensor:
    """``r A``, less ``cov_penalty |log r|`` of the ``cov_share`` tokens of largest covariance: KL-Cov
    (arXiv:2505.22617)."""
    chosen = _chosen(covariances(logps, inputs), inputs.mask, o.cov_share, inputs.mask)
    penalty = torch.where(chosen, o.cov_penalty * log_ratio.abs(), 0.0)
    return ratio_of(log_ratio) * advantages - penalty


def _regression(log_ratio: Tensor, logps: Tensor, a: Tensor, o: Any, inputs: Batch, regression_beta: float) -> Tensor:
    """``-(beta log(p / p_ref) - A)^2`` of a completion, with the reference as the old policy, and its reward less the
    optimal value as the advantage: A*-PO (arXiv:2505.20686)."""
    return -(regression_beta * log_ratio - a).square()


class Objective(NamedTuple):
    """A row of :data:`OBJECTIVES`.

    Args:
        value: what is maximized, from (log ratios, log-probabilities, advantages, options).
        cut: where clipping removes its gradient, as bool from (ratios, advantages, options), for the metric.
        coupled: a token's value depends on other tokens; ``value`` then gets the :class:`Batch` too.
        whole: it depends on the order of tokens, or on the whole batch, of which no rank may hold a slice.
        of_prompts: it compares completions of a prompt.
        of_advantages: it is 0, and so is its gradient, where the advantage is.
        options: further keywords of ``value``, numbers, and their defaults.
    """

    value: Callable[..., Tensor]
    cut: Callable[[Tensor, Tensor, Any], Tensor] | None = None
    coupled: bool = False
    whole: bool = False
    of_prompts: bool = False
    of_advantages: bool = False
    options: Mapping[str, Any] = {}


OBJECTIVES = {
    "clipped": Objective(_clipped, _is_clipped, of_advantages=True),
    "importance": Objective(_importance, of_advantages=True),
    # detach(clip(r, low, e_high)) A log p: CISPO (arXiv:2506.13585, eq. 4)
    "cispo": Objective(
        lambda log_ratio, logps, a, o: ratio_of(log_ratio).clamp(o.cispo_low, o.epsilon_high).detach() * a * logps,
        lambda ratio, a, o: (ratio > o.epsilon_high) & (a > 0),
        of_advantages=True,
    ),
    "sapo": Objective(_sapo, of_advantages=True),
    # A log p: REINFORCE
    "score": Objective(lambda log_ratio, logps, a, o: a * logps, of_advantages=True),
    "vespo": Objective(_vespo, coupled=True),
    "fipo": Objective(_fipo, _is_clipped, coupled=True, whole=True),
    "real": Objective(_real, coupled=True, of_prompts=True),
    "clip_cov": Objective(_clip_cov, _is_clipped, coupled=True, whole=True),
    "kl_cov": Objective(_kl_cov, coupled=True, whole=True),
    "regression": Objective(_regression, coupled=True, options={"regression_beta": 1e-3}),
}


# --- Terms of several tokens at a position ----------------------------------------------------------------------------


#: Terms that read both models' probabilities of the sampler's k most likely tokens at each position, and of all others
#: together: divergences of the policy from the sampler; or, ``None``, the objective's mean by the sampler's
#: probabilities, whose gradient is the expected score, which is subtracted (score centering, arXiv:2609.20807).
SAMPLER_TERMS = {
    "score_centering": None,
    "forward_kl": Divergence.forward_kl(),
    "reverse_kl": Divergence.reverse_kl(),
}


# --- Losses -----------------------------------------------------------------------------------------------------------


class LossType(NamedTuple):
    """A row of :data:`OBJECTIVES` and one of :data:`NORMALIZERS`; and what else is a loss's own.

    Args:
        of_tokens: it is defined with ratios of its ``level`` alone.
        level: its row of :data:`RATIOS`.
        mask: its row of :data:`MASKS`.
        defaults: its values of options that are ``None``.
        corrected: the sampler's correction is part of the objective's value.
        of_reference: advantages are times ``log p_ref - log p`` of the same token, a constant.
        of_old: without the old policy's log-probabilities, it would learn nothing.
    """

    objective: str
    normalizer: str
    of_tokens: bool = False
    level: str = "token"
    mask: str = "none"
    defaults: Mapping[str, Any] = {}
    corrected: bool = False
    of_reference: bool = False
    of_old: bool = False


LOSS_TYPES = {
    "grpo": LossType("clipped", "sequence_mean"),  # arXiv:2402.03300, eq. 3
    "bnpo": LossType("clipped", "token_mean"),
    "dr_grpo": LossType("clipped", "limit"),  # arXiv:2503.20783
    "dapo": LossType("clipped", "items"),  # arXiv:2503.14476, eq. 8
    "cispo": LossType("cispo", "items", of_tokens=True, defaults={"epsilon_high": 5.0}),  # arXiv:2506.13585, eq. 4
    "sapo": LossType("sapo", "sequence_mean", of_tokens=True),  # arXiv:2511.20347
    "luspo": LossType("clipped", "sequence_sum"),  # arXiv:2602.05261
    "vespo": LossType("vespo", "items", of_tokens=True, corrected=True),  # arXiv:2602.10693
    "ppo": LossType("clipped", "token_mean"),  # arXiv:1707.06347, eq. 7
    "reinforce": LossType("score", "token_mean", of_tokens=True),
    "dual_clip": LossType("clipped", "token_mean", defaults={"delta": 3.0}),  # arXiv:1912.09729
    "importance": LossType("importance", "items"),
    "dppo_tv": LossType("importance", "items", mask="tv"),  # arXiv:2602.04879, eq. 13
    "dppo_kl": LossType("importance", "items", mask="kl"),  # arXiv:2602.04879, eq. 14
    "prime_ipo": LossType("importance", "items", mask="change", defaults={"log_ratio_penalty": 1e-3}),  # prime-rl's ipo
    "icepop": LossType("clipped", "items", mask="icepop"),  # arXiv:2510.18855
    "kpop": LossType("clipped", "items", mask="kpop"),  # ringtech.notion.site/kpop
    # A log p - penalty (log r)^2, the penalty half of the paper's beta: DRO (arXiv:2405.19107)
    "dro": LossType("score", "token_mean", of_tokens=True, defaults={"log_ratio_penalty": None}),
    "gmpo": LossType("importance", "sequence_mean", of_tokens=True, level="geometric"),  # arXiv:2507.20673
    "fipo": LossType("fipo", "items", of_tokens=True),  # arXiv:2603.19835
    "real": LossType("real", "sequence_mean", of_tokens=True, level="sequence"),  # arXiv:2602.05630
    "clip_cov": LossType("clip_cov", "token_mean", of_tokens=True),  # arXiv:2505.22617
    "kl_cov": LossType("kl_cov", "token_mean", of_tokens=True),  # arXiv:2505.22617
    # on-policy distillation as a policy gradient, prime-rl's ref_kl
    "ref_kl": LossType(
        "importance", "items", True, mask="fall", defaults={"delta": 1e4, "log_ratio_penalty": 1e-3}, of_reference=True
    ),
    "a2po": LossType("regression", "sequence_mean", True, level="sequence_sum", of_old=True),  # arXiv:2505.20686
}


# --- Options ----------------------------------------------------------------------------------------------------------

#: The value of an option that leaves the choice to the row of :data:`LOSS_TYPES`.
OF_LOSS_TYPE = "default"

#: Losses of other names that are other options here.
_LOSSES = {
    "gspo": "importance_sampling_level='sequence' with loss_type='grpo'",
    "gspo_token": "importance_sampling_level='sequence_token' with loss_type='grpo'",
    "rloo": "importance_sampling_level='sequence_sum' with loss_type='grpo'",
    "ipo": "'prime_ipo', the loss of prime-rl that is called IPO; the IPO of pairs is DPO's loss_type='ipo'",
    "score_centering": "sampler_term='score_centering' with loss_type='importance'",
    "vapo": "positive_nll=0.1 with loss_type='ppo'",
    "iw_opd": "advantages of functional.iw_opd_advantages with loss_type='reinforce'",
}
#: verl's names of divisors and of estimates.
_DIVISORS = {"seq-mean-token-mean": "'sequence_mean'", "seq-mean-token-sum": "'sequence_sum'"}
_ESTIMATES = {"kl": "'k1'", "mse": "'k2'", "low_var_kl": "'k3'"}


@dataclass(frozen=True)
class PolicyOptions:
    """The options of :func:`grpo_loss`. The default of an option that is ``None`` depends on the loss type.

    Args:
        loss_type: one of :data:`LOSS_TYPES`.
        beta: weight of the KL divergence from the reference.
        epsilon_low, epsilon_high: the bounds of the ratio, ``[1 - epsilon_low, 1 + epsilon_high]``. For ``cispo``, the
            bounds are ``[cispo_low, epsilon_high]``; for the level ``geometric``,
            ``[exp(-epsilon_low), exp(epsilon_high)]``. By default, ``epsilon_high`` is 5.0 for ``cispo``, else 0.2.
        delta: largest ratio of the unclipped objective (dual clipping), or largest weight of ``importance``.
        importance_sampling_level: one of :data:`RATIOS`: ``token``, ``sequence`` (GSPO), ``sequence_token``
            (GSPO-token), ``sequence_sum`` (RLOO) or ``geometric`` (GMPO).
        max_completion_length: largest number of tokens in a completion, for ``dr_grpo``.
        use_bias_correction_kl: multiply ``kl`` by the ratio (DeepSeek-V3.2, arXiv:2512.02556).
        off_policy_mask_threshold: completions with a negative advantage have no policy objective if their mean
            ``log p_sampler - log p`` exceeds this threshold (DeepSeek-V3.2, arXiv:2512.02556, eq. 9).
        sapo_temperature_pos, sapo_temperature_neg: for tokens with positive advantage, and for the others.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: shape and rate of the gamma weighting for
            non-negative advantages, and for negative ones.
        kl_estimator: one of :data:`KL_ESTIMATORS`.
        normalizer: one of :data:`NORMALIZERS`; by default the one of the loss type.
        token_mask: one of :data:`MASKS`; by default the one of the loss type.
        mask_low, mask_high: the bounds of the mask.
        log_ratio_penalty: factor of ``(log p - log p_sampler)^2`` (Kimi K2.5, arXiv:2602.02276).
        cispo_low: the lower bound of the ratio in ``cispo``.
        fipo_half_life, fipo_low, fipo_high, fipo_safe_ratio: the number of tokens after which the weight of a later
            token is halved, the bounds of the weights, and the ratio above which the weights of negative advantages are
            at most 1.
        real_temperature: divides the scores of ``real``.
        positive_nll: factor of the mean negative log-likelihood of the tokens of positive advantage (VAPO,
            arXiv:2504.05118, eq. 10).
        sampler_term: one of :data:`SAMPLER_TERMS`, which read the sampler's k most likely tokens.
        sampler_coef: the factor of this term.
        objective_options: the names and values of the options of an objective of your own
            (:func:`liger_losses.register_objective`); give each as a keyword.
        cov_share, cov_low, cov_high, cov_penalty: the share of the tokens that ``clip_cov`` drops and ``kl_cov``
            penalizes, the range of the covariances of the tokens that ``clip_cov`` drops, and the factor of
            ``kl_cov``'s penalty.

    Raises:
        TypeError, ValueError: an option out of its range; a ratio of completions with an objective of tokens.
    """

    names: ClassVar[Mapping[str, Sequence[Any]]] = {
        "loss_type": (LOSS_TYPES, _LOSSES),
        "importance_sampling_level": (RATIOS,),
        "kl_estimator": (KL_ESTIMATORS, _ESTIMATES),
        "normalizer": ({OF_LOSS_TYPE: None, **NORMALIZERS}, _DIVISORS),
        "token_mask": ({OF_LOSS_TYPE: None, **MASKS},),
        "sampler_term": ({"none": None, **SAMPLER_TERMS},),
    }
    #: These, of which those that are ``None`` have the values of this loss and mask, if these have some.
    values: ClassVar[PolicyOptions]
    #: The row of :data:`LOSS_TYPES`, with the normalizer, the level and the mask that replace its own.
    row: ClassVar[LossType]
    #: The values of the options that the objective declares.
    declared: ClassVar[Mapping[str, float]]

    beta: NonNegativeFloat = 0.04
    loss_type: str = "dapo"
    epsilon_low: NonNegativeFloat = 0.2
    epsilon_high: NonNegativeFloat | None = None
    delta: PositiveFloat | None = None
    importance_sampling_level: str = "token"
    max_completion_length: int | None = None
    use_bias_correction_kl: bool = False
    off_policy_mask_threshold: FiniteFloat | None = None
    sapo_temperature_pos: PositiveFloat = 1.0
    sapo_temperature_neg: PositiveFloat = 1.05
    vespo_k_pos: NonNegativeFloat = 2.0
    vespo_lambda_pos: NonNegativeFloat = 3.0
    vespo_k_neg: NonNegativeFloat = 3.0
    vespo_lambda_neg: NonNegativeFloat = 2.0
    kl_estimator: str = "k3"
    normalizer: str = OF_LOSS_TYPE
    token_mask: str = OF_LOSS_TYPE
    mask_low: NonNegativeFloat | None = None
    mask_high: NonNegativeFloat | None = None
    log_ratio_penalty: NonNegativeFloat | None = None
    cispo_low: NonNegativeFloat = 0.0
    fipo_half_life: PositiveFloat = 32.0
    fipo_low: NonNegativeFloat = 0.8
    fipo_high: NonNegativeFloat = 1.2
    fipo_safe_ratio: NonNegativeFloat = 4.0
    real_temperature: PositiveFloat = 0.5
    cov_share: PositiveFloat = 2e-4
    cov_low: FiniteFloat = 1.0
    cov_high: FiniteFloat = 5.0
    cov_penalty: NonNegativeFloat = 1.0
    positive_nll: NonNegativeFloat = 0.0
    sampler_term: str = "none"
    sampler_coef: NonNegativeFloat = 1.0
    objective_options: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        row, level, limit = LOSS_TYPES[self.loss_type], self.importance_sampling_level, self.max_completion_length
        loss, chosen = f"loss_type={self.loss_type!r}", {"normalizer": self.normalizer, "mask": self.token_mask}
        if level not in ("token", row.level) and row.of_tokens:
            message = f"{loss} is defined for tokens' ratios, not for a completion's"
            if row.level != "token":
                message = f"{loss} is defined with ratios of the level {row.level!r}"
            raise ValueError(f"{message}: leave importance_sampling_level at 'token', got {level!r}.")
        names: Any = {name: value for name, value in chosen.items() if value != OF_LOSS_TYPE}
        row = row._replace(**names, level=row.level if level == "token" else level)
        object.__setattr__(self, "row", row)
        if row.normalizer == "limit" and (not isinstance(limit, Integral) or limit < 1):
            raise ValueError(f"{loss} needs max_completion_length=, a positive integer, got {limit!r}.")
        if self.centers and (self.mask.of_sampler or not self.separable):
            raise ValueError(
                f"sampler_term={self.sampler_term!r} needs an objective of single tokens and ratios to the sampler: "
                f"use another loss_type than {self.loss_type!r}, importance_sampling_level='token', no "
                "off_policy_mask_threshold, and no token_mask of old policy and sampler."
            )
        if self.log_ratio_penalty is None and row.defaults.get("log_ratio_penalty", 0.0) is None:
            raise ValueError(f"{loss} needs log_ratio_penalty=, the weight of its squared log-ratios.")
        declared = {**self.objective.options, **(self.objective_options or {})}
        for name, value in declared.items():
            if value is Parameter.empty:
                raise TypeError(f"{loss} needs {name}=, an option of its objective.")
            check_range(name, value, -math.inf, math.inf)
        object.__setattr__(self, "declared", declared)
        options: Any = {name: getattr(self, name) for name in PolicyOptions.__match_args__}
        defaults = {"epsilon_high": 0.2, "objective_options": declared or None, **self.mask.bounds, **row.defaults}
        missing = {n: defaults[n] for n, value in options.items() if value is None and defaults.get(n) is not None}
        complete = type(self) is PolicyOptions and not missing
        object.__setattr__(self, "values", self if complete else PolicyOptions(**options | missing))

    @classmethod
    def folded(cls, options: Mapping[str, Any], earlier: PolicyOptions | None = None) -> dict[str, Any]:
        """Options, of which the objective's own are in ``objective_options``, with those that it had ``earlier``."""
        loss_type = options.get("loss_type", (earlier or cls).loss_type)
        row = LOSS_TYPES.get(loss_type) if isinstance(loss_type, str) else None
        declared = () if row is None else OBJECTIVES[row.objective].options
        of_objective = {name: options[name] for name in options if name in declared}
        known = earlier.objective_options if earlier is not None and earlier.loss_type == loss_type else None
        others = {name: options[name] for name in options if name not in of_objective}
        return {"objective_options": {**(known or {}), **of_objective} or None, **others}

    @property
    def objective(self) -> Objective:
        """The row of :data:`OBJECTIVES`."""
        return OBJECTIVES[self.row.objective]

    @property
    def mask(self) -> Mask:
        """The row of :data:`MASKS`."""
        return MASKS[self.row.mask]

    @property
    def divergence(self) -> Divergence | None:
        """The row of :data:`SAMPLER_TERMS`."""
        return SAMPLER_TERMS.get(self.sampler_term)

    @property
    def centers(self) -> bool:
        """Whether objectives are less their mean by the sampler's probabilities."""
        return self.sampler_term == "score_centering"

    def mask_weights(self, logps: Tensor, old: Tensor, sampler: Tensor, advantages: Tensor) -> Tensor | None:
        """The weights of the :attr:`mask`, if it has some."""
        if self.mask.weights is None:
            return None
        compared = old if self.mask.of_sampler else logps
        with torch.no_grad():
            return self.mask.weights(compared, sampler, advantages, self.mask_low, self.mask_high)

    @property
    def separable(self) -> bool:
        """Whether the loss of every token depends only on this token."""
        return self.row.level == "token" and not self.objective.coupled and self.off_policy_mask_threshold is None
