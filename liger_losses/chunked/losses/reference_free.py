"""Preference losses without a reference model: CPO, SimPO, ORPO. B pairs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.checks import FiniteFloat, UnitFloat, check_alike, check_names, check_number
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.losses.base import constructor
from liger_losses.chunked.losses.completion_loss import MAX_EXPONENT
from liger_losses.chunked.losses.dpo import DPO_LOSSES, Variant
from liger_losses.chunked.losses.pairs import Pairs, PreferenceLoss, PreferenceMetrics, PreferenceOptions, smoothed

# For x closer to 0 fp32 cannot tell exp(x) from 1: where ORPO's odds are clamped.
_MIN_SURPRISE = 2.0**-23


def alphapo_reward(logps: Tensor, reward_alpha: float) -> Tensor:
    """AlphaPO's reward ``(1 - p^-a) / a`` of ``log p`` ``[B]`` (arXiv:2501.03884); ``log p`` itself for ``a = 0``."""
    a = reward_alpha
    return logps if a == 0 else -torch.expm1((-a * logps).clamp(max=MAX_EXPONENT)) / a


class CPOTerms(NamedTuple):
    """What the loss of a pair has beside the margin."""

    beta: float
    gamma: float
    label_smoothing: float


def _simpo(pairs: Any, margin: Tensor, o: Any) -> Tensor:
    return smoothed(o.beta * margin - o.gamma, o.label_smoothing)


#: The formulas are at :func:`cpo_loss`. Log-probabilities ``per_token`` are averaged.
CPO_LOSSES = {name: DPO_LOSSES[name] for name in ("sigmoid", "hinge", "ipo")}
CPO_LOSSES["simpo"] = CPO_LOSSES["alphapo"] = Variant(_simpo, of_margin=True, per_token=True)


def cpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    reward_alpha: float = 0.0,
) -> Tensor:
    """CPO or one of its variants, ``[B]``, without the likelihood that is usually added.

    With ``r`` the log-probabilities, or AlphaPO's reward ``(1 - p^-a) / a`` for ``a = reward_alpha`` other than 0::

        sigmoid          -log sigmoid(beta (r_w - r_l))             CPO, arXiv:2401.08417, eq. 3
        hinge            max(0, 1 - beta (r_w - r_l))               SLiC, arXiv:2305.10425
        ipo              (r_w - r_l - 1 / (2 beta))^2               IPO, arXiv:2310.12036, eq. 17
        simpo, alphapo   -log sigmoid(beta (r_w - r_l) - gamma)     arXiv:2405.14734, eq. 6; arXiv:2501.03884

    Args:
        chosen_logps, rejected_logps: ``[B]``: sums over tokens for ``sigmoid`` and ``hinge``, means for the others.
        loss_type: one of the names above.
        beta, label_smoothing, gamma: as in the formulas; label smoothing for ``sigmoid``, ``simpo`` and ``alphapo``.

    Returns:
        ``[B]``, differentiable.

    Raises:
        ValueError: another ``loss_type``.
    """
    check_names([loss_type], CPO_LOSSES, "loss_type")
    _check(chosen_logps, rejected_logps, beta, label_smoothing)
    margin = alphapo_reward(chosen_logps, reward_alpha) - alphapo_reward(rejected_logps, reward_alpha)
    return CPO_LOSSES[loss_type].loss(None, margin, CPOTerms(beta, gamma, label_smoothing))


def simpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1, gamma: float = 0.5, label_smoothing: float = 0.0
) -> Tensor:
    """SimPO, ``[B]``: ``-log sigmoid(beta (logp_w - logp_l) - gamma)`` (arXiv:2405.14734, eq. 6).

    Args:
        chosen_logps, rejected_logps: ``[B]``, means over tokens.
        beta, gamma: as in the formula.
        label_smoothing: assumed share of pairs whose labels are swapped, in [0, 1].
    """
    _check(chosen_logps, rejected_logps, beta, label_smoothing)
    return _simpo(None, chosen_logps - rejected_logps, CPOTerms(beta, gamma, label_smoothing))


def orpo_loss(chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1) -> Tensor:
    """ORPO's odds-ratio term, ``[B]``: ``-beta log sigmoid(log odds_w - log odds_l)``, ``odds = p / (1 - p)``.

    The paper (arXiv:2403.07691, eq. 6 and 7) adds it to the chosen completions' mean negative log-likelihood. Odds are
    clamped at ``p = exp(-2^-23)``, beyond which fp32 cannot tell p from 1: a completion of probability 1 has log-odds
    15.9.

    Args:
        chosen_logps, rejected_logps: ``[B]``, the means of ``log p`` over tokens.
        beta: weight of the term.
    """
    _check(chosen_logps, rejected_logps, beta)
    return -beta * F.logsigmoid(_log_odds(chosen_logps) - _log_odds(rejected_logps))


