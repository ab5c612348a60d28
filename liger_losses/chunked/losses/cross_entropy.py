"""Cross-entropy on the output of ``lm_head``, in one pass. V vocabulary size."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine import Head, Statistics, linear_statistics, linear_token_loss
from liger_losses.chunked.engine.checks import check_names, check_range, check_tensor, check_vector, checked_items
from liger_losses.chunked.losses.base import ChunkedLoss, operator
from liger_losses.chunked.losses.call_forms import AnyHead


class CrossEntropyOutput(NamedTuple):
    """The loss and what else was asked for; ``None`` for the rest."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


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
        ce_scale, z_scale: what ``ce`` and ``z`` are multiplied by, ``[]`` or ``[n]``, constants; 1 by default.

    Returns:
        Tokens' terms, differentiable, and their derivatives.
    """
    ce_scale = logps.new_ones(()) if ce_scale is None else ce_scale
    label_scale = ce_scale if label_weights is None else ce_scale * label_weights
    derivatives = {"logp": ((label_smoothing - 1) * label_scale).expand_as(logps)}
    ce = derivatives["logp"] * logps
    if label_smoothing and mean_logps is not None:
        derivatives["mean_logp"] = (-label_smoothing * ce_scale).expand_as(logps)
        ce = ce + derivatives["mean_logp"] * mean_logps
    if lse is None:
        return CrossEntropyTerms(ce, torch.zeros_like(ce), derivatives)
    z_scale = logps.new_ones(()) if z_scale is None else z_scale
    if lse_square_scale:
        derivatives["lse"] = 2 * lse_square_scale * z_scale * lse.detach()
    return CrossEntropyTerms(ce, lse_square_scale * z_scale * lse.square(), derivatives)


class LigerFusedLinearCrossEntropyLoss(ChunkedLoss):
    """:func:`cross_entropy` with class weights, label smoothing, z-loss and token scaling.

    With ``w`` the token weights and ``c`` the class weights: ``sum``: ``sum_t w_t (ce_t + z_t)``.
    ``mean``: ``sum_t w_t ce_t / sum_t w_t c_label + sum_t w_t z_t / sum_t w_t``, with both denominators replaced by
    ``num_items_in_batch`` if that is given. ``none``: ``w_t (ce_t + z_t)`` per token, 0 for ignored ones.
    A batch in which no token carries loss has loss 0.

    Args:
        ce_weight: class weights ``[V]``, as ``torch.nn.CrossEntropyLoss(weight=)``.
        lse_square_scale: weight of the z-loss (PaLM, arXiv:2204.02311, section 5).
        label_smoothing: share of the target distribution that is uniform, in [0, 1].
        reduction: ``mean``, ``sum`` or ``none``.
        return_z_loss: also return the z-loss's part of the loss.
        use_token_scaling: scale each token's loss by its own probability, detached (DFT, arXiv:2508.05629, eq. 9).
        return_token_accuracy: also return the share of tokens whose label is the argmax (per token for ``none``).
        return_predicted_tokens: also return each token's argmax, -1 for ignored ones.
        ignore_index, softcap, accum_dtype, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **options: Any,
    ) -> None:
        self.lse_square_scale, self.label_smoothing, self.reduction = lse_square_scale, label_smoothing, reduction
        self.return_z_loss, self.use_token_scaling = return_z_loss, use_token_scaling
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens
        super().__init__(ignore_index=ignore_index, softcap=softcap, accum_dtype=accum_dtype, **options)
        if ce_weight is not None:
            check_tensor("ce_weight", ce_weight)
        self.ce_weight: Tensor | None
        self.register_buffer("ce_weight", ce_weight, persistent=False)

    def check_options(self) -> None:
        super().check_options()
        check_range("label_smoothing", self.label_smoothing, 0.0, 1.0)
        check_names([self.reduction], ("mean", "sum", "none"), "reduction")

    @operator
    def forward(  # type: ignore[override]
        self,
        lin_weight: AnyHead,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        num_items_in_batch: Tensor | int | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor | CrossEntropyOutput:
        """The loss of ``_input @ lin_weight.T + bias`` against ``target``.

        Args:
            lin_weight, _input, target, bias: as in :meth:`ChunkedLoss.forward`.
            num_items_in_batch: what ``mean`` divides by, instead of this call's own tokens (gradient accumulation).
            token_weights: ``[...]``, weight of each token; a constant for the gradient.

        Returns:
            The loss, or :class:`CrossEntropyOutput` if anything else was asked for.
        """
        head, labels, options = Head.of(lin_weight, bias, self.transform), self.labels(target), self.options
        if self.ce_weight is not None:
            check_vector("ce_weight", self.ce_weight, head.weight, head.vocab_size)
        if num_items_in_batch is not None and self.reduction != "mean":
            raise ValueError(f"num_items_in_batch is what 'mean' divides by; the reduction is {self.reduction!r}.")
        if token_weights is not None:
            check_tensor("token_weights", token_weights)
            if token_weights.shape != labels.shape:
                expected = f"token_weights must have one value per label, {tuple(labels.shape)}"
                raise ValueError(f"{expected}, got {tuple(token_weights.shape)}.")
            token_weights = token_weights.detach().to(torch.promote_types(token_weights.dtype, torch.float32))
        read = {"logp": True, "lse": self.lse_square_scale != 0, "mean_logp": self.label_smoothing != 0}
        also = {"argmax": self.return_token_accuracy or self.return_predicted_tokens, "lse": self.return_z_loss}
        statistics, metrics = ([name for name, wanted in names.items() if wanted] for names in (read, also))
        class_weight = self.ce_weight if self.label_smoothing else None
        spans_ranks = self.group is not None and self.reduction != "none"
        tokens = self.agreed_tokens(_input, head, labels, num_items_in_batch) if spans_ranks else labels
        items = None if num_items_in_batch is None else checked_items(num_items_in_batch, labels.device)
        kept: list[tuple[Tensor, Tensor]] = []

        def totals() -> tuple[Tensor, Tensor]:
            """Read once the first product is queued, so that the device need not wait for them."""
            if not kept:
                kept.append(self._denominators(labels, items, token_weights))
            return kept[0]

        if spans_ranks:
            totals()
        z: Tensor | None = None
        if self.reduction == "none":
            found = linear_statistics(
                _input, head, labels, statistics, metrics=metrics, class_weight=class_weight, options=options
            )
            mask = labels != self.ignore_index
            ce, z, _ = self._terms(found, labels.where(mask, 0), totals(), token_weights)
            loss = torch.where(mask, ce + z, 0.0)
        else:

            def token_loss(values: Statistics, active: Tensor, token_weights: Tensor | None = None) -> Any:
                ce, z, derivatives = self._terms(values, active, totals(), token_weights)
                return ce if values.lse is None else ce + z, derivatives

            loss, found = linear_token_loss(
                _input,
                head,
                tokens,
                token_loss,
                statistics,
                metrics=metrics,
                token_inputs=None if token_weights is None else {"token_weights": token_weights},
                class_weight=class_weight,
                options=options,
            )
            mask = labels != self.ignore_index
            if self.return_z_loss:
                z = self._terms(found, labels.where(mask, 0), totals(), token_weights).z
        if spans_ranks:
            loss = self.total(loss)
        if not (self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens):
            return loss
        z_loss = torch.where(mask, z.detach(), 0.0) if self.return_z_loss and z is not None else None
        accuracy = ((found.argmax == labels) & mask).float() if self.return_token_accuracy else None
        if self.reduction != "none":
            z_loss = None if z_loss is None else self.total(z_loss)
            accuracy = None if accuracy is None else self.total(accuracy) / self.total(mask).clamp(min=1)
        predicted = torch.where(mask, found.argmax, -1) if self.return_predicted_tokens else None
        return CrossEntropyOutput(loss, z_loss, accuracy, predicted)

    def _terms(
        self, values: Statistics, labels: Tensor, totals: tuple[Tensor, Tensor], token_weights: Tensor | None
    ) -> CrossEntropyTerms:
        """:func:`cross_entropy` over the denominators, with token weights and token scaling."""
        ce_scale, z_scale = (values.logp.new_ones(()) / total for total in totals)
        scales = [] if token_weights is None else [token_weights]
        if self.use_token_scaling:
            scales.append(values.logp.detach().exp())
        for scale in scales:
            ce_scale, z_scale = ce_scale * scale, z_scale * scale
        return cross_entropy(
            values.logp,
            mean_logps=values.mean_logp,
            lse=values.lse,
            label_weights=None if self.ce_weight is None else self.ce_weight.to(ce_scale.dtype)[labels],
            label_smoothing=self.label_smoothing,
            lse_square_scale=self.lse_square_scale,
            ce_scale=ce_scale,
            z_scale=z_scale,
        )

    def _denominators(
        self, labels: Tensor, items: Tensor | None, token_weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What cross-entropy and z-loss are divided by: known before any logit."""
        if self.reduction != "mean":
            one = torch.ones((), device=labels.device)
            return one, one
        if items is not None:
            ce_total = z_total = items
        else:
            mask = labels != self.ignore_index
            weights = mask.float() if token_weights is None else token_weights * mask
            ce_total = z_total = weights.sum()
            if self.ce_weight is not None:
                # The engine reports labels outside the vocabulary.
                classes = labels.where(mask, 0).clamp(0, len(self.ce_weight) - 1)
                ce_total = (weights * self.ce_weight[classes]).sum()
            if self.group is not None:
                ce_total, z_total = self.total(ce_total), self.total(z_total)
        z_total = torch.where(z_total == 0, 1.0, z_total)
        return (z_total if self.ce_weight is None else torch.where(ce_total == 0, 1.0, ce_total)), z_total
