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

from liger_losses.chunked import ALONE, EngineOptions, Head, Teacher, TeacherLogits, TeacherTopK, linear_topk
from liger_losses.chunked.core.compiled import loss_sum, statistics
from liger_losses.chunked.core.distilled import check_comparison, check_no_temperature
from liger_losses.chunked.core.inputs import target_of
from liger_losses.chunked.core.ops import weighted_sum
from liger_losses.chunked.core.target import TokenLoss
from liger_losses.chunked.losses.softmax_divergences import sparse_divergence
from liger_losses.chunked.losses.sums import wide
from liger_losses.kernels.divergence_forms import Divergence

#: Of a teacher's logits, so many bytes are in fp32 at a time.
_BYTES = 2**26


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
    largest = linear_topk(states, head, k, _active(labels, options), rest=rest, options=options)
    return TeacherTopK(largest.logps, largest.ids, tail, largest.rest)


@torch.no_grad()
def at_largest_of(
    hidden: Tensor, head: Head, k: int, teacher: Teacher | TeacherLogits, labels: Tensor, tail: str, options: Any
) -> TeacherTopK:
    """A teacher's log-probabilities of the student's largest columns, at the temperature of the student's head."""
    labels, temperature = _active(labels, options), head.transform.temperature
    columns = linear_topk(hidden, head, k, labels, options=options).ids
    if isinstance(teacher, Teacher):
        target = target_of(teacher.local_hidden_states, _at(teacher.head, temperature), labels, selected=columns)
        (values,) = statistics([target], ("selected_logps",), options)
        return TeacherTopK(values["selected_logps"], columns, tail)
    tokens = torch.arange(labels.numel(), device=labels.device)
    if callable(teacher.logits):
        tokens = tokens[labels.flatten() != options.ignore_index]  # of no others, a function is asked
    logps = torch.zeros(columns.shape, dtype=wide(hidden.dtype), device=labels.device).flatten(0, -2)
    for at in tokens.split(max(_BYTES // (4 * teacher.vocab_size), 1)):
        logits: Any = teacher.take(at).logits
        divided = temperature.flatten()[at, None] if isinstance(temperature, Tensor) else temperature
        all_logps = (logits.to(wide(logits.dtype)) / divided).log_softmax(-1)
        logps[at] = all_logps.gather(-1, columns.flatten(0, -2)[at]).to(logps.dtype)
    return TeacherTopK(logps.view(columns.shape), columns, tail)


def _active(labels: Any, options: EngineOptions) -> Any:
    """Labels that say which tokens are masked, and nothing else: the other model's vocabulary may lack them."""
    return labels if labels is None else torch.where(labels == options.ignore_index, labels, 0)


def _at(head: Head, temperature: float | Tensor) -> Head:
    """A head whose logits are divided by the temperature."""
    return head.with_fields(transform=replace(head.transform, temperature=temperature))


def _of_first(teacher: Teacher | TeacherLogits, columns: int) -> Teacher | TeacherLogits:
    """A teacher's first columns, those that both models have."""
    if teacher.vocab_size == columns:
        return teacher
    if isinstance(teacher, Teacher):
        return Teacher(teacher.local_hidden_states, _first(teacher.head, columns))
    logits: Any = teacher.logits
    first = logits[..., :columns] if isinstance(logits, Tensor) else lambda at: logits(at)[..., :columns]
    return replace(teacher, logits=first, columns=columns)


def _first(head: Head, columns: int) -> Head:
    """The same of a head."""
    if head.vocab_size == columns:
        return head
    if head.adapters or head.ranks is not ALONE:
        raise ValueError(
            f"top_k= compares the first {columns} columns of a head of {head.vocab_size}, which must then be whole and "
            "without adapters: merge them, gather it, or give both models' heads the same columns."
        )
    return head.columns(slice(columns))


def loss_over_columns(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    teacher: Any,
    weights: Mapping[str, Tensor],
    temperature: float | Tensor,
    o: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``sum_t (weights["divergence"]_t divergence_t + weights["logp"]_t logp_t)``, and its statistics.

    The columns are given by a :class:`TeacherTopK`, or are the ``top_k`` largest of a model, which a pass without
    gradients chooses. ``o`` are the options of distillation.
    """
    mask, hard, top_k, tail, options = labels != o.ignore_index, weights.get("logp"), o.top_k, o.tail, o.engine
    check_no_temperature("student", head.transform.temperature)
    compared = _at(head, temperature)
    if top_k:
        kinds = (Teacher, TeacherLogits) if o.top_k_of == "student" else (Teacher,)
        if not isinstance(teacher, kinds):
            needed = f"{' or '.join([kind.__name__ for kind in kinds])}, got {type(teacher).__name__}"
            raise TypeError(f"top_k= of the {o.top_k_of}'s columns needs a {needed}; leave top_k= out.")
        check_comparison(teacher, o.which, head, labels.shape)
        common = min(teacher.vocab_size, head.vocab_size)
        teacher, compared = _of_first(teacher, common), _first(compared, common)
        if o.top_k_of == "teacher":
            teacher = largest_of(teacher, top_k, labels, temperature, tail, tail == "bucket", options)
        else:
            teacher = at_largest_of(hidden, compared, top_k, teacher, labels, tail, options)
    if o.which.form == "cosine":
        raise ValueError(
            "the cosine needs all logits of both models: leave top_k= out, and give Teacher(hidden_states, weight) or "
            "TeacherLogits(logits)."
        )
    # At one temperature, over the same columns, both losses read one block.
    together = hard is not None and compared.vocab_size == head.vocab_size
    together = together and not isinstance(temperature, Tensor) and temperature == 1.0
    teacher.check(mask.shape, head)
    if not top_k:
        teacher.check_active(mask, head.vocab_size)
    inputs = {"soft": weights["divergence"], "hard": hard if together else None}
    inputs |= {"teacher_logps": teacher.logps, "rest": teacher.tail_logps}
    fields = {"selected": teacher.indices}
    if teacher.tail == "renormalize" and not together:  # a softmax over these columns alone: others are not read
        fields["kept"] = teacher.indices
    loss = TokenLoss(
        functools.partial(_loss, o.which, teacher.tail), {name: x for name, x in inputs.items() if x is not None}
    )
    names = ("selected_logps", *["logp"] * together)
    total, (values,) = loss_sum([target_of(hidden, compared, labels, **fields)], names, [loss], options)
    if hard is not None and not together:
        hard_loss = TokenLoss(weighted_sum, {"logp": hard})
        other, (others,) = loss_sum([target_of(hidden, head, labels)], ("logp",), [hard_loss], options)
        total, values = total + other, {**values, **others}
    return total, values


def _loss(
    which: Divergence,
    tail: str,
    values: Mapping[str, Tensor],
    soft: Tensor,
    teacher_logps: Tensor,
    hard: Tensor | None = None,
    rest: Tensor | None = None,
) -> tuple[Tensor, None, dict[str, Tensor]]:
    """The losses ``[n]`` of some tokens, and their divergences."""
    logps = values["selected_logps"]
    rest = None if rest is None else rest.to(logps.dtype)
    divergences = sparse_divergence(logps, teacher_logps.to(logps.dtype), which, tail, rest)
    loss = soft * divergences if hard is None else soft * divergences + hard * values["logp"]
    return loss, None, {"divergence": divergences.detach()}
