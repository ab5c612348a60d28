"""Lazy logits in TRL's experimental trainers, which compute their losses from ``model(...).logits``.

Functions that run around trainers' methods make heads lazy. TRL's helper functions ignore ``__torch_function__`` and
would get the values of lazy logits, so each has a replacement here: a function with TRL's parameters and result,
which computes with the engine, or raises :class:`NeedsLogits`, and then TRL's function runs.
B batch size, T tokens of a sequence, V vocabulary size.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.chunked import Teacher, TeacherLogits, linear_divergence
from liger_losses.chunked.losses.softmax_divergences import sparse_divergence
from liger_losses.patching.lazy import DeferredLogits, allow_materialization
from liger_losses.patching.lazy.tensor import deferred_logits
from liger_losses.patching.lazy_head import make_head_lazy
from liger_losses.trl.divergences import IGNORE_INDEX, check_columns, divergence_of, mean_divergence


def with_lazy_heads(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Build a trainer, and make the heads of its models lazy, or raise TypeError if they cannot be.

    A reference or teacher model whose head cannot be lazy computes its logits, with a warning.
    """
    init(self, *args, **kwargs)
    for role in ("model", "ref_model", "teacher_model"):
        model = getattr(self, role, None)
        changes = make_head_lazy(model) if isinstance(model, torch.nn.Module) else []
        reasons = [f"{change.path or 'the head'}: {change.reason}" for change in changes if change.reason]
        message = f"the last layer of {type(model).__name__} cannot be lazy ({'; '.join(reasons)})"
        if reasons and role == "model":
            raise TypeError(
                f"{message}: train it outside of liger_losses.trl.enable()." + see("models-that-cannot-be-patched")
            )
        if reasons:
            warn(f"{message}: as {role}, it computes its logits, [tokens, vocab].")


#: The mask ``[B, T]`` of active tokens, while a loss runs whose helper functions do not get it.
_LOSS_MASK: ContextVar[Tensor | None] = ContextVar("loss_mask", default=None)


def with_loss_mask(method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """``_compute_self_distillation_loss`` of SDFT and SDPO, with divergences of active tokens alone."""
    token = _LOSS_MASK.set(inspect.signature(method).bind(*args, **kwargs).arguments["distillation_logits"].loss_mask)
    try:
        return method(*args, **kwargs)
    finally:
        _LOSS_MASK.reset(token)


def _masked_labels(logits: Tensor) -> Tensor:
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


def _deferred(logits: Tensor) -> DeferredLogits:
    """As :func:`deferred_logits`; raises NeedsLogits for other tensors, and for log-probabilities."""
    deferred = deferred_logits(logits)
    if deferred is None:
        raise NeedsLogits
    return deferred


def _teacher(logits: Tensor) -> Teacher | TeacherLogits:
    deferred = deferred_logits(logits)
    return TeacherLogits(logits) if deferred is None else Teacher(deferred.hidden_states, deferred.head)


def _statistics(
    logits: Tensor, index: Tensor, names: tuple[str, ...], temperature: float = 1.0, mask: Tensor | None = None
) -> Any:
    """Statistics of the softmax at ``index`` ``[B, T]``."""
    deferred = _deferred(logits)
    if index.shape != logits.shape[:-1]:
        raise NeedsLogits
    labels = index if mask is None else torch.where(mask != 0, index, IGNORE_INDEX)
    if temperature != 1.0:
        deferred = _deferred(logits / temperature)
    return deferred.statistics(labels, *names)


def selective_log_softmax(logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Any = None) -> Any:
    """The log-probabilities ``[B, T]`` of ``index``, one column per token."""
    return _statistics(logits, index, ("logp",), temperature, row_mask).logp


def selective_log_softmax_and_entropy(
    logits: Tensor, index: Tensor, entropy_requires_grad: bool = True, temperature: float = 1.0, row_mask: Any = None
) -> Any:
    """The log-probabilities ``[B, T]`` of ``index``, and the entropies ``[B, T]``."""
    statistics = _statistics(logits, index, ("logp", "entropy"), temperature, row_mask)
    return statistics.logp, statistics.entropy if entropy_requires_grad else statistics.entropy.detach()


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Any:
    """The entropies ``[B, T]`` of active tokens."""
    return _statistics(logits, _masked_labels(logits), ("entropy",)).entropy


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
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

    With ``top_k``, TRL's function runs: its ``gather`` of lazy logits is fused already.
    """
    student = _deferred(student_logits)
    per_token = reduction not in ("batchmean", "sum") and num_items_in_batch is None
    if labels is None or per_token or top_k or logits_are_probs:
        raise NeedsLogits
    mask, divisor = labels != IGNORE_INDEX, num_items_in_batch
    if divisor is None:
        divisor = 1 if reduction == "sum" else mask.sum().clamp(min=1)
    teacher = _teacher(teacher_logits)
    with student.under_forward_autocast():
        loss, _ = mean_divergence(
            student.hidden_states, student.head, teacher, mask, divisor, beta, temperature=temperature
        )
    return loss


def full_logit_self_distillation(student_logits: Tensor, teacher_logits: Tensor, *, distillation_alpha: float) -> Any:
    """Each token's divergence ``[B, T]`` of SDFT and SDPO over the whole vocabulary."""
    student = _deferred(student_logits)
    labels, teacher = _masked_labels(student_logits), _teacher(teacher_logits)
    check_columns(student.head, teacher)
    divergence = divergence_of(distillation_alpha)
    with student.under_forward_autocast():
        return linear_divergence(student.hidden_states, student.head, labels, teacher, divergence).divergence


def topk_self_distillation(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    distillation_topk: int,
    distillation_alpha: float,
    distillation_add_tail: bool,
) -> Any:
    """Each token's divergence ``[B, T]`` of SDFT and SDPO over the student's k most probable columns.

    TRL's function would not materialize lazy logits either, but take the gradients of log-sum-exp and columns apart.
    """
    student, teacher = _deferred(student_logits), _deferred(teacher_logits)
    labels = _masked_labels(student_logits)
    columns = student_logits.detach().topk(distillation_topk).indices
    logps = student.statistics(labels, "selected_logps", selected=columns).selected_logps
    teacher_logps = teacher.statistics(labels, "selected_logps", selected=columns).selected_logps
    tail = "bucket" if distillation_add_tail else "renormalize"
    return sparse_divergence(logps, teacher_logps, divergence_of(distillation_alpha), tail)


def sequence_by_sequence(original: Callable[..., Tensor], self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """GOLD's loss across tokenizers, which sorts the probabilities of whole rows: the mean over sequences.

    With lazy logits it runs for one sequence at a time, and again in backward, so that the logits of one exist at once.
    """
    batch = inspect.signature(original).bind(self, *args, **kwargs).arguments
    batch.pop("self")
    if deferred_logits(batch["student_logits"], True) is None:
        return original(self, **batch)

    def loss(i: int) -> Tensor:
        with allow_materialization():
            sequence = {name: None if value is None else value[i : i + 1] for name, value in batch.items()}
            return original(self, **sequence).reshape(())

    losses = [checkpoint(loss, i, use_reentrant=False) for i in range(len(batch["student_labels"]))]
    return torch.stack(losses).mean()
