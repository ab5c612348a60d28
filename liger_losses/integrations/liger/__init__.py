"""liger-kernel's names, computed by this library: code that imports them runs on it unchanged.

    import liger_losses.integrations.liger

    liger_losses.integrations.liger.install()  # before the import of the code that uses liger-kernel

It works whether liger-kernel is installed or not. Frameworks that ask for its version (transformers' Trainer with
``use_liger_kernel=True``, ms-swift, LLaMA-Factory) need it installed.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from liger_losses.caller import warn
from liger_losses.integrations.liger.models import apply_to, later
from liger_losses.integrations.liger.names import REPLACEMENTS
from liger_losses.integrations.replacements import announce
from liger_losses.places import Found, Replaced

_APPLY, _TABLE = "apply_liger_kernel_to_", "MODEL_TYPE_TO_APPLY_LIGER_FN"
_replaced = Replaced()


def install() -> None:
    """Compute liger-kernel's losses and its ``apply_liger_kernel_to_...`` with this library. Again: no effect.

    Covers ``liger_kernel.chunked_loss`` (classes, ``functional``, autograd functions), the fused linear cross-entropy
    (also scaled), JSD and KL of ``liger_kernel.ops`` and ``liger_kernel.transformers``, and
    ``apply_liger_kernel_to_...``. Losses of logits stay liger-kernel's. Call it before the import of the code that uses
    liger-kernel: modules that have imported a name keep liger-kernel's object; a warning says so if this is possible.
    Other names of an installed liger-kernel stay as they are; if it is not installed, importing them raises
    ImportError, with a list of the available names.
    """
    if is_installed():
        return
    if find_spec("liger_kernel") is None:
        parts = [name.split(".") for name in REPLACEMENTS]
        for name in sorted({".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)}):
            sys.modules[name] = _StandIn(name)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[name])
        return
    early = [name for name in REPLACEMENTS if name in sys.modules]
    if early:
        warn(
            f"{early[0]} was imported before liger_losses.integrations.liger.install(): code that has imported "
            "names from it keeps liger-kernel's objects. Call install() first.",
        )
    announce("liger-kernel", "0.8", "the losses and patches")
    modules = []  # all are imported before the first is changed
    for name, replacements in REPLACEMENTS.items():
        try:
            modules.append((importlib.import_module(name), replacements))
        except ModuleNotFoundError as error:  # of another version
            if not (error.name or "").startswith("liger_kernel"):
                raise
    for module, replacements in modules:
        names = vars(module)
        functions = {name: f for name, f in names.items() if name.startswith(_APPLY)}
        table = names.get(_TABLE, {})
        kinds = {name: [kind for kind, applies in table.items() if applies is f] for name, f in functions.items()}
        applies = {name: apply_to(name.removeprefix(_APPLY), kinds[name], f) for name, f in functions.items()}
        of_kinds = {kind: apply_to(kind, [kind], f) for kind, f in table.items()}
        ours = {**replacements, **applies, _TABLE: of_kinds}
        _replaced.add([Found(module, name, value) for name, value in ours.items() if name in names])


def is_installed() -> bool:
    """Whether liger-kernel's names are this library's now."""
    return bool(len(_replaced) or _stand_ins())


def uninstall() -> None:
    """Put everything back as it was before :func:`install`.

    Losses that were built in between work on, and modules that imported a name in between keep it.
    """
    _replaced.restore()
    for name in _stand_ins():
        del sys.modules[name]
    later.close()


class _StandIn(types.ModuleType):
    """A module that stands in for one of liger-kernel, with this library's losses as its names."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "liger-kernel's names, computed by liger_losses.")
        vars(self).update(REPLACEMENTS.get(name, {}), __path__=[], __spec__=ModuleSpec(name, None, is_package=True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_APPLY):
            return apply_to(name.removeprefix(_APPLY))
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise ImportError(
            f"liger_losses does not replace {name!r} of {self.__name__}, and liger-kernel is not installed. It "
            f"replaces {', '.join(sorted(REPLACEMENTS.get(self.__name__, ()))) or 'nothing in this module'}. For the "
            "rest, pip install liger-kernel."
        )


def _stand_ins() -> list[str]:
    # By type(): isinstance would load the modules of importlib.util.LazyLoader.
    return [name for name, module in [*sys.modules.items()] if type(module) is _StandIn]
