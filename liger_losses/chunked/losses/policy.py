"""Policy optimisation: the GRPO family, PPO's clipped loss, RLOO, REINFORCE. B completions, T tokens of the longest.

Every loss is ``sum_t weight_t (-objective_t + beta kl_t)`` over completion tokens, and a choice from three tables: how
the importance ratio is taken (:data:`RATIOS`), what objective is made of it (:data:`OBJECTIVES`), and what tokens are
divided by (:data:`NORMALISERS`). :data:`LOSS_TYPES` names the combinations.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine import EngineOptions, Statistics, linear_statistics, linear_token_loss
from liger_losses.chunked.engine.checks import check_device, check_head, check_names, check_range, check_tensor
from liger_losses.chunked.engine.processes import gather_over_processes, sum_over_processes, world_size
from liger_losses.chunked.losses.base import ChunkedLoss

#: exp() of more overflows fp32, and an overflow that a clip discards still makes gradients NaN.
_MAX_EXPONENT = 80.0


@dataclass(frozen=True)
class PolicyOptions:
    """What objectives are tuned by.

    Args:
        epsilon_low, epsilon_high: the ratio is clipped to ``[1 - epsilon_low, 1 + epsilon_high]``; by ``cispo`` to
            ``[0, epsilon_high]``.
        delta: largest ratio of the unclipped objective (two-sided clipping), or ``None``.
        sapo_temperature_pos, sapo_temperature_neg: of tokens with positive advantage, and of the others.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: shape and rate of the gamma weighting for
            advantages that are not negative, and for negative ones.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
            check_range(name, getattr(self, name), 0.0, math.inf)
        for name in ("epsilon_low", "epsilon_high"):
            check_range(name, getattr(self, name), 0.0, math.inf)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            check_range(name, getattr(self, name), 0.0, math.inf, open_low=True)
        if self.delta is not None:
            check_range("delta", self.delta, 0.0, math.inf, open_low=True)


# --- How the importance ratio is taken: log ratios of tokens [B, T] to [B, T] or [B, 1] ------------------------------

RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, mask: log_ratio,
    # the geometric mean over the completion: GSPO (arXiv:2507.18071, eq. 7)
    "sequence": lambda log_ratio, mask: (log_ratio * mask).sum(-1, keepdim=True) / _lengths(mask),
    # the completion's own probability ratio: RLOO (arXiv:2402.14740)
    "sequence_sum": lambda log_ratio, mask: (log_ratio * mask).sum(-1, keepdim=True),
}


def _lengths(mask: Tensor) -> Tensor:
    return mask.sum(-1, keepdim=True).clamp(min=1)


# --- What is made of it: (log ratios, log-probabilities, advantages, options) to what is maximised -------------------


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=_MAX_EXPONENT).exp()


def _clipped(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: PolicyOptions) -> Tensor:
    """``min(min(r, delta) A, clip(r, 1 - e_low, 1 + e_high) A)``: PPO (arXiv:1707.06347, eq. 7), GRPO
    (arXiv:2402.03300, eq. 3), with DAPO's two bounds (arXiv:2503.14476) and INTELLECT-2's ``delta`` (arXiv:2505.07291).
    """
    ratio = _ratio(log_ratio)
    clipped = ratio.clamp(1 - o.epsilon_low, 1 + o.epsilon_high)
    bounded = ratio if o.delta is None else ratio.clamp(max=o.delta)
    return torch.minimum(bounded * advantages, clipped * advantages)


def _cispo(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: PolicyOptions) -> Tensor:
    """``detach(min(r, e_high)) A log p``: CISPO (arXiv:2506.13585, eq. 4)."""
    return _ratio(log_ratio).clamp(max=o.epsilon_high).detach() * advantages * logps


def _sapo(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: PolicyOptions) -> Tensor:
    """``4 / t sigmoid(t (r - 1)) A``, ``t`` by the advantage's sign: SAPO (arXiv:2511.20347)."""
    t = torch.where(advantages > 0, o.sapo_temperature_pos, o.sapo_temperature_neg)
    return torch.sigmoid(t * (_ratio(log_ratio) - 1)) * 4 / t * advantages


