"""Policy optimization as pure functions of log-probabilities: the GRPO family, PPO, RLOO, REINFORCE.

B completions, T tokens of the longest. Every loss is ``sum_t weight_t (-objective_t + beta kl_t)`` over completion
tokens, and a choice from the tables :data:`RATIOS`, :data:`OBJECTIVES` and :data:`NORMALIZERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.chunked.engine.agreement import agree, meet, telling_slices
from liger_losses.chunked.engine.arguments import options_of
from liger_losses.chunked.engine.checks import (
    check_alike,
    check_group,
    check_names,
    check_range,
    check_tensor,
    checked_items,
    checked_mask,
)
from liger_losses.chunked.engine.given import note
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.losses.batches import gather_over_processes, sum_over_processes, world_size
from liger_losses.chunked.losses.completion_loss import MAX_EXPONENT, wide_dtype
from liger_losses.chunked.losses.context_parallel import sum_over_group


@dataclass(frozen=True)
class PolicyOptions:
    """The options of :func:`grpo_loss`.

    Args:
        loss_type: one of :data:`LOSS_TYPES`.
        beta: weight of the KL divergence from the reference.
        epsilon_low, epsilon_high: the ratio is clipped to ``[1 - epsilon_low, 1 + epsilon_high]``; by ``cispo`` to
            ``[0, epsilon_high]``.
        delta: largest ratio of the unclipped objective (two-sided clipping), or ``None``.
        importance_sampling_level: one of :data:`RATIOS`: ``token``, ``sequence`` (GSPO) or ``sequence_sum`` (RLOO).
        max_completion_length: largest number of tokens in a completion, for ``dr_grpo``.
        use_bias_correction_kl: multiply ``kl`` by the ratio (DeepSeek-V3.2, arXiv:2512.02556).
        off_policy_mask_threshold: completions of negative advantage whose mean ``log p_sampler - log p`` is above it
            have no policy objective (DeepSeek-V3.2, arXiv:2512.02556, eq. 9).
        sapo_temperature_pos, sapo_temperature_neg: for tokens with positive advantage, and for the others.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: shape and rate of the gamma weighting for
            non-negative advantages, and for negative ones.

    Raises:
        TypeError, ValueError: an option out of its range; a ratio of completions with an objective of tokens.
    """

    loss_type: str = "dapo"
    beta: float = 0.04
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    importance_sampling_level: str = "token"
    max_completion_length: int | None = None
    use_bias_correction_kl: bool = False
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        level, limit = self.importance_sampling_level, self.max_completion_length
        check_names([self.loss_type], LOSS_TYPES, "loss_type")
        check_names([level], RATIOS, "importance_sampling_level")
        not_negative = ("beta", "epsilon_low", "epsilon_high")
        for name in (*not_negative, "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
            check_range(name, getattr(self, name), 0.0, math.inf)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", *([] if self.delta is None else ["delta"])):
            check_range(name, getattr(self, name), 0.0, math.inf, open_low=True)
        if self.off_policy_mask_threshold is not None:
            check_range("off_policy_mask_threshold", self.off_policy_mask_threshold, -math.inf, math.inf)
        if level != "token" and LOSS_TYPES[self.loss_type].of_tokens:
            message = f"loss_type={self.loss_type!r} is defined for tokens' ratios, not for a completion's"
            raise ValueError(f"{message}: leave importance_sampling_level at 'token', got {level!r}.")
        if self.loss_type == "dr_grpo" and (not isinstance(limit, Integral) or limit < 1):
            raise ValueError(
                f"loss_type='dr_grpo' divides by max_completion_length=, a positive integer, got {limit!r}."
            )

    @property
    def separable(self) -> bool:
        """Whether every token's loss depends on that token alone."""
        masks, weights = self.off_policy_mask_threshold is not None, LOSS_TYPES[self.loss_type].weights is not None
        return self.importance_sampling_level == "token" and not (masks or weights)


