"""Differentiable operations on the output of ``lm_head``, and no loss among them:

- :func:`linear_statistics`, :func:`linear_logps`, :func:`linear_divergence`: numbers per token, if tokens are coupled;
- :func:`linear_token_loss`, :func:`linear_divergence_loss`: a sum of a function of each token's own, in one pass.

The first two and :func:`linear_token_loss` take lists of hidden states, heads and labels too (``many_heads.py``).

T tokens, N of them active, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine.call import Call, Comparison, EngineOptions, Query, Statistics, make_call
from liger_losses.chunked.engine.checks import LISTS, check_shift, check_tensor
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.many_heads import Targets
from liger_losses.chunked.engine.operators import F, call_operation, register
from liger_losses.chunked.engine.ranks import raise_on_all_ranks
from liger_losses.chunked.engine.shard import Agreement
from liger_losses.chunked.engine.stream import Stream
from liger_losses.chunked.engine.support import TokenSupport, linear_support_statistics
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits
from liger_losses.chunked.engine.tokens import Tokens, shift_labels
from liger_losses.chunked.engine.traced import differentiable, empty_statistics, traced_token_loss
from liger_losses.kernels.autograd import once_differentiable, scale_
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.tracing import state

#: One for all targets, or a list of one for each.
OneOrEach = Any


def _operator(function: F, *, opaque: bool = True) -> F:
    """Decorate an operation: if a call raises on one rank, it raises on all ranks that share the head.

    In a compiled function, a call is one operator of its graph; without ``opaque``, its code is part of the graph.
    """
    register(function)

    @functools.wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return call_operation(function, arguments, keywords) if opaque else function(*arguments, **keywords)
        agreements = Agreement.count
        try:
            return function(*arguments, **keywords)
        except (TypeError, ValueError) as error:
            raise_on_all_ranks(error, agreements, function, arguments, keywords)
            raise

    return cast(F, wrapped)


@_operator
def linear_statistics(
    hidden_states: OneOrEach,
    weight: OneOrEach,
    labels: OneOrEach,
    statistics: Iterable[str] | str = ("logp",),
    *,
    metrics: Iterable[str] | str = (),
    selected: Tensor | None = None,
    bias: OneOrEach = None,
    class_weight: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> Any:
    """Per-token statistics of ``hidden_states @ weight.T``, differentiable, without the logits in memory.

    Args:
        hidden_states: ``[..., H]``, or a sequence of such tensors that are streamed as one.
        weight: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`; or a list of them, one for each tensor
            of hidden states (or all for the only one), which run one after another.
        labels: ``[...]`` int64, one for each hidden state (a sequence where ``hidden_states`` is one).
        statistics: names from :data:`liger_losses.kernels.softmax_stats.STATISTICS` (or one name), differentiable.
        metrics: further names, returned without gradient.
        selected: ``[..., k]`` int64, for one tensor of hidden states: the statistics may then include
            ``selected_logps [..., k]``, the log-probabilities of these columns; ``logp`` and ``lse`` are the only
            others then.
        bias: ``[V]``, or a list where ``weight`` is one.
        class_weight: ``[V]``, the weights in ``mean_logp``.
        transform: temperature, scale and soft-cap of the logits.
        options: how to stream.

    Returns:
        :class:`Statistics` of tensors in the labels' shape (a list of them for a sequence); fp32, or fp64 for fp64
        inputs. Tokens without loss get 0.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit together, labels outside the vocabulary,
            unknown names, a workspace that cannot hold one row.
    """
    query = Query(_names(statistics), _names(metrics), class_weight=class_weight, selected=selected)
    if isinstance(weight, LISTS) or (isinstance(hidden_states, LISTS) and isinstance(labels, Tensor)):
        targets = Targets.of(hidden_states, weight, labels, options, bias=bias, transform=transform)
        return targets.statistics(query, _statistics_of)
    found = _statistics(hidden_states, Head.of(weight, bias, transform), labels, query, options)
    return found if isinstance(hidden_states, (list, tuple)) else found[0]


@_operator
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
        hidden_states: ``[..., H]``; or a list of K, one for each head (multi-token prediction, Medusa heads). Of
            hidden states, heads, labels and biases, some may be lists of K; what there is one of serves all.
        weight: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`; or a list of K.
        labels: ``[...]`` int64; or a list of K.
        support: the columns that a sampler kept for each token; log-softmax, entropy and log-sum-exp are then taken
            over these alone.
        bias: ``[V]``; or a list of K.
        entropy: also return each token's entropy, in nats, differentiable.
        lse: also return each token's log-sum-exp, differentiable.
        ignore_index: the label of tokens that need no log-probability; they get 0 and cost nothing.
        shift: position ``t`` predicts the label at ``t + shift``, ``True`` is 1; the last positions get 0. A list of K
            gives each head its own: ``[1, 2, 3]`` for the next three tokens.
        temperature: what logits are divided by: a number, or ``[...]`` with one for each hidden state.
        logit_scale, softcap: see :class:`liger_losses.LogitTransform`.
        compact, workspace, chunk_size, backend: see :class:`EngineOptions`.

    Returns:
        The log-probabilities ``[...]`` in fp32 (fp64 for fp64 inputs); with ``entropy`` or ``lse``, a
        :class:`Statistics` with the fields ``logp``, ``entropy``, ``lse``. A list of K for lists.

    Raises:
        TypeError, ValueError: as :func:`linear_statistics`; columns of the support that are out of range, twice, or
            without the label.
    """
    names = ("logp", *(name for name, wanted in (("entropy", entropy), ("lse", lse)) if wanted))
    transform = LogitTransform(temperature, logit_scale, softcap)
    options = EngineOptions(ignore_index, compact, workspace, chunk_size, backend=backend)
    several = isinstance(hidden_states, LISTS) or isinstance(weight, LISTS)
    if not isinstance(shift, bool):
        check_shift(shift, several)
    if several:
        if support is not None:
            raise TypeError("support= goes with one tensor of hidden states and one head, not with lists of them.")
        targets = Targets.of(hidden_states, weight, labels, options, bias=bias, transform=transform, shift=shift)
        found = targets.statistics(Query(names), _statistics_of)
        return found if len(names) > 1 else [part.logp for part in found]
    check_tensor("labels", labels)
    head = Head.of(weight, bias, transform)
    if support is None:
        labels = shift_labels(labels, ignore_index, int(shift)) if shift else labels
        statistics = linear_statistics(hidden_states, head, labels, names, options=options)
    else:
        statistics = linear_support_statistics(
            hidden_states, head, labels, support, names, options, whole=linear_statistics, shift=int(shift)
        )
    return statistics if len(names) > 1 else statistics.logp


@_operator
def linear_divergence(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor | Tokens,
    teacher: Teacher | TeacherLogits,
    divergence: Divergence,
    *,
    logp: bool = False,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> Any:
    """Each token's divergence between student and teacher, an ordinary differentiable operation.

    Backward computes the logits again; where the loss is a sum with weights that are known, use
    :func:`linear_divergence_loss`.

    Args:
        hidden_states: ``[..., H]``, the student's.
        weight: the student's ``lm_head``: ``[Vs, H]``, a linear layer, or a :class:`Head`.
        labels: ``[...]`` int64; only which are ``ignore_index`` matters, unless ``logp`` is asked for.
        teacher: see :class:`liger_losses.Teacher`.
        divergence: see :class:`liger_losses.Divergence`.
        logp: also return the student's log-probabilities of the labels, over its whole vocabulary and at temperature
            1, differentiable.
        temperature: what both models' logits are divided by in the divergence: a number, or ``[...]`` with one for each
            hidden state.
        bias: ``[Vs]``.
        transform: scale and soft-cap of the student's logits.
        options: how to stream.

    Returns:
        :class:`Statistics` with ``divergence`` (and ``logp``) in the labels' shape; fp32, or fp64 for fp64 inputs.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit together.
    """
    names = ("divergence", "logp") if logp else ("divergence",)
    query = Query(names, comparison=Comparison(teacher, divergence, temperature))
    return _statistics(hidden_states, Head.of(weight, bias, transform), labels, query, options)[0]


@functools.partial(_operator, opaque=False)
def linear_token_loss(
    hidden_states: OneOrEach,
    weight: OneOrEach,
    labels: OneOrEach,
    token_loss: Callable[..., Any],
    statistics: Iterable[str] | str = ("logp",),
    *,
    metrics: Iterable[str] | str = (),
    token_inputs: Mapping[str, Any] | None = None,
    selected: Tensor | None = None,
    bias: OneOrEach = None,
    class_weight: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> tuple[Tensor, Any]:
    """``sum_t token_loss(statistics_t, labels_t, inputs_t)``: loss and gradients in one pass over the blocks.

    Use it when every token's contribution depends on that token's own statistics and on numbers known beforehand
    (weights, advantages, old log-probs); :func:`linear_statistics` serves all other losses.

    Args:
        hidden_states: ``[..., H]``; or a list of K, one for each head. Of hidden states, heads, labels, biases and
            token inputs, some may be lists of K; what there is one of serves all. Targets of one head are one stream,
            which may give ``token_loss`` tokens of several of them; different heads run one after another.
        weight: the ``lm_head``: ``[V, H]``, a linear layer, or a :class:`Head`; or a list of K.
        labels: ``[...]`` int64; or a list of K.
        token_loss: ``(statistics, labels, **inputs) -> [n]``, elementwise over the tokens it is given. It is
            differentiated with respect to the statistics alone; where it returns ``([n], {statistic: [n]})``, the
            second are its derivatives, and no graph is built for them.
        statistics: what ``token_loss`` reads and is differentiated by.
        metrics: what is returned (and readable in ``token_loss``) without a gradient.
        token_inputs: tensors of the labels' shape that ``token_loss`` gets as keywords, without gradient; they may
            have one more dimension.
        selected: ``[..., k]`` int64: the statistics then include ``selected_logps [n, k]``, the log-probabilities of
            these columns. ``logp`` and ``lse`` are the only others then.
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
    if torch.compiler.is_dynamo_compiling() and not isinstance(labels, Tokens):
        # No operator can call a function, which becomes part of the graph: the loss takes two passes.
        found = linear_statistics(
            hidden_states,
            weight,
            labels,
            statistics,
            metrics=metrics,
            selected=selected,
            bias=bias,
            class_weight=class_weight,
            transform=transform,
            options=options,
        )
        return traced_token_loss(found, labels, token_loss, token_inputs or {}, options.ignore_index)
    query = Query(
        _names(statistics),
        _names(metrics),
        class_weight=class_weight,
        selected=selected,
        token_loss=token_loss,
        token_inputs={} if many else token_inputs or {},
    )
    if many:
        inputs = token_inputs or {}
        targets = Targets.of(hidden_states, weight, labels, options, bias=bias, transform=transform, inputs=inputs)
        return targets.token_loss(query, inputs, _loss_of_statistics)
    return _separable_loss(hidden_states, Head.of(weight, bias, transform), labels, query, options)


