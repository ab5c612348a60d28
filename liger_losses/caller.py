"""Warnings, which name the user's line: the one that called this library, a trainer or a model."""

from __future__ import annotations

import inspect
import warnings
from types import FrameType

import torch

#: Modules of the standard library that call what they are given.
STANDARD = ("contextlib", "importlib", "functools", "threading", "concurrent")
#: What calls this library for its users.
FRAMEWORKS = ("transformers", "trl", "accelerate", "peft")


def calling_line(beyond: tuple[str, ...] = ()) -> tuple[FrameType, int]:
    """The innermost line outside of this package, torch, the :data:`STANDARD` wrappers and the packages ``beyond``;
    the outermost line where there is none, as in a thread of autograd."""
    skipped = {__name__.partition(".")[0], "torch", *STANDARD, *beyond}
    frame = inspect.currentframe()
    assert frame is not None
    # No list of frames: it would be in one of them, and keep what they hold until garbage is searched for. Graphs that
    # torch has compiled run in globals without a name.
    while frame.f_back is not None and frame.f_globals.get("__name__", "torch").partition(".")[0] in skipped:
        frame = frame.f_back
    return frame, frame.f_lineno


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """``warnings.warn`` as if the user's line had called it; nothing where torch.compile traces."""
    if torch.compiler.is_dynamo_compiling():
        return
    frame, line = calling_line(FRAMEWORKS)
    module, seen = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, line, module, seen)
