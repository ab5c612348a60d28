"""What every loss derives from. A loss names the statistics that it reads; it never sees logits.

B completions, T tokens of the longest. A completion without tokens has log-probability 0, summed or averaged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_losses.chunked.engine import EngineOptions, Head, Statistics, linear_statistics
from liger_losses.chunked.engine.arguments import unknown_options
from liger_losses.chunked.engine.call import Query
from liger_losses.chunked.engine.checks import (
    check_alike,
    check_labels,
    check_shape_of,
    check_shift,
    check_tensor,
    checked_items,
    checked_mask,
)
from liger_losses.chunked.engine.operators import loss_operator, name_of
from liger_losses.chunked.engine.tokens import Tokens, shift_labels
from liger_losses.chunked.losses.call_forms import AnyHead, CompletionBatch, Completions, naming_the_reference
from liger_losses.chunked.losses.context_parallel import agree, check_call, check_sliced, sum_over_group
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.tracing import state

#: exp() of more overflows fp32, and an overflow that a clip discards still makes gradients NaN.
MAX_EXPONENT = 80.0

#: Options that are true or false, of any loss.
_FLAGS = (
    *("average_log_prob", "compiled", "compute_nll_loss", "length_normalization", "return_predicted_tokens"),
    *("return_soft_hard_loss", "return_token_accuracy", "return_z_loss", "single_step", "temperature_squared"),
    *("use_bias_correction_kl", "use_ref_model", "use_token_scaling", "use_weighting"),
)


class ChunkedLoss(nn.Module):
    """A loss on the output of ``lm_head``, computed without materializing the logits.

    To write one, derive from it, name the :attr:`statistics` that it reads and define :meth:`loss`.

    Every option is an attribute that is read at each call. Assigning a value that does not fit raises, and leaves the
    attribute as it was.

    Args:
        ignore_index: label of tokens that carry no loss; they are dropped before the projection.
        temperature, logit_scale, softcap: see :class:`liger_losses.LogitTransform`.
        shift: labels are unshifted: position ``t`` predicts the label at ``t + 1``.
        compact: drop tokens without loss, at the cost of one host synchronization.
        workspace: upper bound in bytes for all temporary memory; see :func:`liger_losses.set_default_workspace` for
            the default.
        chunk_size: upper bound for the tokens of a block in the forward pass.
        accum_dtype: ``torch.float32`` to accumulate the weight's gradient in a buffer of that dtype.
        backend: ``torch`` or ``triton``; chosen from the device by default.
        group: a ``torch.distributed`` process group each of whose ranks passes a slice of every sequence (context
            parallelism), with labels that were shifted before they were cut. Sums over a sequence's tokens and over
            the batch's are taken over its ranks. All of them get the loss and the metrics of the whole sequences, and
            the gradient of their own hidden states. The gradient of the ``lm_head`` is this rank's part, and the SUM
            over the group is the whole: where DDP or FSDP average over these ranks too, multiply the loss by the
            group's size before ``backward()``. What is one number per sequence (advantages, a reference's sums) is the
            whole sequence's, the same on all ranks; results per token stay those of the slice.

    Raises:
        TypeError, ValueError: an option of the wrong type or out of its range (in subclasses too).
    """

    #: What :meth:`loss` is differentiated by; names from :data:`liger_losses.kernels.softmax_stats.STATISTICS`.
    statistics: ClassVar[tuple[str, ...]] = ("logp",)
    #: Further statistics that it reads, without a gradient.
    metrics: tuple[str, ...] = ()
    #: How it is called, for error messages.
    call_forms: ClassVar[str] = "loss(head, hidden_states, labels)"
    #: What attributes make, until one of them changes: a call reads them while the device is idle.
    _transform: LogitTransform | None = None
    _options: EngineOptions | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):  # torch.compile cannot trace it
            cls.__init__ = torch.compiler.disable(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        temperature: float = 1.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        shift: bool = False,
        compact: bool = True,
        workspace: int | None = None,
        chunk_size: int | None = None,
        accum_dtype: torch.dtype | None = None,
        backend: str | None = None,
        group: dist.ProcessGroup | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(unknown_options(type(self), unknown))
        super().__init__()
        self.group = group
        self.ignore_index, self.shift, self.compact = ignore_index, shift, compact
        self.temperature, self.logit_scale, self.softcap = temperature, logit_scale, softcap
        self.workspace, self.chunk_size, self.accum_dtype, self.backend = workspace, chunk_size, accum_dtype, backend
        # Subclasses assign their options before they call this constructor, so that all are checked together here.
        self.check_options()
        self._constructed = True
        self._name_for_operators = name_of(self)

    def __setattr__(self, name: str, value: Any) -> None:
        changes, before = name in self.__dict__, self.__dict__.get(name)
        super().__setattr__(name, value)
        self.__dict__.update(_transform=None, _options=None)
        if changes and "_constructed" in self.__dict__:
            try:
                self.check_options()
            except (TypeError, ValueError):
                self.__dict__.update({name: before, "_transform": None, "_options": None})
                raise
            # The graph is the same with another number, unless it is 0, and in training and evaluation.
            number = all(type(v) in (int, float) for v in (value, before)) and bool(value) == bool(before)
            if not (number or name == "training" or (type(value) in (bool, str) and value == before)):
                self.__dict__["_name_for_operators"] = name_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_name_for_operators"] = name_of(self)

    def check_options(self) -> None:
        """Raise TypeError or ValueError for attributes that are out of range or contradict each other."""
        _ = self.transform, self.options  # both check themselves when they are made
        if not isinstance(self.shift, bool):
            check_shift(self.shift, several=hasattr(self, "head_weights"))
        for name in _FLAGS:
            if isinstance(self.__dict__.get(name), (str, float)):  # all texts would be true
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.group is not None:
            check_sliced(self.group, self.shift, self.reads_order)

    @property
    def reads_order(self) -> str | None:
        """What depends on the order of a sequence's tokens, so that :attr:`group` cannot be given."""
        return None

    @property
    def spans_ranks(self) -> bool:
        """Whether the loss is one of all ranks of :attr:`group`, which then exchange sums, and errors."""
        return self.group is not None

    @property
    def common_options(self) -> dict[str, Any]:
        """The options that all ranks of :attr:`group` have in common: how a rank streams is its own affair."""
        own = {*EngineOptions.__match_args__, "compiled"}
        plain = (bool, int, float, str, list, tuple, type(None))
        named = {k: v for k, v in vars(self).items() if k[0] != "_" and k not in own and isinstance(v, plain)}
        return {"loss": type(self).__name__, **named}

    @property
    def transform(self) -> LogitTransform:
        """What is done to the logits of policy and reference."""
        made = None if torch.compiler.is_dynamo_compiling() else self._transform
        if made is None:
            made = LogitTransform(self.temperature, self.logit_scale, self.softcap)
            self._keep("_transform", made)
        return made

    def transform_at(self, temperature: Tensor | None) -> LogitTransform:
        """:attr:`transform`, with a temperature per token where a call gives one."""
        if temperature is None:
            return self.transform
        self.check_one_temperature(temperature)
        return replace(self.transform, temperature=temperature)

    def check_one_temperature(self, temperature: Tensor) -> None:
        """Raise TypeError or ValueError unless a call's temperature is a tensor, and the loss's own is 1."""
        if isinstance(temperature, Real):
            raise TypeError(
                f"a call's temperature must be a tensor with one value per token, got {temperature!r}; one number for "
                f"all tokens goes to the constructor, {type(self).__name__}(temperature={temperature!r})."
            )
        check_tensor("temperature", temperature)
        LogitTransform(temperature)  # raises unless it can be one
        if self.temperature != 1.0:
            raise ValueError(
                f"temperature was given twice: the loss was built with {self.temperature}, and the call has one per "
                "token; leave the first at 1."
            )

    @property
    def options(self) -> EngineOptions:
        """How the engine streams."""
        made = None if torch.compiler.is_dynamo_compiling() else self._options
        if made is None:
            made = self.attributes_as(EngineOptions, strategy=None)
            self._keep("_options", made)
        return made

    def _keep(self, name: str, made: Any) -> None:
        """Until an attribute changes; not what a subclass computes, or has in a buffer.

        torch.compile would trace a function anew for a change of state.
        """
        read = {*made.__match_args__} - {"strategy"}
        if not torch.compiler.is_dynamo_compiling() and read <= self.__dict__.keys():
            self.__dict__[name] = made

    def attributes_as(self, options: Any, **others: Any) -> Any:
        """An instance of a dataclass, from the attributes that bear its fields' names and from ``others``."""
        names = [name for name in options.__match_args__ if name not in others]
        return options(**{name: getattr(self, name) for name in names}, **others)

    def labels(self, labels: Tensor) -> Tensor:
        """Labels ``[...]`` as the engine takes them: shifted by one position if :attr:`shift` is set."""
        check_labels(labels)
        return shift_labels(labels, self.ignore_index, int(self.shift)) if self.shift else labels

    def total(self, values: Tensor) -> Tensor:
        """The sum of values of any shape, 0-dim, over the ranks of :attr:`group` too."""
        return values.sum() if self.group is None else sum_over_group(self.group, values.sum())[0]

    def agreed_tokens(
        self, hidden: Tensor, labels: Tensor, num_items_in_batch: Any, calls: Sequence[tuple[Head, Query]]
    ) -> Tokens:
        """The active tokens, once all ranks of :attr:`group` have inputs for these calls."""
        (head, _), options = calls[0], self.options
        tokens = Tokens.select([labels], head.vocab_size, options.ignore_index, options.compact, options.backend)
        for head, query in calls:
            check_call(hidden, head, tokens, query, options)
        self.agree([num_items_in_batch], labels.device)
        return tokens

    def agree(self, numbers: Sequence[Any], device: torch.device) -> None:
        """Raise TypeError or ValueError unless all ranks of :attr:`group` get here, with the same options.

        Of each ``num_items_in_batch``, all must have one, or none.
        """
        for number in numbers:
            if number is not None:
                checked_items(number, device)
        given = ["not given" if number is None else "given" for number in numbers]
        agree(self.group, **self.common_options, num_items_in_batch=given)

    def loss(self, statistics: Statistics, mask: Tensor, **inputs: Any) -> Any:
        """The loss of all tokens, 0-dim, or a tuple of that and metrics; subclasses define it.

        Args:
            statistics: tensors ``[...]`` in the labels' shape, 0 for tokens without loss.
            mask: ``[...]`` bool, true for tokens that carry loss.
            inputs: the keyword arguments of the call.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(statistics, mask, **inputs)")

    @functools.partial(loss_operator, opaque=False)
    def forward(
        self, weight: AnyHead, hidden_states: Tensor, labels: Tensor, bias: Tensor | None = None, **inputs: Any
    ) -> Any:
        """Compute :meth:`loss` from the statistics of ``hidden_states @ weight.T + bias``.

        Args:
            weight: ``[V, H]``, the ``lm_head``: a tensor, a linear layer, or a :class:`liger_losses.Head`.
            hidden_states: ``[..., H]``.
            labels: ``[...]`` int64.
            bias: ``[V]``, for a weight without one of its own.
            inputs: passed on to :meth:`loss`.

        Raises:
            TypeError, ValueError: inputs that do not fit together (in subclasses too).
        """
        if self.group is not None:
            raise ValueError(
                f"{type(self).__name__} has a loss(statistics, mask) of its own, which sees this rank's tokens alone: "
                "leave out group=, and sum over the ranks there."
            )
        labels, head, options = self.labels(labels), Head.of(weight, bias, self.transform), self.options
        found = linear_statistics(hidden_states, head, labels, self.statistics, metrics=self.metrics, options=options)
        return self.loss(found, labels != self.ignore_index, **inputs)


def wide_dtype(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def sequence_logps(
    logps: Tensor,
    mask: Tensor,
    *,
    average: bool = False,
    weights: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``sum_t w_t logp_t``, or ``sum_t w_t logp_t / sum_t mask_t``; 0 for a sequence without tokens.

    Args:
        logps: ``[B, T]``; values where the mask is false never matter.
        mask: ``[B, T]`` bool, true for tokens that count.
        average: divide by their number.
        weights: ``[B, T]``, the ``w_t``; 1 by default.
        group: the ranks that hold the slices of these sequences, over which both sums go; every rank must compute the
            same from the result.

    Returns:
        ``[B]`` in fp64: a preference is a small difference of sums that grow with the length, and at 64k tokens fp32
        would leave it two digits. (Devices without fp64: fp32.)
    """
    check_alike(logps=logps)
    mask = checked_mask("mask", mask, "logps", logps)
    if weights is not None:  # a mask may be one
        check_tensor("weights", weights)
        check_shape_of("weights", weights, "logps", logps)
    logps = torch.where(mask, logps, 0.0)
    total = (logps if weights is None else logps * weights).sum(-1, dtype=wide_dtype(logps.device))
    if group is not None:
        total, lengths = sum_over_group(group, total, mask.sum(-1))
        return total / lengths.clamp(min=1) if average else total
    return total / mask.sum(-1).clamp(min=1) if average else total


