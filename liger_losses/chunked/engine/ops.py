"""Differentiable operations on the output of ``lm_head``, and no loss among them:

- :func:`linear_statistics`, :func:`linear_logps`: numbers per token, if tokens are coupled;
- :func:`linear_token_loss`: a sum of a function of each token's own, in one pass.

They take lists of hidden states, heads and labels too (``many_heads.py``).

T tokens, N of them active, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_losses.checks import LISTS, check_shift, check_tensor, rows_of_all
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.many_heads import Targets
from liger_losses.chunked.engine.operators import (
    of_targets,
    operator,
    query_statistics,
    separable_loss,
    support_statistics,
)
from liger_losses.chunked.engine.plan import EngineOptions
from liger_losses.chunked.engine.query import REGISTERED, Largest, Query, Statistics
from liger_losses.chunked.engine.support import TokenSupport
from liger_losses.chunked.engine.tokens import Tokens, shift_labels
from liger_losses.kernels.logit_transform import LogitTransform

#: One for all targets, or a list of one for each.
OneOrEach = Any


@operator
def linear_statistics(
    hidden_states: OneOrEach,
    weight: OneOrEach,
    labels: OneOrEach,
    statistics: Iterable[str] | str = ("logp",),
    *,
    metrics: Iterable[str] | str = (),
    selected: OneOrEach = None,
    bias: OneOrEach = None,
    class_weight: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> Any:
    """Per-token statistics of ``hidden_states @ weight.T``, differentiable, without the logits in memory.

    Args:
        hidden_states: ``[..., H]``, or a sequence of such tensors, which are computed together.
        weight: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`. Or a list of them, one for each tensor
            of hidden states (or all for the only one), which run one after another.
        labels: ``[...]`` int64, one for each hidden state (a sequence where ``hidden_states`` is one).
        statistics: names from :data:`liger_losses.kernels.softmax_stats.STATISTICS` (or one name), differentiable.
        metrics: names of statistics that are returned without a gradient.
        selected: ``[..., k]`` int64, one row of vocabulary entries for each label. The statistics may then include
            their log-probabilities, ``selected_logps [..., k]``. A list if there are several tensors of labels, or
            ``[T, k]`` for all tokens of one head. Or a :class:`Largest`; the metric ``columns`` then has the entries.
        bias: ``[V]``, or a list where ``weight`` is one.
        class_weight: ``[V]``, the weights in ``mean_logp``.
        transform: temperature, scale and soft-cap of the logits.
        options: see :class:`EngineOptions`.

    Returns:
        :class:`Statistics` of tensors in the labels' shape (a list of them for a sequence); fp32, or fp64 for fp64
        inputs. Results of masked tokens are 0.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit together, labels outside the vocabulary,
            unknown names, a workspace that cannot hold one row.
    """
    query, selected = _query(statistics, metrics, selected, class_weight=class_weight)
    if isinstance(weight, LISTS) or (isinstance(hidden_states, LISTS) and isinstance(labels, Tensor)):
        targets = Targets.of(hidden_states, weight, labels, options, bias=bias, transform=transform, selected=selected)
        return of_targets(targets, query)
    head = Head.of(weight, bias, transform)
    if isinstance(selected, (list, tuple)) and isinstance(labels, (list, tuple, Tokens)):
        shapes: Any = labels.shapes if isinstance(labels, Tokens) else [part.shape for part in labels]
        query = replace(query, selected=rows_of_all("selected", selected, shapes, head.weight))
    found = query_statistics(hidden_states, head, labels, query, options)
    return found if isinstance(hidden_states, (list, tuple)) else found[0]


@operator
def linear_logps(
    hidden_states: OneOrEach,
    weight: OneOrEach,
    labels: OneOrEach,
    *,
    support: TokenSupport | None = None,
    bias: OneOrEach = None,
    entropy: bool = False,
    lse: bool = False,
    ignore_index: int = -100,
    shift: OneOrEach = False,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    compact: bool = True,
    workspace: int | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> Any:
    """Per-token log-probabilities of the labels, an ordinary differentiable operation.

    ``logp_t = log_softmax(hidden_states_t @ weight.T + bias)[labels_t]``

    Args:
        hidden_states: ``[..., H]``; or a list of K, one for each head (multi-token prediction, Medusa heads). Hidden
            states, heads, labels and biases may each be a list of K, or one value for all heads.
        weight: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`; or a list of K.
        labels: ``[...]`` int64; or a list of K. Or ``[..., m]``, several labels for each hidden state, for example of
            texts that share a prefix, which share one projection; ``ignore_index`` where a hidden state has fewer
            labels.
        support: the vocabulary entries that a sampler kept for each token. Log-softmax, entropy and log-sum-exp are
            then over only these.
        bias: ``[V]``; or a list of K.
        entropy: also return each token's entropy, in nats, differentiable.
        lse: also return each token's log-sum-exp, differentiable.
        ignore_index: the label of masked tokens; their results are 0, and their logits are not computed.
        shift: position ``t`` predicts the label at ``t + shift``, and ``True`` is 1; the results of the last positions
            are 0. A list of K has one number for each head: ``[1, 2, 3]`` for the next three tokens.
        temperature: divides the logits: a number, or ``[...]`` with one for each hidden state.
        logit_scale, softcap: see :class:`liger_losses.LogitTransform`.
        compact, workspace, chunk_size, backend: see :class:`EngineOptions`.

    Returns:
        The log-probabilities in the labels' shape, in fp32 (fp64 for fp64 inputs); with ``entropy`` or ``lse``, a
        :class:`Statistics` with the fields ``logp``, ``entropy``, ``lse``. A list of K for lists.

    Raises:
        TypeError, ValueError: as :func:`linear_statistics`; columns of the support that are out of range, twice, or
            without the label.
    """
    names = ("logp", *(name for name, wanted in (("entropy", entropy), ("lse", lse)) if wanted))
    options = EngineOptions(ignore_index, compact, workspace, chunk_size, backend=backend)
    transform = LogitTransform(temperature, logit_scale, softcap)
    several = isinstance(hidden_states, LISTS) or isinstance(weight, LISTS)
    if not isinstance(shift, bool):
        check_shift(shift, several)
    if several:
        if support is not None:
            raise TypeError(
                "support= does not work with lists of hidden states or heads; call linear_logps for each of them."
            )
        targets = Targets.of(hidden_states, weight, labels, options, bias=bias, transform=transform, shift=shift)
        found = of_targets(targets, Query(names))
        return found if len(names) > 1 else [part.logp for part in found]
    check_tensor("labels", labels)
    head = Head.of(weight, bias, transform)
    of_each = isinstance(hidden_states, Tensor) and labels.dim() == hidden_states.dim() > 1
    if of_each and labels.shape[:-1] == hidden_states.shape[:-1]:
        if support is not None or shift:
            raise ValueError("support= and shift= do not work with several labels [..., m]; leave them out.")
        one, columns, mask = _several_labels(labels, options)
        asked = ("selected_logps", *(name for name in names if name != "logp"))
        found = linear_statistics(hidden_states, head, one, asked, selected=columns, options=options)
        statistics = found._replace(logp=torch.where(mask, found.selected_logps, 0.0), selected_logps=None)
    elif support is None:
        labels = shift_labels(labels, ignore_index, int(shift)) if shift else labels
        statistics = linear_statistics(hidden_states, head, labels, names, options=options)
    else:
        statistics = support_statistics(hidden_states, head, labels, support, names, options, shift=int(shift))
    return statistics if len(names) > 1 else statistics.logp


class TopK(NamedTuple):
    """What :func:`linear_topk` returns: log-probabilities ``[..., k]`` in descending order, their columns, and with
    ``rest`` the log-probability ``[...]`` of all other columns."""

    logps: Tensor
    ids: Tensor
    rest: Tensor | None = None


@operator
def linear_topk(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    k: int,
    labels: Tensor | Tokens | None = None,
    *,
    rest: bool = False,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> TopK:
    """The k largest log-probabilities of each token and their vocabulary ids, without the logits in memory.

    The log-probabilities are over the whole vocabulary. They are differentiable; the choice of entries is not.

    Args:
        hidden_states: ``[..., H]``.
        weight: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`.
        k: how many, at most V.
        labels: ``[...]`` int64. Results of tokens with the label ``ignore_index`` are 0, and their logits are not
            computed. By default, no token is masked.
        rest: also return the log-probability of all other entries together, without a gradient. It is computed from
            their sum, so it is exact even if the k largest have nearly all of the probability.
        bias: ``[V]``.
        transform: temperature, scale and soft-cap of the logits.
        options: see :class:`EngineOptions`.

    Returns:
        ``logps [..., k]``, fp32 (fp64 for fp64 inputs), ``ids [..., k]`` int64, and ``rest [...]`` or ``None``.

    Raises:
        TypeError, ValueError: as :func:`linear_statistics`; a k that is not a number of columns.
    """
    check_tensor("hidden_states", hidden_states, allow_dtensor=True)
    found = linear_statistics(
        hidden_states,
        weight,
        Tokens.every(hidden_states.shape[:-1], hidden_states.device) if labels is None else labels,
        ("selected_logps",),
        metrics=("columns", "rest") if rest else ("columns",),
        selected=Largest(k),
        bias=bias,
        transform=transform,
        options=options,
    )
    return TopK(found.selected_logps, found.columns, found.rest)


def _several_labels(labels: Tensor, options: EngineOptions) -> tuple[Tensor, Tensor, Tensor]:
    """From labels ``[..., m]``, one for each hidden state that has any, all of them as columns, and which there are."""
    if labels.dtype != torch.int64 or not labels.shape[-1]:
        raise ValueError(f"labels must be int64 [..., m] with m >= 1, got {labels.dtype} {tuple(labels.shape)}.")
    mask = labels != options.ignore_index
    columns = labels.masked_fill(~mask, 0)
    return columns.amax(-1).masked_fill(~mask.any(-1), options.ignore_index), columns, mask


@operator
def linear_labels_loss(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> tuple[Tensor, Tensor]:
    """``-sum_t sum_m w_tm log p(y_tm)``: cross-entropy of hidden states that have several labels each, in one pass.

    All labels of a hidden state share one projection. For example, if several texts share a prefix (trees of rollouts),
    its hidden states are projected once, and the weight of a label is the number of texts in which it follows.

    Args:
        hidden_states: ``[..., H]``.
        weight: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`.
        labels: ``[..., m]`` int64; ``ignore_index`` where a hidden state has fewer labels.
        weights: ``[..., m]``, constants; advantages, for example.
        bias: ``[V]``.
        transform: temperature, scale and soft-cap of the logits.
        options: see :class:`EngineOptions`.

    Returns:
        The loss (0-dim), differentiable once, and the detached log-probabilities ``[..., m]``, 0 where there is no
        label.

    Raises:
        TypeError, ValueError: as :func:`linear_statistics`; weights that are not of the labels' shape.
    """
    check_tensor("hidden_states", hidden_states, allow_dtensor=True)
    check_tensor("labels", labels)
    check_tensor("weights", weights)
    if weights.shape != labels.shape:
        raise ValueError(f"weights must be {tuple(labels.shape)}, as the labels, got {tuple(weights.shape)}.")
    one, columns, mask = _several_labels(labels, options)
    factors = torch.where(mask, weights.detach(), 0.0)

    def loss(s: Statistics, labels: Tensor, factors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -(factors * s.selected_logps).sum(-1), {"selected_logps": -factors}

    total, found = linear_token_loss(
        hidden_states,
        weight,
        one,
        loss,
        "selected_logps",
        token_inputs={"factors": factors},
        selected=columns,
        bias=bias,
        transform=transform,
        options=options,
    )
    return total, torch.where(mask, found.selected_logps, 0.0)


@operator
def linear_token_loss(
    hidden_states: OneOrEach,
    weight: OneOrEach,
    labels: OneOrEach,
    token_loss: Callable[..., Any],
    statistics: Iterable[str] | str = ("logp",),
    *,
    metrics: Iterable[str] | str = (),
    token_inputs: Mapping[str, Any] | None = None,
    selected: OneOrEach = None,
    bias: OneOrEach = None,
    class_weight: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> tuple[Tensor, Any]:
    """``sum_t token_loss(statistics_t, labels_t, inputs_t)``: loss and gradients in one pass over the blocks.

    Use it if the term of a token depends only on the statistics of this token and on numbers known in advance (weights,
    advantages, old log-probabilities). For all other losses, use :func:`linear_statistics`.

    Args:
        hidden_states: ``[..., H]``; or a list of K, one for each head. Hidden states, heads, labels, biases and token
            inputs may each be a list of K, or one value for all heads. Targets of the same head are computed together,
            so a call of ``token_loss`` may get tokens of several targets. Different heads run one after another.
        weight: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`; or a list of K.
        labels: ``[...]`` int64; or a list of K.
        token_loss: ``(statistics, labels, **inputs) -> [n]``, elementwise over the n tokens that it gets. It is
            differentiated with respect to the statistics only. It may also return ``([n], {statistic: [n]})``, where
            the second are the derivatives; no autograd graph is then built.
        statistics: the names of the statistics that ``token_loss`` reads, with a gradient.
        metrics: the names of statistics that are returned, and that ``token_loss`` may read, without a gradient.
        token_inputs: tensors of the labels' shape that ``token_loss`` gets as keywords, without gradient; they may
            have one more dimension.
        selected: ``[..., k]`` int64, one row of vocabulary entries for each label, or a list, or a :class:`Largest`.
            The statistics then include ``selected_logps [n, k]``, the log-probabilities of these entries, and the
            metrics ``columns``.
        bias, class_weight, transform, options: as in :func:`linear_statistics`.

    Returns:
        The loss (0-dim, fp32 or fp64), differentiable once by hidden states, weight and bias, and the detached
        :class:`Statistics` in the labels' shape, a list of K for lists.

    Raises:
        TypeError, ValueError: as :func:`linear_statistics`; token inputs or losses that are not one per token.
    """
    many = isinstance(hidden_states, LISTS) or isinstance(weight, LISTS)
    if not callable(token_loss):
        raise TypeError(f"token_loss must be a function (statistics, labels, **inputs) -> [n], got {token_loss!r}.")
    if not many:
        check_tensor("hidden_states", hidden_states, allow_dtensor=True)
    query, selected = _query(
        statistics,
        metrics,
        selected,
        class_weight=class_weight,
        token_loss=token_loss,
        token_inputs={} if many else token_inputs or {},
    )
    if many:
        inputs = token_inputs or {}
        targets = Targets.of(
            hidden_states, weight, labels, options, bias=bias, transform=transform, inputs=inputs, selected=selected
        )
        return of_targets(targets, query, inputs)
    loss, (found,) = separable_loss(hidden_states, Head.of(weight, bias, transform), labels, query, options)
    return loss, found


def _query(statistics: Any, metrics: Any, selected: Any, **fields: Any) -> tuple[Query, Any]:
    """A query, whose registered statistics are one of that name, and what columns are selected for each label."""
    names, others = _names(statistics), _names(metrics)
    registered = tuple([name for name in names if isinstance(name, str) and name in REGISTERED])
    if registered:
        names = (*(name for name in names if name not in REGISTERED), "registered")
    largest = selected.k if isinstance(selected, Largest) else 0
    selected = None if largest else selected
    return Query(names, others, selected=selected, largest=largest, registered=registered, **fields), selected


def _names(names: Iterable[str] | str) -> tuple[str, ...]:
    if not isinstance(names, Iterable):
        raise TypeError(f"statistics must be names, such as ('logp', 'entropy'); got {names!r}.")
    return (names,) if isinstance(names, str) else tuple(names)
