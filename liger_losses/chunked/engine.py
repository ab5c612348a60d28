"""Streams hidden states through ``lm_head`` in blocks. The only code that sees logits.

Two differentiable operations, and no loss among them:

- :func:`linear_statistics`: per-token statistics of the logits, for losses that couple tokens;
- :func:`linear_token_loss`: a sum over tokens of a function of each token's own statistics, in one pass.

How they run is chosen from what needs a gradient and what fits the workspace (:data:`STRATEGIES`).

T tokens given, N of them with loss, H hidden size, V vocabulary size, R rows and C columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_losses.chunked.checks import check_head, check_names
from liger_losses.chunked.head import LogitTransform, Projection, operand_dtype
from liger_losses.chunked.plan import MAX_HALF_PRECISION_BLOCKS, Plan, make_plan, padded
from liger_losses.chunked.tokens import Tokens, shift_labels
from liger_losses.kernels.matmul import HALF_DTYPES, matmul_into
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient
from liger_losses.kernels.softmax_stats import softmax_statistics

#: Each way to run, with its cost in N H V floating-point operations (with a frozen head in brackets).
STRATEGIES = {
    "statistics": "no gradient is needed: statistics only. 2",
    "one_pass": "separable loss: loss and gradients of a block while its logits are there. 6 (4)",
    "resident": "coupled loss whose logits fit the workspace: they stay there until backward. 6 (4)",
    "frozen_head": "coupled loss of one statistic, frozen head: its gradient per token, scaled in backward. 4",
    "two_pass": "coupled loss: statistics first, then every block again with the weights known. 8 (6)",
}


class Statistics(NamedTuple):
    """Per-token statistics of the logits' softmax; ``None`` for those not asked for, 0 for tokens without loss.

    See :func:`liger_losses.kernels.softmax_stats.softmax_statistics` for their definitions.
    """

    logp: Any = None
    entropy: Any = None
    lse: Any = None
    mean_logp: Any = None
    log_sum_sq_probs: Any = None
    mean_logit: Any = None
    argmax: Any = None


@dataclass(frozen=True)
class EngineOptions:
    """How to stream; none of it changes a result beyond rounding.

    Args:
        ignore_index: the label of tokens without loss.
        compact: drop tokens without loss before the projection, at the cost of one synchronisation.
        workspace: bytes for everything beyond inputs and outputs; chosen from the shapes by default.
        chunk_size: tokens per block, instead of as many as fit the workspace.
        accum_dtype: dtype to add up grad_weight in, ``torch.float32`` or ``None`` for the weight's own. It costs a
            buffer of the weight's size.
        strategy: force one of :data:`STRATEGIES` (for tests and measurements).
    """

    ignore_index: int = -100
    compact: bool = True
    workspace: int | None = None
    chunk_size: int | None = None
    accum_dtype: torch.dtype | None = None
    strategy: str | None = None

    def __post_init__(self) -> None:
        for name in ("workspace", "chunk_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
        if self.accum_dtype not in (None, torch.float32):
            raise ValueError(f"accum_dtype must be torch.float32 or None, got {self.accum_dtype!r}.")
        if self.strategy is not None:
            check_names([self.strategy], STRATEGIES, "strategy")


@dataclass(frozen=True)
class _Job:
    """Everything about a call but the tensors that autograd tracks."""

    transform: LogitTransform
    class_weight: Tensor | None
    tokens: Tokens
    plan: Plan
    operand_dtype: torch.dtype
    grad_weight_dtype: torch.dtype
    statistics: tuple[str, ...]
    metrics: tuple[str, ...]
    strategy: str
    needs_hidden: tuple[bool, ...] = ()
    needs_weight: bool = False
    needs_bias: bool = False
    token_loss: Callable[..., Tensor] | None = None
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.statistics) | frozenset(self.metrics) | {"lse"}

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return Projection(weight, bias, self.transform, self.operand_dtype, self.plan.slab)

    def hidden_rows(self, hidden: Sequence[Tensor], start: int, stop: int) -> Tensor:
        return self.tokens.gather(hidden, start, stop).to(self.operand_dtype)

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.promote_types(torch.float32, self.operand_dtype)


def linear_statistics(
    hidden_states: Tensor | Sequence[Tensor],
    weight: Tensor,
    labels: Tensor | Sequence[Tensor],
    statistics: Iterable[str] = ("logp",),
    *,
    metrics: Iterable[str] = (),
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),
    options: EngineOptions = EngineOptions(),
) -> Any:
    """Per-token statistics of ``hidden_states @ weight.T``, differentiable, without the logits in memory.

    Args:
        hidden_states: ``[..., H]``, or a sequence of such tensors that are streamed as one.
        weight: ``[V, H]``, the ``lm_head``.
        labels: ``[...]`` int64, one for each hidden state (a sequence where ``hidden_states`` is one).
        statistics: names from :data:`liger_losses.kernels.softmax_stats.STATISTICS`, differentiable.
        metrics: further names, returned without gradient.
        bias: ``[V]``.
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
    job, hidden = _prepare(
        hidden_states, weight, labels, tuple(statistics), tuple(metrics), bias, class_weight, transform, options
    )
    by_name = {name: job.tokens.split(value) for name, value in _run(job, weight, bias, hidden).items()}
    per_tensor = [Statistics(**{name: parts[i] for name, parts in by_name.items()}) for i in range(len(hidden))]
    return per_tensor[0] if isinstance(hidden_states, Tensor) else per_tensor


