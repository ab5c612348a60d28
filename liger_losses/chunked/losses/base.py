"""What every loss derives from. A loss names the statistics that it reads; it never sees logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_losses.chunked.engine import EngineOptions, Head, Statistics, linear_statistics
from liger_losses.chunked.engine.arguments import constructor_options, unknown_options
from liger_losses.chunked.engine.call import drops_tokens
from liger_losses.chunked.engine.checks import check_labels, check_shift, check_tensor, checked_items
from liger_losses.chunked.engine.given import note
from liger_losses.chunked.engine.operators import loss_operator, name_of
from liger_losses.chunked.engine.query import DeclaredStatistics, Query
from liger_losses.chunked.engine.tokens import Tokens, shift_labels
from liger_losses.chunked.losses.call_forms import AnyHead
from liger_losses.chunked.losses.context_parallel import agree, check_call, check_sliced, sum_over_group
from liger_losses.kernels.logit_transform import LogitTransform

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
        compact: drop tokens without loss, at the cost of one host synchronization (but in calls of few tokens).
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
        """The options that all ranks that compute this loss together have in common: those of :attr:`group`, and those
        that share the vocabulary. How a rank streams is its own affair."""
        own = {*EngineOptions.__match_args__, "compiled"}
        plain = (bool, int, float, str, list, tuple, type(None))
        # Not every attribute: a loss may keep what differs from rank to rank, such as the rank itself.
        names = [name for name in (*constructor_options(type(self)), "training") if name not in own]
        named = {name: vars(self)[name] for name in names if isinstance(vars(self).get(name, self), plain)}
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
        compares = any(query.comparison is not None for _, query in calls)  # a teacher's may hold anything too
        compact = options.compact if compares else drops_tokens([labels.shape], head, options)
        tokens = Tokens.select([labels], head.vocab_size, options.ignore_index, compact, options.backend)
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
        if head.shard is not None:
            note(labels, self.ignore_index, **inputs)
        found = linear_statistics(hidden_states, head, labels, self.statistics, metrics=self.metrics, options=options)
        kind = type(self).__name__
        place = f"the statistics that {kind} names, or to its metrics where it needs no gradient"
        declared: Any = DeclaredStatistics(found, kind, place)
        result = self.loss(declared, labels != self.ignore_index, **inputs)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(first, dict) and (not isinstance(first, Tensor) or first.dim()):
            got = f"shape {list(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
            raise ValueError(
                f"{kind}.loss must return the loss of all tokens, one number (0-dim), or a tuple of that and metrics, "
                f"got {got}; take the sum or the mean over the tokens of the mask."
            )
        return result
