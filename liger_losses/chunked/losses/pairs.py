"""Pairs of completions: what a preference loss is a function of, and its base class. B pairs; without any, it is 0."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine import Head, Statistics
from liger_losses.chunked.engine.checks import check_range, meant
from liger_losses.chunked.engine.given import note
from liger_losses.chunked.engine.operators import loss_operator
from liger_losses.chunked.engine.query import DeclaredStatistics
from liger_losses.chunked.losses.base import LossOptions
from liger_losses.chunked.losses.call_forms import FORMS, AnyHead, Completions, read_pairs
from liger_losses.chunked.losses.completion_loss import CompletionLoss, CompletionOptions
from liger_losses.chunked.losses.context_parallel import sum_over_group


class PreferenceMetrics(NamedTuple):
    """Detached, in liger-kernel's order; the mean logits are over tokens that carry loss."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    chosen_nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


@dataclass(frozen=True)
class Pairs:
    """What a preference loss is a function of.

    Args:
        chosen_logps, rejected_logps: ``[B]``, the policy's log-probability of each completion (sums or averages).
        ref_chosen_logps, ref_rejected_logps: ``[B]``, the reference's; 0 without a reference.
        chosen_lengths, rejected_lengths: ``[B]``, numbers of tokens that carry loss.
        chosen_nll: 0-dim, mean negative log-likelihood of the chosen completions' tokens.
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    chosen_nll: Tensor

    def __getattr__(self, name: str) -> Any:
        names = [*(field.name for field in fields(self)), "chosen_logratios", "rejected_logratios"]
        raise AttributeError(f"pairs have no {name!r}{meant(name, names)}; they have {', '.join(names)}.")

    @property
    def chosen_logratios(self) -> Tensor:
        """``log pi(y_w | x) - log pi_ref(y_w | x)``."""
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def rejected_logratios(self) -> Tensor:
        """``log pi(y_l | x) - log pi_ref(y_l | x)``."""
        return self.rejected_logps - self.ref_rejected_logps


def smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    """``-(1 - e) log sigmoid(x) - e log sigmoid(-x)``."""
    loss = -(1 - label_smoothing) * F.logsigmoid(margin)
    return loss - label_smoothing * F.logsigmoid(-margin) if label_smoothing else loss


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions(CompletionOptions):
    """The options of losses on pairs; see :class:`PreferenceLoss`."""

    alpha: float = 1.0
    compute_nll_loss: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0.0, math.inf, open_low=True)
        check_range("alpha", self.alpha, 0.0, math.inf)


class PreferenceLoss(CompletionLoss):
    """Base of losses on pairs: derive from it and define :meth:`pair_loss`.

    ``loss = mean over pairs of pair_loss + alpha * chosen_nll`` (the latter with ``compute_nll_loss``)

    Args:
        ignore_index, average_log_prob, use_ref_model, chunk_size, compiled: as in
            :class:`liger_losses.chunked.losses.completion_loss.CompletionLoss`.
        beta: temperature of the implicit reward (> 0).
        alpha: weight of the chosen completions' mean negative log-likelihood.
        compute_nll_loss: whether to add it.
        options: as in :class:`liger_losses.ChunkedLoss`.
    """

    metrics = ("mean_logit",)
    forms = FORMS["pairs"]
    call_forms = (
        "loss(head, chosen, rejected), each side Completions(hidden_states, labels), or as loss(head, hidden_states, "
        "labels), chosen rows first"
    )

    options_type: ClassVar[type[LossOptions]] = PreferenceOptions
    positions: ClassVar[tuple[str, ...]] = (
        *("ignore_index", "beta", "alpha", "compute_nll_loss", "average_log_prob", "use_ref_model", "chunk_size"),
        "compiled",
    )

    def pair_loss(self, pairs: Pairs) -> Tensor:
        """The loss of each pair, ``[B]``."""
        raise NotImplementedError(f"{type(self).__name__} must define pair_loss(pairs)")

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Implicit rewards ``[B]`` of chosen and rejected completions, for the metrics."""
        return self.beta * pairs.chosen_logratios, self.beta * pairs.rejected_logratios

    def sequence_weight(self, statistics: Statistics, mask: Tensor) -> Tensor | None:
        """Constant weights ``[B]`` of one side, ``None`` for 1; a pair's loss is multiplied by both sides' weights."""
        return None

    def result(self, loss: Tensor, pairs: Pairs, metrics: PreferenceMetrics) -> tuple[Tensor, Any]:
        """What :meth:`forward` returns."""
        return loss, metrics

    @loss_operator
    def forward(  # type: ignore[override]
        self,
        lin_weight: AnyHead,
        _input: Any,
        target: Any,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: AnyHead | None = None,
        ref_bias: Tensor | None = None,
        *,
        ref_chosen_logps: Tensor | None = None,
        ref_rejected_logps: Tensor | None = None,
        nll_target: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """The loss of pairs, in one of two forms.

        - ``loss(weight, chosen, rejected)``: two :class:`Completions` or ``(hidden_states, labels)`` tuples, which
          bring their reference with them;
        - ``loss(weight, hidden_states, labels)``, liger-kernel's: ``[2 B, T, H]`` and ``[2 B, T]``, chosen rows first.

        Args:
            lin_weight, bias: the ``lm_head``, as in :meth:`liger_losses.ChunkedLoss.forward`.
            _input, target: as in these forms.
            ref_weight, ref_bias: the reference model's ``lm_head``.
            ref_input, ref_chosen_logps, ref_rejected_logps: its hidden states, or its precomputed log-probabilities
                ``[B]`` or per token (stacked form).
            nll_target: labels of the chosen completions (or of all; the first B rows count) for the negative
                log-likelihood, if it is taken over other tokens than the preference.
            temperature: ``[2 B, T]``, what the logits of each token are divided by, policy's and reference's alike,
                instead of the loss's own temperature, which is then 1 (stacked form; else in :class:`Completions`).

        Returns:
            The loss (0-dim, fp32; fp64 for fp64 inputs) and :class:`PreferenceMetrics`.
        """
        head = Head.of(lin_weight, bias, self.transform)
        batch = read_pairs(head, _input, target, ref_input, (ref_chosen_logps, ref_rejected_logps), temperature)
        batch = self.prepare(batch, ref_weight, ref_bias)
        nll_labels = chosen_labels = batch.groups(batch.labels)[0]
        extra = None
        if nll_target is not None:
            note(nll_target=nll_target)
            nll_labels = self.labels(nll_target)
            nll_labels = nll_labels[None] if nll_labels.dim() == 1 else nll_labels[: chosen_labels.shape[0]]
            if nll_labels.shape != chosen_labels.shape:
                raise ValueError(
                    f"nll_target must have the shape of the chosen labels, {tuple(chosen_labels.shape)}, "
                    f"got {tuple(nll_target.shape)}."
                )
            # Tokens that only the likelihood asks for are streamed along with the others.
            only_nll = nll_labels.masked_fill(nll_labels == chosen_labels, self.ignore_index)
            divided_by = None if batch.temperatures is None else batch.groups(batch.temperatures)[0]
            extra = Completions(batch.groups(batch.hidden_states)[0], only_nll, temperature=divided_by)
        sides, found = self.score(batch, extra, metrics=tuple(dict.fromkeys(("mean_logit", *self.metrics))))

        nll_mask = nll_labels != self.ignore_index
        # Not a product: a log-probability of -inf that does not count must not make it NaN.
        nll_logps = sides[0].statistics.logp.where(nll_mask & (nll_labels == chosen_labels), 0.0)
        if found is not None:
            nll_logps = nll_logps + found.logp
        chosen, rejected = sides
        nll, nll_tokens, lengths = -nll_logps.sum(), nll_mask.sum(), [side.mask.sum(-1) for side in sides]
        logits = [side.statistics.mean_logit.sum() for side in sides]
        if self.group is not None:
            nll, nll_tokens, *sums = sum_over_group(self.group, nll, nll_tokens, *lengths, *logits)
            lengths, logits = sums[:2], sums[2:]
        chosen_nll = nll / nll_tokens.clamp(min=1)
        pairs = Pairs(
            chosen.logps, rejected.logps, chosen.ref_logps, rejected.ref_logps, lengths[0], lengths[1], chosen_nll
        )
        losses, kind, shape = self.pair_loss(pairs), type(self).__name__, pairs.chosen_logps.shape
        is_tensor = isinstance(losses, Tensor)
        if not (is_tensor and losses.shape == shape and losses.is_floating_point()):
            got = f"{losses.dtype} of shape {list(losses.shape)}" if is_tensor else type(losses).__name__
            raise ValueError(
                f"{kind}.pair_loss must return one loss per pair, floating point {list(shape)}, got "
                f"{got}; the base class takes the mean over the pairs."
            )
        for side in sides:
            reader, place = f"{kind}.sequence_weight", f"the metrics that {kind} names"
            declared: Any = DeclaredStatistics(side.statistics, reader, place)
            weight = self.sequence_weight(declared, side.mask)
            losses = losses if weight is None else losses * weight.detach()
        loss = losses.sum() / max(losses.shape[0], 1)
        if self.compute_nll_loss:
            loss = loss + self.alpha * chosen_nll
        means = [total / count.sum().clamp(min=1) for total, count in zip(logits, lengths, strict=True)]
        values = (pairs.chosen_logps, pairs.rejected_logps, *means, chosen_nll, *self.rewards(pairs))
        metrics = PreferenceMetrics(*(value.detach().to(means[0].dtype) for value in values))
        return self.result(loss.to(chosen_nll.dtype), pairs, metrics)
