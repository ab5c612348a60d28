"""Losses of logits that exist already: cross-entropy and GRPO.

If you have hidden states and the ``lm_head``, prefer this library's losses, which need no logits. If you have
log-probabilities, :mod:`liger_losses.functional` has all losses. V vocabulary size, B completions of T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import meant
from liger_losses.chunked import Statistics
from liger_losses.chunked.losses import policy_objectives as objectives
from liger_losses.chunked.losses.cross_entropy import CrossEntropyOutput, LigerFusedLinearCrossEntropyLoss
from liger_losses.chunked.losses.policy import PolicyMetrics, PolicyMetricsWithoutKL
from liger_losses.integrations.logit_statistics import logit_statistics
from liger_losses.kernels.logit_transform import LogitTransform


class CrossEntropyOfLogits(LigerFusedLinearCrossEntropyLoss):
    """:class:`liger_losses.LigerFusedLinearCrossEntropyLoss` of given logits; see :func:`cross_entropy`."""

    positions = (
        *("ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap", "return_z_loss"),
        *("return_token_accuracy", "return_predicted_tokens"),
    )

    def forward(self, logits: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        names, metrics = self._names()
        found = logit_statistics(
            logits,
            labels,
            tuple(dict.fromkeys((*names, *metrics))),
            ignore_index=self.ignore_index,
            class_weight=self.ce_weight,
            transform=self.transform,
        )
        return self.of_statistics(Statistics(**found), labels)


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ce_weight: Tensor | None = None, **options: Any
) -> Tensor | CrossEntropyOutput:
    """The loss of :class:`liger_losses.LigerFusedLinearCrossEntropyLoss`, of given logits; options are the same.

    Args:
        logits: ``[..., V]``, floating point.
        labels: ``[...]`` int64.
        ce_weight: ``[V]``, class weights.
        options: ``ignore_index``, ``lse_square_scale``, ``label_smoothing``, ``reduction``, ``softcap``,
            ``return_z_loss``, ``return_token_accuracy``, ``return_predicted_tokens`` of that class.

    Returns:
        The loss, 0-dim (``[...]`` for reduction ``none``), or :class:`CrossEntropyOutput` if anything else was asked
        for.

    Raises:
        TypeError, ValueError: an option out of its range, shapes that do not fit together, labels outside the
            vocabulary.
    """
    names = CrossEntropyOfLogits.positions
    unknown = ", ".join(f"{name!r}{meant(name, names)}" for name in options if name not in names)
    if unknown:
        raise TypeError(f"cross_entropy has no option {unknown}; its options are ce_weight, {', '.join(names)}.")
    return CrossEntropyOfLogits(ce_weight, **options)(logits, labels)


def grpo_loss(
    logits: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    is_ratio: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    num_items_in_batch: Tensor | float | None = None,
    per_token: bool = False,
    **options: Any,
) -> Any:
    """:func:`liger_losses.functional.grpo_loss` of given logits.

    Args:
        logits: ``[B, T, V]``, which predict the tokens of the completions.
        completion_ids: ``[B, T]`` int64.
        mask: ``[B, T]``, 0 for padding; all tokens by default.
        temperature: divides the logits: a number, or ``[B, T]``.
        per_token: return each token's terms instead of their weighted sum.
        advantages, old_logps, ref_logps, is_ratio, num_items_in_batch, options: as in that function.

    Returns:
        The loss (0-dim) and :class:`PolicyMetrics` (:class:`PolicyMetricsWithoutKL` for ``beta=0``). With
        ``per_token``: the terms ``-objective + beta kl``, the KL estimates, and 1.0 where clipping removed the
        gradient, each ``[B, T]``, 0 for padding.

    Raises:
        TypeError, ValueError: as in that function.
    """
    active = torch.ones_like(completion_ids, dtype=torch.bool) if mask is None else mask != 0
    labels = completion_ids.masked_fill(~active, -100)
    logps = logit_statistics(logits, labels, transform=LogitTransform(temperature))["logp"]
    o = objectives.PolicyOptions(**options)
    inputs = objectives.PolicyInputs(
        o,
        active,
        advantages,
        old_logps=old_logps,
        ref_logps=ref_logps,
        is_ratio=is_ratio,
        num_items_in_batch=num_items_in_batch,
    )
    clipped, kl = objectives.token_metrics(logps.detach(), inputs)
    terms = torch.where(active, objectives.coupled_terms(logps, inputs), 0.0)
    if per_token:
        return terms, kl, clipped
    loss, clip_ratio = (inputs.weights * terms).sum(), clipped.sum() / inputs.counted
    return loss, PolicyMetrics(kl.sum() / inputs.counted, clip_ratio) if o.beta else PolicyMetricsWithoutKL(clip_ratio)
