"""TRL's experimental trainers, which take losses of ``model(...).logits``: their models' heads become lazy.

What they do with logits by helpers of TRL's own (which never look at a tensor's class) is answered here.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_losses.chunked.engine.divergence_block import linear_divergence, linear_divergence_loss
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits
from liger_losses.chunked.losses.divergence_functions import generalized_jsd, sparse_divergence
from liger_losses.patching.lazy import DeferredLogits, LazyLogits, allow_materialization
from liger_losses.patching.lazy_head import force_lazy_head, patch_head

IGNORED = -100


def lazy_head(init: Callable[..., None]) -> Callable[..., None]:
    """A trainer's ``__init__``, after which the heads of its models are lazy."""

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        reason = _make_lazy(self.model)
        if reason:
            raise TypeError(f"{reason}: train it outside of liger_losses.trl.enable().")
        for role in ("ref_model", "teacher_model"):
            reason = _make_lazy(getattr(self, role, None))
            if reason:
                warnings.warn(f"{reason}: as {role}, it computes its logits, [tokens, vocab].", stacklevel=2)

    return wrapped


def _make_lazy(model: Any) -> str:
    """Why it cannot be done, if it cannot."""
    changes = patch_head(model) if isinstance(model, torch.nn.Module) else []
    wrong = [f"{change.path or 'the head'}: {change.reason}" for change in changes if change.reason]
    return f"the last layer of {type(model).__name__} cannot be lazy ({'; '.join(wrong)})" if wrong else ""


