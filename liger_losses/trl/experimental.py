"""TRL's experimental trainers, which take losses of ``model(...).logits``: their models' heads become lazy.

What they do with logits by helpers of TRL's own (which never look at a tensor's class) is answered here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.distillation import generalized_jsd
from liger_losses.chunked.divergence import linear_divergence_loss
from liger_losses.chunked.teachers import Teacher, TeacherLogits
from liger_losses.patching.head import lazily, patch_head
from liger_losses.patching.lazy_logits import LazyLogits

IGNORED = -100


def lazy_head(init: Callable[..., None]) -> Callable[..., None]:
    """A trainer's ``__init__``, after which its model's head is lazy."""

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for model in (self.model, getattr(self, "teacher_model", None)):
            if isinstance(model, torch.nn.Module):
                wrong = [
                    f"{change.path or 'the head'}: {change.reason}" for change in patch_head(model) if change.reason
                ]
                if wrong:
                    raise TypeError(
                        f"the last layer of {type(model).__name__} cannot be lazy ({'; '.join(wrong)}): train it "
                        "outside of liger_losses.trl.enable()."
                    )

    return wrapped


def within_lazily(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method in which heads are lazy without gradients too: a teacher's."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with lazily():
            return method(*args, **kwargs)

    return wrapped


def _statistics(
    logits: LazyLogits, index: Tensor, names: tuple[str, ...], temperature: float, mask: Tensor | None
) -> Any:
    labels = index if mask is None else torch.where(mask != 0, index, IGNORED)
    scaled = logits / temperature if temperature != 1.0 else logits
    return scaled.recipe.statistics(labels, names)  # type: ignore[attr-defined]


def _is_answered(logits: Tensor, index: Tensor) -> bool:
    """Whether there is one index per row of logits that are still lazy."""
    lazy = isinstance(logits, LazyLogits) and logits.changed is None and not logits.recipe.normalized
    return lazy and logits.recipe.transform is not None and index.shape == logits.shape[:-1]  # type: ignore[attr-defined]


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
        index = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        if not _is_answered(logits, index):
            return original(logits, chunk_size)
        return _statistics(logits, index, ("entropy",), 1.0, None).entropy  # type: ignore[arg-type]

    return wrapped


def generalized_jsd_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """GKD's loss, with an answer for a lazy student."""

    @functools.wraps(original)
    def wrapped(
        student_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor | None = None,
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        num_items_in_batch: Any = None,
    ) -> Tensor:
        given = (student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch)
        scalar = reduction in ("batchmean", "sum") or num_items_in_batch is not None
        index = torch.zeros(student_logits.shape[:-1], dtype=torch.int64, device=student_logits.device)
        if labels is None or not scalar or not _is_answered(student_logits, index):
            return original(*given)
        mask = labels != IGNORED
        divisor: Any = 1 if reduction == "sum" else mask.sum().clamp(min=1)
        divisor = divisor if num_items_in_batch is None else num_items_in_batch
        student = student_logits.recipe  # type: ignore[attr-defined]
        with student.as_it_was():
            loss, _ = linear_divergence_loss(
                student.hidden_states,
                student.weight,
                torch.where(mask, 0, IGNORED),
                _teacher(teacher_logits),
                generalized_jsd(beta),
                {"divergence": mask.float() / torch.as_tensor(divisor, device=mask.device)},
                temperature=temperature,
                bias=student.bias,
                transform=student.transform,
            )
        return loss

    return wrapped


def _teacher(logits: Tensor) -> Teacher | TeacherLogits:
    if not isinstance(logits, LazyLogits) or logits.changed is not None or logits.recipe.transform is None:
        return TeacherLogits(logits)
    recipe = logits.recipe
    assert recipe.transform is not None
    hidden_states, weight, bias = recipe.tensors
    return Teacher(hidden_states, weight, bias, recipe.transform.logit_scale, recipe.transform.softcap)
