"""Streams hidden states through ``lm_head`` in blocks: the only code that sees logits.

N tokens that carry loss, H hidden size, V vocabulary size, R rows and C columns of a block.

A block's buffer holds projections ``hidden @ weight.T``; the kernels make logits of them as they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.head import Projection
from liger_losses.chunked.plan import Plan, padded
from liger_losses.chunked.tokens import Tokens
from liger_losses.kernels.linear_stats import linear_softmax_statistics
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.matmul import HALF_DTYPES, matmul_into
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics


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
class Job:
    """Everything about a call but the tensors that autograd tracks. See :class:`liger_losses.EngineOptions`.

    Args:
        transform: from projections to logits.
        class_weight: ``[V]`` or ``None``, in the logits' dtype.
        tokens: the kept ones.
        plan: sizes of the blocks.
        operand_dtype: what products are taken in.
        grad_weight_dtype: what the weight's gradient is added up in.
        backend: of the kernels.
        statistics: names that are differentiated.
        metrics: further names.
        strategy: one of :data:`liger_losses.chunked.engine.STRATEGIES`.
        needs_hidden, needs_weight, needs_bias: what needs a gradient.
        token_loss, token_inputs: of a separable loss.
    """

    transform: LogitTransform
    class_weight: Tensor | None
    tokens: Tokens
    plan: Plan
    operand_dtype: torch.dtype
    grad_weight_dtype: torch.dtype
    backend: str
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

    @property
    def logits_dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 inputs: logits are never rounded to half precision."""
        return torch.promote_types(torch.float32, self.operand_dtype)


