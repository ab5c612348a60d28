"""Chunked loss heads for LLM post-training, and the kernels of the layers below them, without dependencies."""

from . import functional, layers
from .chunked.engine import (
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
)
from .chunked.engine.workspace import set_default_workspace, workspace
from .chunked.losses.base import ChunkedLoss
from .chunked.losses.call_forms import Completions
from .chunked.losses.cross_entropy import LigerFusedLinearCrossEntropyLoss
from .chunked.losses.distillation import (
    DistillationLoss,
    LigerFusedLinearAlphaBetaLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLLoss,
    LigerFusedLinearReverseKLLoss,
    LigerFusedLinearTVDLoss,
)
from .chunked.losses.dpo import LigerFusedLinearDPOLoss
from .chunked.losses.minillm import LigerFusedLinearMiniLLMLoss
from .chunked.losses.pairs import PreferenceLoss
from .chunked.losses.policy import LigerFusedLinearGRPOLoss
from .chunked.losses.reference_free import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from .chunked.losses.unpaired import LigerFusedLinearBCOLoss, LigerFusedLinearKTOLoss
from .kernels.divergence_forms import Divergence
from .kernels.glu import glu, glu_fused, glu_linear
from .kernels.layer_norm import layer_norm
from .kernels.logit_transform import LogitTransform
from .kernels.rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from .kernels.rope import rope

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
