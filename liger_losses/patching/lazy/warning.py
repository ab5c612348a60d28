"""Messages about lazy logits: a warning if their values are needed, an error if these cannot be computed any more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from liger_losses.caller import calling_line, warn
from liger_losses.checks import see

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


def cannot_compute(message: str) -> RuntimeError:
    """The error of lazy logits that cannot be computed any more, with where to read on."""
    return RuntimeError(message + see("lazy-logits-that-cannot-be-computed-any-more"))


def warn_materialized(operation: str, lazy: Any) -> None:
    """Warn once per operation and caller, the innermost frame outside of torch and this package.

    Evaluation needs logits more often than training. There, the first operation of a process warns.
    """
    if _ALLOWED.get():
        return
    training = lazy.requires_grad
    frame, line = calling_line()
    caller = f"{frame.f_globals.get('__name__', '?')}:{line}"
    in_trainer = caller.startswith("transformers.trainer")
    key = (operation, caller) if training else ("evaluation", "")
    if key not in _WARNED:
        _WARNED.add(key)
        warn(
            f"{operation}, called in {caller}, needs the values of lazy logits: all [tokens, vocab] of them "
            "are computed now. The losses of liger_losses do not need them"
            + ("." if training else ", nor do cross_entropy, argmax, topk and logsumexp of logits.")
            + (" Pass the Trainer a preprocess_logits_for_metrics that reduces them." if in_trainer else "")
            + see("lazy-logits-that-were-materialized"),
            RuntimeWarning,
        )
