"""A block of two models: the student's gradient from the divergence between both models' logits.

N active tokens, R tokens of a block, H and Ht the hidden sizes, V the columns that both vocabularies have, W those of
the student that are computed: all of them where its log-probabilities are asked for, else V.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.blocks import Block, Part, Upstream
from liger_losses.chunked.engine.call import Call, OpenCall
from liger_losses.chunked.engine.gradients import HeadGradients
from liger_losses.chunked.engine.head import can_fuse
from liger_losses.chunked.engine.plan import blocks, padded
from liger_losses.chunked.engine.teachers import TeacherLogits
from liger_losses.chunked.engine.weights import Projection
from liger_losses.kernels.divergence import Coefficients, Logits, RowSums, divergence_into, square_sums
from liger_losses.kernels.hopper_pipeline import ROWS
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.linear_lse import log_sum_exps_into, row_log_sum_exps_into
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics

#: Where log-sum-exps alone take other ways than :func:`linear_exponentials`.
_DEVICES_OF_LSE = ("cuda",)
#: Log-sum-exps of so few tokens, if half of the kernels' last tiles of rows would be empty: cuBLAS multiplies, and a
#: kernel reads its product. (On an H200, 192 tokens, V 151936, H 2048 and 4096: 216 and 392 us; tiles: 367 and 689.)
_FEW_ROWS = 2 * ROWS + ROWS // 2


@dataclass(frozen=True)
class _Model:
    """The student or the teacher: its projection, and whether a Triton kernel computes it."""

    projection: Projection
    fused: bool


class TwoModels(Block):
    """A block that knows both models: the columns that they share, and how their logits are computed."""

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        call, comparison = opened.call, opened.call.query.comparison
        assert comparison is not None
        self.comparison = comparison
        #: V, of which ``shared`` are computed here; and labels inside it, for statistics that do not depend on them.
        shared = min(call.vocab_size, comparison.teacher.vocab_size)
        columns = slice(0, shared) if call.shard is None else call.shard.columns(shared)
        self.shared = columns.stop - columns.start
        self.shared_labels = opened.labels
        if opened.weight_rows > self.shared:
            self.shared_labels = self.shared_labels.clamp(max=self.shared - 1)
        soft = replace(call.transform, temperature=comparison.temperature)
        self.soft_epilogue = Epilogue(soft, opened.bias).columns(slice(0, self.shared))
        #: The hard loss is of the student's whole vocabulary at temperature 1, the divergence of the shared columns.
        self.separate = has_two_softmaxes(call)
        self.student = _Model(opened.projection, call.work.fused_products)
        #: The teacher, if its logits are computed here.
        self.teacher: _Model | None = None
        self.teacher_epilogue = Epilogue(LogitTransform(comparison.temperature))
        if isinstance(comparison.teacher, TeacherLogits):
            return
        head = comparison.teacher.head.detach()
        head = head.columns(columns if head.shard is None else slice(0, self.shared))
        bias = None if head.bias is None else head.bias.contiguous()
        self.teacher_epilogue = Epilogue(replace(head.transform, temperature=comparison.temperature), bias)
        weights = head.weights.dequantized(call.work.operand_dtype) if call.work.dequantized_bytes else head.weights
        projection = Projection(weights, call.work.operand_dtype, call.plan.weight_chunk)
        self.teacher = _Model(
            projection, can_fuse(head, call.work.operand_dtype, call.backend, weights is not head.weights)
        )
        states = comparison.teacher.local_hidden_states.detach()
        self.teacher_states = states.reshape(-1, states.shape[-1]) if states.is_contiguous() else states

    def soft_epilogues(self, rows: slice) -> tuple[Epilogue, Epilogue]:
        """The student's and the teacher's at the divergence's temperature, of some active tokens."""
        if not isinstance(self.comparison.temperature, Tensor):
            return self.soft_epilogue, self.teacher_epilogue
        return self.soft_epilogue.rows(rows), self.teacher_epilogue.rows(rows)

    def teacher_hidden(self, rows: slice) -> Tensor:
        """The teacher's hidden states ``[R, Ht]`` of some active tokens, in the operand dtype."""
        tokens = self.call.tokens
        return tokens.gather([self.teacher_states], rows.start, rows.stop).to(self.call.work.operand_dtype)

    @staticmethod
    def parts_of(part: Part, size: int) -> Iterator[tuple[slice, Part]]:
        """``size`` or fewer tokens of the part at a time, and where in the part they are."""
        for at in blocks(len(part.hidden), size):
            rows = slice(part.rows.start + at.start, part.rows.start + at.stop)
            yield at, Part(rows, part.hidden[at], {n: value[at] for n, value in part.values.items()}, part.epilogue)

    def logits_of(self, part: Part, student_logits: Tensor, teacher_logits: Tensor) -> tuple[Logits, Logits]:
        """Both models' logits in the shared columns, of some tokens; and the student's statistics.

        Args:
            part: the tokens. ``soft_lse`` and ``teacher_lse`` are written too if they are among its values.
            student_logits: ``[R, W]`` fp32, for the student's projections.
            teacher_logits: ``[R, V]`` fp32, for the teacher's.
        """
        call, (rows, hidden, values, own_epilogue) = self.call, part
        soft_epilogue, teacher_epilogue = self.soft_epilogues(rows)
        labels, shared_labels = self.opened.labels[rows], self.shared_labels[rows]
        shared_logits, lse = student_logits[:, : self.shared], values["lse"]
        found = {name: value for name, value in values.items() if name in ("lse", "logp")}
        first_epilogue = own_epilogue if self.separate else soft_epilogue
        first_labels = labels if "logp" in found else shared_labels
        self._compute_logits(student_logits, found, self.student, hidden, first_labels, first_epilogue)
        if self.separate:
            lse = values["soft_lse"] if "soft_lse" in values else torch.empty_like(lse)
            self._compute_statistics({"lse": lse}, shared_logits, shared_labels, soft_epilogue)
        if "entropy" in values:
            self._compute_statistics({"entropy": values["entropy"]}, shared_logits, shared_labels, soft_epilogue)
        teacher_lse = values["teacher_lse"] if "teacher_lse" in values else torch.empty_like(lse)
        self._compute_teacher_logits(teacher_logits, teacher_lse, rows, shared_labels, teacher_epilogue)
        if call.shard is not None and self.opened.owned is not None:
            soft = {"lse": lse} | {name: value for name, value in values.items() if name == "entropy"}
            of_student = [soft, found] if self.separate else [soft | found]
            self.opened.merge_(rows, *of_student, {"lse": teacher_lse})
        return Logits(shared_logits, lse, soft_epilogue), Logits(teacher_logits, teacher_lse, teacher_epilogue)

    def _compute_teacher_logits(
        self, out: Tensor, lse: Tensor, rows: slice, labels: Tensor, epilogue: Epilogue
    ) -> None:
        """The teacher's projections ``[R, V]`` into ``out``, and their log-sum-exp."""
        tokens, teacher = self.call.tokens, self.comparison.teacher
        if self.teacher is not None:
            self._compute_logits(out, {"lse": lse}, self.teacher, self.teacher_hidden(rows), labels, epilogue)
            return
        assert isinstance(teacher, TeacherLogits)
        (index,) = tokens.indices
        positions = torch.arange(rows.start, rows.stop, device=out.device) if index is None else index[rows]
        out.copy_(teacher.rows(positions)[:, self.opened.first_column :][:, : self.shared])
        self._compute_statistics({"lse": lse}, out, labels, epilogue)

    def _compute_logits(
        self,
        out: Tensor,
        statistics: Mapping[str, Tensor],
        model: _Model,
        hidden: Tensor,
        labels: Tensor,
        epilogue: Epilogue,
    ) -> None:
        """A model's projections into ``out``, and the statistics of its logits."""
        alone = statistics.keys() == {"lse"} and hidden.device.type in _DEVICES_OF_LSE
        few = len(hidden) <= _FEW_ROWS and 0 < len(hidden) % ROWS <= ROWS // 2
        if not model.fused or (alone and few):
            model.projection.into(out, hidden, 0, out.shape[1])
            self._compute_statistics(statistics, out, labels, epilogue)
            return
        weight, backend = model.projection.weights.rows(slice(None), hidden.dtype), self.call.backend
        if alone and log_sum_exps_into(statistics["lse"], hidden, weight, out, epilogue, backend=backend):
            return
        linear_exponentials(
            hidden,
            weight,
            labels,
            out,
            epilogue,
            found=Exponentials.into(statistics),
            projections=True,
            backend=backend,
        )

    def _compute_statistics(
        self, statistics: Mapping[str, Tensor], projected: Tensor, labels: Tensor, epilogue: Epilogue
    ) -> None:
        """Statistics of projections that exist, written into the tensors given."""
        plan, backend = self.call.plan, self.call.backend
        names = frozenset(statistics)
        if names == {"lse"} and backend == "triton":
            row_log_sum_exps_into(statistics["lse"], projected, epilogue, backend=backend)
            return
        computed = softmax_statistics(projected, labels, names, epilogue, scratch=plan.scratch, backend=backend)
        for name, value in statistics.items():
            value.copy_(computed[name])