def _score(log_ratio: Tensor, logps: Tensor, advantages: Tensor, o: PolicyOptions) -> Tensor:
    """``A log p``: REINFORCE; VESPO puts its weights into the advantages."""
    return advantages * logps


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, Tensor, PolicyOptions], Tensor]] = {
    "clipped": _clipped,
    "cispo": _cispo,
    "sapo": _sapo,
    "score": _score,
}

#: Where an objective's gradient was cut, for the metric: (ratios, advantages, options) to bool.
_CUT: dict[str, Callable[[Tensor, Tensor, PolicyOptions], Tensor]] = {
    "clipped": lambda ratio, a, o: ((ratio < 1 - o.epsilon_low) & (a < 0)) | ((ratio > 1 + o.epsilon_high) & (a > 0)),
    "cispo": lambda ratio, a, o: (ratio > o.epsilon_high) & (a > 0),
}


@torch.no_grad()
def vespo_weights(
    log_ratio: Tensor, mask: Tensor, advantages: Tensor, is_ratio: Tensor | None, o: PolicyOptions
) -> Tensor:
    """``phi(w) = e^lambda w^k e^(-lambda w)`` of the completion's importance ratio ``w``, ``[B, 1]`` or ``[B, T]``.

    Args:
        log_ratio, mask: ``[B, T]``.
        advantages: ``[B, 1]`` or ``[B, T]``; k and lambda go by their sign.
        is_ratio: correction of the sampler's probabilities, ``[B, 1]`` or ``[B, T]``, or ``None``.
    """
    lowest, highest = math.log(1e-8), 20.0
    total = (log_ratio.clamp(-highest, highest) * mask).sum(-1, keepdim=True)
    if is_ratio is not None:
        correction = is_ratio.log().clamp(lowest, highest)
        # One factor per token, or one for the whole completion.
        if is_ratio.shape[1] > 1:
            correction = torch.where(mask != 0, correction, 0.0).sum(-1, keepdim=True)
        total = total + correction
    log_w = total.clamp(lowest, highest)
    k = torch.where(advantages >= 0, o.vespo_k_pos, o.vespo_k_neg)
    rate = torch.where(advantages >= 0, o.vespo_lambda_pos, o.vespo_lambda_neg).clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp()


# --- What tokens are divided by: (mask [B, T], completions' token limit, items) to weights [B, T] --------------------

NORMALISERS: dict[str, Callable[[Tensor, int | None, Tensor], Tensor]] = {
    "sequence_mean": lambda mask, limit, items: mask / _lengths(mask) / max(len(mask), 1),
    "sequence_sum": lambda mask, limit, items: mask / max(len(mask), 1),
    "token_mean": lambda mask, limit, items: mask / mask.sum().clamp(min=1),
    "limit": lambda mask, limit, items: mask / (max(len(mask), 1) * (limit or 1)),
    "items": lambda mask, limit, items: mask / items,
}

#: Objective and normaliser of each loss.
LOSS_TYPES = {
    "grpo": ("clipped", "sequence_mean"),  # arXiv:2402.03300, eq. 3
    "bnpo": ("clipped", "token_mean"),
    "dr_grpo": ("clipped", "limit"),  # arXiv:2503.20783
    "dapo": ("clipped", "items"),  # arXiv:2503.14476, eq. 8
    "cispo": ("cispo", "items"),  # arXiv:2506.13585, eq. 4
    "sapo": ("sapo", "sequence_mean"),  # arXiv:2511.20347
    "luspo": ("clipped", "sequence_sum"),  # arXiv:2602.05261
    "vespo": ("score", "items"),  # arXiv:2602.10693
    "ppo": ("clipped", "token_mean"),  # arXiv:1707.06347, eq. 7
    "reinforce": ("score", "token_mean"),
}


class PolicyMetrics(NamedTuple):
    """Means over completion tokens, detached, in Liger's order."""

    kl: Tensor
    clip_ratio: Tensor


