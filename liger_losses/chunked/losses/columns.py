"""Divergences over some columns of each token: a sparse teacher's columns, or the student's largest.

k columns of a token. The divergence is at the loss's temperature, and the hard loss, the student's cross-entropy, at 1:
where these differ, they take a pass each.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked import EngineOptions, Head, Teacher, TeacherLogits, TeacherTopK, linear_topk
from liger_losses.chunked.core.compiled import loss_sum, statistics
from liger_losses.chunked.core.distilled import check_comparison, check_no_temperature
from liger_losses.chunked.core.inputs import target_of
from liger_losses.chunked.core.ops import weighted_sum
from liger_losses.chunked.core.target import TokenLoss
from liger_losses.chunked.losses.softmax_divergences import sparse_divergence
from liger_losses.kernels.divergence_forms import Divergence


def teacher_topk(
    teacher: Teacher, k: int, labels: Tensor | None = None, *, temperature: float = 1.0, tail: str = "bucket"
) -> TeacherTopK:
    """The k most likely tokens of a teacher at each position, and the log-probability of all others, to be saved.

    Args:
        teacher: hidden states and head.
        k: the number of tokens per position.
        labels: ``[...]``. Results of tokens with the label -100 are 0. By default, no token is masked.
        temperature: the temperature of the distillation, which divides the logits.
        tail: as in :class:`TeacherTopK`.

    Returns:
        :class:`TeacherTopK` with ``tail_logps``, on the teacher's device.
    """
    if not isinstance(teacher, Teacher):
        raise TypeError(f"teacher_topk takes a Teacher(hidden_states, weight), got {type(teacher).__name__}.")
    return largest_of(teacher, k, labels, temperature, tail, rest=True)


@torch.no_grad()
def largest_of(
    teacher: Teacher, k: int, labels: Any, temperature: Any, tail: str, rest: bool, options: Any = EngineOptions()
) -> TeacherTopK:
    """A teacher's largest columns; its logits are computed once, and not again for the student."""
    states, head = teacher.local_hidden_states, _at(teacher.head, temperature)
    if labels is not None:  # which the teacher's vocabulary may lack
        labels = torch.where(labels == options.ignore_index, labels, 0)
    found = linear_topk(states, head, k, labels, rest=rest, options=options)
    return TeacherTopK(found.logps, found.ids, tail, found.rest)


def _at(head: Head, temperature: float | Tensor) -> Head:
    """A head whose logits are divided by the temperature."""
    return head.with_fields(transform=replace(head.transform, temperature=temperature))


def check_sparse(head: Head, mask: Tensor, teacher: TeacherTopK, which: Divergence) -> None:
    """Raise TypeError or ValueError for a sparse teacher that does not fit, but for its values."""
    teacher.check(mask.shape, head)
    if which.form == "cosine":
        raise ValueError(
            "the cosine needs all logits of the teacher, and a TeacherTopK has log-probabilities: give "
            "Teacher(hidden_states, weight) or TeacherLogits(logits)."
        )
    check_no_temperature("student", head)


