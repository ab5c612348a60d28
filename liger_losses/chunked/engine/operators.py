"""torch.compile sees a call of a loss, or of an operation on the output of ``lm_head``, as one operator of its graph.

``liger_losses::evaluate`` makes the call eagerly when the compiled graph runs. Where a loss is a number, it computes
the gradients too, and backward scales them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import itertools
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine.agreement import RankError, raise_on_all_ranks
from liger_losses.chunked.engine.arguments import by_forward_names, wrong_arguments
from liger_losses.chunked.engine.given import running
from liger_losses.chunked.engine.query import Statistics
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.tracing import decode, encode, state, without_values

F = TypeVar("F", bound=Callable[..., Any])

#: What an operator calls, by name: operations, and ``forward`` of losses.
_operations: dict[str, Callable[..., Any]] = {}
#: The losses that there are, by a name of each.
losses: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class _Results:
    """Named tuples that calls return. (Of a dictionary, torch.compile does not see what is added while it traces.)"""


def register(function: F) -> F:
    """A function that :func:`call_in_graph` can call. What a loss returns beside a number, or a list, are metrics."""
    _operations[function.__qualname__] = function
    return function


def operator(function: F, *, opaque: bool = True) -> F:
    """Decorate an operation: errors say how it is called, and one rank's error is raised on all that share the head.

    In a compiled function, a call is one operator of its graph; without ``opaque``, its code is part of the graph.
    """
    name = function.__qualname__  # torch.compile cannot read it

    def traced(*arguments: Any, **keywords: Any) -> Any:
        if not opaque:
            return function(*arguments, **keywords)
        metrics: Any = keywords.get("metrics", ())
        found = call_in_graph(name, arguments, keywords)
        return _detached(found, (metrics,) if isinstance(metrics, str) else tuple(metrics))

    return _operator(function, traced)


def loss_operator(forward: F, *, opaque: bool = True) -> F:
    """:func:`operator` for the ``forward`` of a loss, which may also be one of ranks that hold slices of sequences."""
    name = forward.__qualname__

    def traced(loss: Any, *arguments: Any, **keywords: Any) -> Any:
        if loss.spans_ranks:
            return _call_eagerly(name, loss._name_for_operators, arguments, keywords)
        if not opaque:
            check_arguments(name, arguments, keywords, loss._name_for_operators)
            return forward(loss, *arguments, **keywords)
        return call_in_graph(name, arguments, keywords, loss._name_for_operators, dict(loss.named_parameters()))

    return _operator(forward, traced, of_loss=True)


def _operator(function: F, traced: Callable[..., Any], of_loss: bool = False) -> F:
    """The registered function that raises on all ranks, and calls ``traced`` in a function that is being compiled."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if of_loss:
            keywords = by_forward_names(arguments[0], len(arguments) - 1, keywords)
        if torch.compiler.is_dynamo_compiling():
            return traced(*arguments, **keywords)
        since, before = running.exchanges, (running.loss, running.noted)
        if of_loss:
            running.loss, running.noted = arguments[0], ()
        try:
            return function(*arguments, **keywords)
        except (TypeError, ValueError, RankError) as error:
            loss, given = (arguments[0], arguments[1:]) if of_loss else (None, arguments)
            raise_on_all_ranks(error, since, function, given, keywords, loss)
            raise
        finally:
            if of_loss:
                running.loss, running.noted = before

    # torch.compile limits how often one code object is compiled again; without this, all functions would share one.
    own = cast(FunctionType, wrapped)
    own.__code__ = own.__code__.replace(co_name=function.__name__)
    return cast(F, register(wrapped))


def name_of(loss: nn.Module) -> str:
    """A new name by which operators find a loss; a graph that was compiled for the old one is compiled again.

    Torch keeps compiled graphs on disk. A loss with other options, whose outputs may have other shapes, must not find
    them, nor one whose code may have changed.
    """
    options = [f"{key}={value!r}" for key, value in vars(loss).items() if key[0] != "_" and not torch.is_tensor(value)]
    known = type(loss).__module__.startswith(__name__.partition(".")[0] + ".")
    digest = hashlib.sha256(repr(options).encode() if known else os.urandom(8)).hexdigest()[:16]
    name = f"{type(loss).__name__} {next(_numbers)} {digest}"
    losses[name] = loss
    return name


