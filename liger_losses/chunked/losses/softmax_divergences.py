"""Divergences between two softmaxes as pure functions of log-probabilities, and over some columns of each token.

V columns that both vocabularies have, k columns of a token. p is the student's softmax, q the teacher's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import check_alike, check_names
from liger_losses.chunked import ALONE, EngineOptions, Head, Teacher, TeacherLogits, TeacherTopK, linear_topk
from liger_losses.chunked.core.compiled import loss_sum, statistics
from liger_losses.chunked.core.distilled import EARLIER_TAILS, TAILS, check_comparison, check_no_temperature
from liger_losses.chunked.core.inputs import target_of
from liger_losses.chunked.core.ops import weighted_sum
from liger_losses.chunked.core.stream import counted_once
from liger_losses.chunked.core.target import Target, TokenLoss
from liger_losses.chunked.losses.sums import wide
from liger_losses.kernels.autograd import edges, once_differentiable
from liger_losses.kernels.divergence_forms import FORMS, Divergence, finite_logs
from liger_losses.kernels.divergence_terms import summed_terms


def divergence(log_p: Tensor, log_q: Tensor, which: Divergence) -> Tensor:
    """Any :class:`liger_losses.Divergence` except the cosine, ``[...]``, from the log-probabilities of C classes.

    Args:
        log_p: ``[..., C]``, the student's log-softmax, differentiable (once). The gradient is accurate even if p and q
            are close. A probability of 0 (a logarithm of -inf, or below -1e30) is treated as -10,000 nats, in both
            models. The gradient omits a term that the backward of the log-softmax would remove.
        log_q: ``[..., C]``, the teacher's log-softmax, a constant.
        which: ``Divergence.reverse_kl()``, for example.

    Returns:
        ``[...]``, in nats, in the dtype of ``log_p``.

    Raises:
        ValueError: the divergence is the cosine.
    """
    if not isinstance(which, Divergence):
        raise TypeError(f"which must be a Divergence, such as Divergence.forward_kl(), got {which!r}.")
    check_alike(log_p=log_p, log_q=log_q)
    if which.form == "cosine":
        raise ValueError(
            "cosine similarity needs logits, got log-probabilities; use LigerFusedLinearCosineSimilarityLoss."
        )
    log_p, log_q = finite_logs(log_p), finite_logs(log_q)
    parameter = which.row_parameter(-(log_q.exp() * log_q).sum(-1)) if which.by_entropy else None
    return _SumOfTerms.apply(log_p, log_q, which, parameter)


class _SumOfTerms(torch.autograd.Function):
    """The sum of a divergence's terms, with the derivatives of :func:`terms`, which do not cancel."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, which: Divergence, parameter: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():  # which cannot trace how a power series is found
            total, h = _summed_operator(log_p, log_q, parameter, which.form, which.a, which.b, which.c)
        else:
            total, h = summed_terms(which, log_p, log_q, parameter)
        ctx.save_for_backward(h, *edges(log_p))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        h, *_ = ctx.saved_tensors
        return h * g[..., None], None, None, None


@torch.library.custom_op("liger_losses::divergence_terms", mutates_args=())
def _summed_operator(
    log_p: Tensor, log_q: Tensor, parameter: Tensor | None, form: str, a: float, b: float, c: float
) -> tuple[Tensor, Tensor]:
    return summed_terms(Divergence(form, a, b, c), log_p, log_q, parameter)


@_summed_operator.register_fake
def _(log_p: Tensor, log_q: Tensor, parameter: Any, form: str, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    return log_p.new_empty(log_p.shape[:-1]), torch.empty_like(log_p)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(q || p) = sum q (log q - log p)``; arguments and result as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.forward_kl())


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(p || q) = sum p (log p - log q)``; arguments and result as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.reverse_kl())


def jsd(log_p: Tensor, log_q: Tensor, *, beta: float = 0.5, convention: str = "gkd") -> Tensor:
    """The generalized Jensen-Shannon divergence, :meth:`liger_losses.Divergence.jsd`; arguments and result as in
    :func:`divergence`.

    Args:
        beta: share of the teacher in the mixture, in [0, 1].
        convention: ``gkd`` or ``interpolated``.

    Raises:
        TypeError, ValueError: a beta out of its range, or another convention.
    """
    return divergence(log_p, log_q, Divergence.jsd(beta, convention))


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``1/2 sum |p - q|`` (arXiv:2307.15190, eq. 5); arguments and result as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.total_variation())


