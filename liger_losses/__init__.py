"""Chunked loss heads for LLM post-training: exact losses on ``lm_head`` without the logits."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _MODULES, for type checkers and editors; a test compares both
    from liger_losses import functional as functional
    from liger_losses import modules as modules
    from liger_losses import trl as trl
    from liger_losses.chunked import EngineOptions as EngineOptions
    from liger_losses.chunked import Head as Head
    from liger_losses.chunked import Largest as Largest
    from liger_losses.chunked import QuantizedWeight as QuantizedWeight
    from liger_losses.chunked import Statistics as Statistics
    from liger_losses.chunked import Teacher as Teacher
    from liger_losses.chunked import TeacherLogits as TeacherLogits
    from liger_losses.chunked import Teachers as Teachers
    from liger_losses.chunked import TeacherTopK as TeacherTopK
    from liger_losses.chunked import TokenSupport as TokenSupport
    from liger_losses.chunked import linear_divergence as linear_divergence
    from liger_losses.chunked import linear_divergence_loss as linear_divergence_loss
    from liger_losses.chunked import linear_labels_loss as linear_labels_loss
    from liger_losses.chunked import linear_logps as linear_logps
    from liger_losses.chunked import linear_statistics as linear_statistics
    from liger_losses.chunked import linear_token_loss as linear_token_loss
    from liger_losses.chunked import linear_topk as linear_topk
    from liger_losses.chunked import projected_teacher as projected_teacher
    from liger_losses.chunked import register_quantized_weight as register_quantized_weight
    from liger_losses.chunked import register_statistic as register_statistic
    from liger_losses.chunked import set_default_workspace as set_default_workspace
    from liger_losses.chunked import workspace as workspace
    from liger_losses.chunked.assertions import assert_no_logits as assert_no_logits
    from liger_losses.chunked.losses.base import ChunkedLoss as ChunkedLoss
    from liger_losses.chunked.losses.completion_loss import Completions as Completions
    from liger_losses.chunked.losses.cross_entropy import CrossEntropyOutput as CrossEntropyOutput
    from liger_losses.chunked.losses.cross_entropy import (
        LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss,
    )
    from liger_losses.chunked.losses.cross_entropy import ManyHeadsMetrics as ManyHeadsMetrics
    from liger_losses.chunked.losses.distillation import DistillationLoss as DistillationLoss
    from liger_losses.chunked.losses.distillation import DistillationMetrics as DistillationMetrics
    from liger_losses.chunked.losses.distillation import LigerFusedLinearAlphaBetaLoss as LigerFusedLinearAlphaBetaLoss
    from liger_losses.chunked.losses.distillation import (
        LigerFusedLinearCosineSimilarityLoss as LigerFusedLinearCosineSimilarityLoss,
    )
    from liger_losses.chunked.losses.distillation import LigerFusedLinearJSDLoss as LigerFusedLinearJSDLoss
    from liger_losses.chunked.losses.distillation import LigerFusedLinearKLLoss as LigerFusedLinearKLLoss
    from liger_losses.chunked.losses.distillation import LigerFusedLinearMiniLLMLoss as LigerFusedLinearMiniLLMLoss
    from liger_losses.chunked.losses.distillation import LigerFusedLinearReverseKLLoss as LigerFusedLinearReverseKLLoss
    from liger_losses.chunked.losses.distillation import LigerFusedLinearTVDLoss as LigerFusedLinearTVDLoss
    from liger_losses.chunked.losses.dpo import LigerFusedLinearCPOLoss as LigerFusedLinearCPOLoss
    from liger_losses.chunked.losses.dpo import LigerFusedLinearDPOLoss as LigerFusedLinearDPOLoss
    from liger_losses.chunked.losses.dpo import LigerFusedLinearORPOLoss as LigerFusedLinearORPOLoss
    from liger_losses.chunked.losses.dpo import LigerFusedLinearSimPOLoss as LigerFusedLinearSimPOLoss
    from liger_losses.chunked.losses.dpo import ORPOMetrics as ORPOMetrics
    from liger_losses.chunked.losses.pairs import Pairs as Pairs
    from liger_losses.chunked.losses.pairs import PreferenceLoss as PreferenceLoss
    from liger_losses.chunked.losses.pairs import PreferenceMetrics as PreferenceMetrics
    from liger_losses.chunked.losses.policy import AdaptiveEntropy as AdaptiveEntropy
    from liger_losses.chunked.losses.policy import LigerFusedLinearGRPOLoss as LigerFusedLinearGRPOLoss
    from liger_losses.chunked.losses.policy import PolicyMetrics as PolicyMetrics
    from liger_losses.chunked.losses.policy import PolicyMetricsWithoutKL as PolicyMetricsWithoutKL
    from liger_losses.chunked.losses.registration import register_divergence as register_divergence
    from liger_losses.chunked.losses.registration import register_objective as register_objective
    from liger_losses.chunked.losses.softmax_divergences import teacher_topk as teacher_topk
    from liger_losses.chunked.losses.unpaired import LigerFusedLinearBCOLoss as LigerFusedLinearBCOLoss
    from liger_losses.chunked.losses.unpaired import LigerFusedLinearKTOLoss as LigerFusedLinearKTOLoss
    from liger_losses.chunked.losses.unpaired import UnpairedMetrics as UnpairedMetrics
    from liger_losses.chunked.teacher_files import TeacherFiles as TeacherFiles
    from liger_losses.chunked.teacher_files import TeacherWriter as TeacherWriter
    from liger_losses.kernels.divergence_forms import Divergence as Divergence
    from liger_losses.kernels.logit_transform import LogitTransform as LogitTransform
    from liger_losses.patching.loss_inputs import LossInputs as LossInputs
    from liger_losses.patching.loss_inputs import loss_inputs as loss_inputs
    from liger_losses.patching.patch import AutoLigerModelForCausalLM as AutoLigerModelForCausalLM
    from liger_losses.patching.patch import patch as patch
    from liger_losses.patching.patch import unpatch as unpatch
    from liger_losses.patching.report import PatchReport as PatchReport
    from liger_losses.prompts.attention import CannotShareError as CannotShareError
    from liger_losses.prompts.packing import PackedCompletions as PackedCompletions
    from liger_losses.prompts.packing import pack_completions as pack_completions
    from liger_losses.prompts.packing import pack_sequences as pack_sequences
    from liger_losses.sequences import split_by_coefficient as split_by_coefficient

__version__ = "1.0.0rc2"

#: The names of each module. It is imported when one of them is first read, so that ``import liger_losses`` takes no
#: longer than ``import torch``.
_MODULES = {
    "chunked.assertions": "assert_no_logits",
    "chunked": (
        "EngineOptions Head Largest QuantizedWeight Statistics Teacher TeacherLogits TeacherTopK "
        "Teachers TokenSupport linear_divergence linear_divergence_loss linear_labels_loss linear_logps "
        "linear_statistics linear_token_loss linear_topk projected_teacher register_quantized_weight "
        "register_statistic set_default_workspace workspace"
    ),
    "chunked.losses.base": "ChunkedLoss",
    "chunked.losses.softmax_divergences": "teacher_topk",
    "chunked.losses.completion_loss": "Completions",
    "chunked.losses.cross_entropy": "CrossEntropyOutput LigerFusedLinearCrossEntropyLoss ManyHeadsMetrics",
    "chunked.losses.distillation": (
        "DistillationLoss DistillationMetrics LigerFusedLinearAlphaBetaLoss LigerFusedLinearCosineSimilarityLoss "
        "LigerFusedLinearJSDLoss LigerFusedLinearKLLoss LigerFusedLinearMiniLLMLoss LigerFusedLinearReverseKLLoss "
        "LigerFusedLinearTVDLoss"
    ),
    "chunked.losses.dpo": (
        "LigerFusedLinearCPOLoss LigerFusedLinearDPOLoss LigerFusedLinearORPOLoss LigerFusedLinearSimPOLoss ORPOMetrics"
    ),
    "chunked.losses.pairs": "Pairs PreferenceLoss PreferenceMetrics",
    "chunked.losses.policy": "AdaptiveEntropy LigerFusedLinearGRPOLoss PolicyMetrics PolicyMetricsWithoutKL",
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
    return sorted({*__all__, *_SUBMODULES, "__version__"})
