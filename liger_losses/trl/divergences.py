"""What replaces the divergences of TRL's distillation trainers: one pass over the heads that there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.divergence_block import linear_divergence_loss
from liger_losses.chunked.engine.ops import Statistics, linear_token_loss
from liger_losses.chunked.engine.teachers import Teacher
from liger_losses.chunked.losses.divergence_functions import distribution, generalized_jsd, sparse_divergence
from liger_losses.kernels.autograd import autocast_dtype
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


def chunked_jsd_loss(
    hidden_valid: Tensor,
    lm_head_weight: Tensor,
    lm_head_bias: Tensor | None,
    logit_scale: float,
    final_logit_softcapping: float | None,
    target_ids: Tensor,
    teacher_target_logps: Tensor,
    valid_candidate_mask: Tensor,
    beta: float,
    temperature: float,
    add_tail_bucket: bool,
    teacher_id_idx: Tensor | None,
    num_teachers: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The summed generalised JSD from teachers' log-probabilities of some columns, as TRL's function of this signature.

    Args:
        hidden_valid: ``[N, H]``, of tokens that carry loss.
        lm_head_weight: ``[V, H]``.
        lm_head_bias: ``[V]``.
        logit_scale, final_logit_softcapping: of the head.
        target_ids: ``[N, K]``, the columns.
        teacher_target_logps: ``[N, K]``, the teachers' log-probabilities.
        valid_candidate_mask: ``[N, K]``, which of the columns are there.
        beta: as in :func:`chunked_divergence_loss`.
        temperature: of the student's softmax.
        add_tail_bucket: whether all other columns are one more, or the softmaxes are over these alone.
        teacher_id_idx: ``[N]``, whose log-probabilities they are.
        num_teachers: how many teachers there are.
        chunk_size: of no use here.

    Returns:
        The loss; and, without gradient, it again, the summed entropy of the student, that of the teachers, in nats,
        and for each teacher its tokens, their loss and their teacher's entropy, summed: ``[3 num_teachers]``.
    """
    divergence, tail = generalized_jsd(beta), "bucket" if add_tail_bucket else "renormalize"

    def there(logps: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, logps, float("-inf"))

    def token_loss(statistics: Statistics, labels: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        return sparse_divergence(there(statistics.selected_logps, mask), teacher, divergence, tail)

    teacher = there(teacher_target_logps.float(), valid_candidate_mask)
    if autocast_dtype(hidden_valid.device) is None:  # which has a rule for dtypes that differ
        dtype = torch.promote_types(hidden_valid.dtype, lm_head_weight.dtype)
        hidden_valid, lm_head_weight = hidden_valid.to(dtype), lm_head_weight.to(dtype)
        lm_head_bias = None if lm_head_bias is None else lm_head_bias.to(dtype)
    loss, found = linear_token_loss(
        hidden_valid,
        lm_head_weight,
        torch.zeros_like(target_ids[:, 0]),
        token_loss,
        ("selected_logps",),
        metrics=("entropy",),
        token_inputs={"teacher": teacher, "mask": valid_candidate_mask},
        selected=target_ids.clamp(min=0),
        bias=lm_head_bias,
        transform=LogitTransform(temperature, logit_scale, final_logit_softcapping),
    )
    with torch.no_grad():
        student = there(found.selected_logps, valid_candidate_mask)
        divergences = sparse_divergence(student, teacher, divergence, tail)
        log_q = distribution(teacher, tail)
        entropy = -torch.where(log_q > float("-inf"), log_q.exp() * log_q, 0.0).sum(-1)
        per_teacher = divergences.new_zeros(num_teachers, 3)
        if teacher_id_idx is not None:
            of_each = torch.stack([torch.ones_like(entropy), divergences, entropy], -1)
            is_its = torch.arange(num_teachers, device=teacher_id_idx.device)[:, None] == teacher_id_idx
            per_teacher = is_its.to(of_each) @ of_each
    return loss, divergences.sum(), found.entropy.sum(), entropy.sum(), per_teacher.flatten()


def _whole(parameter: Any, hidden_states: Tensor) -> Any:
    """A parameter that FSDP has sharded, gathered, in the hidden states' dtype: mixed precision leaves it in fp32."""
    if parameter is None or not hasattr(parameter, "full_tensor"):
        return parameter
    return parameter.full_tensor().to(hidden_states.dtype)