def alpha_beta_divergence(log_p: Tensor, log_q: Tensor, alpha: float, beta: float) -> Tensor:
    """``sum (a/s q^s + b/s p^s - q^a p^b) / (a b)``, ``s = a + b`` (ABKD, arXiv:2505.04560), and its limits.

    Args:
        log_p, log_q: as in :func:`divergence`, which also describes the result.
        alpha, beta: ``a`` and ``b``, at least 0, and not both 0: (1, 0) is ``KL(q || p)``, (0, 1) is ``KL(p || q)``.

    Raises:
        TypeError, ValueError: alpha or beta out of their range.
    """
    return divergence(log_p, log_q, Divergence.alpha_beta(alpha, beta))


def sparse_divergence(
    logps: Tensor,
    teacher_logps: Tensor,
    which: Divergence,
    tail: str = "bucket",
    teacher_tail_logps: Tensor | None = None,
) -> Tensor:
    """A divergence over k vocabulary entries, the largest of the teacher or the student, and the remaining probability.

    Args:
        logps: ``[..., k]``, the student's log-probabilities of these entries, differentiable (once).
        teacher_logps: ``[..., k]``, the teacher's log-probabilities of these entries.
        which: see :func:`divergence`.
        tail: ``bucket``, ``renormalize`` or ``none``; see :class:`liger_losses.TeacherTopK`. With
            ``none``, each entry adds the term of the formula, such as ``q (log q - log p)``; the sum may be negative.
        teacher_tail_logps: ``[...]``, the teacher's log-probability of all other entries together, for ``bucket``.

    Returns:
        ``[...]``, in nats.
    """
    check_alike(logps=logps, teacher_logps=teacher_logps)
    check_names([tail], TAILS, "tail", EARLIER_TAILS)
    if which.by_entropy and tail == "none":
        raise ValueError("Divergence.kl_by_entropy needs the probability of all columns: leave tail='none' out.")
    terms = divergence(distribution(logps, tail), distribution(teacher_logps, tail, teacher_tail_logps), which)
    added = FORMS[which.form].added(which.a, which.b, which.c) if tail == "none" else 0.0
    return terms if not added else terms - added * (logps.exp() - teacher_logps.exp()).sum(-1)


def distribution(logps: Tensor, tail: str, tail_logps: Tensor | None = None) -> Tensor:
    """Log-probabilities that add up to 1, from the log-probabilities of some columns ``[..., k]``: ``[..., k + 1]`` or
    ``[..., k]``; unchanged with the tail ``none``."""
    if tail == "renormalize":
        return logps.log_softmax(-1)
    if tail == "none":
        return logps
    rest = log_rest(logps) if tail_logps is None else tail_logps[..., None].to(logps.dtype)
    return torch.cat([logps, rest], -1)


def log_rest(logps: Tensor) -> Tensor:
    """``log(1 - sum exp(logps))``, ``[..., 1]``: of all other columns, clamped where rounding leaves nothing."""
    return (1 - logps.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logps.dtype).eps).log()


# --- The loss over some columns of each token: a sparse teacher's, or the largest -------------------------------------


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
    if labels is not None:  # which the teacher's vocabulary may lack: they say which tokens are masked, and no more
        labels = torch.where(labels == options.ignore_index, -100, 0)
    largest = linear_topk(states, head, k, labels, rest=rest, options=replace(options, ignore_index=-100))
    return TeacherTopK(largest.logps, largest.ids, tail, largest.rest)


