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
        if name != self.name:
            return None
        finders = [*sys.meta_path]
        others = finders[finders.index(self) + 1 :] if self in finders else []
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = execute
                execute(module)
                if forget(name, self.function):
                    self.function(module)

            loader.exec_module = exec_module
        return spec


def when_imported(name: str, function: Callable[[ModuleType], Any]) -> None:
    """Call ``function`` with the module of this name: now if it is imported already, else as soon as it is."""
    module = sys.modules.get(name)
    if module is not None:
        function(module)
    elif Awaited(name, function) not in sys.meta_path:
        sys.meta_path.insert(0, Awaited(name, function))


def forget(name: str, function: Callable[[ModuleType], Any]) -> bool:
    """Undo :func:`when_imported`; whether the module has not been imported since."""
    try:
        sys.meta_path.remove(Awaited(name, function))
    except ValueError:
        return False
    return True
