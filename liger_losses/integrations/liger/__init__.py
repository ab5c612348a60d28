"""liger-kernel's names, answered by this library: code that imports them runs on it unchanged.

    import liger_losses.integrations.liger

    liger_losses.integrations.liger.install()  # before or after the import of the code that uses liger-kernel

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

from liger_losses.integrations.liger.models import apply_to, stop_applying
from liger_losses.integrations.liger.names import ANSWERS

_APPLY, _TABLE = "apply_liger_kernel_to_", "MODEL_TYPE_TO_APPLY_LIGER_FN"
#: What was replaced, in this order: the namespace, the name, and its value.
_replaced: list[tuple[dict[str, Any], str, Any]] = []
#: The modules that stand in for those of liger-kernel, where it is not installed.
_made: list[str] = []


def install() -> None:
    """Answer liger-kernel's losses and its ``apply_liger_kernel_to_...`` with this library. Again: no effect.

    Covers ``liger_kernel.chunked_loss`` (classes, ``functional``, autograd functions), the (fused linear, scaled)
    cross-entropy, JSD, KL and TVD losses of ``liger_kernel.ops`` and ``liger_kernel.transformers``,
    ``triton_grpo_loss`` and ``apply_liger_kernel_to_...``. Modules that have imported a name already get the answer,
    too, whatever they call it; instances and subclasses that were made before stay what they are. Other names of an
    installed liger-kernel stay as they are; if it is not installed, importing them raises ImportError, with a list of
    those that exist.
    """
    if is_installed():
        return
    if find_spec("liger_kernel") is None:
        for stand_in in sorted({parent for name in ANSWERS for parent in _parents(name)}):
            _make(stand_in)
        return
    found: dict[int, tuple[Any, Any]] = {}  # by the id of what is replaced: that, and its answer
    for module_name, answers in ANSWERS.items():
        try:
            names = vars(importlib.import_module(module_name))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("liger_kernel"):
                raise
            continue  # of another version
        functions = {name: f for name, f in names.items() if name.startswith(_APPLY)}
        table = names.get(_TABLE, {})
        kinds = {name: [kind for kind, applies in table.items() if applies is f] for name, f in functions.items()}
        applies = {name: apply_to(name.removeprefix(_APPLY), kinds[name], f) for name, f in functions.items()}
        of_kinds = {kind: apply_to(kind, [kind], f) for kind, f in table.items()}
        for name, answer in {**answers, **applies, _TABLE: of_kinds}.items():
            if name in names:
                found.setdefault(id(names[name]), (names[name], answer))
    _replace_everywhere(found)


def is_installed() -> bool:
    """Whether liger-kernel's names are answered now."""
    return bool(_replaced or _made)


def uninstall() -> None:
    """Put everything back as it was before :func:`install`.

    Losses that were built in between work on, and modules that imported an answer in between keep it.
    """
    while _replaced:
        namespace, name, value = _replaced.pop()
        namespace[name] = value
    while _made:
        sys.modules.pop(_made.pop(), None)
    stop_applying()


def _replace_everywhere(found: dict[int, tuple[Any, Any]]) -> None:
    """Replace objects in the modules that define them and in all that have imported them, whatever they call them."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if id(value) in found and value is not found[id(value)][1]:
                _replaced.append((names, name, value))
                names[name] = found[id(value)][1]


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _make(name: str) -> None:
    """A module that stands in for one of liger-kernel, with the answers as its names."""
    module, answers = types.ModuleType(name, "liger-kernel's names, answered by liger_losses."), ANSWERS.get(name, {})
    vars(module).update(answers, __path__=[], __spec__=ModuleSpec(name, None, is_package=True))

    def absent(attribute: str) -> Any:
        if attribute.startswith(_APPLY):
            return apply_to(attribute.removeprefix(_APPLY))
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        raise ImportError(
            f"liger_losses answers no {attribute!r} of {name}, and liger-kernel is not installed. It answers "
            f"{', '.join(sorted(answers)) or 'nothing in this module'}. For the rest, pip install liger-kernel."
        )

    vars(module)["__getattr__"] = absent
    sys.modules[name] = module
    _made.append(name)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
