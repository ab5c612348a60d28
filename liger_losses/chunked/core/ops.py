"""Operations on the outputs of ``lm_head``, and no loss among them:

- :func:`linear_statistics`, :func:`linear_logps`, :func:`linear_divergence`: numbers per token, if tokens are coupled;
- :func:`linear_token_loss`, :func:`linear_divergence_loss`: a sum of a function of each token's own, in one pass.

The first two, and :func:`linear_token_loss`, take lists of hidden states, heads and labels too: a target of each.

T tokens, N of them active, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, overload

import torch
from torch import Tensor, nn

from liger_losses.checks import check_names, check_shaped, check_shift, check_tensor, one_each
from liger_losses.chunked.core import compiled, inputs
from liger_losses.chunked.core.distilled import Teacher, TeacherLogits, Teachers
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.core.head import Head
from liger_losses.chunked.core.inputs import TokenSupport, several
from liger_losses.chunked.core.options import EngineOptions
from liger_losses.chunked.core.statistics import HOW_TO_ASK, Largest, Statistic, Statistics, check_asked, named, of_user
from liger_losses.chunked.core.target import Target, TokenLoss
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform

if TYPE_CHECKING:
    from typing_extensions import Unpack

AnyHead = Tensor | nn.Module | Head
#: One for all targets, or a list of one for each.
OneOrEach = Any
#: Names of statistics, or one.
Names = Iterable[str] | str


class StatisticsOptions(TypedDict, total=False):
    """Keywords of :func:`linear_statistics`."""

    metrics: Names
    selected: OneOrEach
    bias: OneOrEach
    class_weight: Tensor | None
    transform: LogitTransform | None
    options: EngineOptions


class LogpsOptions(TypedDict, total=False):
    """Keywords of :func:`linear_logps` with which it returns log-probabilities alone."""

    support: TokenSupport | None
    bias: OneOrEach
    ignore_index: int
    shift: bool | int | Sequence[int]
    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    compact: bool
    workspace: int | None
    chunk_size: int | None
    backend: str | None


class AllLogpsOptions(LogpsOptions, total=False):
    """Its keywords."""

    entropy: bool
    lse: bool


@overload
def linear_statistics(
    hidden_states: Tensor,
    head: AnyHead,
    labels: Tensor,
    statistics: Names = ("logp",),
    **options: Unpack[StatisticsOptions],
) -> Statistics: ...
@overload
def linear_statistics(
    hidden_states: OneOrEach,
    head: OneOrEach,
    labels: OneOrEach,
    statistics: Names = ("logp",),
    **options: Unpack[StatisticsOptions],
) -> list[Statistics]: ...
@operator
def linear_statistics(
    hidden_states: OneOrEach,
    head: OneOrEach,
    labels: OneOrEach,
    statistics: Names = ("logp",),
    *,
    metrics: Names = (),
    selected: OneOrEach = None,
    bias: OneOrEach = None,
    class_weight: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> Any:
    """Per-token statistics of ``hidden_states @ head.T``, differentiable, without the logits in memory.

    Args:
        hidden_states: ``[..., H]``, or a sequence of such tensors, which run one after another.
        head: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`. Or a list of them, one for each tensor
            of hidden states (or all for the only one), which run one after another.
        labels: ``[...]`` int64, one for each hidden state (a sequence where ``hidden_states`` is one).
        statistics: names from :data:`liger_losses.kernels.softmax_stats.STATISTICS` (or one name), differentiable.
        metrics: names of statistics that are returned without a gradient.
        selected: ``[..., k]`` int64, one row of vocabulary entries for each label. The statistics may then include
            their log-probabilities, ``selected_logps [..., k]``. A list if there are several tensors of labels, or
            ``[T, k]`` for all tokens of one head. Or a :class:`Largest`; the metric ``columns`` then has the entries.
        bias: ``[V]``, or a list where ``head`` is one.
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
    names, metrics = _names(statistics), _names(metrics)
    fields = {"selected": selected, "bias": bias, "class_weight": class_weight, "transform": transform}
    targets = _targets(hidden_states, head, labels, names, metrics, options, **fields)
    results = [named(values, names) for values in compiled.statistics(targets, names, options, metrics)]
    return results if several(hidden_states, head) else results[0]


@overload
def linear_logps(hidden_states: Tensor, head: AnyHead, labels: Tensor, **options: Unpack[LogpsOptions]) -> Tensor: ...
@overload
def linear_logps(
    hidden_states: Tensor, head: AnyHead, labels: Tensor, **options: Unpack[AllLogpsOptions]
) -> Statistics: ...
@overload
def linear_logps(
    hidden_states: OneOrEach, head: OneOrEach, labels: OneOrEach, **options: Unpack[AllLogpsOptions]
) -> list[Any]: ...
@operator
def linear_logps(
    hidden_states: OneOrEach,
    head: OneOrEach,
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

    ``logp_t = log_softmax(hidden_states_t @ head.T + bias)[labels_t]``

    Args:
        hidden_states: ``[..., H]``; or a list of K, one for each head (multi-token prediction, Medusa heads). Hidden
            states, heads, labels and biases may each be a list of K, or one value for all heads.
        head: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`; or a list of K.
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
    names = ("logp", *["entropy"] * bool(entropy), *["lse"] * bool(lse))
    options = EngineOptions(ignore_index, compact, workspace, chunk_size, backend=backend)
    transform = LogitTransform(temperature, logit_scale, softcap)
    many = several(hidden_states, head)
    check_shift(shift, many)
    if not many:
        check_tensor("labels", labels)
    elif support is not None:
        raise TypeError("support= does not work with lists of hidden states or heads; make a call for each of them.")
    if not many and isinstance(hidden_states, Tensor) and labels.shape[:-1] == hidden_states.shape[:-1] != ():
        if support is not None or shift:
            raise ValueError("support= and shift= do not work with several labels [..., m]; leave them out.")
        target, mask = _target_of_labels(hidden_states, Head.of(head, bias, transform), labels, options)
        (values,) = compiled.statistics([target], ("selected_logps", *names[1:]), options)
        of_targets = [{"logp": torch.where(mask, values.pop("selected_logps"), 0.0), **values}]
    elif support is not None:
        whole = Head.of(head, bias, transform)
        of_targets = [inputs.kept_statistics(hidden_states, whole, labels, support, names, options, shift=int(shift))]
    else:
        targets = inputs.targets_of(
            hidden_states, head, labels, ignore_index, bias=bias, transform=transform, shift=shift
        )
        of_targets = compiled.statistics(targets, names, options)
    results = [Statistics(**values) if len(names) > 1 else values["logp"] for values in of_targets]
    return results if many else results[0]


