"""Under torch.compile, the engine's work is a registered operator, and losses are traced as ordinary code.

``liger_losses::call`` returns statistics of every token, whose backward is ``liger_losses::gradients``; or a separable
loss too, and gradients that its backward scales.

T tokens.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from liger_losses.chunked.engine.autograd_functions import compute_statistics, separable_losses
from liger_losses.chunked.engine.call import make_call
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.input_checks import check
from liger_losses.chunked.engine.plan import EngineOptions
from liger_losses.chunked.engine.query import Comparison, Query, Statistics
from liger_losses.chunked.engine.support import TokenSupport, linear_support_statistics
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.tracing import when_compiling

C = TypeVar("C", bound=type)

#: Losses of tokens that an operator can compute: frozen dataclasses of numbers and words, by their names.
_token_losses: dict[str, Any] = {}
#: From the annotations of :class:`Given` to the types of an operator's schema.
_SCHEMA = {r"Sequence\[(.+)\]": r"\1[]", r" \| None": "?", r"^int\b": "SymInt", r"torch\.dtype": "ScalarType"}


def _no_number(value: Any) -> bool:
    return False


#: Whether torch.compile knows a number while it traces. Where torch cannot say, all numbers are taken to change.
has_static_value: Callable[[Any], bool] = _no_number


def _ask_torch() -> None:
    global has_static_value
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    has_static_value = getattr(shapes, "has_static_value", _no_number)


when_compiling(_ask_torch)


def token_operator(cls: C) -> C:
    """Decorate a frozen dataclass of numbers and words whose instances are token losses: compiled, it takes one pass.

    Any other function of a token's statistics is traced, and takes two.
    """
    _token_losses[cls.__name__] = cls
    return cls


class Given(NamedTuple):
    """What operators are given; their schema has the same names."""

    hidden_states: Sequence[Tensor]
    labels: Sequence[Tensor]
    weight: Tensor
    bias: Tensor | None
    batch_invariant: bool
    statistics: Sequence[str]
    metrics: Sequence[str]
    class_weight: Tensor | None
    selected: Tensor | None
    support: Sequence[Tensor]  # ids, and offsets
    add_label: bool
    shift: int  # of labels beside a support
    teacher: Sequence[Tensor]  # hidden states, weight and bias; or logits
    divergence: str
    numbers: Sequence[float]  # scales, soft-caps, temperatures, a divergence's parameters; NaN for None
    changing: Sequence[Tensor | None]  # in the same order, numbers that differ from call to call, or token to token
    ignore_index: int
    compact: bool
    workspace: int | None
    chunk_size: int | None
    accum_dtype: torch.dtype | None
    backend: str | None
    strategy: str | None
    autocast: torch.dtype | None
    dtype: torch.dtype  # of statistics
    needs: Sequence[bool]  # which of `trained` need a gradient
    # Of a separable loss: its weights, or the inputs, the class and the words of its token loss.
    token_inputs: Sequence[Tensor] = ()
    input_names: Sequence[str] = ()
    token_loss: str = ""
    words: Sequence[str] = ()

    @property
    def separable(self) -> bool:
        return bool(self.input_names or self.token_loss)

    def number(self, place: int) -> Any:
        """One of the numbers; a tensor for one number per token."""
        tensor: Any = self.changing[place]
        if tensor is not None:
            return tensor if tensor.dim() else tensor.item()
        return None if math.isnan(self.numbers[place]) else self.numbers[place]

    @property
    def asked(self) -> list[str]:
        """The names of statistics that the user gets."""
        return list(dict.fromkeys((*self.statistics, *self.metrics)))

    @property
    def names(self) -> list[str]:
        """The names of the statistics that are returned, of which some serve their backward alone."""
        return self.asked if self.support or self.separable else list(dict.fromkeys(("lse", *self.asked)))

    @property
    def trained(self) -> list[Tensor | None]:
        """What may need a gradient: hidden states, weight and bias."""
        return [*self.hidden_states, self.weight, self.bias]

    def opened(self) -> tuple[Head, Query, EngineOptions]:
        """The engine's own objects."""
        numbers, comparison = [self.number(place) for place in range(9)], None
        head = Head(self.weight, self.bias, LogitTransform(*numbers[:3]), batch_invariant=self.batch_invariant)
        if self.teacher:
            teacher: Any = TeacherLogits(self.teacher[0])
            if len(self.teacher) > 1:
                hidden, weight, *bias = self.teacher
                teacher = Teacher(hidden, weight, bias[0] if bias else None, numbers[3], numbers[4])
            teacher = replace(teacher, columns_correspond=True)
            comparison = Comparison(teacher, Divergence(self.divergence, *numbers[5:8]), numbers[8])
        asked = tuple(self.statistics), tuple(self.metrics)
        query = Query(*asked, class_weight=self.class_weight, selected=self.selected, comparison=comparison)
        return head, query, EngineOptions(*[getattr(self, name) for name in EngineOptions.__match_args__])

    def flat(self, found: Sequence[Statistics], names: Sequence[str]) -> list[Tensor]:
        """Statistics ``[T]`` of all tokens, joined from the statistics of each tensor of labels."""
        dims = [part.dim() for part in self.labels]
        pairs = list(zip(found, dims, strict=True))
        return [torch.cat([getattr(part, name).flatten(0, dim - 1) for part, dim in pairs]) for name in names]

    def shaped(self, found: Mapping[str, Tensor]) -> list[Statistics]:
        """The inverse of :meth:`flat`; metrics have no gradient."""
        shapes = [part.shape for part in self.labels]
        sizes = [shape.numel() for shape in shapes]
        parts: dict[str, Any] = {}
        for name in self.asked:
            parts[name] = (found[name] if name in self.statistics else found[name].detach()).split(sizes)
        return [
            Statistics(**{name: part[i].reshape(*shape, *part[i].shape[1:]) for name, part in parts.items()})
            for i, shape in enumerate(shapes)
        ]

    def empty(self, names: Sequence[str]) -> list[Tensor]:
        """Statistics ``[T]`` without values."""
        tokens = sum([part.numel() for part in self.labels])
        width = [] if self.selected is None else self.selected.shape[-1:]
        shapes = [(tokens, *width) if name == "selected_logps" else (tokens,) for name in names]
        dtypes = [torch.int64 if name == "argmax" else self.dtype for name in names]
        return [self.weight.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


# --- What operations call: torch.compile traces it --------------------------------------------------------------------


def traced(*call: Any) -> list[Statistics]:
    """The statistics of a call, as :func:`_given` takes it, for each tensor of labels."""
    given = _given(*call)
    return given.shaped(dict(zip(given.names, torch.ops.liger_losses.call(*given), strict=True)))


def traced_loss(
    hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions
) -> tuple[Tensor, list[Statistics]]:
    """A separable loss, and the detached statistics of each tensor of labels.

    It takes one pass where an operator computes it. fp16 gradients underflow without the loss scale, which is only
    known in backward: they take two passes.
    """
    loss, inputs = query.token_loss, query.token_weights or query.token_inputs
    name = "" if loss is None else type(loss).__name__
    known = name in _token_losses
    values = [getattr(loss, field) for field in loss.__match_args__] if known else []  # type: ignore[union-attr]
    words, numbers = ([v for v in values if isinstance(v, str) == text] for text in (True, False))
    given = _given(hidden_states, head, labels, query, options, numbers=numbers)
    halves = torch.float16 in (given.autocast, *[tensor.dtype for tensor in given.trained if tensor is not None])
    if (known or loss is None) and not halves:
        given = given._replace(
            token_inputs=list(inputs.values()), input_names=list(inputs), token_loss=name, words=words
        )
        total, *found = torch.ops.liger_losses.call(*given)
        return total, given.shaped({n: value.detach() for n, value in zip(given.asked, found, strict=False)})
    every = dict(zip(given.names, torch.ops.liger_losses.call(*given), strict=True))
    targets, asked = torch.cat([part.flatten() for part in given.labels]), {n: every[n] for n in given.asked}
    dims, mask = given.labels[0].dim() if len(given.labels) == 1 else 1, targets != given.ignore_index
    flat = {n: value.detach().flatten(0, dims - 1) for n, value in inputs.items()}
    terms = query.losses(asked, targets.masked_fill(~mask, 0), flat)
    detached = given.shaped({n: value.detach() for n, value in asked.items()})
    return torch.where(mask, terms, 0.0).sum().to(given.dtype), detached


def _given(
    hidden_states: Any,
    head: Head,
    labels: Any,
    query: Query,
    options: EngineOptions,
    support: TokenSupport | None = None,
    shift: int = 0,
    numbers: Sequence[Any] = (),
) -> Given:
    """A checked call; ``numbers`` belong to its token loss."""
    if head.adapters:
        hidden_states, head = head.expand(hidden_states)
    hidden = list(hidden_states) if isinstance(hidden_states, (list, tuple)) else [hidden_states]
    targets = list(labels) if isinstance(labels, (list, tuple)) else [labels]
    dtype, _ = check(hidden, head, targets, query)
    transform, comparison = head.transform, query.comparison
    teacher: list[Any] = []
    of_teacher: list[Any] = [None] * 6
    if comparison is not None:
        taught, which, of_teacher = comparison.teacher, comparison.divergence, [None, None]
        if isinstance(taught, Teacher):
            own = taught.head
            teacher = [tensor for tensor in (taught.hidden_states, own.weight, own.bias) if tensor is not None]
            of_teacher = [own.transform.logit_scale, own.transform.softcap]
        else:
            teacher = [taught.logits]
        of_teacher = [*of_teacher, which.a, which.b, which.c, comparison.temperature]
    kept = []
    if support is not None:
        support.check(targets[0], head.weight)
        kept = [support.ids] if support.offsets is None else [support.ids, support.offsets]
    every = [transform.temperature, transform.logit_scale, transform.softcap, *of_teacher, *numbers]
    static = [not isinstance(value, Tensor) and (value is None or has_static_value(value)) for value in every]
    pairs = list(zip(every, static, strict=True))
    trained = [*hidden, head.weight, head.bias]
    unit = torch.ones((), dtype=torch.float64)  # a number that changes would be compiled anew for each value
    return Given(
        hidden_states=hidden,
        labels=targets,
        weight=head.weight,
        bias=head.bias,
        batch_invariant=head.batch_invariant,
        statistics=list(query.statistics),
        metrics=list(query.metrics),
        class_weight=query.class_weight,
        selected=query.selected,
        support=kept,
        add_label=support is not None and support.add_label,
        shift=shift,
        teacher=teacher,
        divergence="" if comparison is None else comparison.divergence.form,
        numbers=[math.nan if value is None else float(value) if known else 0.0 for value, known in pairs],
        changing=[None if known else value if isinstance(value, Tensor) else unit * value for value, known in pairs],
        **{name: getattr(options, name) for name in EngineOptions.__match_args__},
        autocast=autocast_dtype(head.weight.device),
        dtype=torch.promote_types(torch.float32, dtype),
        needs=[torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in trained],
    )


# --- Running ----------------------------------------------------------------------------------------------------------


def _operator(name: str, others: str = "") -> Any:
    """Register a function of :class:`Given`'s fields, and others, that returns tensors."""
    arguments = []
    for field, kind in Given.__annotations__.items():
        kind = str(getattr(kind, "__forward_arg__", kind))
        for annotation, of_schema in _SCHEMA.items():
            kind = re.sub(annotation, of_schema, kind)
        arguments.append(f"{kind} {field}")
    schema = f"({', '.join(arguments)}{others}) -> Tensor[]"
    return torch.library.custom_op(name, mutates_args=(), schema=schema, tags=(torch.Tag.cudagraph_unsafe,))


def _autocast(given: Given) -> torch.autocast:
    return torch.autocast(given.weight.device.type, dtype=given.autocast, enabled=given.autocast is not None)


def _compute(given: Given, known: Mapping[str, Tensor] | None = None) -> list[Any]:
    """Statistics ``[T]`` of all tokens; ``known`` ones are not computed again where a gradient is."""
    (head, query, options), (hidden, *_), (labels, *_) = given.opened(), given.hidden_states, given.labels
    with _autocast(given):
        if not given.support:
            made = make_call(given.hidden_states, head, given.labels, query, options)
            values = compute_statistics(*made, known, ("lse",))
            return [values.get(name) for name in given.names]
        ids, *offsets = given.support
        kept = TokenSupport(ids, offsets[0] if offsets else None, given.add_label)
        names = tuple(given.names)
        found = linear_support_statistics(hidden, head, labels, kept, names, options, shift=given.shift)
        return given.flat([found], names)


def _separate(tensors: Sequence[Tensor]) -> list[Tensor]:
    """An operator's outputs share no memory."""
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


def _leaves(given: Given) -> tuple[Given, list[Any]]:
    """The call of leaves of a graph, and the leaves that need gradients."""
    pairs = list(zip(given.trained, given.needs, strict=True))
    leaves: list[Any] = [None if tensor is None else tensor.detach().requires_grad_(need) for tensor, need in pairs]
    *hidden, weight, bias = leaves
    made = given._replace(hidden_states=hidden, weight=weight, bias=bias)
    return made, [leaf for leaf, need in zip(leaves, given.needs, strict=True) if need]


def _differentiate(outputs: Sequence[Tensor], leaves: Sequence[Tensor], upstream: Any = None) -> list[Tensor]:
    found = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True) if outputs else [None] * len(leaves)
    pairs = zip(leaves, found, strict=True)
    return [torch.zeros_like(leaf) if grad is None else grad.contiguous() for leaf, grad in pairs]


