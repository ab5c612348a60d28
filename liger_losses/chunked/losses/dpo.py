"""DPO and its variants, and losses of pairs without a reference model: CPO, SimPO, ORPO. B pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses import checks
from liger_losses.arguments import options_of, typed_as
from liger_losses.checks import FiniteFloat, PositiveFloat, UnitFloat
from liger_losses.chunked import Statistics
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.losses.base import constructor
from liger_losses.chunked.losses.completion_loss import MAX_EXPONENT, sequence_logps, wide_dtype
from liger_losses.chunked.losses.pairs import (
    PairLogps,
    Pairs,
    PreferenceLoss,
    PreferenceMetrics,
    PreferenceOptions,
    smoothed,
)

#: Losses that TRL's DPO had, or that are separate classes.
_OTHERS = {
    "kto_pair": "LigerFusedLinearKTOLoss, of single completions",
    "orpo": "LigerFusedLinearORPOLoss",
    "cpo": "LigerFusedLinearCPOLoss",
    "simpo": "LigerFusedLinearSimPOLoss",
}


@dataclass(frozen=True, kw_only=True)
class DPOOptions:
    """The options of DPO's losses; see :class:`LigerFusedLinearDPOLoss`."""

    #: The names that ``loss_type`` is, one or several.
    loss_types: ClassVar[tuple[str, ...]]

    beta: PositiveFloat = 0.1
    label_smoothing: UnitFloat = 0.0
    discopop_tau: PositiveFloat = 0.05
    loss_type: str | Sequence[str] = "sigmoid"
    loss_weights: Sequence[float] | None = None
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: FiniteFloat = 1.0

    @property
    def variants(self) -> list[Variant]:
        """The rows that ``loss_type`` names."""
        return [DPO_LOSSES[name] for name in self.loss_types]

    def __post_init__(self) -> None:
        several = isinstance(self.loss_type, Iterable) and not isinstance(self.loss_type, str)
        types: Any = tuple(self.loss_type) if several else (self.loss_type,)
        object.__setattr__(self, "loss_types", types)
        smoothing, weights = self.label_smoothing, self.loss_weights
        checks.check_fields(self)
        checks.check_names(types or ("",), DPO_LOSSES, "loss_type", _OTHERS)
        if weights is not None and (not hasattr(weights, "__len__") or len(weights) != len(types)):
            raise ValueError(f"loss_weights must have one entry per loss_type, got {weights} for {types}.")
        for weight in () if weights is None else weights:
            checks.check_range("each of loss_weights", weight, -math.inf, math.inf)
        checks.check_names([self.f_divergence_type], F_DIVERGENCES, "f_divergence_type")
        if self.f_divergence_type != "reverse_kl":
            of_margin = [name for name, row in DPO_LOSSES.items() if row.of_margin]
            checks.check_names(types, of_margin, f"loss_type for f_divergence_type={self.f_divergence_type!r}")
        if "robust" in types and smoothing >= 0.5:
            raise ValueError(f"label_smoothing must be below 0.5 for loss_type='robust', got {smoothing!r}.")
        if "exo_pair" in types and not 0 < smoothing < 1:
            message = "label_smoothing must be above 0 for loss_type='exo_pair' (its paper recommends 1e-3)"
            raise ValueError(f"{message}, got {smoothing!r}.")


def _exo_pair(pairs: PairLogps, margin: Tensor, o: DPOOptions) -> Tensor:
    """``KL([s, 1 - s] || [1 - e, e])``, ``s = sigmoid(beta * margin)``: EXO (arXiv:2402.00856, eq. 16)."""
    log_s, log_not_s, e = F.logsigmoid(o.beta * margin), F.logsigmoid(-o.beta * margin), o.label_smoothing
    return log_s.exp() * (log_s - math.log1p(-e)) + log_not_s.exp() * (log_not_s - math.log(e))


