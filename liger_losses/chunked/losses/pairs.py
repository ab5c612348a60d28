"""Pairs of completions: what a preference loss is given, and its base class. B pairs; without any, the loss is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine import Statistics
from liger_losses.chunked.engine.checks import check_head, check_tensor
from liger_losses.chunked.losses.completions import (
    CompletionLoss,
    Completions,
    as_completions,
    sequence_logps,
    wide_dtype,
)


class PreferenceMetrics(NamedTuple):
    """What Liger's preference losses return beside the loss, in its order; detached.

    The means of the logits are over tokens that carry loss.
    """

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
        chosen_lengths, rejected_lengths: ``[B]``, tokens that carry loss.
        chosen_nll: 0-dim, mean negative log-likelihood of the chosen completions' tokens.
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    chosen_nll: Tensor

    @property
    def chosen_logratios(self) -> Tensor:
        """``log pi(y_w | x) - log pi_ref(y_w | x)``."""
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def rejected_logratios(self) -> Tensor:
        """``log pi(y_l | x) - log pi_ref(y_l | x)``."""
        return self.rejected_logps - self.ref_rejected_logps


@dataclass(frozen=True)
class _Batch:
    """Both call forms in one: two tensors (chosen, rejected), or one with the chosen rows first.

    Stacked rows stay one tensor, so that neither they nor their gradients are copied.
    """

    hidden_states: list[Tensor]
    labels: list[Tensor]
    ref_hidden_states: list[Tensor] | None
    ref_logps: tuple[Tensor | None, Tensor | None]

    def sides(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Chosen and rejected of something that has the shape of the labels."""
        if len(self.labels) == 2:
            return parts[0], parts[1]
        half = parts[0].shape[0] // 2
        return parts[0][:half], parts[0][half:]

    def statistics(self, found: Sequence[Statistics]) -> tuple[Statistics, Statistics]:
        """Chosen and rejected of the engine's statistics."""
        names = [name for name in Statistics._fields if getattr(found[0], name) is not None]
        sides = {name: self.sides([getattr(part, name) for part in found]) for name in names}
        chosen, rejected = (Statistics(**{name: sides[name][i] for name in names}) for i in (0, 1))
        return chosen, rejected


def shared_length_weights(chosen: Tensor, rejected: Tensor, ld_alpha: float) -> tuple[Tensor, Tensor]:
    """Token weights of LD-DPO (arXiv:2409.06411): 1 up to the shorter completion's length, then ``ld_alpha``.

    Args:
        chosen, rejected: masks ``[B, T]`` (T may differ).
    """
    shared = torch.minimum(chosen.sum(-1), rejected.sum(-1))[:, None]
    one, alpha = torch.tensor([1.0, ld_alpha], dtype=wide_dtype(chosen.device), device=chosen.device)
    first, second = (torch.where(mask.cumsum(-1) <= shared, one, alpha) for mask in (chosen, rejected))
    return first, second


