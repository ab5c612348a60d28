"""Cross-entropy as functions of statistics, and on the output of ``lm_head``, in one pass. V vocabulary size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeAlias, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import TypeVar, Unpack

from liger_losses import checks
from liger_losses.checks import LISTS, NonNegativeFloat, UnitFloat
from liger_losses.chunked import EngineOptions, Head, shift_labels
from liger_losses.chunked.core.compiled import in_graphs, loss_sum, statistics
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.core.inputs import several, target_of, targets_of
from liger_losses.chunked.core.target import Target, TokenLoss
from liger_losses.chunked.losses.base import AnyHead, ChunkedLoss, LossOptions, constructor
from liger_losses.chunked.losses.sums import wide


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
        return CrossEntropyTerms(ce, torch.zeros_like(ce), derivatives)
    z_scale = logps.new_ones(()) if z_scale is None else z_scale
    if lse_square_scale:
        derivatives["lse"] = 2 * lse_square_scale * z_scale * lse.detach()
    return CrossEntropyTerms(ce, lse_square_scale * z_scale * lse.square(), derivatives)


def constant_weights(token_weights: Tensor, labels: Tensor, shift: int) -> Tensor:
    """Weights of tokens without a gradient, shifted as ``labels`` are; TypeError or ValueError unless there is a real
    number for each label."""
    checks.check_shaped("token_weights", token_weights, "label", labels.device, labels.shape)
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

    factor: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    columns: int | None = None


#: What the loss of a token is multiplied by.
TOKEN_SCALINGS = {
    "none": TokenScaling(),
    "probability": TokenScaling(lambda values: values["logp"].exp()),  # DFT, arXiv:2508.05629, eq. 9
    # p (1 - p): CHORD (arXiv:2508.11408)
    "uncertainty": TokenScaling(lambda values: -values["logp"].exp() * torch.expm1(values["logp"])),
    "entropy": TokenScaling(_entropy_of_columns, columns=20),
}


def token_factors(values: Mapping[str, Tensor], scaling: str) -> list[Tensor]:
    """The factor ``[...]`` of a row of :data:`TOKEN_SCALINGS`, if it has one."""
    factor = TOKEN_SCALINGS[scaling].factor
    return [] if factor is None else [factor({name: value.detach() for name, value in values.items()})]


def token_terms(
    values: Mapping[str, Tensor],
    ce_scale: Tensor,
    z_scale: Tensor | None = None,
    token_weights: Tensor | None = None,
    label_weights: Tensor | None = None,
    scaling: str = "none",
    **options: Any,
) -> CrossEntropyTerms:
    """Each token's :func:`cross_entropy` with these options, token weights, and a row of :data:`TOKEN_SCALINGS`.

    Scales are ``[]``, and the z-loss by default has the cross-entropy's."""
    logp, z_scale = values["logp"], ce_scale if z_scale is None else z_scale
    # In the statistics' dtype: fp32 weights would make fp64 scales fp32.
    factors = [] if token_weights is None else [token_weights.to(logp.dtype)]
    for factor in factors + token_factors(values, scaling):
        ce_scale, z_scale = ce_scale * factor, z_scale * factor
    label_weights = None if label_weights is None else label_weights.to(ce_scale.dtype)
    read: dict[str, Any] = {
        "mean_logps": values.get("mean_logp"),
        "lse": values.get("lse"),
        "label_weights": label_weights,
    }
    return cross_entropy(logp, ce_scale=ce_scale, z_scale=z_scale, **read, **options)