#: How the importance ratio is taken: (log ratios of tokens ``[B, T]``, inputs) to ``[B, T]`` or ``[B, 1]``.
RATIOS: dict[str, Callable[[Tensor, PolicyInputs], Tensor]] = {
    "token": lambda log_ratio, inputs: log_ratio,
    # the geometric mean over the completion: GSPO (arXiv:2507.18071, eq. 7)
    "sequence": lambda log_ratio, inputs: inputs.sequence_sums(log_ratio) / inputs.lengths,
    # the completion's own probability ratio: RLOO (arXiv:2402.14740)
    "sequence_sum": lambda log_ratio, inputs: inputs.sequence_sums(log_ratio),
}


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_EXPONENT).exp()


def _clipped(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: PolicyOptions) -> Tensor:
    """``min(min(r, delta) A, clip(r, 1 - e_low, 1 + e_high) A)``: PPO (arXiv:1707.06347, eq. 7), GRPO
    (arXiv:2402.03300, eq. 3), with DAPO's two bounds (arXiv:2503.14476) and INTELLECT-2's ``delta`` (arXiv:2505.07291).
    """
    ratio = _ratio(log_ratio)
    clipped = ratio.clamp(1 - o.epsilon_low, 1 + o.epsilon_high)
    bounded = ratio if o.delta is None else ratio.clamp(max=o.delta)
    return torch.minimum(bounded * advantages, clipped * advantages)


def _sapo(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: PolicyOptions) -> Tensor:
    """``4 / t sigmoid(t (r - 1)) A``, ``t`` by the advantage's sign: SAPO (arXiv:2511.20347)."""
    t = torch.where(advantages > 0, o.sapo_temperature_pos, o.sapo_temperature_neg)
    return torch.sigmoid(t * (_ratio(log_ratio) - 1)) * 4 / t * advantages


class Objective(NamedTuple):
    """What is maximized, from (log ratios, log-probabilities, advantages, options); and where clipping removes its
    gradient, as bool from (ratios, advantages, options), for the metric."""

    value: Callable[[Tensor, Tensor, Tensor, PolicyOptions], Tensor]
    cut: Callable[[Tensor, Tensor, PolicyOptions], Tensor] | None = None


OBJECTIVES = {
    "clipped": Objective(
        _clipped,
        lambda ratio, a, o: ((ratio < 1 - o.epsilon_low) & (a < 0)) | ((ratio > 1 + o.epsilon_high) & (a > 0)),
    ),
    # detach(min(r, e_high)) A log p: CISPO (arXiv:2506.13585, eq. 4)
    "cispo": Objective(
        lambda log_ratio, logps, a, o: _ratio(log_ratio).clamp(max=o.epsilon_high).detach() * a * logps,
        lambda ratio, a, o: (ratio > o.epsilon_high) & (a > 0),
    ),
    "sapo": Objective(_sapo),
    # A log p: REINFORCE
    "score": Objective(lambda log_ratio, logps, a, o: a * logps),
}


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
    if group is not None:
        (total,) = sum_over_group(group, total)
    if is_ratio is not None:
        correction = is_ratio.log().clamp(lowest, highest)
        # One factor per token, or one for the whole completion.
        if is_ratio.shape[1] > 1:
            correction = torch.where(mask != 0, correction, 0.0).sum(-1, keepdim=True)
            if group is not None:
                (correction,) = sum_over_group(group, correction)
        total = total + correction
    log_w = total.clamp(lowest, highest)
    k = torch.where(advantages >= 0, o.vespo_k_pos, o.vespo_k_neg)
    rate = torch.where(advantages >= 0, o.vespo_lambda_pos, o.vespo_lambda_neg).clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp()


#: What tokens are divided by: (mask ``[B, T]``, lengths ``[B, 1]``, completions' token limit, items) to weights
#: ``[B, T]``. Items are the tokens of all completions for ``token_mean``.
NORMALIZERS: dict[str, Callable[[Tensor, Tensor, int | None, Tensor], Tensor]] = {
    "sequence_mean": lambda mask, lengths, limit, items: mask / lengths / max(len(mask), 1),
    "sequence_sum": lambda mask, lengths, limit, items: mask / max(len(mask), 1),
    "token_mean": lambda mask, lengths, limit, items: mask / items.clamp(min=1),
    "limit": lambda mask, lengths, limit, items: mask / (max(len(mask), 1) * (limit or 1)),
    "items": lambda mask, lengths, limit, items: mask / items,
}


