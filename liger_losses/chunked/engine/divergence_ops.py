"""Differentiable operations on the outputs of two models' ``lm_head``, and no loss among them:

- :func:`linear_divergence`: a number per token, if tokens are coupled;
- :func:`linear_divergence_loss`: a sum of a function of each token's own, in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from liger_losses.checks import check_tensor
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.operators import operator, query_statistics, separable_loss
from liger_losses.chunked.engine.plan import EngineOptions
from liger_losses.chunked.engine.query import Comparison, Query, Statistics
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits, Teachers
from liger_losses.chunked.engine.tokens import Counting, Tokens
from liger_losses.kernels import choose_backend
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform


@operator
def linear_divergence(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor | Tokens,
    teacher: Teacher | TeacherLogits | Teachers,
    divergence: Divergence,
    *,
    logp: bool = False,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> Statistics:
    """The divergence between student and teacher for each token, a differentiable operation.

    Backward computes the logits again. If the loss is a weighted sum with known weights, use
    :func:`linear_divergence_loss`.

    Args:
        hidden_states: ``[..., H]``, of the student.
        weight: the student's ``lm_head``: ``[Vs, H]``, a linear layer, or a :class:`Head`.
        labels: ``[...]`` int64. Without ``logp``, they only say which tokens are masked (``ignore_index``).
        teacher: see :class:`liger_losses.Teacher`.
        divergence: see :class:`liger_losses.Divergence`.
        logp: also return the student's log-probabilities of the labels, over its whole vocabulary and at temperature
            1, differentiable.
        temperature: divides the logits of both models in the divergence: a number, or ``[...]`` with one for each
            hidden state.
        bias: ``[Vs]``.
        transform: scale and soft-cap of the student's logits.
        options: see :class:`EngineOptions`.

    Returns:
        :class:`Statistics` with ``divergence`` (and ``logp``) in the labels' shape; fp32, or fp64 for fp64 inputs.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit together.
    """
    names = ("divergence", "logp") if logp else ("divergence",)
    head = Head.of(weight, bias, transform)
    if isinstance(teacher, Teachers):
        given: Any = {"logp": logp, "temperature": temperature, "options": options}
        each = _of_each(teacher, labels, head, options)
        return _added([linear_divergence(hidden_states, head, own, one, divergence, **given) for one, own in each])
    query = Query(names, comparison=Comparison(teacher, divergence, temperature))
    return query_statistics(hidden_states, head, labels, query, options)[0]


@operator
def linear_divergence_loss(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor | Tokens,
    teacher: Teacher | TeacherLogits | Teachers,
    divergence: Divergence,
    weights: Mapping[str, Tensor],
    *,
    metrics: tuple[str, ...] = (),
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> tuple[Tensor, Statistics]:
    """``sum_t (weights["divergence"]_t divergence_t + weights["logp"]_t logp_t)`` in one pass.

    Args:
        weights: the weights of ``divergence`` and, optionally, of ``logp``; constants ``[...]`` in the labels' shape.
        metrics: ``("entropy",)`` to also return the student's entropy, at the temperature.
        hidden_states, weight, labels, teacher, divergence, temperature, bias, transform, options: as in
            :func:`linear_divergence`.

    Returns:
        The loss (0-dim), differentiable once, and the detached :class:`Statistics`.

    Raises:
        TypeError, ValueError: as :func:`linear_divergence`; weights that are not one per token.
    """
    head = Head.of(weight, bias, transform)
    if isinstance(teacher, Teachers):
        # Each teacher's tokens are a call of the student's head: no product is taken twice.
        given: Any = {"metrics": metrics, "temperature": temperature, "options": options}
        pairs = _of_each(teacher, labels, head, options)
        each = [linear_divergence_loss(hidden_states, head, y, one, divergence, weights, **given) for one, y in pairs]
        return torch.stack([loss for loss, _ in each]).sum(), _added([found for _, found in each])
    comparison = Comparison(teacher, divergence, temperature)
    query = Query(tuple(weights), tuple(metrics), comparison=comparison, token_weights=weights)
    loss, (found,) = separable_loss(hidden_states, head, labels, query, options)
    return loss, found


def _of_each(teachers: Teachers, labels: Any, head: Head, options: EngineOptions) -> list[tuple[Any, Any]]:
    """Each teacher, and its tokens, or the labels of these."""
    check_tensor("labels", labels)
    each: list[Any] = teachers.labels(labels, options.ignore_index)
    if not is_dynamo_compiling() and head.ranks is ALONE and options.compact:
        # All are counted before the first call, so that nobody waits for its products.
        backend = choose_backend(options.backend, [(labels.device, torch.float32)])
        counting = [Counting([own], head.vocab_size, options.ignore_index, True, backend) for own in each]
        each = [one.tokens() for one in counting]
    return list(zip(teachers.teachers, each, strict=True))


def _added(parts: Sequence[Statistics]) -> Statistics:
    """Statistics of all tokens: the sum of each teacher's, which are 0 for tokens of other teachers."""
    named = {name: [getattr(part, name) for part in parts] for name in Statistics._fields}
    return Statistics(**{name: torch.stack(p).sum(0) for name, p in named.items() if p[0] is not None})
