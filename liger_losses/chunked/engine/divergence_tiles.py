"""Two models in small memory: statistics of all columns first, then gradients in tiles of the vocabulary.

R tokens of a block, r of them whose logits exist at a time, C columns of a tile, V the columns that both vocabularies
have, W those of the student that are computed, as in :mod:`liger_losses.chunked.engine.divergence_block`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from liger_losses.chunked.engine.blocks import Part, Upstream
from liger_losses.chunked.engine.call import Call, OpenCall
from liger_losses.chunked.engine.divergence_block import TwoModels, has_two_softmaxes
from liger_losses.chunked.engine.gradients import HeadGradients
from liger_losses.chunked.engine.plan import blocks, padded
from liger_losses.kernels.divergence import Coefficients, Logits, RowSums, divergence_into, square_sums
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.linear_grad import linear_softmax_gradient_into
from liger_losses.kernels.linear_stats import linear_softmax_statistics
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.matmul import start_beside
from liger_losses.kernels.softmax_grad import SoftmaxGradient


def row_constants(call: Call) -> list[str]:
    """What the gradient of each token needs beside the statistics: log-sum-exps, sum(h), and norms for the cosine."""
    comparison = call.query.comparison
    assert comparison is not None
    if comparison.divergence.form == "cosine":
        return ["h", "student_squares", "teacher_squares"]
    soft = ["soft_lse"] if has_two_softmaxes(call) else []
    return [*soft, "teacher_lse"] if comparison.divergence.balanced else [*soft, "teacher_lse", "h"]


class DivergenceTiles(TwoModels):
    """Half-precision gradients ``[R, C]``, from fp32 logits ``[R, C]`` of both models, which are computed once more.

    The gradient of a balanced divergence follows from the log-sum-exps of both models, which take no logits in memory.
    Of the others it also needs sum(h), which needs the log-sum-exps first: so the logits of r tokens at a time, all
    columns of both models, stay in memory between the two. (Where memory is too small even for that, the products are
    taken again, in tiles.) A last pass computes the gradients, and writes grad_weight once for all R tokens. These are
    more products than :class:`~liger_losses.chunked.engine.divergence_block.DivergenceBlock` takes. But if so few
    tokens had their gradients taken at a time, reading the heads, and reading and writing grad_weight, would take
    longer than multiplying.
    """

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        self.divergence, self.constants = self.comparison.divergence, row_constants(self.call)
        self.values: dict[str, Tensor] = {}
        #: Where the gradients' pass adds up the divergence, if it is the one that does.
        self.value: Tensor | None = None

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        self.values = part.values
        self.value = self.values.get("divergence", torch.empty_like(part.values["lse"])).zero_()
        balanced = upstream is not None and self.divergence.balanced
        if self.call.plan.part_rows and not balanced:
            self._fill_by_rows(part, self.value)
            return
        self._compute_softmaxes(part)
        if not balanced:
            self._add_terms(part, self.value)

    def refill(self, part: Part, upstream: Upstream) -> None:
        self.values, self.value = part.values, torch.zeros_like(part.values["lse"])
        if not self.values.keys() >= set(self.constants):  # a compiled graph keeps the statistics alone
            names = {*self.values, *self.constants}
            self.fill(part._replace(values={name: torch.empty_like(self.value) for name in names}), upstream)

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        call, labels, first = self.call, self.call.tokens.labels[part.rows], part.rows.start == 0
        g, soft_g = upstream.get("logp"), upstream.get("divergence")
        soft_g = torch.zeros_like(self.values["lse"]) if soft_g is None else soft_g
        coefficients = Coefficients(soft_g) if g is None else Coefficients(soft_g, -g, g, self.values["lse"])
        out, value, sums = None, torch.empty_like(self.values["lse"]), self._sums()
        gradient = part.hidden.new_empty(len(part.hidden), padded(min(call.plan.tile_columns, self.vocab_size)))
        for columns, student, teacher in self._tiles(part):
            width = columns.stop - columns.start
            grad, at = gradient[:, :width], labels - columns.start
            divergence_into(
                value,
                student,
                teacher,
                self.divergence,
                out=grad,
                coefficients=coefficients,
                labels=None if g is None else torch.where((at >= 0) & (at < width), at, width),
                sums=sums,
                backend=call.backend,
            )
            if self.value is not None and self.divergence.balanced:
                self.value += value
            out = head_grads.add(grad, part.hidden, columns, first=first, out=out)
        # The columns that only the student has: the gradient is that of the hard loss alone.
        for columns in blocks(self.vocab_size - self.shared, call.plan.tile_columns):
            columns = slice(columns.start + self.shared, columns.stop + self.shared)
            grad = gradient[:, : columns.stop - columns.start]
            linear_softmax_gradient_into(
                grad,
                part.hidden,
                self.opened.weight[columns],
                self.values["lse"],
                labels,
                SoftmaxGradient.of({} if g is None else {"logp": g}, {}),
                self.opened.epilogue.columns(columns),
                first_column=columns.start,
                vocab_size=call.vocab_size,
                backend=call.backend,
            )
            out = head_grads.add(grad, part.hidden, columns, first=first, out=out)
        return out

    def _compute_softmaxes(self, part: Part) -> None:
        """The statistics of both models, each by one product whose logits stay in registers."""
        opened, values, cosine = self.opened, self.values, self.divergence.form == "cosine"
        soft_epilogue, teacher_epilogue = self.soft_epilogues(part.rows)
        labels, shared_labels = opened.labels[part.rows], self.shared_labels[part.rows]
        own: dict[str, Tensor] = {name: values[name] for name in ("lse", "logp") if name in values}
        soft = {"entropy": values["entropy"]} if "entropy" in values else {}
        shared = opened.weight[: self.shared]
        if self.separate:
            _compute(own, part.hidden, opened.weight, labels, opened.epilogue, self.call.backend)
            own, labels = {"lse": values["soft_lse"]} if "soft_lse" in values else {}, shared_labels
        elif cosine and "logp" not in own:
            own["lse"].zero_()
            own = {}
        if own or soft:
            own = own or {"lse": torch.empty_like(values["lse"])}
            _compute(own | soft, part.hidden, shared, shared_labels, soft_epilogue, self.call.backend)
        if cosine:
            squares = torch.zeros(2, len(part.hidden), device=shared.device)
            for _, student, teacher in self._tiles(part):
                squares += square_sums(student, teacher, backend=self.call.backend)
            values["student_squares"].copy_(squares[0])
            values["teacher_squares"].copy_(squares[1])
        else:
            assert self.teacher is not None
            found, hidden = {"lse": values["teacher_lse"]}, self.teacher_hidden(part.rows)
            weight = self.teacher.projection.weights.rows(slice(None), hidden.dtype)
            _compute(found, hidden, weight, shared_labels, teacher_epilogue, self.call.backend)

    def _fill_by_rows(self, part: Part, value: Tensor) -> None:
        """The statistics of both models, the divergence and what the gradients need, from logits of some tokens."""
        most, backend = min(self.call.plan.part_rows, len(part.hidden)), self.call.backend
        columns = padded(self.vocab_size)
        both = part.hidden.new_empty(2, most, columns, dtype=torch.float32)
        for at, smaller in self.parts_of(part, most):
            values, (student_logits, teacher_logits) = smaller.values, both[:, : len(smaller.hidden)]
            student, teacher = self.logits_of(
                smaller, student_logits[:, : self.vocab_size], teacher_logits[:, : self.shared]
            )
            squares = None
            if "student_squares" in values:
                squares = square_sums(student, teacher, backend=backend)
                values["student_squares"].copy_(squares[0])
                values["teacher_squares"].copy_(squares[1])
            sums = RowSums(values["h"] if "h" in values else torch.empty_like(value[at]), squares)
            divergence_into(value[at], student, teacher, self.divergence, sums=sums, backend=backend)

    def _add_terms(self, part: Part, value: Tensor) -> None:
        """The divergence and sum(h) of all columns."""
        h = self.values["h"].zero_() if "h" in self.values else torch.zeros_like(value)
        found, sums = torch.empty_like(value), self._sums()._replace(h=torch.empty_like(value))
        for _, student, teacher in self._tiles(part):
            divergence_into(found, student, teacher, self.divergence, sums=sums, backend=self.call.backend)
            value += found
            h += sums.h

    def _sums(self) -> RowSums:
        squares = None
        if "student_squares" in self.values:
            squares = torch.stack([self.values["student_squares"], self.values["teacher_squares"]])
        return RowSums(self.values["h"] if "h" in self.values else torch.zeros_like(self.values["lse"]), squares)

    def _tiles(self, part: Part) -> Iterator[tuple[slice, Logits, Logits]]:
        """Columns that both models have, and both models' logits there."""
        assert self.teacher is not None
        hidden, (soft, of_teacher) = self.teacher_hidden(part.rows), self.soft_epilogues(part.rows)
        lse = self.values["soft_lse"] if "soft_lse" in self.values else self.values["lse"]
        teacher_lse = self.values.get("teacher_lse", lse)
        width = padded(min(self.call.plan.tile_columns, self.shared))
        both = hidden.new_empty(2, len(hidden), width, dtype=torch.float32)
        for columns in blocks(self.shared, self.call.plan.tile_columns):
            student, teacher = both[:, :, : columns.stop - columns.start]
            of_teacher_into = partial(self.teacher.projection.into, teacher, hidden, columns.start, columns.stop)
            wait = start_beside(hidden.device, of_teacher_into)
            try:
                self.student.projection.into(student, part.hidden, columns.start, columns.stop)
            finally:
                wait()
            yield (
                columns,
                Logits(student, lse, soft.columns(columns)),
                Logits(teacher, teacher_lse, of_teacher.columns(columns)),
            )


def _compute(
    found: Mapping[str, Tensor], hidden: Tensor, weight: Tensor, labels: Tensor, epilogue: Epilogue, backend: str
) -> None:
    """Statistics of the softmax of a product, written into the tensors given."""
    if found.keys() <= {"lse", "logp", "entropy"}:
        linear_exponentials(hidden, weight, labels, None, epilogue, found=Exponentials.into(found), backend=backend)
        return
    computed = linear_softmax_statistics(hidden, weight, labels, frozenset(found), epilogue, backend=backend)
    for name, value in found.items():
        value.copy_(computed[name])