def linear_logps(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    entropy: bool = False,
    lse: bool = False,
    ignore_index: int = -100,
    shift: bool = False,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    workspace: int | None = None,
) -> Any:
    """Per-token log-probabilities of the labels, an ordinary differentiable operation.

    ``logp_t = log_softmax(hidden_states_t @ weight.T + bias)[labels_t]``

    Args:
        hidden_states: ``[..., H]``.
        weight: ``[V, H]``, the ``lm_head``.
        labels: ``[...]`` int64.
        bias: ``[V]``.
        entropy: also return each token's entropy, in nats, differentiable.
        lse: also return each token's log-sum-exp, differentiable.
        ignore_index: the label of tokens that need no log-probability; they get 0 and cost nothing.
        shift: position ``t`` predicts the label at ``t + 1``; the last position gets 0.
        temperature, logit_scale, softcap: see :class:`liger_losses.chunked.head.LogitTransform`.
        workspace: bytes for everything beyond inputs and outputs; chosen from the shapes by default.

    Returns:
        The log-probabilities ``[...]`` in fp32 (fp64 for fp64 inputs); with ``entropy`` or ``lse``, a
        :class:`Statistics` with the fields ``logp``, ``entropy``, ``lse``.

    Raises:
        TypeError, ValueError: as :func:`linear_statistics`.
    """
    extra = tuple(name for name, wanted in (("entropy", entropy), ("lse", lse)) if wanted)
    statistics = linear_statistics(
        hidden_states,
        weight,
        shift_labels(labels, ignore_index) if shift else labels,
        ("logp", *extra),
        bias=bias,
        transform=LogitTransform(temperature, logit_scale, softcap),
        options=EngineOptions(ignore_index=ignore_index, workspace=workspace),
    )
    return statistics if extra else statistics.logp


