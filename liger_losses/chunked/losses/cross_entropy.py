"""Cross-entropy on the output of ``lm_head``, in one pass. V vocabulary size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_losses.checks import (
    LISTS,
    NonNegativeFloat,
    UnitFloat,
    check_device,
    check_names,
    check_range,
    check_tensor,
    check_vector,
    checked_items,
    one_each,
)
from liger_losses.chunked import Head, Statistics, linear_statistics, linear_token_loss, shift_labels
from liger_losses.chunked.engine.many_heads import count_targets, heads_of, shift_each
from liger_losses.chunked.engine.operators import loss_operator, separable_loss
from liger_losses.chunked.engine.query import EqualWeights, Query
from liger_losses.chunked.losses.base import ChunkedLoss, LossOptions
from liger_losses.chunked.losses.cross_entropy_terms import TokenCrossEntropy, weights_of_statistics


class CrossEntropyOutput(NamedTuple):
    """The loss and the other requested results; ``None`` for results that were not requested."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class ManyHeadsMetrics(NamedTuple):
    """The results of a call with several heads beside the loss, without a gradient; ``None`` if not requested.

    ``losses [K]`` are the losses of the heads before ``head_weights`` (for reduction ``none``, their sums over the
    tokens). ``z_losses [K]`` are the z-losses. ``token_accuracies [K]`` are the shares of tokens whose label is the
    argmax. ``predicted_tokens`` is a list of K tensors ``[...]``.
    """

    losses: Tensor
    z_losses: Tensor | None = None
    token_accuracies: Tensor | None = None
    predicted_tokens: list[Tensor] | None = None


@dataclass
class _Target:
    """The tokens that one head predicts, and what is known of them beforehand."""

    head: Head
    hidden_states: Tensor
    labels: Tensor
    ignore_index: int
    items: Tensor | None = None
    token_weights: Tensor | None = None
    inputs: dict[str, Tensor] | None = None  # what tokens' losses are made of beside their statistics, once asked for

    @property
    def mask(self) -> Tensor:
        """Which tokens carry loss."""
        return self.labels != self.ignore_index

    def without_tokens(self) -> _Target:
        """A target of the same head that has none of the tokens."""
        weights = None if self.token_weights is None else self.token_weights[:0]
        inputs = None if self.inputs is None else {name: value[:0] for name, value in self.inputs.items()}
        hidden_states, labels = self.hidden_states[:0], self.labels[:0]
        return replace(self, hidden_states=hidden_states, labels=labels, token_weights=weights, inputs=inputs)


@dataclass(frozen=True, kw_only=True)
class CrossEntropyOptions(LossOptions):
    """The options of :class:`LigerFusedLinearCrossEntropyLoss`, but for its class weights."""

    several = True

    lse_square_scale: NonNegativeFloat = 0.0
    label_smoothing: UnitFloat = 0.0
    reduction: str = "mean"
    return_z_loss: bool = False
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    head_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names([self.reduction], ("mean", "sum", "none"), "reduction")
        if self.head_weights is not None:
            if not isinstance(self.head_weights, (list, tuple)):
                raise TypeError(f"head_weights must be a list of one number for each head, got {self.head_weights!r}.")
            for value in self.head_weights:
                check_range("each of head_weights", value, 0.0, math.inf)

    @property
    def weighs_equally(self) -> bool:
        """Whether these options give every token the same weight; weights that a call is given come on top."""
        of_each = self.use_token_scaling or self.lse_square_scale or self.return_z_loss
        return not of_each and self.group is None