class LossType(NamedTuple):
    """A row of :data:`OBJECTIVES` and one of :data:`NORMALIZERS`; and what else is a loss's own.

    Args:
        of_tokens: it is defined for tokens' ratios, not for a completion's.
        weights: what advantages are multiplied by, from all of a completion's tokens, sampler's correction included.
    """

    objective: str
    normalizer: str
    of_tokens: bool = False
    weights: Callable[..., Tensor] | None = None


LOSS_TYPES = {
    "grpo": LossType("clipped", "sequence_mean"),  # arXiv:2402.03300, eq. 3
    "bnpo": LossType("clipped", "token_mean"),
    "dr_grpo": LossType("clipped", "limit"),  # arXiv:2503.20783
    "dapo": LossType("clipped", "items"),  # arXiv:2503.14476, eq. 8
    "cispo": LossType("cispo", "items", of_tokens=True),  # arXiv:2506.13585, eq. 4
    "sapo": LossType("sapo", "sequence_mean", of_tokens=True),  # arXiv:2511.20347
    "luspo": LossType("clipped", "sequence_sum"),  # arXiv:2602.05261
    "vespo": LossType("score", "items", of_tokens=True, weights=vespo_weights),  # arXiv:2602.10693
    "ppo": LossType("clipped", "token_mean"),  # arXiv:1707.06347, eq. 7
    "reinforce": LossType("score", "token_mean", of_tokens=True),
}


class PolicyInputs:
    """What a policy loss reads besides the policy's log-probabilities: constants ``[B, T]``.

    Checks shapes, drops what padding holds, which may be NaN, and computes each token's weight. The mask is bool; other
    arguments as in :func:`grpo_loss`.

    ``head`` is the policy's; ranks that share its vocabulary have the same completions. ``common_options`` are those of
    the loss, which all ranks of the group have in common.
    ``lengths [B, 1]`` and ``tokens []`` are the completions' numbers of tokens and that of all of them, over the group.
    """

    lengths: Tensor

    def __init__(
        self,
        options: PolicyOptions,
        mask: Tensor,
        advantages: Tensor,
        *,
        old_logps: Tensor | None = None,
        ref_logps: Tensor | None = None,
        sampling_logps: Tensor | None = None,
        is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        group: dist.ProcessGroup | None = None,
        head: Head | None = None,
        common_options: Mapping[str, Any] | None = None,
    ) -> None:
        def masked(name: str, value: Tensor | None, column: bool = False) -> Any:
            value = per_token(name, value, mask, column)
            return None if value is None else torch.where(mask, value.expand(mask.shape), 0.0)

        check_tensor("advantages", advantages)
        self.options, self.mask, self.group = options, mask, group
        self.advantages = masked("advantages", advantages, column=True)
        self.old_logps, self.ref_logps = masked("old_logps", old_logps), masked("ref_logps", ref_logps)
        self.sampling_logps = masked("sampling_logps", sampling_logps)
        self.token_is_ratio = masked("is_ratio", is_ratio, column=True)
        # As it was given, [B, 1] or [B, T].
        self.is_ratio = per_token("is_ratio", is_ratio, mask, column=True)
        note(advantages=self.advantages, is_ratio=self.token_is_ratio, num_items_in_batch=num_items_in_batch)
        note(old_logps=self.old_logps, ref_logps=self.ref_logps, sampling_logps=self.sampling_logps)
        lengths = mask.sum(-1, keepdim=True)
        if group is not None:
            if num_items_in_batch is not None:
                checked_items(num_items_in_batch, mask.device)
            whole = None if self.is_ratio is None else self.is_ratio.shape[1] == 1
            given = "not given" if num_items_in_batch is None else "given"
            facts = {"sequences": len(mask), "is_ratio_of_whole_sequences": whole, "num_items_in_batch": given}
            agree(group, **{**(common_options or vars(options)), **facts})
            (lengths,) = sum_over_group(group, lengths)
        self.tokens, self.lengths = lengths.sum(), lengths.clamp(min=1)
        normalizer = LOSS_TYPES[options.loss_type].normalizer
        # Only losses that divide by it synchronize all processes.
        copies = 1 if head is None else head.vocabulary_ranks
        ranks = copies * (1 if group is None else dist.get_world_size(group))
        items = self.tokens
        if normalizer == "items":
            if head is not None and num_items_in_batch is None:
                meet(head)  # a rank whose inputs are wrong does not get to the sum
            items = _items(mask, num_items_in_batch, copies, ranks)
        self.weights = NORMALIZERS[normalizer](mask.float(), self.lengths, options.max_completion_length, items)

    def log_ratio(self, logps: Tensor) -> Tensor:
        """``log p - log p_old``: 0, but differentiable, without an old policy."""
        return logps - (logps.detach() if self.old_logps is None else self.old_logps)

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Each completion's sum of values ``[B, T]`` over its tokens, ``[B, 1]``, for functions of each token."""
        total = (values * self.mask).sum(-1, keepdim=True)
        return total if self.group is None else sum_over_group(self.group, total, sum_gradients=True)[0]

    def total(self, values: Tensor) -> Tensor:
        """The sum of values ``[B, T]`` over all tokens, 0-dim, for what is the same on all ranks."""
        return values.sum() if self.group is None else sum_over_group(self.group, values.sum())[0]