def _detached(found: Any, metrics: tuple[str, ...]) -> Any:
    """What a call returns, its metrics without a gradient. (An operator's outputs all have one.)"""
    if isinstance(found, Statistics):
        named = zip(Statistics._fields, found, strict=True)
        return Statistics(*[value.detach() if name in metrics else value for name, value in named])
    return [_detached(part, metrics) for part in found] if isinstance(found, list) else found


# --- Tracing: this part is itself compiled ----------------------------------------------------------------------------


def call_in_graph(name: str, arguments: Any, keywords: Any, loss: str = "", parameters: Any = None) -> Any:
    """Put one call into the graph that is being compiled, and return what it will return.

    Args:
        name: of an operation, or of the ``forward`` of the loss that has the name ``loss`` and these ``parameters``.
    """
    tensors: list[Tensor] = []
    form = encode([arguments, keywords, parameters], tensors)
    if form is None or not tensors:
        return _call_eagerly(name, loss, arguments, keywords)
    check_arguments(name, arguments, keywords, loss)
    dtypes = ", ".join([str(tensor.dtype) for tensor in tensors])
    key = f"{name}|{loss}|{_autocast_name(tensors)}|{dtypes}|{form}"
    needs = [i for i, tensor in enumerate(tensors) if tensor.requires_grad] if torch.is_grad_enabled() else []
    found = torch.ops.liger_losses.evaluate(tensors, needs, key)
    structure = _structure(key)
    attached = _attached(structure) if loss else len(found) if found[0].dim() else 1
    values = [value if i < attached else value.detach() for i, value in enumerate(found)]
    return _rebuild(structure, iter(values))


def check_arguments(name: str, arguments: Any, keywords: Any, loss: str = "") -> None:
    """Raise a TypeError that says how it is called, if these are no arguments of an operation, or of a loss."""
    wrong = _wrong_arguments(name, loss, len(arguments), tuple(keywords))
    if wrong is not None:  # in one graph, torch.compile shows the message of what the code that it traces raises
        raise TypeError(wrong)


@torch.compiler.assume_constant_result
def _wrong_arguments(name: str, loss: str, count: int, keywords: tuple[str, ...]) -> str | None:
    return wrong_arguments(_operations[name], count, keywords, losses.get(loss))


def _attached(structure: Any) -> int:
    """How many of a loss's tensors have a gradient: the first one, or those of a list that comes first."""
    first = structure if structure == "tensor" else structure[1][0]
    return len(first[1]) if first[0] == "list" else 1


def _autocast_name(tensors: list[Tensor]) -> str:
    dtype = autocast_dtype(tensors[0].device)
    return "" if dtype is None else str(dtype)


def _rebuild(structure: Any, values: Iterator[Tensor]) -> Any:
    """What :func:`_describe` described, of other tensors."""
    if structure == "tensor":
        return next(values)
    if structure == "none":
        return None
    kind, parts = structure
    parts = [_rebuild(part, values) for part in parts]
    if kind == "list":
        return parts
    if isinstance(kind, tuple):
        return dict(zip(kind, parts, strict=True))
    return tuple(parts) if kind == "tuple" else getattr(_Results, kind)(*parts)


@torch.compiler.assume_constant_result
def _structure(key: str) -> Any:
    return _structures[key].structure


@torch.compiler.disable
def _call_eagerly(name: str, loss: str, arguments: Any, keywords: Any) -> Any:
    """A call that no operator can make, such as one with a function or a shared head: the graph ends here."""
    own = [losses[loss]] if loss else []
    return _operations[name](*own, *arguments, **keywords)


# --- Running ----------------------------------------------------------------------------------------------------------


