"""A block of two models: the student's gradient from the divergence between both models' logits.

N active tokens, R tokens of a block, r of them whose logits exist at a time, H and Ht the hidden sizes, V the columns
that both vocabularies have, W the student's columns that are computed: all of them where its log-probabilities are
asked for, else V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.accumulation import HeadGradients
from liger_losses.chunked.engine.blocks import Block, Part, Upstream, corner
from liger_losses.chunked.engine.call import OpenCall
from liger_losses.chunked.engine.plan import blocks, padded
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.chunked.engine.teachers import TeacherLogits
from liger_losses.chunked.engine.weights import Projection, can_fuse
from liger_losses.kernels.divergence import Coefficients, Logits, RowSums, divergence_into, square_sums
from liger_losses.kernels.linear_exp import linear_exponentials
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.row_lse import row_log_sum_exps_into
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics


def _columns(values: Tensor, count: int) -> Tensor:
    """The first columns; no view is made of all."""
    return values if values.shape[1] == count else values[:, :count]


def _at_temperature(transform: LogitTransform, temperature: float | Tensor) -> LogitTransform:
    """The transform with another temperature."""
    own = transform.temperature
    numbers = not isinstance(own, Tensor) and not isinstance(temperature, Tensor)
    return transform if numbers and own == temperature else replace(transform, temperature=temperature)


class TwoModels(Block):
    """A divergence: by default half-precision gradients ``[R, W]``, from fp32 logits of r tokens of both models.

    The gradients of all R tokens are collected before the products with head and hidden states are taken, so that these
    are large and grad_weight is rounded few times.
    """

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        call, comparison = opened.call, opened.call.query.comparison
        assert comparison is not None
        self.comparison, self.divergence = comparison, comparison.divergence
        self.logits: Tensor | None = None
        self.gradient: Tensor | None = None
        self.grad_bias: Tensor | None = None
        #: V, of which ``shared`` are computed here.
        columns = call.ranks.columns(call.decision.shared_columns)
        self.shared = columns.stop - columns.start
        soft = _at_temperature(call.transform, comparison.temperature)
        self.soft_epilogue = Epilogue(soft, opened.bias).columns(slice(0, self.shared))
        #: The hard loss is of the student's whole vocabulary at temperature 1, the divergence of the shared columns.
        self.separate = call.decision.has_two_softmaxes
        self.student = replace(opened.projection, fused=call.work.fused_products)
        #: The teacher, if its logits are computed here.
        self.teacher: Projection | None = None
        if isinstance(comparison.teacher, TeacherLogits):
            self.teacher_epilogue = Epilogue(LogitTransform(comparison.temperature))
            return
        states, head = comparison.teacher.parts
        columns = columns if head.ranks is ALONE else slice(0, self.shared)
        if columns != slice(0, head.weight.shape[0]):
            head = head.columns(columns)
        bias = None if head.bias is None else head.bias.contiguous()
        self.teacher_epilogue = Epilogue(_at_temperature(head.transform, comparison.temperature), bias)
        weights = head.weights
        if call.work.dequantized_bytes:
            weights = weights.dequantized(call.work.operand_dtype)
        fused = can_fuse(weights, call.work.operand_dtype, call.backend)
        self.teacher = replace(opened.projection, weights=weights, fused=fused)
        self.teacher_states = states.reshape(-1, states.shape[-1]) if states.is_contiguous() else states

    # --- The block ----------------------------------------------------------------------------------------------------

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        call = self.call
        if upstream is not None and self.gradient is None:
            self.gradient = part.hidden.new_empty(self.rows, padded(self.vocab_size))
            if call.needs_bias:
                self.grad_bias = part.hidden.new_empty(self.vocab_size, dtype=call.work.logits_dtype)
        if self.grad_bias is not None:
            self.grad_bias.zero_()
        count, value = len(part.hidden), part.values.get("divergence")
        out = None
        if upstream is not None and self.gradient is not None:
            out = corner(self.gradient, count, self.vocab_size)
        if 0 < count <= call.plan.part_rows:
            self._fill_rows(part, value, upstream, out)
            return
        for at in blocks(count, call.plan.part_rows):
            wanted = None if upstream is None else {name: g[at] for name, g in upstream.items()}
            of_rows = [None if each is None else each[at] for each in (value, out)]
            self._fill_rows(part.at(at), of_rows[0], wanted, of_rows[1])

    def refill(self, part: Part, upstream: Upstream) -> None:
        # Backward must not write to the statistics that forward saved.
        values = {name: torch.empty_like(value) for name, value in part.values.items()}
        self.fill(part._replace(values=values), upstream)

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        if self.grad_bias is not None and head_grads.bias is not None:
            head_grads.bias += self.grad_bias
        assert self.gradient is not None
        grad, columns = corner(self.gradient, len(part.hidden), self.vocab_size), slice(0, self.vocab_size)
        return head_grads.add(grad, part.hidden, columns, first=part.rows.start == 0)

    # --- All columns of some tokens -----------------------------------------------------------------------------------

    def _fill_rows(
        self, part: Part, value: Tensor | None, upstream: Upstream | None = None, out: Tensor | None = None
    ) -> None:
        """Statistics of some tokens, and with ``upstream`` their gradient ``[R, W]`` into ``out``."""
        call, (rows, hidden, values, *_) = self.call, part
        if self.logits is None:
            shape = 2, min(call.plan.part_rows, self.rows), padded(self.vocab_size)
            self.logits = torch.empty(shape, dtype=call.work.logits_dtype, device=self.opened.device)
        student_logits, teacher_logits = _columns(self.logits, len(hidden))
        student_logits, hard_lse = _columns(student_logits, self.vocab_size), values["lse"]
        student, teacher, parameter = self._logits_of(part, student_logits, _columns(teacher_logits, self.shared))
        labels = part.here
        if self.opened.others is not None:
            labels = labels.masked_fill(self.opened.others[rows], self.vocab_size)
        coefficients = None if upstream is None else coefficients_of(upstream, hard_lse)
        # The bias's gradient is a sum over all tokens: it is taken before anything is rounded.
        target = out if self.grad_bias is None or out is None else student_logits
        value = torch.empty_like(hard_lse) if value is None else value
        shared = None if target is None else _columns(target, self.shared)
        self._divergence(value, student, teacher, shared, coefficients, labels, parameter)
        if target is not None and self.vocab_size > self.shared:
            g = None if upstream is None else upstream.get("logp")
            self._write_extra_gradient(target, student_logits, hard_lse, part.labels, g)
        if target is not None and target is not out and out is not None and self.grad_bias is not None:
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
        parameter: Tensor | None,
    ) -> None:
        """:func:`divergence_into`, of the columns of all ranks."""
        divergence, call, sums = self.divergence, self.call, None
        options: dict[str, Any] = {"scratch": call.plan.scratch, "backend": call.backend}
        whole_rows = {"whole_rows": call.batch_invariant, "parameter": parameter, **options}
        if self.opened.others is not None:
            squares = None
            if divergence.form == "cosine":
                squares = call.ranks.sum_(square_sums(student, teacher, **options))
            sums = RowSums(torch.zeros_like(value), squares)
            if out is None or not divergence.balanced:
                divergence_into(value, student, teacher, divergence, sums=sums, **whole_rows)
                call.ranks.sum_each_(value, sums.h)
                if out is None:
                    return
                value = torch.empty_like(value)
        divergence_into(
            value,
            student,
            teacher,
            divergence,
            out=out,
            coefficients=coefficients,
            labels=labels,
            sums=sums,
            **whole_rows,
        )
        if sums is not None and divergence.balanced:
            call.ranks.sum_(value)

    def _write_extra_gradient(
        self, target: Tensor, student_logits: Tensor, hard_lse: Tensor, labels: Tensor, g: Tensor | None
    ) -> None:
        """The gradient in the columns that only the student has, which comes from the hard loss alone."""
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

    def _soft_epilogues(self, rows: slice) -> tuple[Epilogue, Epilogue]:
        """The student's and the teacher's at the divergence's temperature, of some active tokens."""
        if not isinstance(self.comparison.temperature, Tensor):
            return self.soft_epilogue, self.teacher_epilogue
        return self.soft_epilogue.rows(rows), self.teacher_epilogue.rows(rows)

    def _shared_labels(self, part: Part) -> Tensor:
        """Labels inside the shared columns, for statistics that do not depend on them."""
        return part.here if self.opened.weight_rows <= self.shared else part.here.clamp(max=self.shared - 1)

    def _teacher_hidden(self, rows: slice) -> Tensor:
        """The teacher's hidden states ``[R, Ht]`` of some active tokens, in the operand dtype."""
        tokens = self.call.tokens
        return tokens.gather([self.teacher_states], rows.start, rows.stop).to(self.call.work.operand_dtype)

    def _logits_of(
        self, part: Part, student_logits: Tensor, teacher_logits: Tensor
    ) -> tuple[Logits, Logits, Tensor | None]:
        """Both models' logits in the shared columns, of some tokens, and the divergence's parameter of each, where it
        has one; and the student's statistics.

        Args:
            part: the tokens.
            student_logits: ``[R, W]`` fp32, for the student's projections.
            teacher_logits: ``[R, V]`` fp32, for the teacher's.
        """
        rows, hidden, values, own_epilogue, *_ = part
        soft_epilogue, teacher_epilogue = self._soft_epilogues(rows)
        shared_labels = self._shared_labels(part)
        shared_logits, lse = _columns(student_logits, self.shared), values["lse"]
        found = {name: value for name, value in values.items() if name in ("lse", "logp")}
        first_epilogue = own_epilogue if self.separate else soft_epilogue
        first_labels = part.here if "logp" in found else shared_labels
        self._compute_logits(student_logits, found, self.student, hidden, first_labels, first_epilogue)
        if self.separate:
            lse = torch.empty_like(lse)
            self._compute_statistics({"lse": lse}, shared_logits, shared_labels, soft_epilogue)
        if "entropy" in values:
            self._compute_statistics({"entropy": values["entropy"]}, shared_logits, shared_labels, soft_epilogue)
        teacher_lse = torch.empty_like(lse)
        of_teacher = {"lse": teacher_lse}
        if self.divergence.by_entropy:
            of_teacher["entropy"] = torch.empty_like(teacher_lse)
        self._compute_teacher_logits(teacher_logits, of_teacher, rows, shared_labels, teacher_epilogue)
        if self.opened.others is not None:
            soft = {"lse": lse} | {name: value for name, value in values.items() if name == "entropy"}
            of_student = [soft, found] if self.separate else [soft | found]
            self.opened.merge_(rows, *of_student, of_teacher)
        parameter = self.divergence.row_parameter(of_teacher["entropy"]) if "entropy" in of_teacher else None
        both = Logits(shared_logits, lse, soft_epilogue), Logits(teacher_logits, teacher_lse, teacher_epilogue)
        return *both, parameter

    def _compute_teacher_logits(
        self, out: Tensor, statistics: Mapping[str, Tensor], rows: slice, labels: Tensor, epilogue: Epilogue
    ) -> None:
        """The teacher's projections ``[R, V]`` into ``out``, and statistics of its logits."""
        tokens, teacher = self.call.tokens, self.comparison.teacher
        if self.teacher is not None:
            self._compute_logits(out, statistics, self.teacher, self._teacher_hidden(rows), labels, epilogue)
            return
        assert isinstance(teacher, TeacherLogits)
        (index,) = tokens.indices
        positions = torch.arange(rows.start, rows.stop, device=out.device) if index is None else index[rows]
        out.copy_(teacher.rows(positions)[:, self.opened.first_column :][:, : self.shared])
        self._compute_statistics(statistics, out, labels, epilogue)

    def _compute_logits(
        self,
        out: Tensor,
        statistics: Mapping[str, Tensor],
        model: Projection,
        hidden: Tensor,
        labels: Tensor,
        epilogue: Epilogue,
    ) -> None:
        """A model's projections into ``out``, and the statistics of its logits."""
        invariant = self.call.batch_invariant
        alone = statistics.keys() == {"lse"} and not invariant  # a pass over projections takes less than offsets do
        if not model.fused or alone:
            model.into(out, hidden, 0, out.shape[1])
            self._compute_statistics(statistics, out, labels, epilogue)
            return
        linear_exponentials(
            hidden,
            model.weights.rows(slice(None), hidden.dtype),
            labels,
            out,
            epilogue,
            found=statistics,
            projections=True,
            batch_invariant=invariant,
            backend=self.call.backend,
        )

    def _compute_statistics(
        self, statistics: Mapping[str, Tensor], projected: Tensor, labels: Tensor, epilogue: Epilogue
    ) -> None:
        """Statistics of projections that exist, written into the tensors given."""
        plan, backend = self.call.plan, self.call.backend
        names = frozenset(statistics)
        if names == {"lse"} and backend == "triton" and not self.call.batch_invariant:
            row_log_sum_exps_into(statistics["lse"], projected, epilogue, backend=backend)
            return
        computed = softmax_statistics(projected, labels, names, epilogue, scratch=plan.scratch, backend=backend)
        for name, value in statistics.items():
            value.copy_(computed[name])


def coefficients_of(upstream: Upstream, hard_lse: Tensor) -> Coefficients:
    """The loss's derivatives as the kernels of a divergence take them."""
    g, soft_g = upstream.get("logp"), upstream.get("divergence")
    soft_g = torch.zeros_like(hard_lse) if soft_g is None else soft_g
    return Coefficients(soft_g) if g is None else Coefficients(soft_g, -g, g, hard_lse)
