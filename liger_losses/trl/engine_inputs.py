"""From what TRL's functions are given (lazy logits, ``lm_head`` weights) to what the engine takes (heads, teachers)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_losses.chunked.engine import Head, Teacher
from liger_losses.patching.lazy import DeferredLogits, LazyLogits

#: The label of tokens without loss, in TRL as in PyTorch.
IGNORE_INDEX = -100


def deferred_logits(logits: Any) -> DeferredLogits | None:
    """Hidden states and head of lazy logits; ``None`` for other tensors and for lazy logits that have values by now."""
    if not isinstance(logits, LazyLogits):
        return None
    logits.check()
    return logits.deferred if logits.materialized is None else None


def teacher_of(hidden_states: Tensor, head: Head) -> Teacher:
    """The teacher that has these hidden states ``[..., Ht]`` and this head."""
    return Teacher(hidden_states, head.weight, head.bias, head.transform.logit_scale, head.transform.softcap)
