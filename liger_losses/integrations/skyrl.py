"""SkyRL's fused head on Megatron, computed by this library: ``liger_losses.integrations.skyrl.install()``.

With ``trainer.fused_lm_head_logprob=true``; its backend then makes no difference. B sequences of S tokens, H hidden
size, W ranks share the vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.integrations.replacements import Replacements
from liger_losses.integrations.token_statistics import token_statistics
from liger_losses.places import Place, around

#: The temperature of the call that this thread is in.
_thread = threading.local()


def fused_lm_head_logprob(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool,
) -> Tensor:
    """Replaces ``_fused_lm_head_logprob_apply``: the log-probabilities ``[B, S]`` of the targets, fp32.

    Args:
        hidden: ``[B, S, H]``, of a sequence that is gathered. Its gradient is this rank's part, as SkyRL's own.
        weight: ``[V / W, H]``, this rank's rows, ``vocab_start_index`` to ``vocab_end_index``.
        target: ``[B, S]``, shifted already.
        backend, chunk_size: make no difference.
    """
    temperature = getattr(_thread, "temperature", 1.0)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        return token_statistics(hidden.to(weight.dtype), weight, target, ("logp",), temperature, tp_group).logp


def fused_entropy(
    hidden: Tensor,
    lm_head_weight: Tensor,
    tp_group: dist.ProcessGroup,
    chunk_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Replaces ``_fused_vocab_parallel_entropy_from_hidden``: entropies ``[B, S]``, a metric."""
    labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    with torch.no_grad():
        hidden = hidden.to(lm_head_weight.dtype)
        return token_statistics(hidden, lm_head_weight, labels, ("entropy",), temperature, tp_group).entropy


def _with_temperature(original: Callable[..., Any], *args: Any, temperature: float = 1.0, **kwargs: Any) -> Any:
    """SkyRL divides the weight by the temperature, which copies and rounds it: let the head divide the logits."""
    _thread.temperature = float(temperature)
    try:
        return original(*args, **kwargs)
    finally:
        _thread.temperature = 1.0


_MODULE = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
_REPLACEMENTS = Replacements(
    "SkyRL",
    "0.4",
    "the fused head",
    Place(_MODULE, "_fused_lm_head_logprob_apply", lambda original: fused_lm_head_logprob, fused_lm_head_logprob),
    Place(_MODULE, "_fused_vocab_parallel_entropy_from_hidden", lambda original: fused_entropy, fused_entropy),
    *(
        Place(_MODULE, f"from_parallel_hidden_to_logprobs{end}", around(_with_temperature), takes=("temperature",))
        for end in ("", "_packed_sequences")
    ),
)


def install() -> None:
    """Replace SkyRL's fused head, now or when SkyRL imports it."""
    _REPLACEMENTS.install()


def uninstall() -> None:
    """Restore what :func:`install` replaced."""
    _REPLACEMENTS.uninstall()
