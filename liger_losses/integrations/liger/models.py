"""liger-kernel's ``apply_liger_kernel_to_...`` functions, which call :func:`liger_losses.patch`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from liger_losses.integrations.loading import patched_loading
from liger_losses.patching.patch import AutoLigerModelForCausalLM, patch
from liger_losses.patching.report import PatchReport

#: Patches models that are loaded later, until it is closed.
later = contextlib.ExitStack()


def apply_liger_kernel(
    model: nn.Module | None = None, *, model_types: Sequence[str] | None = None, **kernels: Any
) -> PatchReport | None:
    """Patch a model, or every model of a type that transformers loads from now on.

    Args:
        model: the model.
        model_types: without a model, the ``config.model_type`` of those to patch; all by default.
        kernels: liger-kernel's options: ``rope``; ``fused_linear_cross_entropy``, for the loss without logits;
            ``rms_norm`` and ``layer_norm``, ``swiglu`` and ``geglu``, where one False leaves both kinds. All are
            True by default; further ones have no effect.

    Returns:
        What was replaced; ``None`` without a model.
    """
    options = _patch_options(kernels)
    if model is not None:
        return patch(model, **options)

    def options_of(loaded: nn.Module) -> dict[str, Any] | None:
        found = getattr(getattr(loaded, "config", None), "model_type", None)
        return options if model_types is None or found in model_types else None

    later.enter_context(patched_loading(options_of))
    return None


#: By option of :func:`liger_losses.patch`, liger-kernel's options that must all be True for it.
_KERNELS = {
    "loss_head": ("fused_linear_cross_entropy",),
    "norms": ("rms_norm", "layer_norm"),
    "mlps": ("swiglu", "geglu"),
    "rope": ("rope",),
}


def _patch_options(kernels: dict[str, Any]) -> dict[str, Any]:
    return {name: all(kernels.get(kernel, True) for kernel in theirs) for name, theirs in _KERNELS.items()}


_NAMES = ("rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "swiglu", "model")
#: The arguments of most of liger-kernel's functions.
_ARGUMENTS = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _NAMES])


def apply_to(
    name: str, model_types: Sequence[str] = (), replaced: Callable[..., Any] | None = None
) -> Callable[..., None]:
    """``apply_liger_kernel_to_<name>``.

    Args:
        name: of the model type, or of the text model in it.
        model_types: which ``config.model_type`` liger-kernel calls it for; by default the name, and with ``_text``.
        replaced: liger-kernel's function, whose order of arguments it takes, but none of its defaults.
    """
    order = _ARGUMENTS if replaced is None else inspect.signature(replaced)
    names = [p.name for p in order.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    kinds = model_types or (name, f"{name}_text")

    def apply(*arguments: Any, **named: Any) -> None:
        if len(arguments) > len(names):
            raise TypeError(f"{apply.__name__} takes at most {len(names)} arguments: {', '.join(names)}.")
        apply_liger_kernel(**dict(zip(names, arguments, strict=False)), **named, model_types=kinds)

    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{name}"
    apply.__doc__ = ":func:`apply_liger_kernel` to a model, or to models of this type that are loaded later."
    vars(apply)["__signature__"] = order  # which LLaMA-Factory and ms-swift read
    return apply


def apply_to_type(model_type: str, **options: Any) -> None:
    """``_apply_liger_kernel``: to the models of a type that are loaded later."""
    apply_liger_kernel(model_types=(model_type,), **options)


class AutoLigerKernelForCausalLM(AutoLigerModelForCausalLM):
    """transformers' ``AutoModelForCausalLM``, patched on load, with :func:`apply_liger_kernel`'s options."""

    @classmethod
    def _load(cls, method: str, *args: Any, **kwargs: Any) -> Any:
        names = {"cross_entropy", *(name for theirs in _KERNELS.values() for name in theirs)}
        others = {name: value for name, value in kwargs.items() if name not in names}
        return super()._load(method, *args, **{**others, "patch_options": _patch_options(kwargs)})
