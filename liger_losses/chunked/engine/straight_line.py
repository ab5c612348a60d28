"""Calls of few tokens that are made again with the same shapes.

A call of a few hundred tokens takes as long as the host takes, mostly to find out how to run. A :class:`StraightLine`
keeps what follows from a call's tensors and options without their values; the next call of the same kind goes from the
arguments straight to the launches. Of a plain call without one, what was decided is :class:`Known` the next time.

T tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine.autograd_functions import compute_statistics, separable_losses
from liger_losses.chunked.engine.call import Call, Tensors, counted_call
from liger_losses.chunked.engine.decision import Decision, decide
from liger_losses.chunked.engine.few_tokens import FewTokens, LineLoss, LineStatistics, StraightLine
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.plan import MOST_SMALL_LOGITS, EngineOptions, default_bound, is_small, padded
from liger_losses.chunked.engine.query import EqualWeights, Query, Statistics
from liger_losses.kernels._triton import BACKEND_VARIABLE
from liger_losses.kernels.autograd import records_tangents, within_transform
from liger_losses.kernels.coupled_rows import Coupled
from liger_losses.kernels.exponential_rows import MOST_TOKENS, ExponentialRows, exponentials_serve
from liger_losses.kernels.linear_stats import MaskedStatistics
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.matmul import ALIGNED, MIN_CUT_SIZE

#: Plain tensors, which have memory and no overridden behaviour.
_PLAIN = frozenset((Tensor, nn.Parameter))
#: By what tensors and options tell; ``None`` for calls that have no straight line.
_lines: dict[Any, StraightLine | Known | None] = {}
_MOST_LINES = 1024

#: Of a product with fewer multiplications, the host takes longer to describe both matrices to the kernel that computes
#: statistics beside it than the device takes to write and read the logits.
MIN_FUSED = 2e10
#: With fewer multiplications, the host takes longer for the launches of exponentials than the device takes to write and
#: read the logits. Larger hidden sizes count as ``MOST_DEPTH``: for as many multiplications they have fewer logits, and
#: exponentials save less.
MIN_EXPONENTIALS, MOST_DEPTH = 1e11, 2500
#: Statistics that a straight line computes: with their gradients, and without.
NAMES = frozenset(("logp", "entropy", "lse"))
METRICS = NAMES | {"mean_logit"}

#: What computes a coupled loss of a query's statistics, labels and constants (see
#: :mod:`liger_losses.kernels.coupled_rows`), the query, and options.
Made = tuple[Callable[..., Coupled] | None, Query, EngineOptions]


def straight_query(
    hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions
) -> list[Statistics] | None:
    """The statistics of each tensor of labels, in its shape; ``None`` where the call has no straight line."""
    if not (query.is_plain and head.is_plain):
        return None
    metrics = query.metrics and tuple([name for name in query.metrics if name not in query.statistics])
    several = isinstance(hidden_states, (list, tuple))
    states, targets = (hidden_states, labels) if several else ((hidden_states,), (labels,))
    found = straight_statistics(FewTokens(states, targets, head, NO_TRANSFORM), query.statistics, metrics, options)
    if found is None:
        return None
    names = query.statistics + metrics
    return [Statistics(**dict(zip(names, of_one, strict=True))) for of_one in zip(*found, strict=True)]


def straight_coupled_loss(
    tokens: FewTokens, module: Any, make: Callable[[], Made]
) -> Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]] | None:
    """From constants to a module's loss of all tokens and its metrics; ``None`` where the call has no straight line.

    In the place of the tokens' constants, there may be what tells their kind. ``make`` is called for the first call of
    a kind, once it is checked.
    """
    line, weight = _line((type(module), id(module.settings)), tokens, make, few=True)
    if line is None:
        return None
    line.settings = module.settings  # whose id no other object has meanwhile
    return lambda inputs: _loss_of(line, weight, tokens._replace(inputs=inputs))


def known_loss(tokens: FewTokens, module: Any) -> tuple[Tensor, ...] | None:
    """:func:`straight_coupled_loss` of a call as the user gave it, if there was one of its kind before."""
    line, weight = _line((type(module), id(module.settings)), tokens, None)
    return None if line is None else _loss_of(line, weight, tokens)


def straight_statistics(
    tokens: FewTokens, names: tuple[str, ...], metrics: tuple[str, ...], options: EngineOptions | tuple[Any, ...]
) -> list[Sequence[Tensor]] | None:
    """Each statistic of each tensor of labels, ``metrics`` without a gradient; ``None`` where the call has no straight
    line. ``options`` are, or have the fields of, :class:`EngineOptions`."""

    def make() -> Made:
        how = options if isinstance(options, EngineOptions) else EngineOptions(*options)
        return None, Query(names, metrics), how

    line, weight = _line((names, metrics, options), tokens, make)
    if line is None:
        return None
    if isinstance(line, Known):
        tensors, call = line.call(tokens, weight)
        parts = call.tokens.split(compute_statistics(tensors, call))
        return [[part[name] for part in parts] for name in names + metrics]
    if line.strategy == "statistics":
        with line.without_autocast():
            hidden, targets = line.joined(tokens)
            found = line.named(line.values(hidden, weight, targets)[0], targets)
    else:
        found = LineStatistics.apply(line, weight, tokens, *tokens.hidden_states)
    return [line.separated(value) for value in found]


def straight_loss(
    tokens: FewTokens, weights: tuple[tuple[str, EqualWeights], ...] | None, options: EngineOptions
) -> Tensor | None:
    """``sum_t sum_s weights[s] s_t`` of ``logp`` and ``mean_logp``; ``None`` where the call has no straight line."""
    if weights is None:
        return None

    def make() -> Made:
        return None, Query(tuple([name for name, _ in weights]), token_weights=dict(weights)), options

    line, weight = _line((weights, options), tokens, make)
    if isinstance(line, Known):
        return separable_losses([line.call(tokens, weight)], statistics=None)[0]
    return None if line is None else _loss_of(line, weight, tokens)[0]


def _loss_of(line: StraightLine, weight: Tensor, tokens: FewTokens) -> tuple[Tensor, ...]:
    """The loss of a line, and its metrics. Without a gradient, it calls no autograd function, which saves host time."""
    if line.strategy != "statistics":
        found = LineLoss.apply(line, weight, tokens, *tokens.hidden_states)
        return found if isinstance(found, tuple) else (found,)
    with line.without_autocast():
        loss, metrics, _ = line.loss(tokens, weight)
    return loss, *metrics


#: The fields of the transform that changes nothing.
NO_TRANSFORM = LogitTransform().fields


def _opened(weight: Any, transform: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The matrix of a linear layer or a head that is one, and the transform of its logits; else what was given."""
    if type(weight) is nn.Linear and weight.bias is None and "forward" not in weight.__dict__:
        return weight.weight, transform
    if isinstance(weight, Head) and transform == NO_TRANSFORM and weight.is_plain:
        own = weight.transform.fields
        return (weight.weight, own) if isinstance(own[0], float) else (weight, transform)
    return weight, transform


