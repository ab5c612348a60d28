"""Replaces names of a framework when the framework imports them, without importing any of it.

TRL's are replaced at once, all of them or none, by ``trl/enabling.py``.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Replacement:
    """One name of a framework that is replaced.

    Args:
        module: where it is defined.
        name: of a function, or ``Class.method``.
        make: from what it was, and the module, to what it becomes.
    """

    module: str
    name: str
    make: Callable[[Any, ModuleType], Any]

    def find(self, module: ModuleType) -> tuple[Any, str] | None:
        """The module, or class in it, and its attribute; ``None`` if there is none."""
        owner: Any = module
        *parents, name = self.name.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        return (owner, name) if hasattr(owner, name) else None


class Replacements:
    """Names of a framework that are replaced together: now where a module is imported already, else when it is.

    A module that lacks one of its names is left as it is, with a warning.

    Args:
        framework: its name, for warnings.
        tested: its version or commit that this was written for.
        replacements: what to replace.
    """

    def __init__(self, framework: str, tested: str, *replacements: Replacement) -> None:
        self.framework, self.tested = framework, tested
        self._by_module: dict[str, list[Replacement]] = {}
        for replacement in replacements:
            self._by_module.setdefault(replacement.module, []).append(replacement)
        #: What was replaced, in this order: the object, the attribute, what was there.
        self._replaced: list[tuple[Any, str, Any]] = []
        self._installed = False

    def install(self) -> None:
        """Replace the names; a second call has no effect."""
        if self._installed:
            return
        self._installed = True
        for module in self._by_module:
            when_imported(module, self._replace)

    def uninstall(self) -> None:
        """Put back what was replaced, and replace nothing from now on."""
        self._installed = False
        for module in self._by_module:
            _forget(module, self._replace)
        while self._replaced:
            owner, name, value = self._replaced.pop()
            made = getattr(owner, name)
            delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
            if isinstance(owner, ModuleType):
                for other in _modules_with(owner, name, made):  # imported by name since then
                    setattr(other, name, value)

    def _replace(self, module: ModuleType) -> None:
        found = [(replacement, replacement.find(module)) for replacement in self._by_module[module.__name__]]
        missing = [replacement.name for replacement, place in found if place is None]
        if missing:
            warnings.warn(
                f"{self.framework} runs with its own code, not with liger_losses: this version's {module.__name__} has "
                f"no {', '.join(missing)} (tested with {self.tested}).",
                stacklevel=2,
            )
            return
        for replacement, place in found:
            assert place is not None
            owner, name = place
            value = getattr(owner, name)
            made = replacement.make(value, module)
            self._set(owner, name, made)
            if owner is module and _defines(module, value):
                for other in _modules_with(module, name, value):
                    self._set(other, name, made)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)


def _defines(module: ModuleType, value: Any) -> bool:
    """Whether a module has not imported a value from another module of its framework."""
    source = str(getattr(value, "__module__", None))
    return source == module.__name__ or source.partition(".")[0] != module.__name__.partition(".")[0]


def _modules_with(module: ModuleType, name: str, value: Any) -> list[Any]:
    """The modules of a module's framework that have this value under this name, having imported it."""
    package = module.__name__.partition(".")[0]
    modules = [other for path, other in list(sys.modules.items()) if path.partition(".")[0] == package]
    return [other for other in modules if getattr(other, "__dict__", {}).get(name) is value]


# --- When a module is imported ----------------------------------------------------------------------------------------

_waiting: dict[str, list[Callable[[ModuleType], Any]]] = {}
_thread = threading.local()


def when_imported(name: str, function: Callable[[ModuleType], Any]) -> None:
    """Call ``function`` with the module of this name: now if it is imported already, else as soon as it is."""
    module = sys.modules.get(name)
    if module is not None and _is_initializing(module):
        importlib.import_module(name)  # waits, if it is another thread that imports it
        if _is_initializing(module):
            warnings.warn(
                f"liger_losses replaces nothing in {name}, whose import has led here; call install() before or after.",
                stacklevel=4,
            )
            return
    if module is not None:
        function(module)
        return
    _waiting.setdefault(name, []).append(function)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _forget(name: str, function: Callable[[ModuleType], Any]) -> None:
    if function in _waiting.get(name, ()):
        _waiting[name].remove(function)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find; modules that somebody waits for run what waits when they are there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not _waiting.get(name) or getattr(_thread, "finding", None) == name:
            return None
        _thread.finding = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            _thread.finding = None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """A module's own loader, which is all that the module sees of it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:  # of a module that is only looked for, or run by runpy
        return getattr(self.__dict__["loader"], name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        for function in _waiting.pop(module.__name__, []):
            function(module)


_FINDER = _Finder()