@torch.no_grad()
def at_largest_of(student: Target, teacher: Teacher | TeacherLogits, tail: str, options: Any) -> TeacherTopK:
    """A teacher's log-probabilities of the student's largest columns, at the student's temperature."""
    labels, temperature = student.labels, student.temperature
    (largest,) = statistics([student], ("selected_logps",), options, ("columns",))
    columns = largest["columns"]
    if isinstance(teacher, Teacher):
        fields = {"selected": columns, "counted": student.counted}
        target = target_of(teacher.local_hidden_states, _at(teacher.head, temperature), labels, **fields)
        (values,) = statistics([target], ("selected_logps",), options)
        return TeacherTopK(values["selected_logps"], columns, tail)
    tokens = torch.arange(labels.numel(), device=labels.device)
    if callable(teacher.logits):
        tokens = tokens[labels.flatten() != options.ignore_index]  # of no others, a function is asked
    logps = torch.zeros(columns.shape, dtype=wide(student.hidden.dtype), device=labels.device).flatten(0, -2)
    for at in tokens.split(max(_BYTES // (4 * teacher.vocab_size), 1)):
        logits: Any = teacher.take(at).logits
        divided = temperature.flatten()[at, None] if isinstance(temperature, Tensor) else temperature
        all_logps = (logits.to(wide(logits.dtype)) / divided).log_softmax(-1)
        logps[at] = all_logps.gather(-1, columns.flatten(0, -2)[at]).to(logps.dtype)
    return TeacherTopK(logps.view(columns.shape), columns, tail)


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

    The divergence is at the loss's temperature, and the hard loss, the student's cross-entropy, at 1: where these
    differ, they take a pass each.

    The columns are given by a :class:`TeacherTopK`, or are the ``top_k`` largest of a model, which a pass without
    gradients chooses. ``o`` are the options of distillation.
    """
    mask, hard, top_k, tail, options = labels != o.ignore_index, weights.get("logp"), o.top_k, o.tail, o.engine
    check_no_temperature("student", head.transform.temperature)
    if o.which.form == "cosine":
        raise ValueError(
            "the cosine needs all logits of both models: leave top_k= out, and give Teacher(hidden_states, weight) or "
            "TeacherLogits(logits)."
        )
    compared = _at(head, temperature)
    if top_k:
        kinds = (Teacher, TeacherLogits) if o.top_k_of == "student" else (Teacher,)
        if not isinstance(teacher, kinds):
            needed = f"{' or '.join([kind.__name__ for kind in kinds])}, got {type(teacher).__name__}"
            raise TypeError(f"top_k= of the {o.top_k_of}'s columns needs a {needed}; leave top_k= out.")
        check_comparison(teacher, o.which, head, labels.shape)
        common = min(teacher.vocab_size, head.vocab_size)
        teacher, compared = _of_first(teacher, common), _first(compared, common)
    else:
        teacher.check(labels.shape, head)
    # All passes know which tokens have a label, for which the host waits once.
    (student,) = counted_once([target_of(hidden, compared, labels, selected=top_k)], options)
    if top_k and o.top_k_of == "teacher":
        teacher = largest_of(teacher, top_k, labels, temperature, tail, tail == "bucket", options)
    elif top_k:
        teacher = at_largest_of(student, teacher, tail, options)
    else:
        teacher.check_active(mask, head.vocab_size)
    # At one temperature, over the same columns, both losses read one block.
    together = hard is not None and compared.vocab_size == head.vocab_size
    together = together and not isinstance(temperature, Tensor) and temperature == 1.0
    inputs = {"soft": weights["divergence"], "hard": hard if together else None}
    inputs |= {"teacher_logps": teacher.logps, "rest": teacher.tail_logps}
    fields: dict[str, Any] = {"selected": teacher.indices, "counted": student.counted}
    if teacher.tail == "renormalize" and not together:  # a softmax over these columns alone: others are not read
        fields["kept"] = teacher.indices
    loss = TokenLoss(
        functools.partial(_loss, o.which, teacher.tail), {name: x for name, x in inputs.items() if x is not None}
    )
    names = ("selected_logps", *["logp"] * together)
    total, (values,) = loss_sum([target_of(hidden, compared, labels, **fields)], names, [loss], options)
    if hard is not None and not together:
        of_logp = target_of(hidden, head, labels, counted=student.counted)
        other, (others,) = loss_sum([of_logp], ("logp",), [TokenLoss(weighted_sum, {"logp": hard})], options)
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
