"""Warnings, which name the user's line: the one that called this library, a trainer or a model."""

from __future__ import annotations

import inspect
import traceback
import warnings
from types import FrameType

import torch

#: What calls this library for its users.
FRAMEWORKS = ("transformers", "trl", "accelerate", "peft")


def calling_line(beyond: tuple[str, ...] = ()) -> tuple[FrameType, int]:
    """The innermost line outside of this package, torch, the standard library's wrappers and the packages ``beyond``;
    the outermost line where there is none, as in a thread of autograd."""
    skipped = {__name__.partition(".")[0], "torch", "contextlib", "importlib", *beyond}
    lines = [*traceback.walk_stack(inspect.currentframe())]
    outside = (line for line in lines if line[0].f_globals.get("__name__", "?").partition(".")[0] not in skipped)
    return next(outside, lines[-1])


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """``warnings.warn`` as if the user's line had called it; nothing where torch.compile traces."""
    if torch.compiler.is_dynamo_compiling():
        return
    frame, line = calling_line(FRAMEWORKS)
    module, seen = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, line, module, seen)
