"""Cross-entropy on the output of ``lm_head``, in one pass. V vocabulary size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine import Head, Statistics, linear_statistics, linear_token_loss
from liger_losses.chunked.engine.checks import (
    LISTS,
    check_device,
    check_labels,
    check_names,
    check_range,
    check_tensor,
    check_vector,
    checked_items,
    one_each,
)
from liger_losses.chunked.engine.given import note
from liger_losses.chunked.engine.many_heads import Targets, count_targets, heads_of, shift_each
from liger_losses.chunked.engine.operators import loss_operator
from liger_losses.chunked.engine.query import Query
from liger_losses.chunked.engine.tokens import shift_labels
from liger_losses.chunked.losses.base import ChunkedLoss, LossOptions
from liger_losses.chunked.losses.context_parallel import sum_over_group


class CrossEntropyOutput(NamedTuple):
    """The loss and what else was asked for; ``None`` for the rest."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class ManyHeadsMetrics(NamedTuple):
    """What a call with several heads returns beside the loss, without gradient; ``None`` for what was not asked for.

    ``losses [K]`` are the heads' own, without ``head_weights`` (for reduction ``none``, their sums over the tokens);
    ``z_losses [K]`` is their z-loss's part, ``token_accuracies [K]`` the share of tokens whose label is the argmax, and
    ``predicted_tokens`` a list of K tensors ``[...]``.
    """

    losses: Tensor
    z_losses: Tensor | None = None
    token_accuracies: Tensor | None = None
    predicted_tokens: list[Tensor] | None = None


class CrossEntropyTerms(NamedTuple):
    """Each token's cross-entropy and z-loss ``[n]``, and the derivatives of their sum by each statistic."""

    ce: Tensor
    z: Tensor
    derivatives: dict[str, Tensor]


class _Target(NamedTuple):
    """What one of several heads predicts, and what is known of its tokens beforehand."""

    labels: Tensor
    mask: Tensor
    totals: tuple[Tensor, Tensor]  # what cross-entropy and z-loss are divided by
    token_weights: Tensor | None

    def part(self, size: int) -> _Target:
        """The target of its first entries alone."""
        own = None if self.token_weights is None else self.token_weights[:size]
        return _Target(self.labels[:size], self.mask[:size], self.totals, own)


def cross_entropy(
    logps: Any,
    *,
    mean_logps: Any = None,
    lse: Any = None,
    label_weights: Any = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    ce_scale: Any = None,
    z_scale: Any = None,
) -> Any:
    """``ce_t = -(1 - e) c_t logp_t - e mean_logp_t`` and ``z_t = s lse_t^2``, with ``e`` the label smoothing.

    Args:
        logps: ``[n]``, log-probabilities of the labels; or a list, one tensor for each of K heads: every other tensor
            is then one for all of them, or a list.
        mean_logps: ``[n]``, mean log-probability over the vocabulary (weighted by class), if ``label_smoothing``.
        lse: ``[n]``, log-sum-exp of the logits, for the z-loss (PaLM, arXiv:2204.02311, section 5).
        label_weights: ``[n]``, class weight ``c_t`` of each label; 1 by default.
        label_smoothing, lse_square_scale: ``e`` and ``s``.
        ce_scale, z_scale: what ``ce`` and ``z`` are multiplied by, ``[]`` or ``[n]``, constants; 1 by default.

    Returns:
        :class:`CrossEntropyTerms`: tokens' terms, differentiable, and their derivatives; a list of K for lists.

    Raises:
        ValueError: lists of several lengths.
    """
    if isinstance(logps, (list, tuple)):
        tensors = {"mean_logps": mean_logps, "lse": lse, "label_weights": label_weights}
        tensors |= {"ce_scale": ce_scale, "z_scale": z_scale}
        count = count_targets(logps=logps, **tensors)
        numbers = {"label_smoothing": label_smoothing, "lse_square_scale": lse_square_scale}
        each = [{name: one_each(value, count)[k] for name, value in tensors.items()} for k in range(count)]
        return [cross_entropy(part, **given, **numbers) for part, given in zip(logps, each, strict=True)]
    if (label_smoothing and mean_logps is None) or (lse_square_scale and lse is None):
        raise ValueError("label_smoothing needs mean_logps=, and lse_square_scale needs lse=.")
    ce_scale = logps.new_ones(()) if ce_scale is None else ce_scale
    label_scale = ce_scale if label_weights is None else ce_scale * label_weights
    derivatives = {"logp": ((label_smoothing - 1) * label_scale).expand_as(logps)}
    ce = derivatives["logp"] * logps
    if label_smoothing:
        derivatives["mean_logp"] = (-label_smoothing * ce_scale).expand_as(logps)
        ce = ce + derivatives["mean_logp"] * mean_logps
    if lse is None:
        return CrossEntropyTerms(ce, torch.zeros_like(ce), derivatives)
    z_scale = logps.new_ones(()) if z_scale is None else z_scale
    if lse_square_scale:
        derivatives["lse"] = 2 * lse_square_scale * z_scale * lse.detach()
    return CrossEntropyTerms(ce, lse_square_scale * z_scale * lse.square(), derivatives)