class PolicyMetricsWithoutKL(NamedTuple):
    """The same for ``beta=0``, where there is no divergence."""

    clip_ratio: Tensor


class AdaptiveEntropy:
    """A coefficient of the entropy bonus that rises while entropy is at or below a target (arXiv:2505.22312).

    Args:
        coef: the first coefficient.
        target: nats per token.
        low, high: bounds of the coefficient.
        delta: what it changes by at every :meth:`step`.
    """

    def __init__(
        self, coef: float = 0.0, *, target: float, low: float = 0.0, high: float = 1.0, delta: float = 0.005
    ) -> None:
        check_range("coef", coef, 0.0, math.inf)
        check_range("target", target, 0.0, math.inf)
        check_range("low", low, 0.0, math.inf)
        check_range("high", high, low, math.inf)
        check_range("delta", delta, 0.0, math.inf)
        self.value, self.target, self.low, self.high, self.delta = coef, target, low, high, delta
        self.last_entropy = math.inf
        self._window = torch.zeros(2)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint needs; the loss that holds this saves it with its own."""
        return {"value": self.value, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self.value, self.last_entropy = state["value"], state["last_entropy"]

    @property
    def coef(self) -> float:
        """What the next batches' bonus is multiplied by: 0 while entropy is above the target, or not known yet."""
        return self.value if self.last_entropy <= self.target else 0.0

    def observe(self, entropy_sum: Tensor, tokens: Tensor) -> None:
        """Add a batch to the window since the last step."""
        facts = torch.stack([entropy_sum.detach().float(), tokens.float()])
        self._window = self._window.to(facts.device) + facts

    def step(self) -> None:
        """Call it after each optimiser step: the coefficient follows the window's entropy, over all processes."""
        # All processes take part, those without a batch too.
        total, tokens = sum_over_processes(self._window).tolist()
        self._window = torch.zeros_like(self._window)
        if not tokens:
            return
        self.last_entropy = total / tokens
        change = self.delta if self.last_entropy <= self.target else -self.delta
        self.value = min(max(self.value + change, self.low), self.high)


