"""Preference losses: DPO and its kin, CPO, SimPO, ORPO. Each is a function of :class:`Pairs`. B pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine import Statistics
from liger_losses.chunked.engine.checks import check_names, check_range
from liger_losses.chunked.losses.completions import sequence_logps
from liger_losses.chunked.losses.pairs import Pairs, PreferenceLoss, PreferenceMetrics

# exp() of more than this overflows fp32.
_MAX_EXPONENT = 80.0
# fp32 cannot tell exp(x) from 1 for an x closer to 0: ORPO's odds end here.
_MIN_SURPRISE = 2.0**-23


# --- DPO's losses --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DPOOptions:
    """What DPO's losses are tuned by. See :class:`LigerFusedLinearDPOLoss`."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05


@dataclass(frozen=True)
class Scores:
    """``f'`` of the probability ratios under the chosen f-divergence, ``[B]``; the log-ratios for reverse KL."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    """``-(1 - e) log sigmoid(x) - e log sigmoid(-x)``."""
    loss = -(1 - label_smoothing) * F.logsigmoid(margin)
    return loss - label_smoothing * F.logsigmoid(-margin) if label_smoothing else loss


def _sigmoid(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``-log sigmoid(beta * margin)``: DPO (arXiv:2305.18290, eq. 7); smoothed, cDPO."""
    return _smoothed(o.beta * scores.margin, o.label_smoothing)


