"""Calls of few tokens that are made again with the same shapes: product, one kernel of the rows, two products.

A call of a few hundred tokens takes as long as the host takes, mostly to find out how to run. A :class:`StraightLine`
keeps what follows from a call's tensors and options without their values; the next call of the same kind goes from the
arguments straight to the launches. A call without one takes the engine's usual path.

T tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine.accumulation import side_by_side
from liger_losses.chunked.engine.autograd_functions import without_autocast
from liger_losses.chunked.engine.decision import decide, drops_tokens
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.plan import MOST_SMALL_LOGITS, EngineOptions, default_bound, is_small, padded
from liger_losses.chunked.engine.query import EqualWeights, Query, Statistics
from liger_losses.chunked.engine.tokens import check_right
from liger_losses.kernels._triton import BACKEND_VARIABLE
from liger_losses.kernels.autograd import (
    Scaling,
    autocast_dtype,
    once_differentiable,
    records_tangents,
    within_transform,
)
from liger_losses.kernels.coupled_rows import Coupled
from liger_losses.kernels.exponential_rows import MOST_TOKENS, ExponentialRows, RowExponentials, exponentials_serve
from liger_losses.kernels.linear_stats import MaskedStatistics
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.masked_rows import Derivatives, MaskedRows, RowStatistics
from liger_losses.kernels.matmul import ALIGNED, MIN_CUT_SIZE

#: Plain tensors, which have memory and no overridden behaviour.
_PLAIN = frozenset((Tensor, nn.Parameter))
#: By what tensors and options tell; ``None`` for calls that have no straight line.
_lines: dict[Any, StraightLine | None] = {}
_MOST_LINES = 1024

#: Of a product with fewer multiplications, the host takes longer to describe both matrices to the kernel that computes
#: statistics beside it than the device takes to write and read the logits.
MIN_FUSED = 2e10
#: With fewer multiplications, the host takes longer for the launches of exponentials than the device takes to write and
#: read the logits.
MIN_EXPONENTIALS = 1e11
#: Statistics that a straight line computes: with their gradients, and without.
NAMES = frozenset(("logp", "entropy", "lse"))
METRICS = NAMES | {"mean_logit"}


def straight_query(
    hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions
) -> list[Statistics] | None:
    """The statistics of each tensor of labels, in its shape; ``None`` where the call has no straight line."""
    if not (query.is_plain and head.is_plain):
        return None
    metrics = query.metrics and tuple([name for name in query.metrics if name not in query.statistics])
    names, how = query.statistics + metrics, (query.statistics, metrics, options, NO_TRANSFORM)
    several = isinstance(hidden_states, (list, tuple))
    if not several or len(hidden_states) == len(labels) == 1:
        one = (hidden_states[0], labels[0]) if several else (hidden_states, labels)
        found = straight_statistics(one[0], head, one[1], *how)
        return None if found is None else [Statistics(**dict(zip(names, found, strict=True)))]
    joined = _joined(hidden_states, labels, head, options)
    found = None if joined is None else straight_statistics(joined[0], head, joined[1], *how)
    if found is None:
        return None
    shapes = [part.shape for part in labels]
    if len({*shapes}) == 1:
        parts: list[Any] = [value.view(len(shapes), *shapes[0]).unbind() for value in found]
    else:
        sizes = [shape.numel() for shape in shapes]
        parts = [[v.view(shape) for v, shape in zip(value.split(sizes), shapes, strict=True)] for value in found]
    return [Statistics(**dict(zip(names, of_one, strict=True))) for of_one in zip(*parts, strict=True)]


def _joined(
    hidden_states: Sequence[Any], labels: Sequence[Any], head: Head, options: EngineOptions
) -> tuple[Tensor, Tensor] | None:
    """Few tokens of several tensors as one stream, ``[..., H]`` and ``[...]``; ``None`` for others."""
    plain = len(hidden_states) == len(labels) and all(type(part) in _PLAIN for part in (*hidden_states, *labels))
    if not plain or drops_tokens([part.shape for part in labels], head, options):
        return None
    fits = [h.shape == (*y.shape, head.weight.shape[1]) for h, y in zip(hidden_states, labels, strict=True)]
    kinds = [{(part.dtype, part.device) for part in parts} for parts in (hidden_states, labels)]
    if not all(fits) or len(kinds[0]) > 1 or len(kinds[1]) > 1 or not labels[0].dim():
        return None
    if len({part.shape for part in labels}) == 1:  # views of each would take the host time too
        return torch.cat([*hidden_states]), torch.cat([*labels])
    return torch.cat([part.flatten(0, -2) for part in hidden_states]), torch.cat([part.flatten() for part in labels])


def straight_coupled_loss(
    hidden_states: Sequence[Any],
    head: Head,
    labels: Sequence[Any],
    query: Query,
    options: EngineOptions,
    make: Callable[..., Any],
    settings: tuple[Any, ...],
    dtypes: tuple[torch.dtype | None, ...],
) -> Callable[[Sequence[Tensor | None]], tuple[Tensor, tuple[Tensor, ...]]] | None:
    """What computes a loss and its metrics from constant inputs of these dtypes (``None`` for those that are left out);
    ``None`` where the call has no straight line.

    ``make(*settings, backend)`` computes them from the statistics, labels and inputs: see
    :mod:`liger_losses.kernels.coupled_rows`.
    """
    several = len(hidden_states) > 1
    one = _joined(hidden_states, labels, head, options) if several else (hidden_states[0], labels[0])
    if one is None or not head.is_plain:
        return None
    hidden, targets = one

    def prepare() -> StraightLine | None:
        found = _prepared(hidden, weight, targets, query, options, LogitTransform(*transform), coupled=True)
        if found is not None:
            found.coupled = make(*settings, "triton")
        return found

    weight, transform = _opened(head, NO_TRANSFORM)
    key = (make, settings, dtypes, query.statistics, query.metrics, options, transform)
    line = _line(key, hidden, weight, targets, prepare)
    if line is None:
        return None

    def loss(inputs: Sequence[Tensor | None]) -> tuple[Tensor, tuple[Tensor, ...]]:
        pairs = zip(inputs, dtypes, strict=True)
        given = [each if each is None else each.detach().to(dtype).contiguous() for each, dtype in pairs]
        metrics: list[Tensor] = []
        return _Loss.apply(line, hidden, weight, targets, given, metrics), tuple(metrics)

    return loss


def straight_statistics(
    hidden_states: Any,
    weight: Any,
    labels: Any,
    names: tuple[str, ...],
    metrics: tuple[str, ...],
    options: EngineOptions | tuple[Any, ...],
    transform: tuple[Any, ...],
) -> tuple[Tensor, ...] | None:
    """Statistics in the labels' shape, ``metrics`` without a gradient; ``None`` where the call has no straight line.

    ``options`` are, or have the fields of, :class:`EngineOptions`; ``transform`` has the fields of
    :class:`LogitTransform`.
    """

    def prepare() -> StraightLine | None:
        how = options if isinstance(options, EngineOptions) else EngineOptions(*options)
        return _prepared(hidden_states, weight, labels, Query(names, metrics), how, LogitTransform(*transform))

    if isinstance(transform[0], Tensor):  # a temperature for each token
        return None
    weight, transform = _opened(weight, transform)
    line = _line((names, metrics, options, transform), hidden_states, weight, labels, prepare)
    if line is None:
        return None
    if line.strategy == "statistics":
        with without_autocast(weight):
            return line.statistics(hidden_states, weight, labels)
    return _Statistics.apply(line, hidden_states, weight, labels)


def straight_loss(
    hidden_states: Any,
    weight: Any,
    labels: Any,
    weights: tuple[tuple[str, EqualWeights], ...] | None,
    options: EngineOptions,
    transform: tuple[Any, ...],
) -> Tensor | None:
    """``sum_t sum_s weights[s] s_t`` of ``logp`` and ``mean_logp``; ``None`` where the call has no straight line."""
    if weights is None or isinstance(transform[0], Tensor):
        return None

    def prepare() -> StraightLine | None:
        query = Query(tuple([name for name, _ in weights]), token_weights=dict(weights))
        return _prepared(hidden_states, weight, labels, query, options, LogitTransform(*transform))

    weight, transform = _opened(weight, transform)
    line = _line((weights, options, transform), hidden_states, weight, labels, prepare)
    return None if line is None else _Loss.apply(line, hidden_states, weight, labels)


#: The fields of the transform that changes nothing.
NO_TRANSFORM = LogitTransform().fields


def _opened(weight: Any, transform: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The matrix of a linear layer or a head that is one, and the transform of its logits; else what was given."""
    if type(weight) is nn.Linear and weight.bias is None:
        return weight.weight, transform
    if isinstance(weight, Head) and transform == NO_TRANSFORM and weight.is_plain:
        own = weight.transform.fields
        return (weight.weight, own) if isinstance(own[0], float) else (weight, transform)
    return weight, transform


