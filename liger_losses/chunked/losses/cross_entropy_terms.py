"""Cross-entropy as functions of statistics, of one token each, and of the hidden states that these come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.checks import check_shaped
from liger_losses.chunked import EngineOptions, Head, shift_labels
from liger_losses.chunked.core.compiled import in_graphs, loss_sum, statistics
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.core.inputs import target_of
from liger_losses.chunked.core.target import TokenLoss


class CrossEntropyTerms(NamedTuple):
    """Each token's cross-entropy and z-loss ``[n]``, and the derivatives of their sum by each statistic."""

    ce: Tensor
    z: Tensor
    derivatives: dict[str, Tensor]


def cross_entropy(
    logps: Tensor,
    *,
    mean_logps: Tensor | None = None,
    lse: Tensor | None = None,
    label_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    ce_scale: Tensor | None = None,
    z_scale: Tensor | None = None,
) -> CrossEntropyTerms:
    """``ce_t = -(1 - e) c_t logp_t - e mean_logp_t`` and ``z_t = s lse_t^2``, with ``e`` the label smoothing.

    Args:
        logps: ``[n]``, log-probabilities of the labels.
        mean_logps: ``[n]``, mean log-probability over the vocabulary (weighted by class), if ``label_smoothing``.
        lse: ``[n]``, log-sum-exp of the logits, for the z-loss (PaLM, arXiv:2204.02311, section 5).
        label_weights: ``[n]``, class weight ``c_t`` of each label; 1 by default.
        label_smoothing, lse_square_scale: ``e`` and ``s``.
        ce_scale, z_scale: factors of ``ce`` and ``z``, ``[]`` or ``[n]``, constants; 1 by default.

    Returns:
        :class:`CrossEntropyTerms`: the differentiable terms of the tokens, and their derivatives.

    Raises:
        ValueError: ``mean_logps`` or ``lse`` are missing.
    """
    if (label_smoothing and mean_logps is None) or (lse_square_scale and lse is None):
        raise ValueError("label_smoothing needs mean_logps=, and lse_square_scale needs lse=.")
    ce_scale = logps.new_ones(()) if ce_scale is None else ce_scale
    label_scale = ce_scale if label_weights is None else ce_scale * label_weights
    derivatives = {"logp": (label_scale * (label_smoothing - 1)).expand_as(logps)}
    ce = derivatives["logp"] * logps
    if label_smoothing and mean_logps is not None:
        derivatives["mean_logp"] = (-label_smoothing * ce_scale).expand_as(logps)
        ce = ce + derivatives["mean_logp"] * mean_logps
    if lse is None:
        return CrossEntropyTerms(ce, logps.new_zeros(()).expand_as(ce), derivatives)
    z_scale = logps.new_ones(()) if z_scale is None else z_scale
    if lse_square_scale:
        derivatives["lse"] = 2 * lse_square_scale * z_scale * lse.detach()
    return CrossEntropyTerms(ce, lse_square_scale * z_scale * lse.square(), derivatives)


def constant_weights(token_weights: Tensor, labels: Tensor, shift: int) -> Tensor:
    """Weights of tokens without a gradient, shifted as ``labels`` are; TypeError or ValueError unless there is a real
    number for each label."""
    check_shaped("token_weights", token_weights, "label", labels.device, labels.shape)
    if token_weights.is_complex():
        raise TypeError(f"token_weights must be one real number per label, got {token_weights.dtype}.")
    return shift_labels(token_weights.detach(), 0, shift) if shift else token_weights.detach()


def _entropy_of_columns(values: Mapping[str, Tensor]) -> Tensor:
    """The entropy of the softmax over the largest columns, over its largest value: EAFT (arXiv:2601.02151)."""
    log_p = values["selected_logps"].log_softmax(-1)
    return torch.special.entr(log_p.exp()).sum(-1) / math.log(max(log_p.shape[-1], 2))


class TokenScaling(NamedTuple):
    """A row of :data:`TOKEN_SCALINGS`: factors ``[...]`` from detached statistics, and how many of the largest
    log-probabilities are among these."""

    factor: Callable[[Mapping[str, Tensor]], Tensor]
    columns: int | None = None