@in_graphs
def loss_of_terms(values: Mapping[str, Tensor], **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss ``[n]`` of tokens with the inputs of :func:`token_terms`, and its derivatives."""
    ce, z, derivatives = token_terms(values, **inputs)
    return ce + z if "lse" in derivatives else ce, derivatives


# --- The loss ---------------------------------------------------------------------------------------------------------


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


class _Part(NamedTuple):
    """What one head predicts, and what its tokens' losses read besides statistics."""

    target: Target
    mask: Tensor  # which tokens carry loss
    scale: float  # the weight of the head
    options: dict[str, Any]  # of the terms
    inputs: dict[str, Any]  # factors ``[]`` of all tokens, and weights of tokens and labels

    def counted(self, ignore_index: int) -> Target:
        """The target to the loss: 0 times what is NaN is NaN, so that a head of weight 0 has no tokens."""
        labels = self.target.labels
        return self.target if self.scale else replace(self.target, labels=torch.full_like(labels, ignore_index))

    def token_loss(self) -> TokenLoss:
        """The losses of the tokens. What has no weight takes no part in the gradient products."""
        live = self.inputs["token_weights"] != 0 if "token_weights" in self.inputs else None
        scaled = {n: t if t.dim() or self.scale == 1.0 else t * self.scale for n, t in self.inputs.items()}
        return TokenLoss(loss_of_terms, scaled, self.options, live)

    def losses(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss and the z-loss ``[...]`` of the tokens over the denominators, 0 for ignored ones."""
        ce, z, _ = token_terms(values, **self.inputs, **self.options)
        return torch.where(self.mask, ce + z, 0.0), torch.where(self.mask, z, 0.0)


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
    mask, names = labels != ignore_index, ("logp", "mean_logp") if label_smoothing else ("logp",)
    inputs: dict[str, Any] = {}
    if class_weight is not None:
        inputs["label_weights"] = class_weight[labels.where(mask, 0)].where(mask, 0.0)
    total = inputs.get("label_weights", mask).sum() if reduction == "mean" else mask.new_ones((), dtype=torch.int64)
    inputs["ce_scale"] = total.masked_fill(total == 0, 1).to(wide(hidden_states.dtype)).reciprocal()
    target, options = target_of(hidden_states, head, labels, class_weight=class_weight), EngineOptions(ignore_index)
    numbers: dict[str, Any] = {"label_smoothing": label_smoothing}
    if reduction == "none":
        (values,) = statistics([target], names, options)
        return torch.where(mask, token_terms(values, **inputs, **numbers).ce, 0.0)
    return loss_sum([target], names, [TokenLoss(loss_of_terms, inputs, numbers)], options)[0]


class CrossEntropyOptions(LossOptions):
    """The options of :class:`LigerFusedLinearCrossEntropyLoss`."""

    several = True
    names: ClassVar = {"reduction": (("mean", "sum", "none"),), "token_scaling": (TOKEN_SCALINGS,)}

    ce_weight: Tensor | None = field(default=None, kw_only=False, repr=False, compare=False)
    lse_square_scale: NonNegativeFloat = 0.0
    label_smoothing: UnitFloat = 0.0
    smooths_others: bool = False
    reduction: str = "mean"
    return_z_loss: bool = False
    use_token_scaling: bool = False
    token_scaling: str = "none"
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    head_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ce_weight is not None:
            checks.check_tensor("ce_weight", self.ce_weight)
        if self.use_token_scaling and self.token_scaling not in ("none", "probability"):
            raise ValueError(
                f"use_token_scaling=True is token_scaling='probability', and token_scaling={self.token_scaling!r} was "
                "given too; leave one of them out."
            )
        if self.head_weights is not None:
            if not isinstance(self.head_weights, (list, tuple)):
                raise TypeError(f"head_weights must be a list of one number for each head, got {self.head_weights!r}.")
            for value in self.head_weights:
                checks.check_range("each of head_weights", value, 0.0, math.inf)

    @property
    def scaling(self) -> str:
        """The row of :data:`TOKEN_SCALINGS`."""
        return "probability" if self.use_token_scaling else self.token_scaling

    @property
    def reads(self) -> tuple[list[str], list[str]]:
        """The names of the statistics that the loss is differentiated by, and of others."""
        names = ["logp"] + ["lse"] * bool(self.lse_square_scale) + ["mean_logp"] * bool(self.label_smoothing)
        metrics = ["argmax"] * bool(self.return_token_accuracy or self.return_predicted_tokens)
        metrics += ["selected_logps"] * (TOKEN_SCALINGS[self.scaling].columns is not None)
        return names, metrics + ["lse"] * bool(self.return_z_loss)


class CrossEntropyInputs(TypedDict, total=False):
    """What calls of :class:`LigerFusedLinearCrossEntropyLoss` may have beside head, hidden states and labels."""

    bias: Tensor | None
    num_items_in_batch: Tensor | int | None
    token_weights: Tensor | None


#: What a call returns: the loss, or with options ``return_...`` a :class:`CrossEntropyOutput`.
R = TypeVar("R", default=Tensor)
More: TypeAlias = "LigerFusedLinearCrossEntropyLoss[Any]"


class LigerFusedLinearCrossEntropyLoss(ChunkedLoss, Generic[R]):
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
        smooths_others: the uniform distribution is over the V - 1 entries other than the label, as in Megatron-core.
        reduction: ``mean``, ``sum`` or ``none``.
        return_z_loss: also return the z-loss, which is a part of the loss.
        token_scaling: multiply the loss of a token by a detached factor: ``probability`` of the label p (DFT,
            arXiv:2508.05629, eq. 9), ``uncertainty`` p (1 - p) (CHORD, arXiv:2508.11408), or ``entropy`` of the 20
            largest probabilities, as a distribution of their own, divided by log 20 (EAFT, arXiv:2601.02151).
        use_token_scaling: liger-kernel's name of ``token_scaling="probability"``.
        return_token_accuracy: also return the share of tokens whose label is the argmax (per token for ``none``).
        return_predicted_tokens: also return the argmax of each token, -1 for ignored tokens.
        head_weights: with K heads, the weight of each head's loss in the sum, such as Medusa's ``0.8**k``; 1 by
            default. The loss of a head of weight 0 is only in the metrics, even if it is NaN.
        shift: the number of positions by which labels are moved: position ``t`` predicts the label at ``t + shift``,
            and ``True`` is 1. With K heads, a list has one number for each head: ``[1, 2, 3]`` for the next three
            tokens.
        ignore_index, softcap, accum_dtype, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    settings: CrossEntropyOptions
    positions = (
        "ce_weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss accum_dtype "
        "use_token_scaling return_token_accuracy return_predicted_tokens"
    )

    @overload
    def __init__(self: More, *arguments: Any, return_z_loss: Literal[True], **options: Any) -> None: ...
    @overload
    def __init__(self: More, *arguments: Any, return_token_accuracy: Literal[True], **options: Any) -> None: ...
    @overload
    def __init__(self: More, *arguments: Any, return_predicted_tokens: Literal[True], **options: Any) -> None: ...
    @overload
    @constructor(CrossEntropyOptions)
    def __init__(self: LigerFusedLinearCrossEntropyLoss[Tensor]) -> None: ...
    @constructor(CrossEntropyOptions)  # type: ignore[misc]
    def __init__(self) -> None: ...

    def _take(self, settings: CrossEntropyOptions) -> None:
        if "_ce_weight" not in self._buffers or settings.ce_weight is not self.settings.ce_weight:
            self.register_buffer("_ce_weight", settings.ce_weight, persistent=False)
        super()._take(settings)

    @property
    def ce_weight(self) -> Tensor | None:
        """The class weights, a buffer, which moves with the module."""
        return self._ce_weight

    @property
    def spans_ranks(self) -> bool:
        """Whether all ranks of :attr:`group` compute one loss; a loss per token (``none``) is not."""
        return self.settings.group is not None and self.settings.reduction != "none"

    @overload
    def forward(
        self, head: AnyHead, hidden_states: Tensor, labels: Tensor, **inputs: Unpack[CrossEntropyInputs]
    ) -> R: ...
    @overload
    def forward(
        self, lin_weight: AnyHead, _input: Tensor, target: Tensor, *others: Any, **inputs: Unpack[CrossEntropyInputs]
    ) -> R: ...
    @overload
    def forward(
        self, head: Any, hidden_states: Any, labels: Any, *others: Any, **inputs: Any
    ) -> tuple[Any, ManyHeadsMetrics]: ...
    @operator  # type: ignore[misc]
    def forward(
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
        argument is one value for all heads, or a list of K. They run one after another; targets of the same head have
        one gradient of the weight.

        Args:
            lin_weight, _input, target, bias: as in :meth:`ChunkedLoss.forward`; or lists of K.
            num_items_in_batch: divisor of ``mean``, instead of the number of tokens in this call (gradient
                accumulation).
            token_weights: ``[...]``, the weight of each label, without a gradient; ``shift`` moves both.

        Returns:
            The loss, or :class:`CrossEntropyOutput` if an option requests more. With K heads ``(loss, metrics)``, where
            metrics are :class:`ManyHeadsMetrics`; with reduction ``none``, the loss is a list of K tensors.
        """
        o, many = self.settings, several(_input, lin_weight)
        if not many and (o.head_weights is not None or isinstance(o.shift, LISTS)):
            raise ValueError(
                "head_weights, and a shift of several numbers, are for K heads: give a list of heads or hidden states, "
                "or one number as shift= and no head_weights=."
            )
        inputs = {"num_items_in_batch": num_items_in_batch, "token_weights": token_weights}
        classes, of_each = self.ce_weight if o.label_smoothing else None, {"head_weights": o.head_weights, **inputs}
        how: dict[str, Any] = {"bias": bias, "transform": o.transform, "shift": o.shift, "class_weight": classes}
        whole = targets_of(_input, lin_weight, target, o.ignore_index, **how, **of_each)
        if (columns := TOKEN_SCALINGS[o.scaling].columns) is not None:
            whole = [replace(target, selected=min(columns, target.vocab_size)) for target in whole]
        count = len(whole)
        numbers, weights = [checks.one_each(value, count) if many else [value] for value in inputs.values()]
        if self.spans_ranks:
            self.agree(numbers)
        scales = [float(scale) for scale in o.head_weights or [1.0] * count]
        heads = zip(whole, numbers, weights, checks.one_each(o.shift, count), scales, strict=True)
        parts, (names, metrics) = [self._part(*head) for head in heads], o.reads
        targets = [part.counted(o.ignore_index) for part in parts]
        loss: Any
        if o.reduction == "none":
            read = statistics(targets, names, o.engine, metrics)
            losses = [part.scale * part.losses(values)[0] for values, part in zip(read, parts, strict=True)]
            loss = losses if many else losses[0]
        else:
            loss, read = loss_sum(targets, names, [part.token_loss() for part in parts], o.engine, metrics)
            loss = self.total(loss)
        with torch.no_grad():
            if many:
                return loss, self._metrics(read, parts)
            return self._output(read[0], parts[0], loss) if o.return_z_loss or "argmax" in metrics else loss

    def _part(self, target: Target, items: Any, token_weights: Tensor | None, positions: int, scale: float) -> _Part:
        """What one head predicts, once the class weights, the number of items and the token weights fit it."""
        o, classes, labels = self.settings, self.ce_weight, target.labels
        if classes is not None:
            checks.check_vector("ce_weight", classes, target.hidden, target.vocab_size)
        if items is not None and o.reduction != "mean":
            raise ValueError(
                f"num_items_in_batch is the divisor of the reduction 'mean', but the reduction is {o.reduction!r}; "
                "leave it out."
            )
        mask, size = labels != o.ignore_index, target.vocab_size
        items = None if items is None else checks.checked_items(items, mask.device)
        inputs: dict[str, Any] = {}
        dtype, counted = wide(target.hidden.dtype), [mask]
        if token_weights is not None:
            inputs["token_weights"] = constant_weights(token_weights, labels, int(positions))
        if classes is not None:
            inputs["label_weights"] = classes[labels.where(mask, 0).clamp(0, len(classes) - 1)]
        smoothing = o.label_smoothing * (size / max(size - 1, 1) if o.smooths_others else 1.0)
        options = {"label_smoothing": smoothing, "lse_square_scale": o.lse_square_scale, "scaling": o.scaling}
        if o.reduction != "mean":
            return _Part(target, mask, scale, options, {**inputs, "ce_scale": mask.new_ones((), dtype=dtype)})
        for factor in inputs.values() if items is None else ():  # of tokens, then of labels
            counted.append(counted[-1] * factor.to(torch.promote_types(factor.dtype, dtype)))
        # What the cross-entropy is divided by; and the z-loss, if that is another number.
        counted = counted[:-3:-1] if classes is not None else counted[-1:]
        scales = [self.divisor(number, items).to(dtype).reciprocal() for number in counted]
        return _Part(target, mask, scale, options, inputs | dict(zip(("ce_scale", "z_scale"), scales, strict=False)))

    def _metrics(self, read: list[dict[str, Tensor]], parts: Sequence[_Part]) -> ManyHeadsMetrics:
        """The results of several heads; those of a head of weight 0 have not been read yet."""
        for k, part in enumerate(parts):
            if part.scale == 0:
                names, metrics = self.settings.reads
                (read[k],) = statistics([part.target], names, self.options, metrics)
        outputs = [self._output(values, part) for values, part in zip(read, parts, strict=True)]
        results: Any = [None if result[0] is None else [*result] for result in zip(*outputs, strict=True)]
        of_losses, z_losses, accuracies = [result and torch.stack(result) for result in results[:3]]
        return ManyHeadsMetrics(of_losses, z_losses, accuracies, results[3])

    def _output(self, values: Mapping[str, Tensor], part: _Part, loss: Tensor | None = None) -> CrossEntropyOutput:
        """The results of a part, per token where the only head's ``loss`` is; ``None`` for those not asked for."""
        o, z_loss, accuracy, predicted = self.settings, None, None, None
        per_token = loss is not None and o.reduction == "none"
        if loss is None or o.return_z_loss:
            of_tokens, z_loss = part.losses(values)
            loss = self.total(of_tokens) if loss is None else loss
            z_loss = z_loss if per_token else self.total(z_loss)
        if o.return_token_accuracy:
            correct = ((values["argmax"] == part.target.labels) & part.mask).float()
            accuracy = correct if per_token else self.total(correct) / self.total(part.mask).clamp(min=1)
        if o.return_predicted_tokens:
            predicted = torch.where(part.mask, values["argmax"], -1)
        return CrossEntropyOutput(loss, z_loss if o.return_z_loss else None, accuracy, predicted)