def _line(
    settings: Hashable, hidden: Any, weight: Any, labels: Any, prepare: Callable[[], StraightLine | None]
) -> StraightLine | None:
    """The line of a call, which is prepared the first time."""
    plain = type(hidden) in _PLAIN and type(weight) in _PLAIN and type(labels) is Tensor
    # Autograd keeps no labels that were made in inference mode.
    if not plain or labels.is_inference() or within_transform() or records_tangents():
        return None
    try:
        (size, depth), device = weight.shape, weight.device
        if not is_small(labels.numel(), depth, size, device, writes_logits=False):
            return None
        key = (
            *(settings, torch.is_grad_enabled(), autocast_dtype(device), default_bound(), weight.data_ptr() % 16),
            *(os.environ.get(BACKEND_VARIABLE), device, torch.cuda.current_device() if weight.is_cuda else None),
            *(weight.shape, weight.stride(), weight.dtype, weight.requires_grad, hidden.device, hidden.data_ptr() % 16),
            *(hidden.shape, hidden.stride(), hidden.dtype, hidden.requires_grad),
            *(labels.shape, labels.stride(), labels.dtype, labels.device),
        )
        line = _lines.get(key, _lines)
    except (RuntimeError, TypeError, ValueError):  # no matrix; no strides or memory; options that cannot be hashed
        return None
    if line is _lines:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        try:
            line = prepare()
        except (TypeError, ValueError):  # of which the usual way tells the user
            return None
        if len(_lines) >= _MOST_LINES:
            _lines.clear()
        _lines[key] = line
    return line  # type: ignore[return-value]


