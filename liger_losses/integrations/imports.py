"""Calls functions with modules as soon as these are imported, without importing any."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Awaited:
    """In ``sys.meta_path``: finds a module as the finders after it do, and calls a function once that is imported."""

    name: str
    function: Callable[[ModuleType], Any]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name or self not in sys.meta_path:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = execute
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.function(module)

            loader.exec_module = exec_module
        return spec


def when_imported(name: str, function: Callable[[ModuleType], Any]) -> None:
    """Call ``function`` with the module of this name: now if it is imported already, else as soon as it is."""
    if name in sys.modules:
        function(sys.modules[name])
    elif Awaited(name, function) not in sys.meta_path:
        sys.meta_path.insert(0, Awaited(name, function))


def forget(name: str, function: Callable[[ModuleType], Any]) -> None:
    """Undo :func:`when_imported` for a module that has not been imported since."""
    if Awaited(name, function) in sys.meta_path:
        sys.meta_path.remove(Awaited(name, function))
