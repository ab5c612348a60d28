"""Replacements of the divergences in TRL's distillation trainers. They run in one pass over the head.

B batch size, T tokens of a sequence, N active tokens, H and Ht the hidden sizes, V vocabulary size, K columns.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked import Head, Statistics, Teacher, linear_divergence_loss
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.patching.loss_head import KeepGathered

#: The label of tokens without loss, in TRL as in PyTorch.
IGNORE_INDEX = -100


#: What :func:`liger_losses.trl.enable` was given.
chosen = SimpleNamespace(
    kernels=False, skip_zero_advantages=True, divergence=None, share_prompts=None, reuse_forward=False
)


def divergence_of(beta: float) -> Divergence:
    """What trainers take between student and teacher: the generalized JSD of their ``beta``, unless ``enable`` was
    given another one."""
    return Divergence.jsd(beta) if chosen.divergence is None else chosen.divergence


def mean_divergence(
    hidden_states: Tensor, head: Head, teacher: Any, mask: Tensor, divisor: Tensor | int, beta: float, **options: Any
) -> tuple[Tensor, Statistics]:
    """The divergence between student and teacher, summed over active tokens and divided by ``divisor``.

    Args:
        hidden_states: ``[B, T, H]``, the student's.
        head, teacher: the student's head; the teacher of the same tokens.
        mask: ``[B, T]``, True for active tokens.
        divisor: their number, in the batch or in all batches of a step.
        beta: 0 for the forward KL, 1 for the reverse KL, between them the JSD, as in TRL.
        options: the temperature of both models, and metrics, as :func:`linear_divergence_loss` takes them.
    """
    check_columns(head, teacher)
    labels = torch.where(mask, 0, IGNORE_INDEX)
    divisor = torch.as_tensor(divisor, dtype=torch.float32, device=mask.device)
    weights = {"divergence": mask.float() / divisor}
    return linear_divergence_loss(hidden_states, head, labels, teacher, divergence_of(beta), weights, **options)


def check_columns(student: Head, teacher: Any) -> None:
    """Raise ValueError where the vocabularies' sizes differ, be it by one, as TRL does."""
    if student.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"the student has {student.vocab_size} columns and the teacher {teacher.vocab_size}, and TRL compares all "
            "columns of both; take a teacher with the student's vocab_size, or GOLD with use_uld_loss=True."
        )


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
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces TRL's ``_chunked_divergence_loss``: the mean generalized JSD over completion tokens.

    Args:
        student_hidden_states, teacher_hidden_states: ``[B, T, H]``, ``[B, T, Ht]``.
        student_lm_head_weight, teacher_lm_head_weight: ``[V, H]``, ``[V, Ht]``; the biases are ``[V]``. If the teacher
            has more rows, the first V are used, as in TRL, whose trainer has compared the models' ``vocab_size``.
        completion_mask: ``[B, T]``, nonzero for active tokens.
        beta: as in :func:`mean_divergence`.
        num_items_in_batch: the divisor, instead of the number of active tokens.
        chunk_size: ignored; the engine chooses its block sizes. TRL 1.14 passes it.

    Returns:
        The loss; and without gradient the summed entropy of the student in nats, and the number of active tokens.
    """
    weight, bias = (gathered(p, student_hidden_states.dtype) for p in (student_lm_head_weight, student_lm_head_bias))
    student = Head(weight, bias, LogitTransform(1.0, student_logit_scale, student_final_logit_softcapping))
    weight, bias = (gathered(p, teacher_hidden_states.dtype) for p in (teacher_lm_head_weight, teacher_lm_head_bias))
    if len(weight) > student.vocab_size:
        weight, bias = (None if p is None else p[: student.vocab_size] for p in (weight, bias))
    teacher = Teacher(teacher_hidden_states, weight, bias, teacher_logit_scale, teacher_final_logit_softcapping)
    mask = completion_mask != 0
    count = mask.sum()
    divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss, statistics = mean_divergence(
        student_hidden_states, student, teacher, mask, divisor, beta, temperature=temperature, metrics=("entropy",)
    )
    return loss, statistics.entropy.sum(), count


def gathered(parameter: Any, dtype: torch.dtype) -> Any:
    """A parameter that FSDP or ZeRO-3 may have sharded: gathered, in the dtype in which the model's forward has it."""
    if hasattr(parameter, "ds_id"):
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        with maybe_gather_lm_head_ctx(parameter):
            return KeepGathered.apply(parameter)
    return parameter.full_tensor().to(dtype) if hasattr(parameter, "full_tensor") else parameter