class _Result(NamedTuple):
    """What a call returns: how its tensors are arranged, how many there are, and whether backward scales gradients."""

    structure: Any
    tensors: int
    scaled: bool


_structures: dict[str, _Result] = {}


def _named(name: str, loss: str) -> Callable[..., Any]:
    """The function itself: where a graph runs, errors are not raised on all ranks."""
    function = inspect.unwrap(_operations[name])
    if not loss:
        return function
    if loss not in losses:
        raise RuntimeError(
            f"a {loss.split()[0]} was deleted before the backward of a compiled function: make the loss outside of "
            "that function, and keep it."
        )
    return functools.partial(function, losses[loss])


class _Key(NamedTuple):
    """What the text says that describes a call."""

    name: str
    loss: str
    autocast: torch.dtype | None
    form: Any


@functools.lru_cache(4096)
def _parsed(key: str) -> _Key:
    name, loss, autocast, _, form = key.split("|", 4)
    dtype = getattr(torch, autocast.removeprefix("torch.")) if autocast else None
    return _Key(name, loss, dtype, ast.literal_eval(form))


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """How a result's tensors, which are appended, are arranged."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor"
    if value is None:
        return "none"
    kind: Any = type(value).__name__
    if isinstance(value, dict):
        kind, value = tuple(value), value.values()
    elif not isinstance(value, (tuple, list)):
        raise TypeError(f"in a compiled function, losses return tensors in tuples, lists or dictionaries, got {kind}.")
    elif type(value) not in (tuple, list):
        kind = re.sub(r"\W", "_", f"{type(value).__module__}.{type(value).__qualname__}")
        setattr(_Results, kind, type(value))
    return kind, tuple(_describe(part, tensors) for part in value)


def _call(key: str, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """The structure of what a call returns, and its tensors."""
    name, loss, autocast, form = _parsed(key)
    arguments, keywords, parameters = decode(form, tensors)
    own = _replaced(losses[loss], parameters) if parameters else nullcontext()
    with torch.autocast(tensors[0].device.type, dtype=autocast, enabled=autocast is not None), own:
        result = _named(name, loss)(*arguments, **keywords)
    found: list[Tensor] = []
    return _describe(result, found), found


@contextmanager
def _replaced(loss: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within this context, a loss has other tensors as its parameters or buffers of these names."""
    before = list[tuple[dict[str, Any], str, Tensor | None]]()
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        module = loss.get_submodule(owner)
        table: dict[str, Any] = module._parameters if last in module._parameters else module._buffers
        before.append((table, last, table[last]))
        table[last] = tensor
    try:
        yield
    finally:
        for table, last, tensor_before in before:
            table[last] = tensor_before


def _leaves(tensors: Sequence[Tensor], needs: Sequence[int]) -> list[Tensor]:
    return [tensor.detach().requires_grad_(i in needs) for i, tensor in enumerate(tensors)]


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], upstream: Sequence[Tensor] | None) -> list[Tensor]:
    found = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    pairs = zip(leaves, found, strict=True)
    return [leaf.new_zeros(leaf.shape) if grad is None else grad.contiguous() for leaf, grad in pairs]


