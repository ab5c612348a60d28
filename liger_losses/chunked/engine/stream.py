"""Streams hidden states through ``lm_head`` in blocks: the only code that sees logits.

N tokens that carry loss, H hidden size, V vocabulary size, R rows and C columns of a block.

What a block holds between its statistics and its gradients is :mod:`liger_losses.chunked.engine.blocks`'s to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine.blocks import ExponentialBlock, LogitBlock, projection_gradient
from liger_losses.chunked.engine.gradients import HeadGradients, HiddenGradients
from liger_losses.chunked.engine.plan import Plan, blocks, padded
from liger_losses.chunked.engine.projection import Projection
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.linear_grad import linear_softmax_gradient_into
from liger_losses.kernels.linear_stats import linear_softmax_statistics
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.softmax_grad import SoftmaxGradient


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
    selected_logps: Any = None
    divergence: Any = None


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
        gathered: whether hidden states are copied before they are multiplied.
        fused: whether products and softmax share a kernel, so that no fp32 logits reach memory.
        exponentials: whether blocks of whole rows hold exponentials in half precision instead of fp32 logits.
        statistics: names that are differentiated.
        metrics: further names.
        strategy: one of :data:`liger_losses.chunked.engine.ops.STRATEGIES`.
        needs_hidden, needs_weight, needs_bias: what needs a gradient.
        token_loss, token_inputs: of a separable loss.
        selected: ``[N, k]`` int64, the columns of ``selected_logps``; blocks hold whole rows of logits then.
        stream: what runs it instead of a :class:`Stream`.
    """

    transform: LogitTransform
    class_weight: Tensor | None
    tokens: Tokens
    plan: Plan
    operand_dtype: torch.dtype
    grad_weight_dtype: torch.dtype
    backend: str
    gathered: bool
    fused: bool
    exponentials: bool
    statistics: tuple[str, ...]
    metrics: tuple[str, ...]
    strategy: str
    needs_hidden: tuple[bool, ...] = ()
    needs_weight: bool = False
    needs_bias: bool = False
    token_loss: Callable[..., Any] | None = None
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    selected: Tensor | None = None
    stream: Callable[..., Stream] | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.statistics) | frozenset(self.metrics) | {"lse"}

    @property
    def logits_dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 inputs: logits are never rounded to half precision."""
        return torch.promote_types(torch.float32, self.operand_dtype)

    def open(self, weight: Tensor, bias: Tensor | None, hidden: Sequence[Tensor]) -> Stream:
        """The stream that runs this job on these tensors."""
        return (self.stream or Stream)(self, weight, bias, hidden)


def _flat(hidden: Tensor) -> Tensor:
    """``[T, H]``, or the tensor as it is where that would copy it: then only what is used is gathered."""
    try:
        return hidden.view(-1, hidden.shape[-1])
    except RuntimeError:
        return hidden


def _of(values: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Views of some tokens' statistics."""
    return {name: value[rows] for name, value in values.items()}


#: What is filled with some tokens, gives their statistics, and then their gradients.
Block = LogitBlock | ExponentialBlock


