"""Pending logits in TRL's experimental trainers, which compute their losses from ``model(...).logits``.

While the trainers' own methods run, the heads of their models return pending logits. TRL's helper functions would
compute these, so each has a replacement here: a function with TRL's parameters and result, which computes with the
engine, or raises :class:`NeedsLogits`, and then TRL's function runs.
B batch size, T tokens of a sequence, V vocabulary size.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.chunked import Teacher, TeacherLogits, linear_divergence, linear_topk
from liger_losses.chunked.losses.softmax_divergences import sparse_divergence
from liger_losses.patching.loss_head import pending_logits, prepare_head
from liger_losses.patching.pending import PendingLogits
from liger_losses.trl.divergences import IGNORE_INDEX, check_columns, divergence_of, mean_divergence

#: The attributes of trainers that are models.
_ROLES = ("model", "ref_model", "teacher_model")


def with_heads(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Build a trainer, and prepare the heads of its models, or raise TypeError if they cannot be.

    A reference or teacher model whose head cannot be prepared computes its logits, with a warning.
    """
    init(self, *args, **kwargs)
    for role in _ROLES:
        model = getattr(self, role, None)
        entries = prepare_head(model) if isinstance(model, torch.nn.Module) else []
        reasons = [f"{entry.path or 'the head'}: {entry.reason}" for entry in entries if entry.reason]
        message = f"the last layer of {type(model).__name__} cannot be a Head ({'; '.join(reasons)})"
        if reasons and role == "model":
            raise TypeError(
                f"{message}: train it outside of liger_losses.trl.enable()." + see("models-that-cannot-be-patched")
            )
        if reasons:
            warn(f"{message}: as {role}, it computes its logits, [tokens, vocab].")


def with_pending_logits(method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A trainer's method, in which the heads of its models return pending logits."""
    models = [getattr(self, role, None) for role in _ROLES]
    with pending_logits(*(model for model in models if isinstance(model, torch.nn.Module))):
        return method(self, *args, **kwargs)


#: The mask ``[B, T]`` of active tokens, while a loss runs whose helper functions do not get it.
_LOSS_MASK: ContextVar[Tensor | None] = ContextVar("loss_mask", default=None)


def with_loss_mask(method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """``_compute_self_distillation_loss`` of SDFT and SDPO, with divergences of active tokens alone."""
    token = _LOSS_MASK.set(inspect.signature(method).bind(*args, **kwargs).arguments["distillation_logits"].loss_mask)
    try:
        return method(*args, **kwargs)
    finally:
        _LOSS_MASK.reset(token)


def _masked_labels(logits: Any) -> Tensor:
    """Labels ``[B, T]`` that say which tokens are active, and nothing else."""
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    mask = _LOSS_MASK.get()
    return labels if mask is None or mask.shape != labels.shape else labels.masked_fill(mask == 0, IGNORE_INDEX)


class NeedsLogits(Exception):
    """A replacement cannot be computed without the values of the logits: TRL's function runs."""


def with_replacement(replacement: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``replacement``, or TRL's function if it raises :class:`NeedsLogits`."""
    with contextlib.suppress(NeedsLogits):
        return replacement(**inspect.signature(original).bind(*args, **kwargs).arguments)
    return original(*args, **kwargs)


def _is_pending(logits: Any) -> bool:
    return isinstance(logits, PendingLogits) and not logits.computed and not logits.normalized


def _pending(logits: Any) -> PendingLogits:
    """Pending logits; raises NeedsLogits for other tensors, and for log-probabilities."""
    if not _is_pending(logits):
        raise NeedsLogits
    return logits


def _teacher(logits: Any) -> Teacher | TeacherLogits:
    return Teacher(logits.hidden_states, logits.head) if _is_pending(logits) else TeacherLogits(logits)


def _statistics(
    logits: Any, index: Tensor, names: tuple[str, ...], temperature: float = 1.0, mask: Tensor | None = None
) -> Any:
    """Statistics of the softmax at ``index`` ``[B, T]``."""
    pending = _pending(logits)
    if index.shape != pending.shape[:-1]:
        raise NeedsLogits
    labels = index if mask is None else torch.where(mask != 0, index, IGNORE_INDEX)
    if temperature != 1.0:
        pending = _pending(pending.div(temperature))
    return pending.statistics(labels, *names)


def selective_log_softmax(logits: Any, index: Tensor, temperature: float = 1.0, row_mask: Any = None) -> Any:
    """The log-probabilities ``[B, T]`` of ``index``, one column per token."""
    return _statistics(logits, index, ("logp",), temperature, row_mask).logp


def selective_log_softmax_and_entropy(
    logits: Any, index: Tensor, entropy_requires_grad: bool = True, temperature: float = 1.0, row_mask: Any = None
) -> Any:
    """The log-probabilities ``[B, T]`` of ``index``, and the entropies ``[B, T]``."""
    statistics = _statistics(logits, index, ("logp", "entropy"), temperature, row_mask)
    return statistics.logp, statistics.entropy if entropy_requires_grad else statistics.entropy.detach()


def entropy_from_logits(logits: Any, chunk_size: int = 128) -> Any:
    """The entropies ``[B, T]`` of active tokens."""
    return _statistics(logits, _masked_labels(logits), ("entropy",)).entropy


def generalized_jsd_loss(
    student_logits: Any,
    teacher_logits: Any,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Tensor | int | None = None,
    top_k: int = 0,
    add_tail: bool = True,
    logits_are_probs: bool = False,
) -> Any:
    """The loss of GKD, GOLD and IW-OPD, if it is a scalar and over the whole vocabulary.

    With ``top_k``, TRL's function runs: its ``gather`` of pending logits is fused already.
    """
    student = _pending(student_logits)
    per_token = reduction not in ("batchmean", "sum") and num_items_in_batch is None
    if labels is None or per_token or top_k or logits_are_probs:
        raise NeedsLogits
    mask, divisor = labels != IGNORE_INDEX, num_items_in_batch
    if divisor is None:
        divisor = 1 if reduction == "sum" else mask.sum().clamp(min=1)
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


def sequence_by_sequence(original: Callable[..., Tensor], self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """GOLD's loss across tokenizers, which sorts the probabilities of whole rows: the mean over sequences.

    With pending logits it runs for one sequence at a time, and again in backward: the logits of one exist at once.
    """
    batch = inspect.signature(original).bind(self, *args, **kwargs).arguments
    batch.pop("self")
    if not isinstance(batch["student_logits"], PendingLogits):
        return original(self, **batch)

    def loss(i: int) -> Tensor:
        sequence = {name: None if value is None else value[i : i + 1] for name, value in batch.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*needs the values of pending logits")
            return original(self, **sequence).reshape(())

    losses = [checkpoint(loss, i, use_reentrant=False) for i in range(len(batch["student_labels"]))]
    return torch.stack(losses).mean()
