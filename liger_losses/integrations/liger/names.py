"""Which of liger-kernel's names this library replaces, and by what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import liger_losses
from liger_losses.integrations.liger import chunked, losses, models, score_centering


def _function(middle: str, apply: Callable[..., Any]) -> dict[str, type]:
    """A class with the ``apply`` of an autograd function, by its name."""
    name = f"Liger{middle}Function"
    return {name: type(name, (), {"apply": staticmethod(apply), "__doc__": apply.__doc__})}


def _named(*objects: Any) -> dict[str, Any]:
    return {each.__name__: each for each in objects}


#: The middle of the names ``LigerFusedLinear...Loss`` where the module of ``chunked_loss`` has another name.
_MODULES = {"CosineSimilarity": "cosine_similarity"}
#: Outside of ``chunked_loss``: by module, its names, which its package has too.
_OTHERS: dict[str, dict[str, Any]] = {
    "ops.fused_linear_cross_entropy": _function("FusedLinearCrossEntropy", losses.apply_fused_linear_cross_entropy),
    "ops.fused_linear_scaled_cross_entropy": _function("FusedLinearScaledCrossEntropy", losses.scaled_cross_entropy)
    | _function("FusedLinearScaledCrossEntropyTP", losses.scaled_cross_entropy_tp),
    "ops.fused_linear_jsd": _function("FusedLinearJSD", losses.fused_linear_jsd),
    "ops.fused_linear_kl_div": _function("FusedLinearKLDiv", losses.fused_linear_kl_div),
    "ops.fused_linear_score_centering": _named(
        score_centering.ISCorrection, score_centering.fused_linear_score_centering
    ),
    "transformers.fused_linear_score_centering": _named(
        score_centering.ISCorrection, score_centering.LigerFusedLinearScoreCenteringLoss
    ),
    "transformers.fused_linear_cross_entropy": _named(liger_losses.LigerFusedLinearCrossEntropyLoss),
    "transformers.fused_linear_jsd": _named(losses.LigerFusedLinearJSD),
    "transformers.fused_linear_kl_div": _named(losses.LigerFusedLinearKLDivLoss),
    "transformers.auto_model": _named(models.AutoLigerKernelForCausalLM),
    "transformers.monkey_patch": {
        "_apply_liger_kernel": models.apply_to_type,
        "_apply_liger_kernel_to_instance": models.apply_liger_kernel,  # transformers' Trainer calls it
    },
}
_FUNCTIONAL: dict[str, Any] = {
    "CrossEntropyOutput": liger_losses.CrossEntropyOutput,
    "liger_fused_linear_cross_entropy": losses.fused_linear_cross_entropy,
    "liger_fused_linear_scaled_cross_entropy_tp": losses.scaled_cross_entropy_tp,
    "liger_fused_linear_jsd": losses.fused_linear_jsd,
    "liger_fused_linear_kl_div": losses.fused_linear_kl_div,
    "liger_fused_linear_score_centering": score_centering.fused_linear_score_centering,
}
#: The functions of ``liger_kernel.functional`` that take hidden states.
_DISPATCHED: dict[str, Any] = {
    "fused_linear_cross_entropy": losses.apply_fused_linear_cross_entropy,
    "fused_linear_jsd": losses.dispatched_jsd,
}


def _replacements() -> dict[str, dict[str, Any]]:
    names = {"liger_kernel.transformers.functional": _FUNCTIONAL, "liger_kernel.functional": _DISPATCHED}

    def add(values: dict[str, Any], *modules: str) -> None:
        for module in modules:
            names.setdefault(f"liger_kernel.{module}", {}).update(values)

    for middle, apply in chunked.CHUNKED.items():
        module = f"{_MODULES.get(middle, middle.lower())}_loss"
        add({f"LigerFusedLinear{middle}Loss": chunked.LOSSES[middle]}, "chunked_loss", f"chunked_loss.{module}")
        add(_function(f"FusedLinear{middle}", apply), f"chunked_loss.{module}")
        add({f"liger_fused_linear_{module.partition('_')[0]}": apply}, "chunked_loss.functional")
    for module, values in _OTHERS.items():
        add(values, module.partition(".")[0], module)
    return names


#: By module of liger-kernel, by name.
REPLACEMENTS = _replacements()
