"""Marks for torch.compile that are set when it is first used, since its import takes twice as long as torch's.

Decorators such as ``torch.compiler.disable`` import the compiler. Here they wait until something else imports it, as
``torch.compile`` itself does, so that they are in place before anything is traced.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from liger_losses.kernels.imports import when_imported

#: What ``torch.compile`` imports. If a version of torch has no such module, marks are set at once.
COMPILER = "torch._dynamo"
_HAS_COMPILER = importlib.util.find_spec(COMPILER) is not None


def when_compiling(mark: Callable[[], Any]) -> None:
    """Call ``mark`` once the compiler is imported: now, if it is already."""
    if _HAS_COMPILER:
        when_imported(COMPILER, lambda module: mark())
    else:
        mark()


def outside_graphs(owner: Any, name: str) -> None:
    """Apply ``torch.compiler.disable`` to a function of a class, or of a file's ``globals()``: graphs end there."""

    def mark() -> None:
        if isinstance(owner, dict):
            owner[name] = torch.compiler.disable(owner[name])
        else:
            setattr(owner, name, torch.compiler.disable(getattr(owner, name)))

    when_compiling(mark)