def within_lazily(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method in which heads are lazy without gradients too: a teacher's."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with force_lazy_head():
            return method(*args, **kwargs)

    return wrapped


def _statistics(
    logits: LazyLogits, index: Tensor, names: tuple[str, ...], temperature: float, mask: Tensor | None
) -> Any:
    labels = index if mask is None else torch.where(mask != 0, index, IGNORED)
    scaled = logits / temperature if temperature != 1.0 else logits
    return scaled.deferred.statistics(labels, names)  # type: ignore[attr-defined]


def _is_lazy(logits: Any) -> bool:
    """Whether these are logits that the engine knows how to compute."""
    if isinstance(logits, LazyLogits):
        logits.check()
    lazy = isinstance(logits, LazyLogits) and logits.changed is None and not logits.deferred.normalized
    return lazy and logits.deferred.transform is not None


def _is_answered(logits: Tensor, index: Tensor) -> bool:
    """Whether there is one index per row of logits that are still lazy."""
    return _is_lazy(logits) and index.shape == logits.shape[:-1]


#: Which tokens carry loss, where a trainer's helpers are not told.
_LOSS_MASK: ContextVar[Tensor | None] = ContextVar("loss_mask", default=None)


def _scored(logits: Tensor) -> Tensor:
    """Labels that only say which tokens count."""
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    mask = _LOSS_MASK.get()
    return labels if mask is None or mask.shape != labels.shape else labels.masked_fill(mask == 0, IGNORED)


def with_loss_mask(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SDFT's and SDPO's loss, whose divergences are only of tokens that carry loss then."""

    @functools.wraps(method)
    def wrapped(self: Any, model: Any, inputs: Any, distillation_logits: Any) -> Tensor:
        token = _LOSS_MASK.set(distillation_logits.loss_mask)
        try:
            return method(self, model, inputs, distillation_logits)
        finally:
            _LOSS_MASK.reset(token)

    return wrapped


def selective_log_softmax(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """TRL's function, with an answer for lazy logits."""

    @functools.wraps(original)
    def wrapped(logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None) -> Tensor:
        if not _is_answered(logits, index):
            return original(logits, index, temperature=temperature, row_mask=row_mask)
        return _statistics(logits, index, ("logp",), temperature, row_mask).logp  # type: ignore[arg-type]

    return wrapped


def selective_log_softmax_and_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    """TRL's function, with an answer for lazy logits."""

    @functools.wraps(original)
    def wrapped(
        logits: Tensor,
        index: Tensor,
        entropy_requires_grad: bool = True,
        temperature: float = 1.0,
        row_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not _is_answered(logits, index):
            return original(logits, index, entropy_requires_grad, temperature, row_mask)
        found = _statistics(logits, index, ("logp", "entropy"), temperature, row_mask)  # type: ignore[arg-type]
        return found.logp, found.entropy if entropy_requires_grad else found.entropy.detach()

    return wrapped


def entropy_from_logits(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """TRL's function, with an answer for lazy logits."""

    @functools.wraps(original)
    def wrapped(logits: Tensor, chunk_size: int = 128) -> Tensor:
        if not _is_lazy(logits):
            return original(logits, chunk_size)
        return _statistics(logits, _scored(logits), ("entropy",), 1.0, None).entropy  # type: ignore[arg-type]

    return wrapped


def generalized_jsd_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss of GKD, GOLD and IW-OPD, with an answer for a lazy student and the whole vocabulary.

    What is of some columns alone (``top_k``) takes them from lazy logits by itself.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        labels, reduction, num_items_in_batch = (given[n] for n in ("labels", "reduction", "num_items_in_batch"))
        scalar = reduction in ("batchmean", "sum") or num_items_in_batch is not None
        whole = not given.get("top_k") and not given.get("logits_are_probs")
        if labels is None or not scalar or not whole or not _is_lazy(given["student_logits"]):
            return original(*args, **kwargs)
        mask = labels != IGNORED
        divisor: Any = 1 if reduction == "sum" else mask.sum().clamp(min=1)
        divisor = divisor if num_items_in_batch is None else num_items_in_batch
        student = given["student_logits"].deferred
        with student.under_its_autocast():
            loss, _ = linear_divergence_loss(
                student.hidden_states,
                student.weight,
                torch.where(mask, 0, IGNORED),
                _teacher(given["teacher_logits"]),
                generalized_jsd(given["beta"]),
                {"divergence": mask.float() / torch.as_tensor(divisor, device=mask.device)},
                temperature=given["temperature"],
                bias=student.bias,
                transform=student.transform,
            )
        return loss

    return wrapped


def uld_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """GOLD's loss across tokenizers, which sorts whole rows: of one answer at a time, and once more in backward."""

    @functools.wraps(original)
    def wrapped(
        self: Any,
        student_logits: Tensor,
        teacher_logits: Tensor,
        student_labels: Tensor,
        teacher_labels: Tensor,
        student_input_ids: Tensor,
        teacher_input_ids: Tensor,
        student_byte_offsets: Any = None,
        teacher_byte_offsets: Any = None,
    ) -> Tensor:
        given = (
            student_logits,
            teacher_logits,
            student_labels,
            teacher_labels,
            student_input_ids,
            teacher_input_ids,
            student_byte_offsets,
            teacher_byte_offsets,
        )
        if not _is_lazy(student_logits):
            return original(self, *given)

        def of(i: int) -> Tensor:
            with allow_materialization():
                return original(self, *(part if part is None else part[i : i + 1] for part in given)).reshape(())

        losses = [checkpoint(of, i, use_reentrant=False) for i in range(len(student_labels))]
        return torch.stack(losses).mean()

    return wrapped


def full_logit_self_distillation(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SDFT's and SDPO's divergence over the whole vocabulary, with an answer for a lazy student."""

    @functools.wraps(original)
    def wrapped(student_logits: Tensor, teacher_logits: Tensor, *, distillation_alpha: float) -> Tensor:
        if not _is_lazy(student_logits):
            return original(student_logits, teacher_logits, distillation_alpha=distillation_alpha)
        student: DeferredLogits = student_logits.deferred  # type: ignore[attr-defined]
        assert student.transform is not None
        with student.under_its_autocast():
            return linear_divergence(
                student.hidden_states,
                student.weight,
                _scored(student_logits),
                _teacher(teacher_logits),
                generalized_jsd(distillation_alpha),
                bias=student.bias,
                transform=student.transform,
            ).divergence

    return wrapped


def topk_self_distillation(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SDFT's and SDPO's divergence over the student's likeliest columns, with an answer for lazy logits.

    Lazy logits can do without it, but would take the gradients of the log-sum-exp and of the columns apart.
    """

    @functools.wraps(original)
    def wrapped(
        student_logits: Tensor,
        teacher_logits: Tensor,
        *,
        distillation_topk: int,
        distillation_alpha: float,
        distillation_add_tail: bool,
    ) -> Tensor:
        if not (_is_lazy(student_logits) and _is_lazy(teacher_logits)):
            return original(
                student_logits,
                teacher_logits,
                distillation_topk=distillation_topk,
                distillation_alpha=distillation_alpha,
                distillation_add_tail=distillation_add_tail,
            )
        labels = _scored(student_logits)
        columns = student_logits.detach().topk(distillation_topk).indices
        student, teacher = (
            logits.deferred.statistics(labels, ("selected_logps",), selected=columns).selected_logps  # type: ignore[attr-defined]
            for logits in (student_logits, teacher_logits)
        )
        tail = "bucket" if distillation_add_tail else "renormalize"
        return sparse_divergence(student, teacher, generalized_jsd(distillation_alpha), tail)

    return wrapped


def _teacher(logits: Tensor) -> Teacher | TeacherLogits:
    if not _is_lazy(logits):
        return TeacherLogits(logits)
    deferred: DeferredLogits = logits.deferred  # type: ignore[attr-defined]
    assert deferred.transform is not None
    hidden_states, weight, bias = deferred.tensors
    return Teacher(hidden_states, weight, bias, deferred.transform.logit_scale, deferred.transform.softcap)
