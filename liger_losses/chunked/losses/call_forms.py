"""The call forms of the losses: liger-kernel's, and this library's own.

Each function reads the arguments of a ``forward`` in any of its forms and returns one description of the call, so that
the losses themselves only compute. B completions or pairs, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine import EngineOptions, Head, Statistics, Tokens, linear_statistics
from liger_losses.chunked.engine.checks import check_device, check_tensor
from liger_losses.chunked.engine.decision import drops_tokens
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits, Teachers, TeacherTopK
from liger_losses.kernels.logit_transform import LogitTransform

#: The documented names of a call's arguments by position, in the forms that each kind of loss has. They are keywords,
#: too, beside the names of liger-kernel, which the parameters of ``forward`` have.
FORMS = {
    "tokens": (("head", "hidden_states", "labels"),),
    "pairs": (("head", "chosen", "rejected"), ("head", "hidden_states", "labels")),
    "completions": (
        ("head", "desirable", "undesirable"),
        ("head", "completions"),
        ("hidden_states", "head", "labels"),
    ),
    "policy": (("hidden_states", "head", "selected_token_ids", "attention_mask", "advantages"),),
    "distillation": (("head", "hidden_states", "labels", "teacher"),),
}

AnyHead = Tensor | nn.Module | Head
AnyTeacher = Teacher | TeacherLogits | TeacherTopK | Teachers


@dataclass(frozen=True)
class Completions:
    """A batch of completions: one side of pairs, for example.

    Args:
        hidden_states: ``[B, T, H]``, or ``[T, H]`` for a single completion.
        labels: ``[B, T]`` or ``[T]``; prompts and padding carry ``ignore_index``.
        ref_hidden_states: the reference model's hidden states, in the shape of ``hidden_states``.
        ref_logps: or the reference model's precomputed log-probabilities: per sequence ``[B]`` (summed, averaged or
            weighted as the loss does it), or per token in the shape of ``labels``, at the position of the label that
            is predicted (after any shift).
        temperature: in the shape of ``labels``, what each token's logits are divided by, policy's and reference's
            alike, for a loss whose own temperature is 1.
    """

    hidden_states: Tensor
    labels: Tensor
    ref_hidden_states: Tensor | None = None
    ref_logps: Tensor | None = None
    temperature: Tensor | None = None

    def batched(self) -> Completions:
        """The same with a batch dimension; a single completion becomes a batch of one."""
        for name, value in vars(self).items():
            if value is not None or name in ("hidden_states", "labels"):
                check_tensor(name, value, allow_dtensor=name.endswith("hidden_states"))
        if self.labels.dim() != 1:
            return self
        ref_hidden, ref_logps = self.ref_hidden_states, self.ref_logps
        return Completions(
            self.hidden_states[None],
            self.labels[None],
            None if ref_hidden is None else ref_hidden[None],
            ref_logps if ref_logps is None or ref_logps.shape == (1,) else ref_logps[None],
            None if self.temperature is None else self.temperature[None],
        )


@dataclass(frozen=True)
class CompletionBatch:
    """All completions of one call, whichever form it had.

    Args:
        names: what error messages call each group: ``("chosen", "rejected")``, for example.
        head: the policy's.
        hidden_states, labels: one ``[B, T, H]`` and ``[B, T]`` per group; or a single tensor of each that holds two
            groups of ``B / 2`` rows. Such stacked rows are never copied, nor are their gradients.
        ref_hidden_states: the reference model's, one per tensor of labels, or ``None``.
        ref_logps: precomputed log-probabilities of the reference, ``[B]`` or ``[B, T]``, one or ``None`` per group.
        ref_head: the reference model's.
        temperatures: one for each token, in the shape of each tensor of labels; ``None`` for the head's temperature.
    """

    names: tuple[str, ...]
    head: Head
    hidden_states: list[Tensor]
    labels: list[Tensor]
    ref_hidden_states: list[Tensor] | None
    ref_logps: tuple[Tensor | None, ...]
    ref_head: Head | None = None
    temperatures: list[Tensor] | None = None

    @classmethod
    def of(cls, head: Head, **groups: Completions) -> CompletionBatch:
        """A batch of named groups."""
        parts = list(groups.values())
        refs = [part.ref_hidden_states for part in parts if part.ref_hidden_states is not None]
        temperatures = [part.temperature for part in parts if part.temperature is not None]
        for name, found in {"ref_hidden_states": refs, "temperature": temperatures}.items():
            if found and len(found) < len(parts):
                each = " and ".join(f"the {name}" for name in groups)
                raise ValueError(f"give {name} for both {each} completions, or for neither.")
        hidden, labels = [part.hidden_states for part in parts], [part.labels for part in parts]
        ref_logps = tuple(part.ref_logps for part in parts)
        return cls(tuple(groups), head, hidden, labels, refs or None, ref_logps, temperatures=temperatures or None)

    def at_temperatures(self, head: Head, extra: Sequence[Tensor] = ()) -> Head:
        """A head whose logits are divided by each token's temperature, if there is one; ``extra`` ones come last."""
        if self.temperatures is None:
            return head
        parts = [*self.temperatures, *extra]
        whole = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        return head.with_fields(transform=replace(head.transform, temperature=whole))

    def groups(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One tensor per group, from one per tensor of labels."""
        if len(tensors) == len(self.names):
            return list(tensors)
        half = tensors[0].shape[0] // 2
        return [tensors[0][:half], tensors[0][half:]]

    def group_statistics(self, found: Sequence[Statistics]) -> list[Statistics]:
        """The same for the engine's statistics."""
        names = [name for name in Statistics._fields if getattr(found[0], name) is not None]
        groups = {name: self.groups([getattr(part, name) for part in found]) for name in names}
        return [Statistics(**{name: groups[name][i] for name in names}) for i in range(len(self.names))]

    def select(self, options: EngineOptions, extra: Sequence[Tensor] = ()) -> Any:
        """The active tokens of all labels (and of ``extra`` ones), for policy and reference alike."""
        labels = [*self.labels, *extra]
        for part in labels:
            check_device(self.head.weight, labels=part)
        if torch.compiler.is_dynamo_compiling():
            return labels
        compact = drops_tokens([part.shape for part in labels], self.head, options)
        chosen = options.ignore_index, compact, options.backend
        if self.ref_head is None or self.ref_head.vocab_size >= self.head.vocab_size:
            return Tokens.select(labels, self.head.vocab_size, *chosen)
        with naming_the_reference():
            return Tokens.select(labels, self.ref_head.vocab_size, *chosen)

    def reference_logps(self, tokens: Any, options: EngineOptions) -> list[Tensor | None]:
        """Each group's log-probabilities under the reference, ``[B]`` or ``[B, T]``; ``None`` without one."""
        if self.ref_hidden_states is None or self.ref_head is None:
            return [None if logps is None else logps.detach() for logps in self.ref_logps]
        with torch.no_grad(), naming_the_reference():
            tokens = tokens.first(len(self.labels)) if isinstance(tokens, Tokens) else tokens[: len(self.labels)]
            head = self.at_temperatures(self.ref_head)
            found = linear_statistics(self.ref_hidden_states, head, tokens, options=options)
        return list(self.groups([part.logp for part in found]))

    def check_reference(self, needed: str | None, how: str) -> None:
        """Raise TypeError or ValueError unless each group has at most one reference, one if ``needed``, and it fits.

        ``how`` says how to give one, and how to do without.
        """
        hidden = self.ref_hidden_states
        for which, labels, logps in zip(self.names, self.groups(self.labels), self.ref_logps, strict=True):
            if needed and hidden is None and logps is None:
                raise ValueError(f"{needed}, but the {which} completions have none. {how}")
            if logps is None:
                continue
            if hidden is not None:
                raise ValueError(f"the {which} completions have both ref_hidden_states and ref_logps; give one.")
            name = f"ref_logps of the {which} completions"
            check_tensor(name, logps)
            if not logps.is_floating_point():
                raise TypeError(f"{name} must be floating point, got {logps.dtype}.")
            if logps.shape not in (labels.shape[:1], labels.shape):
                expected = f"[{labels.shape[0]}] (one per sequence) or {tuple(labels.shape)} (one per token)"
                raise ValueError(f"{name} must be {expected}, got {tuple(logps.shape)}.")
            check_device(self.head.weight, **{name: logps})
        if hidden is not None and self.ref_head is None:
            raise ValueError(
                "there are hidden states of a reference, but no ref_weight= to project them; pass the policy's weight "
                "there if the reference model shares it."
            )
        for ref, part in zip(hidden or [], self.labels, strict=False):
            check_tensor("the reference's hidden states", ref, allow_dtensor=True)
            if ref.shape[:-1] != part.shape:
                expected = f"[{part.shape[0]}, {part.shape[1]}, hidden_size], one for each label"
                raise ValueError(f"the reference's hidden states must be {expected}, got {tuple(ref.shape)}.")


@contextmanager
def naming_the_reference() -> Iterator[None]:
    """Errors raised inside say that they are about the reference model."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"of the reference model (its hidden states, weight and bias): {error}") from None


def as_completions(value: Any, which: str) -> Completions:
    """``Completions`` with a batch dimension, from such or from a ``(hidden_states, labels)`` tuple."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        value = Completions(*value)
    if not isinstance(value, Completions):
        raise TypeError(
            f"{which} must be Completions(hidden_states, labels, ...) or a (hidden_states, labels) tuple, "
            f"got {type(value).__name__}."
        )
    value = value.batched()
    if value.labels.dim() != 2:
        raise ValueError(
            f"labels of the {which} completions must be [B, T], got {tuple(value.labels.shape)}; completions are "
            "(hidden_states, labels)."
        )
    return value


def _only_in_completions(what: str, reference: Sequence[Tensor | None], temperature: Tensor | None) -> None:
    """Raise ValueError for what :class:`Completions` bring with them."""
    for name, values, fields in (
        ("reference", reference, "ref_hidden_states=, ref_logps="),
        ("temperature", [temperature], "temperature="),
    ):
        if any(value is not None for value in values):
            raise ValueError(f"with {what}, give the {name} in Completions(..., {fields}).")


def read_pairs(
    head: Head,
    first: Any,
    second: Any,
    ref_input: Tensor | None,
    ref_logps: tuple[Tensor | None, Tensor | None],
    temperature: Tensor | None = None,
) -> CompletionBatch:
    """Pairs, from chosen and rejected completions, or from stacked hidden states and labels.

    The stacked form is ``[2 B, T, H]`` and ``[2 B, T]``, the chosen rows first. Its reference is ``ref_input``
    ``[2 B, T, H]`` or ``ref_logps`` of chosen and rejected completions.
    """
    if not isinstance(first, Tensor):
        _only_in_completions("pairs", (ref_input, *ref_logps), temperature)
        chosen, rejected = as_completions(first, "chosen"), as_completions(second, "rejected")
        counts = [side.labels.shape[0] for side in (chosen, rejected)]
        if counts[0] != counts[1]:
            raise ValueError(f"there must be as many chosen as rejected completions, got {counts[0]} and {counts[1]}.")
        return CompletionBatch.of(head, chosen=chosen, rejected=rejected)

    if not isinstance(second, Tensor):
        raise TypeError(f"target must be a tensor of labels in the stacked form, got {type(second).__name__}.")
    references = {"ref_input": ref_input, "ref_chosen_logps": ref_logps[0], "ref_rejected_logps": ref_logps[1]}
    for name, value in references.items():
        if value is not None:
            check_tensor(name, value, allow_dtensor=name == "ref_input")
    if second.is_floating_point() and second.dim() == 3:
        raise TypeError(
            "target must be labels, got hidden states: for chosen and rejected completions, call loss(head, "
            "Completions(hidden_states, labels), Completions(hidden_states, labels))."
        )
    if first.dim() != 3 or second.dim() != 2:
        raise ValueError(
            "the stacked form takes hidden states [2 * pairs, tokens, hidden_size] and labels [2 * pairs, tokens], "
            f"got {tuple(first.shape)} and {tuple(second.shape)}."
        )
    if first.shape[0] % 2:
        raise ValueError(
            f"the stacked form takes chosen rows, then as many rejected rows: got an odd number, {first.shape[0]}. "
            "Pass chosen and rejected separately as Completions if they were batched otherwise."
        )
    refs, temperatures = (None if value is None else [value] for value in (ref_input, temperature))
    return CompletionBatch(("chosen", "rejected"), head, [first], [second], refs, ref_logps, temperatures=temperatures)


def read_unpaired(
    arguments: tuple[Any, Any, Any],
    preference_labels: Tensor | None,
    bias: Tensor | None,
    transform: LogitTransform,
    reference: tuple[Tensor | None, Tensor | None],
    temperature: Tensor | None = None,
) -> tuple[CompletionBatch, Tensor]:
    """Single completions, and which of them are desirable (``[B]`` bool), in one of three forms.

    - ``(weight, desirable completions, undesirable completions)``;
    - ``(weight, completions)`` and ``preference_labels``;
    - liger-kernel's ``(hidden_states, weight, labels)`` and ``preference_labels``.

    ``reference`` are the reference's hidden states and its log-probabilities in the last form.
    """
    weight, given, others = arguments
    if isinstance(given, (Tensor, nn.Module, Head)):
        hidden, weight, labels = arguments
        check_tensor("_input", hidden, allow_dtensor=True)
        check_tensor("target", labels)
        if hidden.dim() != 3 or labels.dim() != 2:
            expected = "_input must be [batch, tokens, hidden_size] and target [batch, tokens]"
            form = "in the form loss(_input, weight, target)"
            raise ValueError(f"{expected} {form}, got {tuple(hidden.shape)} and {tuple(labels.shape)}.")
        given, others = Completions(hidden, labels, *reference, temperature), None
    else:
        _only_in_completions("completions", reference, temperature)
    head = Head.of(weight, bias, transform)
    if others is not None:
        if preference_labels is not None:
            raise ValueError(
                "desirable and undesirable completions were given separately; preference_labels= would mark them again."
            )
        desirable, undesirable = as_completions(given, "desirable"), as_completions(others, "undesirable")
        counts = [part.labels.shape[0] for part in (desirable, undesirable)]
        marks = torch.arange(sum(counts), device=head.weight.device) < counts[0]
        return CompletionBatch.of(head, desirable=desirable, undesirable=undesirable), marks
    batch = CompletionBatch.of(head, given=as_completions(given, "given"))
    if preference_labels is None:
        raise ValueError(
            "the loss needs to know which completions are desirable: give preference_labels=, a bool for each, or "
            "desirable and undesirable completions separately."
        )
    check_per_completion("preference_labels", preference_labels, batch.labels[0].shape[0], head)
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


def read_distillation(
    arguments: tuple[Any, Any, Any, Any, Any],
    biases: tuple[Tensor | None, Tensor | None],
    teacher: AnyTeacher | None,
    transform: LogitTransform,
) -> tuple[Head, Tensor, Tensor, AnyTeacher, bool]:
    """The student's head, hidden states ``[..., H]`` and labels ``[...]``, the teacher, and whether liger-kernel's form
    was used (whose return value is another).

    - ``(weight, hidden_states, labels, teacher)``, the teacher by position or by keyword;
    - liger-kernel's ``(student hidden_states, student weight, teacher hidden_states, teacher weight, labels)``.

    ``biases`` are the student's and the teacher's; ``teacher`` is the one given by keyword.
    """
    first, second, third, fourth, fifth = arguments
    if teacher is not None and not isinstance(teacher, AnyTeacher):
        fourth, fifth = teacher, None
    if fourth is not None and fifth is None and not isinstance(fourth, AnyTeacher):
        raise TypeError(
            "the teacher must be Teacher(hidden_states, weight), TeacherLogits(logits), TeacherTopK(logps, indices) or "
            f"Teachers([...], which), got {type(fourth).__name__}."
        )
    if isinstance(fourth, AnyTeacher):
        if teacher is not None:
            raise ValueError("the teacher was given twice: by position, and as teacher=; leave one out.")
        teacher, fourth = fourth, None
    if teacher is not None:
        if fourth is not None or fifth is not None or biases[1] is not None:
            raise ValueError("with a teacher, the call is loss(weight, hidden_states, labels, teacher, bias=...).")
        return Head.of(first, biases[0], transform), second, third, teacher, False
    if fourth is None or fifth is None:
        raise ValueError(
            "there is no teacher: call loss(weight, hidden_states, labels, Teacher(hidden_states, weight)), or "
            "loss(student_hidden_states, student_weight, teacher_hidden_states, teacher_weight, labels)."
        )
    return Head.of(second, biases[0], transform), first, fifth, Teacher(third, fourth, biases[1]), True
