"""Calls functions with modules as soon as these are imported, without importing any."""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[ModuleType], Any]]] = {}


def when_imported(name: str, function: Callable[[ModuleType], Any]) -> None:
    """Call ``function`` with the module of this name: now if it is imported already, else as soon as it is."""
    module = sys.modules.get(name)
    if module is not None and not _waiting.get(name):
        function(module)
        return
    _waiting.setdefault(name, []).append(function)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def forget(name: str, function: Callable[[ModuleType], Any]) -> None:
    """Undo :func:`when_imported` for a module that has not been imported since."""
    if function in _waiting.get(name, ()):
        _waiting[name].remove(function)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find; modules that somebody waits for run what waits when they are there."""

    def __init__(self) -> None:
        self.searched = set[tuple[str, int]]()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        search = name, threading.get_ident()
        if search in self.searched or not _waiting.get(name):  # a finder that is asked may ask all the others as well
            return None
        self.searched.add(search)
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self.searched.remove(search)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            own = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = own
                own(module)
                for function in _waiting.pop(name, []):
                    function(module)
                if not _waiting:
                    with contextlib.suppress(ValueError):  # somebody has taken it away
                        sys.meta_path.remove(self)

            loader.exec_module = exec_module
        return spec


_FINDER = _Finder()
