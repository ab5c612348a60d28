"""Two differentiable operations on the output of ``lm_head``, and no loss among them:

- :func:`linear_statistics`: per-token statistics of the logits, for losses that couple tokens;
- :func:`linear_token_loss`: a sum over tokens of a function of each token's own statistics, in one pass.

How they run is chosen from what needs a gradient and what fits the workspace (:data:`STRATEGIES`).
T tokens given, N of them with loss, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine.checks import check_head, check_names, check_tensor
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.plan import make_plan
from liger_losses.chunked.engine.projection import can_fuse, operand_dtype
from liger_losses.chunked.engine.stream import Job, Statistics
from liger_losses.chunked.engine.tokens import Tokens, shift_labels
from liger_losses.kernels import BACKENDS, LOGIT_DTYPES, choose_backend
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.matmul import HALF_DTYPES
from liger_losses.kernels.scale import scale_
from liger_losses.kernels.softmax_stats import STATISTICS

#: Each way to run, with its cost in N H V floating-point operations (with a frozen head in brackets).
STRATEGIES = {
    "statistics": "no gradient is needed: statistics only. 2",
    "one_pass": "separable loss: loss and gradients of a block while its logits are there. 6 (4)",
    "resident": "coupled loss whose logits fit the workspace: they stay there until backward. 6 (4)",
    "frozen_head": "coupled loss of one statistic, frozen head: its gradient per token, [N, H] kept until backward. 4",
    "two_pass": "coupled loss: statistics first, then every block again with the weights known. 8 (6)",
}


@dataclass(frozen=True)
class EngineOptions:
    """How to stream; none of it changes a result beyond rounding.

    Args:
        ignore_index: the label of tokens without loss.
        compact: drop tokens without loss before the projection, at the cost of one synchronisation. Those that are not
            dropped are multiplied by 0: their hidden states must be finite.
        workspace: bytes for everything beyond inputs and outputs; chosen from the shapes by default.
        chunk_size: at most so many tokens' logits in a block of the forward pass, where more would fit the workspace.
        accum_dtype: dtype to add up grad_weight in, ``torch.float32`` or ``None`` for the weight's own. It costs a
            buffer of the weight's size.
        backend: ``torch`` or ``triton`` for the work between the products; chosen from the device by default, or by
            the environment variable ``LIGER_LOSSES_BACKEND``.
        strategy: force one of :data:`STRATEGIES` (for tests and measurements).
    """

    ignore_index: int = -100
    compact: bool = True
    workspace: int | None = None
    chunk_size: int | None = None
    accum_dtype: torch.dtype | None = None
    backend: str | None = None
    strategy: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise TypeError(f"ignore_index must be an integer, got {self.ignore_index!r}.")
        for name in ("workspace", "chunk_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
        if self.accum_dtype not in (None, torch.float32):
            raise ValueError(f"accum_dtype must be torch.float32 or None, got {self.accum_dtype!r}.")
        if self.backend is not None:
            check_names([self.backend], BACKENDS, "backend")
        if self.strategy is not None:
            check_names([self.strategy], STRATEGIES, "strategy")


def linear_statistics(
    hidden_states: Tensor | Sequence[Tensor],
    weight: Tensor | nn.Module | Head,
    labels: Tensor | Sequence[Tensor] | Tokens,
    statistics: Iterable[str] | str = ("logp",),
    *,
    metrics: Iterable[str] | str = (),
    selected: Tensor | None = None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> Any:
    """Per-token statistics of ``hidden_states @ weight.T``, differentiable, without the logits in memory.

    Args:
        hidden_states: ``[..., H]``, or a sequence of such tensors that are streamed as one.
        weight: ``[V, H]``, the ``lm_head``: a tensor, a linear layer, or a :class:`Head`.
        labels: ``[...]`` int64, one for each hidden state (a sequence where ``hidden_states`` is one).
        statistics: names from :data:`liger_losses.kernels.softmax_stats.STATISTICS` (or one name), differentiable.
        metrics: further names, returned without gradient.
        selected: ``[..., k]`` int64, for one tensor of hidden states: the statistics may then include
            ``selected_logps [..., k]``, the log-probabilities of these columns; ``logp`` and ``lse`` are the only
            others then.
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
    head = Head.of(weight, bias, transform)
    weight, bias, transform = head.weight, head.bias, head.transform
    job, hidden = _prepare(
        hidden_states,
        weight,
        labels,
        _names(statistics),
        _names(metrics),
        bias,
        class_weight,
        transform,
        options,
        whole_rows=selected is not None,
    )
    if selected is not None:
        job = _with_selected(job, selected)
    by_name = {name: job.tokens.split(value) for name, value in _run(job, weight, bias, hidden).items()}
    per_tensor = [Statistics(**{name: parts[i] for name, parts in by_name.items()}) for i in range(len(hidden))]
    return per_tensor[0] if isinstance(hidden_states, Tensor) else per_tensor