def linear_token_loss(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: Callable[..., Tensor],
    statistics: Iterable[str] = ("logp",),
    *,
    metrics: Iterable[str] = (),
    token_inputs: Mapping[str, Tensor] | None = None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),
    options: EngineOptions = EngineOptions(),
) -> tuple[Tensor, Statistics]:
    """``sum_t token_loss(statistics_t, labels_t, inputs_t)``: loss and gradients in one pass over the blocks.

    Use it when every token's contribution depends on that token's own statistics and on numbers known beforehand
    (weights, advantages, old log-probs); :func:`linear_statistics` serves all other losses.

    Args:
        hidden_states: ``[..., H]``.
        weight: ``[V, H]``.
        labels: ``[...]`` int64.
        token_loss: ``(statistics, labels, **inputs) -> [n]``, elementwise over the tokens it is given. It is
            differentiated with respect to the statistics alone.
        statistics: what ``token_loss`` reads and is differentiated by.
        metrics: what is returned (and readable in ``token_loss``) without a gradient.
        token_inputs: tensors of the labels' shape that ``token_loss`` gets as keywords, without gradient.
        bias, class_weight, transform, options: as in :func:`linear_statistics`.

    Returns:
        The loss (0-dim, fp32 or fp64) and the detached :class:`Statistics` in the labels' shape.
    """
    job, (hidden,) = _prepare(
        hidden_states,
        weight,
        labels,
        tuple(statistics),
        tuple(metrics),
        bias,
        class_weight,
        transform,
        options,
        separable=True,
    )
    inputs = {}
    for name, value in (token_inputs or {}).items():
        if value.shape != labels.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but there is one value for each label: {tuple(labels.shape)}."
            )
        inputs[name] = job.tokens.gather([value.detach().reshape(-1)], 0, job.tokens.count)
    if job.strategy == "one_pass":
        job = replace(job, token_loss=token_loss, token_inputs=inputs)
        loss, *outputs = _TokenLoss.apply(job, weight, bias, hidden)
        named = {n: job.tokens.split(v)[0] for n, v in zip(job.statistics + job.metrics, outputs, strict=True)}
        return loss, Statistics(**named)

    values = _run(job, weight, bias, [hidden])
    kept = {name: job.tokens.gather([value], 0, job.tokens.count) for name, value in values.items()}
    losses = _masked(job, token_loss(Statistics(**kept), job.tokens.labels, **inputs))
    return losses.sum(), Statistics(**{name: job.tokens.split(value.detach())[0] for name, value in values.items()})


def _run(job: _Job, weight: Tensor, bias: Tensor | None, hidden: Sequence[Tensor]) -> dict[str, Tensor]:
    """The statistics and metrics of every given token, ``[T]`` each, by any strategy for coupled losses."""
    names = job.statistics + job.metrics
    if job.strategy != "statistics":
        return dict(zip(names, _LinearStatistics.apply(job, weight, bias, *hidden), strict=True))
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        values, _ = _stream_statistics(job, job.projection(weight, bias), _flat(hidden))
    return {name: job.tokens.spread(values[name]) for name in names}


def _masked(job: _Job, losses: Tensor) -> Tensor:
    mask = job.tokens.mask
    return losses if mask is None else torch.where(mask, losses, torch.zeros_like(losses))


def _prepare(
    hidden_states: Tensor | Sequence[Tensor],
    weight: Tensor,
    labels: Tensor | Sequence[Tensor],
    statistics: tuple[str, ...],
    metrics: tuple[str, ...],
    bias: Tensor | None,
    class_weight: Tensor | None,
    transform: LogitTransform,
    options: EngineOptions,
    separable: bool = False,
) -> tuple[_Job, tuple[Tensor, ...]]:
    """Check the inputs, select the tokens, and choose how to run."""
    hidden = (hidden_states,) if isinstance(hidden_states, Tensor) else tuple(hidden_states)
    targets = (labels,) if isinstance(labels, Tensor) else tuple(labels)
    compute_dtype = check_head(hidden, weight, targets, bias, class_weight)
    check_names(statistics, Statistics._fields[:-1], "differentiable statistic")
    check_names(metrics, Statistics._fields, "statistic")

    tokens = Tokens.select(
        targets,
        vocab_size=weight.shape[0],
        ignore_index=options.ignore_index,
        compact=options.compact,
    )
    operand = operand_dtype(compute_dtype, weight.device)
    logits_dtype = torch.promote_types(torch.float32, operand)
    plan = make_plan(
        tokens=tokens.count,
        hidden_size=weight.shape[1],
        vocab_size=weight.shape[0],
        logits_dtype=logits_dtype,
        operand_dtype=operand,
        weight_dtype=weight.dtype,
        device=weight.device,
        workspace=options.workspace,
        chunk_size=options.chunk_size,
    )
    grad = torch.is_grad_enabled()
    job = _Job(
        transform=transform,
        class_weight=None if class_weight is None else class_weight.detach().to(logits_dtype),
        tokens=tokens,
        plan=plan,
        operand_dtype=operand,
        grad_weight_dtype=torch.promote_types(weight.dtype, options.accum_dtype or weight.dtype),
        statistics=statistics,
        metrics=tuple(name for name in metrics if name not in statistics),
        strategy="",
        needs_hidden=tuple(grad and part.requires_grad for part in hidden),
        needs_weight=grad and weight.requires_grad,
        needs_bias=grad and bias is not None and bias.requires_grad,
    )
    possible = _possible_strategies(job, compute_dtype, separable)
    strategy = possible[0]
    if options.strategy is not None and strategy != "statistics":
        check_names([options.strategy], possible, "strategy for these inputs")
        strategy = options.strategy
    return replace(job, strategy=strategy), hidden


