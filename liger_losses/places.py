"""Names in other packages that this library replaces, and puts back: in TRL, verl and liger-kernel."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

_ABSENT = object()


class Missing(LookupError):
    """A place that the installed version lacks.

    Args:
        reason: which place, and why.
        package: the package that is not installed, if that is the reason.
    """

    def __init__(self, reason: str, package: str | None = None) -> None:
        super().__init__(reason)
        self.package = package


def around(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """For :class:`Place`: ``function(original, *arguments)`` is called where the original was."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return make


class Found(NamedTuple):
    """A place in the installed version: the module or class that has the name, the name, and its new value."""

    owner: Any
    name: str
    value: Any


@dataclass(frozen=True)
class Place:
    """One name of another package that is replaced.

    Args:
        module: the module that has the name.
        name: the name of a function or class in it, or ``Class.method``.
        make: from the original to what replaces it.
        function: the function that gets the arguments of the calls: it must take all parameters of the original that
            have no default, and the original all that it requires.
        takes: parameters that the original must have.
    """

    module: str
    name: str
    make: Callable[[Any], Any]
    function: Callable[..., Any] | None = None
    takes: tuple[str, ...] = ()

    def find(self) -> Found:
        """Import the module and look the name up; nothing is replaced.

        Raises:
            Missing: the module or the name is not there, or its parameters are others.
        """
        where = f"{self.module}.{self.name}"
        owner: Any = _imported(self.module, where)
        *classes, name = self.name.split(".")
        for class_name in classes:
            owner = getattr(owner, class_name, None)
        # getattr of a class would give a static or class method's function, which could not be put back as a method.
        look_up = getattr if isinstance(owner, ModuleType) else inspect.getattr_static
        original: Any = look_up(owner, name, _ABSENT)
        if owner is None or original is None or original is _ABSENT:
            raise Missing(f"{where} is not there")
        function = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
        self.check_parameters(function)
        value = self.make(function)
        return Found(owner, name, value if function is original else type(original)(value))

    def check_parameters(self, original: Any) -> None:
        """Raise :class:`Missing` if the parameters of the original are others."""
        if not self.takes and self.function is None:
            return
        theirs = inspect.signature(original).parameters
        needed, known = set(self.takes), set(theirs)
        if self.function is not None:
            ours = inspect.signature(self.function).parameters.values()
            needed |= {p.name for p in ours if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
            known = {p.name for p in ours} | {p.name for p in theirs.values() if p.default is not p.empty}
        for problem, names in (("has no", needed - set(theirs)), ("has an unknown", set(theirs) - known)):
            if names:
                raise Missing(f"{self.module}.{self.name} {problem} parameter {', '.join(sorted(names))}")


def _imported(module: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        # Of another package that the module needs, as an optional dependency.
        other = error.name if isinstance(error, ModuleNotFoundError) else None
        other = None if other is None or other.partition(".")[0] == package else other
        raise Missing(f"{where} cannot be imported: {error}", other) from error


class Replaced:
    """What is replaced now, in this order, and what was there before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return len(self._before)

    def add(self, places: Iterable[Found]) -> None:
        """Replace them."""
        for owner, name, value in places:
            self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)

    def restore(self, count: int = 0) -> None:
        """Put back what was there, the last first, except for the first ``count`` names."""
        while len(self._before) > count:
            owner, name, value = self._before.pop()
            delattr(owner, name) if value is _ABSENT else setattr(owner, name, value)
