"""The true values of lazy tensors, and the warning that they were computed."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor


class LazyTensor(Tensor):
    """A tensor whose values are computed when they are needed."""

    def materialize(self) -> Tensor:
        """The values as an ordinary, differentiable tensor."""
        raise NotImplementedError


def true_values(tensor: Tensor) -> Tensor:
    """The values of a lazy tensor as an ordinary one; any other tensor as it is."""
    return tensor.materialize() if isinstance(tensor, LazyTensor) else tensor


def materialize_all(arguments: Any) -> Any:
    """A function's arguments with every lazy tensor, also inside of lists, tuples and dicts, replaced by its values."""
    if isinstance(arguments, LazyTensor):
        return arguments.materialize()
    if isinstance(arguments, (list, tuple)):
        parts = [materialize_all(part) for part in arguments]
        return type(arguments)(*parts) if hasattr(arguments, "_fields") else type(arguments)(parts)
    if isinstance(arguments, dict):
        return {key: materialize_all(value) for key, value in arguments.items()}
    return arguments


_ALLOWED: ContextVar[bool] = ContextVar("allow_materialization", default=False)
#: Operations and their callers for which the warning was given.
_WARNED: set[tuple[str, str]] = set()


@contextlib.contextmanager
def allow_materialization() -> Iterator[None]:
    """Suppress the materialization warning within this context."""
    token = _ALLOWED.set(True)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def warn_materialized(operation: str) -> None:
    """Warn once per operation and caller, the innermost frame outside of torch and this package."""
    if _ALLOWED.get():
        return
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "liger_losses.", "contextlib")) and module != "torch":
            break
        frame = frame.f_back
    caller = f"{frame.f_globals.get('__name__', '?')}:{frame.f_lineno}"
    if (operation, caller) not in _WARNED:
        _WARNED.add((operation, caller))
        warnings.warn(
            f"{operation}, called in {caller}, needs the values of lazy logits, so that all [tokens, vocab] of them "
            "are computed now. The losses of liger_losses do not need them.",
            RuntimeWarning,
            stacklevel=2,
        )
