"""From what TRL's functions are given (lazy logits, ``lm_head`` weights) to what the engine takes (heads, teachers)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.teachers import Teacher
from liger_losses.patching.lazy import DeferredLogits, LazyLogits

#: The label of tokens without loss, in TRL as in PyTorch.
IGNORE_INDEX = -100


def deferred_logits(logits: Any) -> DeferredLogits | None:
    """The hidden states and the head of lazy logits, if the engine can compute with them.

    Args:
        logits: what a model returned.

    Returns:
        ``None`` for other tensors, and for logits that were changed in a way that no :class:`Head` describes.
    """
    if not isinstance(logits, LazyLogits):
        return None
    logits.check()
    usable = logits.changed is None and logits.deferred.transform is not None
    return logits.deferred if usable else None


def head_of(deferred: DeferredLogits, temperature: float = 1.0) -> Head:
    """The head of lazy logits, with the scale and the soft-cap that the model applied, divided by a temperature."""
    assert deferred.transform is not None
    return Head(deferred.weight, deferred.bias, replace(deferred.transform, temperature=temperature))


def teacher_of(hidden_states: Tensor, head: Head) -> Teacher:
    """The teacher that has these hidden states ``[..., Ht]`` and this head."""
    return Teacher(hidden_states, head.weight, head.bias, head.transform.logit_scale, head.transform.softcap)
