"""Operations that need no values: ``views.py`` and ``reductions.py`` register a function for each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def implements(*names: str) -> Callable[[_Function], _Function]:
    """Register a function for operations of these names, be they called as method, function or operator.

    The function takes the lazy logits and the operation's other arguments, and returns ``NotImplemented`` where the
    values are needed after all.
    """

    def register(function: _Function) -> _Function:
        _IMPLEMENTATIONS.update(dict.fromkeys(names, function))
        return function

    return register


def call_implementation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the function registered for an operation.

    ``NotImplemented`` if there is none, or none that takes these arguments.
    """
    function = _IMPLEMENTATIONS.get(name)
    if function is None:
        return NotImplemented
    try:
        _signature(function).bind(*args, **kwargs)
    except TypeError:
        return NotImplemented
    return function(*args, **kwargs)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
