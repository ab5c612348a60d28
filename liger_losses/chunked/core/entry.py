"""The way in to operations and losses: keywords by their documented names, and errors that say how each is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from liger_losses.arguments import by_parameter_names, wrong_arguments
from liger_losses.caller import warn
from liger_losses.checks import is_weight_and_bias
from liger_losses.chunked.core.agreement import agree
from liger_losses.chunked.core.distilled import Teacher, TeacherLogits, Teachers
from liger_losses.chunked.core.head import Head
from liger_losses.chunked.core.quantizers import QuantizedWeight
from liger_losses.chunked.core.ranks import ALONE, Ranks
from liger_losses.chunked.core.statistics import registered
from liger_losses.kernels.tracing import outside_graphs

F = TypeVar("F", bound=Callable[..., Any])

#: Arguments that get no gradient.
_CONSTANTS = frozenset(
    "token_weights sample_weights weights advantages kl ref_logps ref_chosen_logps ref_rejected_logps "  # noqa: SIM905
    "ref_per_token_logps old_per_token_logps sampling_per_token_logps vllm_is_ratio".split()
)


def operator(function: F) -> F:
    """Decorate an operation, or the ``forward`` of a loss: errors for wrong arguments say how it is called.

    The options of a loss must be equal on ranks that share a vocabulary.
    """

    names = tuple(inspect.signature(function).parameters)
    of_loss = names[0] == "self"

    @functools.wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        loss, positional = (arguments[0], arguments[1:]) if of_loss else (None, arguments)
        kind = None if loss is None else type(loss)
        if loss is not None:
            keywords = by_parameter_names(loss, keywords)
        elif "weight" in keywords and "head" not in keywords:  # an earlier name
            keywords = {"head" if name == "weight" else name: value for name, value in keywords.items()}
        if is_dynamo_compiling():
            message = wrong_arguments(function, len(positional), keywords, kind)
            if message is not None:
                raise TypeError(message)
            reason = outside_of_graphs([loss, *positional, *keywords.values()])
            return function(*arguments, **keywords) if reason is None else eagerly(reason, *arguments, **keywords)
        if torch.is_grad_enabled():
            known = names if loss is None else loss.argument_names
            _warn_of_constants({**dict(zip(known, positional, strict=False)), **keywords}, known)
        if loss is not None and (head := _shared_head((*positional, *keywords.values()))) is not None:
            agree(head.ranks.group, loss.common_options)
        try:
            return function(*arguments, **keywords)
        except TypeError as error:
            message = wrong_arguments(function, len(positional), keywords, kind) if type(error) is TypeError else None
            if message is None:
                raise
            raise TypeError(message) from None

    @outside_graphs
    def eagerly(reason: str, *arguments: Any, **keywords: Any) -> Any:
        warn(
            f"{function.__qualname__} ends the graph of a compiled function, which cannot hold {reason}: it runs as "
            "without torch.compile."
        )
        return wrapped(*arguments, **keywords)

    return wrapped  # type: ignore[return-value]


def _shared_head(arguments: Iterable[Any]) -> Head | None:
    """The first vocabulary-parallel head of a call's arguments, and of lists among them."""
    for value in arguments:
        head = _shared_head(value) if isinstance(value, (list, tuple)) else value
        if isinstance(head, Head) and head.ranks is not ALONE:
            return head
    return None


def outside_of_graphs(value: Any) -> str | None:
    """What a graph cannot hold of an argument, or of a list of them."""
    if isinstance(value, nn.Module) and hasattr(value, "spans_ranks"):  # a loss
        if value.spans_ranks:
            return "process groups"
        value = value.statistics
    elif isinstance(value, (nn.Linear, nn.Embedding)) and is_weight_and_bias(value):
        if not value.weight.is_floating_point():
            return "quantized heads"
        value = value.weight
    elif isinstance(value, (Head, Teacher, Teachers)):
        value = [getattr(value, name) for name in type(value).__match_args__]
    if isinstance(value, (list, tuple, nn.ModuleList)):
        reasons = [reason for reason in [outside_of_graphs(part) for part in value] if reason is not None]
        return reasons[0] if reasons else None
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):
            return "DTensors"
        quantized = hasattr(type(value), "__tensor_flatten__") or hasattr(value, "quant_state")
        return "quantized heads" if quantized else None
    if isinstance(value, QuantizedWeight):
        return "quantized heads"
    if isinstance(value, Ranks):
        return None if value is ALONE else "process groups"
    if isinstance(value, str) and registered([value]):
        return "registered statistics"
    if isinstance(value, TeacherLogits) and not isinstance(value.logits, Tensor):
        return "functions of a teacher's logits"
    return f"heads of the class {type(value).__name__}" if isinstance(value, nn.Module) else None


def _warn_of_constants(arguments: Mapping[str, Any], known: Iterable[str]) -> None:
    """Warn of tensors that require a gradient and get none; ``known`` names are not a custom loss's own inputs."""
    for name, value in arguments.items():
        if name not in _CONSTANTS or name not in known:
            name, value = "ref_logps", getattr(value, "ref_logps", None)
        if isinstance(value, Tensor) and value.requires_grad:
            warn(f"{name} requires a gradient, but gets none: it is a constant of the loss; pass {name}.detach().")
