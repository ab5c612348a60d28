"""Losses on single completions, each marked desirable or not: KTO, APO-zero, BCO. B completions.

All are ``mean_i w_i f(s_i (beta logratio_i - shift))`` with ``s_i = 1`` for desirable and ``-1`` for undesirable ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine import Statistics
from liger_losses.chunked.engine.checks import check_device, check_head, check_names, check_range, check_tensor
from liger_losses.chunked.engine.processes import sum_over_processes
from liger_losses.chunked.losses.completions import CompletionLoss, Completions, as_completions, sequence_logps

#: ``f`` of each loss, as a function of the margin.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    # 1 - sigmoid: KTO (arXiv:2402.01306, eq. 7), APO-zero without pairs (arXiv:2408.06266, eq. 7)
    "kto": lambda margin: torch.sigmoid(-margin),
    "apo_zero_unpaired": lambda margin: torch.sigmoid(-margin),
    # binary cross-entropy: BCO (arXiv:2404.04656, eq. 9)
    "bco": lambda margin: -F.logsigmoid(margin),
}


class UnpairedMetrics(NamedTuple):
    """What Liger's losses on single completions return beside the loss, in its order: sums over the batch, detached.

    The sums of the logits are over tokens that carry loss.
    """

    chosen_logps_sum: Tensor
    rejected_logps_sum: Tensor
    chosen_logits_sum: Tensor
    rejected_logits_sum: Tensor
    chosen_rewards_sum: Tensor
    rejected_rewards_sum: Tensor


def total_and_count(values: Tensor) -> Tensor:
    """Sum and number of all processes' values (any shape), ``[2]``."""
    return sum_over_processes(torch.stack([values.sum(), values.new_tensor(float(values.numel()))]))


def mean_over_processes(values: Tensor) -> Tensor:
    """The mean ``[]`` of all processes' values (any shape): their sum over their number; 0 if there are none."""
    total, count = total_and_count(values)
    return total / count.clamp(min=1)


