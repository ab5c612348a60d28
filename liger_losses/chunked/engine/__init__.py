"""Hidden states -> per-token statistics and gradients: the only code that sees logits."""

from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.ops import (
    EngineOptions,
    linear_logps,
    linear_statistics,
    linear_token_loss,
)
from liger_losses.chunked.engine.stream import Statistics
from liger_losses.chunked.engine.tokens import Tokens

__all__ = [
    "EngineOptions",
    "Head",
    "Statistics",
    "Tokens",
    "linear_logps",
    "linear_statistics",
    "linear_token_loss",
]