#: What the loss of a token is multiplied by.
TOKEN_SCALINGS = {
    "probability": TokenScaling(lambda values: values["logp"].exp()),  # DFT, arXiv:2508.05629, eq. 9
    # p (1 - p): CHORD (arXiv:2508.11408)
    "uncertainty": TokenScaling(lambda values: -values["logp"].exp() * torch.expm1(values["logp"])),
    "entropy": TokenScaling(_entropy_of_columns, columns=20),
}


def token_factors(values: Mapping[str, Tensor], scaling: str) -> list[Tensor]:
    """The factor ``[...]`` of a row of :data:`TOKEN_SCALINGS`, if it is one."""
    row = TOKEN_SCALINGS.get(scaling)
    return [] if row is None else [row.factor({name: value.detach() for name, value in values.items()})]


@in_graphs
class TokenTerms(NamedTuple):
    """Each token's :func:`cross_entropy` over the denominators, with token weights and token scaling."""

    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    scaling: str = "none"  # or a row of TOKEN_SCALINGS
    reads_lse: bool = False  # for the z-loss's terms, even where it has no weight

    def terms(
        self,
        values: Mapping[str, Tensor],
        ce_total: Tensor,
        z_total: Tensor | None = None,
        token_weights: Tensor | None = None,
        label_weights: Tensor | None = None,
        scale: float = 1.0,
    ) -> CrossEntropyTerms:
        """Its parts, ``scale`` times; denominators are ``[]``, and the z-loss by default has the cross-entropy's."""
        logp = values["logp"]
        ce_scale = scale / ce_total.to(logp.dtype)
        z_scale = ce_scale if z_total is None else scale / z_total.to(logp.dtype)
        # In the statistics' dtype: fp32 weights would make fp64 scales fp32.
        factors = [] if token_weights is None else [token_weights.to(logp.dtype)]
        for factor in factors + token_factors(values, self.scaling):
            ce_scale, z_scale = ce_scale * factor, z_scale * factor
        return cross_entropy(
            logp,
            mean_logps=values["mean_logp"] if self.label_smoothing else None,
            lse=values["lse"] if self.lse_square_scale or self.reads_lse else None,
            label_weights=None if label_weights is None else label_weights.to(ce_scale.dtype),
            label_smoothing=self.label_smoothing,
            lse_square_scale=self.lse_square_scale,
            ce_scale=ce_scale,
            z_scale=z_scale,
        )


@in_graphs
def loss_of_terms(values: Mapping[str, Tensor], of: TokenTerms, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss ``[n]`` of tokens with the inputs of :meth:`TokenTerms.terms`, and its derivatives."""
    ce, z, derivatives = of.terms(values, **inputs)
    return ce + z if of.lse_square_scale else ce, derivatives


@operator
def linear_cross_entropy(
    hidden_states: Tensor,
    head: Head,
    labels: Tensor,
    class_weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of the logits of hidden states ``[T, H]``; 0 where no token carries loss."""
    per_token, mask = TokenTerms(label_smoothing), labels != ignore_index
    names = ("logp", "mean_logp") if label_smoothing else ("logp",)
    label_weights = None if class_weight is None else class_weight[labels.where(mask, 0)]
    counted = mask if label_weights is None else label_weights.where(mask, 0.0)
    total = counted.sum() if reduction == "mean" else mask.new_ones((), dtype=torch.int64)
    inputs = {"ce_total": total.masked_fill(total == 0, 1)}
    inputs |= {} if label_weights is None else {"label_weights": label_weights}
    target, options = target_of(hidden_states, head, labels, class_weight=class_weight), EngineOptions(ignore_index)
    if reduction == "none":
        (values,) = statistics([target], names, options)
        return torch.where(mask, loss_of_terms(values, per_token, **inputs)[0], 0.0)
    return loss_sum([target], names, [TokenLoss(loss_of_terms, inputs, {"of": per_token})], options)[0]
