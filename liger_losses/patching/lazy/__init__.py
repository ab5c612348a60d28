"""Lazy logits: logits that are computed when their values are needed, and often never are."""

from liger_losses.patching.lazy.tensor import (
    DeferredLogits,
    LazyLogits,
    allow_materialization,
    lazy_linear,
    true_values,
)

__all__ = ["DeferredLogits", "LazyLogits", "allow_materialization", "lazy_linear", "true_values"]