class PreferenceLoss(CompletionLoss):
    """Base of losses on pairs: derive from it and write :meth:`pair_loss`.

    ``loss = mean over pairs of pair_loss + alpha * chosen_nll`` (the latter with ``compute_nll_loss``)

    Args:
        ignore_index: the label of tokens that carry no loss.
        beta: temperature of the implicit reward (dimensionless, > 0).
        alpha: weight of the chosen completions' mean negative log-likelihood.
        compute_nll_loss: whether to add it.
        average_log_prob: divide each sequence's log-probability by its length.
        use_ref_model: whether the loss compares with a reference model.
        chunk_size: at most so many pairs' worth of logits in a block of the forward pass, where more would fit.
        compiled: accepted from code written for Liger; there is nothing to compile.
        options: as in :class:`liger_losses.chunked.losses.base.ChunkedLoss`.

    Raises:
        TypeError, ValueError: an option of the wrong kind or out of its range.
    """

    metrics: ClassVar[tuple[str, ...]] = ("mean_logit",)
    #: LD-DPO's weight of tokens beyond the pair's shared length; ``None`` for none.
    ld_alpha: float | None = None

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        average_log_prob: bool = False,
        use_ref_model: bool = False,
        chunk_size: int | None = None,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            beta=beta,
            average_log_prob=average_log_prob,
            use_ref_model=use_ref_model,
            chunk_size=chunk_size,
            compiled=compiled,
            **options,
        )
        self.alpha = alpha
        self.compute_nll_loss = compute_nll_loss

    @property
    def rows_of_a_chunk(self) -> int:
        return 2

    def pair_loss(self, pairs: Pairs) -> Tensor:
        """The loss of each pair, ``[B]``."""
        raise NotImplementedError(f"{type(self).__name__} must define pair_loss(pairs)")

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Implicit rewards ``[B]`` of chosen and rejected, for the metrics."""
        return self.beta * pairs.chosen_logratios, self.beta * pairs.rejected_logratios

    def sequence_weight(self, statistics: Statistics, mask: Tensor) -> Tensor | None:
        """Weights ``[B]`` of one side; a pair's loss is multiplied by both, as constants. ``None`` for 1."""
        return None

    def result(self, loss: Tensor, pairs: Pairs, metrics: PreferenceMetrics) -> tuple[Tensor, Any]:
        """What :meth:`forward` returns."""
        return loss, metrics

    def forward(  # type: ignore[override]
        self,
        lin_weight: Tensor,
        _input: Any,
        target: Any,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        *,
        ref_chosen_logps: Tensor | None = None,
        ref_rejected_logps: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """The loss of pairs, in one of two forms.

        - ``loss(weight, chosen, rejected)``: two :class:`Completions` or ``(hidden_states, labels)`` tuples;
        - ``loss(weight, hidden_states, labels)``: ``[2 B, T, H]`` and ``[2 B, T]``, chosen rows first.

        Args:
            lin_weight: ``[V, H]``, the ``lm_head``.
            _input: chosen completions, or stacked hidden states.
            target: rejected completions, or stacked labels.
            bias: ``[V]``.
            ref_input: the reference model's hidden states (stacked form).
            ref_weight, ref_bias: the reference model's ``lm_head``.
            ref_chosen_logps, ref_rejected_logps: precomputed instead, ``[B]`` or per token (stacked form).
            nll_target: labels of the chosen completions (or all; the first B rows count) for the negative
                log-likelihood, where it is taken over other tokens than the preference.

        Returns:
            The loss (0-dim, fp32) and :class:`PreferenceMetrics`.

        Raises:
            TypeError, ValueError: inputs that do not fit together, or a missing reference.
        """
        if isinstance(_input, Tensor):
            batch = _from_stacked(_input, target, ref_input, (ref_chosen_logps, ref_rejected_logps))
        elif ref_input is None and ref_chosen_logps is None and ref_rejected_logps is None:
            batch = _from_sides(as_completions(_input, "chosen"), as_completions(target, "rejected"))
        else:
            raise ValueError("with pairs, give the reference in Completions(..., ref_hidden_states=, ref_logps=).")
        check_head(batch.hidden_states, lin_weight, batch.labels, bias)
        named = zip(("chosen", "rejected"), batch.sides(batch.labels), batch.ref_logps, strict=True)
        self.check_reference(list(named), batch.ref_hidden_states, batch.labels, ref_weight, ref_bias)
        batch = replace(batch, labels=[self.labels(part) for part in batch.labels])

        hidden, labels = batch.hidden_states, batch.labels
        chosen_labels = batch.sides(labels)[0]
        nll_labels = chosen_labels if nll_target is None else self._nll_labels(nll_target, chosen_labels)
        if nll_target is not None:
            # Tokens that only the likelihood asks for are one more part of the stream.
            hidden = [*hidden, batch.sides(hidden)[0]]
            labels = [*labels, nll_labels.masked_fill(nll_labels == chosen_labels, self.ignore_index)]
        found = self.sequence_statistics(lin_weight, bias, hidden, labels, self.metrics)
        masks = batch.sides([part != self.ignore_index for part in batch.labels])
        sides = batch.statistics(found)
        nll_mask = nll_labels != self.ignore_index
        nll_logps = sides[0].logp * (nll_mask & (nll_labels == chosen_labels))
        if nll_target is not None:
            nll_logps = nll_logps + found[-1].logp

        chosen_logps, rejected_logps = self._sequence_logps([side.logp for side in sides], masks)
        ref_chosen, ref_rejected = self._reference_logps(batch, masks, ref_weight, ref_bias)
        chosen_nll = -nll_logps.sum() / nll_mask.sum().clamp(min=1)
        lengths = [mask.sum(-1) for mask in masks]
        pairs = Pairs(chosen_logps, rejected_logps, ref_chosen, ref_rejected, lengths[0], lengths[1], chosen_nll)
        losses = self.pair_loss(pairs)
        for side, mask in zip(sides, masks, strict=True):
            weight = self.sequence_weight(side, mask)
            losses = losses if weight is None else losses * weight.detach()
        loss = losses.sum() / max(losses.shape[0], 1)
        if self.compute_nll_loss:
            loss = loss + self.alpha * pairs.chosen_nll
        loss = loss.to(chosen_nll.dtype)
        return self.result(loss, pairs, self._metrics(pairs, sides, lengths))

    def _metrics(self, pairs: Pairs, sides: Sequence[Statistics], lengths: Sequence[Tensor]) -> PreferenceMetrics:
        with torch.no_grad():
            means = [side.mean_logit.sum() / n.sum().clamp(min=1) for side, n in zip(sides, lengths, strict=True)]
            logps, rewards = (pairs.chosen_logps, pairs.rejected_logps), self.rewards(pairs)
            return PreferenceMetrics(
                *(v.detach().to(means[0].dtype) for v in (*logps, *means, pairs.chosen_nll, *rewards))
            )

    def _sequence_logps(self, logps: Sequence[Tensor | None], masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Each side's log-probabilities ``[B]`` from those per token; those per sequence are taken as they are."""
        weights: Sequence[Tensor | None] = (None, None)
        if self.ld_alpha is not None:
            weights = shared_length_weights(masks[0], masks[1], self.ld_alpha)
        summed = []
        for values, mask, weight in zip(logps, masks, weights, strict=True):
            if values is None:
                values = torch.zeros_like(mask, dtype=torch.float32)
            if values.dim() == 2:
                values = sequence_logps(values, mask, average=self.average_log_prob, weights=weight)
            summed.append(values)
        return summed[0], summed[1]

    def _reference_logps(
        self, batch: _Batch, masks: Sequence[Tensor], ref_weight: Tensor | None, ref_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The reference's log-probabilities of each side, ``[B]``; 0 without one."""
        logps: Sequence[Tensor | None] = batch.ref_logps
        if batch.ref_hidden_states is not None and ref_weight is not None:
            with torch.no_grad():
                found = self.sequence_statistics(ref_weight, ref_bias, batch.ref_hidden_states, batch.labels)
            logps = batch.sides([part.logp for part in found])
        return self._sequence_logps([None if part is None else part.detach() for part in logps], masks)

    def _nll_labels(self, nll_target: Tensor, chosen_labels: Tensor) -> Tensor:
        labels = self.labels(nll_target)
        labels = labels[None] if labels.dim() == 1 else labels[: chosen_labels.shape[0]]
        if labels.shape != chosen_labels.shape:
            raise ValueError(
                f"nll_target must have the shape of the chosen labels, {tuple(chosen_labels.shape)}, "
                f"got {tuple(nll_target.shape)}."
            )
        return labels


def _from_sides(chosen: Completions, rejected: Completions) -> _Batch:
    for which, side in (("chosen", chosen), ("rejected", rejected)):
        if side.labels.dim() != 2:
            raise ValueError(f"labels of the {which} completions must be [B, T], got {tuple(side.labels.shape)}.")
    if chosen.labels.shape[0] != rejected.labels.shape[0]:
        raise ValueError(
            f"there must be as many chosen as rejected completions, got {chosen.labels.shape[0]} and "
            f"{rejected.labels.shape[0]}."
        )
    refs = [side.ref_hidden_states for side in (chosen, rejected)]
    given = [ref for ref in refs if ref is not None]
    if len(given) == 1:
        raise ValueError("give ref_hidden_states for both the chosen and the rejected completions, or for neither.")
    return _Batch(
        [chosen.hidden_states, rejected.hidden_states],
        [chosen.labels, rejected.labels],
        given or None,
        (chosen.ref_logps, rejected.ref_logps),
    )


def _from_stacked(
    hidden_states: Tensor,
    labels: Any,
    ref_hidden_states: Tensor | None,
    ref_logps: tuple[Tensor | None, Tensor | None],
) -> _Batch:
    if not isinstance(labels, Tensor):
        raise TypeError(f"target must be a tensor of labels in the stacked form, got {type(labels).__name__}.")
    for name, value in (
        ("ref_input", ref_hidden_states),
        ("ref_chosen_logps", ref_logps[0]),
        ("ref_rejected_logps", ref_logps[1]),
    ):
        if value is not None:
            check_tensor(name, value)
    if hidden_states.dim() != 3 or labels.dim() != 2:
        raise ValueError(
            "the stacked form takes hidden states [2 * pairs, tokens, hidden_size] and labels [2 * pairs, tokens], "
            f"got {tuple(hidden_states.shape)} and {tuple(labels.shape)}."
        )
    if hidden_states.shape[0] % 2:
        raise ValueError(
            f"the stacked form takes chosen rows, then as many rejected rows: got an odd number, "
            f"{hidden_states.shape[0]}. Pass chosen and rejected apart as Completions if they were batched otherwise."
        )
    return _Batch([hidden_states], [labels], None if ref_hidden_states is None else [ref_hidden_states], ref_logps)
