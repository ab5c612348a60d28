"""Which of liger-kernel's names this library replaces, and by what."""

from __future__ import annotations

from typing import Any

import liger_losses
from liger_losses.integrations.liger import chunked, losses, models
from liger_losses.integrations.liger.call_forms import function_class

#: The middle of the names ``LigerFusedLinear...Loss`` where the module of ``chunked_loss`` has another name.
_MODULES = {"CosineSimilarity": "cosine_similarity"}
#: Autograd functions of ``liger_kernel.ops``: the module, the middle of their names, and what replaces ``apply``.
_OPS: tuple[tuple[str, str, Any], ...] = (
    ("fused_linear_cross_entropy", "FusedLinearCrossEntropy", losses.apply_fused_linear_cross_entropy),
    ("fused_linear_scaled_cross_entropy", "FusedLinearScaledCrossEntropy", losses.scaled_cross_entropy),
    ("fused_linear_scaled_cross_entropy", "FusedLinearScaledCrossEntropyTP", losses.scaled_cross_entropy_tp),
    ("fused_linear_jsd", "FusedLinearJSD", losses.fused_linear_jsd),
    ("cross_entropy", "CrossEntropy", losses.apply_cross_entropy),
    ("jsd", "JSD", losses.mean_jsd),
    ("kl_div", "KLDivLoss", losses.kl_div),
    ("tvd", "TVDLoss", losses.total_variation),
)
#: Of ``liger_kernel.transformers``: by name, the module that defines it, and what replaces it.
_TRANSFORMERS: tuple[tuple[str, Any], ...] = (
    ("fused_linear_cross_entropy", liger_losses.LigerFusedLinearCrossEntropyLoss),
    ("cross_entropy", losses.LigerCrossEntropyLoss),
    ("fused_linear_jsd", losses.LigerFusedLinearJSD),
    ("jsd", losses.LigerJSD),
    ("kl_div", losses.LigerKLDIVLoss),
    ("tvd", losses.LigerTVDLoss),
    ("grpo_loss", losses.triton_grpo_loss),
    ("auto_model", models.AutoLigerKernelForCausalLM),
)
_FUNCTIONAL: dict[str, Any] = {
    "CrossEntropyOutput": liger_losses.CrossEntropyOutput,
    "liger_fused_linear_cross_entropy": losses.fused_linear_cross_entropy,
    "liger_fused_linear_scaled_cross_entropy_tp": losses.scaled_cross_entropy_tp,
    "liger_fused_linear_jsd": losses.fused_linear_jsd,
    "liger_cross_entropy": losses.cross_entropy,
    "liger_jsd": losses.mean_jsd,
    "liger_kl_div": losses.functional_kl_div,
    "liger_tvd": losses.functional_tvd,
}
_MONKEY_PATCH = {
    "_apply_liger_kernel": models.apply_to_type,
    "_apply_liger_kernel_to_instance": models.apply_liger_kernel,  # transformers' Trainer calls it
}


def _replacements() -> dict[str, dict[str, Any]]:
    names: dict[str, dict[str, Any]] = {"liger_kernel.transformers.functional": _FUNCTIONAL}

    def add(package: str, module: str, name: str, value: Any) -> None:
        for where in (f"liger_kernel.{package}", f"liger_kernel.{package}.{module}"):
            names.setdefault(where, {})[name] = value

    for middle, apply in chunked.CHUNKED.items():
        module, function = _MODULES.get(middle, middle.lower()), f"LigerFusedLinear{middle}Function"
        add("chunked_loss", f"{module}_loss", f"LigerFusedLinear{middle}Loss", chunked.LOSSES[middle])
        names[f"liger_kernel.chunked_loss.{module}_loss"][function] = function_class(function, apply)
        functional = names.setdefault("liger_kernel.chunked_loss.functional", {})
        functional[f"liger_fused_linear_{module.partition('_')[0]}"] = apply
    for module, middle, apply in _OPS:
        add("ops", module, f"Liger{middle}Function", function_class(f"Liger{middle}Function", apply))
    for module, value in _TRANSFORMERS:
        add("transformers", module, value.__name__, value)
    for name, value in _MONKEY_PATCH.items():
        add("transformers", "monkey_patch", name, value)
    return names


#: By module of liger-kernel, by name.
REPLACEMENTS = _replacements()