def per_token(name: str, value: Tensor | None, mask: Tensor, column: bool = False) -> Tensor | None:
    """A constant ``[B, T]``, or ``[B, 1]`` if one value per completion is allowed."""
    if value is None:
        return None
    check_tensor(name, value)
    shape = tuple(mask.shape)
    if column and value.shape == shape[:1]:
        value = value[:, None]
    if value.shape != shape and not (column and value.shape == (shape[0], 1)):
        allowed = f"[{shape[0]}], [{shape[0]}, 1] or {list(shape)}" if column else f"{list(shape)}"
        raise ValueError(f"{name} must be {allowed}, as the completions, got {list(value.shape)}.")
    if value.device != mask.device:
        raise ValueError(f"{name} is on {value.device}, the completions on {mask.device}; move it with .to(...).")
    if value.is_complex() or (not column and not value.is_floating_point()):
        raise TypeError(f"{name} must be floating point, got {value.dtype}.")
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def k3(log_ratio: Tensor) -> Tensor:
    """``exp(d) - d - 1`` of ``d = log p_ref - log p``, any shape: an estimate of KL(p || p_ref) from samples of p.

    It is unbiased and never negative (joschu.net/blog/kl-approx.html).
    """
    d = log_ratio.clamp(max=MAX_EXPONENT)
    return torch.expm1(d) - d


def _corrected_k3(d: Tensor, kl: Tensor, ratio: Tensor) -> Tensor:
    """``r k3(d)`` with ``r = p / p_old`` of the same token, whose derivative by ``log p`` is ``-r d``.

    The product rule gives it as a difference of terms of size ``r e^d``, which has no digits left in fp32 for large d.
    """
    d = d.clamp(-1e3, MAX_EXPONENT)
    return (ratio * kl).detach() + (ratio * d).detach() * (d - d.detach())


def policy_terms(
    log_ratio: Tensor, logps: Tensor, advantages: Tensor, ref: Tensor | None, is_ratio: Tensor | None, o: PolicyOptions
) -> Tensor:
    """``-objective_t + beta kl_t`` of tokens, elementwise; arguments as in :func:`grpo_loss`."""
    row = LOSS_TYPES[o.loss_type]
    objective = OBJECTIVES[row.objective].value(log_ratio, logps, advantages, o)
    if is_ratio is not None and row.weights is None:
        objective = objective * is_ratio
    if not o.beta or ref is None:
        return -objective
    log_ref_ratio = ref - logps
    kl = k3(log_ref_ratio)
    if o.use_bias_correction_kl and o.importance_sampling_level == "token":
        kl = _corrected_k3(log_ref_ratio, kl, _ratio(log_ratio))
    elif o.use_bias_correction_kl:
        kl = kl * _ratio(log_ratio)
    return o.beta * kl - objective


