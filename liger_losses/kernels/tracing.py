"""Marks for torch.compile that are set when it is first used, since its import takes twice as long as torch's.

Decorators such as ``torch.compiler.disable`` import the compiler. Here they wait until something else imports it, as
``torch.compile`` itself does, so that they are in place before anything is traced.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

#: What ``torch.compile`` imports. If a version of torch has no such module, marks are set at once.
COMPILER = "torch._dynamo"
_waiting: list[Callable[[], None]] = []


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the compiler as the other finders do, and sets the marks once it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != COMPILER:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_mark(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            while _waiting:
                _waiting.pop(0)()

        spec.loader.exec_module = execute_and_mark  # type: ignore[method-assign]
        return spec


def when_compiling(mark: Callable[[], Any]) -> None:
    """Call ``mark`` once the compiler is imported: now, if it is already."""
    if not _waiting:
        if COMPILER in sys.modules or importlib.util.find_spec(COMPILER) is None:
            mark()
            return
        sys.meta_path.insert(0, _Finder())
    _waiting.append(mark)


def outside_graphs(owner: Any, name: str) -> None:
    """Apply ``torch.compiler.disable`` to a function of a module or class: graphs end where it is called."""
    when_compiling(lambda: setattr(owner, name, torch.compiler.disable(getattr(owner, name))))