def _empty_gradients(given: Given) -> list[Tensor]:
    pairs = zip(given.trained, given.needs, strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, need in pairs if need and tensor is not None]


@_operator("liger_losses::call")
def _call(*arguments: Any) -> list[Tensor]:
    """The statistics ``[T]``; of a separable loss before them the loss, and after them the gradients of what ``needs``
    them."""
    given = Given(*arguments)
    if not given.separable:
        with torch.inference_mode(False), torch.no_grad():
            return _separate(_compute(given))
    call, leaves = _leaves(given)
    (head, query, options), tensors = call.opened(), dict(zip(call.input_names, call.token_inputs, strict=True))
    if call.token_loss:
        numbers = [call.number(place) for place in range(9, len(call.numbers))]
        query = replace(query, token_loss=_made(_token_losses[call.token_loss], call.words, numbers))
    with torch.inference_mode(False), torch.set_grad_enabled(bool(leaves)), _autocast(call):
        weighted = not call.token_loss
        query = replace(query, token_weights=tensors) if weighted else replace(query, token_inputs=tensors)
        loss, (found,) = separable_losses([make_call(call.hidden_states, head, call.labels, query, options)])
        gradients = _differentiate([loss] if loss.requires_grad else [], leaves)
    return [*_separate([loss, *call.flat(found, call.asked)]), *gradients]


