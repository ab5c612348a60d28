"""liger-kernel's other losses of hidden states, computed by this library.

N tokens, H hidden size, V vocabulary size, K columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import liger_losses
from liger_losses.chunked.engine import EngineOptions, Head, linear_statistics
from liger_losses.integrations.liger.chunked import with_arguments
from liger_losses.kernels.logit_transform import LogitTransform


def fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *options: Any, **named: Any
) -> Any:
    """``liger_fused_linear_cross_entropy``: the loss of :class:`liger_losses.LigerFusedLinearCrossEntropyLoss`.

    liger-kernel's model forwards read the names of these arguments, and pass on what they find among them.

    Args:
        input, weight, target, bias: ``[N, H]``, ``[V, H]``, ``[N]``, ``[V]``.
        options, named: those of that class's constructor; and ``chunk_mem_const``, which has no effect.
    """
    named.pop("chunk_mem_const", None)
    loss = liger_losses.LigerFusedLinearCrossEntropyLoss(*options[: len(_OPTIONS)], **named)
    return loss(weight, input, target, bias)


_OPTIONS = ("ce_weight", *liger_losses.LigerFusedLinearCrossEntropyLoss.positions)
with_arguments(fused_linear_cross_entropy, f"input weight target bias {' '.join(_OPTIONS)} chunk_mem_const", required=3)


def apply_fused_linear_cross_entropy(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *options: Any
) -> tuple[Tensor | None, ...]:
    """``apply`` of the same: loss, z-loss, token accuracy, predicted tokens; ``None`` for what was not asked for."""
    found: Any = fused_linear_cross_entropy(_input, weight, target, bias, *options)
    return tuple(found) if isinstance(found, tuple) else (found, None, None, None)


def scaled_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    m_tiles_per_cluster: int = 1,
    return_entropy: bool = False,
    selected_token_ids: Tensor | None = None,
) -> Any:
    """``LigerFusedLinearScaledCrossEntropyFunction.apply``: each token's negative log-likelihood, differentiable.

    Args:
        _input, weight, target: ``[N, H]``, ``[V, H]``, ``[N]``.
        temperature: what the logits are divided by.
        m_tiles_per_cluster: no effect.
        return_entropy: also the entropies ``[N]``, in nats, differentiable.
        selected_token_ids: ``[K]`` int64: also the log-probabilities of these columns, ``[N, K]``, differentiable.
    """
    head, options = Head.of(weight, transform=LogitTransform(temperature)), EngineOptions(ignore_index)
    outputs = _nll_and_entropy(_input, head, target, options, return_entropy)
    if selected_token_ids is not None:
        columns = selected_token_ids.expand(len(target), -1)
        found = linear_statistics(_input, head, target, "selected_logps", selected=columns, options=options)
        outputs = (*outputs, found.selected_logps)
    return outputs if len(outputs) > 1 else outputs[0]


def scaled_cross_entropy_tp(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> Any:
    """``LigerFusedLinearScaledCrossEntropyTPFunction.apply``: the same for ranks that share the vocabulary.

    Args:
        weight: this rank's rows, any number of them.
        target: ``[N]``, labels in the whole vocabulary.
        tp_group: the ranks; all of them by default.
        tiles_per_reduce: no effect.
        _input, temperature, ignore_index, return_entropy: as in :func:`scaled_cross_entropy`, the same on all ranks.
    """
    group = dist.group.WORLD if tp_group is None else tp_group
    head = Head(weight, transform=LogitTransform(temperature), group=group)
    outputs = _nll_and_entropy(_input, head, target, EngineOptions(ignore_index), return_entropy)
    return outputs if len(outputs) > 1 else outputs[0]


def _nll_and_entropy(
    hidden: Tensor, head: Head, target: Tensor, options: EngineOptions, entropy: bool
) -> tuple[Tensor, ...]:
    found = linear_statistics(hidden, head, target, ("logp", "entropy") if entropy else "logp", options=options)
    return (-found.logp, found.entropy) if entropy else (-found.logp,)


def fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
    *_unused: Any,
) -> Tensor:
    """``liger_fused_linear_jsd``: the mean of :class:`liger_losses.LigerFusedLinearJSDLoss`'s divergence alone.

    Args:
        shift_labels: ``[N]``; only which are ``ignore_index`` matters. Without them, all tokens are active.
        jsd_beta: share of the teacher in the mixture.
        accum_dtype: no effect.
    """
    if shift_labels is None:
        shift_labels = torch.zeros(student_input.shape[:-1], dtype=torch.int64, device=student_input.device)
    else:  # a teacher's labels may lie outside of the student's vocabulary
        shift_labels = torch.where(shift_labels == ignore_index, ignore_index, 0)
    loss = liger_losses.LigerFusedLinearJSDLoss(0.0, 1.0, jsd_beta, ignore_index=ignore_index, temperature=temperature)
    return loss(student_input, student_weight, teacher_input, teacher_weight, shift_labels)


class LigerFusedLinearJSD(torch.nn.Module):
    """:func:`fused_linear_jsd` as a module."""

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.jsd_beta, self.ignore_index, self.temperature = jsd_beta, ignore_index, temperature

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        options = (shift_labels, self.jsd_beta, self.ignore_index, self.temperature)
        return fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, *options)