def _sigmoid_norm(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """DPO on per-token scores (Tulu 3, arXiv:2411.15124)."""
    return _smoothed(o.beta * _per_token(pairs, scores).margin, o.label_smoothing)


def _hinge(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``max(0, 1 - beta * margin)``: SLiC (arXiv:2305.10425) as in RSO (arXiv:2309.06657)."""
    return torch.relu(1 - o.beta * scores.margin)


def _ipo(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``(margin per token - 1 / (2 beta))^2``: IPO (arXiv:2310.12036, eq. 17), beta being its tau."""
    return (_per_token(pairs, scores).margin - 1 / (2 * o.beta)).square()


def _exo_pair(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``KL([s, 1 - s] || [1 - e, e])``, ``s = sigmoid(beta * margin)``: EXO (arXiv:2402.00856, eq. 16)."""
    margin, e = o.beta * scores.margin, o.label_smoothing
    log_s, log_not_s = F.logsigmoid(margin), F.logsigmoid(-margin)
    return log_s.exp() * (log_s - math.log1p(-e)) + log_not_s.exp() * (log_not_s - math.log(e))


def _nca_pair(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``-log s(r_w) - 1/2 log s(-r_w) - 1/2 log s(-r_l)``: NCA (arXiv:2402.05369)."""
    chosen, rejected = o.beta * pairs.chosen_logratios, o.beta * pairs.rejected_logratios
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """Unbiased under a share ``e`` of flipped labels: robust DPO (arXiv:2403.00409)."""
    margin, e = o.beta * scores.margin, o.label_smoothing
    return (-(1 - e) * F.logsigmoid(margin) + e * F.logsigmoid(-margin)) / (1 - 2 * e)


def _bco_pair(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``-log s(r_w) - log s(-r_l)``: BCO's paired form (arXiv:2404.04656)."""
    return -F.logsigmoid(o.beta * pairs.chosen_logratios) - F.logsigmoid(-o.beta * pairs.rejected_logratios)


def _sppo_hard(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``(logratio_w - 1 / (2 beta))^2 + (logratio_l + 1 / (2 beta))^2``: SPPO (arXiv:2405.00675, eq. 4.7, P = 1, 0)."""
    half = 0.5 / o.beta
    return (pairs.chosen_logratios - half).square() + (pairs.rejected_logratios + half).square()


def _aot(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """DPO on the batch's sorted margins of policy and reference: AOT, paired (arXiv:2406.05882)."""
    policy = (pairs.chosen_logps - pairs.rejected_logps).sort().values
    reference = (pairs.ref_chosen_logps - pairs.ref_rejected_logps).sort().values
    return _smoothed(o.beta * (policy - reference), o.label_smoothing)


def _aot_unpaired(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """DPO on the batch's sorted log-ratios of chosen and rejected: AOT, unpaired (arXiv:2406.05882)."""
    margin = pairs.chosen_logratios.sort().values - pairs.rejected_logratios.sort().values
    return _smoothed(o.beta * margin, o.label_smoothing)


def _apo_zero(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``1 - s(r_w) + s(r_l)``: APO-zero (arXiv:2408.06266, eq. 7)."""
    return torch.sigmoid(-o.beta * pairs.chosen_logratios) + torch.sigmoid(o.beta * pairs.rejected_logratios)


def _apo_down(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``s(r_w) + 1 - s(r_w - r_l)``: APO-down (arXiv:2408.06266, eq. 8)."""
    margin = pairs.chosen_logratios - pairs.rejected_logratios
    return torch.sigmoid(o.beta * pairs.chosen_logratios) + torch.sigmoid(-o.beta * margin)


def _discopop(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``(1 - m) * -log s(x) + m * exp(-x)``, ``m = s(x / tau)``: DiscoPOP (arXiv:2406.08414, eq. 5)."""
    x = o.beta * scores.margin
    # exp(-x) overflows where m vanishes: their product is taken in the exponent.
    return -F.logsigmoid(x) * torch.sigmoid(-x / o.discopop_tau) + torch.exp(F.logsigmoid(x / o.discopop_tau) - x)


def _sft(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """The mean negative log-likelihood of the chosen tokens, once per pair."""
    return pairs.chosen_nll.expand_as(pairs.chosen_logps)


def _per_token(pairs: Pairs, scores: Scores) -> Scores:
    return Scores(
        scores.chosen / pairs.chosen_lengths.clamp(min=1), scores.rejected / pairs.rejected_lengths.clamp(min=1)
    )


#: Each loss of :class:`LigerFusedLinearDPOLoss`: ``[B]`` losses from pairs, scores and options.
DPO_LOSSES: dict[str, Callable[[Pairs, Scores, DPOOptions], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sft": _sft,
}
#: Those that are a function of the score margin, so that an f-divergence other than reverse KL has a meaning.
_MARGIN_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")

#: ``f'(t)`` of each divergence at ``t = exp(logratio)`` (f-DPO, arXiv:2309.16240, table 1), up to a constant.
F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda u, alpha: u,
    "forward_kl": lambda u, alpha: -torch.expm1((-u).clamp(max=_MAX_EXPONENT)),
    "js_divergence": lambda u, alpha: F.logsigmoid(u) + math.log(2),
    "alpha_divergence": lambda u, alpha: (
        u if abs(alpha - 1) < 1e-6 else torch.expm1(((alpha - 1) * u).clamp(max=_MAX_EXPONENT)) / (alpha - 1)
    ),
}


# --- The classes ---------------------------------------------------------------------------------------------------


class LigerFusedLinearDPOLoss(PreferenceLoss):
    """DPO and its variants, one or several at once.

    ``loss = sum_i loss_weights_i * mean over pairs of DPO_LOSSES[loss_type_i]``, for example ``sigmoid``:
    ``-log sigmoid(beta * (log pi(y_w)/pi_ref(y_w) - log pi(y_l)/pi_ref(y_l)))`` (Rafailov et al. 2023,
    arXiv:2305.18290, eq. 7). Each entry of :data:`DPO_LOSSES` names its formula and paper.

    Args:
        ignore_index, beta, alpha, compute_nll_loss, compiled, use_ref_model, average_log_prob, chunk_size: as in
            :class:`PreferenceLoss`.
        loss_type: a name from :data:`DPO_LOSSES`, or several.
        label_smoothing: share of pairs taken to be labelled the wrong way round, in [0, 1]; ``robust`` needs less
            than 0.5, ``exo_pair`` more than 0. Read by ``sigmoid``, ``sigmoid_norm``, ``exo_pair``, ``robust``,
            ``aot`` and ``aot_unpaired``; the others' papers have none.
        discopop_tau: temperature of DiscoPOP's mixture (> 0).
        loss_weights: one per ``loss_type``; 1 by default.
        f_divergence_type: a name from :data:`F_DIVERGENCES`; others than ``reverse_kl`` only with losses of the
            score margin.
        f_alpha_divergence_coef: alpha of ``alpha_divergence``.
        ld_alpha: weight of the tokens beyond the pair's shared length (LD-DPO, arXiv:2409.06411), in [0, 1].
        use_weighting: weight pairs by how likely the policy is to sample them (WPO, arXiv:2406.11827, eq. 2).
        options: as in :class:`liger_losses.chunked.losses.base.ChunkedLoss`.

    Raises:
        ValueError: an unknown name (with the list), or an option out of its range.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = False,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int | None = None,
        loss_type: str | Sequence[str] = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        *,
        loss_weights: Sequence[float] | None = None,
        f_divergence_type: str = "reverse_kl",
        f_alpha_divergence_coef: float = 1.0,
        ld_alpha: float | None = None,
        use_weighting: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            ignore_index,
            beta,
            alpha,
            compute_nll_loss,
            average_log_prob,
            use_ref_model,
            chunk_size,
            compiled,
            **options,
        )
        types = (loss_type,) if isinstance(loss_type, str) else tuple(loss_type)
        check_names(types or ("",), DPO_LOSSES, "loss_type")
        weights = tuple(loss_weights) if loss_weights is not None else (1.0,) * len(types)
        if len(weights) != len(types):
            raise ValueError(f"loss_weights must have one entry per loss_type, got {weights} for {types}.")
        check_names([f_divergence_type], F_DIVERGENCES, "f_divergence_type")
        if f_divergence_type != "reverse_kl":
            check_names(types, _MARGIN_LOSSES, f"loss_type for f_divergence_type={f_divergence_type!r}")
        check_range("label_smoothing", label_smoothing, 0.0, 1.0)
        if "robust" in types and label_smoothing >= 0.5:
            raise ValueError(f"label_smoothing must be below 0.5 for loss_type='robust', got {label_smoothing!r}.")
        if "exo_pair" in types and not 0 < label_smoothing < 1:
            raise ValueError(
                f"label_smoothing must be above 0 for loss_type='exo_pair', got {label_smoothing!r}; its paper "
                "recommends 1e-3."
            )
        check_range("discopop_tau", discopop_tau, 0.0, math.inf, open_low=True)
        if ld_alpha is not None:
            check_range("ld_alpha", ld_alpha, 0.0, 1.0)
        if use_weighting and {"aot", "aot_unpaired"} & set(types):
            raise ValueError("use_weighting has no meaning for 'aot' and 'aot_unpaired', which sort away the pairs.")
        if average_log_prob and {"ipo", "sigmoid_norm"} & set(types):
            raise ValueError(
                "'ipo' and 'sigmoid_norm' divide by the length themselves: average_log_prob=True would do it twice."
            )
        self.loss_type, self.loss_types, self.loss_weights = loss_type, types, weights
        self.label_smoothing, self.discopop_tau = label_smoothing, discopop_tau
        self.loss_options = DPOOptions(beta, label_smoothing, discopop_tau)
        self.f_divergence_type = f_divergence_type
        self.f_alpha_divergence_coef = f_alpha_divergence_coef
        self.ld_alpha = ld_alpha
        self.use_weighting = use_weighting
        if use_weighting:
            self.metrics = ("mean_logit", "log_sum_sq_probs")  # type: ignore[misc]

    def pair_loss(self, pairs: Pairs) -> Tensor:
        divergence = F_DIVERGENCES[self.f_divergence_type]
        scores = Scores(
            divergence(pairs.chosen_logratios, self.f_alpha_divergence_coef),
            divergence(pairs.rejected_logratios, self.f_alpha_divergence_coef),
        )
        terms = [
            weight * DPO_LOSSES[name](pairs, scores, self.loss_options)
            for name, weight in zip(self.loss_types, self.loss_weights, strict=True)
        ]
        return torch.stack(terms).sum(0)

    def sequence_weight(self, statistics: Statistics, mask: Tensor) -> Tensor | None:
        if not self.use_weighting:
            return None
        return sequence_logps(statistics.logp - statistics.log_sum_sq_probs, mask, average=True).exp()


class LigerFusedLinearCPOLoss(PreferenceLoss):
    """CPO and its variants: preference optimisation without a reference model, plus the chosen likelihood.

    With ``r`` the sequences' log-probabilities, or AlphaPO's reward ``(1 - p^-a) / a``::

        sigmoid   -log sigmoid(beta (r_w - r_l))              CPO, arXiv:2401.08417, eq. 3
        hinge     max(0, 1 - beta (r_w - r_l))                SLiC, arXiv:2305.10425
        ipo       (r_w - r_l - 1 / (2 beta))^2                IPO, arXiv:2310.12036, eq. 17
        simpo     -log sigmoid(beta (r_w - r_l) - gamma)      SimPO, arXiv:2405.14734, eq. 6
        alphapo   simpo with a reward_alpha other than 0      AlphaPO, arXiv:2501.03884

    Args:
        ignore_index, beta, alpha, compute_nll_loss, compiled, chunk_size: as in :class:`PreferenceLoss`.
        label_smoothing: share of pairs taken to be labelled the wrong way round (``sigmoid``, ``simpo``), in [0, 1].
        average_log_prob: average each sequence's log-probabilities; by default as the variant's paper has it (all
            but ``sigmoid`` and ``hinge`` do).
        loss_type: see above.
        gamma: target reward margin of ``simpo``.
        reward_alpha: AlphaPO's ``a``; 0 for plain log-probabilities.
        options: as in :class:`liger_losses.chunked.losses.base.ChunkedLoss`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = False,
        average_log_prob: bool | None = None,
        chunk_size: int | None = None,
        *,
        loss_type: str = "sigmoid",
        gamma: float = 0.5,
        reward_alpha: float = 0.0,
        **options: Any,
    ) -> None:
        check_names([loss_type], (*_CPO_LOSSES, "alphapo"), "loss_type")
        check_range("label_smoothing", label_smoothing, 0.0, 1.0)
        if average_log_prob is None:
            average_log_prob = loss_type in ("ipo", "simpo", "alphapo")
        super().__init__(
            ignore_index, beta, alpha, compute_nll_loss, average_log_prob, False, chunk_size, compiled, **options
        )
        if loss_type == "alphapo" and reward_alpha == 0:
            raise ValueError("loss_type='alphapo' needs a reward_alpha other than 0; its paper recommends 0.25.")
        self.loss_type = "simpo" if loss_type == "alphapo" else loss_type
        self.label_smoothing = label_smoothing
        self.gamma = gamma
        self.reward_alpha = reward_alpha

    def pair_loss(self, pairs: Pairs) -> Tensor:
        margin = self._reward(pairs.chosen_logps) - self._reward(pairs.rejected_logps)
        return _CPO_LOSSES[self.loss_type](margin, self)

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        return self.beta * self._reward(pairs.chosen_logps), self.beta * self._reward(pairs.rejected_logps)

    def _reward(self, logps: Tensor) -> Tensor:
        a = self.reward_alpha
        return logps if a == 0 else -torch.expm1((-a * logps).clamp(max=_MAX_EXPONENT)) / a


_CPO_LOSSES: dict[str, Callable[[Tensor, LigerFusedLinearCPOLoss], Tensor]] = {
    "sigmoid": lambda margin, o: _smoothed(o.beta * margin, o.label_smoothing),
    "hinge": lambda margin, o: torch.relu(1 - o.beta * margin),
    "ipo": lambda margin, o: (margin - 1 / (2 * o.beta)).square(),
    "simpo": lambda margin, o: _smoothed(o.beta * margin - o.gamma, o.label_smoothing),
}


class LigerFusedLinearSimPOLoss(LigerFusedLinearCPOLoss):
    """SimPO: ``-log sigmoid(beta (mean log p(y_w) - mean log p(y_l)) - gamma)``, plus the chosen likelihood.

    Meng et al. 2024, arXiv:2405.14734, eq. 6. It is :class:`LigerFusedLinearCPOLoss` with ``loss_type="simpo"``.

    Args:
        ignore_index, beta, alpha, label_smoothing, compute_nll_loss, compiled, gamma, chunk_size, options: as there.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = False,
        gamma: float = 0.5,
        chunk_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            ignore_index,
            beta,
            alpha,
            label_smoothing,
            compute_nll_loss,
            compiled,
            chunk_size=chunk_size,
            loss_type="simpo",
            gamma=gamma,
            **options,
        )


class ORPOMetrics(NamedTuple):
    """:class:`PreferenceMetrics` and ORPO's own two, in Liger's order."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    chosen_nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    log_odds_ratio: Tensor
    log_odds_chosen: Tensor


class LigerFusedLinearORPOLoss(PreferenceLoss):
    """ORPO: ``chosen_nll - beta * log sigmoid(log odds(y_w) - log odds(y_l))``, ``odds = p / (1 - p)``.

    Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7; p is the exponential of the mean log-probability. Odds end at
    ``p = exp(-2^-23)``, beyond which fp32 cannot tell p from 1: a completion of probability 1 has log-odds 15.9.

    Args:
        ignore_index, beta, compute_nll_loss, compiled, chunk_size, options: as in :class:`PreferenceLoss`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = False,
        chunk_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(ignore_index, beta, 1.0, compute_nll_loss, True, False, chunk_size, compiled, **options)

    def forward(  # type: ignore[override]
        self,
        lin_weight: Tensor,
        _input: Any,
        target: Any,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, ORPOMetrics]:
        """As :meth:`PreferenceLoss.forward`, without a reference and with ``nll_target`` in its place."""
        return super().forward(lin_weight, _input, target, bias, nll_target=nll_target)

    def pair_loss(self, pairs: Pairs) -> Tensor:
        return -self.beta * F.logsigmoid(_log_odds(pairs.chosen_logps) - _log_odds(pairs.rejected_logps))

    def result(self, loss: Tensor, pairs: Pairs, metrics: PreferenceMetrics) -> tuple[Tensor, ORPOMetrics]:
        with torch.no_grad():
            margin = _log_odds(pairs.chosen_logps) - _log_odds(pairs.rejected_logps)
            ratio, count = F.logsigmoid(margin), max(margin.shape[0], 1)
        means = (value.sum().to(loss.dtype) / count for value in (ratio, margin))
        return loss, ORPOMetrics(*metrics, *means)


def _log_odds(logps: Tensor) -> Tensor:
    """``log(p / (1 - p))`` of ``log p``, finite up to p = 1."""
    logps = logps.clamp(max=-_MIN_SURPRISE)
    return logps - torch.log(-torch.expm1(logps))