class LigerFusedLinearCrossEntropyLoss(ChunkedLoss):
    """Cross-entropy (:func:`cross_entropy`) with class weights, label smoothing, z-loss and token scaling.

    The loss depends on ``reduction``. ``w_t`` is the weight of a token, and ``c_t`` the class weight of its label:

    - ``sum``: ``sum_t w_t (ce_t + z_t)``
    - ``mean``: ``sum_t w_t ce_t / sum_t w_t c_t + sum_t w_t z_t / sum_t w_t``. If ``num_items_in_batch`` is given, it
      replaces both denominators.
    - ``none``: ``w_t (ce_t + z_t)`` per token, 0 for masked tokens

    A batch without active tokens has loss 0.

    Args:
        ce_weight: class weights ``[V]``, as ``torch.nn.CrossEntropyLoss(weight=)``.
        lse_square_scale: weight of the z-loss (PaLM, arXiv:2204.02311, section 5).
        label_smoothing: share of the uniform distribution in the target distribution, in [0, 1].
        reduction: ``mean``, ``sum`` or ``none``.
        return_z_loss: also return the z-loss, which is a part of the loss.
        use_token_scaling: multiply the loss of a token by its detached probability (DFT, arXiv:2508.05629, eq. 9).
        return_token_accuracy: also return the share of tokens whose label is the argmax (per token for ``none``).
        return_predicted_tokens: also return the argmax of each token, -1 for ignored tokens.
        head_weights: with K heads, the weight of each head's loss in the sum, such as Medusa's ``0.8**k``; 1 by
            default. The loss of a head of weight 0 is only in the metrics, even if it is NaN.
        shift: the number of positions by which labels are moved: position ``t`` predicts the label at ``t + shift``,
            and ``True`` is 1. With K heads, a list has one number for each head: ``[1, 2, 3]`` for the next three
            tokens.
        ignore_index, softcap, accum_dtype, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    options_type = CrossEntropyOptions
    settings: CrossEntropyOptions
    positions: ClassVar[tuple[str, ...]] = (
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
        """Whether all ranks of :attr:`group` compute one loss; a loss per token (``none``) is not."""
        return self.group is not None and self.reduction != "none"

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
        the reduction over the tokens of head k. Either ``lin_weight`` or ``_input`` is then a list of K. Any other
        argument is one value for all heads, or a list of K. Targets of the same head are computed together, with one
        gradient of the weight. Different heads run one after another.

        Args:
            lin_weight, _input, target, bias: as in :meth:`ChunkedLoss.forward`; or lists of K.
            num_items_in_batch: divisor of ``mean``, instead of the number of tokens in this call (gradient
                accumulation).
            token_weights: ``[...]``, the weight of each label, without a gradient; ``shift`` moves both.

        Returns:
            The loss, or :class:`CrossEntropyOutput` if an option requests more. With K heads ``(loss, metrics)``, where
            metrics are :class:`ManyHeadsMetrics`; with reduction ``none``, the loss is a list of K tensors.
        """
        o = self.settings
        several, count = isinstance(_input, LISTS) or isinstance(lin_weight, LISTS), 1
        if several:
            given = {"hidden states": _input, "heads": lin_weight, "labels": target, "bias": bias, "shift": o.shift}
            given |= {"token_weights": token_weights, "num_items_in_batch": num_items_in_batch}
            count = count_targets(**given, head_weights=o.head_weights)
        elif o.head_weights is not None or isinstance(o.shift, LISTS):
            raise ValueError(
                "head_weights, and a shift of several numbers, are for K heads: give a list of heads or hidden states, "
                "or one number as shift= and no head_weights=."
            )
        given_each = lin_weight, bias, _input, num_items_in_batch, token_weights
        layers, biases, hidden, numbers, weights = [one_each(v, count) if several else [v] for v in given_each]
        heads = heads_of(layers, biases, self.transform)
        labels = shift_each(target, o.shift, count, o.ignore_index)
        parts = zip(heads, hidden, labels, numbers, weights, one_each(o.shift, count), strict=True)
        targets = [self._target(*part) for part in parts]
        if self.spans_ranks:
            self.agree(numbers, labels[0].device)
            _ = [self._inputs(each) for each in targets]  # sums over the ranks, also of one that has no tokens
        silent: list[int] = []
        scales, counted = [1.0] * count, targets
        if o.head_weights is not None:
            # 0 times what is NaN is NaN: to the sum, a head of weight 0 has no tokens, of which its metrics are later.
            scales = [*o.head_weights]
            silent = [k for k in range(count) if scales[k] == 0]
            counted = [each.without_tokens() if k in silent else each for k, each in enumerate(targets)]
        loss, found = self._loss(counted, scales, several)
        if o.reduction == "none":
            values = [self._of_tokens(*part)[0] for part in zip(found, counted, strict=True)]
            for k in silent:  # zeros that depend on the head
                values[k] = values[k].sum() + values[k].new_zeros(labels[k].shape)
            loss = [scale * value for scale, value in zip(scales, values, strict=True)] if several else values[0]
        if not several and not (o.return_z_loss or o.return_token_accuracy or o.return_predicted_tokens):
            return loss
        with torch.no_grad():
            if not several:
                return CrossEntropyOutput(loss, *self._output(found[0], targets[0], o.reduction == "none"))
            others = self._statistics([targets[k] for k in silent], several) if silent else []
            found = [others.pop(0) if k in silent else part for k, part in enumerate(found)]
            outputs = [self._output(*part, per_token=False) for part in zip(found, targets, strict=True)]
            z_losses, accuracies, predicted = ([*parts] for parts in zip(*outputs, strict=True))
            losses = [self._total(self._of_tokens(*part)[0]) for part in zip(found, targets, strict=True)]
            metrics = ManyHeadsMetrics(torch.stack(losses), _stacked(z_losses), _stacked(accuracies))
            return loss, metrics._replace(predicted_tokens=predicted if self.return_predicted_tokens else None)

    def _target(
        self,
        head: Head,
        hidden_states: Tensor,
        labels: Tensor,
        num_items_in_batch: Any,
        token_weights: Tensor | None,
        positions: int,
    ) -> _Target:
        """What one head predicts, once the class weights, the number of items and the token weights fit it."""
        if self.ce_weight is not None:
            check_vector("ce_weight", self.ce_weight, head.weight, head.vocab_size)
        if num_items_in_batch is not None:
            if self.reduction != "mean":
                raise ValueError(
                    "num_items_in_batch is the divisor of the reduction 'mean', but the reduction is "
                    f"{self.reduction!r}; leave it out."
                )
            num_items_in_batch = checked_items(num_items_in_batch, labels.device)
        if token_weights is not None:
            check_tensor("token_weights", token_weights)
            if token_weights.shape != labels.shape:
                expected = f"token_weights must have one value per label, {tuple(labels.shape)}"
                raise ValueError(f"{expected}, got {tuple(token_weights.shape)}.")
            if token_weights.is_complex():
                raise TypeError(f"token_weights must be real, got {token_weights.dtype}; pass token_weights.real.")
            check_device(head.weight, token_weights=token_weights)
            token_weights = token_weights.detach().to(torch.promote_types(token_weights.dtype, torch.float32))
            if positions:
                token_weights = shift_labels(token_weights, 0, int(positions))
        return _Target(head, hidden_states, labels, self.ignore_index, num_items_in_batch, token_weights)

    def _loss(self, targets: Sequence[_Target], scales: Sequence[float], several: bool) -> tuple[Any, list[Statistics]]:
        """The sum of the targets' losses, and their statistics; ``None`` and these for reduction ``none``."""
        if self.reduction == "none":
            return None, self._statistics(targets, several)
        hidden, heads, labels = _arguments(targets, several)
        o, weights = self.settings, targets[0].token_weights
        class_weight = self.ce_weight if self.label_smoothing else None
        reads_argmax = o.return_token_accuracy or o.return_predicted_tokens
        equal = None if several else self._equal_weights(targets[0])
        if equal is not None:
            metrics: tuple[str, ...] = ("argmax",) if reads_argmax else ()
            query = Query(tuple(equal), metrics, class_weight=class_weight, token_weights=equal)
            return separable_loss(hidden, heads, labels, query, self.options)
        if not (several or weights is None or o.return_z_loss or reads_argmax):
            labels = labels.masked_fill(weights == 0, self.ignore_index)  # they are in no sum, and in no metric
        statistics, metrics = self._names()
        inputs = [self._inputs(targets[0])]
        if several:
            inputs = [self._weighted_inputs(*pair) for pair in zip(targets, scales, strict=True)]
        loss, found = linear_token_loss(
            hidden,
            heads,
            labels,
            self._per_token,
            statistics,
            metrics=metrics,
            token_inputs={n: [each[n] for each in inputs] for n in inputs[0]} if several else inputs[0],
            class_weight=class_weight,
            options=self.options,
        )
        return self._total(loss) if self.spans_ranks else loss, found if several else [found]

    def _equal_weights(self, target: _Target) -> dict[str, EqualWeights] | None:
        """The loss as a sum of statistics with one weight for all tokens, where it is one: it is known beforehand."""
        o, total = self.settings, 1.0 if self.reduction == "sum" else target.items
        own = self.ce_weight is not None or target.token_weights is not None
        if own or not o.weighs_equally or torch.compiler.is_dynamo_compiling():
            return None
        if isinstance(total, Tensor):
            total = total.masked_fill(total == 0, 1.0)
        return weights_of_statistics(o.label_smoothing, total)

    def _statistics(self, targets: Sequence[_Target], several: bool) -> list[Statistics]:
        """The statistics of each target, differentiable."""
        (hidden, heads, labels), (statistics, metrics) = _arguments(targets, several), self._names()
        class_weight = self.ce_weight if self.label_smoothing else None
        found = linear_statistics(
            hidden, heads, labels, statistics, metrics=metrics, class_weight=class_weight, options=self.options
        )
        return found if several else [found]

    def _inputs(self, target: _Target) -> dict[str, Tensor]:
        """What a target's tokens' losses are made of beside their statistics, a tensor in the labels' shape of each."""
        if target.inputs is None:
            labels, mask, token_weights = target.labels, target.mask, target.token_weights
            inputs: dict[str, Tensor] = {} if token_weights is None else {"token_weights": token_weights}
            if self.ce_weight is not None:
                inputs["label_weights"] = self.ce_weight[labels.where(mask, 0).clamp(0, len(self.ce_weight) - 1)]
            totals = self._denominators(target, inputs.get("label_weights"))
            inputs |= {n: v.expand(labels.shape) for n, v in zip(("ce_total", "z_total"), totals, strict=False)}
            target.inputs = inputs
        return target.inputs

    def _weighted_inputs(self, target: _Target, scale: float) -> dict[str, Tensor]:
        """The same where the target's losses are multiplied by a number."""
        inputs, dtype = self._inputs(target), torch.promote_types(target.head.weight.dtype, torch.float32)
        weights = torch.full((), scale, dtype=dtype, device=target.labels.device)
        if target.token_weights is not None:
            weights = weights * target.token_weights
        return inputs | {"token_weights": weights.expand(target.labels.shape)}

    @property
    def _per_token(self) -> TokenCrossEntropy:
        return TokenCrossEntropy(
            self.label_smoothing, self.lse_square_scale, self.use_token_scaling, self.return_z_loss
        )

    def _of_tokens(self, values: Statistics, target: _Target) -> tuple[Tensor, Tensor]:
        """The loss and the z-loss ``[...]`` of a target's tokens over its denominators, 0 for ignored ones."""
        ce, z, _ = self._per_token.terms(values, **self._inputs(target))
        return torch.where(target.mask, ce + z, 0.0), torch.where(target.mask, z, 0.0)

    def _output(self, values: Statistics, target: _Target, per_token: bool) -> tuple[Tensor | None, ...]:
        """z-loss, token accuracy and predicted tokens of a target; ``None`` for what was not asked for."""
        z_loss = accuracy = predicted = None
        if self.return_z_loss:
            _, z = self._of_tokens(values, target)
            z_loss = z if per_token else self._total(z)
        if self.return_token_accuracy:
            accuracy = ((values.argmax == target.labels) & target.mask).float()
            accuracy = accuracy if per_token else self._total(accuracy) / self._total(target.mask).clamp(min=1)
        if self.return_predicted_tokens:
            predicted = torch.where(target.mask, values.argmax, -1)
        return z_loss, accuracy, predicted

    def _total(self, values: Tensor) -> Tensor:
        """The sum over tokens, and over the ranks of :attr:`group` but for losses per token."""
        return self.total(values) if self.spans_ranks else values.sum()

    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The statistics that the loss reads, and further ones."""
        read = {"logp": True, "lse": self.lse_square_scale != 0, "mean_logp": self.label_smoothing != 0}
        also = {"argmax": self.return_token_accuracy or self.return_predicted_tokens, "lse": self.return_z_loss}
        return tuple([n for n, wanted in read.items() if wanted]), tuple([n for n, wanted in also.items() if wanted])

    def _denominators(self, target: _Target, label_weights: Tensor | None) -> tuple[Tensor, ...]:
        """What a target's cross-entropy is divided by, 0-dim; and its z-loss, if that is another number."""
        token_weights, mask = target.token_weights, target.mask
        if self.reduction != "mean":
            return (torch.ones((), dtype=torch.float32, device=mask.device),)
        if target.items is not None:
            return (target.items.masked_fill(target.items == 0, 1.0),)
        wide, weights = torch.promote_types(target.head.weight.dtype, torch.float32), mask
        if token_weights is not None:
            weights = token_weights.to(torch.promote_types(token_weights.dtype, wide)) * mask
        totals = [weights.sum(dtype=torch.promote_types(weights.dtype, wide))]
        if label_weights is not None:
            weights = weights.to(totals[0].dtype)
            totals.insert(0, (weights * label_weights.to(weights.dtype)).sum())
        if self.group is not None:
            totals = [self.total(total) for total in totals]
        return tuple([total.masked_fill(total == 0, 1.0) for total in totals])


def _arguments(targets: Sequence[_Target], several: bool) -> tuple[Any, Any, Any]:
    """Hidden states, heads and labels, as the engine's operations take them: lists for several heads."""
    if not several:
        return targets[0].hidden_states, targets[0].head, targets[0].labels
    return [each.hidden_states for each in targets], [each.head for each in targets], [each.labels for each in targets]


def _stacked(of_heads: Sequence[Tensor | None]) -> Tensor | None:
    """``[K]`` of one number for each head, ``None`` where they were not asked for."""
    given = [value for value in of_heads if value is not None]
    return torch.stack(given) if given else None
