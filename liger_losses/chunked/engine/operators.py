"""What operations and losses call, and the way in to them, as it is and in a compiled function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from liger_losses.arguments import by_forward_names, wrong_arguments
from liger_losses.caller import warn
from liger_losses.checks import is_weight_and_bias, one_each
from liger_losses.chunked.engine.autograd_functions import separable_losses, statistics_of
from liger_losses.chunked.engine.call import make_call
from liger_losses.chunked.engine.compiled_calls import traced, traced_loss
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.many_heads import Targets
from liger_losses.chunked.engine.plan import EngineOptions
from liger_losses.chunked.engine.query import REGISTERED, Largest, Query, Statistics
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.chunked.engine.support import TokenSupport, linear_support_statistics
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits
from liger_losses.kernels.tracing import when_compiling

F = TypeVar("F", bound=Callable[..., Any])

#: Arguments that get no gradient.
_CONSTANTS = frozenset(
    [
        "token_weights",
        "sample_weights",
        "weights",
        "advantages",
        "kl",
        "ref_logps",
        "ref_chosen_logps",
        "ref_rejected_logps",
        "ref_per_token_logps",
        "old_per_token_logps",
        "sampling_per_token_logps",
        "vllm_is_ratio",
    ]
)


def query_statistics(
    hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions
) -> list[Statistics]:
    """The statistics of each tensor of labels, in its shape."""
    if not is_dynamo_compiling():
        return statistics_of(*make_call(hidden_states, head, labels, query, options))
    return traced(hidden_states, head, labels, query, options)


def support_statistics(
    hidden_states: Tensor,
    head: Head,
    labels: Tensor,
    support: TokenSupport,
    names: tuple[str, ...],
    options: EngineOptions,
    shift: int = 0,
) -> Statistics:
    """:func:`linear_support_statistics`, also in a compiled function."""
    if not is_dynamo_compiling():
        return linear_support_statistics(hidden_states, head, labels, support, names, options, shift=shift)
    if support.sparse_grad:
        raise ValueError("a compiled function cannot return sparse gradients; leave sparse_grad=True out.")
    query = Query(names, selected=support.ids if "selected_logps" in names else None)
    return traced(hidden_states, head, labels, query, options, support, shift)[0]


def separable_loss(
    hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions, statistics: str = "per_token"
) -> tuple[Tensor, list[Statistics]]:
    """The loss that the query's token loss, or its token weights, make of the statistics; and the detached statistics,
    ``per_token`` for each tensor of labels, or one :class:`Statistics` of their ``sum``."""
    if not is_dynamo_compiling():
        call = make_call(hidden_states, head, labels, query, options)
        total, (found,) = separable_losses((call,), statistics=statistics)
        return total, found
    total, found = traced_loss(hidden_states, head, labels, query, options)
    if statistics == "sum":
        sums = [None if each[0] is None else sum([value.sum() for value in each]) for each in zip(*found, strict=True)]
        found = [Statistics(*sums)]
    return total, found


def of_targets(targets: Targets, query: Query, inputs: Mapping[str, Any] | None = None) -> Any:
    """Statistics of several targets; with ``inputs``, their separable loss, and detached statistics."""
    each = {name: one_each(value, targets.count) for name, value in (inputs or {}).items()}
    if not is_dynamo_compiling():
        made = targets.calls(query, each)
        if inputs is None:
            return targets.in_order([statistics_of(*call) for call in made])
        loss, statistics = separable_losses(made)
        return loss, targets.in_order(statistics)
    calls = [(g.hidden_states, g.head, g.labels, g.query(query, each), targets.options) for g in targets.groups]
    if inputs is None:
        return targets.in_order([query_statistics(*call) for call in calls])
    found = [separable_loss(*call) for call in calls]
    values = targets.in_order([of_call for _, of_call in found])
    return torch.stack([loss for loss, _ in found]).sum(), values


# --- The way in -------------------------------------------------------------------------------------------------------


def operator(function: F) -> F:
    """Decorate an operation: errors for wrong arguments say how it is called."""
    return _entry(function, of_loss=False)


def loss_operator(forward: F) -> F:
    """:func:`operator` for the ``forward`` of a loss, whose options must be equal on ranks that share a vocabulary."""
    return _entry(forward, of_loss=True)


def _entry(function: F, of_loss: bool) -> F:
    def wrong(count: int, keywords: tuple[str, ...], kind: Any) -> str | None:
        return wrong_arguments(function, count, keywords, kind)

    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        loss, given = (arguments[0], arguments[1:]) if of_loss else (None, arguments)
        if loss is not None and not keywords.keys() <= loss.argument_set:
            keywords = by_forward_names(loss, len(given), keywords)
        elif "head" in keywords:  # as the documentation calls the weight
            keywords = {"weight" if name == "head" else name: value for name, value in keywords.items()}
        if is_dynamo_compiling():
            message = wrong(len(given), tuple(keywords), None if loss is None else type(loss))
            if message is not None:
                raise TypeError(message)
            spans_ranks = loss is not None and loss.spans_ranks
            traced = not spans_ranks and all(_is_traced(value) for value in (*given, *keywords.values()))
            return (function if traced else outside)(*arguments, **keywords)
        if torch.is_grad_enabled():
            known = names if loss is None else loss.argument_names
            _warn_of_constants({**dict(zip(known, given, strict=False)), **keywords}, known)
        if loss is not None and (head := _shared_head((*given, *keywords.values()))) is not None:
            head.ranks.agree(loss.common_options, {})
        try:
            return function(*arguments, **keywords)
        except TypeError as error:
            kind = None if loss is None else type(loss)
            message = wrong(len(given), tuple(keywords), kind) if type(error) is TypeError else None
            if message is None:
                raise
            raise TypeError(message) from None

    outside = wrapped

    def mark() -> None:
        nonlocal outside
        outside = torch.compiler.disable(wrapped)
        torch.compiler.assume_constant_result(wrong)

    when_compiling(mark)
    return wrapped  # type: ignore[return-value]


def _shared_head(arguments: Iterable[Any]) -> Head | None:
    """The first vocabulary-parallel head of a call's arguments, and of lists among them."""
    for value in arguments:
        found = _shared_head(value) if isinstance(value, (list, tuple)) else value
        if isinstance(found, Head) and found.ranks is not ALONE:
            return found
    return None