def coupled_loss(logps: Tensor, inputs: PolicyInputs, acting: Tensor | None = None) -> Tensor:
    """:func:`grpo_loss` of checked inputs."""
    return inputs.total(inputs.weights * coupled_terms(logps, inputs, acting))


def coupled_terms(logps: Tensor, inputs: PolicyInputs, acting: Tensor | None = None) -> Tensor:
    """The terms ``[B, T]`` that :func:`grpo_loss` weighs, of checked inputs."""
    o, mask, dtype = inputs.options, inputs.mask, logps.dtype
    if o.beta and inputs.ref_logps is not None and o.use_bias_correction_kl and o.importance_sampling_level != "token":
        # By log p, the derivatives of a completion's ratio and of its tokens' kl are of size e^d, and cancel to -d in a
        # completion of one token, or of one unlikely one: fp32 has no digits of it left from a gap of 17 nats on.
        logps = logps.to(wide_dtype(logps.device))
    number, log_ratio = mask.float(), inputs.log_ratio(logps)
    acting = mask if acting is None else acting
    if o.off_policy_mask_threshold is not None:
        sampler = next(x for x in (inputs.sampling_logps, inputs.old_logps, logps.detach()) if x is not None)
        drift = (torch.nan_to_num(sampler, nan=0.0) - logps.detach()) * ~sampler.isnan() * number
        drift = inputs.sequence_sums(drift) / inputs.lengths
        acting = acting & ((inputs.advantages >= 0) | (drift <= o.off_policy_mask_threshold))
    advantages = inputs.advantages * acting
    weights = LOSS_TYPES[o.loss_type].weights
    if weights is not None:
        advantages = advantages * weights(log_ratio, number, inputs.advantages, inputs.is_ratio, o, inputs.group)
    level = RATIOS[o.importance_sampling_level](log_ratio, inputs)
    return policy_terms(level, logps, advantages, inputs.ref_logps, inputs.token_is_ratio, o).to(dtype)