def _prepared(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    query: Query,
    options: EngineOptions,
    transform: LogitTransform,
    coupled: bool = False,
) -> StraightLine | None:
    """The line of a call for which nothing is cast, padded or cut; ``coupled``: of a loss of all tokens' statistics.

    Raises:
        TypeError, ValueError: inputs that do not fit together.
    """
    (size, depth), tokens = weight.shape, labels.numel()
    if not (hidden.is_contiguous() and labels.is_contiguous() and isinstance(transform.temperature, float)):
        return None
    head = Head(weight, None, transform)
    decision = decide((hidden,), head, (labels,), query, options)
    run = decision.run(tokens, True)
    dtypes = {hidden.dtype, weight.dtype, run.work.operand_dtype, run.grad_weight_dtype}
    here = not weight.is_cuda or weight.get_device() == torch.cuda.current_device()
    known = {*query.statistics} <= NAMES and {*query.metrics} <= METRICS
    known = run.strategy == "one_pass" if query.separable else known
    alike = len(dtypes) == 1 and run.work.logits_dtype == torch.float32 and not head.batch_invariant
    if not (decision.backend == "triton" and here and known and alike):
        return None
    ignore_index = decision.options.ignore_index
    line = StraightLine(labels, weight, query, run.strategy, ignore_index, transform)
    unbounded = options.workspace is None and options.chunk_size is None and options.strategy is None
    unbounded = unbounded and default_bound() is None and options.compact
    large = unbounded and line.multiplications >= MIN_FUSED and not line.mean_logit
    if run.strategy == "statistics" and run.work.fused_products and large:
        flat, entropy = line.flat(hidden), line.entropy
        line.fused = MaskedStatistics(flat, weight, ignore_index, transform, line.right, entropy, "triton")
        return line
    aligned = depth % ALIGNED == 0 and (tokens % ALIGNED == 0 or tokens <= MIN_CUT_SIZE) and padded(size) == size
    in_one_block = not (decision.compact or run.work.fused or run.work.exponentials) and run.plan.rows >= tokens
    # Of a coupled loss, gradients are computed in forward: nothing is kept until backward. fp16 gradients underflow
    # without the loss scale, which is only known there.
    if coupled and hidden.dtype == torch.float16:
        return None
    in_one_block = in_one_block and (coupled or run.strategy in ("statistics", "one_pass", "resident"))
    of_logp = query.statistics == ("logp",) and {*query.metrics} <= {"mean_logit"}
    large = line.multiplications >= MIN_EXPONENTIALS and tokens <= MOST_TOKENS and run.work.fused_products
    # Exponentials take half the memory of logits.
    fits = in_one_block or (unbounded and tokens * size <= MOST_SMALL_LOGITS)
    trains = run.strategy in ("one_pass", "resident", "two_pass")
    if of_logp and large and fits and trains and exponentials_serve(weight, transform):
        how = ignore_index, transform, line.right, "triton", line.mean_logit
        line.rows = ExponentialRows(weight, tokens, *how)
        return line
    return line if in_one_block and aligned else None