def _possible_strategies(job: _Job, compute_dtype: torch.dtype, separable: bool) -> list[str]:
    """Those of :data:`STRATEGIES` that are exact for these inputs and fit the workspace, the cheapest first."""
    if not (any(job.needs_hidden) or job.needs_weight or job.needs_bias):
        return ["statistics"]
    possible = []
    # fp16 gradients underflow without the loss scale, which is only known in backward; and a half-precision
    # grad_weight must not be rounded many times over.
    few_roundings = job.grad_weight_dtype not in HALF_DTYPES or job.plan.blocks(job.tokens.count) <= (
        MAX_HALF_PRECISION_BLOCKS
    )
    if separable and compute_dtype != torch.float16 and (few_roundings or not job.needs_weight):
        possible.append("one_pass")
    if not (job.needs_weight or job.needs_bias) and len(job.statistics) == 1:
        possible.append("frozen_head")
    if job.plan.resident:
        possible.append("resident")
    return [*possible, "two_pass"]


def _blocks(total: int, size: int) -> Iterator[tuple[int, int]]:
    size = max(size, 1)
    return ((start, min(start + size, total)) for start in range(0, total, size))


def _logits_buffer(job: _Job, rows: int, columns: int) -> Tensor:
    """``[rows, columns]`` with aligned rows; use its first ``columns`` columns."""
    return torch.empty(rows, padded(columns), dtype=job.logits_dtype, device=job.tokens.labels.device)


def _block_statistics(job: _Job, logits: Tensor, start: int, values: dict[str, Tensor]) -> None:
    """Statistics of a block of whole rows into ``values``, slice by slice to keep temporaries small."""
    for first, last in _blocks(logits.shape[0], job.plan.slice_rows(logits.shape[1], logits.dtype.itemsize)):
        rows = slice(start + first, start + last)
        found = softmax_statistics(logits[first:last], job.tokens.labels[rows], job.names, job.class_weight)
        for name, value in found.items():
            values[name][rows] = value


def _empty_statistics(job: _Job) -> dict[str, Tensor]:
    dtypes = {name: torch.int64 if name == "argmax" else job.logits_dtype for name in job.names}
    return {
        name: torch.empty(job.tokens.count, dtype=dtype, device=job.tokens.labels.device)
        for name, dtype in dtypes.items()
    }


