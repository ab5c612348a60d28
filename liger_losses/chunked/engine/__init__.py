"""Hidden states -> per-token statistics and gradients: the only code that sees logits."""

from liger_losses.chunked.engine.divergence_ops import linear_divergence, linear_divergence_loss
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.ops import (
    linear_labels_loss,
    linear_logps,
    linear_statistics,
    linear_token_loss,
    linear_topk,
)
from liger_losses.chunked.engine.plan import EngineOptions
from liger_losses.chunked.engine.quantized_kinds import register_quantized_weight
from liger_losses.chunked.engine.query import Largest, Statistics, register_statistic
from liger_losses.chunked.engine.support import TokenSupport
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits, Teachers, TeacherTopK, projected_teacher
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.chunked.engine.weights import QuantizedWeight

__all__ = [
    "EngineOptions",
    "Head",
    "Largest",
    "QuantizedWeight",
    "Statistics",
    "Teacher",
    "TeacherLogits",
    "TeacherTopK",
    "Teachers",
    "TokenSupport",
    "Tokens",
    "linear_divergence",
    "linear_divergence_loss",
    "linear_labels_loss",
    "linear_logps",
    "linear_statistics",
    "linear_token_loss",
    "linear_topk",
    "projected_teacher",
    "register_quantized_weight",
    "register_statistic",
]