@_call.register_fake
def _(*arguments: Any) -> list[Tensor]:
    given = Given(*arguments)
    found = given.empty(given.names)
    return (
        [given.weight.new_empty((), dtype=given.dtype), *found, *_empty_gradients(given)] if given.separable else found
    )


@_operator("liger_losses::gradients", ", Tensor[] values, Tensor?[] upstream")
def _gradients(*arguments: Any) -> list[Tensor]:
    """Turn gradients of statistics into gradients of what ``needs`` them; ``values`` are all results of forward."""
    *given, values, upstream = arguments
    with torch.inference_mode(False), torch.enable_grad():
        call, leaves = _leaves(Given(*given))
        found = _compute(call, dict(zip(call.names, values, strict=True)))
        asked = [(f, g) for f, g in zip(found, upstream, strict=True) if f is not None and g is not None]
        pairs = [(f, g) for f, g in asked if f.requires_grad]
        return _differentiate([f for f, _ in pairs], leaves, [g for _, g in pairs])


@_gradients.register_fake
def _(*arguments: Any) -> list[Tensor]:
    return _empty_gradients(Given(*arguments[:-2]))


def _mapped(inputs: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Inputs, or the entries of inputs that are lists, changed."""
    return [[change(v) for v in value] if isinstance(value, (list, tuple)) else change(value) for value in inputs]


#: Stands for a tensor that is saved.
_SAVED = object()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    given, tensors = Given(*inputs), list[Tensor]()
    ctx.set_materialize_grads(False)

    def save(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return _SAVED

    ctx.needs, ctx.separable, ctx.inputs = given.needs, given.separable, _mapped(inputs, save)
    ctx.save_for_backward(*(output[1 + len(given.asked) :] if given.separable else (*tensors, *output)))


def _backward(ctx: Any, upstream: Sequence[Tensor | None]) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    if ctx.separable:
        gradients = iter([None if upstream[0] is None else gradient * upstream[0] for gradient in saved])
    else:
        given = _mapped(ctx.inputs, lambda v: next(saved) if v is _SAVED else v)
        gradients = iter(torch.ops.liger_losses.gradients(*given, list(saved), list(upstream)))
    *hidden, weight, bias = [next(gradients) if need else None for need in ctx.needs]
    # Lists of tensors have lists of gradients.
    lists = [isinstance(value, list) and all(part is _SAVED for part in value) for value in ctx.inputs]
    nothing = [[None] * len(value) if listed else None for value, listed in zip(ctx.inputs, lists, strict=True)]
    return hidden, nothing[1], weight, bias, *nothing[4:]


_call.register_autograd(_backward, setup_context=_save)


def _made(cls: Any, words: Sequence[str], numbers: Sequence[Any]) -> Any:
    """A dataclass of these words, and of these numbers, in the order of its fields."""
    texts, others, values = iter(words), iter(numbers), []
    for field in fields(cls):
        value = next(texts if field.type == "str" else others)
        values.append(_KINDS.get(str(field.type), lambda v: v)(value) if value is not None else None)
    return cls(*values)


_KINDS: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "int | None": int}