def _line(settings: Hashable, tokens: FewTokens, make: Callable[[], Made] | None, few: bool = False) -> tuple[Any, Any]:
    """The line of a call, which is prepared the first time, and its weight; ``few``: only where tokens are few."""
    hidden, labels, weight, transform, mask, inputs = tokens
    if isinstance(transform[0], Tensor) or within_transform() or records_tangents():
        return _NO_LINE
    if type(weight) not in _PLAIN:
        weight, transform = _opened(weight, transform)
    try:
        # The name of a device's type takes the host longer than all else that is asked of the tensor.
        kind, current = ("cuda", torch.cuda.current_device()) if weight.is_cuda else (weight.device.type, None)
        facts = [settings, transform, torch.is_grad_enabled(), default_bound(), current, len(hidden)]
        facts += os.environ.get(BACKEND_VARIABLE), torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        for part in (weight, *hidden):
            if type(part) not in _PLAIN:
                return _NO_LINE
            facts += part.shape, part.stride(), part.dtype, part.device, part.requires_grad, part.data_ptr() % 16
        for part in labels:  # autograd keeps none that were made in inference mode
            if type(part) is not Tensor or part.is_inference():
                return _NO_LINE
        for part in (*labels, mask, *inputs):
            facts += (part.shape, part.stride(), part.dtype, part.device) if type(part) in _PLAIN else (part,)
        key = tuple(facts)
        line = _lines.get(key, _lines)
    # No matrix; no strides or memory; options that cannot be hashed.
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return _NO_LINE
    if line is _lines:
        if make is None or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return _NO_LINE
        try:
            if few and not _are_few(labels, weight):
                return _NO_LINE
            line = _prepared(tokens, weight, LogitTransform(*transform), *make())
        except (TypeError, ValueError):  # of which the usual way tells the user
            return _NO_LINE
        if len(_lines) >= _MOST_LINES:
            _lines.clear()
        _lines[key] = line
    return line, weight