def loss_over_columns(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    teacher: Any,
    which: Divergence,
    weights: Mapping[str, Tensor],
    temperature: float | Tensor,
    options: EngineOptions,
    *,
    top_k: int | None = None,
    top_k_of: str = "student",
    tail: str = "bucket",
) -> tuple[Tensor, dict[str, Tensor]]:
    """``sum_t (weights["divergence"]_t divergence_t + weights["logp"]_t logp_t)``, and its statistics.

    The columns are given by a :class:`TeacherTopK`, or are the ``top_k`` largest: the teacher's, found before, or the
    student's, which its block of logits finds; the teacher's log-probabilities there are then one product.
    """
    mask, hard = labels != options.ignore_index, weights.get("logp")
    if isinstance(temperature, Tensor):  # it may be anything without loss
        temperature = torch.where(mask, temperature, 1.0)
    soft_head = _at(head, temperature)
    together = hard is not None and _is_one(temperature)
    checked, given = False, {"soft": weights["divergence"]}
    fields: dict[str, Any] = {}
    if top_k and top_k_of == "teacher":
        checked, with_rest = teacher.vocab_size <= head.vocab_size, tail in ("bucket", "lump")
        teacher = largest_of(teacher, top_k, labels, temperature, tail, with_rest, options)
    if isinstance(teacher, TeacherTopK):
        check_sparse(head, mask, teacher, which)
        if not checked:
            teacher.check_active(mask, head.vocab_size)
        fields["selected"], tail = teacher.indices, teacher.tail
        if tail == "renormalize" and not together:  # a softmax over these columns alone: others are not read
            fields["kept"] = teacher.indices
        given |= {"teacher_logps": teacher.logps}
        given |= {} if teacher.tail_logps is None else {"rest": teacher.tail_logps}
        loss: Any = functools.partial(_loss, which, tail)
    else:
        check_comparison(teacher, which, head, labels.shape)
        if which.form == "cosine" or teacher.vocab_size != head.vocab_size:
            said = f"{which.form!r} and {teacher.vocab_size} columns for the student's {head.vocab_size}"
            raise ValueError(f"top_k= needs a divergence of softmaxes and a teacher with as many columns, got {said}.")
        fields["selected"] = top_k
        given["at"] = torch.arange(labels.numel(), device=labels.device).view(labels.shape)
        loss = functools.partial(_loss_with_teacher, which, tail, teacher, temperature, options)
    names = ("selected_logps", "logp") if together else ("selected_logps",)
    given |= {"hard": hard} if together and hard is not None else {}
    target = target_of(hidden, soft_head, labels, **fields)
    metrics = ("columns",) if "at" in given else ()
    total, (found,) = loss_sum([target], names, [TokenLoss(loss, given)], options, metrics)
    if hard is not None and not together:
        of_labels = TokenLoss(weighted_sum, {"logp": hard})
        other, (others,) = loss_sum([target_of(hidden, head, labels)], ("logp",), [of_labels], options)
        total, found = total + other, {**found, **others}
    return total, found


def _loss(
    which: Divergence,
    tail: str,
    values: Mapping[str, Tensor],
    soft: Tensor,
    teacher_logps: Tensor,
    rest: Tensor | None = None,
    hard: Tensor | None = None,
) -> tuple[Tensor, None, dict[str, Tensor]]:
    """The loss ``[n]`` of some tokens, and their divergences."""
    logps = values["selected_logps"]
    rest = None if rest is None else rest.to(logps.dtype)
    found = sparse_divergence(logps, teacher_logps.to(logps.dtype), which, tail, rest)
    loss = soft * found if hard is None else soft * found + hard * values["logp"]
    return loss, None, {"divergence": found.detach()}


def _loss_with_teacher(
    which: Divergence,
    tail: str,
    teacher: Teacher | TeacherLogits,
    temperature: float | Tensor,
    options: EngineOptions,
    values: Mapping[str, Tensor],
    at: Tensor,
    **weights: Tensor,
) -> tuple[Tensor, None, dict[str, Tensor]]:
    """The same with a teacher's log-probabilities of the student's columns, of the flattened tokens ``at``."""
    with torch.no_grad():
        teacher_logps = _logps_of(teacher, at, values["columns"], temperature, options)
    return _loss(which, tail, values, teacher_logps=teacher_logps, **weights)


def _is_one(temperature: float | Tensor) -> bool:
    return not isinstance(temperature, Tensor) and temperature == 1.0


def _logps_of(
    teacher: Teacher | TeacherLogits, at: Tensor, columns: Tensor, temperature: float | Tensor, options: EngineOptions
) -> Tensor:
    """A teacher's log-probabilities ``[n, k]`` of some columns, of some of the flattened tokens."""
    divided: Any = temperature.flatten()[at] if isinstance(temperature, Tensor) else temperature
    if isinstance(teacher, TeacherLogits):
        logits: Any = teacher.take(at).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits / (divided[:, None] if isinstance(divided, Tensor) else divided)
        return logits.log_softmax(-1).gather(-1, columns)
    states = teacher.local_hidden_states.flatten(0, -2)[at]
    target = target_of(states, _at(teacher.head, divided), torch.zeros_like(at), selected=columns)
    (found,) = statistics([target], ("selected_logps",), replace(options, compact=False))
    return found["selected_logps"]