def grpo_loss(
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    is_ratio: Tensor | None = None,
    acting: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Tensor:
    """GRPO and its variants: ``sum_t weight_t (-objective_t + beta kl_t)``.

    For ``loss_type="grpo"`` (arXiv:2402.03300, eq. 3), ``objective = min(r A, clip(r, 1 - e_low, 1 + e_high) A)`` with
    ``r = exp(logp - old_logp)``, ``kl`` is :func:`k3`, and the weights average over the tokens of a completion, then
    over completions. :data:`LOSS_TYPES` has the others with their sources.

    Args:
        logps: ``[B, T]``, the policy's log-probability of each completion token.
        advantages: ``[B]`` or ``[B, T]``.
        mask: ``[B, T]``, 0 for padding; what other tensors hold there never matters, if it is finite in ``logps``.
        old_logps, ref_logps, sampling_logps: ``[B, T]``, under the policy that the ratio is to (the current one by
            default), the reference (no KL divergence without), and the sampler (the old policy by default; NaN if
            unknown; for the off-policy mask).
        is_ratio: ``[B]``, ``[B, 1]`` or ``[B, T]``, correction for a sampler with other probabilities.
        acting: ``[B, T]`` bool, tokens that have an objective (:func:`high_entropy_mask`); all by default.
        num_items_in_batch: what ``dapo``, ``cispo`` and ``vespo`` divide by: completion tokens over all processes and
            accumulated batches; this batch's by default.
        group: ranks that hold slices ``[B, T]`` of the same completions: all get the loss of the whole completions,
            and the gradient by their own log-probabilities. Backward is a collective for ratios of completions.
        options: the fields of :class:`PolicyOptions`: ``loss_type="dapo"``, ``beta=0.04``, ``epsilon_low=0.2``, ...

    Returns:
        0-dim.

    Raises:
        TypeError, ValueError: shapes that do not fit together, or options out of their range.
    """
    if group is not None:
        check_group(group, "cp")
    with telling_slices(group):
        made = options_of(PolicyOptions, grpo_loss, options)
        check_tensor("logps", logps)
        check_tensor("mask", mask)
        if logps.dim() != 2 or logps.shape != mask.shape:
            raise ValueError(f"logps and mask must both be [B, T], got {tuple(logps.shape)} and {tuple(mask.shape)}.")
        if acting is not None:
            acting = checked_mask("acting", acting, "mask", mask)
        inputs = PolicyInputs(
            made,
            mask != 0,
            advantages,
            old_logps=old_logps,
            ref_logps=ref_logps,
            sampling_logps=sampling_logps,
            is_ratio=is_ratio,
            num_items_in_batch=num_items_in_batch,
            group=group,
        )
    return coupled_loss(logps, inputs, acting)


@torch.no_grad()
def clipped_tokens(logps: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
    """Which tokens' gradients clipping removed, ``[B, T]`` bool, and the ratios ``[B, T]`` or ``[B, 1]``."""
    o = inputs.options
    ratio = _ratio(RATIOS[o.importance_sampling_level](inputs.log_ratio(logps), inputs))
    cut = OBJECTIVES[LOSS_TYPES[o.loss_type].objective].cut
    return torch.zeros_like(inputs.mask) if cut is None else cut(ratio, inputs.advantages, o) & inputs.mask, ratio


def clip_fraction(logps: Tensor, inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
    """The share of tokens whose gradient clipping removed, 0-dim, and the ratios ``[B, T]`` or ``[B, 1]``."""
    clipped, ratio = clipped_tokens(logps, inputs)
    return inputs.total(clipped.float()) / inputs.tokens.clamp(min=1), ratio


def high_entropy_mask(entropy: Tensor, mask: Tensor, share: float, *, copies: int = 1) -> Tensor:
    """The ``share`` of all processes' tokens that have the highest entropy, ``[B, T]`` bool (arXiv:2506.01939).

    Args:
        entropy, mask: ``[B, T]``; the mask is bool.
        share: in (0, 1].
        copies: how many processes have the same tokens, as those that share a vocabulary do.

    Returns:
        ``[B, T]`` bool; the mask itself if no process has a token. A collective.
    """
    check_alike(entropy=entropy)
    mask = checked_mask("mask", mask, "entropy", entropy)
    check_range("share", share, 0.0, 1.0, open_low=True)
    return _high_entropy_mask(entropy.detach(), mask, share, copies)


@torch.library.custom_op("liger_losses::high_entropy_mask", mutates_args=())
def _high_entropy_mask(entropy: Tensor, mask: Tensor, share: float, copies: int) -> Tensor:
    """An operator, as the number of tokens depends on values."""
    values = gather_over_processes(entropy[mask])
    if not values.numel():
        return mask.clone()
    # The quantile 1 - share; torch.quantile takes no more than 16 million values.
    ordered = values.sort().values[::copies]
    at = (1 - share) * (ordered.numel() - 1)
    low, high = math.floor(at), math.ceil(at)
    return mask & (entropy >= torch.lerp(ordered[low], ordered[high], at - low))


@_high_entropy_mask.register_fake
def _(entropy: Tensor, mask: Tensor, share: float, copies: int) -> Tensor:
    return torch.empty_like(mask)


def _items(mask: Tensor, num_items_in_batch: Tensor | float | None, copies: int, ranks: int) -> Tensor:
    """The share, of the tokens that a loss is divided by, of the ranks that compute one loss together.

    ``copies`` of these ``ranks`` have the same tokens.
    """
    if num_items_in_batch is None:
        total = sum_over_processes(mask.sum().float()) / copies
    else:
        total = checked_items(num_items_in_batch, mask.device)
    return (total * ranks / world_size()).clamp(min=1)
