"""What ``python -m liger_losses.run`` prepares before a script runs, here and in the processes that it spawns."""

from __future__ import annotations

import functools
import importlib
import multiprocessing.spawn
import os
import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_losses.integrations.loading import patch_loaded_models
from liger_losses.integrations.replacements import when_imported


@dataclass(frozen=True)
class Preparation:
    """What is done in each process.

    Args:
        install: names of modules of ``liger_losses.integrations`` whose ``install()`` is called.
        trl: call ``liger_losses.trl.enable()`` when TRL is imported.
        patch: options of :func:`liger_losses.patch` for all models that transformers loads; ``None`` leaves them.
    """

    install: tuple[str, ...] = ()
    trl: bool = False
    patch: dict[str, Any] | None = None

    def apply(self) -> None:
        """Prepare this process, and those that it starts by ``spawn`` or ``forkserver``.

        transformers and TRL are left to be imported by whoever needs them: they take seconds, and read the environment,
        which a script may change before.
        """
        if self.patch is not None:
            when_imported("transformers.modeling_utils", lambda module: patch_loaded_models(self._announce))
        for name in self.install:
            importlib.import_module(f"liger_losses.integrations.{name}").install()
        if self.trl:
            when_imported("trl", lambda module: _enable_trl())
        _prepare_children(self)

    def _announce(self, model: nn.Module) -> dict[str, Any] | None:
        if os.environ.get("RANK", "0") == "0":
            print(f"liger_losses.run patches {type(model).__name__}", file=sys.stderr)
        return self.patch


def _enable_trl() -> None:
    import liger_losses.trl

    liger_losses.trl.enable()


@dataclass(frozen=True)
class _Applied:
    """Applies a preparation where it is unpickled."""

    preparation: Preparation

    def __reduce__(self) -> Any:
        return Preparation.apply, (self.preparation,)


#: What this process has applied, and what Python's own function is while these are sent along.
_applied: list[_Applied] = []
_original: list[Any] = []


def _prepare_children(preparation: Preparation) -> None:
    """Send the preparation along with what Python sends to each process that it spawns.

    A spawned process unpickles this before it imports the main module and the function that it shall run.
    """
    _applied.append(_Applied(preparation))
    if _original:
        return
    original = multiprocessing.spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"liger_losses": list(_applied), **original(name)}

    _original.append(original)
    multiprocessing.spawn.get_preparation_data = get_preparation_data


def leave_children() -> None:
    """Prepare no processes that are spawned from now on."""
    _applied.clear()
    if _original:
        multiprocessing.spawn.get_preparation_data = _original.pop()
