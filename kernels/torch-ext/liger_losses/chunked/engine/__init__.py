"""Hidden states -> per-token statistics and gradients: the only code that sees logits."""

from ...chunked.engine.call import EngineOptions, Statistics
from ...chunked.engine.head import Head
from ...chunked.engine.ops import (
    linear_divergence,
    linear_divergence_loss,
    linear_logps,
    linear_statistics,
    linear_token_loss,
)
from ...chunked.engine.quantized_kinds import register_quantized_weight
from ...chunked.engine.quantized_weight import QuantizedWeight
from ...chunked.engine.support import TokenSupport
from ...chunked.engine.teacher_files import TeacherFiles, TeacherWriter
from ...chunked.engine.teachers import Teacher, TeacherLogits, TeacherTopK
from ...chunked.engine.tokens import Tokens

__all__ = [
    "EngineOptions",
    "Head",
    "QuantizedWeight",
    "Statistics",
    "Teacher",
    "TeacherFiles",
    "TeacherLogits",
    "TeacherTopK",
    "TeacherWriter",
    "TokenSupport",
    "Tokens",
    "linear_divergence",
    "linear_divergence_loss",
    "linear_logps",
    "linear_statistics",
    "linear_token_loss",
    "register_quantized_weight",
]