def _nca_pair(pairs: PairLogps, margin: Tensor, o: DPOOptions) -> Tensor:
    """``-log s(r_w) - 1/2 log s(-r_w) - 1/2 log s(-r_l)``: NCA (arXiv:2402.05369)."""
    chosen, rejected = o.beta * pairs.chosen_logratios, o.beta * pairs.rejected_logratios
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(pairs: PairLogps, margin: Tensor, o: DPOOptions) -> Tensor:
    """Unbiased under a share ``e`` of flipped labels: robust DPO (arXiv:2403.00409)."""
    x, e = o.beta * margin, o.label_smoothing
    return (-(1 - e) * F.logsigmoid(x) + e * F.logsigmoid(-x)) / (1 - 2 * e)


def _sppo_hard(pairs: PairLogps, margin: Tensor, o: DPOOptions) -> Tensor:
    """``(logratio_w - 1 / (2 beta))^2 + (logratio_l + 1 / (2 beta))^2``: SPPO (arXiv:2405.00675, eq. 4.7, P = 1, 0)."""
    half = 0.5 / o.beta
    return (pairs.chosen_logratios - half).square() + (pairs.rejected_logratios + half).square()


def _aot(pairs: PairLogps, margin: Tensor, o: DPOOptions) -> Tensor:
    """DPO on the batch's sorted margins of policy and reference: AOT, paired (arXiv:2406.05882)."""
    policy = (pairs.chosen_logps - pairs.rejected_logps).sort().values
    reference = (pairs.ref_chosen_logps - pairs.ref_rejected_logps).sort().values
    return smoothed(o.beta * (policy - reference), o.label_smoothing)


def _aot_unpaired(pairs: PairLogps, margin: Tensor, o: DPOOptions) -> Tensor:
    """DPO on the batch's sorted log-ratios of chosen and rejected: AOT, unpaired (arXiv:2406.05882)."""
    margin = pairs.chosen_logratios.sort().values - pairs.rejected_logratios.sort().values
    return smoothed(o.beta * margin, o.label_smoothing)


def _discopop(pairs: PairLogps, margin: Tensor, o: DPOOptions) -> Tensor:
    """``(1 - m) * -log s(x) + m * exp(-x)``, ``m = s(x / tau)``: DiscoPOP (arXiv:2406.08414, eq. 5)."""
    x = o.beta * margin
    # exp(-x) overflows where m vanishes, so their product is computed in the exponent.
    return -F.logsigmoid(x) * torch.sigmoid(-x / o.discopop_tau) + torch.exp(F.logsigmoid(x / o.discopop_tau) - x)


class Variant(NamedTuple):
    """A variant of DPO.

    Args:
        loss: ``[B]`` losses from (pairs, the margin of their log-ratios or of another divergence's scores, options).
        of_margin: it is a function of the margin alone, for which an f-divergence other than reverse KL is defined.
        per_token: its margin is of scores divided by the completions' lengths.
        sorts: it is a function of the batch's sorted margins: no loss belongs to a single pair.
    """

    loss: Callable[[Any, Tensor, Any], Tensor]
    of_margin: bool = False
    per_token: bool = False
    sorts: bool = False


def _sigmoid(pairs: PairLogps, margin: Tensor, o: DPOOptions) -> Tensor:
    """``-log s(beta * margin)``: DPO (arXiv:2305.18290, eq. 7), smoothed cDPO; per token, Tulu 3 (arXiv:2411.15124)."""
    return smoothed(o.beta * margin, o.label_smoothing)