def _check(chosen_logps: Tensor, rejected_logps: Tensor, beta: float, label_smoothing: float = 0.0) -> None:
    """Raise TypeError or ValueError unless these fit together."""
    check_alike(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    check_number("beta", beta, 0.0, math.inf, open_low=True)
    check_number("label_smoothing", label_smoothing, 0.0, 1.0)


def _log_odds(logps: Tensor) -> Tensor:
    """``log(p / (1 - p))`` of ``log p``, finite up to p = 1."""
    logps = logps.clamp(max=-_MIN_SURPRISE)
    return logps - torch.log(-torch.expm1(logps))


class ReferenceFreeOptions(PreferenceOptions):
    """The options of losses that no reference takes part in."""

    compute_nll_loss: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_ref_model:
            raise ValueError("CPO, SimPO and ORPO have no reference model: leave out use_ref_model.")


class CPOOptions(ReferenceFreeOptions):
    """The options of :class:`LigerFusedLinearCPOLoss`."""

    names: ClassVar = {"loss_type": (CPO_LOSSES,)}

    average_log_prob: bool | None = None
    label_smoothing: UnitFloat = 0.0
    loss_type: str = "sigmoid"
    gamma: FiniteFloat = 0.5
    reward_alpha: FiniteFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type == "alphapo" and self.reward_alpha == 0:
            raise ValueError("loss_type='alphapo' needs a reward_alpha other than 0; its paper recommends 0.25.")

    @property
    def averages(self) -> bool:
        return CPO_LOSSES[self.loss_type].per_token if self.average_log_prob is None else self.average_log_prob


class SimPOOptions(CPOOptions):
    """The options of :class:`LigerFusedLinearSimPOLoss`."""

    loss_type: str = "simpo"


class ORPOOptions(ReferenceFreeOptions):
    """The options of :class:`LigerFusedLinearORPOLoss`."""

    average_log_prob: bool | None = True


class LigerFusedLinearCPOLoss(PreferenceLoss):
    """CPO and its variants: the mean of :func:`cpo_loss`, plus the chosen completions' negative log-likelihood.

    Args:
        beta: factor of the log-probabilities (> 0).
        alpha: factor of the chosen completions' mean negative log-likelihood, which ``compute_nll_loss`` adds.
        compute_nll_loss: add this negative log-likelihood.
        label_smoothing: assumed share of pairs whose labels are swapped, in [0, 1].
        average_log_prob: average the log-probabilities of each sequence. ``None`` follows the paper of the variant: all
            variants except ``sigmoid`` and ``hinge`` average.
        loss_type: ``sigmoid``, ``hinge``, ``ipo``, ``simpo`` or ``alphapo``.
        gamma: target reward margin of ``simpo`` and ``alphapo``.
        reward_alpha: AlphaPO's ``a``; 0 for plain log-probabilities.
        compiled, chunk_size: without effect, for code written for liger-kernel.
        ignore_index, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    @constructor(CPOOptions)
    def __init__(self) -> None: ...

    settings: CPOOptions
    positions = (
        *("ignore_index", "beta", "alpha", "label_smoothing", "compute_nll_loss", "compiled", "average_log_prob"),
        "chunk_size",
    )

    def pair_loss(self, pairs: Pairs) -> Tensor:
        chosen, rejected = self._scores(pairs)
        return CPO_LOSSES[self.settings.loss_type].loss(None, chosen - rejected, self.settings)

    def rewards(self, pairs: Pairs) -> tuple[Tensor, ...]:
        return tuple([self.settings.beta * score for score in self._scores(pairs)])

    def _scores(self, pairs: Pairs) -> list[Tensor]:
        return [alphapo_reward(x, self.settings.reward_alpha) for x in (pairs.chosen_logps, pairs.rejected_logps)]


class LigerFusedLinearSimPOLoss(LigerFusedLinearCPOLoss):
    """SimPO: the mean of :func:`simpo_loss`, plus the chosen completions' negative log-likelihood.

    It is :class:`LigerFusedLinearCPOLoss` with ``loss_type="simpo"``, whose other options it has.

    Args:
        beta: factor of the mean log-probabilities (> 0).
        gamma: target reward margin.
        alpha: factor of the chosen completions' mean negative log-likelihood, which ``compute_nll_loss`` adds.
        compute_nll_loss: add this negative log-likelihood, which the paper's loss does not have.
        label_smoothing: assumed share of pairs whose labels are swapped, in [0, 1].
    """

    @constructor(SimPOOptions)
    def __init__(self) -> None: ...

    positions = (
        *("ignore_index", "beta", "alpha", "label_smoothing", "compute_nll_loss", "compiled", "gamma", "chunk_size"),
    )


class ORPOMetrics(NamedTuple):
    """:class:`PreferenceMetrics` and two more of ORPO, in liger-kernel's order."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    chosen_nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    log_odds_ratio: Tensor
    log_odds_chosen: Tensor


class LigerFusedLinearORPOLoss(PreferenceLoss[ORPOMetrics]):
    """ORPO: the mean of :func:`orpo_loss`, plus the chosen completions' negative log-likelihood (arXiv:2403.07691).

    Args:
        beta: weight of the odds ratio (> 0).
        compute_nll_loss: add the chosen completions' mean negative log-likelihood, ``alpha`` times.
        compiled, chunk_size: without effect, for code written for liger-kernel.
        ignore_index, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    @constructor(ORPOOptions)
    def __init__(self) -> None: ...

    positions = ("ignore_index", "beta", "compute_nll_loss", "compiled", "chunk_size")

    if not TYPE_CHECKING:  # checkers see that of PreferenceLoss, which has both forms of the call

        @operator
        def forward(self, lin_weight: Any, _input: Any, target: Any, bias: Any = None, nll_target: Any = None) -> Any:
            """Like :meth:`PreferenceLoss.forward`, with ``nll_target`` instead of a reference."""
            return super().forward(lin_weight, _input, target, bias, nll_target=nll_target)

    def pair_loss(self, pairs: Pairs) -> Tensor:
        return orpo_loss(pairs.chosen_logps, pairs.rejected_logps, beta=self.beta)

    def result(self, loss: Tensor, pairs: Pairs, metrics: PreferenceMetrics) -> tuple[Tensor, ORPOMetrics]:
        margin = _log_odds(pairs.chosen_logps.detach()) - _log_odds(pairs.rejected_logps.detach())
        means = (value.sum().to(loss.dtype) / max(len(margin), 1) for value in (F.logsigmoid(margin), margin))
        return loss, ORPOMetrics(*metrics, *means)
