"""liger-kernel's ``apply_liger_kernel_to_...`` functions, answered by :func:`liger_losses.patch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from liger_losses.integrations.loading import patch_loaded_models
from liger_losses.patching.patch import patch
from liger_losses.patching.report import PatchReport


def apply_liger_kernel(
    model: nn.Module | None = None,
    *,
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model_type: str | None = None,
    **others: Any,
) -> PatchReport | None:
    """Patch a model, or every model of a type that transformers loads from now on.

    Args:
        model: the model.
        rope: replace rotary position embedding.
        cross_entropy: no effect: the head's lazy logits serve every loss.
        fused_linear_cross_entropy: make the output embedding return lazy logits.
        rms_norm: replace normalizations; ``layer_norm`` is another word for it.
        swiglu: replace gated MLPs; ``geglu`` is another word for it.
        model_type: without a model, the ``config.model_type`` of those to patch (or the
            beginning of it: liger-kernel patches ``glm`` by ``glm4``); all by default.
        others: liger-kernel's further options, which have no effect.

    Returns:
        What was replaced; ``None`` without a model.
    """
    options: dict[str, Any] = {
        "loss_head": fused_linear_cross_entropy,
        "norms": rms_norm and others.get("layer_norm", True),
        "mlps": swiglu and others.get("geglu", True),
        "rope": rope,
    }
    if model is not None:
        return patch(model, **options)

    def options_of(loaded: nn.Module) -> dict[str, Any] | None:
        found = str(getattr(getattr(loaded, "config", None), "model_type", None))
        fits = model_type is None or found.startswith(model_type) or model_type.startswith(found)
        return options if fits else None

    patch_loaded_models(options_of)
    return None


def apply_to(model_type: str) -> Callable[..., None]:
    """``apply_liger_kernel_to_<model type>``, with liger-kernel's arguments."""

    def apply(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        model: nn.Module | None = None,
        **others: Any,
    ) -> None:
        apply_liger_kernel(
            model,
            rope=rope,
            cross_entropy=cross_entropy,
            fused_linear_cross_entropy=fused_linear_cross_entropy,
            rms_norm=rms_norm,
            swiglu=swiglu,
            model_type=model_type,
            **others,
        )

    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{model_type}"
    apply.__doc__ = ":func:`apply_liger_kernel` to a model, or to those of this type that are loaded later."
    return apply


def apply_to_type(model_type: str, **options: Any) -> None:
    """``_apply_liger_kernel``: to the models of a type that are loaded later."""
    apply_liger_kernel(model_type=model_type, **options)


def apply_to_instance(model: nn.Module, **options: Any) -> None:
    """``_apply_liger_kernel_to_instance``, which transformers' Trainer calls with ``use_liger_kernel=True``."""
    apply_liger_kernel(model, **options)
