"""Pairs of completions: what a preference loss is a function of, and its base class. B pairs; without any, it is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import TypeVar, Unpack

from liger_losses.checks import NonNegativeFloat, PositiveFloat, check_shaped, described, meant
from liger_losses.chunked import Head, Statistics
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.core.statistics import DeclaredStatistics
from liger_losses.chunked.losses.base import AnyHead, constructor
from liger_losses.chunked.losses.completion_loss import (
    CompletionInputs,
    CompletionLoss,
    CompletionOptions,
    Reference,
    Scored,
    Side,
    as_completions,
)


class PreferenceMetrics(NamedTuple):
    """Detached metrics, in liger-kernel's order. Mean logits are over active tokens."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    chosen_nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


#: What pairs have of each token, ``[B, T]``: of the chosen completions, then of the rejected ones.
_OF_TOKENS = (
    *("chosen_token_logps", "chosen_mask", "ref_chosen_token_logps"),
    *("rejected_token_logps", "rejected_mask", "ref_rejected_token_logps"),
)


@dataclass(frozen=True)
class PairLogps:
    """The log-probabilities of pairs, of which a preference loss is a function; arguments as in :class:`Pairs`."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    _: KW_ONLY
    chosen_lengths: Any = None
    rejected_lengths: Any = None
    chosen_nll: Any = None

    @property
    def chosen_logratios(self) -> Tensor:
        """``log pi(y_w | x) - log pi_ref(y_w | x)``, ``[B]``."""
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def rejected_logratios(self) -> Tensor:
        """``log pi(y_l | x) - log pi_ref(y_l | x)``, ``[B]``."""
        return self.rejected_logps - self.ref_rejected_logps


@dataclass(frozen=True, kw_only=True)
class Pairs(PairLogps):
    """The arguments of a preference loss.

    Losses of tokens read ``chosen_token_logps``, ``ref_chosen_token_logps`` and ``chosen_mask`` (bool, true for tokens
    that carry loss), all ``[B, T]``, and the same of ``rejected``, which may have another T. Log-probabilities are 0
    for tokens without loss, and those of the reference without one.

    Args:
        chosen_logps, rejected_logps: ``[B]``, the policy's log-probability of each completion (sums or averages).
        ref_chosen_logps, ref_rejected_logps: ``[B]``, the same under the reference; 0 without a reference.
        chosen_lengths, rejected_lengths: ``[B]``, numbers of active tokens.
        chosen_nll: 0-dim, mean negative log-likelihood of the chosen completions' tokens.
        sides: what the log-probabilities are sums of, from which those of tokens come.
    """

    sides: Sequence[Scored] = ()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_OF_TOKENS]

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_TOKENS:
            names = [name for name in dir(self) if not name.startswith("_")]
            raise AttributeError(f"pairs have no {name!r}{meant(name, names)}; they have {', '.join(names)}.")
        if not self.sides:
            raise ValueError("only pair_loss of a loss without group= can read the log-probabilities of tokens.")
        of_sides = [x for side in self.sides for x in (side.statistics.logp, side.mask, side.ref_token_logps)]
        of_tokens = of_sides[_OF_TOKENS.index(name)]
        if of_tokens is None:
            raise ValueError(
                "the reference's log-probabilities are sums over tokens: give ref_logps of each token, [B, T], or "
                "ref_hidden_states."
            )
        return of_tokens


def smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    """``-(1 - e) log sigmoid(x) - e log sigmoid(-x)``."""
    loss = -(1 - label_smoothing) * F.logsigmoid(margin)
    return loss - label_smoothing * F.logsigmoid(-margin) if label_smoothing else loss


class PreferenceInputs(CompletionInputs, total=False):
    """What calls of :class:`PreferenceLoss` may have beside head and completions."""

    ref_chosen_logps: Tensor | None
    ref_rejected_logps: Tensor | None
    nll_target: Tensor | None
    gold: Side | None


#: The metrics that a loss returns.
M = TypeVar("M", default=PreferenceMetrics)


class PreferenceOptions(CompletionOptions):
    """The options of losses on pairs; see :class:`PreferenceLoss`."""

    beta: PositiveFloat = 0.1
    alpha: NonNegativeFloat = 1.0
    compute_nll_loss: bool = False


class PreferenceLoss(CompletionLoss, Generic[M]):
    """Base of losses on pairs: derive from it and define :meth:`pair_loss`.

    ``loss = mean over pairs of pair_loss + alpha * chosen_nll`` (the latter with ``compute_nll_loss``)

    Args:
        beta: temperature of the implicit reward (> 0).
        alpha: factor of the chosen completions' mean negative log-likelihood.
        compute_nll_loss: whether to add this negative log-likelihood.
        average_log_prob: divide the log-probability of each completion by its length.
        use_ref_model: whether the loss compares the policy with a reference model.
        chunk_size, compiled: accepted for code written for liger-kernel, without effect. ``workspace=`` bounds the
            memory.
        ignore_index, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    paired = True
    forms = (("head", "chosen", "rejected"), ("head", "hidden_states", "labels"))

    @constructor(PreferenceOptions)
    def __init__(self) -> None: ...

    positions = "ignore_index beta alpha compute_nll_loss average_log_prob use_ref_model chunk_size compiled"

    def pair_loss(self, pairs: Pairs) -> Tensor:
        """The loss of each pair, ``[B]``."""
        raise NotImplementedError(f"{type(self).__name__} must define pair_loss(pairs)")

    def rewards(self, pairs: Pairs) -> tuple[Tensor, ...]:
        """Implicit rewards ``[B]`` of chosen and rejected completions, for the metrics."""
        beta = self.settings.beta
        return beta * pairs.chosen_logratios, beta * pairs.rejected_logratios

    def sequence_weight(self, statistics: Statistics, mask: Tensor) -> Tensor | None:
        """Constant weights ``[B]`` of the chosen or the rejected completions' pairs, or ``None`` for 1."""
        return None

    def result(self, loss: Tensor, pairs: Pairs, metrics: PreferenceMetrics) -> tuple[Tensor, Any]:
        """The result of :meth:`forward`."""
        return loss, metrics

    @overload  # type: ignore[override]
    def forward(
        self, head: AnyHead, chosen: Side, rejected: Side, **inputs: Unpack[PreferenceInputs]
    ) -> tuple[Tensor, M]: ...
    @overload
    def forward(
        self, head: AnyHead, hidden_states: Tensor, labels: Tensor, *others: Any, **inputs: Unpack[PreferenceInputs]
    ) -> tuple[Tensor, M]: ...
    @overload
    def forward(self, *, lin_weight: Any, _input: Any, target: Any, **inputs: Any) -> tuple[Tensor, M]: ...
    @operator  # type: ignore[misc]
    def forward(
        self,
        lin_weight: Any,
        _input: Any,
        target: Any,
        bias: Any = None,
        ref_input: Any = None,
        ref_weight: Any = None,
        ref_bias: Any = None,
        *,
        ref_chosen_logps: Any = None,
        ref_rejected_logps: Any = None,
        nll_target: Any = None,
        gold: Any = None,
        temperature: Any = None,
    ) -> tuple[Tensor, Any]:
        """The loss of pairs, in one of two forms.

        - ``loss(weight, chosen, rejected)``: two :class:`Completions`, which contain the reference, or
          ``(hidden_states, labels)`` tuples;
        - ``loss(weight, hidden_states, labels)``, liger-kernel's form: ``[2 B, T, H]`` and ``[2 B, T]``, chosen rows
          first.

        Args:
            lin_weight, bias: the ``lm_head``, as in :meth:`liger_losses.ChunkedLoss.forward`.
            _input, target: as in these forms.
            ref_weight, ref_bias: the reference model's ``lm_head``.
            ref_input, ref_chosen_logps, ref_rejected_logps: the reference's hidden states, or its precomputed
                log-probabilities ``[B]`` or per token, after any shift (stacked form).
            nll_target: labels of the chosen completions for the negative log-likelihood, if it is over other tokens
                than the preference. (If you pass labels of all completions, the first B rows are used.)
            gold: third completions, whose negative log-likelihood takes the place of the chosen ones' (TPO,
                arXiv:2405.16681); as many or others, ``Completions`` or ``(hidden_states, labels)``.
            temperature: ``[2 B, T]``, divides the logits of each token, for policy and reference. The loss's
                ``temperature`` must then be 1. For the stacked form; in the pair form, pass it to :class:`Completions`.

        Returns:
            The loss (0-dim, fp32; fp64 for fp64 inputs) and :class:`PreferenceMetrics`.
        """
        o = self.settings
        head = Head.of(lin_weight, bias, o.transform)
        reference = Reference(ref_input, ref_weight, ref_bias, (ref_chosen_logps, ref_rejected_logps))
        batch = self.read(("chosen", "rejected"), head, _input, target, reference, temperature)
        extra = None
        if gold is not None:
            if nll_target is not None or not o.compute_nll_loss:
                raise ValueError(
                    "gold= are the completions of the likelihood: build the loss with compute_nll_loss=True, and leave "
                    "nll_target= out."
                )
            extra = as_completions(gold, "gold")
            extra = replace(extra, labels=self.labels(extra.labels))
            nll_labels = extra.labels
        if nll_target is not None:  # tokens that only the likelihood asks for are streamed along with the others
            part = batch.first_group()
            nll_labels = self._nll_labels(nll_target, part.labels)
            extra = replace(part, labels=nll_labels.masked_fill(nll_labels == part.labels, o.ignore_index))
        sides, others = self.score(batch, extra)
        chosen, rejected = sides
        counts = [side.lengths.sum().clamp(min=1) for side in sides]
        nll_logps, nll_count = chosen.statistics.logp, counts[0]
        if others is not None:
            # Not a product: a log-probability of -inf that does not count must not make it NaN.
            if gold is None:
                scored = (nll_labels == part.labels) & (nll_labels != o.ignore_index)
                others = nll_logps.where(scored, 0.0) + others
            nll_logps, nll_count = others, self.total(nll_labels != o.ignore_index).clamp(min=1)
        chosen_nll = -self.total(nll_logps) / nll_count
        logps = (chosen.logps, rejected.logps, chosen.ref_logps, rejected.ref_logps)
        lengths = {"chosen_lengths": chosen.lengths, "rejected_lengths": rejected.lengths}
        pairs = Pairs(*logps, **lengths, chosen_nll=chosen_nll, sides=sides if o.group is None else ())
        losses = self._pair_losses(pairs, sides)
        loss = losses.mean() if len(losses) else losses.sum()
        if o.compute_nll_loss:
            loss = loss + o.alpha * chosen_nll
        with torch.no_grad():
            of_pairs = torch.stack([pairs.chosen_logps, pairs.rejected_logps, *self.rewards(pairs)])
            chosen_logps, rejected_logps, *rewards = of_pairs.to(chosen_nll.dtype).unbind()
            means = [side.logits / count for side, count in zip(sides, counts, strict=True)]
            values = (chosen_logps, rejected_logps, *means, chosen_nll.detach(), *rewards)
        return self.result(loss.to(chosen_nll.dtype), pairs, PreferenceMetrics(*values))

    def _nll_labels(self, nll_target: Tensor, chosen: Tensor) -> Tensor:
        """The labels of the likelihood, in the shape of the chosen completions' labels."""
        count, tokens = chosen.shape
        of_one = [(tokens,)] if count == 1 else []
        check_shaped(
            "nll_target", nll_target, "chosen label", chosen.device, chosen.shape, (2 * count, tokens), *of_one
        )
        labels = self.labels(nll_target)
        return labels[None] if labels.dim() == 1 else labels[:count]

    def _pair_losses(self, pairs: Pairs, sides: Sequence[Scored]) -> Tensor:
        """:meth:`pair_loss`, checked, times the weights of both sides."""
        losses, kind, shape = self.pair_loss(pairs), type(self).__name__, pairs.chosen_logps.shape
        if not (isinstance(losses, Tensor) and losses.shape == shape and losses.is_floating_point()):
            raise ValueError(
                f"{kind}.pair_loss must return one loss per pair, floating point {list(shape)}, got "
                f"{described(losses)}; the base class takes the mean over the pairs."
            )
        for side in sides:
            reader, place = f"{kind}.sequence_weight", f"the metrics that {kind} names"
            declared: Any = DeclaredStatistics(side.statistics, reader, place)
            weight = self.sequence_weight(declared, side.mask)
            losses = losses if weight is None else losses * weight.detach()
        return losses