class UnpairedPreferenceLoss(CompletionLoss):
    """Base of losses on single completions; see this module for the formula.

    Args:
        ignore_index, beta, average_log_prob, use_ref_model, chunk_size, compiled, options: as in
            :class:`liger_losses.chunked.losses.completions.CompletionLoss`.
        loss_type: one of :data:`LOSSES`.
        desirable_weight, undesirable_weight: ``w`` of each kind, not negative.
    """

    metrics: ClassVar[tuple[str, ...]] = ("mean_logit",)

    def __init__(
        self,
        *,
        loss_type: str,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        **options: Any,
    ) -> None:
        check_names([loss_type], LOSSES, "loss_type")
        check_range("desirable_weight", desirable_weight, 0.0, float("inf"))
        check_range("undesirable_weight", undesirable_weight, 0.0, float("inf"))
        super().__init__(**options)
        self.loss_type = loss_type
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def reward_shift(self, rewards: Tensor) -> Tensor:
        """What rewards ``[B]``, detached, are compared with: a constant for the gradient, ``[]`` or ``[B]``."""
        return torch.zeros_like(rewards[:1].sum())

    def loss_of(
        self,
        weight: Tensor,
        parts: Sequence[Completions],
        desirable: Sequence[Tensor],
        bias: Tensor | None,
        ref_weight: Tensor | None,
        ref_bias: Tensor | None,
        sample_weights: Tensor | None,
        shift: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, UnpairedMetrics]:
        """The loss of checked parts, and metrics; ``shift`` makes one of the detached rewards."""
        labels = [self.labels(part.labels) for part in parts]
        masks = [part != self.ignore_index for part in labels]
        found = self.sequence_statistics(weight, bias, [part.hidden_states for part in parts], labels, self.metrics)
        logps = self._sums([part.logp for part in found], masks)
        reference = self.reference_logps(parts, labels, masks, ref_weight, ref_bias)
        wanted = torch.cat(list(desirable))
        rewards = self.beta * (logps - reference)
        compared = shift(rewards.detach())
        margin = torch.where(wanted, 1.0, -1.0) * (rewards - compared)
        losses = LOSSES[self.loss_type](margin)
        losses = losses * torch.where(wanted, self.desirable_weight, self.undesirable_weight)
        if sample_weights is not None:
            losses = losses * sample_weights.detach()
        loss = losses.sum() / max(len(losses), 1)
        return loss.float(), self._metrics(logps, rewards, found, wanted, weight.shape[0])

    def _sums(self, logps: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
        """Log-probabilities ``[B]`` of all parts, from those per token; those per completion are taken as they are."""
        return torch.cat(
            [
                sequence_logps(values, mask, average=self.average_log_prob) if values.dim() == 2 else values
                for values, mask in zip(logps, masks, strict=True)
            ]
        )

    def reference_logps(
        self,
        parts: Sequence[Completions],
        labels: Sequence[Tensor],
        masks: Sequence[Tensor],
        ref_weight: Tensor | None,
        ref_bias: Tensor | None,
    ) -> Tensor:
        """The reference's log-probabilities ``[B]``; 0 without one."""
        hidden = [part.ref_hidden_states for part in parts if part.ref_hidden_states is not None]
        logps = [part.ref_logps.detach() for part in parts if part.ref_logps is not None]
        if hidden and ref_weight is not None:
            with torch.no_grad():
                found = self.sequence_statistics(ref_weight, ref_bias, hidden, labels)
            logps = [part.logp for part in found]
        return self._sums(logps or [torch.zeros_like(mask, dtype=torch.float32) for mask in masks], masks)

    def check_parts(
        self,
        parts: Sequence[tuple[str, Completions]],
        weight: Tensor,
        bias: Tensor | None,
        ref_weight: Tensor | None,
        ref_bias: Tensor | None,
    ) -> None:
        """Raise TypeError or ValueError for completions that do not fit the head, each other, or their reference."""
        for which, part in parts:
            if part.labels.dim() != 2:
                raise ValueError(f"labels of the {which} completions must be [B, T], got {tuple(part.labels.shape)}.")
        batches = [part for _, part in parts]
        check_head([part.hidden_states for part in batches], weight, [part.labels for part in batches], bias)
        hidden = [part.ref_hidden_states for part in batches if part.ref_hidden_states is not None]
        if hidden and len(hidden) < len(batches):
            raise ValueError("give ref_hidden_states for all completions, or for none of them.")
        self.check_reference(
            [(which, part.labels, part.ref_logps) for which, part in parts],
            hidden or None,
            [part.labels for part in batches],
            ref_weight,
            ref_bias,
        )

    @torch.no_grad()
    def _metrics(
        self, logps: Tensor, rewards: Tensor, found: Sequence[Statistics], wanted: Tensor, vocab_size: int
    ) -> UnpairedMetrics:
        logits = torch.cat([part.mean_logit.sum(-1) for part in found]) * vocab_size
        return UnpairedMetrics(
            *(
                torch.where(mask, value.detach(), 0.0).sum().float()
                for value in (logps, logits, rewards)
                for mask in (wanted, ~wanted)
            )
        )


def _batch(
    loss: UnpairedPreferenceLoss, first: Any, second: Any, third: Any, preference_labels: Any, stacked: dict[str, Any]
) -> tuple[Tensor, list[tuple[str, Completions]], list[Tensor]]:
    """Both call forms in one: the weight, named completions, and which of them are desirable, ``[B]`` bool each."""
    if isinstance(second, Tensor):
        check_tensor("_input", first)
        check_tensor("target", third)
        weight, given = second, [("given", Completions(first, third, stacked["ref_input"], stacked["ref_logps"]))]
        if first.dim() != 3:
            raise ValueError(f"_input must be [batch, tokens, hidden_size], got {tuple(first.shape)}.")
    else:
        if any(value is not None for value in stacked.values()):
            raise ValueError(
                "with completions, give the reference in Completions(..., ref_hidden_states=, ref_logps=)."
            )
        check_tensor("weight", first)
        weight = first
        if third is not None:
            if preference_labels is not None:
                raise ValueError(
                    "desirable and undesirable completions were given apart; preference_labels= would mark them again."
                )
            sides = [as_completions(second, "desirable"), as_completions(third, "undesirable")]
            marks = [torch.full(side.labels.shape[:1], i == 0, device=weight.device) for i, side in enumerate(sides)]
            return weight, list(zip(("desirable", "undesirable"), sides, strict=True)), marks
        given = [("given", as_completions(second, "given"))]
    count = given[0][1].labels.shape[0]
    if preference_labels is None:
        raise ValueError(
            f"{type(loss).__name__} needs to know which completions are desirable: give preference_labels=, a bool "
            "for each, or desirable and undesirable completions apart."
        )
    check_tensor("preference_labels", preference_labels)
    if preference_labels.shape != (count,):
        raise ValueError(
            f"preference_labels must be [{count}], one per completion, got {tuple(preference_labels.shape)}."
        )
    check_device(weight, preference_labels=preference_labels)
    if preference_labels.dtype != torch.bool:
        raise TypeError(
            f"preference_labels must be bool, true for desirable completions, got {preference_labels.dtype}; compare "
            "them with what marks these."
        )
    return weight, given, [preference_labels]


def _per_completion(name: str, value: Any, count: int, like: Tensor) -> Tensor:
    """A number or tensor, as a tensor ``[]`` or ``[count]``, a constant for the gradient."""
    if not isinstance(value, Tensor):
        check_range(name, value, 0.0, float("inf"))
    value = torch.as_tensor(value, device=like.device).detach()
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    if value.numel() == 1:
        return value.reshape(())
    if value.shape != (count,):
        raise ValueError(f"{name} must be one number or [{count}], one per completion, got {tuple(value.shape)}.")
    return value


class LigerFusedLinearKTOLoss(UnpairedPreferenceLoss):
    """KTO: ``mean_i w_i (1 - sigmoid(s_i beta (logratio_i - kl)))``, ``s_i = 1`` for desirable, ``-1`` for undesirable.

    Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7. ``kl`` estimates the policy's divergence from the reference: the
    mean log-ratio of completions that belong to other prompts, over all processes, and at least 0; a constant for the
    gradient. ``loss_type="apo_zero_unpaired"`` has none (APO-zero without pairs, arXiv:2408.06266, eq. 7).

    Args:
        ignore_index: the label of tokens that carry no loss.
        beta: temperature of the implicit reward.
        compiled: accepted from code written for Liger; there is nothing to compile.
        use_ref_model: whether there is a reference model.
        average_log_prob: divide each completion's log-probability by its length.
        chunk_size: at most so many completions' logits in a block of the forward pass, where more would fit.
        loss_type: ``kto`` or ``apo_zero_unpaired``.
        desirable_weight, undesirable_weight: ``w`` of each kind; see the paper's eq. 9 for unbalanced data.
        options: as in :class:`liger_losses.chunked.losses.base.ChunkedLoss`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int | None = None,
        *,
        loss_type: str = "kto",
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        **options: Any,
    ) -> None:
        check_names([loss_type], ("kto", "apo_zero_unpaired"), "loss_type")
        super().__init__(
            loss_type=loss_type,
            desirable_weight=desirable_weight,
            undesirable_weight=undesirable_weight,
            ignore_index=ignore_index,
            beta=beta,
            average_log_prob=average_log_prob,
            use_ref_model=use_ref_model,
            chunk_size=chunk_size,
            compiled=compiled,
            **options,
        )

    def forward(  # type: ignore[override]
        self,
        _input: Any,
        lin_weight: Any,
        target: Any = None,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | float | None = None,
        *,
        ref_logps: Tensor | None = None,
        kl_completions: Any = None,
    ) -> tuple[Tensor, UnpairedMetrics]:
        """The loss of completions, in one of three forms.

        - ``loss(weight, desirable, undesirable)``: two :class:`Completions` or ``(hidden_states, labels)`` tuples;
        - ``loss(weight, completions, preference_labels=...)``: one, and which of them are desirable;
        - ``loss(hidden_states, weight, labels, bias, preference_labels, ...)``: ``[B, T, H]``, ``[V, H]``, ``[B, T]``.

        Args:
            _input: ``weight [V, H]``, or hidden states.
            lin_weight: completions, or ``weight``.
            target: undesirable completions, or labels.
            bias: ``[V]``.
            preference_labels: ``[B]`` bool, true for desirable completions.
            ref_input, ref_logps: the reference's hidden states, or its log-probabilities (last form).
            ref_weight, ref_bias: the reference model's ``lm_head``.
            kl: the divergence, one number or ``[B]``, at least 0; 0.0 for none.
            kl_completions: what to estimate it from instead: completions put after other prompts, with their
                reference.

        Returns:
            The loss (0-dim, fp32) and :class:`UnpairedMetrics`.

        Raises:
            TypeError, ValueError: inputs that do not fit together; neither or both of ``kl`` and ``kl_completions``.
        """
        stacked = {"ref_input": ref_input, "ref_logps": ref_logps}
        weight, parts, desirable = _batch(self, _input, lin_weight, target, preference_labels, stacked)
        self.check_parts(parts, weight, bias, ref_weight, ref_bias)
        count = sum(len(marks) for marks in desirable)
        needs_kl = self.loss_type == "kto"
        if needs_kl and (kl is None) == (kl_completions is None):
            raise ValueError(
                "KTO compares rewards with the policy's divergence from the reference: give kl_completions= "
                "(completions put after other prompts, with their reference) or kl= (a number; 0.0 for none), "
                f"{'one of them' if kl is None else 'not both'}."
            )
        if not needs_kl and not (kl is None and kl_completions is None):
            raise ValueError(f"loss_type={self.loss_type!r} has no divergence term: leave out kl and kl_completions.")
        divergence = None if kl is None else _per_completion("kl", kl, count, weight)
        if kl_completions is not None:
            divergence = self.divergence(weight, kl_completions, bias, ref_weight, ref_bias)

        def shift(rewards: Tensor) -> Tensor:
            return self.reward_shift(rewards) if divergence is None else self.beta * divergence

        sides = [part for _, part in parts]
        return self.loss_of(weight, sides, desirable, bias, ref_weight, ref_bias, None, shift)

    @torch.no_grad()
    def divergence(
        self,
        weight: Tensor,
        kl_completions: Any,
        bias: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> Tensor:
        """``max(0, mean log-ratio)`` of completions put after other prompts, over all processes, 0-dim.

        What :meth:`forward` does with ``kl_completions``; to log it, take it here and pass it as ``kl``.
        """
        part = as_completions(kl_completions, "mismatched")
        self.check_parts([("mismatched", part)], weight, bias, ref_weight, ref_bias)
        labels = [self.labels(part.labels)]
        masks = [targets != self.ignore_index for targets in labels]
        found = self.sequence_statistics(weight, bias, [part.hidden_states], labels)
        logps = self._sums([statistics.logp for statistics in found], masks)
        reference = self.reference_logps([part], labels, masks, ref_weight, ref_bias)
        return mean_over_processes(logps - reference).clamp(min=0)


class LigerFusedLinearBCOLoss(UnpairedPreferenceLoss):
    """BCO: ``mean_i -w_i log sigmoid(s_i (beta logratio_i - shift))``, ``s_i = 1`` for desirable, ``-1`` for others.

    Jung et al. 2024, arXiv:2404.04656, eq. 9. ``shift`` is the running mean of the rewards: every training batch's
    mean, over all processes, its own included, counts once. It is a buffer, saved with the module; in evaluation
    (:meth:`torch.nn.Module.eval`) it stays. A call that is run again for its gradient (activation checkpointing around
    the loss) would count its batch twice: keep the loss outside.

    Args:
        ignore_index, beta, compiled, use_ref_model, average_log_prob, chunk_size, options: as in
            :class:`LigerFusedLinearKTOLoss`.
    """

    running_shift: Tensor
    batches: Tensor

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            loss_type="bco",
            ignore_index=ignore_index,
            beta=beta,
            average_log_prob=average_log_prob,
            use_ref_model=use_ref_model,
            chunk_size=chunk_size,
            compiled=compiled,
            **options,
        )
        self.register_buffer("running_shift", torch.zeros((), dtype=torch.float32))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def reward_shift(self, rewards: Tensor) -> Tensor:
        shift, batches = (value.to(rewards.device) for value in (self.running_shift, self.batches))
        if self.training:
            total, count = total_and_count(rewards)
            # A batch without completions, or with a reward that is no number, says nothing of the mean.
            counts = (count > 0) & total.isfinite()
            batches = batches + counts
            mean = torch.where(counts, total / count.clamp(min=1), 0.0)
            shift = torch.where(counts, shift + (mean - shift) / batches.clamp(min=1), shift).float()
            self.running_shift, self.batches = shift, batches
        return shift

    def forward(  # type: ignore[override]
        self,
        _input: Any,
        lin_weight: Any,
        target: Any = None,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        *,
        ref_logps: Tensor | None = None,
        sample_weights: Tensor | None = None,
    ) -> tuple[Tensor, UnpairedMetrics]:
        """The loss of completions, in one of the three forms of :meth:`LigerFusedLinearKTOLoss.forward`.

        Args:
            _input, lin_weight, target, bias, preference_labels, ref_input, ref_weight, ref_bias, ref_logps: as there.
            sample_weights: ``[B]``, desirable completions first where they are given apart: density ratios of
                undesirable prompts, say (the paper's section 4.3).

        Returns:
            The loss (0-dim, fp32) and :class:`UnpairedMetrics`.

        Raises:
            TypeError, ValueError: inputs that do not fit together.
        """
        stacked = {"ref_input": ref_input, "ref_logps": ref_logps}
        weight, parts, desirable = _batch(self, _input, lin_weight, target, preference_labels, stacked)
        self.check_parts(parts, weight, bias, ref_weight, ref_bias)
        if sample_weights is not None:
            check_tensor("sample_weights", sample_weights)
            count = sum(len(marks) for marks in desirable)
            check_device(weight, sample_weights=sample_weights)
            if sample_weights.shape != (count,):
                raise ValueError(
                    f"sample_weights must be [{count}], one per completion, got {tuple(sample_weights.shape)}."
                )
        sides = [part for _, part in parts]
        return self.loss_of(weight, sides, desirable, bias, ref_weight, ref_bias, sample_weights, self.reward_shift)
