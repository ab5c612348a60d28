"""Which of liger-kernel's names this library answers, and by what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import liger_losses
from liger_losses.integrations.liger import chunked, linear, logits, models, probabilities

#: Modules of ``chunked_loss``, and the middle of the names that they define.
_CHUNKED = {
    "dpo_loss": "DPO",
    "orpo_loss": "ORPO",
    "cpo_loss": "CPO",
    "simpo_loss": "SimPO",
    "kto_loss": "KTO",
    "grpo_loss": "GRPO",
    "jsd_loss": "JSD",
    "cosine_similarity_loss": "CosineSimilarity",
}
#: Functions of ``liger_kernel.ops``: the module, the name, and what answers ``apply``.
_OPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("fused_linear_cross_entropy", "FusedLinearCrossEntropy", linear.apply_fused_linear_cross_entropy),
    ("fused_linear_scaled_cross_entropy", "FusedLinearScaledCrossEntropy", linear.scaled_cross_entropy),
    ("fused_linear_scaled_cross_entropy", "FusedLinearScaledCrossEntropyTP", linear.scaled_cross_entropy_tp),
    ("fused_linear_jsd", "FusedLinearJSD", linear.fused_linear_jsd),
    ("cross_entropy", "CrossEntropy", logits.apply_cross_entropy),
    ("jsd", "JSD", probabilities.mean_jsd),
    ("kl_div", "KLDivLoss", probabilities.kl_div),
    ("tvd", "TVDLoss", probabilities.total_variation),
)
#: Of ``liger_kernel.transformers``: the module that defines a name, the name, and what answers it. Names of functions
#: are in ``functional``.
_TRANSFORMERS: tuple[tuple[str, str, Any], ...] = (
    (
        "fused_linear_cross_entropy",
        "LigerFusedLinearCrossEntropyLoss",
        liger_losses.LigerFusedLinearCrossEntropyLoss,
    ),
    ("cross_entropy", "LigerCrossEntropyLoss", logits.LigerCrossEntropyLoss),
    ("fused_linear_jsd", "LigerFusedLinearJSD", linear.LigerFusedLinearJSD),
    ("jsd", "LigerJSD", probabilities.LigerJSD),
    ("kl_div", "LigerKLDIVLoss", probabilities.LigerKLDIVLoss),
    ("tvd", "LigerTVDLoss", probabilities.LigerTVDLoss),
    ("grpo_loss", "triton_grpo_loss", logits.triton_grpo_loss),
    ("functional", "CrossEntropyOutput", liger_losses.CrossEntropyOutput),
    ("functional", "liger_fused_linear_cross_entropy", linear.fused_linear_cross_entropy),
    ("functional", "liger_fused_linear_scaled_cross_entropy_tp", linear.scaled_cross_entropy_tp),
    ("functional", "liger_fused_linear_jsd", linear.fused_linear_jsd),
    ("functional", "liger_cross_entropy", logits.cross_entropy),
    ("functional", "liger_jsd", probabilities.mean_jsd),
    ("functional", "liger_kl_div", probabilities.functional_kl_div),
    ("functional", "liger_tvd", probabilities.functional_tvd),
    ("monkey_patch", "_apply_liger_kernel", models.apply_to_type),
    ("monkey_patch", "_apply_liger_kernel_to_instance", models.apply_to_instance),
    ("auto_model", "AutoLigerKernelForCausalLM", models.AutoLigerKernelForCausalLM),
)


def _answers() -> dict[str, dict[str, Any]]:
    names: dict[str, dict[str, Any]] = {}

    def add(module: str, name: str, value: Any) -> None:
        package = module.rpartition(".")[0]
        names.setdefault(package, {})[name] = names.setdefault(module, {})[name] = value

    for module, middle in _CHUNKED.items():
        where, function = f"liger_kernel.chunked_loss.{module}", f"LigerFusedLinear{middle}Function"
        add(where, f"LigerFusedLinear{middle}Loss", chunked.LOSSES[middle])
        names[where][function] = chunked.function_class(function, chunked.CHUNKED[middle])
        short = "cosine" if middle == "CosineSimilarity" else middle.lower()
        functional = names.setdefault("liger_kernel.chunked_loss.functional", {})
        functional[f"liger_fused_linear_{short}"] = chunked.CHUNKED[middle]
    for module, middle, apply in _OPS:
        name = f"Liger{middle}Function"
        add(f"liger_kernel.ops.{module}", name, chunked.function_class(name, apply))
    for module, name, value in _TRANSFORMERS:
        if module == "functional":
            names.setdefault("liger_kernel.transformers.functional", {})[name] = value
        else:
            add(f"liger_kernel.transformers.{module}", name, value)
    return names


#: By module of liger-kernel, by name.
ANSWERS = _answers()