#: ``s`` is the sigmoid, ``r`` is ``beta * logratio``.
DPO_LOSSES = {
    "sigmoid": Variant(_sigmoid, of_margin=True),
    "sigmoid_norm": Variant(_sigmoid, of_margin=True, per_token=True),
    # max(0, 1 - beta * margin): SLiC (arXiv:2305.10425) as in RSO (arXiv:2309.06657)
    "hinge": Variant(lambda pairs, margin, o: torch.relu(1 - o.beta * margin), of_margin=True),
    # (margin per token - 1 / (2 beta))^2: IPO (arXiv:2310.12036, eq. 17), beta being its tau
    "ipo": Variant(lambda pairs, margin, o: (margin - 1 / (2 * o.beta)).square(), of_margin=True, per_token=True),
    "exo_pair": Variant(_exo_pair, of_margin=True),
    "nca_pair": Variant(_nca_pair),
    "robust": Variant(_robust, of_margin=True),
    # -log s(r_w) - log s(-r_l): BCO's paired form (arXiv:2404.04656)
    "bco_pair": Variant(
        lambda pairs, margin, o: (
            -F.logsigmoid(o.beta * pairs.chosen_logratios) - F.logsigmoid(-o.beta * pairs.rejected_logratios)
        )
    ),
    "sppo_hard": Variant(_sppo_hard),
    "aot": Variant(_aot, sorts=True),
    "aot_unpaired": Variant(_aot_unpaired, sorts=True),
    # 1 - s(r_w) + s(r_l): APO-zero (arXiv:2408.06266, eq. 7)
    "apo_zero": Variant(
        lambda pairs, margin, o: (
            torch.sigmoid(-o.beta * pairs.chosen_logratios) + torch.sigmoid(o.beta * pairs.rejected_logratios)
        )
    ),
    # s(r_w) + 1 - s(r_w - r_l): APO-down (arXiv:2408.06266, eq. 8)
    "apo_down": Variant(
        lambda pairs, margin, o: torch.sigmoid(o.beta * pairs.chosen_logratios) + torch.sigmoid(-o.beta * margin)
    ),
    "discopop": Variant(_discopop, of_margin=True),
    # the mean negative log-likelihood of the chosen tokens, once per pair
    "sft": Variant(lambda pairs, margin, o: pairs.chosen_nll.expand_as(pairs.chosen_logps), of_margin=True),
}

#: Scores: ``f'(t)`` of each divergence at ``t = exp(logratio)`` (f-DPO, arXiv:2309.16240, table 1), up to a constant.
F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda u, alpha: u,
    "forward_kl": lambda u, alpha: -torch.expm1((-u).clamp(max=MAX_EXPONENT)),
    "js_divergence": lambda u, alpha: F.logsigmoid(u) + math.log(2),
    "alpha_divergence": lambda u, alpha: (
        u if abs(alpha - 1) < 1e-6 else torch.expm1(((alpha - 1) * u).clamp(max=MAX_EXPONENT)) / (alpha - 1)
    ),
}


@dataclass(frozen=True)
class _DPOArguments(DPOOptions, PairLogps):
    """What :func:`dpo_loss` takes."""


@typed_as(_DPOArguments)
def dpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, ref_chosen_logps: Tensor, ref_rejected_logps: Tensor, **others: Any
) -> Tensor:
    """DPO or one of its variants, ``[B]``: ``sum_i loss_weights_i * DPO_LOSSES[loss_type_i]``.

    The default is ``-log sigmoid(beta * ((logp_w - ref_w) - (logp_l - ref_l)))`` (arXiv:2305.18290, eq. 7); each entry
    of :data:`DPO_LOSSES` has its formula and source.

    Args:
        chosen_logps, rejected_logps: ``[B]``, the policy's log-probability of each completion.
        ref_chosen_logps, ref_rejected_logps: ``[B]``, the same under the reference; zeros without a reference.
        chosen_lengths, rejected_lengths: ``[B]``, numbers of tokens, for ``ipo`` and ``sigmoid_norm``.
        chosen_nll: 0-dim, mean negative log-likelihood of the chosen tokens, for ``sft``.
        options: ``beta=0.1``, ``loss_type="sigmoid"`` (or several names), ``loss_weights``, ``label_smoothing=0.0``,
            ``discopop_tau=0.05``, ``f_divergence_type="reverse_kl"``, ``f_alpha_divergence_coef=1.0``: see
            :class:`LigerFusedLinearDPOLoss`.

    Raises:
        TypeError, ValueError: an option out of its range, or lengths or a likelihood that are missing.
    """
    optional = {name: others.pop(name) for name in PairLogps.__dataclass_fields__ if name in others}
    o = options_of(DPOOptions, dpo_loss, others)
    pairs = PairLogps(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, **optional)
    if any(row.per_token for row in o.variants) and (pairs.chosen_lengths is None or pairs.rejected_lengths is None):
        raise ValueError("'ipo' and 'sigmoid_norm' divide by lengths: give chosen_lengths= and rejected_lengths=.")
    if "sft" in o.loss_types and pairs.chosen_nll is None:
        raise ValueError("'sft' is the likelihood of the chosen completions: give chosen_nll=.")
    checks.check_alike(**{name: getattr(pairs, name) for name in PairLogps.__match_args__})
    for name in ("chosen_lengths", "rejected_lengths"):
        if optional.get(name) is not None:
            checks.check_tensor(name, optional[name])
            checks.check_shape_of(name, optional[name], "chosen_logps", chosen_logps)
    return _losses(pairs, o)


