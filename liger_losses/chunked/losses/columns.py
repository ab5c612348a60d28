"""Divergences over some columns of each token: a sparse teacher's columns, or the student's largest.

k columns of a token. The divergence is at the loss's temperature, and the hard loss, the student's cross-entropy, at 1:
where these differ, they take a pass each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import check_labels
from liger_losses.chunked import (
    EngineOptions,
    Head,
    Largest,
    Statistics,
    Teacher,
    TeacherLogits,
    TeacherTopK,
    Tokens,
    TokenSupport,
    linear_statistics,
    linear_token_loss,
    linear_topk,
)
from liger_losses.chunked.engine.decision import active_tokens
from liger_losses.chunked.engine.operators import separable_loss, support_statistics
from liger_losses.chunked.engine.query import Query
from liger_losses.chunked.engine.teachers import check_comparison, check_no_temperature
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
    if isinstance(labels, Tokens):  # the teacher's vocabulary may lack the labels
        labels = replace(labels, labels=torch.zeros_like(labels.labels))
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
) -> tuple[Tensor, Statistics]:
    """``sum_t (weights["divergence"]_t divergence_t + weights["logp"]_t logp_t)``, and its statistics.

    The columns are given by a :class:`TeacherTopK`, or are the ``top_k`` largest: the teacher's, found before, or the
    student's, which its block of logits finds; the teacher's log-probabilities there are then one product.
    """
    mask, soft, hard = labels != options.ignore_index, weights["divergence"], weights.get("logp")
    together = hard is not None and _is_one(temperature)
    of_teacher = top_k if top_k_of == "teacher" else None
    tokens: Any = labels
    if of_teacher or (hard is not None and not together):  # several calls, for which tokens are counted once
        check_labels(labels)
        counted = active_tokens([labels], head, options)
        tokens = counted if isinstance(counted, Tokens) else labels
    checked = False
    if of_teacher:
        checked, with_rest = teacher.vocab_size <= head.vocab_size, tail in ("bucket", "lump")
        teacher = largest_of(teacher, of_teacher, tokens, temperature, tail, with_rest, options)
    # Positions count from 1, as calls that drop no token give 0 for the masked ones.
    positions = torch.arange(1, labels.numel() + 1, device=labels.device).view(labels.shape)
    inputs = {"soft": soft, "at": positions}
    if hard is not None and together:
        inputs["hard"] = hard
    selected: Any = Largest(top_k or 1)
    if isinstance(teacher, TeacherTopK):
        check_sparse(head, mask, teacher, which)
        if not checked:
            teacher.check_active(mask, head.vocab_size)
        selected, tail = teacher.indices, teacher.tail
        inputs["teacher_logps"] = teacher.logps.to(soft.dtype)
        if teacher.tail_logps is not None:
            inputs["rest"] = teacher.tail_logps.to(soft.dtype)
    else:
        check_comparison(teacher, which, head, labels.shape)
        if which.form == "cosine" or teacher.vocab_size != head.vocab_size:
            given = f"{which.form!r} and {teacher.vocab_size} columns for the student's {head.vocab_size}"
            raise ValueError(f"top_k= needs a divergence of softmaxes and a teacher with as many columns, got {given}.")
    values = torch.zeros(labels.numel() + 1, dtype=soft.dtype, device=labels.device)

    def loss(s: Statistics, labels: Any, soft: Tensor, at: Tensor, hard: Any = None, **known: Any) -> Tensor:
        with torch.no_grad():
            teacher_logps = known.get("teacher_logps")
            if teacher_logps is None:
                teacher_logps = _logps_of(teacher, at, s.columns, temperature, options).to(s.selected_logps.dtype)
        found = sparse_divergence(s.selected_logps, teacher_logps, which, tail, known.get("rest"))
        values[at] = found.detach().to(values.dtype)
        return soft * found if hard is None else soft * found + hard * s.logp

    soft_head = _at(head, temperature)
    if isinstance(teacher, TeacherTopK) and tail == "renormalize" and not together:
        # A softmax over these columns alone: others are not read.
        inputs["teacher_logps"] = inputs["teacher_logps"].masked_fill(~mask[..., None], -1.0)
        support = TokenSupport(teacher.indices)
        found = support_statistics(hidden, soft_head, labels, support, ("selected_logps",), options)
        total = torch.where(mask, loss(found, labels, **inputs), 0.0).sum()
    else:
        total, found = linear_token_loss(
            hidden,
            soft_head,
            tokens,
            loss,
            ("selected_logps", "logp") if together else ("selected_logps",),
            metrics=("columns",) if isinstance(selected, Largest) else (),
            token_inputs=inputs,
            selected=selected,
            options=options,
        )
    logp = found.logp
    if hard is not None and not together:
        query = Query(("logp",), token_weights={"logp": hard})
        added, (others,) = separable_loss(hidden, head, tokens, query, options)
        total, logp = total + added, others.logp
    return total, Statistics(logp=logp, divergence=torch.where(mask, values[1:].view(labels.shape), 0.0))


def _is_one(temperature: float | Tensor) -> bool:
    return not isinstance(temperature, Tensor) and temperature == 1.0


def _logps_of(
    teacher: Teacher | TeacherLogits, at: Tensor, columns: Tensor, temperature: float | Tensor, options: EngineOptions
) -> Tensor:
    """A teacher's log-probabilities ``[n, k]`` of some columns, of some of the flattened tokens, which count from 1."""
    rows = (at - 1).clamp(min=0)
    own: Any = temperature
    if isinstance(temperature, Tensor):  # which may be anything at masked tokens, whose position is 0
        own = torch.where(at > 0, temperature.flatten()[rows], 1.0)
    if isinstance(teacher, TeacherLogits):
        logits = teacher.rows(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits / (own[:, None] if isinstance(own, Tensor) else own)
        return logits.log_softmax(-1).gather(-1, columns)
    states = teacher.local_hidden_states.flatten(0, -2)[rows]
    names, tokens = ("selected_logps",), Tokens.every(columns.shape[:1], columns.device)
    found = linear_statistics(states, _at(teacher.head, own), tokens, names, selected=columns, options=options)
    return found.selected_logps