def has_two_softmaxes(call: Call) -> bool:
    """Whether the hard loss and the divergence are of different softmaxes of the student."""
    comparison = call.query.comparison
    assert comparison is not None
    wider = call.vocab_size > comparison.teacher.vocab_size
    other = isinstance(comparison.temperature, Tensor) or comparison.temperature != 1.0
    return "logp" in call.outputs and (other or wider)


class DivergenceBlock(TwoModels):
    """Half-precision gradients ``[R, W]``, from fp32 logits of student and teacher.

    The logits of ``plan.part_rows`` tokens exist at a time; the gradients of all R tokens are collected before the
    products with head and hidden states are taken, so that these are large and grad_weight is rounded few times.
    """

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        shape = min(self.call.plan.part_rows, rows), padded(self.vocab_size)
        self.logits = [torch.empty(shape, dtype=self.call.work.logits_dtype, device=opened.device) for _ in range(2)]
        self.gradient: Tensor | None = None
        self.grad_bias: Tensor | None = None

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        if upstream is not None and self.gradient is None:
            self.gradient = part.hidden.new_empty(self.rows, padded(self.vocab_size))
            if self.call.needs_bias:
                self.grad_bias = part.hidden.new_empty(self.vocab_size, dtype=self.call.work.logits_dtype)
        if self.grad_bias is not None:
            self.grad_bias.zero_()
        for at, smaller in self.parts_of(part, self.call.plan.part_rows):
            if upstream is None or self.gradient is None:
                self._fill_part(smaller)
            else:
                out = self.gradient[at, : self.vocab_size]
                self._fill_part(smaller, {name: g[at] for name, g in upstream.items()}, out)

    def refill(self, part: Part, upstream: Upstream) -> None:
        # Backward must not write to the statistics that forward saved.
        self.fill(
            part._replace(values={name: torch.empty_like(value) for name, value in part.values.items()}), upstream
        )

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        assert self.gradient is not None
        columns = slice(0, self.vocab_size)
        if self.grad_bias is not None and head_grads.bias is not None:
            head_grads.bias += self.grad_bias
        grad = self.gradient[: len(part.hidden), columns]
        return head_grads.add(grad, part.hidden, columns, first=part.rows.start == 0)

    def _fill_part(self, part: Part, upstream: Upstream | None = None, out: Tensor | None = None) -> None:
        """Statistics of some tokens, and with ``upstream`` their gradient ``[R, W]`` into ``out``."""
        call, (rows, hidden, values, _) = self.call, part
        student_logits, teacher_logits = (logits[: len(hidden)] for logits in self.logits)
        student_logits, hard_lse = student_logits[:, : self.vocab_size], values["lse"]
        student, teacher = self.logits_of(part, student_logits, teacher_logits[:, : self.shared])
        labels = self.opened.labels[rows]
        if call.shard is not None and self.opened.owned is not None:
            labels = torch.where(self.opened.owned[rows], labels, self.vocab_size)
        coefficients, g = None, None
        if upstream is not None:
            g, soft_g = upstream.get("logp"), upstream.get("divergence")
            soft_g = torch.zeros_like(hard_lse) if soft_g is None else soft_g
            coefficients = Coefficients(soft_g) if g is None else Coefficients(soft_g, -g, g, hard_lse)
        # The bias's gradient is a sum over all tokens: it is taken before anything is rounded.
        with_bias = self.grad_bias is not None and out is not None
        target = student_logits if with_bias else out
        value = values["divergence"] if "divergence" in values else torch.empty_like(hard_lse)
        self._divergence(
            value, student, teacher, None if target is None else target[:, : self.shared], coefficients, labels
        )
        if target is not None and self.vocab_size > self.shared:
            self._write_extra_gradient(target, student_logits, hard_lse, call.tokens.labels[rows], g)
        if with_bias:
            assert self.grad_bias is not None
            assert out is not None
            self.grad_bias += student_logits.sum(0)
            out.copy_(student_logits)

    def _divergence(
        self,
        value: Tensor,
        student: Logits,
        teacher: Logits,
        out: Tensor | None,
        coefficients: Coefficients | None,
        labels: Tensor,
    ) -> None:
        """:func:`divergence_into`, of the whole vocabulary."""
        divergence, call = self.comparison.divergence, self.call
        options: dict[str, Any] = {"scratch": call.plan.scratch, "backend": call.backend}
        if call.shard is None:
            divergence_into(
                value, student, teacher, divergence, out=out, coefficients=coefficients, labels=labels, **options
            )
            return
        sums = RowSums(torch.zeros_like(value))
        if divergence.form == "cosine":
            sums = sums._replace(squares=call.shard.sum_(square_sums(student, teacher, **options)))
        if out is None or not divergence.balanced:
            divergence_into(value, student, teacher, divergence, sums=sums, **options)
            both = call.shard.sum_(torch.stack([value, sums.h]))
            value.copy_(both[0])
            sums = sums._replace(h=both[1])
        if out is not None:
            part_value = value if divergence.balanced else torch.empty_like(value)
            divergence_into(
                part_value, student, teacher, divergence, out=out, coefficients=coefficients, labels=labels, sums=sums,
                **options,
            )  # fmt: skip
            if divergence.balanced:
                call.shard.sum_(value)

    def _write_extra_gradient(
        self, target: Tensor, student_logits: Tensor, hard_lse: Tensor, labels: Tensor, g: Tensor | None
    ) -> None:
        """The gradient in the columns that only the student has: that of the hard loss alone."""
        extra, call = slice(self.shared, self.vocab_size), self.call
        if g is None:
            target[:, extra].zero_()
            return
        softmax_gradient_into(
            target[:, extra],
            student_logits[:, extra],
            hard_lse,
            labels,
            SoftmaxGradient.of({"logp": g}, {}),
            self.opened.epilogue.columns(extra),
            first_column=self.opened.first_column + self.shared,
            vocab_size=call.vocab_size,
            scratch=call.plan.scratch,
            backend=call.backend,
        )