class Scored(NamedTuple):
    """One group of completions: the policy's statistics ``[B, T]`` (0 for tokens without loss), the mask of tokens that
    carry loss, and the completions' log-probabilities ``[B]`` under policy and reference (0 without one)."""

    statistics: Statistics
    mask: Tensor
    logps: Tensor
    ref_logps: Tensor


class CompletionLoss(ChunkedLoss):
    """Base of losses on completions that may be compared with a reference model. Subclasses assign these attributes.

    Args:
        beta: weight of the reference: temperature of the implicit reward, or weight of the KL divergence.
        average_log_prob: divide each completion's log-probability by its length.
        use_ref_model: whether the loss compares with a reference model.
        chunk_size, compiled: accepted for code written for liger-kernel, and without effect: ``workspace=`` bounds
            memory, and there is nothing to compile.
        ignore_index, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    beta: float
    average_log_prob: bool | None = False
    use_ref_model: bool
    compiled: bool

    @property
    def options(self) -> EngineOptions:
        """How the engine streams: without :attr:`chunk_size`, which counts completions in liger-kernel."""
        return replace(super().options, chunk_size=None)

    @property
    def averages(self) -> bool:
        """Whether a completion's log-probability is divided by its length."""
        return bool(self.average_log_prob)

    @property
    def needs_reference(self) -> str | None:
        """Why a call needs a reference, for the error message; ``None`` if it does not."""
        return f"{type(self).__name__} compares with a reference model" if self.use_ref_model else None

    def prepare(
        self,
        batch: CompletionBatch,
        ref_weight: AnyHead | None,
        ref_bias: Tensor | None,
        transform: LogitTransform | None = None,
    ) -> CompletionBatch:
        """The batch with the reference's head, which is checked, and with labels as the engine takes them.

        ``transform`` is that of the reference's logits, if it is not :attr:`transform`.
        """
        ref_head = None
        if batch.ref_hidden_states is not None and ref_weight is not None:
            with naming_the_reference():
                ref_head = Head.of(ref_weight, ref_bias, transform or self.transform)
        batch = replace(batch, ref_head=ref_head, labels=[self.labels(part) for part in batch.labels])
        if not self.use_ref_model and (batch.ref_hidden_states or any(logps is not None for logps in batch.ref_logps)):
            name = type(self).__name__
            raise ValueError(
                f"a reference was given to {name}, which was built without one (use_ref_model=False): leave it out, or "
                "build the loss with use_ref_model=True."
            )
        batch.check_reference(self.needs_reference)
        return batch

    def token_weights(self, masks: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Weights ``[B, T]`` of each group's tokens in the completion's log-probability; ``None`` for 1."""
        return [None] * len(masks)

    def score(
        self, batch: CompletionBatch, extra: Completions | None = None, *, metrics: Sequence[str] = ()
    ) -> tuple[list[Scored], Statistics | None]:
        """Each group's log-probabilities under policy and reference; the policy's statistics of ``extra`` completions.

        The active tokens are selected once. The reference comes first, while no logits of the policy are held.

        Args:
            metrics: the policy's statistics to return besides log-probabilities.
        """
        others, options = [] if extra is None else [extra], self.options
        tokens = batch.select(options, [other.labels for other in others])
        reference = batch.reference_logps(tokens, options)
        hidden = [*batch.hidden_states, *(other.hidden_states for other in others)]
        if self.group is not None:
            check_call(hidden, batch.head, tokens, Query(("logp",), tuple(metrics)), options)
            ref_dims = [None if logps is None else logps.dim() for logps in reference]
            facts = {"completions": batch.names, "sequences": [len(part) for part in batch.labels]}
            agree(self.group, **self.common_options, **facts, dimensions_of_ref_logps=ref_dims)
        found = linear_statistics(hidden, batch.head, tokens, metrics=metrics, options=options)
        masks = batch.groups([part != self.ignore_index for part in batch.labels])
        parts = batch.group_statistics(found[: len(batch.labels)])
        average, group, groups = self.averages, self.group, list[Scored]()
        for part, mask, weights, ref_logps in zip(parts, masks, self.token_weights(masks), reference, strict=True):
            logps = sequence_logps(part.logp, mask, average=average, weights=weights, group=group)
            if ref_logps is None:
                ref_logps = torch.zeros_like(logps)
            elif ref_logps.dim() == 2:
                ref_logps = sequence_logps(ref_logps, mask, average=average, weights=weights, group=group)
            groups.append(Scored(part, mask, logps, ref_logps))
        return groups, found[-1] if others else None


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_processes(values: Tensor) -> Tensor:
    """All processes' values, added up entry by entry; the values themselves where there is one."""
    if world_size() > 1 and not state.shapes_only:
        values = values.clone()
        dist.all_reduce(values)
    return values


def gather_over_processes(values: Tensor) -> Tensor:
    """All processes' values ``[n]``, of which each may have another number."""
    if world_size() == 1 or state.shapes_only:
        return values
    gathered: list[Tensor] = [values] * world_size()
    dist.all_gather_object(gathered, values.cpu())
    return torch.cat(gathered).to(values.device)