@torch.library.custom_op("liger_losses::evaluate", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _evaluate(tensors: Sequence[Tensor], needs: Sequence[int], key: str) -> list[Tensor]:
    """The tensors that a call returns; then the gradients of the inputs ``needs`` if backward can scale them, else the
    statistics of which backward computes them."""
    scaled = _structures[key].scaled
    with torch.inference_mode(False):
        leaves = _leaves(tensors, needs)
        with torch.set_grad_enabled(scaled and bool(needs)), _recording() as recorded:
            _, outputs = _call(key, leaves)
        if needs and scaled:
            recorded = _gradients(outputs[:1], [leaves[i] for i in needs], None)
        # Outputs of an operator share no memory.
        return [*(output.detach().clone(memory_format=torch.contiguous_format) for output in outputs), *recorded]


@_evaluate.register_fake
def _(tensors: Sequence[Tensor], needs: Sequence[int], key: str) -> list[Tensor]:
    with _without_values(key, tensors), _recording() as recorded:
        structure, outputs = _call(key, tensors)
    if not outputs:
        raise ValueError(
            f"{_parsed(key).name} was asked for nothing, and in a compiled function a call must return a tensor: name "
            "at least one statistic, such as statistics=('logp',)."
        )
    # fp16 gradients underflow without the loss scale, which is only known in backward.
    scaled = outputs[0].dim() == 0 and torch.float16 not in (_parsed(key).autocast, *(t.dtype for t in tensors))
    _structures[key] = _Result(structure, len(outputs), scaled)
    if needs and scaled:
        recorded = [tensors[i].new_empty(tensors[i].shape) for i in needs]
    return [*(output.new_empty(output.shape) for output in outputs), *recorded]


@contextmanager
def _recording() -> Iterator[list[Tensor]]:
    """Within this context, the statistics that are computed without gradients are recorded."""
    before, state.recorded = state.recorded, []
    try:
        yield state.recorded
    finally:
        state.recorded = before


@contextmanager
def _without_values(key: str, tensors: Sequence[Tensor]) -> Iterator[None]:
    """:func:`without_values`, for the loss's buffers too."""
    loss = losses.get(_parsed(key).loss)
    buffers = {} if loss is None else dict(loss.named_buffers())
    empty = {n: tensors[0].new_empty(b.shape, dtype=b.dtype, device=b.device) for n, b in buffers.items()}
    with without_values(), _replaced(loss, empty) if loss is not None and buffers else nullcontext():
        yield


@torch.library.custom_op("liger_losses::differentiate", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _differentiate(
    tensors: Sequence[Tensor],
    recorded: Sequence[Tensor],
    upstream: Sequence[Tensor],
    which: Sequence[int],
    needs: Sequence[int],
    key: str,
) -> list[Tensor]:
    """The gradients of the inputs ``needs``, from those of the outputs ``which``: the call is made again, with the
    statistics that it has recorded."""
    before, state.known = state.known, iter(recorded)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaves = _leaves(tensors, needs)
            _, outputs = _call(key, leaves)
            pairs = [(outputs[i], g) for i, g in zip(which, upstream, strict=True) if outputs[i].requires_grad]
            if not pairs:
                return [tensors[i].new_zeros(tensors[i].shape) for i in needs]
            return _gradients([o for o, _ in pairs], [leaves[i] for i in needs], [g for _, g in pairs])
    finally:
        state.known = before


@_differentiate.register_fake
def _(
    tensors: Sequence[Tensor],
    recorded: Sequence[Tensor],
    upstream: Sequence[Tensor],
    which: Sequence[int],
    needs: Sequence[int],
    key: str,
) -> list[Tensor]:
    return [tensors[i].new_empty(tensors[i].shape) for i in needs]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.needs, ctx.key = inputs
    ctx.set_materialize_grads(False)
    ctx.count = len(tensors)
    _, count, scaled = _structures[ctx.key]
    ctx.save_for_backward(*([] if scaled else tensors), *output[count:])


def _backward(ctx: Any, upstream: Sequence[Tensor | None]) -> tuple[list[Tensor | None], None, None]:
    grads: list[Tensor | None] = [None] * ctx.count
    which, saved = [i for i, g in enumerate(upstream) if g is not None], ctx.saved_tensors
    if not which or not ctx.needs:
        return grads, None, None
    if _structures[ctx.key].scaled:
        found = [gradient * upstream[0] for gradient in saved]
    else:
        tensors, recorded, given = saved[: ctx.count], saved[ctx.count :], [upstream[i] for i in which]
        found = torch.ops.liger_losses.differentiate(tensors, recorded, given, which, ctx.needs, ctx.key)
    for i, gradient in zip(ctx.needs, found, strict=True):
        grads[i] = gradient
    return grads, None, None


_evaluate.register_autograd(_backward, setup_context=_setup_context)
