"""What every loss derives from. A loss names the statistics that it reads; it never sees logits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self, dataclass_transform

from liger_losses.arguments import check_known, check_no_inputs, constructor_signature, named_options, options_signature
from liger_losses.checks import check_fields, check_labels, check_shift, check_tensor, checked_items, described
from liger_losses.chunked import EngineOptions, Head, Statistics, linear_statistics, shift_labels
from liger_losses.chunked.core.agreement import agree
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.core.statistics import DeclaredStatistics
from liger_losses.chunked.losses.sums import check_sliced, sum_over_group
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.tracing import outside_graphs

P = ParamSpec("P")
S = TypeVar("S")
F = TypeVar("F", covariant=True)

AnyHead = Tensor | nn.Module | Head
#: The options that say how the engine streams.
_STREAMING = [name for name in EngineOptions.__match_args__ if name not in ("strategy", "keep")]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options that every loss has; see :class:`ChunkedLoss`. Families of losses derive theirs from it, as frozen
    dataclasses whose fields are keywords.

    Raises:
        TypeError, ValueError: an option of the wrong type or out of its range, or two that contradict each other.
    """

    #: Whether the loss takes lists of heads, whose labels may be shifted by several numbers of positions.
    several: ClassVar[bool] = False
    #: Whether ``chunk_size`` has an effect. In liger-kernel's losses on completions, it counts these.
    streams_chunks: ClassVar[bool] = True
    #: What depends on the order of a sequence's tokens, so that ``group`` cannot be given.
    reads_order: ClassVar[str | None] = None
    #: Of options that are names, by field: the known names, and perhaps a mapping from other libraries' names to these.
    names: ClassVar[Mapping[str, Sequence[Any]]] = {}
    #: The values of options that are no fields, but a registered objective's own, by name.
    declared: ClassVar[Mapping[str, float]] = {}
    transform: ClassVar[LogitTransform]
    engine: ClassVar[EngineOptions]

    ignore_index: int = -100
    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    shift: Any = False
    compact: bool = True
    workspace: int | None = None
    chunk_size: int | None = None
    accum_dtype: torch.dtype | None = None
    backend: str | None = None
    group: dist.ProcessGroup | None = None

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        del cls.__setattr__, cls.__delattr__  # LossOptions has them, and a class may be decorated again

    def __post_init__(self) -> None:
        # Both check themselves; each call reads them.
        object.__setattr__(self, "transform", LogitTransform(self.temperature, self.logit_scale, self.softcap))
        engine = EngineOptions(**{name: getattr(self, name) for name in _STREAMING})
        if self.chunk_size is not None and not self.streams_chunks:
            engine = replace(engine, chunk_size=None)
        object.__setattr__(self, "engine", engine)
        if not isinstance(self.shift, bool):
            check_shift(self.shift, self.several)
        check_fields(self)
        if self.group is not None:
            check_sliced(self.group, self.shift, self.reads_order)

    @classmethod
    def folded(cls, options: Mapping[str, Any], earlier: Any = None) -> dict[str, Any]:
        """Options by the names of the fields; a loss that has other ones has them in a field. ``earlier`` are those of
        the loss that another one replaces."""
        return dict(options)


def _refuse(options: LossOptions, name: str, *value: Any) -> None:
    raise FrozenInstanceError(f"options do not change: make others, as in dataclasses.replace(options, {name}=...).")


LossOptions.__setattr__ = LossOptions.__delattr__ = _refuse  # type: ignore[assignment,method-assign]


def _option(name: str) -> property:
    """An option, which a loss reads from its frozen :attr:`ChunkedLoss.settings`."""
    return property(lambda loss: getattr(loss.settings, name))


def constructor(
    options: Callable[P, LossOptions],
) -> Callable[[Callable[Concatenate[S, ...], None]], Callable[Concatenate[S, P], None]]:
    """Decorate ``__init__`` of a loss: its options are a dataclass's fields, which type checkers and editors see.

    What takes ``self`` alone is not called: the constructor is inherited.
    """

    def decorate(init: Any) -> Any:
        init.options_type = options
        return init

    return decorate


class _Called(Protocol[F]):
    """What has a ``forward`` of this type."""

    @property
    def forward(self) -> F: ...


