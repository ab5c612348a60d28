"""Calls functions with modules as soon as these are imported, without importing any."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Awaited:
    """In ``sys.meta_path``: finds a module as the other finders do, and calls a function once that is imported."""

    name: str
    function: Callable[[ModuleType], Any]
    #: The threads in which it asks the others, of which one may ask it in turn.
    asking: set[int] = field(default_factory=set, compare=False)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        thread = threading.get_ident()
        if name != self.name or thread in self.asking:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        self.asking.add(thread)
        try:
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        finally:
            self.asking.remove(thread)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = execute
                execute(module)
                # One loader may load all modules of an archive.
                if module.__name__ == name and forget(name, self.function):
                    self.function(module)

            loader.exec_module = exec_module
        return spec


def when_imported(name: str, function: Callable[[ModuleType], Any]) -> None:
    """Call ``function`` with the module of this name: now if it is imported already, else as soon as it is."""
    if sys.modules.get(name) is not None:
        function(importlib.import_module(name))  # which waits for another thread that imports it now
    elif Awaited(name, function) not in sys.meta_path:
        sys.meta_path.insert(0, Awaited(name, function))


def forget(name: str, function: Callable[[ModuleType], Any]) -> bool:
    """Undo :func:`when_imported`; whether the module has not been imported since."""
    try:
        sys.meta_path.remove(Awaited(name, function))
    except ValueError:
        return False
    return True
