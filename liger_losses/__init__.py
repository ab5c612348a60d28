"""Chunked loss heads for LLM post-training: exact losses on ``lm_head`` without the logits."""

from liger_losses import functional
from liger_losses.chunked.engine import (
    EngineOptions,
    QuantizedWeight,
    Statistics,
    Teacher,
    TeacherFiles,
    TeacherLogits,
    TeacherTopK,
    TeacherWriter,
    TokenSupport,
    linear_divergence,
    linear_divergence_loss,
    linear_logps,
    linear_statistics,
    linear_token_loss,
    register_quantized_weight,
)
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.workspace import set_default_workspace, workspace
from liger_losses.chunked.losses.base import ChunkedLoss
from liger_losses.chunked.losses.call_forms import Completions
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
from liger_losses.chunked.losses.unpaired import LigerFusedLinearBCOLoss, LigerFusedLinearKTOLoss, UnpairedMetrics
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.patching.loss_inputs import LossInputs, loss_inputs
from liger_losses.patching.patch import AutoLigerModelForCausalLM, patch, unpatch
from liger_losses.patching.report import PatchReport

__version__ = "0.1.0"

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
    "TokenSupport",
    "UnpairedMetrics",
    "functional",
    "linear_divergence",
    "linear_divergence_loss",
    "linear_logps",
    "linear_statistics",
    "linear_token_loss",
    "loss_inputs",
    "patch",
    "register_quantized_weight",
    "set_default_workspace",
    "unpatch",
    "workspace",
]
