"""The call forms of the losses: liger-kernel's, and this library's own.

Each function reads the arguments of a ``forward`` in any of its forms and returns one description of the call, so that
the losses themselves only compute. B completions or pairs, T tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine import Head, Teacher, TeacherLogits, TeacherTopK
from liger_losses.chunked.engine.checks import check_device, check_tensor
from liger_losses.chunked.losses.completions import CompletionBatch, Completions
from liger_losses.kernels.logit_transform import LogitTransform

AnyTeacher = Teacher | TeacherLogits | TeacherTopK


def as_completions(value: Any, which: str) -> Completions:
    """``Completions`` with a batch dimension, from such or from a ``(hidden_states, labels)`` tuple."""
    if isinstance(value, Completions):
        value = value.batched()
    elif isinstance(value, (tuple, list)) and len(value) == 2:
        value = Completions(*value).batched()
    else:
        raise TypeError(
            f"{which} must be Completions(hidden_states, labels, ...) or a (hidden_states, labels) tuple, "
            f"got {type(value).__name__}."
        )
    if value.labels.dim() != 2:
        raise ValueError(f"labels of the {which} completions must be [B, T], got {tuple(value.labels.shape)}.")
    return value


def batch_of(head: Head, **groups: Completions) -> CompletionBatch:
    """A batch of named groups of completions."""
    parts = list(groups.values())
    refs = [part.ref_hidden_states for part in parts if part.ref_hidden_states is not None]
    if refs and len(refs) < len(parts):
        each = " and ".join(f"the {name}" for name in groups)
        raise ValueError(f"give ref_hidden_states for both {each} completions, or for neither.")
    return CompletionBatch(
        tuple(groups),
        head,
        [part.hidden_states for part in parts],
        [part.labels for part in parts],
        refs or None,
        tuple(part.ref_logps for part in parts),
    )


def read_pairs(
    head: Head, first: Any, second: Any, ref_input: Tensor | None, ref_logps: tuple[Tensor | None, Tensor | None]
) -> CompletionBatch:
    """Pairs, from ``(chosen, rejected)`` completions or from stacked ``(hidden_states, labels)``.

    Args:
        head: the policy's.
        first: chosen completions; or hidden states ``[2 B, T, H]``, the chosen rows first.
        second: rejected completions; or labels ``[2 B, T]``.
        ref_input, ref_logps: the reference's hidden states ``[2 B, T, H]``, or its log-probabilities of chosen and
            rejected completions (stacked form).
    """
    if not isinstance(first, Tensor):
        if any(value is not None for value in (ref_input, *ref_logps)):
            raise ValueError("with pairs, give the reference in Completions(..., ref_hidden_states=, ref_logps=).")
        chosen, rejected = as_completions(first, "chosen"), as_completions(second, "rejected")
        counts = [side.labels.shape[0] for side in (chosen, rejected)]
        if counts[0] != counts[1]:
            raise ValueError(f"there must be as many chosen as rejected completions, got {counts[0]} and {counts[1]}.")
        return batch_of(head, chosen=chosen, rejected=rejected)

    if not isinstance(second, Tensor):
        raise TypeError(f"target must be a tensor of labels in the stacked form, got {type(second).__name__}.")
    names = ("ref_input", "ref_chosen_logps", "ref_rejected_logps")
    for name, value in zip(names, (ref_input, *ref_logps), strict=True):
        if value is not None:
            check_tensor(name, value)
    if first.dim() != 3 or second.dim() != 2:
        raise ValueError(
            "the stacked form takes hidden states [2 * pairs, tokens, hidden_size] and labels [2 * pairs, tokens], "
            f"got {tuple(first.shape)} and {tuple(second.shape)}."
        )
    if first.shape[0] % 2:
        raise ValueError(
            f"the stacked form takes chosen rows, then as many rejected rows: got an odd number, "
            f"{first.shape[0]}. Pass chosen and rejected separately as Completions if they were batched otherwise."
        )
    refs = None if ref_input is None else [ref_input]
    return CompletionBatch(("chosen", "rejected"), head, [first], [second], refs, ref_logps)


def read_unpaired(
    first: Any,
    second: Any,
    third: Any,
    preference_labels: Tensor | None,
    bias: Tensor | None,
    transform: LogitTransform,
    reference: tuple[Tensor | None, Tensor | None],
) -> tuple[CompletionBatch, Tensor]:
    """Single completions, and which of them are desirable (``[B]`` bool), in one of three forms.

    - ``(weight, desirable completions, undesirable completions)``;
    - ``(weight, completions)`` and ``preference_labels``;
    - liger-kernel's ``(hidden_states, weight, labels)`` and ``preference_labels``.

    Args:
        reference: the reference's hidden states and its log-probabilities (last form).
    """
    if isinstance(second, (Tensor, nn.Module, Head)):
        check_tensor("_input", first)
        check_tensor("target", third)
        if first.dim() != 3 or third.dim() != 2:
            raise ValueError(
                "_input must be [batch, tokens, hidden_size] and target [batch, tokens], got "
                f"{tuple(first.shape)} and {tuple(third.shape)}."
            )
        batch = batch_of(Head.of(second, bias, transform), given=Completions(first, third, *reference).batched())
    else:
        if any(value is not None for value in reference):
            raise ValueError(
                "with completions, give the reference in Completions(..., ref_hidden_states=, ref_logps=)."
            )
        head = Head.of(first, bias, transform)
        if third is not None:
            if preference_labels is not None:
                raise ValueError(
                    "desirable and undesirable completions were given separately; preference_labels= would mark them "
                    "again."
                )
            desirable, undesirable = as_completions(second, "desirable"), as_completions(third, "undesirable")
            sizes, device = [side.labels.shape[0] for side in (desirable, undesirable)], head.weight.device
            marks = [torch.full((size,), i == 0, device=device) for i, size in enumerate(sizes)]
            return batch_of(head, desirable=desirable, undesirable=undesirable), torch.cat(marks)
        batch = batch_of(head, given=as_completions(second, "given"))
    count = batch.labels[0].shape[0]
    if preference_labels is None:
        raise ValueError(
            "the loss needs to know which completions are desirable: give preference_labels=, a bool for each, or "
            "desirable and undesirable completions separately."
        )
    check_per_completion("preference_labels", preference_labels, count, batch.head)
    if preference_labels.dtype != torch.bool:
        raise TypeError(
            f"preference_labels must be bool, true for desirable completions, got {preference_labels.dtype}; compare "
            "them with the value that marks these."
        )
    return batch, preference_labels


def check_per_completion(name: str, value: Any, count: int, head: Head) -> None:
    """Raise TypeError or ValueError unless this is a tensor ``[count]`` on the head's device."""
    check_tensor(name, value)
    if value.shape != (count,):
        raise ValueError(f"{name} must be [{count}], one per completion, got {tuple(value.shape)}.")
    check_device(head.weight, **{name: value})


