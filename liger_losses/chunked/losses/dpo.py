"""DPO and its variants as pure functions of log-probabilities. B pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine.checks import check_names, check_range
from liger_losses.chunked.losses.pairs import Pairs

# exp() of more than this overflows fp32.
MAX_EXPONENT = 80.0


@dataclass(frozen=True)
class DPOOptions:
    """The options of DPO's losses; see :class:`LigerFusedLinearDPOLoss`.

    Raises:
        TypeError, ValueError: an unknown name (with the list), or an option out of its range.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    loss_type: str | Sequence[str] = "sigmoid"
    loss_weights: Sequence[float] | None = None
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 1.0

    @property
    def loss_types(self) -> tuple[str, ...]:
        """One or several names."""
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @property
    def weights(self) -> tuple[float, ...]:
        """One per name."""
        return (1.0,) * len(self.loss_types) if self.loss_weights is None else tuple(self.loss_weights)

    def __post_init__(self) -> None:
        types, smoothing = self.loss_types, self.label_smoothing
        check_range("beta", self.beta, 0.0, math.inf, open_low=True)
        check_names(types or ("",), DPO_LOSSES, "loss_type")
        if len(self.weights) != len(types):
            raise ValueError(f"loss_weights must have one entry per loss_type, got {self.weights} for {types}.")
        check_names([self.f_divergence_type], F_DIVERGENCES, "f_divergence_type")
        if self.f_divergence_type != "reverse_kl":
            check_names(types, _MARGIN_LOSSES, f"loss_type for f_divergence_type={self.f_divergence_type!r}")
        check_range("label_smoothing", smoothing, 0.0, 1.0)
        if "robust" in types and smoothing >= 0.5:
            raise ValueError(f"label_smoothing must be below 0.5 for loss_type='robust', got {smoothing!r}.")
        if "exo_pair" in types and not 0 < smoothing < 1:
            raise ValueError(
                f"label_smoothing must be above 0 for loss_type='exo_pair', got {smoothing!r}; its paper "
                "recommends 1e-3."
            )
        check_range("discopop_tau", self.discopop_tau, 0.0, math.inf, open_low=True)


@dataclass(frozen=True)
class Scores:
    """``f'`` of the probability ratios under the chosen f-divergence, ``[B]``; the log-ratios for reverse KL."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected


def smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    """``-(1 - e) log sigmoid(x) - e log sigmoid(-x)``."""
    loss = -(1 - label_smoothing) * F.logsigmoid(margin)
    return loss - label_smoothing * F.logsigmoid(-margin) if label_smoothing else loss


def _sigmoid(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """``-log sigmoid(beta * margin)``: DPO (arXiv:2305.18290, eq. 7); smoothed, cDPO."""
    return smoothed(o.beta * scores.margin, o.label_smoothing)


def _sigmoid_norm(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """DPO on per-token scores (Tulu 3, arXiv:2411.15124)."""
    return smoothed(o.beta * _per_token(pairs, scores).margin, o.label_smoothing)


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
    return smoothed(o.beta * (policy - reference), o.label_smoothing)


def _aot_unpaired(pairs: Pairs, scores: Scores, o: DPOOptions) -> Tensor:
    """DPO on the batch's sorted log-ratios of chosen and rejected: AOT, unpaired (arXiv:2406.05882)."""
    margin = pairs.chosen_logratios.sort().values - pairs.rejected_logratios.sort().values
    return smoothed(o.beta * margin, o.label_smoothing)


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
    # exp(-x) overflows where m vanishes, so their product is computed in the exponent.
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
#: The losses of the score margin alone, for which an f-divergence other than reverse KL is defined.
_MARGIN_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")

#: ``f'(t)`` of each divergence at ``t = exp(logratio)`` (f-DPO, arXiv:2309.16240, table 1), up to a constant.
F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda u, alpha: u,
    "forward_kl": lambda u, alpha: -torch.expm1((-u).clamp(max=MAX_EXPONENT)),
    "js_divergence": lambda u, alpha: F.logsigmoid(u) + math.log(2),
    "alpha_divergence": lambda u, alpha: (
        u if abs(alpha - 1) < 1e-6 else torch.expm1(((alpha - 1) * u).clamp(max=MAX_EXPONENT)) / (alpha - 1)
    ),
}


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    chosen_nll: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """DPO or one of its variants, for each pair: ``sum_i loss_weights_i * DPO_LOSSES[loss_type_i]``.

    The default is ``-log sigmoid(beta * ((logp_w - ref_w) - (logp_l - ref_l)))`` (arXiv:2305.18290, eq. 7); each entry
    of :data:`DPO_LOSSES` has its formula and source.

    Args:
        chosen_logps, rejected_logps: ``[B]``, the policy's log-probability of each completion.
        ref_chosen_logps, ref_rejected_logps: ``[B]``, the reference's; zeros without a reference.
        chosen_lengths, rejected_lengths: ``[B]``, numbers of tokens, for ``ipo`` and ``sigmoid_norm``.
        chosen_nll: 0-dim, mean negative log-likelihood of the chosen tokens, for ``sft``.
        options: the fields of :class:`DPOOptions`: ``beta=0.1``, ``loss_type="sigmoid"`` (or several names),
            ``loss_weights``, ``label_smoothing=0.0``, ``discopop_tau=0.05``, ``f_divergence_type="reverse_kl"``,
            ``f_alpha_divergence_coef=1.0``. See :class:`LigerFusedLinearDPOLoss`.

    Returns:
        ``[B]``.

    Raises:
        TypeError, ValueError: an option out of its range, or lengths or a likelihood that are missing.
    """
    o = DPOOptions(**options)
    if {"ipo", "sigmoid_norm"} & {*o.loss_types} and (chosen_lengths is None or rejected_lengths is None):
        raise ValueError("'ipo' and 'sigmoid_norm' divide by lengths: give chosen_lengths= and rejected_lengths=.")
    if "sft" in o.loss_types and chosen_nll is None:
        raise ValueError("'sft' is the likelihood of the chosen completions: give chosen_nll=.")
    pairs = Pairs(
        *(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps),
        *(chosen_lengths, rejected_lengths, chosen_nll),  # type: ignore[arg-type]
    )
    divergence = F_DIVERGENCES[o.f_divergence_type]
    scores = Scores(
        divergence(pairs.chosen_logratios, o.f_alpha_divergence_coef),
        divergence(pairs.rejected_logratios, o.f_alpha_divergence_coef),
    )
    terms = [weight * DPO_LOSSES[name](pairs, scores, o) for name, weight in zip(o.loss_types, o.weights, strict=True)]
    return torch.stack(terms).sum(0)