def blocks(total: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` that cover ``range(total)``."""
    size = max(size, 1)
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _flat(hidden: Tensor) -> Tensor:
    """``[T, H]``, or the tensor as it is where that would copy it: then only what is used is gathered."""
    try:
        return hidden.view(-1, hidden.shape[-1])
    except RuntimeError:
        return hidden


class Stream:
    """One call's tokens on their way through the head.

    Args:
        job: what to do.
        weight: ``[V, H]``.
        bias: ``[V]`` or ``None``.
        hidden: ``[..., H]`` each.
    """

    def __init__(self, job: Job, weight: Tensor, bias: Tensor | None, hidden: Sequence[Tensor]) -> None:
        self.job, self.weight, self.bias, self.hidden = job, weight, bias, hidden
        self.projection = Projection(weight, job.operand_dtype, job.plan.slab)
        self.flat = [_flat(part) for part in hidden]
        self.count, self.vocab_size = job.tokens.count, weight.shape[0]

    # --- Whole passes ------------------------------------------------------------------------------------------

    def statistics(self, keep: bool = False) -> tuple[dict[str, Tensor], Tensor | None]:
        """The statistics ``[N]`` of every kept token, and the projections ``[N, >= V]`` if they are to be kept."""
        values = self._empty_statistics()
        if not keep and self._can_keep_logits_in_registers():
            for rows in blocks(self.count, self._gathered_at_once()):
                found = linear_softmax_statistics(
                    self._hidden_rows(rows),
                    self.weight,
                    self.job.tokens.labels[rows],
                    self.job.names,
                    transform=self.job.transform,
                    bias=self.bias,
                    class_weight=self.job.class_weight,
                    backend=self.job.backend,
                )
                self._store(found, rows, values)
            return values, None
        size = self.count if keep else self.job.plan.rows
        buffer = self._buffer(min(size, self.count), self.vocab_size)
        for rows in blocks(self.count, size):
            self._project(buffer, rows)
            self._read(buffer, rows, values)
        return values, buffer if keep else None

    def gradients(
        self, values: Mapping[str, Tensor], coefficients: SoftmaxGradient, projected: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """``(grad_weight, grad_bias, *grad_hidden)``, from projections where they were kept, else computed again.

        Recomputed tiles walk the vocabulary, so that each part of grad_weight is written once per ``tile_rows`` tokens.
        """
        plan, head_grads, hidden_grads = self.job.plan, _HeadGradients(self), _HiddenGradients(self)
        size = plan.tile_rows if projected is None else self.count
        columns = min(plan.tile_columns, self.vocab_size)
        buffer = self._buffer(min(size, self.count), columns) if projected is None else projected
        for rows in blocks(self.count, size):
            hidden = self._hidden_rows(rows)
            if projected is None:
                tiles: Iterable[tuple[slice, Tensor]] = self._recomputed(hidden, buffer, columns)
            else:
                tiles = [(slice(0, self.vocab_size), buffer)]
            found = {name: value[rows] for name, value in values.items()}
            hidden_grads.write(
                rows, head_grads.add(rows, hidden, tiles, found, coefficients.rows(rows.start, rows.stop))
            )
        return *head_grads.results(), *hidden_grads.results

    def statistics_and_unit_gradient(self) -> tuple[dict[str, Tensor], Tensor]:
        """Statistics, and the gradient ``[N, H]`` of the only one with respect to each token's hidden state."""
        (statistic,) = self.job.statistics
        values, head_grads = self._empty_statistics(), _HeadGradients(self)
        dtype = self.hidden[0].dtype
        for part in self.hidden:
            dtype = torch.promote_types(dtype, part.dtype)
        unit_gradient = self.weight.new_empty(self.count, self.weight.shape[1], dtype=dtype)
        buffer = self._buffer(min(self.job.plan.rows, self.count), self.vocab_size)
        for rows in blocks(self.count, self.job.plan.rows):
            hidden = self._project(buffer, rows)
            found = self._read(buffer, rows, values)
            coefficients = SoftmaxGradient.of({statistic: torch.ones_like(found["lse"])}, found, self.job.class_weight)
            gradient = head_grads.add(rows, hidden, self._whole_rows(buffer, rows), found, coefficients)
            assert gradient is not None
            unit_gradient[rows] = gradient
        return values, unit_gradient

    def scaled(self, unit_gradient: Tensor, upstream: Mapping[str, Tensor]) -> list[Tensor | None]:
        """Gradients of the hidden states: each token's own, times what the loss makes of its statistic."""
        hidden_grads = _HiddenGradients(self)
        for g in upstream.values():
            for rows in blocks(self.count, self.job.plan.rows):
                hidden_grads.write(rows, unit_gradient[rows] * g[rows, None])
        return hidden_grads.results

    def token_loss(self) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
        """A separable loss (0-dim), the statistics, and ``(grad_weight, grad_bias, grad_hidden)`` of it."""
        values = self._empty_statistics()
        losses = torch.zeros(self.count, dtype=self.job.logits_dtype, device=self.weight.device)
        head_grads, hidden_grads = _HeadGradients(self), _HiddenGradients(self)
        buffer = self._buffer(min(self.job.plan.rows, self.count), self.vocab_size)
        for rows in blocks(self.count, self.job.plan.rows):
            hidden = self._project(buffer, rows)
            found = self._read(buffer, rows, values)
            losses[rows], upstream = self._token_losses(rows, found)
            coefficients = SoftmaxGradient.of(upstream, found, self.job.class_weight)
            hidden_grads.write(rows, head_grads.add(rows, hidden, self._whole_rows(buffer, rows), found, coefficients))
        return losses.sum(), values, (*head_grads.results(), *hidden_grads.results)

    # --- Their steps -----------------------------------------------------------------------------------------------

    def _buffer(self, rows: int, columns: int) -> Tensor:
        """``[rows, >= columns]`` with aligned rows."""
        return torch.empty(rows, padded(columns), dtype=self.job.logits_dtype, device=self.weight.device)

    def _empty_statistics(self) -> dict[str, Tensor]:
        dtypes = {name: torch.int64 if name == "argmax" else self.job.logits_dtype for name in self.job.names}
        return {name: torch.empty(self.count, dtype=dtype, device=self.weight.device) for name, dtype in dtypes.items()}

    def _hidden_rows(self, rows: slice) -> Tensor:
        return self.job.tokens.gather(self.flat, rows.start, rows.stop).to(self.job.operand_dtype)

    def _project(self, buffer: Tensor, rows: slice) -> Tensor:
        """Fill the buffer with these tokens' whole rows; their hidden states ``[R, H]``."""
        hidden = self._hidden_rows(rows)
        self.projection.into(buffer[: len(hidden), : self.vocab_size], hidden, 0, self.vocab_size)
        return hidden

    def _read(self, buffer: Tensor, rows: slice, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Reduce these tokens' projections to statistics, into ``values``; views of those."""
        job = self.job
        found = softmax_statistics(
            buffer[: rows.stop - rows.start, : self.vocab_size],
            job.tokens.labels[rows],
            job.names,
            transform=job.transform,
            bias=self.bias,
            class_weight=job.class_weight,
            scratch=job.plan.scratch,
            backend=job.backend,
        )
        return self._store(found, rows, values)

    def _store(self, found: Mapping[str, Tensor], rows: slice, values: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, value in found.items():
            values[name][rows] = value
        return {name: value[rows] for name, value in values.items()}

    def _can_keep_logits_in_registers(self) -> bool:
        """Whether the kernel that needs no buffer of logits serves this call's dtypes and strides."""
        job, weight = self.job, self.weight
        return job.backend == "triton" and weight.dtype == job.operand_dtype in HALF_DTYPES and weight.stride(1) == 1

    def _gathered_at_once(self) -> int:
        """Tokens whose hidden states are gathered at once: all where that copies nothing, else even parts that fit."""
        if len(self.flat) == 1 and self.flat[0].dim() == 2 and self.job.tokens.indices[0] is None:
            return self.count
        parts = -(-self.count // self.job.plan.tile_rows)
        return -(-self.count // max(parts, 1))

    def _whole_rows(self, buffer: Tensor, rows: slice) -> list[tuple[slice, Tensor]]:
        return [(slice(0, self.vocab_size), buffer[: rows.stop - rows.start])]

    def _recomputed(self, hidden: Tensor, buffer: Tensor, columns: int) -> Iterator[tuple[slice, Tensor]]:
        tile = buffer[: len(hidden)]
        for part in blocks(self.vocab_size, columns):
            self.projection.into(tile[:, : part.stop - part.start], hidden, part.start, part.stop)
            yield part, tile

    def _token_losses(self, rows: slice, found: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The tokens' losses, and their derivatives by each statistic, from ordinary autograd on ``[R]`` tensors."""
        job = self.job
        assert job.token_loss is not None
        with torch.enable_grad():
            leaves = {name: found[name].detach().requires_grad_() for name in job.statistics}
            named = {**leaves, **{name: found[name] for name in job.metrics}}
            inputs = {name: value[rows] for name, value in job.token_inputs.items()}
            losses = job.token_loss(Statistics(**named), job.tokens.labels[rows], **inputs)
            if losses.shape != (rows.stop - rows.start,):
                count = rows.stop - rows.start
                raise ValueError(f"token_loss must return one value per token, [{count}], got {tuple(losses.shape)}.")
            losses = job.tokens.masked(losses, rows)
            if not losses.requires_grad:
                return losses, {}
            upstream = torch.autograd.grad(losses.sum(), tuple(leaves.values()), allow_unused=True)
        return losses.detach(), {name: g for name, g in zip(leaves, upstream, strict=True) if g is not None}


class _HeadGradients:
    """Gradients of weight and bias, added up block by block."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.job, self.projection = stream, stream.job, stream.projection
        weight, bias = stream.weight, stream.bias
        self.weight = self.bias = None
        if self.job.needs_weight:
            new = torch.empty if stream.count else torch.zeros  # the first block overwrites it
            self.weight = new(weight.shape, dtype=self.job.grad_weight_dtype, device=weight.device)
        if self.job.needs_bias and bias is not None:
            self.bias = torch.zeros(bias.shape, dtype=self.job.logits_dtype, device=bias.device)

    def add(
        self,
        rows: slice,
        hidden: Tensor,
        tiles: Iterable[tuple[slice, Tensor]],
        values: Mapping[str, Tensor],
        coefficients: SoftmaxGradient,
    ) -> Tensor | None:
        """Add the gradients of some tokens.

        Args:
            rows: which of the kept tokens, R of them.
            hidden: ``[R, H]``, theirs, in the operand dtype.
            tiles: ``(columns, buffer)``: projections on these columns of the vocabulary lead the R rows of the buffer,
                which is overwritten. Together the tiles cover the vocabulary.
            values: statistics of these tokens, ``[R]`` each.
            coefficients: of these tokens.

        Returns:
            The gradient ``[R, H]`` of the hidden states, if any needs one.
        """
        job, out = self.job, None
        for columns, buffer in tiles:
            grad = self._projection_gradient(rows, columns, buffer, values["lse"], coefficients)
            start, width = columns.start, columns.stop - columns.start
            if self.weight is not None:
                for part in blocks(width, self.projection.slab):
                    target = self.weight[start + part.start : start + part.stop]
                    matmul_into(target, grad[:, part].t(), hidden, accumulate=rows.start > 0)
            if any(job.needs_hidden):
                if out is None:
                    # One product over the whole vocabulary is rounded once; a sum of several is kept wide.
                    whole = width == self.stream.vocab_size == self.projection.slab
                    out = hidden.new_empty(hidden.shape, dtype=job.operand_dtype if whole else job.logits_dtype)
                for first, last, weight in self.projection.weight_slabs(start, columns.stop):
                    matmul_into(out, grad[:, first - start : last - start], weight, accumulate=first > 0)
        return out

    def _projection_gradient(
        self, rows: slice, columns: slice, buffer: Tensor, lse: Tensor, coefficients: SoftmaxGradient
    ) -> Tensor:
        """d loss / d projection ``[R, C]`` in the operand dtype, over the memory of the projections.

        A half-precision row takes the first half of its own fp32 row, so no second buffer is needed.
        """
        job, width = self.job, columns.stop - columns.start

        def part_of(vector: Tensor | None) -> Tensor | None:
            return None if vector is None else vector[columns]

        return softmax_gradient_into(
            buffer.view(job.operand_dtype)[:, :width],
            buffer[:, :width],
            lse,
            job.tokens.labels[rows],
            coefficients,
            first_column=columns.start,
            vocab_size=self.stream.vocab_size,
            transform=job.transform,
            bias=part_of(self.stream.bias),
            class_weight=part_of(job.class_weight),
            grad_bias=part_of(self.bias),
            scratch=job.plan.scratch,
            backend=job.backend,
        )

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """``(grad_weight, grad_bias)``."""
        weight, bias = self.stream.weight, self.stream.bias
        return (
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


class _HiddenGradients:
    """Gradients of all hidden states, those without loss included (0)."""

    def __init__(self, stream: Stream) -> None:
        self.tokens = stream.job.tokens
        self.results = [
            torch.zeros(part.shape, dtype=part.dtype, device=part.device) if need else None
            for part, need in zip(stream.hidden, stream.job.needs_hidden, strict=True)
        ]
        self.flat = [None if part is None else part.view(-1, part.shape[-1]) for part in self.results]

    def write(self, rows: slice, values: Tensor | None) -> None:
        if values is not None:
            self.tokens.scatter_(self.flat, rows.start, rows.stop, values)