def _losses(pairs: PairLogps, o: DPOOptions) -> Tensor:
    """:func:`dpo_loss` of checked options."""
    score, alpha = F_DIVERGENCES[o.f_divergence_type], o.f_alpha_divergence_coef
    chosen, rejected = score(pairs.chosen_logratios, alpha), score(pairs.rejected_logratios, alpha)
    terms = []
    for row in o.variants:
        if row.per_token:
            margin = chosen / pairs.chosen_lengths.clamp(min=1) - rejected / pairs.rejected_lengths.clamp(min=1)
        else:
            margin = chosen - rejected
        terms.append(row.loss(pairs, margin, o))
    if o.loss_weights is not None:
        terms = [weight * term for weight, term in zip(o.loss_weights, terms, strict=True)]
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


class DPOLossOptions(DPOOptions, PreferenceOptions):
    """The options of :class:`LigerFusedLinearDPOLoss`."""

    use_ref_model: bool = True
    ld_alpha: UnitFloat | None = None
    use_weighting: bool = False

    def __post_init__(self) -> None:
        PreferenceOptions.__post_init__(self)
        DPOOptions.__post_init__(self)
        if self.use_weighting and any(row.sorts for row in self.variants):
            raise ValueError(
                "'aot' and 'aot_unpaired' sort the log-ratios: there are no pairs to weight; leave use_weighting out."
            )
        if self.average_log_prob and any(row.per_token for row in self.variants):
            raise ValueError("'ipo' and 'sigmoid_norm' divide by lengths already; leave average_log_prob out.")

    @property
    def reads_order(self) -> str | None:  # type: ignore[override]
        return None if self.ld_alpha is None else "ld_alpha"


