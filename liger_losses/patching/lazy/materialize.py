"""The warning that the values of lazy logits were computed."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

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
