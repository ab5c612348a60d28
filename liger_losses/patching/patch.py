"""Patches a model: one walk over its modules, and the functions that rotate its queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from liger_losses.patching import experts, rotations
from liger_losses.patching import mlps as gated_mlps
from liger_losses.patching import norms as normalisations
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.report import Entry, PatchReport
from liger_losses.patching.swap import original_class, replacement_of, restore, swap, why_not_restore, why_not_swap

#: Says whether a module, by its name in the model, may be replaced.
Filter = Callable[[nn.Module, str], bool]

LEFT_OUT = "left out by filter_fn"


def patch(
    model: nn.Module,
    *,
    loss_head: bool = True,
    norms: bool = True,
    mlps: bool = True,
    rope: bool = True,
    filter_fn: Filter | None = None,
) -> PatchReport:
    """Replace what the kernels can do in a model, in place: nothing changes but how it is computed.

    Pieces are found by running small copies of them, and replaced only where outputs and gradients agree. Parameters,
    their names and the state dict stay as they are. Change modules (their eps, their activation) before patching.
    Patching again changes nothing but pieces that are new, and reports all of them. A model without weights (on the
    meta device) can be patched: no weight is read.

    Rotations of queries and keys are functions of a modeling file, which all models of a family in the process share;
    they are replaced for all of them, until the last patched one is unpatched or deleted. Copies and unpickled models
    keep everything else.

    Args:
        model: any model of transformers, with or without adapters, or any other module.
        loss_head: have the output embedding return lazy logits.
        norms: normalisations over the last dimension.
        mlps: what gated MLPs, and experts, do between their linear layers, which stay.
        rope: rotary position embedding.
        filter_fn: called with a module and its name in the model; False leaves the module as it is.

    Returns:
        What was replaced by what, and what was left and why.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check_model(model)
    report = PatchReport()
    kinds = ([normalisations] if norms else []) + ([gated_mlps, experts] if mlps else [])
    verdicts: dict[Any, Any] = {}
    for path, module in model.named_modules():
        for kind in kinds:
            entry = _patch_module(kind, path, module, filter_fn, verdicts)
            if entry is not None:
                report.entries.append(entry)
                break
    if rope:
        report.entries.extend(_patch_rope(model, filter_fn))
    if loss_head:
        report.entries.extend(_patch_head(model, filter_fn))
    return report


def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`: the model computes what it did before, to the bit.

    Where another patched model shares its modeling file, the file's rotation stays replaced until that one is
    unpatched too.

    Args:
        model: patched or not.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: something else changed a patched module since (sharding or parametrizing it, say); nothing is
            undone then.
    """
    _check_model(model)
    for path, module in model.named_modules():
        reason = why_not_restore(module)
        if reason is not None:
            raise RuntimeError(f"{path} cannot be unpatched: {reason}; undo that first.")
    for module in model.modules():
        restore(module)
    rotations.release(model)
    from liger_losses.patching.lazy_head import unpatch_head

    unpatch_head(model)


class _AutoLigerModel(type):
    """Anything else that is asked of the class is transformers' answer."""

    def __getattr__(cls, name: str) -> Any:
        from transformers import AutoModelForCausalLM

        return getattr(AutoModelForCausalLM, name)


class AutoLigerModelForCausalLM(metaclass=_AutoLigerModel):
    """transformers' ``AutoModelForCausalLM``, patched on load. The report is the model's ``liger_report``."""

    def __init__(self) -> None:
        raise TypeError("AutoLigerModelForCausalLM makes models by from_pretrained(...) or from_config(...).")

    @classmethod
    def from_pretrained(cls, *args: Any, patch_options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Load a model and patch it.

        Args:
            args, kwargs: those of ``AutoModelForCausalLM.from_pretrained``.
            patch_options: keyword arguments of :func:`patch`.

        Returns:
            The model; its ``liger_report`` says what was replaced.
        """
        return cls._load("from_pretrained", args, kwargs, patch_options)

    @classmethod
    def from_config(cls, *args: Any, patch_options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Make a model with random weights and patch it.

        Args:
            args, kwargs: those of ``AutoModelForCausalLM.from_config``.
            patch_options: keyword arguments of :func:`patch`.

        Returns:
            The model; its ``liger_report`` says what was replaced.
        """
        return cls._load("from_config", args, kwargs, patch_options)

    @staticmethod
    def _load(how: str, args: tuple[Any, ...], kwargs: dict[str, Any], patch_options: dict[str, Any] | None) -> Any:
        from transformers import AutoModelForCausalLM

        model = getattr(AutoModelForCausalLM, how)(*args, **kwargs)
        model.liger_report = patch(model, **(patch_options or {}))
        return model


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, such as AutoModelForCausalLM.from_pretrained returns, got "
            f"{type(model).__name__}. To load and patch by name, use AutoLigerModelForCausalLM.from_pretrained."
        )


def _patch_module(
    kind: ModuleType, path: str, module: nn.Module, filter_fn: Filter | None, verdicts: dict[Any, Any]
) -> Entry | None:
    """Replace a module, if it is of a kind; None where there is nothing to say about it."""
    name = original_class(module).__name__
    replacement = replacement_of(module)
    if replacement is not None:
        return Entry(path, name, str(replacement)) if isinstance(replacement, kind.REPLACEMENT) else None
    if not kind.is_candidate(module):
        return None
    reason = why_not_swap(module, kind.bypassed(module))
    if reason is None and filter_fn is not None and not filter_fn(module, path):
        reason = LEFT_OUT
    if reason is None:
        key = kind.__name__, kind.key_of(module)
        if key not in verdicts:
            # The module is kept beside its verdict, as keys hold addresses of what it holds.
            verdicts[key] = _verdict(kind, module), module
        verdict = verdicts[key][0]
        if not isinstance(verdict, str):
            swap(module, verdict)
            return Entry(path, name, str(verdict))
        reason = verdict
    return Entry(path, name, None, reason) if kind.is_worth_listing(module) else None


def _verdict(kind: ModuleType, module: nn.Module) -> Any:
    try:
        return kind.recognise(module)
    except Mismatch as mismatch:
        return str(mismatch)


def _patch_head(model: nn.Module, filter_fn: Filter | None) -> list[Entry]:
    from liger_losses.patching.lazy_head import is_patched_head, patch_head

    before = [Entry(path, "Linear", "LazyLinear") for path, module in model.named_modules() if is_patched_head(module)]
    changes = patch_head(model, filter_fn)
    names = [nn.Linear if change.replaced_by else type(change.module) for change in changes]
    return before + [
        Entry(change.path, name.__name__, change.replaced_by, change.reason)
        for change, name in zip(changes, names, strict=True)
        if not (before and change.path == "")
    ]


def _patch_rope(model: nn.Module, filter_fn: Filter | None) -> list[Entry]:
    entries = []
    for namespace, name, callers in rotations.functions_of(model):
        path = str(namespace.get("__name__"))
        if filter_fn is not None and not any(filter_fn(module, module_path) for module_path, module in callers):
            entries.append(Entry(path, name, None, LEFT_OUT))
            continue
        rotation: Any = rotations.bound_rotation(namespace, name)
        try:
            rotation = rotation or rotations.recognise(namespace[name])
        except Mismatch as mismatch:
            entries.append(Entry(path, name, None, str(mismatch)))
            continue
        rotations.bind(model, namespace, name, rotation)
        entries.append(Entry(path, name, str(rotation)))
    return entries
