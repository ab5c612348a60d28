"""Losses on single completions, each marked desirable or not: KTO, APO-zero, BCO. B completions.

All are ``mean_i w_i f(s_i (reward_i - shift))`` with ``reward_i = beta * logratio_i``, and ``s_i = 1`` for desirable
completions and ``-1`` for undesirable ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from liger_losses import checks
from liger_losses.checks import NonNegativeFloat, PositiveFloat
from liger_losses.chunked import Head
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.losses.base import AnyHead, constructor
from liger_losses.chunked.losses.completion_loss import (
    CompletionBatch,
    CompletionInputs,
    CompletionLoss,
    CompletionOptions,
    Reference,
    Side,
    as_completions,
    states_and_head,
)
from liger_losses.chunked.losses.sums import sum_over_processes, wide

#: ``f`` of each loss, as a function of the margin.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    # 1 - sigmoid: KTO (arXiv:2402.01306, eq. 7), APO-zero without pairs (arXiv:2408.06266, eq. 7)
    "kto": lambda margin: torch.sigmoid(-margin),
    "apo_zero_unpaired": lambda margin: torch.sigmoid(-margin),
    # binary cross-entropy: BCO (arXiv:2404.04656, eq. 9)
    "bco": lambda margin: -F.logsigmoid(margin),
}


def unpaired_loss(
    rewards: Tensor,
    desirable: Tensor,
    shift: Tensor | float,
    *,
    loss_type: str,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``w_i f(s_i (reward_i - shift))`` of each completion, ``[B]``, with ``f`` from :data:`LOSSES`.

    Args:
        rewards: ``[B]``, ``beta * (log p - log p_ref)``.
        desirable: ``[B]`` bool: ``s = 1`` where true, ``-1`` elsewhere.
        shift: ``[]`` or ``[B]``, a constant that rewards are compared with.
        loss_type: a name from :data:`LOSSES`.
        desirable_weight, undesirable_weight: the ``w`` of each kind.

    Returns:
        ``[B]``, differentiable by the rewards.

    Raises:
        ValueError: another ``loss_type``.
    """
    checks.check_names([loss_type], LOSSES, "loss_type")
    checks.check_alike(rewards=rewards)
    _check_marks("desirable", desirable)
    desirable = checks.checked_mask("desirable", desirable, "rewards", rewards)
    for name, weight in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        checks.check_number(name, weight, 0.0, math.inf)
    if isinstance(shift, Tensor):
        checks.check_shape_of("shift", shift, "rewards", rewards)
    losses = LOSSES[loss_type](torch.where(desirable, 1.0, -1.0) * (rewards - shift))
    return losses * torch.where(desirable, desirable_weight, undesirable_weight)