class LigerFusedLinearGRPOLoss(ChunkedLoss):
    """GRPO and its kin: ``sum_t weight_t (-objective_t + beta kl_t) - entropy_coef * mean entropy``.

    With ``r`` the importance ratio to the old policy (1, but differentiable, without one) and ``A`` the advantage. The
    divergence from the reference is ``kl = exp(d) - d - 1``, ``d = log p_ref - log p`` (k3, joschu.net/blog/kl-approx).
    Losses that take every token by itself run in one pass; a ratio of whole completions, ``vespo``, masks by entropy or
    by divergence take two, as they need all of a completion's tokens first.

    Args:
        beta: weight of the divergence from the reference.
        compiled: accepted from code written for Liger; there is nothing to compile.
        use_ref_model: whether there is a reference.
        chunk_size: at most so many completions' logits in a block of the forward pass, where more would fit.
        epsilon_low, epsilon_high, delta, sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos,
            vespo_k_neg, vespo_lambda_neg: see :class:`PolicyOptions`.
        loss_type: one of :data:`LOSS_TYPES`.
        max_completion_length: tokens that a completion may have, for ``dr_grpo``.
        importance_sampling_level: one of :data:`RATIOS`: ``token``, ``sequence`` (GSPO) or ``sequence_sum`` (RLOO).
        temperature: what logits are divided by.
        use_bias_correction_kl: multiply ``kl`` by the ratio (DeepSeek-V3.2, arXiv:2512.02556).
        top_entropy_quantile: only this share of tokens, those of highest entropy over all processes, has a policy
            objective and an entropy bonus (arXiv:2506.01939).
        off_policy_mask_threshold: completions of negative advantage whose mean ``log p_sampler - log p`` is above it
            have no policy objective (DeepSeek-V3.2, arXiv:2512.02556, eq. 9).
        entropy_coef: weight of the bonus for the mean entropy, or an :class:`AdaptiveEntropy`.
        options: as in :class:`liger_losses.chunked.losses.base.ChunkedLoss`.

    Raises:
        TypeError, ValueError: an option of the wrong kind or out of its range; a ratio of whole completions with an
            objective that is defined for tokens.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int | None = None,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        top_entropy_quantile: float = 1.0,
        off_policy_mask_threshold: float | None = None,
        entropy_coef: float | AdaptiveEntropy = 0.0,
        **options: Any,
    ) -> None:
        if options.get("shift"):
            raise ValueError(
                "GRPO takes the hidden states that predict the completions, hidden_states[:, :-1] of the whole text, "
                "beside their tokens: there is no shift."
            )
        super().__init__(temperature=temperature, **options)
        if self.ignore_index >= 0:
            raise ValueError(f"ignore_index must not be a token id (>= 0) here, got {self.ignore_index}.")
        check_names([loss_type], LOSS_TYPES, "loss_type")
        check_names([importance_sampling_level], RATIOS, "importance_sampling_level")
        check_range("beta", beta, 0.0, math.inf)
        check_range("top_entropy_quantile", top_entropy_quantile, 0.0, 1.0, open_low=True)
        if importance_sampling_level != "token" and loss_type in ("cispo", "sapo", "vespo", "reinforce"):
            raise ValueError(
                f"loss_type={loss_type!r} is defined for tokens' ratios, not for a completion's: leave "
                f"importance_sampling_level at 'token', got {importance_sampling_level!r}."
            )
        limit = max_completion_length
        if loss_type == "dr_grpo" and (type(limit) is not int or limit < 1):
            raise ValueError(f"loss_type='dr_grpo' divides by max_completion_length, got {max_completion_length!r}.")
        if off_policy_mask_threshold is not None:
            check_range("off_policy_mask_threshold", off_policy_mask_threshold, -math.inf, math.inf)
        if not isinstance(entropy_coef, AdaptiveEntropy):
            check_range("entropy_coef", entropy_coef, -math.inf, math.inf)
        if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
            raise ValueError(f"chunk_size must be a positive number of completions, got {chunk_size!r}.")
        self.policy = PolicyOptions(
            epsilon_low,
            epsilon_high,
            delta,
            sapo_temperature_pos,
            sapo_temperature_neg,
            vespo_k_pos,
            vespo_lambda_pos,
            vespo_k_neg,
            vespo_lambda_neg,
        )
        self.beta, self.compiled, self.use_ref_model, self.chunk_size = beta, compiled, use_ref_model, chunk_size
        self.loss_type, self.max_completion_length = loss_type, max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.use_bias_correction_kl = use_bias_correction_kl
        self.top_entropy_quantile = top_entropy_quantile
        self.off_policy_mask_threshold = off_policy_mask_threshold
        self.entropy_coef = entropy_coef

    def get_extra_state(self) -> dict[str, float]:
        """The adaptive coefficient's, for :meth:`torch.nn.Module.state_dict`."""
        return self.entropy_coef.state_dict() if isinstance(self.entropy_coef, AdaptiveEntropy) else {}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """The adaptive coefficient's, from :meth:`torch.nn.Module.load_state_dict`."""
        if isinstance(self.entropy_coef, AdaptiveEntropy) and state:
            self.entropy_coef.load_state_dict(state)

    def forward(  # type: ignore[override]
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        *,
        sampling_per_token_logps: Tensor | None = None,
    ) -> tuple[Tensor, PolicyMetrics | PolicyMetricsWithoutKL]:
        """The loss of completions.

        Args:
            _input: ``[B, T, H]``, hidden states that predict the completions' tokens.
            lin_weight: ``[V, H]``, the ``lm_head``.
            selected_token_ids: ``[B, T]`` int64, the completions.
            attention_mask: ``[B, T]``, 0 for padding and other tokens without loss, whose values never matter.
            advantages: ``[B]``, or per token ``[B, T]``.
            bias: ``[V]``.
            ref_per_token_logps: ``[B, T]``, the reference's log-probabilities.
            old_per_token_logps: ``[B, T]``, of the policy that the ratio is to; the current one by default.
            ref_input, ref_weight, ref_bias: the reference's hidden states and ``lm_head`` instead.
            vllm_is_ratio: ``[B]``, ``[B, 1]`` or ``[B, T]``, correction for a sampler with other probabilities.
            num_items_in_batch: completion tokens over all processes and accumulated batches, for losses that divide
                by them; this batch's own by default.
            sampling_per_token_logps: ``[B, T]``, of the sampler, for the off-policy mask; those of the old policy by
                default. NaN where the sampler had none.

        Returns:
            The loss (0-dim, fp32) and :class:`PolicyMetrics` (:class:`PolicyMetricsWithoutKL` for ``beta=0``).

        Raises:
            TypeError, ValueError: shapes or dtypes that do not fit together, or a missing reference.
        """
        mask = self._check(_input, lin_weight, selected_token_ids, attention_mask, bias)
        shape = tuple(mask.shape)
        check_tensor("advantages", advantages)
        advantages = _per_token("advantages", advantages, shape, column=True)
        given = {
            "old_logps": _per_token("old_per_token_logps", old_per_token_logps, shape),
            "is_ratio": _per_token("vllm_is_ratio", vllm_is_ratio, shape, column=True),
            "ref_logps": _per_token("ref_per_token_logps", ref_per_token_logps, shape),
            "sampling_logps": _per_token("sampling_per_token_logps", sampling_per_token_logps, shape),
        }
        check_device(lin_weight, advantages=advantages, **{k: v for k, v in given.items() if v is not None})
        self._check_reference(given["ref_logps"], ref_input, ref_weight, ref_bias, selected_token_ids)
        labels = selected_token_ids.masked_fill(~mask, self.ignore_index)
        if self.beta and given["ref_logps"] is None and ref_input is not None and ref_weight is not None:
            with torch.no_grad():
                found = linear_statistics(
                    ref_input, ref_weight, labels, bias=ref_bias, transform=self.transform, options=self._options(shape)
                )
            given["ref_logps"] = found.logp
        # Padding may hold anything, NaN too.
        inputs = {
            name: torch.where(mask, value.expand(shape), 0.0) for name, value in given.items() if value is not None
        }
        advantages = torch.where(mask, advantages.expand(shape), 0.0)
        normaliser = LOSS_TYPES[self.loss_type][1]
        # Only those that divide by it ask all processes.
        items = _items(mask, num_items_in_batch) if normaliser == "items" else mask.sum()
        weights = NORMALISERS[normaliser](mask.float(), self.max_completion_length, items)
        head = {"bias": bias, "transform": self.transform, "options": self._options(shape)}
        if self._takes_tokens_apart():
            loss, logps = self._one_pass(_input, lin_weight, labels, weights, mask, advantages, inputs, head)
        else:
            loss, logps = self._all_tokens(
                _input, lin_weight, labels, weights, mask, advantages, inputs, given["is_ratio"], head
            )
        return loss.float(), self._metrics(logps, mask, advantages, inputs)

    def _takes_tokens_apart(self) -> bool:
        return (
            self.importance_sampling_level == "token"
            and self.loss_type != "vespo"
            and self.top_entropy_quantile == 1.0
            and self.off_policy_mask_threshold is None
        )

    def _coef(self) -> float:
        return self.entropy_coef.coef if isinstance(self.entropy_coef, AdaptiveEntropy) else self.entropy_coef

    def _wants_entropy(self) -> bool:
        return isinstance(self.entropy_coef, AdaptiveEntropy) or self.entropy_coef != 0.0

    def _one_pass(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        mask: Tensor,
        advantages: Tensor,
        inputs: dict[str, Tensor],
        head: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Loss and log-probabilities ``[B, T]``, every token by itself."""
        per_token = {**inputs, "weights": weights, "advantages": advantages}
        bonus = self._wants_entropy()
        coef = self._coef() / mask.sum().clamp(min=1) if bonus else None

        def token_loss(s: Statistics, labels: Tensor, weights: Tensor, advantages: Tensor, **inputs: Tensor) -> Tensor:
            log_ratio = s.logp - inputs.get("old_logps", s.logp.detach())
            losses = weights * self._terms(log_ratio, s.logp, advantages, inputs)
            return losses if coef is None else losses - coef * s.entropy

        names = ("logp", "entropy") if bonus else ("logp",)
        loss, found = linear_token_loss(hidden, weight, labels, token_loss, names, token_inputs=per_token, **head)
        if bonus and isinstance(self.entropy_coef, AdaptiveEntropy) and self.training:
            self.entropy_coef.observe(found.entropy.sum(), mask.sum())
        return loss, found.logp

    def _all_tokens(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        mask: Tensor,
        advantages: Tensor,
        inputs: dict[str, Tensor],
        is_ratio: Tensor | None,
        head: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """The same, from all tokens' statistics."""
        bonus, by_entropy = self._wants_entropy(), self.top_entropy_quantile < 1.0
        found = linear_statistics(
            hidden,
            weight,
            labels,
            ("logp", "entropy") if bonus else ("logp",),
            metrics=("entropy",) if by_entropy else (),
            **head,
        )
        logps, number = found.logp, mask.float()
        log_ratio = logps - inputs.get("old_logps", logps.detach())
        level = RATIOS[self.importance_sampling_level](log_ratio, number)
        keep = mask
        if by_entropy:
            entropy = found.entropy.detach()
            keep = keep & (entropy >= _quantile(entropy[mask], 1 - self.top_entropy_quantile))
        acting = keep
        if self.off_policy_mask_threshold is not None:
            sampler = inputs.get("sampling_logps", inputs.get("old_logps", logps.detach()))
            drift = (torch.nan_to_num(sampler, nan=0.0) - logps.detach()) * ~sampler.isnan() * number
            drift = drift.sum(-1, keepdim=True) / _lengths(number)
            acting = acting & ((advantages >= 0) | (drift <= self.off_policy_mask_threshold))
        scaled = advantages * acting
        if self.loss_type == "vespo":
            scaled = scaled * vespo_weights(log_ratio, number, advantages, is_ratio, self.policy)
        loss = (weights * self._terms(level, logps, scaled, inputs)).sum()
        if bonus:
            total, tokens = (found.entropy * keep).sum(), keep.sum()
            loss = loss - self._coef() * total / tokens.clamp(min=1)
            if isinstance(self.entropy_coef, AdaptiveEntropy) and self.training:
                self.entropy_coef.observe(total, tokens)
        return loss, logps.detach()

    def _terms(self, log_ratio: Tensor, logps: Tensor, advantages: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """``-objective + beta kl`` of tokens."""
        objective = OBJECTIVES[LOSS_TYPES[self.loss_type][0]](log_ratio, logps, advantages, self.policy)
        if "is_ratio" in inputs and self.loss_type != "vespo":  # whose weights have it
            objective = objective * inputs["is_ratio"]
        if not self.beta or "ref_logps" not in inputs:
            return -objective
        kl = _k3(inputs["ref_logps"] - logps)
        return self.beta * (kl * _ratio(log_ratio) if self.use_bias_correction_kl else kl) - objective

    @torch.no_grad()
    def _metrics(
        self, logps: Tensor, mask: Tensor, advantages: Tensor, inputs: dict[str, Tensor]
    ) -> PolicyMetrics | PolicyMetricsWithoutKL:
        number = mask.float()
        tokens = number.sum().clamp(min=1)
        log_ratio = logps - inputs["old_logps"] if "old_logps" in inputs else torch.zeros_like(logps)
        ratio = _ratio(RATIOS[self.importance_sampling_level](log_ratio, number))
        cut = _CUT.get(LOSS_TYPES[self.loss_type][0])
        clipped = torch.zeros_like(mask) if cut is None else cut(ratio, advantages, self.policy) & mask
        clip_ratio = clipped.sum() / tokens
        if not self.beta:
            return PolicyMetricsWithoutKL(clip_ratio)
        kl = _k3(inputs["ref_logps"] - logps) if "ref_logps" in inputs else torch.zeros_like(logps)
        kl = kl * ratio if self.use_bias_correction_kl else kl
        return PolicyMetrics(torch.where(mask, kl, 0.0).sum() / tokens, clip_ratio)

    def _options(self, shape: tuple[int, ...]) -> EngineOptions:
        if self.chunk_size is None:
            return self.options
        return replace(self.options, chunk_size=max(1, self.chunk_size * shape[1]))

    def _check(
        self, hidden: Tensor, weight: Tensor, token_ids: Tensor, attention_mask: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The mask ``[B, T]`` as bool, if everything fits."""
        check_head((hidden,), weight, (token_ids,), bias)
        check_tensor("attention_mask", attention_mask)
        if token_ids.dim() != 2:
            raise ValueError(
                f"selected_token_ids must be [batch, tokens], one row per completion, got {tuple(token_ids.shape)}."
            )
        if attention_mask.shape != token_ids.shape:
            raise ValueError(
                f"attention_mask must be {tuple(token_ids.shape)}, as selected_token_ids, got "
                f"{tuple(attention_mask.shape)}."
            )
        check_device(weight, attention_mask=attention_mask)
        mask = attention_mask != 0
        # No probability is asked of what stands for no token, whatever the mask says.
        return mask & (token_ids != self.ignore_index)

    def _check_reference(
        self,
        ref_logps: Tensor | None,
        ref_input: Tensor | None,
        ref_weight: Tensor | None,
        ref_bias: Tensor | None,
        token_ids: Tensor,
    ) -> None:
        if not self.use_ref_model and (ref_logps is not None or ref_input is not None):
            raise ValueError("a reference was given to a GRPO loss that was built without one (use_ref_model=False).")
        if ref_logps is not None and ref_input is not None:
            message = "both ref_per_token_logps and ref_input were given: the log-probabilities are used."
            warnings.warn(message, stacklevel=3)
            return
        if self.beta and self.use_ref_model and ref_logps is None and ref_input is None:
            raise ValueError(
                f"beta={self.beta} weighs the divergence from a reference, but there is none: give "
                "ref_per_token_logps, or ref_input and ref_weight, or build the loss with beta=0.0."
            )
        if ref_input is not None:
            if ref_weight is None:
                raise ValueError("there is ref_input, but no ref_weight= to project it.")
            try:
                check_head((ref_input,), ref_weight, (token_ids,), ref_bias)
            except (TypeError, ValueError) as error:
                raise type(error)(f"of the reference model (ref_input, ref_weight, ref_bias): {error}") from None


def _k3(d: Tensor) -> Tensor:
    """``exp(d) - d - 1``."""
    d = d.clamp(max=_MAX_EXPONENT)
    return torch.expm1(d) - d


def _per_token(name: str, value: Any, shape: tuple[int, ...], column: bool = False) -> Any:
    """``[B, T]``, or ``[B, 1]`` where one value per completion will do; a constant for the gradient."""
    if value is None:
        return None
    check_tensor(name, value)
    if column and value.shape == shape[:1]:
        value = value[:, None]
    if value.shape != shape and not (column and value.shape == (shape[0], 1)):
        allowed = f"[{shape[0]}], [{shape[0]}, 1] or {list(shape)}" if column else f"{list(shape)}"
        raise ValueError(f"{name} must be {allowed}, as the completions, got {list(value.shape)}.")
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def _items(mask: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """This process's share of the tokens that a loss is divided by."""
    if num_items_in_batch is None:
        total = sum_over_processes(mask.sum().float())
    else:
        total = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=mask.device)
        if total.numel() != 1:
            raise ValueError(f"num_items_in_batch must be one number, got {list(total.shape)}.")
        total = total.reshape(())
    return (total / world_size()).clamp(min=1)


def _quantile(values: Tensor, share: float) -> Tensor:
    """Of all processes' values; infinite if there are none."""
    values = gather_over_processes(values)
    if not values.numel():
        return values.new_tensor(math.inf)
    # torch.quantile takes no more than 16 million.
    ordered, at = values.sort().values, share * (values.numel() - 1)
    low, high = math.floor(at), math.ceil(at)
    return torch.lerp(ordered[low], ordered[high], at - low)
