"""Divergences between a student and a teacher, token by token, without the logits of either in memory.

N tokens that carry loss, H and Ht the hidden sizes, V the columns that both vocabularies have, R rows of a part.

A loss that is a sum of divergences with known weights runs in one pass: 6 N H V for the student, 2 N Ht V for the
teacher. Some hundred tokens' logits of both are there at once, in fp32, and become gradients in half precision; those
of some thousand are gathered before the products with head and hidden states are taken, so that the products are large
and grad_weight is rounded few times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine.checks import check_names, check_tensor
from liger_losses.chunked.engine.gradients import HeadGradients, HiddenGradients
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.ops import EngineOptions, _kept, _prepare, _run, _TokenLoss
from liger_losses.chunked.engine.plan import MiB, _even, blocks, padded
from liger_losses.chunked.engine.projection import Projection, can_fuse
from liger_losses.chunked.engine.stream import Job, Statistics, Stream
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits
from liger_losses.kernels.divergence import TEMPORARIES, Coefficients, Logits, divergence_into
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.softmax_stats import softmax_statistics

#: By default: tokens whose gradients are gathered, and what they and the logits may take.
_DEFAULT_ROWS = 2048
_DEFAULT_WORKSPACE = 1228 * MiB
#: Of these tokens, so many parts have logits one after the other.
_PARTS = 4
#: Tokens of a kernel's tile.
_TILE = 128


def linear_divergence(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor,
    teacher: Teacher | TeacherLogits,
    divergence: Divergence,
    *,
    logp: bool = False,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> Any:
    """Each token's divergence between student and teacher, an ordinary differentiable operation.

    Backward computes the logits again; where the loss is a sum with weights that are known, use
    :func:`linear_divergence_loss`.

    Args:
        hidden_states: ``[..., H]``, the student's.
        weight: ``[Vs, H]``, the student's ``lm_head``.
        labels: ``[...]`` int64; only which are ``ignore_index`` matters, unless ``logp`` is asked for.
        teacher: see :class:`liger_losses.Teacher`.
        divergence: see :class:`liger_losses.Divergence`.
        logp: also return the student's log-probabilities of the labels, at temperature 1, differentiable.
        temperature: what both models' logits are divided by in the divergence.
        bias: ``[Vs]``.
        transform: scale and soft-cap of the student's logits.
        options: how to stream.

    Returns:
        :class:`Statistics` with ``divergence`` (and ``logp``) in the labels' shape; fp32, or fp64 for fp64 inputs.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit together.
    """
    head = Head.of(weight, bias, transform)
    weight, bias, transform = head.weight, head.bias, head.transform
    names = ("divergence", "logp") if logp else ("divergence",)
    job, hidden = _divergence_job(
        hidden_states, weight, labels, teacher, divergence, names, temperature, bias, transform, options, False
    )
    values = {name: job.tokens.split(value)[0] for name, value in _run(job, weight, bias, hidden).items()}
    return Statistics(**values)


def linear_divergence_loss(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor,
    teacher: Teacher | TeacherLogits,
    divergence: Divergence,
    weights: Mapping[str, Tensor],
    *,
    metrics: tuple[str, ...] = (),
    temperature: float = 1.0,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    options: EngineOptions = EngineOptions(),
) -> tuple[Tensor, Statistics]:
    """``sum_t (weights["divergence"]_t divergence_t + weights["logp"]_t logp_t)`` in one pass.

    Args:
        weights: ``[...]`` in the labels' shape, of ``divergence`` and, if it is there, of ``logp``; constants.
        metrics: ``("entropy",)`` to be given the student's, at the temperature, as well.
        hidden_states, weight, labels, teacher, divergence, temperature, bias, transform, options: as in
            :func:`linear_divergence`.

    Returns:
        The loss (0-dim), differentiable once, and the detached :class:`Statistics`.

    Raises:
        TypeError, ValueError: as :func:`linear_divergence`; weights that are not one per token.
    """
    head = Head.of(weight, bias, transform)
    weight, bias, transform = head.weight, head.bias, head.transform
    check_tensor("labels", labels)
    check_names(metrics, ("entropy",), "metric")
    for name, value in weights.items():
        check_tensor(f"the weight of {name}", value)
        if value.shape != labels.shape:
            raise ValueError(
                f"the weight of {name} has shape {tuple(value.shape)}, but there is one for each label: "
                f"{tuple(labels.shape)}."
            )
    job, hidden = _divergence_job(
        hidden_states, weight, labels, teacher, divergence, tuple(weights), temperature, bias, transform, options, True
    )
    job = replace(job, metrics=metrics)
    known = {name: job.tokens.masked(_kept(job, value)).to(job.logits_dtype) for name, value in weights.items()}
    if job.strategy == "one_pass":
        job = replace(job, token_inputs=known)
        loss, *outputs = _TokenLoss.apply(job, weight, bias, *hidden)
        named = zip(job.statistics + job.metrics, outputs, strict=True)
        return loss, Statistics(**{name: job.tokens.split(value)[0] for name, value in named})
    values = _run(job, weight, bias, hidden)
    kept = {name: job.tokens.gather([value], 0, job.tokens.count) for name, value in values.items()}
    loss = sum((known[name] * kept[name] for name in known), known["divergence"].new_zeros(())).sum()
    return loss, Statistics(**{name: job.tokens.split(value.detach())[0] for name, value in values.items()})


@dataclass(frozen=True)
class _Comparison:
    """What a job compares with, and the sizes of its parts.

    Args:
        rows: tokens whose gradients are gathered.
        part: tokens whose logits are there at once.
        positions: ``[N]``, where the kept tokens stand in the flattened labels, or ``None`` for all of them.
    """

    teacher: Teacher | TeacherLogits
    divergence: Divergence
    temperature: float
    rows: int
    part: int
    positions: Tensor | None


def _divergence_job(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: Teacher | TeacherLogits,
    divergence: Divergence,
    names: tuple[str, ...],
    temperature: float,
    bias: Tensor | None,
    transform: LogitTransform,
    options: EngineOptions,
    separable: bool,
) -> tuple[Job, tuple[Tensor, ...]]:
    """Check the inputs, select the tokens, and choose how to run."""
    check_tensor("labels", labels)
    check_tensor("weight", weight)
    if not isinstance(teacher, (Teacher, TeacherLogits)):
        raise TypeError(f"teacher must be a Teacher or TeacherLogits, got {type(teacher).__name__}.")
    if not isinstance(divergence, Divergence):
        raise TypeError(f"divergence must be a liger_losses.Divergence, got {type(divergence).__name__}.")
    if transform.temperature != 1.0:
        raise ValueError(
            f"the transform's temperature must be 1, got {transform.temperature}; give temperature= instead, which "
            "divides both models' logits."
        )
    teacher.check(labels, weight)
    vocab_size = min(weight.shape[0], teacher.vocab_size)
    fits = bias is not None and bias.shape == weight.shape[:1]  # else the error that follows names its shape
    common_bias = bias[:vocab_size] if bias is not None and fits else bias
    job, hidden = _prepare(
        hidden_states,
        weight[:vocab_size],
        labels,
        ("logp",),
        (),
        common_bias,
        None,
        transform,
        replace(options, strategy=None),
        separable=separable,
        whole_rows=True,
    )
    rows, part = _sizes(job, weight, teacher, options)
    (index,) = job.tokens.indices
    comparison = _Comparison(teacher, divergence, temperature, rows, part, index)
    strategy = job.strategy
    if strategy != "statistics":
        # fp16 gradients underflow without the loss scale, which is only known in backward.
        strategy = "one_pass" if separable and job.operand_dtype != torch.float16 else "two_pass"
        if options.strategy == "two_pass":
            strategy = "two_pass"
    return replace(
        job,
        statistics=names,
        strategy=strategy,
        stream=partial(_DivergenceStream, comparison),
    ), hidden


def _sizes(job: Job, weight: Tensor, teacher: Teacher | TeacherLogits, options: EngineOptions) -> tuple[int, int]:
    """``(rows, part)``: tokens whose gradients are gathered, and tokens whose logits are there at once."""
    item, operand = job.logits_dtype.itemsize, job.operand_dtype.itemsize
    vocab_size, hidden_size = min(weight.shape[0], teacher.vocab_size), weight.shape[1]
    columns, fused = padded(vocab_size), can_fuse(weight, job.operand_dtype, job.backend)
    # Hidden states (gathered or cast), their gradient, and that once more where it is added up wide or cast.
    row_bytes = columns * operand + hidden_size * (3 * operand if fused else 8 + operand + 2 * item)
    teacher_bytes = teacher.weight.shape[1] * (operand + item) if isinstance(teacher, Teacher) else columns * item
    part_bytes = 2 * columns * item + teacher_bytes + 4096  # what every lane of the kernels leaves
    fixed = _scratch(job, columns)
    if job.plan.slab < vocab_size or job.operand_dtype != weight.dtype:
        fixed += 2 * job.plan.slab * hidden_size * (operand + item)
    if options.workspace is not None:
        fixed += job.tokens.count * 16 * item  # labels, positions, statistics and their weights
    least = row_bytes + part_bytes + fixed
    if options.workspace is not None and options.workspace < least:
        raise ValueError(
            f"workspace={options.workspace} bytes is too small for {job.tokens.count} tokens of a student and a "
            f"teacher over a vocabulary of {vocab_size}: give at least {least} bytes, or leave it out."
        )
    largest = min(_DEFAULT_ROWS * row_bytes + _DEFAULT_ROWS // _PARTS * part_bytes + fixed, _DEFAULT_WORKSPACE)
    budget = max(options.workspace or largest, least) - fixed
    part = _whole_tiles(budget // (_PARTS * row_bytes + part_bytes))
    if part < _TILE <= budget // (2 * part_bytes):
        part = _TILE  # lower ones would load the heads more often than they are multiplied with
    rows = _whole_tiles(max(1, min((budget - part * part_bytes) // row_bytes, max(job.tokens.count, 1))))
    if options.chunk_size is not None:
        rows = min(rows, options.chunk_size)
    rows = _even(job.tokens.count, rows)
    return rows, _even(rows, max(1, min(part, rows)))


def _whole_tiles(rows: int) -> int:
    """So many rows, or a little fewer: what the kernels take at once."""
    return rows if rows < _TILE else rows // _TILE * _TILE


def _scratch(job: Job, columns: int) -> int:
    """Bytes for temporaries, of one row at least, where they are tensors."""
    one_row = TEMPORARIES * columns * job.logits_dtype.itemsize
    return max(job.plan.scratch, one_row) if job.backend == "torch" else 0


class _DivergenceStream(Stream):
    """A stream through two heads."""

    def __init__(
        self, comparison: _Comparison, job: Job, weight: Tensor, bias: Tensor | None, hidden: Sequence[Tensor]
    ) -> None:
        vocab_size = min(weight.shape[0], comparison.teacher.vocab_size)
        super().__init__(job, weight[:vocab_size], None if bias is None else bias[:vocab_size], hidden)
        self.head_size = weight.shape[0]
        self.comparison = comparison
        self.soft = replace(job.transform, temperature=comparison.temperature)
        teacher = comparison.teacher
        self.teacher_transform = teacher.transform(self.soft.temperature)
        self.teacher_bias = None if teacher.bias is None else teacher.bias[:vocab_size].detach().contiguous()
        if isinstance(teacher, Teacher):
            states = teacher.hidden_states.detach()
            self.teacher_flat = states.reshape(-1, states.shape[-1]) if states.is_contiguous() else states
            self.teacher_projection = Projection(teacher.weight.detach()[:vocab_size], job.operand_dtype, job.plan.slab)
            self.teacher_fused = can_fuse(teacher.weight, job.operand_dtype, job.backend)
        self.student_fused = can_fuse(weight, job.operand_dtype, job.backend)

    def statistics(self, keep: bool = False) -> tuple[dict[str, Tensor], None]:
        """The statistics ``[N]`` of every kept token."""
        return self._run(None)[0], None

    def gradients(
        self, values: Mapping[str, Tensor], upstream: Mapping[str, Tensor], kept: Any
    ) -> tuple[Tensor | None, ...]:
        """``(grad_weight, grad_bias, grad_hidden)``, from logits that are computed again."""
        return self._run(upstream)[1]

    def token_loss(self) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
        """The weighted sum of the statistics (0-dim), these, and ``(grad_weight, grad_bias, grad_hidden)`` of it."""
        weights = self.job.token_inputs
        values, gradients = self._run(weights)
        loss = torch.zeros((), dtype=self.job.logits_dtype, device=self.weight.device)
        for name, weight in weights.items():
            loss += (weight * values[name]).sum()
        return loss, values, gradients

    def _run(self, upstream: Mapping[str, Tensor] | None) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...]]:
        """All tokens' statistics; with d loss / d statistic, ``[N]`` each, also the gradients."""
        job, comparison, device = self.job, self.comparison, self.weight.device
        values = self._empty_statistics()
        rows, part = min(comparison.rows, self.count), min(comparison.part, self.count)
        width = padded(self.vocab_size)
        logits = [torch.empty(part, width, dtype=job.logits_dtype, device=device) for _ in range(2)]
        gradients = None
        head_grads = hidden_grads = None
        if upstream is not None:
            head_grads, hidden_grads = HeadGradients(self), HiddenGradients(self)
            gradients = torch.empty(rows, width, dtype=job.operand_dtype, device=device)
        whole = slice(0, self.vocab_size)
        for taken in blocks(self.count, comparison.rows):
            hidden = self._hidden_rows(taken)
            for piece in blocks(len(hidden), comparison.part):
                at = slice(taken.start + piece.start, taken.start + piece.stop)
                out = None if gradients is None else gradients[piece, whole]
                given = None if upstream is None else {name: g[at] for name, g in upstream.items()}
                grad_bias = None if head_grads is None else head_grads.bias
                self._part(at, hidden[piece], logits, values, out, given, grad_bias)
            if head_grads is not None and hidden_grads is not None and gradients is not None:
                grad = gradients[: len(hidden), whole]
                hidden_grads.write(taken, head_grads.add(grad, hidden, whole, first=taken.start == 0))
        if head_grads is None or hidden_grads is None:
            return values, ()
        return values, (*head_grads.results(), *hidden_grads.results)

    def _part(
        self,
        at: slice,
        hidden: Tensor,
        logits: Sequence[Tensor],
        values: Mapping[str, Tensor],
        out: Tensor | None,
        upstream: Mapping[str, Tensor] | None,
        grad_bias: Tensor | None,
    ) -> None:
        """Statistics of some tokens into ``values``, and (with ``upstream``) their gradient ``[R, V]`` into ``out``."""
        job, comparison = self.job, self.comparison
        labels = job.tokens.labels[at]
        student, teacher = (block[: len(hidden), : self.vocab_size] for block in logits)
        found = {name: value[at] for name, value in values.items()}
        hard_lse, wants_logp = found["lse"], "logp" in found
        apart = wants_logp and comparison.temperature != 1.0
        lse = torch.empty_like(hard_lse) if apart else hard_lse
        soft_logp = {"logp": found["logp"]} if wants_logp and not apart else {}
        self._logits_into(
            student,
            {"lse": lse, **soft_logp},
            self.projection,
            self.student_fused,
            hidden,
            labels,
            self.soft,
            self.bias,
        )
        if apart:
            hard = {"lse": hard_lse, "logp": found["logp"]}
            self._statistics_into(hard, student, labels, job.transform, self.bias)
        if "entropy" in found:
            self._statistics_into({"entropy": found["entropy"]}, student, labels, self.soft, self.bias)
        teacher_lse = torch.empty_like(lse)
        self._teacher_into(teacher, teacher_lse, at, labels)
        coefficients = None
        if upstream is not None:
            g = upstream.get("logp")
            soft_g = upstream.get("divergence")
            soft_g = torch.zeros_like(lse) if soft_g is None else soft_g
            coefficients = Coefficients(soft_g) if g is None else Coefficients(soft_g, -g, g, hard_lse)
        # The bias's gradient is a sum over all tokens: it is taken before anything is rounded.
        target = student if grad_bias is not None else out
        divergence_into(
            found["divergence"] if "divergence" in found else torch.empty_like(lse),
            Logits(student, lse, Epilogue(self.soft, self.bias)),
            Logits(teacher, teacher_lse, Epilogue(self.teacher_transform, self.teacher_bias)),
            comparison.divergence,
            out=None if out is None else target,
            coefficients=coefficients,
            labels=labels,
            scratch=_scratch(job, self.vocab_size),
            backend=job.backend,
        )
        if grad_bias is not None and out is not None:
            grad_bias += student.sum(0)
            out.copy_(student)

    def _teacher_into(self, out: Tensor, lse: Tensor, at: slice, labels: Tensor) -> None:
        """The teacher's projections ``[R, V]`` into ``out``, and their log-sum-exp."""
        job, teacher, found = self.job, self.comparison.teacher, {"lse": lse}
        transform, bias = self.teacher_transform, self.teacher_bias
        if isinstance(teacher, TeacherLogits):
            positions = self.comparison.positions
            if positions is None:
                chosen = torch.arange(at.start, at.stop, device=out.device)
            else:
                chosen = positions[at]
            out.copy_(teacher.rows(chosen)[:, : self.vocab_size])
            self._statistics_into(found, out, labels, transform, bias)
            return
        hidden = job.tokens.gather([self.teacher_flat], at.start, at.stop).to(job.operand_dtype)
        self._logits_into(out, found, self.teacher_projection, self.teacher_fused, hidden, labels, transform, bias)

    def _logits_into(
        self,
        out: Tensor,
        found: Mapping[str, Tensor],
        projection: Projection,
        fused: bool,
        hidden: Tensor,
        labels: Tensor,
        transform: LogitTransform,
        bias: Tensor | None,
    ) -> None:
        """Either model's projections ``[R, V]`` into ``out``, and the statistics of its logits into ``found``."""
        if not fused:
            projection.into(out, hidden, 0, self.vocab_size)
            self._statistics_into(found, out, labels, transform, bias)
            return
        linear_exponentials(
            hidden,
            projection.weight,
            labels,
            out,
            Epilogue(transform, bias),
            found=Exponentials.into(found),
            projections=True,
            backend=self.job.backend,
        )

    def _statistics_into(
        self,
        found: Mapping[str, Tensor],
        projected: Tensor,
        labels: Tensor,
        transform: LogitTransform,
        bias: Tensor | None,
    ) -> None:
        """Log-sum-exp (and log-probabilities) of a block that is there."""
        statistics = softmax_statistics(
            projected,
            labels,
            frozenset(found),
            Epilogue(transform, bias),
            scratch=self.job.plan.scratch,
            backend=self.job.backend,
        )
        for name, value in found.items():
            value.copy_(statistics[name])