@dataclass(frozen=True, kw_only=True)
class CrossEntropyOptions(LossOptions):
    """The options of :class:`LigerFusedLinearCrossEntropyLoss`, but for its class weights."""

    several = True

    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    return_z_loss: bool = False
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    head_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("label_smoothing", self.label_smoothing, 0.0, 1.0)
        check_range("lse_square_scale", self.lse_square_scale, 0.0, math.inf)
        check_names([self.reduction], ("mean", "sum", "none"), "reduction")
        if self.head_weights is not None:
            if not isinstance(self.head_weights, (list, tuple)):
                raise TypeError(f"head_weights must be a list of one number for each head, got {self.head_weights!r}.")
            for value in self.head_weights:
                check_range("each of head_weights", value, 0.0, math.inf)


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
        head_weights: with K heads, the weight of each one's loss in the sum, such as Medusa's ``0.8**k``; 1 by default.
            What a head of weight 0 computes, NaN too, is in the metrics alone.
        shift: how many positions labels are moved by: position ``t`` predicts the label at ``t + shift``, ``True`` is
            1. With K heads, a list gives each its own: ``[1, 2, 3]`` for the next three tokens.
        ignore_index, softcap, accum_dtype, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    options_type = CrossEntropyOptions
    settings: CrossEntropyOptions
    positions = (
        *("ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap", "return_z_loss"),
        *("accum_dtype", "use_token_scaling", "return_token_accuracy", "return_predicted_tokens"),
    )
    ce_weight: Tensor | None

    def __init__(self, ce_weight: Tensor | None = None, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if ce_weight is not None:
            check_tensor("ce_weight", ce_weight)
        self.register_buffer("ce_weight", ce_weight, persistent=False)

    @property
    def spans_ranks(self) -> bool:
        """Whether the loss is one of all ranks of :attr:`group`; a loss per token is not."""
        return self.group is not None and self.reduction != "none"

    def labels(self, labels: Tensor) -> Tensor:
        """Labels ``[...]`` as the engine takes them: moved by :attr:`shift` positions."""
        check_labels(labels)
        return shift_labels(labels, self.ignore_index, int(self.shift)) if self.shift else labels

    @loss_operator
    def forward(  # type: ignore[override]
        self,
        lin_weight: Any,
        _input: Any,
        target: Any,
        bias: Any = None,
        *,
        num_items_in_batch: Any = None,
        token_weights: Any = None,
    ) -> Any:
        """The loss of ``_input @ lin_weight.T + bias`` against ``target``, or of K such pairs.

        With K heads (multi-token prediction, Medusa heads), ``loss = sum_k head_weights_k loss_k``, where ``loss_k`` is
        the reduction over the tokens of head k. Either ``lin_weight`` or ``_input`` is then a list of K; each of the
        other arguments is one for all heads, or a list of K. Targets of the same head are one stream with one gradient
        of the weight; different heads run one after another.

        Args:
            lin_weight, _input, target, bias: as in :meth:`ChunkedLoss.forward`; or lists of K.
            num_items_in_batch: what ``mean`` divides by, instead of this call's own tokens (gradient accumulation).
            token_weights: ``[...]``, weight of each token; a constant for the gradient.

        Returns:
            The loss, or :class:`CrossEntropyOutput` if anything else was asked for. With K heads ``(loss, metrics)``,
            where metrics are :class:`ManyHeadsMetrics`; the loss for reduction ``none`` is a list of K tensors.
        """
        if isinstance(_input, LISTS) or isinstance(lin_weight, LISTS):
            return self._many_heads(lin_weight, _input, target, bias, num_items_in_batch, token_weights)
        if self.head_weights is not None or isinstance(self.shift, (list, tuple)):
            raise ValueError(
                "head_weights, and a shift of several numbers, are for K heads: give a list of heads or hidden states, "
                "or one number as shift= and no head_weights=."
            )
        head, labels, options = Head.of(lin_weight, bias, self.transform), self.labels(target), self.options
        token_weights = self._checked_weights(head, labels, num_items_in_batch, token_weights)
        if head.shard is not None:
            note(labels, self.ignore_index, token_weights=token_weights)
            note(ce_weight=self.ce_weight, num_items_in_batch=num_items_in_batch)
        statistics, metrics = self._names()
        class_weight = self.ce_weight if self.label_smoothing else None
        tokens: Any = labels
        spans_ranks = self.spans_ranks
        if spans_ranks:
            calls = [(head, Query(tuple(statistics), tuple(metrics)))]
            tokens = self.agreed_tokens(_input, labels, num_items_in_batch, calls)
        items = None if num_items_in_batch is None else checked_items(num_items_in_batch, labels.device)
        kept: list[tuple[Tensor, Tensor]] = []

        def totals() -> tuple[Tensor, Tensor]:
            """Read once the first product is queued, so that the device need not wait for them."""
            if not kept:
                kept.append(self._denominators(labels, items, token_weights, head.weight.dtype))
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
                return ce + z if "lse" in (*statistics, *metrics) else ce, derivatives

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

    def _many_heads(
        self, lin_weight: Any, _input: Any, target: Any, bias: Any, num_items_in_batch: Any, token_weights: Any
    ) -> tuple[Any, ManyHeadsMetrics]:
        """The loss of K heads, and their metrics."""
        given = {"hidden states": _input, "heads": lin_weight, "labels": target, "bias": bias, "shift": self.shift}
        others = {"token_weights": token_weights, "num_items_in_batch": num_items_in_batch}
        count = count_targets(**given, **others, head_weights=self.head_weights)
        labels = shift_each(target, self.shift, count, self.ignore_index)
        hidden, layers, biases, weights, numbers = (
            one_each(value, count) for value in (_input, lin_weight, bias, token_weights, num_items_in_batch)
        )
        heads = heads_of(layers, biases, self.transform)
        weights = [self._checked_weights(*each) for each in zip(heads, labels, numbers, weights, strict=True)]
        if any(head.shard is not None for head in heads):
            for i, (part, own) in enumerate(zip(labels, weights, strict=True)):
                note(part, self.ignore_index, **{f"token_weights[{i}]": own})
            note(ce_weight=self.ce_weight, num_items_in_batch=num_items_in_batch)
        masks, targets = [part != self.ignore_index for part in labels], list[_Target]()
        (statistics, metrics), options = self._names(), self.options
        if self.spans_ranks:
            query = Query(tuple(statistics), tuple(metrics), token_loss=self._token_loss)
            Targets.of(hidden, heads, labels, options).check(query)
            self.agree(numbers, labels[0].device)
        for head, part, mask, own, number in zip(heads, labels, masks, weights, numbers, strict=True):
            items = None if number is None else checked_items(number, part.device)
            targets.append(_Target(part, mask, self._denominators(part, items, own, head.weight.dtype), own))
        class_weight = self.ce_weight if self.label_smoothing else None
        scales = [1.0] * count if self.head_weights is None else list(self.head_weights)
        # 0 times what is NaN is NaN: to the sum, a head of weight 0 has no tokens, of which its metrics are later.
        silent = [k for k in range(count) if scales[k] == 0]
        counted = [target.part(0) if k in silent else target for k, target in enumerate(targets)]
        states = [part[:0] if k in silent else part for k, part in enumerate(hidden)]
        if self.reduction == "none":
            found = linear_statistics(
                states,
                heads,
                [target.labels for target in counted],
                statistics,
                metrics=metrics,
                class_weight=class_weight,
                options=options,
            )
            terms = [self._target_terms(*pair) for pair in zip(found, counted, strict=True)]
            loss: Any = [scale * (ce + z) for scale, (ce, z) in zip(scales, terms, strict=True)]
            for k in silent:  # zeros that depend on the head
                loss[k] = loss[k].sum() + loss[k].new_zeros(labels[k].shape)
        else:
            loss, found = linear_token_loss(
                states,
                heads,
                [target.labels for target in counted],
                self._token_loss,
                statistics,
                metrics=metrics,
                token_inputs=self._token_inputs(counted, scales, heads[0].weight.dtype),
                class_weight=class_weight,
                options=options,
            )
            loss = loss if self.group is None else self.total(loss)
            terms = [self._target_terms(*pair) for pair in zip(found, counted, strict=True)]
        if silent:
            their_hidden, their_heads, their_labels = ([part[k] for k in silent] for part in (hidden, heads, labels))
            with torch.no_grad():
                own = linear_statistics(
                    their_hidden,
                    their_heads,
                    their_labels,
                    statistics,
                    metrics=metrics,
                    class_weight=class_weight,
                    options=options,
                )
            for k, values in zip(silent, own, strict=True):
                found[k], terms[k] = values, self._target_terms(values, targets[k])
        return loss, self._metrics(found, targets, [(ce.detach(), z.detach()) for ce, z in terms])

    def _token_inputs(
        self, targets: Sequence[_Target], scales: Sequence[float], dtype: torch.dtype
    ) -> dict[str, list[Tensor]]:
        """What :meth:`_token_loss` gets of each target, one value per token."""
        dtype, weights = torch.promote_types(dtype, torch.float32), []
        for (labels, _, _, own), scale in zip(targets, scales, strict=True):
            weight = torch.full((), scale, dtype=dtype, device=labels.device)
            weights.append((weight if own is None else weight * own).expand(labels.shape))
        inputs = {"token_weights": weights}
        for name, i in (("ce_total", 0), ("z_total", 1)):
            if i == 0 or self.ce_weight is not None:  # else they are the same
                inputs[name] = [target.totals[i].to(dtype).expand(target.labels.shape) for target in targets]
        return inputs

    def _token_loss(
        self,
        values: Statistics,
        active: Tensor,
        token_weights: Tensor,
        ce_total: Tensor,
        z_total: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        totals = ce_total, ce_total if z_total is None else z_total
        ce, z, derivatives = self._terms(values, active, totals, token_weights)
        return ce + z, derivatives

    def _target_terms(self, values: Statistics, target: _Target) -> tuple[Tensor, Tensor]:
        """Cross-entropy and z-loss ``[...]`` of a target's tokens over its denominators, 0 for ignored ones."""
        labels, mask, totals, own = target
        ce, z, _ = self._terms(values, labels.where(mask, 0), totals, own)
        return torch.where(mask, ce, 0.0), torch.where(mask, z, 0.0)

    def _metrics(
        self, found: Sequence[Statistics], targets: Sequence[_Target], terms: Sequence[tuple[Tensor, Tensor]]
    ) -> ManyHeadsMetrics:
        """Sums over each target's tokens, and over the ranks of :attr:`group` (which do not share tokens)."""
        spans_ranks = self.spans_ranks

        def sums(values: Sequence[Tensor]) -> Tensor:
            stacked = torch.stack([value.sum() for value in values])
            return sum_over_group(self.group, stacked)[0] if spans_ranks else stacked

        accuracy = predicted = None
        if self.return_token_accuracy:
            correct = [(f.argmax == t.labels) & t.mask for f, t in zip(found, targets, strict=True)]
            accuracy = sums(correct).float() / sums([target.mask for target in targets]).clamp(min=1)
        if self.return_predicted_tokens:
            predicted = [torch.where(t.mask, f.argmax, -1) for f, t in zip(found, targets, strict=True)]
        z_losses = sums([z for _, z in terms]) if self.return_z_loss else None
        return ManyHeadsMetrics(sums([ce + z for ce, z in terms]), z_losses, accuracy, predicted)

    def _names(self) -> tuple[list[str], list[str]]:
        """The statistics that the loss reads, and further ones."""
        read = {"logp": True, "lse": self.lse_square_scale != 0, "mean_logp": self.label_smoothing != 0}
        also = {"argmax": self.return_token_accuracy or self.return_predicted_tokens, "lse": self.return_z_loss}
        statistics, metrics = ([name for name, wanted in names.items() if wanted] for names in (read, also))
        return statistics, metrics

    def _checked_weights(
        self, head: Head, labels: Tensor, num_items_in_batch: Any, token_weights: Any
    ) -> Tensor | None:
        """The token weights in fp32 or fp64, once these, the class weights and the number of items fit."""
        if self.ce_weight is not None:
            check_vector("ce_weight", self.ce_weight, head.weight, head.vocab_size)
        if num_items_in_batch is not None and self.reduction != "mean":
            raise ValueError(
                f"num_items_in_batch is what 'mean' divides by; the reduction is {self.reduction!r}; leave it out."
            )
        if token_weights is None:
            return None
        check_tensor("token_weights", token_weights)
        if token_weights.shape != labels.shape:
            expected = f"token_weights must have one value per label, {tuple(labels.shape)}"
            raise ValueError(f"{expected}, got {tuple(token_weights.shape)}.")
        if token_weights.is_complex():
            raise TypeError(f"token_weights must be real, got {token_weights.dtype}.")
        check_device(head.weight, token_weights=token_weights)
        return token_weights.detach().to(torch.promote_types(token_weights.dtype, torch.float32))

    def _terms(
        self, values: Statistics, labels: Tensor, totals: tuple[Tensor, Tensor], token_weights: Tensor | None
    ) -> CrossEntropyTerms:
        """:func:`cross_entropy` over the denominators, with token weights and token scaling."""
        ce_total, z_total = totals
        ce_scale = ce_total.to(values.logp.dtype).reciprocal()
        z_scale = ce_scale if z_total is ce_total else z_total.to(values.logp.dtype).reciprocal()
        # In the statistics' dtype: fp32 weights would make fp64 scales fp32.
        scales = [] if token_weights is None else [token_weights.to(values.logp.dtype)]
        if self.use_token_scaling:
            scales.append(values.logp.detach().exp())
        for scale in scales:
            ce_scale, z_scale = ce_scale * scale, z_scale * scale
        return cross_entropy(
            values.logp,
            mean_logps=values.mean_logp if self.label_smoothing else None,
            lse=values.lse if self.lse_square_scale or self.return_z_loss else None,
            label_weights=None if self.ce_weight is None else self.ce_weight.to(ce_scale.dtype)[labels],
            label_smoothing=self.label_smoothing,
            lse_square_scale=self.lse_square_scale,
            ce_scale=ce_scale,
            z_scale=z_scale,
        )

    def _denominators(
        self, labels: Tensor, items: Tensor | None, token_weights: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """What cross-entropy and z-loss are divided by, from a head of this dtype: known before any logit."""
        if self.reduction != "mean":
            one = torch.ones((), device=labels.device)
            return one, one
        if items is not None:
            ce_total = z_total = items
        else:
            mask = labels != self.ignore_index
            wide = torch.promote_types(dtype, torch.float32)
            weights = mask
            if token_weights is not None:
                weights = token_weights.to(torch.promote_types(token_weights.dtype, wide)) * mask
            ce_total = z_total = weights.sum(dtype=torch.promote_types(weights.dtype, wide))
            if self.ce_weight is not None:
                weights = weights.to(ce_total.dtype)
                # The engine reports labels outside the vocabulary.
                classes = labels.where(mask, 0).clamp(0, len(self.ce_weight) - 1)
                ce_total = (weights * self.ce_weight.to(weights.dtype)[classes]).sum()
            if self.group is not None:
                ce_total, z_total = self.total(ce_total), self.total(z_total)
        z_total = z_total.masked_fill(z_total == 0, 1.0)
        return (z_total if self.ce_weight is None else ce_total.masked_fill(ce_total == 0, 1.0)), z_total
