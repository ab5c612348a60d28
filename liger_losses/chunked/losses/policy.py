"""The GRPO family on the output of ``lm_head``. B completions, T tokens of the longest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from liger_losses.caller import warn
from liger_losses.checks import check_device, check_range, check_shaped, check_tensor, host_checks
from liger_losses.chunked import Head, TeacherTopK, TokenSupport
from liger_losses.chunked.core.compiled import in_graphs, loss_sum, statistics
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.core.inputs import kept_statistics, target_of
from liger_losses.chunked.core.stream import counted_once
from liger_losses.chunked.core.target import TokenLoss
from liger_losses.chunked.losses import policy_objectives as objectives
from liger_losses.chunked.losses.base import AnyHead, LossOptions, constructor
from liger_losses.chunked.losses.completion_loss import (
    CompletionLoss,
    Completions,
    Reference,
    naming_the_reference,
    states_and_head,
)
from liger_losses.chunked.losses.policy_objectives import PolicyInputs, PolicyTensors
from liger_losses.chunked.losses.policy_tables import PolicyOptions
from liger_losses.chunked.losses.sums import sum_over_processes
from liger_losses.kernels.divergence_forms import finite_logs


class AdaptiveEntropy:
    """A coefficient of the entropy bonus that rises while the entropy is at or below a target (arXiv:2505.22312).

    A batch counts when its loss is called, so one whose loss runs inside of activation checkpointing counts twice.

    Args:
        coef: the initial coefficient.
        target: nats per token.
        low, high: bounds of the coefficient.
        delta: the change of the coefficient in every :meth:`step`.
    """

    def __init__(
        self, coef: float = 0.0, *, target: float, low: float = 0.0, high: float = 1.0, delta: float = 0.005
    ) -> None:
        for name, value in {"coef": coef, "target": target, "low": low, "delta": delta}.items():
            check_range(name, value, 0.0, math.inf)
        check_range("high", high, low, math.inf)
        self.value, self.target, self.low, self.high, self.delta = coef, target, low, high, delta
        self.last_entropy = math.inf
        self._window = torch.zeros(2, dtype=torch.float32)
        self._update_tensor()

    def _update_tensor(self) -> None:
        #: :attr:`coef` for torch.compile, which would compile a function again for every other number.
        self.coef_tensor = torch.tensor(self.coef, dtype=torch.float32, device="cpu")

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint; the loss that holds this object saves it too."""
        return {"value": self.value, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint."""
        self.value, self.last_entropy = state["value"], state["last_entropy"]
        self._update_tensor()

    @property
    def coef(self) -> float:
        """The coefficient for the next batches: 0 while entropy is above the target, or not known yet."""
        return self.value if self.last_entropy <= self.target else 0.0

    def observe(self, entropy_sum: Tensor, tokens: Tensor) -> None:
        """Add a batch to the window since the last step."""
        values = torch.stack([entropy_sum.detach().float(), tokens.float()])
        self._window = self._window.to(values.device) + values

    def step(self) -> None:
        """Update the coefficient from the window's mean entropy over all processes; call it after optimizer steps."""
        # All processes take part, including those without a batch.
        total, tokens = sum_over_processes(self._window).tolist()
        self._window = torch.zeros_like(self._window)
        if not tokens:
            return
        self.last_entropy = total / tokens
        change = self.delta if self.last_entropy <= self.target else -self.delta
        self.value = min(max(self.value + change, self.low), self.high)
        self._update_tensor()


@in_graphs
def token_loss(
    values: Mapping[str, Tensor],
    o: PolicyOptions,
    weights: Tensor,
    entropy_weight: Tensor | None = None,
    nll_weights: Tensor | None = None,
    **tensors: Tensor,
) -> Tensor:
    """The loss of each token ``[n]``, where its term depends on that token alone."""
    logp = values["logp"]
    terms = objectives.policy_terms(logp, tensors, o, topk=values.get("selected_logps"))
    losses = objectives.weighted(logp, terms, weights, nll_weights)
    return losses if entropy_weight is None else losses - entropy_weight * values["entropy"]


def live_tokens(inputs: PolicyInputs) -> Tensor | None:
    """``[B, T]``, false for tokens whose term is 0, with an advantage or an importance ratio of 0; ``None`` for losses
    with other terms."""
    o, ratio = inputs.options, inputs.tensors.get("is_ratio")
    other_terms = (o.beta and "ref_logps" in inputs.tensors) or o.log_ratio_penalty or o.positive_nll or o.divergence
    if other_terms or not o.objective.of_advantages:
        return None
    live = inputs.advantages != 0
    return live if ratio is None else live & (ratio != 0)


in_graphs(PolicyOptions)


#: What a call names the arguments of :func:`grpo_loss`.
_NAMES = {"old_logps": "old_per_token_logps", "ref_logps": "ref_per_token_logps", "is_ratio": "vllm_is_ratio"}
_NAMES["sampling_logps"] = "sampling_per_token_logps"


class PolicyMetrics(NamedTuple):
    """Means over completion tokens, detached, in liger-kernel's order."""

    kl: Tensor
    clip_ratio: Tensor


class PolicyMetricsWithoutKL(NamedTuple):
    """:class:`PolicyMetrics` for ``beta=0``."""

    clip_ratio: Tensor


class GRPOOptions(PolicyOptions, LossOptions):
    """The options of :class:`LigerFusedLinearGRPOLoss`."""

    streams_chunks = False

    compiled: bool = True
    use_ref_model: bool = True
    top_entropy_quantile: float = 1.0
    entropy_coef: float | AdaptiveEntropy = 0.0

    def __post_init__(self) -> None:
        LossOptions.__post_init__(self)
        PolicyOptions.__post_init__(self)
        if self.shift:
            states = "the hidden states that predict the completions, such as hidden_states[:, :-1] of the whole text"
            raise ValueError(f"GRPO has no shift, got shift={self.shift}; leave it out, and pass {states}.")
        if self.ignore_index >= 0:
            raise ValueError(f"ignore_index must not be a token id (>= 0) here, got {self.ignore_index}; leave it out.")
        check_range("top_entropy_quantile", self.top_entropy_quantile, 0.0, 1.0, open_low=True)
        if not isinstance(self.entropy_coef, AdaptiveEntropy):
            check_range("entropy_coef", self.entropy_coef, -math.inf, math.inf)


class LigerFusedLinearGRPOLoss(CompletionLoss):
    """GRPO and its variants: :func:`grpo_loss`, minus ``entropy_coef`` times the mean entropy.

    If the term of every token depends only on this token, the loss takes one pass. Ratios of whole completions,
    ``vespo``, and masks by entropy or by divergence need all tokens of a completion first, and take two passes.

    Args:
        loss_type: a name from :data:`LOSS_TYPES`, or one that :func:`liger_losses.register_objective` made.
        beta: weight of the KL divergence from the reference.
        epsilon_low, epsilon_high: bounds of the ratio, ``[1 - epsilon_low, 1 + epsilon_high]``.
        importance_sampling_level: ``token``, or how the ratio of a completion is taken.
        sampler_term: a name from :data:`SAMPLER_TERMS`, and ``sampler_coef`` its factor: calls then have
            ``sampler_topk=``.
        normalizer, token_mask, kl_estimator: names that replace the loss type's.
        max_completion_length, ..., objective_options: the other fields of :class:`PolicyOptions`, which explains them.
        temperature: divides the logits.
        top_entropy_quantile: only this share of the tokens, those with the highest entropies over all processes, have a
            policy objective and an entropy bonus (arXiv:2506.01939).
        entropy_coef: weight of the bonus for the mean entropy, or an :class:`AdaptiveEntropy`.
        use_ref_model: False ignores ``beta``: the loss has no KL term and takes no reference.
        compiled, chunk_size: accepted for code written for liger-kernel, without effect. ``workspace=`` bounds the
            memory.
        options: as in :class:`liger_losses.ChunkedLoss`.
    """

    reference_forms: ClassVar[str] = (
        "Pass ref_per_token_logps=, or the reference's hidden states as ref_input= and its head as ref_weight=. Or "
        "build the loss with beta=0.0 or use_ref_model=False (but loss_type='ref_kl' learns from a reference)."
    )
    forms = (
        ("head", "hidden_states", "labels", "mask", "advantages"),
        ("head", "hidden_states", "selected_token_ids", "attention_mask", "advantages"),
    )

    @constructor(GRPOOptions)
    def __init__(self) -> None: ...

    settings: GRPOOptions
    positions = (
        "beta compiled use_ref_model chunk_size epsilon_low epsilon_high loss_type max_completion_length "
        "importance_sampling_level sapo_temperature_pos sapo_temperature_neg temperature delta use_bias_correction_kl "
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
    )

    @property
    def needs_reference(self) -> str | None:
        o = self.settings
        if o.row.of_reference:
            return f"loss_type={o.loss_type!r} learns from a reference"
        return "a beta other than 0.0 weighs the divergence from a reference" if o.beta and o.use_ref_model else None

    def get_extra_state(self) -> dict[str, float]:
        """The adaptive coefficient's state, for :meth:`torch.nn.Module.state_dict`."""
        return self.entropy_coef.state_dict() if isinstance(self.entropy_coef, AdaptiveEntropy) else {}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """Load the adaptive coefficient's state, for :meth:`torch.nn.Module.load_state_dict`."""
        if isinstance(self.entropy_coef, AdaptiveEntropy) and state:
            self.entropy_coef.load_state_dict(state)

    @operator
    def forward(  # type: ignore[override]
        self,
        head: AnyHead,
        hidden_states: AnyHead,
        labels: Tensor,
        mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: AnyHead | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        *,
        sampling_per_token_logps: Tensor | None = None,
        sampler_topk: TeacherTopK | None = None,
        support: TokenSupport | None = None,
        temperature: Tensor | None = None,
        prompts: Tensor | None = None,
    ) -> tuple[Tensor, PolicyMetrics | PolicyMetricsWithoutKL]:
        """The loss of completions, ``loss(head, hidden_states, labels, mask, advantages)``.

        Head and hidden states may also come in liger-kernel's order, hidden states first, and by its names (``_input``,
         ``lin_weight``, ``selected_token_ids``, ``attention_mask``).

        Args:
            head, bias: the ``lm_head``, as in :meth:`liger_losses.ChunkedLoss.forward`.
            hidden_states: ``[B, T, H]``, which predict the completions' tokens.
            labels: ``[B, T]`` int64, the completions; ``ignore_index`` is no token.
            mask: ``[B, T]``, 0 for padding and other tokens that do not contribute to the loss. Their values
                have no influence.
            advantages: ``[B]``, or per token ``[B, T]``.
            ref_input, ref_weight, ref_bias: the hidden states and ``lm_head`` of the reference, instead of
                ``ref_per_token_logps``.
            ref_per_token_logps, old_per_token_logps, sampling_per_token_logps, vllm_is_ratio, num_items_in_batch: the
                ``ref_logps``, ``old_logps``, ``sampling_logps``, ``is_ratio`` and ``num_items_in_batch`` of
                :func:`grpo_loss`.
            sampler_topk: the sampler's k most likely tokens at each position, for ``sampler_term``.
            support: the vocabulary entries that the sampler kept for each token. Log-probabilities and entropies of the
                policy, and of a reference that is passed as ``ref_input``, are computed over only these. Pass other
                log-probabilities over the same entries.
            temperature: ``[B, T]``, divides the logits of each token, for policy and reference. The loss's
                ``temperature`` must then be 1.
            prompts: ``[B]`` integers, which prompt each completion answers; see :func:`grpo_loss`.

        Returns:
            The loss (0-dim, fp32) and :class:`PolicyMetrics` (:class:`PolicyMetricsWithoutKL` for ``beta=0``).
        """
        o, coef = self.settings, self._coef
        if not o.use_ref_model:  # as liger-kernel ignores it
            ref_per_token_logps = ref_input = None
        if ref_per_token_logps is not None and ref_input is not None:
            warn("both ref_per_token_logps and ref_input were given: the former are used.")
            ref_input = None
        transform = o.transform
        if temperature is not None:
            self.check_one_temperature(temperature)
            transform = replace(transform, temperature=temperature)
        hidden, layer = states_and_head(hidden_states, head)
        policy = Head.of(layer, bias, transform)
        labels = self._active(policy, hidden, labels, mask)
        selected: dict[str, Any] = {} if sampler_topk is None else self._selected(policy, labels, sampler_topk, support)
        tensors = PolicyTensors(
            advantages,
            labels != o.ignore_index,
            old_logps=old_per_token_logps,
            ref_logps=ref_per_token_logps,
            sampling_logps=sampling_per_token_logps,
            is_ratio=vllm_is_ratio,
            sampler_topk_logps=getattr(sampler_topk, "logps", None),
            num_items_in_batch=num_items_in_batch,
            prompts=prompts,
            group=o.group,
        )
        common = None if o.group is None else self.common_options
        inputs = PolicyInputs(o, tensors, policy.vocabulary_ranks, common, _NAMES)
        reference = Reference(ref_input, ref_weight, ref_bias, (ref_per_token_logps,), transform)
        batch = self.with_reference(("given",), policy, [Completions(hidden, labels, ref_input)], reference)
        target = target_of(hidden, policy, labels, **selected)

        if self.needs_reference and batch.ref_head is not None:
            (target,) = counted_once([target], o.engine)
            inputs.tensors["ref_logps"] = finite_logs(batch.reference_logps(o.engine, [target], support)[0])
        names, share, acting = ["logp"] if coef is None else ["logp", "entropy"], o.top_entropy_quantile, inputs.mask
        names += ["selected_logps"] * len(selected)
        if support is None and inputs.options.separable and share == 1.0:
            live, entropy = live_tokens(inputs), {}
            if coef is not None:
                live, entropy = None, {"entropy_weight": coef / inputs.counted}
            read = {**inputs.weights(hidden.dtype), **entropy, **inputs.of_tokens()}
            loss, (values,) = loss_sum([target], names, [TokenLoss(token_loss, read, {"o": o.values}, live)], o.engine)
        else:
            others = ["entropy"] if share < 1.0 else []
            if support is None:
                (values,) = statistics([target], names, o.engine, others)
            else:
                both = tuple(dict.fromkeys((*names, *others)))
                values = kept_statistics(hidden, policy, labels, support, both, o.engine)
            chosen, copies = None, policy.vocabulary_ranks
            if share < 1.0:
                chosen = acting = objectives.high_entropy_mask(values["entropy"], acting, share, copies=copies)
            loss = objectives.coupled_losses(values["logp"], inputs, chosen, values.get("selected_logps"))
            if coef is not None:
                loss = loss - coef * (acting * values["entropy"]) / inputs.total(acting).clamp(min=1)
        loss = inputs.total(loss)
        if isinstance(o.entropy_coef, AdaptiveEntropy) and self.training:
            o.entropy_coef.observe((values["entropy"] * acting).sum(), acting.sum())
        metrics = objectives.token_metrics(values["logp"], inputs, kl=bool(o.beta))
        means = [inputs.total(metric) / inputs.counted for metric in metrics]
        return loss.float(), PolicyMetrics(*means) if o.beta else PolicyMetricsWithoutKL(*means)

    def _active(self, head: Head, hidden: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """The labels, if everything fits."""
        check_tensor("hidden_states", hidden, allow_dtensor=True)
        check_tensor("labels", labels)
        if labels.dim() != 2 or labels.shape != hidden.shape[:-1]:
            raise ValueError(
                "labels must have one entry per hidden state, [batch, tokens], one row per completion: got "
                f"{tuple(labels.shape)} for hidden states {tuple(hidden.shape)}."
            )
        check_shaped("mask", mask, "label", labels.device, labels.shape)
        check_device("the weight", head.weight.device, labels=labels)
        # ignore_index is no token, whatever the mask says.
        return labels.masked_fill(mask == 0, self.settings.ignore_index)

    def _selected(self, head: Head, labels: Tensor, topk: TeacherTopK, support: Any) -> dict[str, Any]:
        """The sampler's most likely tokens as a target's, if everything fits."""
        if not isinstance(topk, TeacherTopK):
            raise TypeError(f"sampler_topk must be a TeacherTopK(logps, indices), got {type(topk).__name__}.")
        if support is not None or topk.tail != "bucket" or topk.tail_logps is not None:
            raise ValueError(
                "sampler_topk= is TeacherTopK(logps, indices) over the whole vocabulary: leave tail=, tail_logps= and "
                "support= out."
            )
        with naming_the_reference("sampler_topk (there called the teacher)"):
            topk.check(labels.shape, head)
            if self.settings.compact and host_checks(labels.device):
                topk.check_active(labels != self.settings.ignore_index, head.vocab_size)
        return {"selected": topk.indices}

    @property
    def common_options(self) -> dict[str, Any]:
        return {**super().common_options, "entropy_coef": self._coef}

    @property
    def _coef(self) -> Any:
        """The weight of the entropy bonus; ``None`` for losses without one."""
        if not isinstance(self.entropy_coef, AdaptiveEntropy):
            return self.entropy_coef or None
        return self.entropy_coef.coef_tensor if is_dynamo_compiling() else self.entropy_coef.coef
