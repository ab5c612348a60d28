"""Replaces names of a framework when the framework imports them, without importing any of it."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from types import ModuleType

from liger_losses.caller import warn
from liger_losses.integrations.imports import forget, when_imported
from liger_losses.places import Missing, Place, Replaced

_LOG = logging.getLogger("liger_losses")


@functools.cache
def announce(framework: str, tested: str, what: str) -> None:
    """Log at INFO that an integration is active, and warn where the framework's version was not tested; both once.

    Args:
        framework: the name of its distribution, in whatever case.
        tested: how the versions that were tested begin, for example ``"0.9"``.
        what: what this library computes for it.
    """
    try:
        version = importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    if not f"{version}.".startswith(f"{tested}."):
        warn(
            f"{framework} {version} was not tested with liger_losses, which was tested with {framework} {tested}.",
        )
    _LOG.info("liger_losses computes %s of %s %s.", what, framework, version)


class Replacements:
    """Names of a framework that are replaced together: now where a module is imported already, else when it is.

    A module that lacks one of its names is left as it is, with a warning.

    Args:
        framework, tested: as :func:`announce` takes them.
        places: what to replace.
    """

    def __init__(self, framework: str, tested: str, *places: Place) -> None:
        self.framework, self.tested = framework, tested
        self._places: dict[str, list[Place]] = {}
        for place in places:
            self._places.setdefault(place.module, []).append(place)
        self._replaced = Replaced()
        self._installed = False

    def install(self) -> None:
        """Replace the names; a second call has no effect."""
        if self._installed:
            return
        self._installed = True
        for module in self._places:
            when_imported(module, self._replace)

    def uninstall(self) -> None:
        """Put back what was replaced, and replace nothing from now on."""
        self._installed = False
        for module in self._places:
            forget(module, self._replace)
        self._replaced.restore()

    def _replace(self, module: ModuleType) -> None:
        try:
            found = [place.find() for place in self._places[module.__name__]]
        except Missing as missing:
            warn(
                f"{self.framework} runs with its own code, not with liger_losses: {missing} (tested with "
                f"{self.framework} {self.tested}).",
            )
            return
        self._replaced.add(found)