class Stream:
    """One call's tokens on their way through the head.

    Args:
        job: what to do.
        weight: ``[V, H]``.
        bias: ``[V]`` or ``None``.
        hidden: ``[..., H]`` each.
    """

    def __init__(self, job: Job, weight: Tensor, bias: Tensor | None, hidden: Sequence[Tensor]) -> None:
        self.job, self.weight, self.hidden = job, weight, hidden
        self.bias = None if bias is None else bias.contiguous()
        self.projection = Projection(weight, job.operand_dtype, job.plan.slab)
        self.flat = [_flat(part) for part in hidden]
        self.count, self.vocab_size = job.tokens.count, weight.shape[0]
        #: Rows of the head's gradient, of which those beyond the vocabulary are 0.
        self.head_size = weight.shape[0]

    # --- Whole passes ------------------------------------------------------------------------------------------

    def statistics(self, keep: bool = False) -> tuple[dict[str, Tensor], Block | None]:
        """The statistics ``[N]`` of every kept token, and one block of all of them if it is to be kept."""
        values = self._empty_statistics()
        if not keep and self.job.fused:
            for rows in blocks(self.count, self._gathered_at_once()):
                self._fused_statistics(rows, _of(values, rows))
            return values, None
        size = self.count if keep else self.job.plan.rows
        block = self._block(min(size, self.count))
        for rows in blocks(self.count, size):
            block.fill(rows, self._hidden_rows(rows), _of(values, rows))
        return values, block if keep else None

    def gradients(
        self, values: Mapping[str, Tensor], upstream: Mapping[str, Tensor], kept: Block | None
    ) -> tuple[Tensor | None, ...]:
        """``(grad_weight, grad_bias, *grad_hidden)``, from the block of all tokens if it was kept, else computed again.

        ``upstream`` is d loss / d statistic, ``[N]`` each.
        Selected columns may be anywhere in the vocabulary: their gradients need blocks of whole rows.
        """
        head_grads, hidden_grads = HeadGradients(self), HiddenGradients(self)
        if kept is None and self.job.selected is None:
            self._gradients_by_tiles(values, upstream, head_grads, hidden_grads)
            return *head_grads.results(), *hidden_grads.results
        size, again = self.count, None
        if kept is None:
            size = self.job.plan.rows
            kept = again = LogitBlock(self, min(size, self.count))
        for rows in blocks(self.count, size):
            hidden = self._hidden_rows(rows)
            if again is not None:
                again.project(hidden)
            place, wanted = hidden_grads.place(rows), _of(upstream, rows)
            hidden_grads.write(rows, kept.gradients(rows, hidden, _of(values, rows), wanted, head_grads, place))
        return *head_grads.results(), *hidden_grads.results

    def _gradients_by_tiles(
        self,
        values: Mapping[str, Tensor],
        upstream: Mapping[str, Tensor],
        head_grads: HeadGradients,
        hidden_grads: HiddenGradients,
    ) -> None:
        """Recomputed tiles walk the vocabulary, so that grad_weight is written once per ``tile_rows`` tokens."""
        plan, tiles = self.job.plan, self._tiles()
        coefficients = SoftmaxGradient.of(upstream, values, self.job.class_weight)
        for rows in blocks(self.count, plan.tile_rows):
            hidden, found = self._hidden_rows(rows), _of(values, rows)
            out, wanted = None, coefficients.rows(rows.start, rows.stop)
            for columns in blocks(self.vocab_size, plan.tile_columns):
                grad = self._tile_gradient(tiles, rows, columns, hidden, found, wanted, head_grads.bias)
                out = head_grads.add(grad, hidden, columns, first=rows.start == 0, out=out)
            hidden_grads.write(rows, out)

    def statistics_and_unit_gradient(self) -> tuple[dict[str, Tensor], Tensor]:
        """Statistics, and the gradient ``[N, H]`` of the only one with respect to each token's hidden state."""
        (statistic,) = self.job.statistics
        values, head_grads = self._empty_statistics(), HeadGradients(self)
        dtype = self.hidden[0].dtype
        for part in self.hidden:
            dtype = torch.promote_types(dtype, part.dtype)
        unit_gradient = self.weight.new_empty(self.count, self.weight.shape[1], dtype=dtype)
        block = self._block(min(self.job.plan.rows, self.count))
        for rows in blocks(self.count, self.job.plan.rows):
            hidden = self._hidden_rows(rows)
            found = _of(values, rows)
            place = unit_gradient[rows]
            try:
                block.fill(rows, hidden, found)
                ones = {statistic: torch.ones_like(found["lse"])}
                gradient = block.gradients(rows, hidden, found, ones, head_grads, place)
            except BaseException:
                block.wait()
                raise
            if gradient is not None and gradient is not place:
                place.copy_(gradient)
        return values, unit_gradient

    def scaled(self, unit_gradient: Tensor, upstream: Mapping[str, Tensor]) -> list[Tensor | None]:
        """Gradients of the hidden states: each token's own, times what the loss makes of its statistic."""
        hidden_grads = HiddenGradients(self)
        for g in upstream.values():
            for rows in blocks(self.count, self.job.plan.rows):
                hidden_grads.write(rows, unit_gradient[rows] * g[rows, None])
        return hidden_grads.results

    def token_loss(self) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
        """A separable loss (0-dim), the statistics, and ``(grad_weight, grad_bias, grad_hidden)`` of it."""
        values = self._empty_statistics()
        losses = torch.empty(self.count, dtype=self.job.logits_dtype, device=self.weight.device)
        block, grads = self._block(min(self.job.plan.rows, self.count)), None
        for rows in blocks(self.count, self.job.plan.rows):
            hidden, found = self._hidden_rows(rows), _of(values, rows)
            try:
                block.fill(rows, hidden, found)
                losses[rows], upstream = self._token_losses(rows, found)
                # Allocated once the first block is queued, for which the device need not wait then.
                grads = grads or (HeadGradients(self), HiddenGradients(self))
                place = grads[1].place(rows)
                grads[1].write(rows, block.gradients(rows, hidden, found, upstream, grads[0], place))
            except BaseException:
                block.wait()  # its memory is about to be given back
                raise
        head_grads, hidden_grads = grads or (HeadGradients(self), HiddenGradients(self))
        return losses.sum(), values, (*head_grads.results(), *hidden_grads.results)

    # --- Their steps -----------------------------------------------------------------------------------------------

    def _block(self, rows: int) -> Block:
        return ExponentialBlock(self, rows) if self.job.exponentials else LogitBlock(self, rows)

    def _tiles(self) -> Tensor:
        """Memory of the gradient pass's tiles: half-precision gradients, or the fp32 projections they overwrite."""
        plan = self.job.plan
        dtype = self.job.operand_dtype if self.job.fused else self.job.logits_dtype
        rows, columns = min(plan.tile_rows, self.count), padded(min(plan.tile_columns, self.vocab_size))
        return torch.empty(rows, columns, dtype=dtype, device=self.weight.device)

    def _tile_gradient(
        self,
        tiles: Tensor,
        rows: slice,
        columns: slice,
        hidden: Tensor,
        values: Mapping[str, Tensor],
        coefficients: SoftmaxGradient,
        grad_bias: Tensor | None,
    ) -> Tensor:
        """d loss / d projection ``[R, C]`` in the operand dtype, computed again."""
        job, width = self.job, columns.stop - columns.start
        if not job.fused:
            self.projection.into(tiles[: len(hidden), :width], hidden, columns.start, columns.stop)
            return projection_gradient(self, tiles, rows, columns, values, coefficients, grad_bias)
        return linear_softmax_gradient_into(
            tiles[: len(hidden), :width],
            hidden,
            self.weight[columns],
            values["lse"],
            job.tokens.labels[rows],
            coefficients,
            Epilogue(job.transform, self.bias, job.class_weight).columns(columns),
            first_column=columns.start,
            vocab_size=self.vocab_size,
            backend=job.backend,
        )

    def _fused_statistics(self, rows: slice, values: Mapping[str, Tensor]) -> None:
        """Statistics whose logits never reach memory, into ``values``."""
        job, hidden, labels = self.job, self._hidden_rows(rows), self.job.tokens.labels[rows]
        epilogue = Epilogue(job.transform, self.bias, job.class_weight)
        if job.names <= {"logp", "lse"}:
            found = Exponentials.into(values)
            linear_exponentials(hidden, self.weight, labels, None, epilogue, found=found, backend=job.backend)
            return
        statistics = linear_softmax_statistics(hidden, self.weight, labels, job.names, epilogue, backend=job.backend)
        for name, value in values.items():
            value.copy_(statistics[name])

    def _empty_statistics(self) -> dict[str, Tensor]:
        def empty(name: str) -> Tensor:
            dtype = torch.int64 if name == "argmax" else self.job.logits_dtype
            shape = (self.count,) if name != "selected_logps" or self.job.selected is None else self.job.selected.shape
            return torch.empty(shape, dtype=dtype, device=self.weight.device)

        return {name: empty(name) for name in self.job.names}

    def _hidden_rows(self, rows: slice) -> Tensor:
        return self.job.tokens.gather(self.flat, rows.start, rows.stop).to(self.job.operand_dtype)

    def _gathered_at_once(self) -> int:
        """Tokens whose hidden states are gathered at once: all where that copies nothing, else even parts that fit."""
        if not self.job.gathered:
            return self.count
        parts = -(-self.count // self.job.plan.tile_rows)
        return -(-self.count // max(parts, 1))

    def _token_losses(self, rows: slice, found: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The tokens' losses, and their derivatives by each statistic: from autograd unless they come along."""
        job = self.job
        assert job.token_loss is not None
        with torch.enable_grad():
            leaves = {name: found[name].detach().requires_grad_() for name in job.statistics}
            named = {**leaves, **{name: found[name] for name in job.metrics}}
            inputs = {name: value[rows] for name, value in job.token_inputs.items()}
            result = job.token_loss(Statistics(**named), job.tokens.labels[rows], **inputs)
            losses, given = result if isinstance(result, tuple) else (result, None)
            if losses.shape != (rows.stop - rows.start,):
                count = rows.stop - rows.start
                raise ValueError(f"token_loss must return one value per token, [{count}], got {tuple(losses.shape)}.")
            losses = job.tokens.masked(losses, rows)
            if given is not None:
                return losses.detach(), {name: job.tokens.masked(g.detach(), rows) for name, g in given.items()}
            if not losses.requires_grad:
                return losses, {}
            upstream = torch.autograd.grad(losses.sum(), tuple(leaves.values()), allow_unused=True)
        # Masked again: where a loss is not finite, not even 0 times its derivative is.
        found_upstream = zip(leaves, upstream, strict=True)
        return losses.detach(), {name: job.tokens.masked(g, rows) for name, g in found_upstream if g is not None}
