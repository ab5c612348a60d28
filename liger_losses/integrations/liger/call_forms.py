"""The forms in which liger-kernel's losses are called: functions, modules, and the ``apply`` of autograd functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def called_as(names: str, **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function: it is called by liger-kernel's names, in their order, and says them in its signature.

    liger-kernel's models read the names there. The function gets the arguments that were given, by its own names.

    Args:
        names: ``theirs:ours`` for an argument that the function has by another name, ``theirs:`` for one without
            effect.
        defaults: by the function's names, those that differ from its own.
    """
    pairs = [name.partition(":") for name in names.split()]
    ours = {theirs: own if colon else theirs for theirs, colon, own in pairs}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        known, kind = inspect.signature(function).parameters, inspect.Parameter
        has = {theirs: known[own].default if own in known else None for theirs, own in ours.items()}
        signature = inspect.Signature([kind(n, kind.POSITIONAL_OR_KEYWORD, default=has[n]) for n in ours])

        @functools.wraps(function)
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            others = {name: keywords.pop(name) for name in [*keywords] if name not in ours}
            given = bound(function.__name__, signature, arguments, keywords).arguments
            return function(**{**defaults, **{ours[n]: given[n] for n in given if ours[n]}, **others})

        vars(wrapper)["__signature__"] = signature
        return wrapper

    return decorate


def bound(name: str, signature: inspect.Signature, arguments: Any, keywords: Any) -> inspect.BoundArguments:
    """The arguments of a call by name; a TypeError with the signature if they do not fit."""
    try:
        return signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise TypeError(f"{name}{signature}: {error}") from None


def function_class(name: str, apply: Callable[..., Any]) -> type:
    """A class with the ``apply`` of an autograd function."""
    return type(name, (), {"apply": staticmethod(apply), "__doc__": apply.__doc__})


def module_class(name: str, function: Callable[..., Tensor], options: str) -> type[nn.Module]:
    """A module that calls a function.

    The ``options`` are the arguments of the module's constructor, and its attributes, with the function's defaults.
    """
    parameters = inspect.signature(function).parameters
    made = inspect.Signature([parameters[option] for option in options.split()])

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        nn.Module.__init__(self)
        given = bound(name, made, arguments, keywords)
        given.apply_defaults()
        vars(self).update(given.arguments)

    def forward(self: Any, *inputs: Any, **named: Any) -> Tensor:
        return function(*inputs, **named, **{option: getattr(self, option) for option in made.parameters})

    members: dict[str, Any] = {"__init__": __init__, "forward": forward, "__signature__": made}
    return type(name, (nn.Module,), members | {"__doc__": function.__doc__, "__module__": function.__module__})


def applied(loss: type, names: str, **defaults: Any) -> Callable[..., Any]:
    """The ``apply`` of a function of ``chunked_loss``: arguments of a loss's constructor and call by position.

    ``defaults`` are defaults of the function that differ from the constructor's.
    """
    # A temperature that is a number is the constructor's, one per token the call's.
    of_call = inspect.signature(loss.forward).parameters  # type: ignore[attr-defined]

    def apply(**given: Any) -> Any:
        call = {n: v for n, v in given.items() if n in of_call and (n != "temperature" or isinstance(v, Tensor))}
        return loss(**{name: value for name, value in given.items() if name not in call})(**call)

    apply.__doc__ = f"{loss.__name__} by position: {', '.join(names.split())}."
    return called_as(names, **defaults)(apply)