class LigerFusedLinearDPOLoss(PreferenceLoss):
    """DPO and its variants, one or several at once: :func:`dpo_loss` (Rafailov et al. 2023, arXiv:2305.18290).

    Args:
        beta: temperature of the implicit reward (> 0).
        alpha: factor of the chosen completions' mean negative log-likelihood, which ``compute_nll_loss`` adds.
        compute_nll_loss: add this negative log-likelihood.
        use_ref_model: compare the policy with a reference model.
        average_log_prob: divide the log-probability of each completion by its length.
        loss_type: a name from :data:`DPO_LOSSES`, or several.
        label_smoothing: assumed share of pairs whose labels are swapped, in [0, 1]. ``robust`` needs less than 0.5, and
            ``exo_pair`` more than 0. Used by ``sigmoid``, ``sigmoid_norm``, ``exo_pair``, ``robust``, ``aot`` and
            ``aot_unpaired``; the papers of the other variants have no label smoothing.
        discopop_tau: temperature of DiscoPOP's mixture (> 0).
        loss_weights: one per ``loss_type``; 1 by default.
        f_divergence_type: a name from :data:`F_DIVERGENCES`. Must be ``reverse_kl`` unless the loss depends only on the
            margin.
        f_alpha_divergence_coef: alpha of ``alpha_divergence``.
        ld_alpha: weight of the tokens beyond the pair's shared length (LD-DPO, arXiv:2409.06411), in [0, 1].
        use_weighting: weight pairs by the policy's probability of sampling them (WPO, arXiv:2406.11827, eq. 2).
        compiled, chunk_size: without effect, for code written for liger-kernel.
        ignore_index, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    @constructor(DPOLossOptions)
    def __init__(self) -> None: ...

    settings: DPOLossOptions
    positions = (
        "ignore_index beta alpha compute_nll_loss compiled use_ref_model average_log_prob chunk_size loss_type "
        "label_smoothing discopop_tau"
    )

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("log_sum_sq_probs",) if self.settings.use_weighting else ()

    def token_weights(self, masks: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Token weights of LD-DPO (arXiv:2409.06411): 1 up to the shorter completion's length, then ``ld_alpha``."""
        alpha = self.settings.ld_alpha
        if alpha is None:
            return [None] * len(masks)
        shared = torch.minimum(*[mask.sum(-1, keepdim=True) for mask in masks])
        beyond = torch.full((), alpha, dtype=wide_dtype(shared.device), device=shared.device)
        return [torch.where(mask.cumsum(-1) <= shared, 1.0, beyond) for mask in masks]

    def pair_loss(self, pairs: Pairs) -> Tensor:
        return _losses(pairs, self.settings)

    def sequence_weight(self, statistics: Statistics, mask: Tensor) -> Tensor | None:
        if not self.settings.use_weighting:
            return None
        log_weights = statistics.logp - statistics.log_sum_sq_probs
        return sequence_logps(log_weights, mask, average=True, group=self.group).exp()


# --- Without a reference model: CPO, SimPO, ORPO ----------------------------------------------------------------------

# For x closer to 0 fp32 cannot tell exp(x) from 1: where ORPO's odds are clamped.
_MIN_SURPRISE = 2.0**-23


def alphapo_reward(logps: Tensor, reward_alpha: float) -> Tensor:
    """AlphaPO's reward ``(1 - p^-a) / a`` of ``log p`` ``[B]`` (arXiv:2501.03884); ``log p`` itself for ``a = 0``."""
    a = reward_alpha
    return logps if a == 0 else -torch.expm1((-a * logps).clamp(max=MAX_EXPONENT)) / a


class CPOTerms(NamedTuple):
    """The numbers that the loss of a pair reads: see :func:`cpo_loss`."""

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
    checks.check_names([loss_type], CPO_LOSSES, "loss_type")
    checks.check_alike(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    checks.check_number("beta", beta, 0.0, math.inf, open_low=True)
    checks.check_number("label_smoothing", label_smoothing, 0.0, 1.0)
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
    terms = {"beta": beta, "label_smoothing": label_smoothing, "gamma": gamma}
    return cpo_loss(chosen_logps, rejected_logps, loss_type="simpo", **terms)


def orpo_loss(chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1) -> Tensor:
    """ORPO's odds-ratio term, ``[B]``: ``-beta log sigmoid(log odds_w - log odds_l)``, ``odds = p / (1 - p)``.

    The paper (arXiv:2403.07691, eq. 6 and 7) adds it to the chosen completions' mean negative log-likelihood. Odds are
    clamped at ``p = exp(-2^-23)``, beyond which fp32 cannot tell p from 1: a completion of probability 1 has log-odds
    15.9.

    Args:
        chosen_logps, rejected_logps: ``[B]``, the means of ``log p`` over tokens.
        beta: weight of the term.
    """
    checks.check_alike(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    checks.check_number("beta", beta, 0.0, math.inf, open_low=True)
    return -beta * F.logsigmoid(_log_odds(chosen_logps) - _log_odds(rejected_logps))


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
    positions = "ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob chunk_size"

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

    positions = "ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size"


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

    positions = "ignore_index beta compute_nll_loss compiled chunk_size"

    if not TYPE_CHECKING:  # type checkers read the overloads of PreferenceLoss.forward, which this one has too

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
