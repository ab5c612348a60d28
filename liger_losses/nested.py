"""Values in tuples, lists and dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_nested(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """What a function returns of what is at each place of nested tuples, lists and dictionaries of the same form."""
    if isinstance(first, dict):
        return {key: map_nested(function, value, *[other[key] for other in others]) for key, value in first.items()}
    if isinstance(first, (list, tuple)):
        parts = [map_nested(function, *values) for values in zip(first, *others, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return function(first, *others)