class _Signature:
    """The signature of a loss's constructor, for :func:`inspect.signature` and ``help``."""

    def __get__(self, loss: Any, cls: type) -> inspect.Signature:
        if loss is not None:
            raise AttributeError("a loss is called with the arguments of its forward")
        return cls.constructor_signature  # type: ignore[attr-defined]


#: Options that losses have as properties.
_PROPERTIES = [("divergence", property), ("ce_weight", property)]


class ChunkedLoss(nn.Module):
    """A loss on the output of ``lm_head``, computed without materializing the logits.

    To write a loss, derive from this class, name the :attr:`statistics` that the loss reads, and define :meth:`loss`.

    Every option is an attribute that cannot be assigned: :meth:`replace` returns a loss with other options.

    Args:
        ignore_index: the label of tokens that do not contribute to the loss. They are dropped before the projection.
        temperature, logit_scale, softcap: see :class:`liger_losses.LogitTransform`.
        shift: labels are not shifted yet: position ``t`` predicts the label at ``t + 1``. Weights of labels move with
            them. What belongs to a hidden state stays: its temperature, its teacher's distribution, and
            log-probabilities that were computed from one like it (``ref_logps``, ``old_logps``).
        compact: drop masked tokens before the projection, at the cost of one host synchronization.
        workspace: upper bound in bytes for all temporary memory; see :func:`liger_losses.set_default_workspace` for
            the default.
        chunk_size: upper bound for the tokens of a block in the forward pass.
        accum_dtype: ``torch.float32`` accumulates the weight's gradient in an fp32 buffer.
        backend: ``torch`` or ``triton``; chosen from the device by default.
        group: a ``torch.distributed`` process group. Each rank passes a slice of every sequence (context parallelism),
            with labels that were shifted before they were cut. Sums over a sequence or over the batch include all
            ranks. Each rank gets the loss and the metrics of the whole sequences, and the gradient of its hidden
            states.

            The gradient of the ``lm_head`` is this rank's part; the whole gradient is the sum over the group. If DDP or
            FSDP also average over these ranks, multiply the loss by the group's size before ``backward()``.

            Arguments with one number per sequence (advantages, a reference's sums) are for the whole sequence, and
            equal on all ranks. Results per token are for the slice.

    Raises:
        TypeError, ValueError: an option of the wrong type or out of its range (in subclasses too).
    """

    #: What :meth:`loss` is differentiated by; names from :data:`liger_losses.kernels.softmax_stats.STATISTICS`.
    statistics: ClassVar[tuple[str, ...]] = ("logp",)
    #: Further statistics that it reads, without a gradient.
    metrics: tuple[str, ...] = ()
    #: The dataclass of its options (see :func:`constructor`), and which of them the constructor takes by position, as
    #: names or as a text of them.
    options_type: ClassVar[type[LossOptions]] = LossOptions
    positions: ClassVar[Sequence[str]] = ()
    #: The documented names of its arguments by position, in each form of the call.
    forms: ClassVar[tuple[tuple[str, ...], ...]] = (("head", "hidden_states", "labels"),)
    #: The names of :meth:`forward`'s parameters, and which of them a documented name is.
    argument_names: ClassVar[tuple[str, ...]]
    parameters_named: ClassVar[Mapping[str, str]]
    #: Its options; what its constructor takes: these, and what subclasses' name.
    options_signature: ClassVar[inspect.Signature]
    constructor_signature: ClassVar[inspect.Signature]
    option_names: ClassVar[tuple[str, ...]]
    #: The options, a frozen dataclass of the type :attr:`options_type`.
    settings: Any
    __signature__ = _Signature()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._complete()

    @classmethod
    def _complete(cls) -> None:
        """Add what follows from the class's options, constructor and call."""
        init: Any = vars(cls).get("__init__")
        cls.options_type = getattr(init, "options_type", cls.options_type)
        cls.positions = tuple(cls.positions.split()) if isinstance(cls.positions, str) else cls.positions
        if hasattr(init, "options_type") and list(inspect.signature(init).parameters) == ["self"]:
            del cls.__init__
        elif init is not None:  # torch.compile cannot trace it
            cls.__init__ = outside_graphs(init)  # type: ignore[method-assign]
        for name in [option.name for option in fields(cls.options_type)]:
            if not hasattr(cls, name):
                setattr(cls, name, _option(name))
            elif name in vars(cls) and (name, type(vars(cls)[name])) not in _PROPERTIES:
                raise TypeError(f"{cls.__name__}.{name} hides the option {name}; give its constructor another value.")
        cls.options_signature = options_signature(cls, cls.positions)
        cls.constructor_signature = constructor_signature(cls)
        cls.option_names = tuple(cls.constructor_signature.parameters)
        parameters = [*inspect.signature(cls.forward).parameters.values()][1:]
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            return  # it passes them on
        cls.argument_names = names = tuple([parameter.name for parameter in parameters])
        # Where liger-kernel has the hidden states first, the two come in either order.
        places = (names[1], names[0], *names[2:]) if names[:1] == ("_input",) else names
        documented = {name: parameter for form in cls.forms for name, parameter in zip(form, places, strict=False)}
        documented |= {"weight": "head", "lin_weight": "head", "_input": "hidden_states"} if "head" in names else {}
        cls.parameters_named = {name: documented[name] for name in documented if name not in names}

    @constructor(LossOptions)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        settings = self.options_type(**named_options(type(self), arguments, options))
        super().__init__()
        self._take(settings)

    def _take(self, settings: Any) -> None:
        """Take these options: once, as a loss is built."""
        object.__setattr__(self, "settings", settings)

    @outside_graphs
    def replace(self, **options: Any) -> Self:
        """The same loss with other options. State (BCO's running mean) is copied, and goes on separately; the copy has
        the hooks that were registered before.

        Raises:
            TypeError, ValueError: an unknown option, or a wrong value.
        """
        options, known = self.options_type.folded(options, self.settings), self.options_signature.parameters
        changed = {name: options[name] for name in options if name in known}
        check_known(type(self).__name__, "option", options, self.option_names, self.option_names)
        check_no_inputs(type(self), changed)
        loss = copy.copy(self)
        loss.__setstate__({name: copy.copy(x) if isinstance(x, dict) else x for name, x in vars(self).items()})
        loss._take(replace(self.settings, **changed))
        for name in options.keys() - changed:  # what the constructor of a subclass names
            setattr(loss, name, options[name])
        return loss

    def extra_repr(self) -> str:
        """The options that differ from the defaults, but for tensors; those of an objective as they were given."""
        shown: dict[str, Any] = {}
        for option in self.constructor_signature.parameters.values():
            value = getattr(self, option.name, option.default)
            if not isinstance(value, Tensor) and value != option.default:
                shown |= value if isinstance(value, Mapping) else {option.name: value}
        return ", ".join([f"{name}={value!r}" for name, value in shown.items()])

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """An option."""

        @property
        def __call__(self: _Called[F]) -> F:  # type: ignore[override]
            """The type of :meth:`forward`."""

    else:

        def __getattr__(self, name: str) -> Any:
            declared = getattr(vars(self).get("settings"), "declared", {})
            return declared[name] if name in declared else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        settings = vars(self).get("settings")
        frozen = name == "settings" or name in self.options_type.__dataclass_fields__
        if frozen or (settings is not None and name in settings.declared):
            raise AttributeError(
                f"{name} is an option, and a loss is frozen: loss.replace({name}=...) returns one with another value. "
                f"(The constructor of a subclass passes it on, super().__init__({name}=...).)"
            )
        known = name.startswith("_") or name in self.option_names or hasattr(self, name)
        if settings is not None and not known:
            similar = get_close_matches(name, self.option_names, 1, 0.8)
            if similar:
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}: did you mean the option {similar[0]!r}? "
                    "Assign an attribute of a class of your own before super().__init__()."
                )
        super().__setattr__(name, value)

    @property
    def spans_ranks(self) -> bool:
        """Whether all ranks of :attr:`group` compute one loss: they then exchange sums."""
        return self.group is not None

    @property
    def common_options(self) -> dict[str, Any]:
        """The options that must be equal on all ranks of :attr:`group` and of a vocabulary-parallel head."""
        without_effect = {*EngineOptions.__match_args__, "compiled"}
        plain = (bool, int, float, str, list, tuple, dict, type(None))
        # Not every attribute: a loss may keep what differs from rank to rank, such as the rank itself.
        names = [name for name in (*self.option_names, "training") if name not in without_effect]
        values = {name: getattr(self, name, self) for name in names}
        return {"loss": type(self).__name__} | {n: value for n, value in values.items() if isinstance(value, plain)}

    @property
    def transform(self) -> LogitTransform:
        """The transform of the logits of policy and reference."""
        return self.settings.transform

    @property
    def options(self) -> EngineOptions:
        """How the engine streams."""
        return self.settings.engine

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
                "token; build the loss without one."
            )

    def labels(self, labels: Tensor) -> Tensor:
        """Labels ``[...]`` as the engine takes them: shifted by one position if :attr:`shift` is set."""
        check_labels(labels)
        positions = int(self.settings.shift)
        return shift_labels(labels, self.settings.ignore_index, positions) if positions else labels

    def divisor(self, mask: Tensor, items: Any) -> Tensor:
        """What a mean over tokens is divided by, 0-dim: ``num_items_in_batch``, or the mask's tokens; 1 for none."""
        number = self.total(mask) if items is None else checked_items(items, mask.device)
        return number.masked_fill(number == 0, 1) if number.is_floating_point() else number.clamp(min=1)

    def total(self, values: Tensor) -> Tensor:
        """The sum of values of any shape, 0-dim, over the ranks that compute one loss."""
        values = values.sum() if values.dim() else values
        return sum_over_group(self.settings.group, values)[0] if self.spans_ranks else values

    def agree(self, items: Sequence[Any] = (), **facts: Any) -> None:
        """Raise ValueError unless all ranks of :attr:`group` get here, with the same options and facts.

        Of each ``num_items_in_batch``, all must have one, or none.
        """
        numbers = ["not given" if number is None else "given" for number in items]
        agree(self.group, {**self.common_options, "num_items_in_batch": numbers, **facts})

    # With both *_ and **inputs, type checkers let subclasses name the inputs that they read.
    def loss(self, statistics: Statistics, mask: Tensor, *_: Any, **inputs: Any) -> Any:
        """The loss of all tokens, 0-dim, or a tuple of that and metrics; subclasses define it.

        Args:
            statistics: tensors ``[...]`` in the labels' shape, 0 for masked tokens.
            mask: ``[...]`` bool, true for active tokens.
            inputs: the keyword arguments of the call.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(statistics, mask, **inputs)")

    @operator
    def forward(
        self, head: AnyHead, hidden_states: Tensor, labels: Tensor, bias: Tensor | None = None, **inputs: Any
    ) -> Any:
        """Compute :meth:`loss` from the statistics of ``hidden_states @ head.T + bias``.

        Args:
            head: ``[V, H]``, the ``lm_head``: a tensor, a linear layer, or a :class:`liger_losses.Head`.
            hidden_states: ``[..., H]``.
            labels: ``[...]`` int64.
            bias: ``[V]``, for a head without a bias.
            inputs: passed on to :meth:`loss`; with ``shift``, none in the labels' shape.

        Raises:
            TypeError, ValueError: inputs that do not fit together (in subclasses too).
        """
        if self.group is not None:
            raise ValueError(
                f"{type(self).__name__} defines loss(statistics, mask), which sees only this rank's tokens: leave "
                "out group=, and sum over the ranks in this method."
            )
        labels, o, kind = self.labels(labels), self.settings, type(self).__name__
        for name, value in inputs.items() if o.shift else ():
            if isinstance(value, Tensor) and value.shape == labels.shape:
                raise ValueError(
                    f"{name} has one value per token, {tuple(labels.shape)}, and shift={o.shift} moves only labels, "
                    "as the value may belong to the label or to the hidden state at its position: shift the labels, "
                    "and what belongs to them, before the call, and leave out shift=."
                )
        layer = Head.of(head, bias, o.transform)
        values = linear_statistics(
            hidden_states, layer, labels, self.statistics, metrics=self.metrics, options=o.engine
        )
        place = f"the statistics that {kind} names, or to its metrics where it needs no gradient"
        declared: Any = DeclaredStatistics(values, kind, place, self.statistics)
        result = self.loss(declared, labels != o.ignore_index, **inputs)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        whole = isinstance(first, Tensor) and not first.dim() and first.is_floating_point()
        if not (whole or isinstance(first, dict)):
            raise ValueError(
                f"{kind}.loss must return the loss of all tokens, one floating-point number (0-dim), or a tuple of "
                f"that and metrics, got {described(first)}; take the sum or the mean over the tokens of the mask."
            )
        return result


ChunkedLoss._complete()