@dataclass(frozen=True)
class DistillationCall:
    """A call of a distillation loss.

    Args:
        head: the student's.
        hidden_states: ``[..., H]``, the student's.
        labels: ``[...]``.
        teacher: in any of its forms.
        like_liger: whether liger-kernel's form was used, and its return value is expected.
    """

    head: Head
    hidden_states: Tensor
    labels: Tensor
    teacher: AnyTeacher
    like_liger: bool


def read_distillation(
    arguments: tuple[Any, Any, Any, Any, Any],
    biases: tuple[Tensor | None, Tensor | None],
    teacher: AnyTeacher | None,
    transform: LogitTransform,
) -> DistillationCall:
    """Student and teacher, in one of two forms.

    - ``(weight, hidden_states, labels, teacher)``, the teacher by position or by keyword;
    - liger-kernel's ``(student hidden_states, student weight, teacher hidden_states, teacher weight, labels)``.

    Args:
        arguments: the positional ones.
        biases: the student's and the teacher's.
        teacher: the one given by keyword.
    """
    first, second, third, fourth, fifth = arguments
    if isinstance(fourth, AnyTeacher):
        if teacher is not None:
            raise ValueError("the teacher was given twice.")
        teacher, fourth = fourth, None
    if teacher is not None:
        if fourth is not None or fifth is not None or biases[1] is not None:
            raise ValueError("with a teacher, the call is loss(weight, hidden_states, labels, teacher, bias=...).")
        return DistillationCall(Head.of(first, biases[0], transform), second, third, teacher, False)
    if fourth is None or fifth is None:
        raise ValueError(
            "there is no teacher: call loss(weight, hidden_states, labels, Teacher(hidden_states, weight)), or "
            "loss(student_hidden_states, student_weight, teacher_hidden_states, teacher_weight, labels)."
        )
    made = Teacher(third, fourth, biases[1])
    return DistillationCall(Head.of(second, biases[0], transform), first, fifth, made, True)
