"""Cross-entropy on the output of ``lm_head``, in one pass. V vocabulary size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeAlias, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import TypeVar

from liger_losses import checks
from liger_losses.checks import LISTS, NonNegativeFloat, UnitFloat
from liger_losses.chunked.core.compiled import loss_sum, statistics
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.core.inputs import several, targets_of
from liger_losses.chunked.core.target import Target, TokenLoss
from liger_losses.chunked.losses.base import AnyHead, ChunkedLoss, LossOptions, constructor
from liger_losses.chunked.losses.cross_entropy_terms import TOKEN_SCALINGS, TokenTerms, constant_weights, loss_of_terms

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    inputs: dict[str, Any]  # tensors
    scale: float  # the weight of the head

    def counted(self, ignore_index: int) -> Target:
        """The target to the loss: 0 times what is NaN is NaN, so that a head of weight 0 has no tokens."""
        nothing = torch.full_like(self.target.labels, ignore_index) if self.scale == 0 else self.target.labels
        return replace(self.target, labels=nothing)


@dataclass(frozen=True, kw_only=True)
class CrossEntropyOptions(LossOptions):
    """The options of :class:`LigerFusedLinearCrossEntropyLoss`."""

    several = True
    tensors = ("ce_weight",)

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
        checks.check_names([self.reduction], ("mean", "sum", "none"), "reduction")
        checks.check_names([self.token_scaling], ("none", *TOKEN_SCALINGS), "token_scaling")
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
        """The row of :data:`TOKEN_SCALINGS`, or ``none``."""
        return "probability" if self.use_token_scaling else self.token_scaling


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
    positions: ClassVar[tuple[str, ...]] = (
        *("ce_weight", "ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap", "return_z_loss"),
        *("accum_dtype", "use_token_scaling", "return_token_accuracy", "return_predicted_tokens"),
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
        whole = targets_of(
            _input,
            lin_weight,
            target,
            o.ignore_index,
            bias=bias,
            transform=o.transform,
            shift=o.shift,
            class_weight=self.ce_weight if o.label_smoothing else None,
            head_weights=o.head_weights,
            **inputs,
        )
        if self._columns is not None:
            whole = [replace(target, selected=min(self._columns, target.vocab_size)) for target in whole]
        count = len(whole)
        numbers, weights = [checks.one_each(value, count) if many else [value] for value in inputs.values()]
        if self.spans_ranks:
            self.agree(numbers, whole[0].labels.device)
        scales = [float(scale) for scale in o.head_weights or [1.0] * count]
        heads = zip(whole, numbers, weights, checks.one_each(o.shift, count), scales, strict=True)
        parts = [self._part(*head) for head in heads]
        targets = [part.counted(o.ignore_index) for part in parts]
        asked = {"logp": True, "lse": o.lse_square_scale != 0, "mean_logp": o.label_smoothing != 0}
        names = tuple(name for name, is_asked in asked.items() if is_asked)
        reads_argmax = bool(o.return_token_accuracy or o.return_predicted_tokens)
        columns = ["selected_logps"] * (self._columns is not None)
        metrics = (*["argmax"] * reads_argmax, *["lse"] * bool(o.return_z_loss), *columns)
        loss: Any
        if o.reduction == "none":
            read = statistics(targets, names, o.engine, metrics)
            losses = [part.scale * self._of_tokens(values, part)[0] for values, part in zip(read, parts, strict=True)]
            loss = losses if many else losses[0]
        else:
            token_losses = [self._token_loss(part) for part in parts]
            loss, read = loss_sum(targets, names, token_losses, o.engine, metrics)
            loss = self.total(loss)
        if not (many or o.return_z_loss or reads_argmax):
            return loss
        with torch.no_grad():
            if not many:
                return self._output(read[0], parts[0], loss)
            for k, part in enumerate(parts):
                if part.scale == 0:
                    (read[k],) = statistics([part.target], names, o.engine, metrics)
            outputs = [self._output(values, part) for values, part in zip(read, parts, strict=True)]
            results: Any = [None if result[0] is None else [*result] for result in zip(*outputs, strict=True)]
            of_losses, z_losses, accuracies = [result and torch.stack(result) for result in results[:3]]
            return loss, ManyHeadsMetrics(of_losses, z_losses, accuracies, results[3])

    def _part(self, target: Target, items: Any, token_weights: Tensor | None, positions: int, scale: float) -> _Part:
        """What one head predicts, once the class weights, the number of items and the token weights fit it."""
        o, classes, labels = self.settings, self.ce_weight, target.labels
        if classes is not None:
            checks.check_vector("ce_weight", classes, target.hidden, target.vocab_size)
        if items is not None:
            if o.reduction != "mean":
                raise ValueError(
                    "num_items_in_batch is the divisor of the reduction 'mean', but the reduction is "
                    f"{o.reduction!r}; leave it out."
                )
            items = checks.checked_items(items, labels.device)
        mask = labels != o.ignore_index
        inputs: dict[str, Tensor] = {}
        if token_weights is not None:
            inputs["token_weights"] = constant_weights(token_weights, labels, int(positions))
        if classes is not None:
            inputs["label_weights"] = classes[labels.where(mask, 0).clamp(0, len(classes) - 1)]
        totals = self._denominators(target.hidden.dtype, mask, items, inputs)
        return _Part(target, mask, inputs | dict(zip(("ce_total", "z_total"), totals, strict=False)), scale)

    def _token_loss(self, part: _Part) -> TokenLoss:
        """The losses of a part's tokens. What has no weight takes no part in the gradient products."""
        weights = part.inputs.get("token_weights")
        live = None if weights is None else weights != 0
        return TokenLoss(loss_of_terms, part.inputs, {"of": self._per_token(part), "scale": part.scale}, live)

    @property
    def _columns(self) -> int | None:
        """How many largest columns the token scaling reads."""
        row = TOKEN_SCALINGS.get(self.settings.scaling)
        return None if row is None else row.columns

    def _per_token(self, part: _Part) -> TokenTerms:
        o, size = self.settings, part.target.vocab_size
        smoothing = o.label_smoothing * (size / max(size - 1, 1) if o.smooths_others else 1.0)
        return TokenTerms(smoothing, o.lse_square_scale, o.scaling, o.return_z_loss)

    def _of_tokens(self, values: Mapping[str, Tensor], part: _Part) -> tuple[Tensor, Tensor]:
        """The loss and the z-loss ``[...]`` of a part's tokens over its denominators, 0 for ignored ones."""
        ce, z, _ = self._per_token(part).terms(values, **part.inputs)
        return torch.where(part.mask, ce + z, 0.0), torch.where(part.mask, z, 0.0)

    def _output(self, values: Mapping[str, Tensor], part: _Part, loss: Tensor | None = None) -> CrossEntropyOutput:
        """The results of a part, per token where the only head's ``loss`` is; ``None`` for those not asked for."""
        o, z_loss, accuracy, predicted = self.settings, None, None, None
        per_token = loss is not None and o.reduction == "none"
        if loss is None or o.return_z_loss:
            of_tokens, z_loss = self._of_tokens(values, part)
            loss = self.total(of_tokens) if loss is None else loss
            z_loss = z_loss if per_token else self.total(z_loss)
        if o.return_token_accuracy:
            correct = ((values["argmax"] == part.target.labels) & part.mask).float()
            accuracy = correct if per_token else self.total(correct) / self.total(part.mask).clamp(min=1)
        if o.return_predicted_tokens:
            predicted = torch.where(part.mask, values["argmax"], -1)
        return CrossEntropyOutput(loss, z_loss if o.return_z_loss else None, accuracy, predicted)

    def _denominators(
        self, dtype: torch.dtype, mask: Tensor, items: Tensor | None, inputs: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """What the cross-entropy is divided by, 0-dim; and the z-loss, if that is another number."""
        if self.settings.reduction != "mean":
            return [torch.ones((), dtype=torch.float32, device=mask.device)]
        if items is not None:
            return [items.masked_fill(items == 0, 1.0)]
        wide = torch.promote_types(dtype, torch.float32)
        # In fp32 at least, or fp64 if one of them is.
        factors = [x.to(torch.promote_types(x.dtype, wide)) for x in (mask, *inputs.values())]
        counted = factors[0] * factors[1] if "token_weights" in inputs else factors[0]
        totals = [counted.sum()]
        if "label_weights" in inputs:
            totals.insert(0, (counted * factors[-1]).sum())
        return [total.masked_fill(total == 0, 1.0) for total in [self.total(total) for total in totals]]
