"""The way in to operations and losses: keywords by their documented names, and errors that say how each is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from liger_losses.arguments import by_forward_names, wrong_arguments
from liger_losses.caller import warn
from liger_losses.chunked.core.agreement import agree
from liger_losses.chunked.core.output_layer import Head
from liger_losses.chunked.core.ranks import ALONE
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


def operator(function: F) -> F:
    """Decorate an operation: errors for wrong arguments say how it is called."""
    return _entry(function, of_loss=False)


def loss_operator(forward: F) -> F:
    """:func:`operator` for the ``forward`` of a loss, whose options must be equal on ranks that share a vocabulary."""
    return _entry(forward, of_loss=True)


def _entry(function: F, of_loss: bool) -> F:
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        loss, given = (arguments[0], arguments[1:]) if of_loss else (None, arguments)
        if loss is not None and not keywords.keys() <= loss.argument_set:
            keywords = by_forward_names(loss, len(given), keywords)
        elif "head" in keywords:  # as the documentation calls the weight
            keywords = {"weight" if name == "head" else name: value for name, value in keywords.items()}
        if is_dynamo_compiling():
            return eagerly(*arguments, **keywords)
        if torch.is_grad_enabled():
            known = names if loss is None else loss.argument_names
            _warn_of_constants({**dict(zip(known, given, strict=False)), **keywords}, known)
        if loss is not None and (head := _shared_head((*given, *keywords.values()))) is not None:
            agree(head.ranks.group, loss.common_options)
        try:
            return function(*arguments, **keywords)
        except TypeError as error:
            kind = None if loss is None else type(loss)
            message = wrong_arguments(function, len(given), tuple(keywords), kind) if type(error) is TypeError else None
            if message is None:
                raise
            raise TypeError(message) from None

    def eagerly(*arguments: Any, **keywords: Any) -> Any:
        warn(
            f"{function.__qualname__} in a compiled function ends its graph, and runs as it does without torch.compile."
        )
        return wrapped(*arguments, **keywords)

    def mark() -> None:
        nonlocal eagerly
        eagerly = torch.compiler.disable(eagerly)

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
