"""Functions at whose calls graphs of torch.compile end, without importing the compiler.

``torch.compiler.disable`` imports it, which takes twice as long as torch's own import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Decorate a function: the compiler calls it under ``torch.compiler.disable``."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        call = torch.compiler.disable(function) if torch.compiler.is_dynamo_compiling() else function
        return call(*arguments, **keywords)

    return wrapped  # type: ignore[return-value]