def kto_loss(
    logps: Tensor,
    ref_logps: Tensor,
    desirable: Tensor,
    kl: Tensor | float = 0.0,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO of each completion: ``w_i (1 - sigmoid(s_i beta (logp_i - ref_i - kl)))`` (arXiv:2402.01306, eq. 7).

    Args:
        logps, ref_logps: ``[B]``, log-probabilities of completions under policy and reference.
        kl: estimate of the policy's KL divergence from the reference, at least 0, constant; 0 gives unpaired APO-zero.
        desirable, desirable_weight, undesirable_weight: as in :func:`unpaired_loss`, which also describes the result.
    """
    checks.check_number("kl", kl, 0.0, math.inf)
    rewards = _rewards(logps, ref_logps, beta)
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    return unpaired_loss(rewards, desirable, beta * kl, loss_type="kto", **weights)


def _rewards(logps: Tensor, ref_logps: Tensor, beta: float) -> Tensor:
    """``beta (logp - ref)``, checked."""
    checks.check_alike(logps=logps, ref_logps=ref_logps)
    checks.check_number("beta", beta, 0.0, math.inf, open_low=True)
    return beta * (logps - ref_logps)


def bco_loss(
    logps: Tensor, ref_logps: Tensor, desirable: Tensor, shift: Tensor | float = 0.0, *, beta: float = 0.1
) -> Tensor:
    """BCO of each completion: ``-log sigmoid(s_i (beta (logp_i - ref_i) - shift))`` (arXiv:2404.04656, eq. 9).

    Arguments and result as in :func:`kto_loss`; ``shift`` is the running mean of the rewards, constant.
    """
    return unpaired_loss(_rewards(logps, ref_logps, beta), desirable, shift, loss_type="bco")


class UnpairedMetrics(NamedTuple):
    """Detached sums over completions, in liger-kernel's order. Sums of logits are over active tokens."""

    chosen_logps_sum: Tensor
    rejected_logps_sum: Tensor
    chosen_logits_sum: Tensor
    rejected_logits_sum: Tensor
    chosen_rewards_sum: Tensor
    rejected_rewards_sum: Tensor


UnpairedResult: TypeAlias = tuple[Tensor, UnpairedMetrics]


def sum_and_number(values: Tensor) -> Tensor:
    """The sum of all processes' values (any shape), and their number, ``[2]``."""
    return sum_over_processes(torch.stack([values.sum(), values.new_tensor(float(values.numel()))]))


class UnpairedInputs(CompletionInputs, total=False):
    """What calls of :class:`UnpairedPreferenceLoss` may have beside head and completions."""

    preference_labels: Tensor | None
    kl: Tensor | float | None
    ref_logps: Tensor | None
    kl_completions: Any
    sample_weights: Tensor | None


class UnpairedOptions(CompletionOptions):
    """The options of :class:`UnpairedPreferenceLoss`."""

    names: ClassVar = {"loss_type": (LOSSES,)}

    compiled: bool = True
    loss_type: str = "kto"
    beta: PositiveFloat = 0.1
    desirable_weight: NonNegativeFloat = 1.0
    undesirable_weight: NonNegativeFloat = 1.0


class KTOOptions(UnpairedOptions):
    """The options of :class:`LigerFusedLinearKTOLoss`."""

    names: ClassVar = {"loss_type": (("kto", "apo_zero_unpaired"),)}


class BCOOptions(UnpairedOptions):
    """The options of :class:`LigerFusedLinearBCOLoss`."""

    names: ClassVar = {"loss_type": (("bco",),)}
    loss_type: str = "bco"
    use_ref_model: bool = True


class UnpairedPreferenceLoss(CompletionLoss):
    """Base of losses on single completions: the mean of :func:`unpaired_loss`.

    Options as in :class:`LigerFusedLinearKTOLoss`; ``loss_type`` is a name from :data:`LOSSES`.
    """

    forms = (("head", "desirable", "undesirable"), ("head", "completions"), ("head", "hidden_states", "labels"))

    @constructor(UnpairedOptions)
    def __init__(self) -> None: ...

    settings: UnpairedOptions
    positions = "ignore_index beta compiled use_ref_model average_log_prob chunk_size"

    def reward_shift(self, rewards: Tensor) -> Tensor | float:
        """What rewards ``[B]`` without a gradient are compared with, ``[]`` or ``[B]``, if not with a KL divergence."""
        return 0.0

    @overload  # type: ignore[override]
    def forward(
        self, head: AnyHead, desirable: Side, undesirable: Side, **inputs: Unpack[UnpairedInputs]
    ) -> UnpairedResult: ...
    @overload
    def forward(self, head: AnyHead, completions: Side, **inputs: Unpack[UnpairedInputs]) -> UnpairedResult: ...
    @overload
    def forward(
        self, head: AnyHead, hidden_states: AnyHead, labels: Tensor, *others: Any, **inputs: Unpack[UnpairedInputs]
    ) -> UnpairedResult: ...
    @overload
    def forward(self, *, _input: Tensor, lin_weight: AnyHead, target: Tensor, **inputs: Any) -> UnpairedResult: ...
    @operator  # type: ignore[misc]
    def forward(
        self,
        _input: Any,
        lin_weight: Any,
        target: Any = None,
        bias: Any = None,
        preference_labels: Any = None,
        ref_input: Any = None,
        ref_weight: Any = None,
        ref_bias: Any = None,
        kl: Any = None,
        *,
        ref_logps: Any = None,
        kl_completions: Any = None,
        sample_weights: Any = None,
        temperature: Any = None,
    ) -> UnpairedResult:
        """The loss of completions, in one of three forms.

        - ``loss(weight, desirable, undesirable)``: two :class:`Completions` or ``(hidden_states, labels)`` tuples;
        - ``loss(weight, completions, preference_labels=...)``: one, and which of them are desirable;
        - ``loss(weight, hidden_states, labels, bias, preference_labels, ...)``: ``[V, H]``, ``[B, T, H]``, ``[B, T]``;
          as in liger-kernel, hidden states may come before the weight.

        Args:
            _input, lin_weight, target, bias: as in these forms and in :meth:`liger_losses.ChunkedLoss.forward`.
            preference_labels: ``[B]`` bool, true for desirable completions.
            ref_input, ref_logps: the reference's hidden states, or its log-probabilities, ``[B]`` or per token, after
                any shift (last form).
            ref_weight, ref_bias: the reference model's ``lm_head``.
            kl: KTO's KL divergence, one number or ``[B]``, at least 0; 0.0 for none.
            kl_completions: completions that were put after other prompts, with their reference, to estimate it from.
            sample_weights: ``[B]``, what completions' losses are multiplied by, desirable ones first if the two kinds
                were given separately: density ratios of undesirable prompts, for example (BCO's section 4.3).
            temperature: ``[B, T]``, what the logits of each token are divided by, policy's and reference's alike,
                instead of the loss's own temperature, which is then 1 (last form; else in :class:`Completions`).

        Returns:
            The loss (0-dim, fp32) and :class:`UnpairedMetrics`.

        Raises:
            TypeError, ValueError: inputs that do not fit together; for KTO alone, one of the two ``kl`` is needed.
        """
        o, (states, weight) = self.settings, states_and_head(_input, lin_weight)
        head, apart = Head.of(weight, bias, o.transform), target is not None and not isinstance(states, Tensor)
        device, names = head.weight.device, ("desirable", "undesirable") if apart else ("given",)
        reference = Reference(ref_input, ref_weight, ref_bias, (ref_logps,))
        batch = self.read(names, head, states, target, reference, temperature)
        desirable = _desirable(batch, apart, preference_labels)
        count = len(desirable)
        if (kl is not None) + (kl_completions is not None) != (o.loss_type == "kto"):
            raise ValueError(
                "KTO compares rewards with the policy's divergence from the reference: give one of kl_completions= "
                "(completions put after other prompts, with their reference) and kl= (a number; 0.0 for none). Other "
                f"loss types have no divergence term; this is {o.loss_type!r}."
            )
        if sample_weights is not None:
            checks.check_shaped("sample_weights", sample_weights, "completion", device, [count])
        if kl_completions is not None:
            ref_head = (ref_weight, ref_bias) if batch.ref_head is None else (batch.ref_head, None)
            kl = self.divergence(head, kl_completions, None, *ref_head)
        elif kl is not None:
            checks.check_number("kl", kl, 0.0, math.inf)
            kl = kl.detach() if isinstance(kl, Tensor) else checks.as_tensor(kl, device)
            if kl.shape not in ((), (1,), (count,)):
                raise ValueError(f"kl must be one number or [{count}], one per completion, got {tuple(kl.shape)}.")
            kl = kl.to(device, wide(kl.dtype)).squeeze()
        groups, _ = self.score(batch)
        of_groups = [(group.logps, group.ref_logps, group.logits) for group in groups]
        logps, ref, logits = map(torch.cat, zip(*of_groups, strict=True))
        rewards = o.beta * (logps - ref)
        shift = self.reward_shift(rewards.detach()) if kl is None else o.beta * kl
        weights = {"desirable_weight": o.desirable_weight, "undesirable_weight": o.undesirable_weight}
        losses = unpaired_loss(rewards, desirable, shift, loss_type=o.loss_type, **weights)
        if sample_weights is not None:
            losses = losses * sample_weights.detach()
        values = torch.stack([logps, logits * head.vocab_size, rewards]).detach()
        sums = [torch.where(mask, values, 0.0).sum(1) for mask in (desirable, ~desirable)]
        metrics = UnpairedMetrics(*torch.stack(sums, 1).float().flatten().unbind())
        return (losses.sum() / max(count, 1)).float(), metrics

    def divergence(
        self,
        weight: AnyHead,
        kl_completions: Any,
        bias: Tensor | None = None,
        ref_weight: AnyHead | None = None,
        ref_bias: Tensor | None = None,
    ) -> Tensor:
        """``max(0, mean log-ratio)`` of completions that were put after other prompts, over all processes, 0-dim.

        :meth:`forward` computes it for ``kl_completions``; to log it, compute it here and pass it as ``kl``.
        """
        head = Head.of(weight, bias, self.settings.transform)
        completions = as_completions(kl_completions, "kl_completions")
        batch = self.read(("kl_completions",), head, completions, reference=Reference(None, ref_weight, ref_bias))
        with torch.no_grad():
            ((scored,), _) = self.score(batch)
        total, count = sum_and_number(scored.logps - scored.ref_logps)
        return (total / count.clamp(min=1)).clamp(min=0)


def _desirable(batch: CompletionBatch, apart: bool, marks: Tensor | None) -> Tensor:
    """Which completions are desirable, ``[B]`` bool: the first of two groups, or those that are marked."""
    if apart != (marks is None):
        raise ValueError(
            "the loss needs to know which completions are desirable: give preference_labels=, a bool for each, or "
            "desirable and undesirable completions separately, and not both."
        )
    counts = [len(part.labels) for part in batch.parts]
    if marks is None:
        return torch.arange(sum(counts), device=batch.head.weight.device) < counts[0]
    checks.check_shaped("preference_labels", marks, "completion", batch.head.weight.device, counts)
    _check_marks("preference_labels", marks)
    return marks


def _check_marks(name: str, marks: Any) -> None:
    """Raise TypeError unless this is a tensor of bools: of integers, -1 may mark undesirable completions."""
    checks.check_tensor(name, marks)
    if marks.dtype != torch.bool:
        raise TypeError(
            f"{name} must be bool, true for desirable completions, got {marks.dtype}; pass {name} == value, for the "
            "value that means desirable."
        )


class LigerFusedLinearKTOLoss(UnpairedPreferenceLoss):
    """KTO: the mean of :func:`kto_loss`, without a reference by default (Ethayarajh et al. 2024, arXiv:2402.01306).

    Rewards are compared with an estimate of the policy's KL divergence from the reference. The estimate is the mean
    log-ratio of completions that belong to other prompts, over all processes, clamped at 0. It has no gradient.
    ``loss_type="apo_zero_unpaired"`` uses no estimate (APO-zero without pairs, arXiv:2408.06266, eq. 7).

    See eq. 9 of the paper for weights of unbalanced data.

    Args:
        beta: temperature of the implicit reward (> 0).
        desirable_weight, undesirable_weight: the weights of desirable and undesirable completions, not negative.
        loss_type: ``kto`` or ``apo_zero_unpaired``.
        average_log_prob: divide the log-probability of each completion by its length.
        use_ref_model: whether the loss compares the policy with a reference model.
        chunk_size, compiled: accepted for code written for liger-kernel, without effect. ``workspace=`` bounds the
            memory.
        ignore_index, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    @constructor(KTOOptions)
    def __init__(self) -> None: ...


class LigerFusedLinearBCOLoss(UnpairedPreferenceLoss):
    """BCO: the weighted mean of :func:`bco_loss`, with a reference by default (Jung et al., arXiv:2404.04656).

    ``shift`` is the running mean of the rewards. The mean of each training batch, including the current one, is counted
    once, over all processes. The running mean is a buffer that is saved with the module. It is not updated in
    evaluation (:meth:`torch.nn.Module.eval`).

    A batch counts when its loss is called. Call the loss outside of activation checkpointing, which would call it again
    in backward: the batch would count twice, and its gradient would be that of another mean.

    Args:
        beta: temperature of the implicit reward (> 0).
        desirable_weight, undesirable_weight: the weights of desirable and undesirable completions, not negative.
        use_ref_model: compare the policy with a reference model.
        average_log_prob: divide the log-probability of each completion by its length.
        chunk_size, compiled: without effect, for code written for liger-kernel.
        ignore_index, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    running_shift: Tensor
    batches: Tensor

    @constructor(BCOOptions)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("running_shift", torch.zeros((), dtype=torch.float32))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def reward_shift(self, rewards: Tensor) -> Tensor:
        """The running mean of the rewards. In training, it includes the rewards ``[B]`` of this batch."""
        shift, batches = self.running_shift.to(rewards.device), self.batches.to(rewards.device)
        if not self.training:
            return shift
        total, count = sum_and_number(rewards)
        # A batch without completions, or with a reward that is not finite, does not count.
        counts = (count > 0) & total.isfinite()
        self.batches = batches + counts
        mean = torch.where(counts, total / count.clamp(min=1), shift)
        self.running_shift = (shift + (mean - shift) / self.batches.clamp(min=1)).float()
        return self.running_shift