class TopK(NamedTuple):
    """What :func:`linear_topk` returns: log-probabilities ``[..., k]`` in descending order, their columns, and with
    ``rest`` the log-probability ``[...]`` of all other columns."""

    logps: Tensor
    ids: Tensor
    rest: Tensor | None = None


@operator
def linear_topk(
    hidden_states: Tensor,
    head: AnyHead,
    k: int,
    labels: Tensor | None = None,
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
        head: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`.
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
    if labels is None:  # which nobody reads or counts
        labels = torch.zeros(hidden_states.shape[:-1], dtype=torch.int64, device=hidden_states.device)
        options = replace(options, compact=False, ignore_index=-100)
    metrics = ("columns", "rest") if rest else ("columns",)
    fields: dict[str, Any] = {"selected": Largest(k), "bias": bias, "transform": transform, "options": options}
    largest = linear_statistics(hidden_states, head, labels, "selected_logps", metrics=metrics, **fields)
    return TopK(largest.selected_logps, largest.columns, largest.rest)


@operator
def linear_labels_loss(
    hidden_states: Tensor,
    head: AnyHead,
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
        head: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`.
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
    check_tensor("labels", labels)
    check_shaped("weights", weights, "label", labels.device, labels.shape)
    target, mask = _target_of_labels(hidden_states, Head.of(head, bias, transform), labels, options)
    loss = TokenLoss(weighted_sum, {"selected_logps": torch.where(mask, -weights.detach(), 0.0)})
    total, (values,) = compiled.loss_sum([target], ("selected_logps",), [loss], options)
    return total, torch.where(mask, values["selected_logps"], 0.0)


def _target_of_labels(hidden_states: Any, head: Head, labels: Tensor, options: EngineOptions) -> tuple[Target, Tensor]:
    """Hidden states with several labels each ``[..., m]``, which are selected columns, and which there are.

    What is the label of each matters only where it has none.
    """
    if labels.dtype != torch.int64 or not labels.shape[-1]:
        raise ValueError(f"labels must be int64 [..., m] with m >= 1, got {labels.dtype} {tuple(labels.shape)}.")
    mask = labels != options.ignore_index
    columns = labels.masked_fill(~mask, 0)
    lowest, highest = columns.aminmax(dim=-1)  # either may be outside of the vocabulary
    one = torch.where(lowest < 0, lowest, highest).masked_fill(~mask.any(-1), options.ignore_index)
    return inputs.target_of(hidden_states, head, one, selected=columns), mask


@operator
def linear_token_loss(
    hidden_states: OneOrEach,
    head: OneOrEach,
    labels: OneOrEach,
    token_loss: Callable[..., Any],
    statistics: Names = ("logp",),
    *,
    metrics: Names = (),
    token_inputs: Mapping[str, Any] | None = None,
    selected: OneOrEach = None,
    teacher: Teacher | TeacherLogits | None = None,
    divergence: Divergence | None = None,
    temperature: float | Tensor = 1.0,
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
            inputs may each be a list of K, or one value for all heads. They run one after another; targets of the same
            head have one gradient of the weight.
        head: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`; or a list of K.
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
        teacher, divergence, temperature: as in :func:`linear_divergence`, together. The statistics may then include
            ``divergence``; all others are at the temperature 1. A policy's loss and its distillation so take one pass.
        bias, class_weight, transform, options: as in :func:`linear_statistics`.

    Returns:
        The loss (0-dim, fp32 or fp64), differentiable once by hidden states, weight and bias, and the detached
        :class:`Statistics` in the labels' shape, a list of K for lists.

    Raises:
        TypeError, ValueError: as :func:`linear_statistics`; token inputs or losses that are not one per token.
    """
    if not callable(token_loss):
        raise TypeError(f"token_loss must be a function (statistics, labels, **inputs) -> [n], got {token_loss!r}.")
    names, metrics, read = _names(statistics), _names(metrics), dict(token_inputs or {})
    fields = {"selected": selected, "bias": bias, "class_weight": class_weight, "transform": transform}
    fields |= {f"token_inputs[{name!r}]": value for name, value in read.items()}
    if (teacher is None) != (divergence is None) or (teacher is not None and several(hidden_states, head)):
        raise ValueError("teacher= and divergence= go together, with one tensor of hidden states and one head.")
    fields["comparison"] = None if teacher is None else (teacher, divergence, temperature)
    targets = _targets(hidden_states, head, labels, names, metrics, options, **fields)
    asked = {"divergence": Statistic("divergence", divergence=divergence)}
    losses = []
    for i, target in enumerate(targets):
        of_target = {name: one_each(value, len(targets))[i] for name, value in read.items()}
        for name, value in of_target.items():
            check_tensor(name, value)
            shape = target.labels.shape
            check_shaped(name, value, "label", target.labels.device, shape, (*shape, *value.shape[-1:]))
        losses.append(TokenLoss(functools.partial(of_user, token_loss, names), {"labels": target.labels, **of_target}))
    by_name = [[asked.get(name, name) for name in group] for group in (names, metrics)]
    loss, of_targets = compiled.loss_sum(targets, by_name[0], losses, options, by_name[1])
    results = [named(values, names) for values in of_targets]
    return loss, results if several(hidden_states, head) else results[0]


@operator
def linear_divergence(
    hidden_states: Tensor,
    head: AnyHead,
    labels: Tensor,
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

    Backward computes the logits again, unless they could be kept. If the loss is a weighted sum with known weights, use
    :func:`linear_divergence_loss`.

    Args:
        hidden_states: ``[..., H]``, of the student.
        head: the student's ``lm_head``: ``[Vs, H]``, a linear layer, or a :class:`Head`.
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
    student = Head.of(head, bias, transform)
    comparison = (teacher, divergence, temperature)
    targets = inputs.compared_targets(hidden_states, student, labels, comparison, options.ignore_index)
    names: list[Any] = [Statistic("divergence", divergence=divergence), *["logp"] * logp]
    return added(compiled.statistics(targets, names, options))


@operator
def linear_divergence_loss(
    hidden_states: Tensor,
    head: AnyHead,
    labels: Tensor,
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
        hidden_states, head, labels, teacher, divergence, temperature, bias, transform, options: as in
            :func:`linear_divergence`.

    Returns:
        The loss (0-dim), differentiable once, and the detached :class:`Statistics`.

    Raises:
        TypeError, ValueError: as :func:`linear_divergence`; no weights, or weights that are not one per token.
    """
    student = Head.of(head, bias, transform)
    comparison = (teacher, divergence, temperature)
    targets = inputs.compared_targets(hidden_states, student, labels, comparison, options.ignore_index)
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"weights must be a dictionary such as {{'divergence': token_weights}}, got {weights!r}.")
    check_names(weights, ("divergence", "logp"), "differentiable statistic", HOW_TO_ASK)
    check_names(metrics, ("entropy",), "statistic", HOW_TO_ASK)
    for name, value in weights.items():
        check_shaped(name, value, "label", labels.device, labels.shape)
    names: list[Any] = [Statistic(name, divergence=divergence) if name == "divergence" else name for name in weights]
    losses = [TokenLoss(weighted_sum, dict(weights))] * len(targets)
    loss, parts = compiled.loss_sum(targets, names, losses, options, ["soft_entropy"] if metrics else [])
    return loss, added(parts)


def added(parts: Sequence[Mapping[str, Tensor]]) -> Statistics:
    """Statistics of all tokens: the sum of each teacher's, which are 0 for tokens of other teachers."""
    totals = {name: sum([part[name] for part in parts[1:]], value) for name, value in parts[0].items()}
    return Statistics(entropy=totals.pop("soft_entropy", None), **totals)


def _targets(
    hidden_states: Any, weight: Any, labels: Any, names: Any, metrics: Any, options: EngineOptions, **arguments: Any
) -> list[Target]:
    """The targets of an operation's arguments, which have the statistics and metrics."""
    if not isinstance(options, EngineOptions):
        raise TypeError(f"options must be liger_losses.EngineOptions(...), got {type(options).__name__}.")
    if isinstance(arguments["selected"], Largest):
        arguments["selected"] = arguments["selected"].k
    comparison = arguments.pop("comparison", None)
    targets = inputs.targets_of(hidden_states, weight, labels, options.ignore_index, **arguments)
    if comparison is not None:
        targets = [inputs.compared(targets[0], *comparison)]
    check_asked(targets, names, metrics)
    return targets


@compiled.in_graphs
def weighted_sum(values: Mapping[str, Tensor], **weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """``sum_s w_s s`` of each token, and its derivatives, the weights."""
    derivatives = {name: weight.expand_as(values[name]) for name, weight in weights.items()}
    terms = [weight * values[name] for name, weight in derivatives.items()]
    first, *others = [term.sum(-1) if term.dim() > 1 else term for term in terms]
    return sum(others, first), derivatives


def _names(names: Names) -> tuple[str, ...]:
    if not isinstance(names, Iterable):
        raise TypeError(f"statistics must be names, such as ('logp', 'entropy'); got {names!r}.")
    return (names,) if isinstance(names, str) else tuple(names)
