"""Chunked loss heads for LLM post-training: exact losses on ``lm_head`` without the logits."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_losses import functional
    from liger_losses import modules as modules
    from liger_losses import trl as trl
    from liger_losses.chunked.engine import (
        EngineOptions,
        Largest,
        QuantizedWeight,
        Statistics,
        Teacher,
        TeacherFiles,
        TeacherLogits,
        Teachers,
        TeacherTopK,
        TeacherWriter,
        TokenSupport,
        linear_divergence,
        linear_divergence_loss,
        linear_labels_loss,
        linear_logps,
        linear_statistics,
        linear_token_loss,
        linear_topk,
        projected_teacher,
        register_quantized_weight,
        register_statistic,
    )
    from liger_losses.chunked.engine.head import Head
    from liger_losses.chunked.engine.workspace import set_default_workspace, workspace
    from liger_losses.chunked.losses.base import ChunkedLoss
    from liger_losses.chunked.losses.columns import teacher_topk
    from liger_losses.chunked.losses.completion_loss import Completions
    from liger_losses.chunked.losses.cross_entropy import (
        CrossEntropyOutput,
        LigerFusedLinearCrossEntropyLoss,
        ManyHeadsMetrics,
    )
    from liger_losses.chunked.losses.distillation import (
        DistillationLoss,
        DistillationMetrics,
        LigerFusedLinearAlphaBetaLoss,
        LigerFusedLinearCosineSimilarityLoss,
        LigerFusedLinearJSDLoss,
        LigerFusedLinearKLLoss,
        LigerFusedLinearReverseKLLoss,
        LigerFusedLinearTVDLoss,
    )
    from liger_losses.chunked.losses.dpo import LigerFusedLinearDPOLoss
    from liger_losses.chunked.losses.minillm import LigerFusedLinearMiniLLMLoss
    from liger_losses.chunked.losses.pairs import Pairs, PreferenceLoss, PreferenceMetrics
    from liger_losses.chunked.losses.policy import (
        AdaptiveEntropy,
        LigerFusedLinearGRPOLoss,
        PolicyMetrics,
        PolicyMetricsWithoutKL,
    )
    from liger_losses.chunked.losses.reference_free import (
        LigerFusedLinearCPOLoss,
        LigerFusedLinearORPOLoss,
        LigerFusedLinearSimPOLoss,
        ORPOMetrics,
    )
    from liger_losses.chunked.losses.registration import register_divergence, register_objective
    from liger_losses.chunked.losses.unpaired import LigerFusedLinearBCOLoss, LigerFusedLinearKTOLoss, UnpairedMetrics
    from liger_losses.kernels.divergence_forms import Divergence
    from liger_losses.kernels.logit_transform import LogitTransform
    from liger_losses.patching.loss_inputs import LossInputs, loss_inputs
    from liger_losses.patching.patch import AutoLigerModelForCausalLM, patch, unpatch
    from liger_losses.patching.report import PatchReport
    from liger_losses.sequences import split_by_coefficient

__version__ = "1.0.0rc1"

__all__ = [
    "AdaptiveEntropy",
    "AutoLigerModelForCausalLM",
    "ChunkedLoss",
    "Completions",
    "CrossEntropyOutput",
    "DistillationLoss",
    "DistillationMetrics",
    "Divergence",
    "EngineOptions",
    "Head",
    "Largest",
    "LigerFusedLinearAlphaBetaLoss",
    "LigerFusedLinearBCOLoss",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKLLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearMiniLLMLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearReverseKLLoss",
    "LigerFusedLinearSimPOLoss",
    "LigerFusedLinearTVDLoss",
    "LogitTransform",
    "LossInputs",
    "ManyHeadsMetrics",
    "ORPOMetrics",
    "Pairs",
    "PatchReport",
    "PolicyMetrics",
    "PolicyMetricsWithoutKL",
    "PreferenceLoss",
    "PreferenceMetrics",
    "QuantizedWeight",
    "Statistics",
    "Teacher",
    "TeacherFiles",
    "TeacherLogits",
    "TeacherTopK",
    "TeacherWriter",
    "Teachers",
    "TokenSupport",
    "UnpairedMetrics",
    "functional",
    "linear_divergence",
    "linear_divergence_loss",
    "linear_labels_loss",
    "linear_logps",
    "linear_statistics",
    "linear_token_loss",
    "linear_topk",
    "loss_inputs",
    "patch",
    "projected_teacher",
    "register_divergence",
    "register_objective",
    "register_quantized_weight",
    "register_statistic",
    "set_default_workspace",
    "split_by_coefficient",
    "teacher_topk",
    "unpatch",
    "workspace",
]

#: The names of each module. It is imported when one of them is first read, so that ``import liger_losses`` takes no
#: longer than ``import torch``.
_MODULES = {
    "chunked.engine": (
        "EngineOptions Largest QuantizedWeight Statistics Teacher TeacherFiles TeacherLogits Teachers TeacherTopK "
        "TeacherWriter TokenSupport linear_divergence linear_divergence_loss linear_labels_loss linear_logps "
        "linear_statistics linear_token_loss linear_topk projected_teacher register_quantized_weight "
        "register_statistic"
    ),
    "chunked.engine.head": "Head",
    "chunked.engine.workspace": "set_default_workspace workspace",
    "chunked.losses.base": "ChunkedLoss",
    "chunked.losses.columns": "teacher_topk",
    "chunked.losses.completion_loss": "Completions",
    "chunked.losses.cross_entropy": "CrossEntropyOutput LigerFusedLinearCrossEntropyLoss ManyHeadsMetrics",
    "chunked.losses.distillation": (
        "DistillationLoss DistillationMetrics LigerFusedLinearAlphaBetaLoss LigerFusedLinearCosineSimilarityLoss "
        "LigerFusedLinearJSDLoss LigerFusedLinearKLLoss LigerFusedLinearReverseKLLoss LigerFusedLinearTVDLoss"
    ),
    "chunked.losses.dpo": "LigerFusedLinearDPOLoss",
    "chunked.losses.minillm": "LigerFusedLinearMiniLLMLoss",
    "chunked.losses.pairs": "Pairs PreferenceLoss PreferenceMetrics",
    "chunked.losses.policy": "AdaptiveEntropy LigerFusedLinearGRPOLoss PolicyMetrics PolicyMetricsWithoutKL",
    "chunked.losses.reference_free": (
        "LigerFusedLinearCPOLoss LigerFusedLinearORPOLoss LigerFusedLinearSimPOLoss ORPOMetrics"
    ),
    "chunked.losses.registration": "register_divergence register_objective",
    "chunked.losses.unpaired": "LigerFusedLinearBCOLoss LigerFusedLinearKTOLoss UnpairedMetrics",
    "kernels.divergence_forms": "Divergence",
    "kernels.logit_transform": "LogitTransform",
    "patching.loss_inputs": "LossInputs loss_inputs",
    "patching.patch": "AutoLigerModelForCausalLM patch unpatch",
    "patching.report": "PatchReport",
    "sequences": "split_by_coefficient",
}

_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}
_SUBMODULES = ("functional", "modules", "trl", "chunked", "kernels", "patching")

if not TYPE_CHECKING:  # a type checker would take any name

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
