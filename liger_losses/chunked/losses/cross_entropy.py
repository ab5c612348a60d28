"""Cross-entropy on the output of ``lm_head``, in one pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine import Statistics, linear_statistics, linear_token_loss
from liger_losses.chunked.engine.checks import check_head, check_names, check_range, check_tensor
from liger_losses.chunked.losses.base import ChunkedLoss

_REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyOutput(NamedTuple):
    """The loss and what was asked for besides; ``None`` for the rest."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class LigerFusedLinearCrossEntropyLoss(ChunkedLoss):
    """Cross-entropy with class weights, label smoothing, z-loss and token scaling.

    With ``w`` the token weights, ``c`` the class weights and ``e`` the label smoothing, per token::

        ce = - (1 - e) c_label log p_label - e / V sum_v c_v log p_v
        z  = lse_square_scale * lse^2

    ``sum``: ``sum_t w_t (ce_t + z_t)``.
    ``mean``: ``sum_t w_t ce_t / sum_t w_t c_label + sum_t w_t z_t / sum_t w_t``, both denominators replaced by
    ``num_items_in_batch`` where that is given. ``none``: ``w_t (ce_t + z_t)`` per token, 0 for ignored ones.
    A batch in which no token carries loss has loss 0.

    Args:
        ce_weight: class weights ``[V]``, as ``torch.nn.CrossEntropyLoss(weight=)``.
        ignore_index: the label of tokens that carry no loss.
        lse_square_scale: weight of the z-loss (PaLM, arXiv:2204.02311, section 5).
        label_smoothing: share of the target distribution that is uniform, in [0, 1].
        reduction: ``mean``, ``sum`` or ``none``.
        softcap: soft-cap of the logits (Gemma 2).
        return_z_loss: also return the z-loss's part of the loss.
        accum_dtype: ``torch.float32`` to add up the weight's gradient in a buffer of that dtype.
        use_token_scaling: scale each token's loss by its own probability, detached (DFT, arXiv:2508.05629, eq. 9).
        return_token_accuracy: also return the share of tokens whose label is the argmax (per token for ``none``).
        return_predicted_tokens: also return each token's argmax, -1 for ignored ones.
        options: as in :class:`liger_losses.chunked.losses.base.ChunkedLoss`.

    Raises:
        ValueError: an option out of its range.
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
        *,
        temperature: float = 1.0,
        logit_scale: float = 1.0,
        shift: bool = False,
        compact: bool = True,
        workspace: int | None = None,
        chunk_size: int | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            shift=shift,
            compact=compact,
            workspace=workspace,
            chunk_size=chunk_size,
            accum_dtype=accum_dtype,
            backend=backend,
        )
        check_range("label_smoothing", label_smoothing, 0.0, 1.0)
        check_names([reduction], _REDUCTIONS, "reduction")
        if ce_weight is not None:
            check_tensor("ce_weight", ce_weight)
        self.ce_weight: Tensor | None
        self.register_buffer("ce_weight", ce_weight, persistent=False)
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap, self.accum_dtype = softcap, accum_dtype
        self.return_z_loss = return_z_loss
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(  # type: ignore[override]
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        num_items_in_batch: Tensor | int | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor | CrossEntropyOutput:
        """The loss of ``_input [..., H] @ lin_weight [V, H].T + bias [V]`` against ``target [...]``.

        Args:
            lin_weight: ``[V, H]``, the ``lm_head``.
            _input: ``[..., H]``, hidden states.
            target: ``[...]`` int64.
            bias: ``[V]``.
            num_items_in_batch: what ``mean`` divides by, instead of this call's own tokens (gradient accumulation).
            token_weights: ``[...]``, weight of each token; a constant for the gradient.

        Returns:
            The loss, or :class:`CrossEntropyOutput` if anything else was asked for.

        Raises:
            TypeError, ValueError: shapes or dtypes that do not fit together, labels outside the vocabulary,
                ``num_items_in_batch`` with a reduction other than ``mean``.
        """
        check_head((_input,), lin_weight, (target,), bias)
        if self.ce_weight is not None and self.ce_weight.shape != lin_weight.shape[:1]:
            raise ValueError(
                f"ce_weight must be [{lin_weight.shape[0]}], one value per row of the weight, got shape "
                f"{tuple(self.ce_weight.shape)}."
            )
        if num_items_in_batch is not None and self.reduction != "mean":
            raise ValueError(f"num_items_in_batch is what 'mean' divides by; the reduction is {self.reduction!r}.")
        if token_weights is not None:
            check_tensor("token_weights", token_weights)
            if token_weights.shape != target.shape:
                raise ValueError(
                    f"token_weights must have one value per label, {tuple(target.shape)}, got "
                    f"{tuple(token_weights.shape)}."
                )
            token_weights = token_weights.detach().to(torch.promote_types(token_weights.dtype, torch.float32))
        labels = self.labels(target)
        mask = labels != self.ignore_index
        read = {"logp": True, "lse": self.lse_square_scale != 0, "mean_logp": self.label_smoothing != 0}
        also = {"argmax": self.return_token_accuracy or self.return_predicted_tokens, "lse": self.return_z_loss}
        statistics = [name for name, wanted in read.items() if wanted]
        common: dict[str, Any] = {
            "metrics": [name for name, wanted in also.items() if wanted],
            "bias": bias,
            "class_weight": self.ce_weight if self.label_smoothing else None,
            "transform": self.transform,
            "options": self.options,
        }
        z_loss: Tensor | None = None
        if self.reduction == "none":
            found = linear_statistics(_input, lin_weight, labels, statistics, **common)
            one = torch.ones((), dtype=found.logp.dtype, device=labels.device)
            ce, z, _ = self._terms(found, labels.where(mask, 0), one, one, token_weights)
            loss = torch.where(mask, ce + z, 0.0)
            if self.return_z_loss:
                z_loss = torch.where(mask, z, 0.0).detach()
        else:
            ce_total, z_total = self._denominators(labels, mask, num_items_in_batch, token_weights)

            def token_loss(values: Statistics, kept: Tensor, token_weights: Tensor | None = None) -> Any:
                ce, z, derivatives = self._terms(values, kept, ce_total, z_total, token_weights)
                return ce if values.lse is None else ce + z, derivatives

            inputs = {} if token_weights is None else {"token_weights": token_weights}
            loss, found = linear_token_loss(
                _input, lin_weight, labels, token_loss, statistics, token_inputs=inputs, **common
            )
            if self.return_z_loss:
                z = self._terms(found, labels.where(mask, 0), ce_total, z_total, token_weights)[1]
                z_loss = torch.where(mask, z, 0.0).sum()
        if not (self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens):
            return loss
        return CrossEntropyOutput(
            loss,
            z_loss,
            self._accuracy(found, labels, mask) if self.return_token_accuracy else None,
            torch.where(mask, found.argmax, -1) if self.return_predicted_tokens else None,
        )

    def _terms(
        self, values: Statistics, labels: Tensor, ce_total: Tensor, z_total: Tensor, token_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Each token's cross-entropy and z-loss over their denominators, and the derivatives of both."""
        ce_scale, z_scale = (values.logp.new_ones(()) / total for total in (ce_total, z_total))
        scales = [] if token_weights is None else [token_weights]
        if self.use_token_scaling:
            scales.append(values.logp.detach().exp())
        for scale in scales:
            ce_scale, z_scale = ce_scale * scale, z_scale * scale

        label_scale = ce_scale if self.ce_weight is None else ce_scale * self.ce_weight.to(ce_scale.dtype)[labels]
        derivatives = {"logp": ((self.label_smoothing - 1) * label_scale).expand_as(values.logp)}
        ce = derivatives["logp"] * values.logp
        if self.label_smoothing:
            derivatives["mean_logp"] = (-self.label_smoothing * ce_scale).expand_as(values.logp)
            ce = ce + derivatives["mean_logp"] * values.mean_logp
        if values.lse is None:
            return ce, torch.zeros_like(ce), derivatives
        if self.lse_square_scale:
            derivatives["lse"] = 2 * self.lse_square_scale * z_scale * values.lse.detach()
        return ce, self.lse_square_scale * z_scale * values.lse.square(), derivatives

    def _denominators(
        self, labels: Tensor, mask: Tensor, num_items_in_batch: Tensor | int | None, token_weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What cross-entropy and z-loss are divided by: known before any logit."""
        one = torch.ones((), device=labels.device)
        if self.reduction == "sum":
            return one, one
        if num_items_in_batch is not None:
            total = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=labels.device)
            return torch.where(total == 0, one, total), torch.where(total == 0, one, total)
        weights = mask.float() if token_weights is None else token_weights * mask
        z_total = ce_total = weights.sum()
        if self.ce_weight is not None:
            # Labels outside the vocabulary are the engine's to report.
            ce_total = (weights * self.ce_weight[labels.where(mask, 0).clamp(0, len(self.ce_weight) - 1)]).sum()
        return torch.where(ce_total == 0, one, ce_total), torch.where(z_total == 0, one, z_total)

    def _accuracy(self, found: Statistics, labels: Tensor, mask: Tensor) -> Tensor:
        correct = ((found.argmax == labels) & mask).float()
        return correct if self.reduction == "none" else correct.sum() / mask.sum().clamp(min=1)
