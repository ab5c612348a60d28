"""Which of liger-kernel's names this library replaces, and by what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import liger_losses
from liger_losses.integrations.liger import chunked, losses, models

#: The middle of the names ``LigerFusedLinear...Loss`` where the module of ``chunked_loss`` has another name.
_MODULES = {"CosineSimilarity": "cosine_similarity"}
#: Autograd functions of ``liger_kernel.ops``: the module, the middle of their names, and what replaces ``apply``.
_OPS: tuple[tuple[str, str, Any], ...] = (
    ("fused_linear_cross_entropy", "FusedLinearCrossEntropy", losses.apply_fused_linear_cross_entropy),
    ("fused_linear_scaled_cross_entropy", "FusedLinearScaledCrossEntropy", losses.scaled_cross_entropy),
    ("fused_linear_scaled_cross_entropy", "FusedLinearScaledCrossEntropyTP", losses.scaled_cross_entropy_tp),
    ("fused_linear_jsd", "FusedLinearJSD", losses.fused_linear_jsd),
)
#: Of ``liger_kernel.transformers``: by module, its names, which the package has too.
_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "fused_linear_cross_entropy": {"LigerFusedLinearCrossEntropyLoss": liger_losses.LigerFusedLinearCrossEntropyLoss},
    "fused_linear_jsd": {"LigerFusedLinearJSD": losses.LigerFusedLinearJSD},
    "auto_model": {"AutoLigerKernelForCausalLM": models.AutoLigerKernelForCausalLM},
    "monkey_patch": {
        "_apply_liger_kernel": models.apply_to_type,
        "_apply_liger_kernel_to_instance": models.apply_liger_kernel,  # transformers' Trainer calls it
    },
}
_FUNCTIONAL: dict[str, Any] = {
    "CrossEntropyOutput": liger_losses.CrossEntropyOutput,
    "liger_fused_linear_cross_entropy": losses.fused_linear_cross_entropy,
    "liger_fused_linear_scaled_cross_entropy_tp": losses.scaled_cross_entropy_tp,
    "liger_fused_linear_jsd": losses.fused_linear_jsd,
}


def _function(middle: str, apply: Callable[..., Any]) -> dict[str, type]:
    """A class with the ``apply`` of an autograd function, by its name."""
    name = f"Liger{middle}Function"
    return {name: type(name, (), {"apply": staticmethod(apply), "__doc__": apply.__doc__})}


def _replacements() -> dict[str, dict[str, Any]]:
    names: dict[str, dict[str, Any]] = {"liger_kernel.transformers.functional": _FUNCTIONAL}

    def add(values: dict[str, Any], *modules: str) -> None:
        for module in modules:
            names.setdefault(f"liger_kernel.{module}", {}).update(values)

    for middle, apply in chunked.CHUNKED.items():
        module = f"{_MODULES.get(middle, middle.lower())}_loss"
        loss = {f"LigerFusedLinear{middle}Loss": chunked.LOSSES[middle]}
        add(loss, "chunked_loss", f"chunked_loss.{module}")
        add(_function(f"FusedLinear{middle}", apply), f"chunked_loss.{module}")
        add({f"liger_fused_linear_{module.partition('_')[0]}": apply}, "chunked_loss.functional")
    for module, middle, apply in _OPS:
        add(_function(middle, apply), "ops", f"ops.{module}")
    for module, values in _TRANSFORMERS.items():
        add(values, "transformers", f"transformers.{module}")
    return names


#: By module of liger-kernel, by name.
REPLACEMENTS = _replacements()