@cache
def _right(device: torch.device) -> Tensor:
    """Whether all labels were in the vocabulary: once they were not, a device assertion has ended all work there."""
    return torch.ones((), dtype=torch.bool, device=device)


class StraightLine:
    """How calls of one kind run."""

    def __init__(
        self,
        labels: Tensor,
        weight: Tensor,
        query: Query,
        strategy: str,
        ignore_index: int,
        transform: LogitTransform,
    ) -> None:
        self.names, self.strategy, self.ignore_index = query.statistics + query.metrics, strategy, ignore_index
        self.metrics, self.entropy = len(query.metrics), "entropy" in self.names
        self.mean_logit = "mean_logit" in self.names
        self.device, self.dtype = weight.device, weight.dtype
        tokens, (self.vocab_size, self.hidden_size) = labels.numel(), weight.shape
        self.multiplications = tokens * weight.numel()
        self.right = _right(weight.device)
        self.rows: MaskedRows | ExponentialRows = MaskedRows(
            tokens, self.vocab_size, ignore_index, transform, self.right, "triton"
        )
        self.fused: MaskedStatistics | None = None
        #: What computes the loss from all tokens' statistics.
        self.coupled: Callable[..., Coupled] | None = None
        self.scaling = Scaling("triton")
        given = query.token_weights or {}
        #: Whether the loss is the tokens' mean, and what their log-probabilities are multiplied by.
        self.mean = any(weight.total is None for weight in given.values())
        scales = {name: scale / (1.0 if total is None else total) for name, (scale, total) in given.items()}
        self.scales = scales.get("logp", 0.0), scales.get("mean_logp")

    def statistics(self, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """The statistics, without a gradient."""
        return self.named(self.values(self.flat(hidden_states), weight, labels)[0], labels)

    def values(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[RowStatistics, Any]:
        """The statistics of each row, whose labels are checked, and the block, if there is one."""
        if self.fused is None:
            block = self.rows.project(hidden, weight, labels)
            return self.row_statistics(block, labels), block
        found = self.fused(hidden, weight, labels)
        check_right(self.right, labels, self.vocab_size, self.ignore_index)
        return found, None

    def flat(self, hidden_states: Tensor) -> Tensor:
        """``[T, H]``."""
        return hidden_states if hidden_states.dim() == 2 else hidden_states.view(-1, self.hidden_size)

    def row_statistics(self, block: Any, labels: Tensor) -> RowStatistics:
        """The statistics of each row, whose labels are checked."""
        found = self.rows.statistics(block, labels, self.entropy, self.mean_logit)
        check_right(self.right, labels, self.vocab_size, self.ignore_index)
        return found

    def named(self, values: RowStatistics, labels: Tensor) -> tuple[Tensor, ...]:
        """What the user gets, in the order of the names."""
        return tuple([values.lse.view(labels.shape) if name == "lse" else getattr(values, name) for name in self.names])

    def loss(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        needs: Sequence[bool],
        inputs: Sequence[Tensor | None] = (),
    ) -> tuple[Tensor, Sequence[Tensor], list[Tensor | None]]:
        """The loss, 0-dim, its metrics, and its gradients by hidden states and weight, where they are needed."""
        hidden, metrics = self.flat(hidden_states), tuple[Tensor, ...]()
        found: Any
        if self.coupled is not None:
            values, block = self.values(hidden, weight, labels)
            loss, metrics, derivative = self.coupled(values, labels, *inputs)
            if not any(needs):
                return loss, metrics, [None, None]
            found = self.rows.gradients(block, labels, hidden, values.lse, None, Derivatives(logp=derivative))
        else:
            own: Any = self.rows.project(hidden, weight, labels)
            found = self.rows.loss(own, labels, hidden, self.scales, self.mean)
            check_right(self.right, labels, self.vocab_size, self.ignore_index)
            loss = found.loss
        return loss, metrics, self.products(found, hidden_states, weight, needs)

    def products(self, found: Any, hidden_states: Tensor, weight: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradients by hidden states and weight, where they are needed."""
        grads: list[Tensor | None] = [None, None]

        if needs[0]:  # allocated on the caller's stream, as the product may run on another
            grads[0] = torch.empty(hidden_states.shape, dtype=weight.dtype, device=self.device)

        def of_hidden() -> None:
            if grads[0] is not None:
                self.rows.hidden_gradient_into(self.flat(grads[0]), found, weight)

        def of_weight() -> None:
            grads[1] = self.rows.weight_gradient(found, weight.dtype)

        wanted = [product for product, need in zip((of_hidden, of_weight), needs, strict=True) if need]
        side_by_side(self.device, wanted, self.multiplications)
        return grads


class _Statistics(torch.autograd.Function):
    """Statistics, whose block of rows is kept until backward."""

    @staticmethod
    def forward(ctx: Any, line: StraightLine, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with without_autocast(weight):
            block: Any = line.rows.project(line.flat(hidden), weight, labels)
            values = line.row_statistics(block, labels)
        ctx.line, ctx.block, kept = (line, block, ()) if line.rows.overwrites else (line, None, block[:-1])
        ctx.save_for_backward(hidden, weight, labels, values.lse, values.entropy, *kept)
        # Users may change an output in place; what backward needs must not change with it.
        named = zip(line.names, line.named(values, labels), strict=True)
        outputs = [found.clone() if name in ("lse", "entropy") else found for name, found in named]
        if line.metrics:
            ctx.mark_non_differentiable(*outputs[-line.metrics :])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        line: StraightLine = ctx.line
        hidden_states, weight, labels, lse, entropy, *kept = ctx.saved_tensors
        hidden = line.flat(hidden_states)
        given = {name: None if g is None else g.contiguous() for name, g in zip(line.names, upstream, strict=True)}
        derivatives = Derivatives(given.get("lse"), given.get("logp"), given.get("entropy"))
        # A second backward computes a block again that gradients overwrite.
        block: Any = RowExponentials(*kept) if kept else ctx.block
        ctx.block = None
        with without_autocast(weight):
            block = line.rows.project(hidden, weight, labels) if block is None else block
            found = line.rows.gradients(block, labels, hidden, lse, entropy, derivatives)
            return None, *line.products(found, hidden_states, weight, ctx.needs_input_grad[1:3]), None


class _Loss(torch.autograd.Function):
    """A loss, whose gradients are computed in forward; backward only scales these."""

    @staticmethod
    def forward(
        ctx: Any,
        line: StraightLine,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        inputs: Sequence[Tensor | None] = (),
        metrics: list[Tensor] | None = None,
    ) -> Tensor:
        ctx.line = line
        ctx.save_for_backward(hidden, weight, labels, *inputs)
        with without_autocast(weight):
            loss, others, ctx.gradients = line.loss(hidden, weight, labels, ctx.needs_input_grad[1:3], inputs)
        if metrics is not None:
            metrics += others
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # the first backward scaled them in place and returned them
            hidden, weight, labels, *inputs = ctx.saved_tensors
            with without_autocast(weight):
                *_, gradients = ctx.line.loss(hidden, weight, labels, ctx.needs_input_grad[1:3], inputs)
        ctx.line.scaling(upstream, *[grad for grad in gradients if grad is not None])
        return (None, *gradients, None, None, None)[: len(ctx.needs_input_grad)]
