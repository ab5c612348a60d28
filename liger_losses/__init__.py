"""Chunked loss heads for LLM post-training: exact losses on ``lm_head`` without the logits."""

import importlib
from typing import Any

__version__ = "1.0.0rc1"

#: The names of each module. It is imported when one of them is first read, so that ``import liger_losses`` takes no
#: longer than ``import torch``. Type checkers and editors read them in __init__.pyi.
_MODULES = {
    "chunked.assertions": "assert_no_logits",
    "chunked": (
        "EngineOptions Head Largest QuantizedWeight Statistics Teacher TeacherLogits TeacherTopK "
        "Teachers TokenSupport linear_divergence linear_divergence_loss linear_labels_loss linear_logps "
        "linear_statistics linear_token_loss linear_topk projected_teacher register_quantized_weight "
        "register_statistic set_default_workspace workspace"
    ),
    "chunked.losses.base": "ChunkedLoss",
    "chunked.losses.columns": "teacher_topk",
    "chunked.losses.batches": "AdaptiveEntropy",
    "chunked.losses.completion_loss": "Completions",
    "chunked.losses.cross_entropy": "CrossEntropyOutput LigerFusedLinearCrossEntropyLoss ManyHeadsMetrics",
    "chunked.losses.distillation": (
        "DistillationLoss DistillationMetrics LigerFusedLinearAlphaBetaLoss LigerFusedLinearCosineSimilarityLoss "
        "LigerFusedLinearJSDLoss LigerFusedLinearKLLoss LigerFusedLinearReverseKLLoss LigerFusedLinearTVDLoss"
    ),
    "chunked.losses.dpo": "LigerFusedLinearDPOLoss",
    "chunked.losses.minillm": "LigerFusedLinearMiniLLMLoss",
    "chunked.losses.pairs": "Pairs PreferenceLoss PreferenceMetrics",
    "chunked.losses.policy": "LigerFusedLinearGRPOLoss PolicyMetrics PolicyMetricsWithoutKL",
    "chunked.losses.reference_free": (
        "LigerFusedLinearCPOLoss LigerFusedLinearORPOLoss LigerFusedLinearSimPOLoss ORPOMetrics"
    ),
    "chunked.losses.registration": "register_divergence register_objective",
    "chunked.losses.unpaired": "LigerFusedLinearBCOLoss LigerFusedLinearKTOLoss UnpairedMetrics",
    "chunked.teacher_files": "TeacherFiles TeacherWriter",
    "kernels.divergence_forms": "Divergence",
    "kernels.logit_transform": "LogitTransform",
    "patching.loss_inputs": "LossInputs loss_inputs",
    "patching.patch": "AutoLigerModelForCausalLM patch unpatch",
    "patching.report": "PatchReport",
    "prompts.attention": "CannotShareError",
    "prompts.packing": "PackedCompletions pack_completions pack_sequences",
    "sequences": "split_by_coefficient",
}

_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}
_SUBMODULES = ("functional", "modules", "trl", "chunked", "kernels", "layers", "patching", "prompts")

__all__ = sorted([*_WHERE, "functional"])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        hint = f"; call {__name__}.trl.{name}()" if name in ("enable", "disable", "enabled") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_SUBMODULES})
