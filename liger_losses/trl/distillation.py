"""What replaces the divergence of TRL's distillation trainer: one pass over both heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.distillation import generalized_jsd
from liger_losses.chunked.divergence import linear_divergence_loss
from liger_losses.chunked.teachers import Teacher
from liger_losses.kernels.logit_transform import LogitTransform

IGNORED = -100


def chunked_divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean generalised JSD over completion tokens, as TRL's function of this signature has it.

    Args:
        student_hidden_states: ``[B, T, H]``.
        teacher_hidden_states: ``[B, T, Ht]``.
        student_lm_head_weight, teacher_lm_head_weight: ``[V, H]``, ``[V, Ht]``.
        completion_mask: ``[B, T]``, nonzero where there is loss.
        beta: 0 for the forward KL, 1 for the reverse KL, else the JSD's (the ``gkd`` convention).
        num_items_in_batch: what to divide by, instead of the number of tokens with loss.
        student_lm_head_bias, teacher_lm_head_bias: ``[V]``.
        student_logit_scale, teacher_logit_scale, student_final_logit_softcapping, teacher_final_logit_softcapping: of
            both heads.
        temperature: of both softmaxes.

    Returns:
        The loss, the summed entropy of the student in nats (without gradient), the number of tokens.
    """
    valid = completion_mask != 0
    count = valid.sum()
    divisor: Any = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    weights = valid.float() / torch.as_tensor(divisor, device=valid.device)
    labels = torch.where(valid, 0, IGNORED)
    student, teacher = (
        _whole(t, like)
        for t, like in (
            (student_lm_head_weight, student_hidden_states),
            (teacher_lm_head_weight, teacher_hidden_states),
        )
    )
    loss, found = linear_divergence_loss(
        student_hidden_states,
        student,
        labels,
        Teacher(
            teacher_hidden_states,
            teacher,
            _whole(teacher_lm_head_bias, teacher_hidden_states),
            teacher_logit_scale,
            teacher_final_logit_softcapping,
        ),
        generalized_jsd(beta),
        {"divergence": weights},
        metrics=("entropy",),
        temperature=temperature,
        bias=_whole(student_lm_head_bias, student_hidden_states),
        transform=LogitTransform(1.0, student_logit_scale, student_final_logit_softcapping),
    )
    return loss, found.entropy.sum(), count


def _whole(parameter: Any, hidden_states: Tensor) -> Any:
    """A parameter that FSDP has sharded, gathered, in the hidden states' dtype: mixed precision leaves it in fp32."""
    if parameter is None or not hasattr(parameter, "full_tensor"):
        return parameter
    return parameter.full_tensor().to(hidden_states.dtype)