@_operator
def linear_divergence_loss(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor | Tokens,
    teacher: Teacher | TeacherLogits,
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
        weights: ``[...]`` in the labels' shape, of ``divergence`` and, if it is there, of ``logp``; constants.
        metrics: ``("entropy",)`` to also return the student's entropy, at the temperature.
        hidden_states, weight, labels, teacher, divergence, temperature, bias, transform, options: as in
            :func:`linear_divergence`.

    Returns:
        The loss (0-dim), differentiable once, and the detached :class:`Statistics`.

    Raises:
        TypeError, ValueError: as :func:`linear_divergence`; weights that are not one per token.
    """
    comparison = Comparison(teacher, divergence, temperature)
    query = Query(tuple(weights), tuple(metrics), comparison=comparison, token_weights=weights)
    return _separable_loss(hidden_states, Head.of(weight, bias, transform), labels, query, options)


def _names(names: Iterable[str] | str) -> tuple[str, ...]:
    if not isinstance(names, Iterable):
        raise TypeError(f"statistics are named, as in ('logp', 'entropy'); got {names!r}.")
    return (names,) if isinstance(names, str) else tuple(names)


def _statistics(hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions) -> list[Statistics]:
    """The statistics of each tensor of labels, in its shape."""
    if head.adapters:
        hidden_states, head = head.expand(hidden_states)
    checked, call = make_call(hidden_states, head, labels, query, options)
    if call is None:
        return empty_statistics(checked, query)
    return _statistics_of(call, head, checked.hidden_states)


def _separable_loss(
    hidden_states: Tensor, head: Head, labels: Tensor | Tokens, query: Query, options: EngineOptions
) -> tuple[Tensor, Statistics]:
    """The loss that the query's token loss, or its token weights, make of the statistics; and the statistics."""
    if head.adapters:
        hidden_states, head = head.expand(hidden_states)
    checked, call = make_call(hidden_states, head, labels, query, options)
    if call is None:
        dtype = torch.promote_types(torch.float32, checked.compute_dtype)
        return hidden_states.new_empty((), dtype=dtype), empty_statistics(checked, query)[0]
    hidden = checked.hidden_states
    if call.strategy == "one_pass":
        loss, *outputs = _LinearTokenLoss.apply(call, head.weight, head.bias, *hidden)
        return loss, call.by_tensor(dict(zip(call.outputs, outputs, strict=True)))[0]
    loss, found = _loss_of_statistics(call, head, hidden)
    return loss, found[0]


def _loss_of_statistics(call: Call, head: Head, hidden: tuple[Tensor, ...]) -> tuple[Tensor, list[Statistics]]:
    """A separable loss that does not take one pass, and the detached statistics of each tensor of labels."""
    values = _compute_statistics(call, head, hidden)
    active = {name: call.tokens.gather_flat(value) for name, value in values.items()}
    detached = call.by_tensor({name: value.detach() for name, value in values.items()})
    if call.query.token_weights is not None:
        terms = [weight * active[name] for name, weight in call.query.token_weights.items()]
        return torch.stack(terms).sum(), detached
    assert call.query.token_loss is not None
    named = Statistics(**active)
    result = call.query.token_loss(named, call.tokens.labels, **call.query.token_inputs)
    loss = call.tokens.masked(differentiable(result, named)).sum()
    return loss.to(call.work.logits_dtype), detached


def _statistics_of(call: Call, head: Head, hidden: tuple[Tensor, ...]) -> list[Statistics]:
    """The statistics of each tensor of labels, in its shape."""
    return call.by_tensor(_compute_statistics(call, head, hidden))


def _compute_statistics(call: Call, head: Head, hidden: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The statistics and metrics of every token, ``[T]`` each, by any strategy but ``one_pass``."""
    names = dict.fromkeys(("lse", *call.outputs))
    known = None if state.known is None else {name: next(state.known) for name in names}
    if call.strategy != "statistics":
        outputs = _LinearStatistics.apply(call, known, head.weight, head.bias, *hidden)
        return dict(zip(call.outputs, outputs, strict=True))
    if known is None:
        with torch.no_grad(), _without_autocast(head.weight):
            values, _ = Stream(call, head.weight, head.bias, hidden).statistics()
        known = {name: call.tokens.scatter(values[name]) for name in names}
        if state.recorded is not None:
            state.recorded += known.values()
    return {name: known[name] for name in call.outputs}


def _without_autocast(weight: Tensor) -> AbstractContextManager[Any]:
    """Autocast is off, and the weight's device current, where Triton launches: a model may be spread over several GPUs.

    Switching autocast off costs the host as much as several launches: only where it is on.
    """
    on_device, kind = torch.cuda.device_of(weight), weight.device.type
    if not torch.is_autocast_enabled(kind):
        return on_device
    both = ExitStack()
    both.enter_context(on_device)
    both.enter_context(torch.autocast(kind, enabled=False))
    return both


class _LinearStatistics(torch.autograd.Function):
    """Statistics in forward; in backward the gradient of any function of them."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        known: Mapping[str, Tensor] | None,
        weight: Tensor,
        bias: Tensor | None,
        *hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.block, ctx.unit_gradient = call, None, None
        with _without_autocast(weight):
            stream = Stream(call, weight, bias, hidden)
            if known is not None:
                values = {name: call.tokens.gather_all(value) for name, value in known.items()}
            elif call.strategy == "frozen_head":
                values, ctx.unit_gradient = stream.statistics_and_unit_gradient()
            else:
                values, ctx.block = stream.statistics(keep_block=call.strategy == "resident")
        needed = {name: value for name, value in values.items() if name == "lse" or name not in call.query.metrics}
        ctx.saved_names = tuple(needed)
        # The labels are saved for their version alone: they may be the user's own, and must not have changed by then.
        ctx.save_for_backward(weight, bias, *hidden, *needed.values(), call.tokens.labels)
        outputs = [call.tokens.scatter(values[name]) for name in call.outputs]
        # Users may change an output in place; what backward needs must not change with it.
        outputs = [out.clone() if any(out is v for v in values.values()) else out for out in outputs]
        ctx.mark_non_differentiable(*outputs[len(call.query.statistics) :])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        weight, bias, *rest, _ = ctx.saved_tensors
        hidden, saved = rest[: len(call.needs_hidden)], rest[len(call.needs_hidden) :]
        values = dict(zip(ctx.saved_names, saved, strict=True))
        gradients = {
            name: call.tokens.gather_all(g)
            for name, g in zip(call.query.statistics, upstream, strict=False)
            if g is not None
        }
        with _without_autocast(weight):
            if ctx.unit_gradient is not None:
                scaled = Stream(call, weight, bias, hidden, multiplies=False).scaled(ctx.unit_gradient, gradients)
                return None, None, None, None, *scaled
            # Gradients overwrite the block, and its memory is wanted back: a second backward computes it again.
            block, ctx.block = ctx.block, None
            stream = Stream(call, weight, bias, hidden, multiplies=block is None)
            return None, None, *stream.gradients(values, gradients, block)


class _LinearTokenLoss(torch.autograd.Function):
    """A separable loss and its gradients in forward; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, call: Call, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with _without_autocast(weight):
            loss, values, gradients = Stream(call, weight, bias, [hidden]).token_loss()
        ctx.call, ctx.gradients = call, gradients
        ctx.save_for_backward(weight, bias, hidden, call.tokens.labels)
        outputs = tuple(call.tokens.scatter(values[name]) for name in call.outputs)
        ctx.mark_non_differentiable(*outputs)
        return loss, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *statistics: None) -> tuple[Any, ...]:
        call: Call = ctx.call
        gradients, ctx.gradients = ctx.gradients, None
        if upstream is None:
            return None, None, None, None
        if gradients is None:
            # The first backward scaled them in place and returned them: a second one computes them again.
            weight, bias, hidden, _ = ctx.saved_tensors
            with _without_autocast(weight):
                gradients = Stream(call, weight, bias, [hidden]).token_loss()[-1]
        return None, *(None if grad is None else scale_(grad, upstream, backend=call.backend) for grad in gradients)
