"""Pending logits in TRL's experimental trainers, which compute their losses from ``model(...).logits``.

While the trainers' own methods run, the heads of their models return pending logits. TRL's helper functions would
compute these, so each has a replacement here: a function with TRL's parameters and result, which computes with the
engine, or raises :class:`~liger_losses.patching.operations.NeedsValues`, and then TRL's function runs.
B batch size, T tokens of a sequence, V vocabulary size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.chunked import Teacher, TeacherLogits, linear_divergence, linear_topk
from liger_losses.chunked.losses.softmax_divergences import sparse_divergence
from liger_losses.patching.loss_head import pending_logits, reason_against_head
from liger_losses.patching.operations import NeedsValues, require
from liger_losses.patching.pending import PendingLogits, is_pending
from liger_losses.trl.divergences import IGNORE_INDEX, check_columns, divergence_of, mean_divergence

#: The attributes of trainers that are models.
_ROLES = ("model", "ref_model", "teacher_model")


def with_pending_logits(method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A trainer's method, in which the heads of its models return pending logits, or logits, with a warning."""
    models = {role: getattr(self, role) for role in _ROLES if isinstance(getattr(self, role, None), torch.nn.Module)}
    for role, model in models.items():
        reason = reason_against_head(model)
        if reason:
            warn(f"{reason}: the {role} computes its logits, [tokens, vocab]." + see("models-that-cannot-be-patched"))
    with pending_logits(*models.values()):
        return method(self, *args, **kwargs)


def with_loss_mask(method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """``_compute_self_distillation_loss`` of SDFT and SDPO, with divergences of active tokens alone.

    Its helper functions get the student's logits, and here with them the mask ``[B, T]``.
    """
    batch = inspect.signature(method).bind(*args, **kwargs).arguments["distillation_logits"]
    batch.student_logits.loss_mask = batch.loss_mask
    return method(*args, **kwargs)


def _masked_labels(logits: Any) -> Tensor:
    """Labels ``[B, T]`` that say which tokens are active, and nothing else."""
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    mask = getattr(logits, "loss_mask", None)
    return labels if mask is None else labels.masked_fill(mask == 0, IGNORE_INDEX)


def with_replacement(replacement: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``replacement``; or TRL's function, if the replacement raises NeedsValues or lacks an argument that is
    not TRL's default."""
    theirs, names = inspect.signature(original), inspect.signature(replacement).parameters
    given = theirs.bind(*args, **kwargs).arguments
    new = [name for name in given if name not in names]
    if any(given.pop(name) is not theirs.parameters[name].default for name in new):
        warn(f"TRL's own {original.__name__} runs: the argument {', '.join(new)} is not known." + see("trl"))
        return original(*args, **kwargs)
    try:
        return replacement(**given)
    except NeedsValues:
        return original(*args, **kwargs)


def _pending(logits: Any) -> PendingLogits:
    """Pending logits; raises NeedsValues for other tensors, and for log-probabilities."""
    require(is_pending(logits))
    return logits


def _teacher(logits: Any) -> Teacher | TeacherLogits:
    return Teacher(logits.hidden_states, logits.head) if is_pending(logits) else TeacherLogits(logits)


def _statistics(
    logits: Any, index: Tensor, names: tuple[str, ...], temperature: float = 1.0, mask: Tensor | None = None
) -> Any:
    """Statistics of the softmax at ``index`` ``[B, T]``."""
    pending = _pending(logits)
    require(index.shape == pending.shape[:-1])
    labels = index if mask is None else torch.where(mask != 0, index, IGNORE_INDEX)
    return _pending(pending.div(temperature)).statistics(labels, *names)


def selective_log_softmax(logits: Any, index: Tensor, temperature: float = 1.0, row_mask: Any = None) -> Any:
    """The log-probabilities ``[B, T]`` of ``index``, one column per token."""
    return _statistics(logits, index, ("logp",), temperature, row_mask).logp


def selective_log_softmax_and_entropy(
    logits: Any, index: Tensor, entropy_requires_grad: bool = True, temperature: float = 1.0, row_mask: Any = None
) -> Any:
    """The log-probabilities ``[B, T]`` of ``index``, and the entropies ``[B, T]``."""
    statistics = _statistics(logits, index, ("logp", "entropy"), temperature, row_mask)
    return statistics.logp, statistics.entropy if entropy_requires_grad else statistics.entropy.detach()


def generalized_jsd_loss(
    student_logits: Any,
    teacher_logits: Any,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Tensor | int | None = None,
    top_k: int = 0,
    logits_are_probs: bool = False,
) -> Any:
    """The loss of GKD, GOLD and IW-OPD, if it is a mean and over the whole vocabulary.

    With ``top_k``, TRL's function runs: its ``gather`` of pending logits is fused already.
    """
    student = _pending(student_logits)
    per_token = reduction != "batchmean" and num_items_in_batch is None
    if labels is None or per_token or top_k or logits_are_probs:
        raise NeedsValues
    mask = labels != IGNORE_INDEX
    divisor = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    teacher = _teacher(teacher_logits)
    with student.forward_autocast():
        loss, _ = mean_divergence(
            student.hidden_states, student.head, teacher, mask, divisor, beta, temperature=temperature
        )
    return loss


def full_logit_self_distillation(student_logits: Any, teacher_logits: Any, *, distillation_alpha: float) -> Any:
    """Each token's divergence ``[B, T]`` of SDFT and SDPO over the whole vocabulary."""
    student = _pending(student_logits)
    labels, teacher = _masked_labels(student_logits), _teacher(teacher_logits)
    check_columns(student.head, teacher)
    divergence = divergence_of(distillation_alpha)
    with student.forward_autocast():
        return linear_divergence(student.hidden_states, student.head, labels, teacher, divergence).divergence


def topk_self_distillation(
    student_logits: Any,
    teacher_logits: Any,
    *,
    distillation_topk: int,
    distillation_alpha: float,
    distillation_add_tail: bool,
) -> Any:
    """Each token's divergence ``[B, T]`` of SDFT and SDPO over the student's k most probable columns.

    TRL's function would not compute logits either, but take the gradients of log-sum-exp and columns apart.
    """
    student, teacher = _pending(student_logits), _pending(teacher_logits)
    labels = _masked_labels(student_logits)
    columns = linear_topk(student.hidden_states.detach(), student.head.detach(), distillation_topk).ids
    logps = student.statistics(labels, "selected_logps", selected=columns).selected_logps
    teacher_logps = teacher.statistics(labels, "selected_logps", selected=columns).selected_logps
    tail = "bucket" if distillation_add_tail else "renormalize"
    return sparse_divergence(logps, teacher_logps, divergence_of(distillation_alpha), tail)