def _warn_of_constants(arguments: Mapping[str, Any], known: Iterable[str]) -> None:
    """Warn of tensors that require a gradient and get none; ``known`` names are not a custom loss's own inputs."""
    for name, value in arguments.items():
        own = name in _CONSTANTS and name in known
        constant = value if own else getattr(value, "ref_logps", None)
        if isinstance(constant, Tensor) and constant.requires_grad:
            said = name if own else "ref_logps"
            warn(f"{said} requires a gradient, but gets none: it is a constant of the loss; pass {said}.detach().")


def _is_traced(value: Any) -> bool:
    """Whether an argument may be one of operators: the graph ends at shared and quantized heads, at functions that
    return a teacher's logits, and at registered statistics and the columns of the largest log-probabilities."""
    if isinstance(value, Tensor):
        subclass = hasattr(value, "full_tensor") or hasattr(type(value), "__tensor_flatten__")
        return not subclass and not hasattr(value, "quant_state")
    if isinstance(value, (nn.Linear, nn.Embedding)):
        return is_weight_and_bias(value) and value.weight.is_floating_point() and _is_traced(value.weight)
    if isinstance(value, Head):
        return value.ranks is ALONE and value.quantized is None
    if isinstance(value, (Largest, str)):
        return not isinstance(value, Largest) and value not in REGISTERED
    if isinstance(value, (list, tuple, nn.ModuleList)):
        return all(_is_traced(part) for part in value)
    if isinstance(value, TeacherLogits):
        return isinstance(value.logits, Tensor)
    if isinstance(value, Teacher):
        return _is_traced(value.hidden_states) and _is_traced(value.weight)
    return not isinstance(value, nn.Module)
