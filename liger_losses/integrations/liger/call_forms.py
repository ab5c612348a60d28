"""The forms in which liger-kernel's losses are called: functions, modules, and the ``apply`` of autograd functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def with_arguments(function: Callable[..., Any], names: str, required: int) -> Callable[..., Any]:
    """Let :func:`inspect.signature` say the names of a function's arguments: liger-kernel's models read them there.

    Those after the first ``required`` are ``None`` by default.
    """
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, kind, default=empty if i < required else None) for i, n in enumerate(names.split())]
    )
    return function


def function_class(name: str, apply: Callable[..., Any]) -> type:
    """A class with the ``apply`` of an autograd function."""
    return type(name, (), {"apply": staticmethod(apply), "__doc__": apply.__doc__})


def module_class(name: str, function: Callable[..., Tensor], inputs: str, options: str) -> type[nn.Module]:
    """A module that calls a function.

    Args:
        function: takes the inputs first, maybe by other names, and the options.
        inputs: the names of what the module is called with.
        options: the arguments of the module's constructor, and its attributes, with the function's defaults.
    """
    names = dict(zip(inputs.split(), inspect.signature(function).parameters, strict=False))
    of_function = inspect.signature(function).parameters
    made = inspect.Signature([of_function[name] for name in options.split()])
    called = inspect.Signature([of_function[own].replace(name=name) for name, own in names.items()])

    def bound(signature: inspect.Signature, *arguments: Any, **named: Any) -> inspect.BoundArguments:
        try:
            return signature.bind(*arguments, **named)
        except TypeError as error:
            raise TypeError(f"{name}{signature}: {error}") from None

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        nn.Module.__init__(self)
        given = bound(made, *arguments, **named)
        given.apply_defaults()
        vars(self).update(given.arguments)

    def forward(self: Any, *arguments: Any, **named: Any) -> Tensor:
        given = {names[key]: value for key, value in bound(called, *arguments, **named).arguments.items()}
        return function(**given, **{name: getattr(self, name) for name in made.parameters})

    members: dict[str, Any] = {"__init__": __init__, "forward": forward, "__signature__": made}
    members |= {"__doc__": function.__doc__, "__module__": function.__module__}
    return type(name, (nn.Module,), members)


def applied(loss: type, names: str, **defaults: Any) -> Callable[..., Any]:
    """The ``apply`` of a function of ``chunked_loss``: arguments of a loss's constructor and call by position.

    ``defaults`` are defaults of the function that differ from the constructor's.
    """
    order = names.split()
    # A temperature that is a number is the constructor's, one per token the call's.
    of_call = inspect.signature(loss.forward).parameters  # type: ignore[attr-defined]

    def apply(*arguments: Any) -> Any:
        if len(arguments) > len(order):
            raise TypeError(f"apply takes at most {len(order)} arguments ({', '.join(order)}), got {len(arguments)}.")
        call: dict[str, Any] = {}
        options = dict(defaults)
        for name, value in zip(order, arguments, strict=False):
            is_call = name in of_call and (name != "temperature" or isinstance(value, Tensor))
            (call if is_call else options)[name] = value
        return loss(**options)(**call)

    apply.__doc__ = f"{loss.__name__} by position: {', '.join(order)}."
    return apply
