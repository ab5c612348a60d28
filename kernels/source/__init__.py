"""Chunked loss heads for LLM post-training, and the kernels of the layers below them, without dependencies."""

from liger_losses import functional, layers
from liger_losses.chunked import (
    EngineOptions,
    Head,
    Statistics,
    Teacher,
    TeacherLogits,
    TeacherTopK,
    TokenSupport,
    linear_divergence,
    linear_divergence_loss,
    linear_logps,
    linear_statistics,
    linear_token_loss,
    set_default_workspace,
    workspace,
)
from liger_losses.chunked.losses.base import ChunkedLoss
from liger_losses.chunked.losses.completion_loss import Completions
from liger_losses.chunked.losses.cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_losses.chunked.losses.distillation import (
    DistillationLoss,
    LigerFusedLinearAlphaBetaLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLLoss,
    LigerFusedLinearMiniLLMLoss,
    LigerFusedLinearReverseKLLoss,
    LigerFusedLinearTVDLoss,
)
from liger_losses.chunked.losses.dpo import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_losses.chunked.losses.pairs import PreferenceLoss
from liger_losses.chunked.losses.policy import LigerFusedLinearGRPOLoss
from liger_losses.chunked.losses.unpaired import LigerFusedLinearBCOLoss, LigerFusedLinearKTOLoss
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.layers.glu import glu, glu_fused, glu_linear, glu_mlp
from liger_losses.layers.layer_norm import layer_norm
from liger_losses.layers.rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from liger_losses.layers.rope import rope

__all__ = [
    "ChunkedLoss",
    "Completions",
    "DistillationLoss",
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
    "PreferenceLoss",
    "Statistics",
    "Teacher",
    "TeacherLogits",
    "TeacherTopK",
    "TokenSupport",
    "add_rms_norm",
    "functional",
    "gated_rms_norm",
    "glu",
    "glu_fused",
    "glu_linear",
    "glu_mlp",
    "layer_norm",
    "layers",
    "linear_divergence",
    "linear_divergence_loss",
    "linear_logps",
    "linear_statistics",
    "linear_token_loss",
    "rms_norm",
    "rope",
    "set_default_workspace",
    "workspace",
]
