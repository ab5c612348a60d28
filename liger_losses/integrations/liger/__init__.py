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

from liger_losses.integrations.liger.models import apply_to
from liger_losses.integrations.liger.names import ANSWERS
from liger_losses.integrations.loading import leave_loaded_models

_APPLY = "apply_liger_kernel_to_"
#: What was replaced, in this order: the namespace, the name, and its value.
_replaced: list[tuple[dict[str, Any], str, Any]] = []
#: The modules that stand in for those of liger-kernel, where it is not installed.
_made: list[str] = []


def install() -> None:
    """Answer liger-kernel's losses and its ``apply_liger_kernel_to_...`` with this library. Again: no effect.

    Covers ``liger_kernel.chunked_loss`` (classes, ``functional``, autograd functions), the (fused linear, scaled)
    cross-entropy, JSD, KL and TVD losses of ``liger_kernel.ops`` and ``liger_kernel.transformers``,
    ``triton_grpo_loss`` and ``apply_liger_kernel_to_...``. Modules that have imported a name already get the answer,
    too; instances and subclasses that were made before stay what they are. Other names of an installed liger-kernel
    stay as they are; if it is not installed, importing them raises ImportError, with a list of those that exist.
    """
    if is_installed():
        return
    if find_spec("liger_kernel") is None:
        for stand_in in sorted({parent for name in ANSWERS for parent in _parents(name)}):
            _make(stand_in)
        return
    for module_name, answers in ANSWERS.items():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("liger_kernel"):
                raise
            continue  # of another version
        _replace_everywhere(vars(module), answers)
        functions = [name for name in vars(module) if name.startswith(_APPLY)]
        _replace_everywhere(vars(module), {name: apply_to(name.removeprefix(_APPLY)) for name in functions})
        table = "MODEL_TYPE_TO_APPLY_LIGER_FN"
        if table in vars(module):
            _replace_everywhere(vars(module), {table: {kind: apply_to(kind) for kind in vars(module)[table]}})


def is_installed() -> bool:
    """Whether liger-kernel's names are answered now."""
    return bool(_replaced or _made)


def uninstall() -> None:
    """Put everything back as it was before :func:`install`. Losses that were built in between work on."""
    while _replaced:
        namespace, name, value = _replaced.pop()
        namespace[name] = value
    while _made:
        sys.modules.pop(_made.pop(), None)
    leave_loaded_models()


def _replace_everywhere(namespace: dict[str, Any], answers: dict[str, Any]) -> None:
    """Replace names of a module, and in all modules that have imported them from it."""
    originals = {name: namespace[name] for name in answers if name in namespace}
    namespaces = [found for m in list(sys.modules.values()) if isinstance(found := getattr(m, "__dict__", None), dict)]
    for name, original in originals.items():
        for other in namespaces:
            if original is not answers[name] and other.get(name) is original:
                _replaced.append((other, name, original))
                other[name] = answers[name]


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