def _stream_statistics(
    job: _Job, projection: Projection, hidden: Sequence[Tensor], keep: bool = False
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The statistics of every kept token, and the logits if they are to be kept."""
    n, vocab_size = job.tokens.count, projection.vocab_size
    values = _empty_statistics(job)
    rows = n if keep else min(job.plan.rows, n)
    buffer = _logits_buffer(job, rows, vocab_size)
    for start, stop in _blocks(n, rows):
        logits = buffer[: stop - start, :vocab_size]
        projection.logits_into(logits, job.hidden_rows(hidden, start, stop), 0, vocab_size)
        _block_statistics(job, logits, start, values)
    return values, buffer if keep else None


class _Gradients:
    """Gradients of weight and bias, added up block by block, and of each block's hidden states."""

    def __init__(self, job: _Job, projection: Projection) -> None:
        self.job, self.projection = job, projection
        weight, bias = projection.weight, projection.bias
        self.weight = None
        if job.needs_weight:
            new = torch.empty if job.tokens.count else torch.zeros  # the first block overwrites it
            self.weight = new(weight.shape, dtype=job.grad_weight_dtype, device=weight.device)
        self.bias = None
        if job.needs_bias and bias is not None:
            self.bias = torch.zeros(bias.shape, dtype=job.logits_dtype, device=bias.device)

    def add(
        self,
        rows: slice,
        hidden: Tensor,
        tiles: Iterable[tuple[int, int, Tensor]],
        values: dict[str, Tensor],
        coefficients: SoftmaxGradient,
    ) -> Tensor | None:
        """Add the gradients of some tokens.

        Args:
            rows: which of the kept tokens, R of them.
            hidden: ``[R, H]``, theirs, in the operand dtype.
            tiles: ``(start, stop, buffer)``: the logits of columns ``start`` to ``stop`` lead each of the R rows
                of ``buffer``, which is overwritten. Together the tiles cover the vocabulary.
            values: statistics of these tokens, ``[R]`` each.
            coefficients: of these tokens.

        Returns:
            The gradient ``[R, H]`` of the hidden states, if any needs one.
        """
        job, projection = self.job, self.projection
        out = None
        for start, stop, buffer in tiles:
            grad = self._logits_gradient(rows, start, stop, buffer, values["lse"], coefficients)
            if self.weight is not None:
                for first, last in _blocks(stop - start, projection.slab):
                    target = self.weight[start + first : start + last]
                    matmul_into(target, grad[:, first:last].t(), hidden, accumulate=rows.start > 0)
            if any(job.needs_hidden):
                if out is None:
                    # One product over the whole vocabulary is rounded once; a sum of several is kept wide.
                    whole = stop - start == projection.vocab_size == projection.slab
                    out = hidden.new_empty(hidden.shape, dtype=job.operand_dtype if whole else job.logits_dtype)
                for first, last, weight in projection.weight_slabs(start, stop):
                    matmul_into(out, grad[:, first - start : last - start], weight, accumulate=first > 0)
        return out

    def _logits_gradient(
        self, rows: slice, start: int, stop: int, buffer: Tensor, lse: Tensor, coefficients: SoftmaxGradient
    ) -> Tensor:
        """d loss / d projection ``[R, C]`` in the operand dtype, over the memory of the logits in ``buffer``.

        A half-precision row takes the first half of its own fp32 row, so no second buffer is needed.
        """
        job = self.job
        columns = stop - start
        logits = buffer[:, :columns]
        out = buffer.view(job.operand_dtype)[:, :columns]
        labels = job.tokens.labels[rows]
        class_weight = None if job.class_weight is None else job.class_weight[start:stop]
        for first, last in _blocks(logits.shape[0], job.plan.slice_rows(columns, logits.dtype.itemsize)):
            grad = softmax_gradient(
                logits[first:last],
                lse[first:last],
                labels[first:last],
                coefficients.rows(first, last),
                first_column=start,
                vocab_size=self.projection.vocab_size,
                class_weight=class_weight,
            )
            job.transform.chain_(grad, logits[first:last])
            if self.bias is not None:
                self.bias[start:stop] += grad.sum(0)
            out[first:last].copy_(grad)
            del grad  # or it would still be there beside the next slice's
        return out

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """``(grad_weight, grad_bias)``."""
        weight, bias = self.projection.weight, self.projection.bias
        return (
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


class _HiddenGradients:
    """Gradients of all hidden states, those without loss included (0)."""

    def __init__(self, job: _Job, hidden: Sequence[Tensor]) -> None:
        self.tokens = job.tokens
        self.results = [
            torch.zeros(part.shape, dtype=part.dtype, device=part.device) if need else None
            for part, need in zip(hidden, job.needs_hidden, strict=True)
        ]
        self.flat = [None if part is None else part.view(-1, part.shape[-1]) for part in self.results]

    def write(self, rows: slice, values: Tensor | None) -> None:
        if values is not None:
            self.tokens.scatter_(self.flat, rows.start, rows.stop, values)


def _flat(hidden: Sequence[Tensor]) -> list[Tensor]:
    return [part.reshape(-1, part.shape[-1]) for part in hidden]


def _slice_values(values: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in values.items()}


def _second_pass(
    job: _Job,
    projection: Projection,
    hidden: Sequence[Tensor],
    values: dict[str, Tensor],
    coefficients: SoftmaxGradient,
    logits: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of every kept token, from its logits where they were kept, else from logits computed again.

    Recomputed tiles walk the vocabulary, so that each part of grad_weight is written once per ``tile_rows`` tokens.
    """
    n, vocab_size = job.tokens.count, projection.vocab_size
    grads, hidden_grads, flat = _Gradients(job, projection), _HiddenGradients(job, hidden), _flat(hidden)
    tile_rows = n if logits is not None else job.plan.tile_rows
    width = min(job.plan.tile_columns, vocab_size)
    buffer = None if logits is not None else _logits_buffer(job, min(tile_rows, n), width)
    for start, stop in _blocks(n, tile_rows):
        rows, kept = slice(start, stop), job.hidden_rows(flat, start, stop)

        def recomputed(
            kept: Tensor = kept, count: int = stop - start, buffer: Tensor | None = buffer
        ) -> Iterator[tuple[int, int, Tensor]]:
            assert buffer is not None
            for first, last in _blocks(vocab_size, width):
                projection.logits_into(buffer[:count, : last - first], kept, first, last)
                yield first, last, buffer[:count]

        tiles = recomputed() if logits is None else [(0, vocab_size, logits)]
        out = grads.add(rows, kept, tiles, _slice_values(values, rows), coefficients.rows(start, stop))
        hidden_grads.write(rows, out)
    return *grads.results(), *hidden_grads.results


class _LinearStatistics(torch.autograd.Function):
    """Statistics in forward; in backward the gradient of any function of them."""

    @staticmethod
    def forward(ctx: Any, job: _Job, weight: Tensor, bias: Tensor | None, *hidden: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        projection, flat = job.projection(weight, bias), _flat(hidden)
        ctx.job, ctx.logits, ctx.unit_gradient = job, None, None
        with torch.autocast(weight.device.type, enabled=False):
            if job.strategy == "frozen_head":
                values, ctx.unit_gradient = _frozen_head_pass(job, projection, hidden)
            else:
                values, ctx.logits = _stream_statistics(job, projection, flat, keep=job.strategy == "resident")
        needed = {name: values[name] for name in ("lse", *job.statistics)}
        ctx.saved_names = tuple(needed)
        ctx.save_for_backward(weight, bias, *hidden, *needed.values())
        outputs = [job.tokens.spread(values[name]) for name in job.statistics + job.metrics]
        # Users may change an output in place; what backward needs must not change with it.
        outputs = [out.clone() if any(out is v for v in needed.values()) else out for out in outputs]
        ctx.mark_non_differentiable(*outputs[len(job.statistics) :])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        job: _Job = ctx.job
        weight, bias, *rest = ctx.saved_tensors
        hidden, saved = rest[: len(job.needs_hidden)], rest[len(job.needs_hidden) :]
        values = dict(zip(ctx.saved_names, saved, strict=True))
        gradients = {
            name: job.tokens.collect(g)
            for name, g in zip(job.statistics, upstream[: len(job.statistics)], strict=True)
            if g is not None
        }
        with torch.autocast(weight.device.type, enabled=False):
            if ctx.unit_gradient is not None:
                return None, None, None, *_scaled(job, hidden, ctx.unit_gradient, gradients)
            coefficients = SoftmaxGradient.of(gradients, values, job.class_weight)
            # The kept logits are overwritten: a second backward computes them again.
            logits, ctx.logits = ctx.logits, None
            return None, *_second_pass(job, job.projection(weight, bias), hidden, values, coefficients, logits)


def _frozen_head_pass(job: _Job, projection: Projection, hidden: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Statistics, and the gradient ``[N, H]`` of the only one with respect to each token's hidden state."""
    n, vocab_size, (statistic,) = job.tokens.count, projection.vocab_size, job.statistics
    grads, flat, values = _Gradients(job, projection), _flat(hidden), _empty_statistics(job)
    unit_gradient = projection.weight.new_empty(n, projection.weight.shape[1], dtype=hidden[0].dtype)
    buffer = _logits_buffer(job, min(job.plan.rows, n), vocab_size)
    for start, stop in _blocks(n, job.plan.rows):
        rows, kept = slice(start, stop), job.hidden_rows(flat, start, stop)
        projection.logits_into(buffer[: stop - start, :vocab_size], kept, 0, vocab_size)
        _block_statistics(job, buffer[: stop - start, :vocab_size], start, values)
        found = _slice_values(values, rows)
        coefficients = SoftmaxGradient.of({statistic: torch.ones_like(found["lse"])}, found, job.class_weight)
        out = grads.add(rows, kept, [(0, vocab_size, buffer[: stop - start])], found, coefficients)
        assert out is not None
        unit_gradient[rows] = out
    return values, unit_gradient


def _scaled(
    job: _Job, hidden: Sequence[Tensor], unit_gradient: Tensor, gradients: dict[str, Tensor]
) -> list[Tensor | None]:
    """The frozen head's gradients of hidden states: each token's own, times its upstream gradient."""
    hidden_grads = _HiddenGradients(job, hidden)
    for g in gradients.values():
        for start, stop in _blocks(job.tokens.count, job.plan.rows):
            hidden_grads.write(slice(start, stop), unit_gradient[start:stop] * g[start:stop, None])
    return hidden_grads.results


def _token_loss_pass(
    job: _Job, weight: Tensor, bias: Tensor | None, hidden: Tensor
) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
    """Loss, statistics and gradients for an upstream gradient of 1, block by block."""
    assert job.token_loss is not None
    projection, tokens = job.projection(weight, bias), job.tokens
    n, vocab_size = tokens.count, projection.vocab_size
    values = _empty_statistics(job)
    losses = torch.zeros(n, dtype=job.logits_dtype, device=weight.device)
    grads, hidden_grads, flat = _Gradients(job, projection), _HiddenGradients(job, [hidden]), _flat([hidden])
    buffer = _logits_buffer(job, min(job.plan.rows, n), vocab_size)
    for start, stop in _blocks(n, job.plan.rows):
        rows, kept = slice(start, stop), job.hidden_rows(flat, start, stop)
        projection.logits_into(buffer[: stop - start, :vocab_size], kept, 0, vocab_size)
        _block_statistics(job, buffer[: stop - start, :vocab_size], start, values)
        found = _slice_values(values, rows)
        losses[rows], upstream = _token_loss_gradients(job, rows, found)
        coefficients = SoftmaxGradient.of(upstream, found, job.class_weight)
        out = grads.add(rows, kept, [(0, vocab_size, buffer[: stop - start])], found, coefficients)
        hidden_grads.write(rows, out)
    return losses.sum(), values, (*grads.results(), *hidden_grads.results)


def _token_loss_gradients(job: _Job, rows: slice, found: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The tokens' losses, and their derivatives by each statistic, from ordinary autograd on ``[R]`` tensors."""
    assert job.token_loss is not None
    with torch.enable_grad():
        leaves = {name: found[name].detach().requires_grad_() for name in job.statistics}
        named = {**leaves, **{name: found[name] for name in job.metrics}}
        inputs = {name: value[rows] for name, value in job.token_inputs.items()}
        losses = job.token_loss(Statistics(**named), job.tokens.labels[rows], **inputs)
        if losses.shape != (rows.stop - rows.start,):
            raise ValueError(
                f"token_loss must return one value per token, [{rows.stop - rows.start}], got {tuple(losses.shape)}."
            )
        if job.tokens.mask is not None:  # with it, rows are positions in the mask
            losses = torch.where(job.tokens.mask[rows], losses, torch.zeros_like(losses))
        if not losses.requires_grad:
            return losses, {}
        upstream = torch.autograd.grad(losses.sum(), tuple(leaves.values()), allow_unused=True)
    return losses.detach(), {name: g for name, g in zip(leaves, upstream, strict=True) if g is not None}


class _TokenLoss(torch.autograd.Function):
    """Loss and gradients in forward; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, job: _Job, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with torch.autocast(weight.device.type, enabled=False):
            loss, values, gradients = _token_loss_pass(job, weight, bias, hidden)
        ctx.job, ctx.gradients = job, gradients
        ctx.save_for_backward(weight, bias, hidden)
        outputs = tuple(job.tokens.spread(values[name]) for name in job.statistics + job.metrics)
        ctx.mark_non_differentiable(*outputs)
        return loss, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *of_statistics: None) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if upstream is None:
            return None, None, None, None
        if gradients is None:
            # The first backward scaled them in place and gave them away: a repeated one computes them again.
            with torch.autocast(upstream.device.type, enabled=False):
                gradients = _token_loss_pass(ctx.job, *ctx.saved_tensors)[-1]
        return None, *(None if grad is None else grad.mul_(upstream) for grad in gradients)