_NO_LINE = None, None


def _are_few(labels: Sequence[Tensor], weight: Tensor) -> bool:
    (size, depth), count = weight.shape, sum([part.numel() for part in labels])
    return is_small(count, depth, size, weight.device, writes_logits=False)


def _prepared(
    tokens: FewTokens,
    weight: Tensor,
    transform: LogitTransform,
    coupled: Callable[..., Coupled] | None,
    query: Query,
    options: EngineOptions,
) -> StraightLine | Known | None:
    """The line of a call of few tokens for which nothing is cast, padded or cut, and of others what is known of them.

    Raises:
        TypeError, ValueError: inputs that do not fit together.
    """
    (hidden, *others), labels, mask = tokens.hidden_states, tokens.labels, tokens.mask
    (size, depth), count = weight.shape, sum([part.numel() for part in labels])
    if not weight.is_cuda and (options.backend or os.environ.get(BACKEND_VARIABLE)) != "triton":
        return None
    head = Head(weight, None, transform)
    decision = decide((hidden, *others), head, tuple(labels), query, options)
    known = None
    if decision.backend == "triton" and not (coupled or head.batch_invariant):
        known = Known(decision, head.with_fields(weight=None), query)
    # Several tensors are copied.
    dense = labels[0].dim() > 0 if others else hidden.is_contiguous() and labels[0].is_contiguous()
    dense = dense and (mask is None or mask.is_contiguous())
    if not (dense and _are_few(labels, weight)):
        return known
    run = decision.run(count, True)
    dtypes = {hidden.dtype, weight.dtype, run.work.operand_dtype, run.grad_weight_dtype}
    here = not weight.is_cuda or weight.get_device() == torch.cuda.current_device()
    served = {*query.statistics} <= NAMES and {*query.metrics} <= METRICS
    served = run.strategy in ("one_pass", "statistics") if query.separable else served
    alike = len(dtypes) == 1 and run.work.logits_dtype == torch.float32 and not head.batch_invariant
    if not (decision.backend == "triton" and here and served and alike):
        return known
    ignore_index = decision.options.ignore_index
    line = StraightLine(tokens, weight, query, run.strategy, ignore_index, transform, coupled)
    unbounded = options.workspace is None and options.chunk_size is None and options.strategy is None
    unbounded = unbounded and default_bound() is None and options.compact
    large = unbounded and line.multiplications >= MIN_FUSED and not line.mean_logit
    if run.strategy == "statistics" and run.work.fused_products and large:
        if line.scales[1] is not None:
            return known
        flat, entropy = line.joined(tokens)[0], line.entropy
        line.fused = MaskedStatistics(flat, weight, ignore_index, transform, line.right, entropy, "triton")
        return line
    aligned = depth % ALIGNED == 0 and (count % ALIGNED == 0 or count <= MIN_CUT_SIZE) and padded(size) == size
    in_one_block = not (decision.compact or run.work.fused or run.work.exponentials) and run.plan.rows >= count
    # Of a coupled loss, gradients are computed in forward: nothing is kept until backward. fp16 gradients underflow
    # without the loss scale, which is only known there.
    if coupled and hidden.dtype == torch.float16:
        return None
    in_one_block = in_one_block and (coupled or run.strategy in ("statistics", "one_pass", "resident"))
    of_logp = query.statistics == ("logp",) and {*query.metrics} <= {"mean_logit"}
    large = count * size * min(depth, MOST_DEPTH) >= MIN_EXPONENTIALS and run.work.fused_products
    large = large and count <= MOST_TOKENS
    # Exponentials take half the memory of logits.
    fits = in_one_block or (unbounded and count * size <= MOST_SMALL_LOGITS)
    trains = run.strategy in ("one_pass", "resident", "two_pass")
    if of_logp and large and fits and trains and exponentials_serve(weight, transform):
        how = ignore_index, transform, line.right, "triton", line.mean_logit
        line.rows = ExponentialRows(weight, count, *how)
        return line
    return line if in_one_block and aligned else known


class Known(NamedTuple):
    """A call without a straight line that was made before: what was decided, and all of its head but the weight."""

    decision: Decision
    head: Head
    query: Query

    def call(self, tokens: FewTokens, weight: Tensor) -> tuple[Tensors, Call]:
        """The call of other tensors."""
        call = counted_call(self.decision, self.head, self.query, tokens.labels)
        return (weight, None, *tokens.hidden_states), call
