"""NeMo-RL's fused log-probabilities, answered by this library: ``liger_losses.integrations.nemo_rl.install()``.

On Megatron, with ``policy.megatron_cfg.use_fused_linear_logprobs=true``. B sequences of S tokens, H
hidden size, W ranks share the vocabulary and the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.integrations.replacements import Replacement, Replacements
from liger_losses.integrations.token_statistics import token_statistics

#: The older names are deprecated since torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class _GatherSequence(torch.autograd.Function):
    """The whole sequence ``[S, ...]`` of the ranks' parts; backward sums the ranks' gradients of each part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = part.new_empty(len(part) * group.size(), *part.shape[1:])
        _all_gather(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        part = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        _reduce_scatter(part, grad.contiguous(), group=ctx.group)
        return part, None


def hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    target: Tensor,
    output_weight_layer: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool = False,
) -> Tensor:
    """Answers ``ChunkedDistributedHiddenStatesToLogprobs.apply``: the log-probabilities of the targets.

    Args:
        tensor_parallel_hidden_states: ``[S / W, B, H]``, this rank's part of the sequence.
        target: ``[B, S]``, shifted already.
        output_weight_layer: ``[V / W, H]``, this rank's rows, ``vocab_start_index`` to ``vocab_end_index``.
        tp_group: the ranks.
        inference_only: without gradients.
        chunk_size: makes no difference.

    Returns:
        ``[B, S]``, fp32.
    """
    hidden, weight = tensor_parallel_hidden_states, output_weight_layer
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        if tp_group.size() > 1:
            hidden = _GatherSequence.apply(hidden, tp_group)
        found = token_statistics(hidden, weight, target.t().contiguous(), ("logp",), 1.0, tp_group)
        return found.logp.t().contiguous()


_MODULE = "nemo_rl.distributed.model_utils"
_REPLACEMENTS = Replacements(
    "NeMo-RL",
    "7ea279a of August 2026",
    Replacement(
        _MODULE,
        "ChunkedDistributedHiddenStatesToLogprobs.apply",
        lambda original, module: staticmethod(hidden_states_to_logprobs),
    ),
)


def install() -> None:
    """Replace NeMo-RL's fused log-probabilities, now or when it imports them; a second call has no effect."""
    _REPLACEMENTS.install()


def uninstall() -> None:
    """Put NeMo-RL's own back."""
    _REPLACEMENTS.uninstall()