def linear_logps(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
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
    compact: bool = True,
    workspace: int | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> Any:
    """Per-token log-probabilities of the labels, an ordinary differentiable operation.

    ``logp_t = log_softmax(hidden_states_t @ weight.T + bias)[labels_t]``

    Args:
        hidden_states: ``[..., H]``.
        weight: ``[V, H]``, the ``lm_head``: a tensor, a linear layer, or a :class:`Head`.
        labels: ``[...]`` int64.
        bias: ``[V]``.
        entropy: also return each token's entropy, in nats, differentiable.
        lse: also return each token's log-sum-exp, differentiable.
        ignore_index: the label of tokens that need no log-probability; they get 0 and cost nothing.
        shift: position ``t`` predicts the label at ``t + 1``; the last position gets 0.
        temperature, logit_scale, softcap: see :class:`liger_losses.LogitTransform`.
        compact, workspace, chunk_size, backend: see :class:`EngineOptions`.

    Returns:
        The log-probabilities ``[...]`` in fp32 (fp64 for fp64 inputs); with ``entropy`` or ``lse``, a
        :class:`Statistics` with the fields ``logp``, ``entropy``, ``lse``.

    Raises:
        TypeError, ValueError: as :func:`linear_statistics`.
    """
    check_tensor("labels", labels)
    extra = tuple(name for name, wanted in (("entropy", entropy), ("lse", lse)) if wanted)
    statistics = linear_statistics(
        hidden_states,
        weight,
        shift_labels(labels, ignore_index) if shift else labels,
        ("logp", *extra),
        bias=bias,
        transform=LogitTransform(temperature, logit_scale, softcap),
        options=EngineOptions(ignore_index, compact, workspace, chunk_size, backend=backend),
    )
    return statistics if extra else statistics.logp


def linear_token_loss(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor | Tokens,
    token_loss: Callable[..., Any],
    statistics: Iterable[str] | str = ("logp",),
    *,
    metrics: Iterable[str] | str = (),
    token_inputs: Mapping[str, Tensor] | None = None,
    selected: Tensor | None = None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    transform: LogitTransform | None = None,
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
        :class:`Statistics` in the labels' shape.

    Raises:
        TypeError, ValueError: as :func:`linear_statistics`; token inputs or losses that are not one per token.
    """
    check_tensor("hidden_states", hidden_states)
    head = Head.of(weight, bias, transform)
    weight, bias, transform = head.weight, head.bias, head.transform
    job, (hidden,) = _prepare(
        hidden_states,
        weight,
        labels,
        _names(statistics),
        _names(metrics),
        bias,
        class_weight,
        transform,
        options,
        separable=True,
        whole_rows=selected is not None,
    )
    inputs = {}
    for name, value in (token_inputs or {}).items():
        check_tensor(name, value)
        shape = job.tokens.shapes[0]
        if value.shape[: len(shape)] != shape or value.dim() > len(shape) + 1:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but there is one value for each label: {tuple(shape)}."
            )
        inputs[name] = _kept(job, value)
    if selected is not None:
        job = _with_selected(job, selected)
    if job.strategy == "one_pass":
        job = replace(job, token_loss=token_loss, token_inputs=inputs)
        loss, *outputs = _TokenLoss.apply(job, weight, bias, hidden)
        named = {n: job.tokens.split(v)[0] for n, v in zip(job.statistics + job.metrics, outputs, strict=True)}
        return loss, Statistics(**named)

    values = _run(job, weight, bias, [hidden])
    kept = {name: job.tokens.gather([value], 0, job.tokens.count) for name, value in values.items()}
    result = token_loss(Statistics(**kept), job.tokens.labels, **inputs)
    if isinstance(result, tuple):
        # A function of the same value whose derivatives are those given.
        result = result[0].detach() + sum(
            g.detach() * (kept[name] - kept[name].detach()) for name, g in result[1].items()
        )
    losses = job.tokens.masked(result)
    return losses.sum(), Statistics(**{name: job.tokens.split(value.detach())[0] for name, value in values.items()})


def _kept(job: Job, value: Tensor) -> Tensor:
    """From one value (or row) per label to one per kept token."""
    (shape,) = job.tokens.shapes
    flat = value.detach().reshape(shape.numel(), *value.shape[len(shape) :])
    return job.tokens.gather([flat], 0, job.tokens.count)


def _with_selected(job: Job, selected: Tensor) -> Job:
    """The job with ``selected_logps`` of these columns ``[..., k]`` among its statistics."""
    check_names(job.statistics, ("selected_logps", "logp", "lse"), "differentiable statistic beside selected_logps")
    check_tensor("selected", selected)
    if len(job.tokens.shapes) != 1:
        raise TypeError("selected= goes with one tensor of hidden states, not with a sequence of them.")
    (shape,) = job.tokens.shapes
    if selected.dtype != torch.int64 or selected.dim() != len(shape) + 1 or selected.shape[:-1] != shape:
        raise ValueError(
            f"selected must be int64 columns [..., k] for each label of {tuple(shape)}, got {selected.dtype} of "
            f"{tuple(selected.shape)}."
        )
    kept = _kept(job, selected)
    if job.tokens.mask is not None:
        kept = kept.masked_fill(~job.tokens.mask[:, None], 0)  # those of tokens without loss may be anything
    # Every block adds to all of grad_weight: where there are many, it is added up wide, at the cost of a buffer.
    wide = job.strategy == "two_pass" and not job.plan.few_blocks
    dtype = torch.promote_types(job.grad_weight_dtype, torch.float32) if wide else job.grad_weight_dtype
    return replace(job, selected=kept, grad_weight_dtype=dtype)


def _names(names: Iterable[str] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _run(job: Job, weight: Tensor, bias: Tensor | None, hidden: Sequence[Tensor]) -> dict[str, Tensor]:
    """The statistics and metrics of every given token, ``[T]`` each, by any strategy for coupled losses."""
    names = job.statistics + job.metrics
    if job.strategy != "statistics":
        return dict(zip(names, _LinearStatistics.apply(job, weight, bias, *hidden), strict=True))
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        values, _ = job.open(weight, bias, hidden).statistics()
    return {name: job.tokens.spread(values[name]) for name in names}


def _prepare(
    hidden_states: Any,
    weight: Tensor,
    labels: Any,
    statistics: tuple[str, ...],
    metrics: tuple[str, ...],
    bias: Tensor | None,
    class_weight: Tensor | None,
    transform: LogitTransform,
    options: EngineOptions,
    separable: bool = False,
    whole_rows: bool = False,
) -> tuple[Job, tuple[Tensor, ...]]:
    """Check the inputs, select the tokens, and choose how to run.

    With ``whole_rows``, blocks hold fp32 logits whatever the statistics.
    """
    if not isinstance(hidden_states, (list, tuple)):
        hidden_states = (hidden_states,)
        labels = labels if isinstance(labels, Tokens) else (labels,)
    hidden = tuple(hidden_states)
    compute_dtype = check_head(
        hidden, weight, labels if isinstance(labels, Tokens) else tuple(labels), bias, class_weight
    )
    own = ("selected_logps",) if whole_rows else ()
    check_names(statistics, (*(name for name in STATISTICS if name != "argmax"), *own), "differentiable statistic")
    check_names(metrics, STATISTICS, "statistic")

    tokens = labels
    if not isinstance(tokens, Tokens):
        tokens = Tokens.select(
            tuple(labels), vocab_size=weight.shape[0], ignore_index=options.ignore_index, compact=options.compact
        )
    logits_dtype = torch.promote_types(torch.float32, compute_dtype)
    backend = choose_backend(options.backend, [(weight.device, logits_dtype)], dtypes=LOGIT_DTYPES)
    operand = operand_dtype(compute_dtype, weight.device, backend)
    logits_dtype = torch.promote_types(torch.float32, operand)
    grad = torch.is_grad_enabled()
    needs_bias = grad and bias is not None and bias.requires_grad
    fused = can_fuse(weight, operand, backend) and not needs_bias and not whole_rows
    # fp16 would not hold exponentials of any size.
    exponentials = fused and operand == torch.bfloat16 and {*statistics, *metrics} <= {"logp", "lse"}
    (first, *more), (index, *_) = hidden, tokens.indices
    dense = first.is_contiguous() or (first.dim() == 2 and first.stride(1) == 1)
    gathered = bool(more) or index is not None or not dense or first.dtype != operand
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
        temporaries=backend == "torch" or needs_bias,
        gathered=gathered,
        fused=fused,
        exponentials=exponentials,
    )
    job = Job(
        transform=transform,
        class_weight=None if class_weight is None else class_weight.detach().to(logits_dtype).contiguous(),
        tokens=tokens,
        plan=plan,
        operand_dtype=operand,
        grad_weight_dtype=torch.promote_types(weight.dtype, options.accum_dtype or weight.dtype),
        backend=backend,
        gathered=gathered,
        fused=fused,
        exponentials=exponentials,
        statistics=statistics,
        metrics=tuple(name for name in metrics if name not in statistics),
        strategy="",
        needs_hidden=tuple(grad and part.requires_grad for part in hidden),
        needs_weight=grad and weight.requires_grad,
        needs_bias=needs_bias,
    )
    possible = _possible_strategies(job, compute_dtype, separable, whole_rows)
    strategy = possible[0]
    if options.strategy is not None and strategy != "statistics":
        check_names([options.strategy], possible, "strategy for these inputs")
        strategy = options.strategy
    return replace(job, strategy=strategy), hidden


def _possible_strategies(job: Job, compute_dtype: torch.dtype, separable: bool, whole_rows: bool = False) -> list[str]:
    """Those of :data:`STRATEGIES` that are exact for these inputs and fit the workspace, the cheapest first."""
    if not (any(job.needs_hidden) or job.needs_weight or job.needs_bias):
        return ["statistics"]
    possible = []
    # fp16 gradients underflow without the loss scale, which is only known in backward; and a half-precision
    # grad_weight must not be rounded many times over.
    few_roundings = job.grad_weight_dtype not in HALF_DTYPES or job.plan.few_blocks or not job.needs_weight
    if separable and compute_dtype != torch.float16 and few_roundings:
        possible.append("one_pass")
    if not (job.needs_weight or job.needs_bias) and len(job.statistics) == 1 and not whole_rows:
        possible.append("frozen_head")
    if job.plan.resident:
        possible.append("resident")
    if job.plan.tall_blocks or not job.needs_weight:
        return [*possible, "two_pass"]
    return ["two_pass", *possible]


class _LinearStatistics(torch.autograd.Function):
    """Statistics in forward; in backward the gradient of any function of them."""

    @staticmethod
    def forward(ctx: Any, job: Job, weight: Tensor, bias: Tensor | None, *hidden: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.job, ctx.kept, ctx.unit_gradient = job, None, None
        with torch.autocast(weight.device.type, enabled=False):
            stream = job.open(weight, bias, hidden)
            if job.strategy == "frozen_head":
                values, ctx.unit_gradient = stream.statistics_and_unit_gradient()
            else:
                values, ctx.kept = stream.statistics(keep=job.strategy == "resident")
        needed = {name: values[name] for name in ("lse", *job.statistics)}
        ctx.saved_names = tuple(needed)
        # The labels for their version alone: they may be the user's own, and must not have changed by then.
        ctx.save_for_backward(weight, bias, *hidden, *needed.values(), job.tokens.labels)
        outputs = [job.tokens.spread(values[name]) for name in job.statistics + job.metrics]
        # Users may change an output in place; what backward needs must not change with it.
        outputs = [out.clone() if any(out is v for v in values.values()) else out for out in outputs]
        ctx.mark_non_differentiable(*outputs[len(job.statistics) :])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        job: Job = ctx.job
        weight, bias, *rest, _ = ctx.saved_tensors
        hidden, saved = rest[: len(job.needs_hidden)], rest[len(job.needs_hidden) :]
        values = dict(zip(ctx.saved_names, saved, strict=True))
        gradients = {
            name: job.tokens.collect(g)
            for name, g in zip(job.statistics, upstream[: len(job.statistics)], strict=True)
            if g is not None
        }
        with torch.autocast(weight.device.type, enabled=False):
            stream = job.open(weight, bias, hidden)
            if ctx.unit_gradient is not None:
                return None, None, None, *stream.scaled(ctx.unit_gradient, gradients)
            # What was kept may be overwritten, and its memory is wanted back: a second backward computes it again.
            kept, ctx.kept = ctx.kept, None
            return None, *stream.gradients(values, gradients, kept)


class _TokenLoss(torch.autograd.Function):
    """Loss and gradients in forward; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, job: Job, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with torch.autocast(weight.device.type, enabled=False):
            loss, values, gradients = job.open(weight, bias, [hidden]).token_loss()
        ctx.job, ctx.gradients = job, gradients
        ctx.save_for_backward(weight, bias, hidden, job.tokens.labels)
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
            weight, bias, hidden, _ = ctx.saved_tensors
            with torch.autocast(weight.device.type, enabled=False):
                gradients = ctx.job.open(weight, bias, [hidden]).token_loss()[-1]
        backend = ctx.job.backend
        return None, *(None if grad is None else scale_(grad, upstream, backend=backend) for grad in gradients)
