"""prime-rl's fused heads, answered by this library: ``liger_losses.integrations.prime_rl.install()``.

Its ``FusedOutputLinear`` and ``GemmaFusedOutputLinear`` are what ``inject_prime_lm_head`` gives a model. B sequences of
S tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_losses.integrations.replacements import Replacement, Replacements
from liger_losses.integrations.token_statistics import logps_and_entropy


def fused_output_linear(
    self: Any, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | None = None
) -> dict[str, Tensor]:
    """Answers ``FusedOutputLinear.forward`` and, with its soft-cap, ``GemmaFusedOutputLinear.forward``.

    Args:
        self: the layer: its ``weight [V, H]``, and ``softcap`` if it has one. ``chunk_size`` makes no difference.
        hidden_states: ``[B, S, H]``.
        labels: ``[B, S]``.
        temperature: ``[B, S]``, one for each token.

    Returns:
        ``logprobs`` and ``entropy``, both ``[B, S]``, fp32 and differentiable.

    Raises:
        ValueError: without labels or temperatures; and as :func:`logps_and_entropy`.
    """
    if labels is None or temperature is None:
        raise ValueError(f"{type(self).__name__} takes labels= and temperature=, one of each for each hidden state.")
    softcap = getattr(self, "softcap", None)
    logps, entropy = logps_and_entropy(hidden_states, self.weight, labels, temperature, softcap=softcap)
    return {"logprobs": logps, "entropy": entropy}


_HEADS = "prime_rl.trainer.models.layers.lm_head"
_REPLACEMENTS = Replacements(
    "prime-rl",
    "559b447 of August 2026",
    Replacement(_HEADS, "FusedOutputLinear.forward", lambda original, module: fused_output_linear),
    Replacement(f"{_HEADS}_gemma", "GemmaFusedOutputLinear.forward", lambda original, module: fused_output_linear),
)


def install() -> None:
    """Replace prime-rl's fused heads, now or when it imports them; a second call has no effect."""
    _REPLACEMENTS.install()


def uninstall() -> None:
    """Put prime-rl's own heads back."""
    _REPLACEMENTS.uninstall()
