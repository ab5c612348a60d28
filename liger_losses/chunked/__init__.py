"""The core, whose names these are, and the losses on it in :mod:`liger_losses.chunked.losses`."""

from liger_losses.chunked import accelerators  # noqa: F401  the core does not know them
from liger_losses.chunked.core.distilled import Teacher, TeacherLogits, Teachers, TeacherTopK, projected_teacher
from liger_losses.chunked.core.head import Head
from liger_losses.chunked.core.inputs import TokenSupport, shift_labels
from liger_losses.chunked.core.ops import (
    linear_divergence,
    linear_divergence_loss,
    linear_labels_loss,
    linear_logps,
    linear_statistics,
    linear_token_loss,
    linear_topk,
)
from liger_losses.chunked.core.options import EngineOptions, set_default_workspace, workspace
from liger_losses.chunked.core.quantizers import (
    GPTQRows,
    QuantizedWeight,
    find_quantized,
    is_quantized,
    register_quantized_weight,
)
from liger_losses.chunked.core.ranks import ALONE, Ranks
from liger_losses.chunked.core.statistics import Largest, Statistics, register_statistic

__all__ = [
    "ALONE",
    "EngineOptions",
    "GPTQRows",
    "Head",
    "Largest",
    "QuantizedWeight",
    "Ranks",
    "Statistics",
    "Teacher",
    "TeacherLogits",
    "TeacherTopK",
    "Teachers",
    "TokenSupport",
    "find_quantized",
    "is_quantized",
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
    "set_default_workspace",
    "shift_labels",
    "workspace",
]
