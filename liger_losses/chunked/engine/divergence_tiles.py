"""A block of two models in a small workspace: the logits are computed once more for the gradients, in tiles.

R tokens of a block, C columns of a tile, V the columns that both vocabularies have.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from liger_losses.chunked.engine.accumulation import HeadGradients
from liger_losses.chunked.engine.blocks import Part, Upstream
from liger_losses.chunked.engine.call import Call, OpenCall
from liger_losses.chunked.engine.plan import blocks, padded
from liger_losses.chunked.engine.two_models import TwoModels, coefficients_of
from liger_losses.kernels.divergence import Logits, RowSums, divergence_into, square_sums
from liger_losses.kernels.linear_exp import linear_exponentials
from liger_losses.kernels.linear_grad import linear_softmax_gradient_into
from liger_losses.kernels.matmul import start_beside
from liger_losses.kernels.softmax_grad import SoftmaxGradient


def row_constants(call: Call) -> list[str]:
    """What the gradients of a divergence need of each token, beside its statistics: log-sum-exps, sum(h), and norms for
    the cosine."""
    assert call.query.comparison is not None
    divergence = call.query.comparison.divergence
    if divergence.form == "cosine":
        return ["h", "student_squares", "teacher_squares"]
    soft = ["soft_lse"] if call.decision.has_two_softmaxes else []
    return [*soft, "teacher_lse"] if divergence.balanced else [*soft, "teacher_lse", "h"]


class DivergenceTiles(TwoModels):
    """The gradients ``[R, C]`` of a divergence, whose logits are computed once more for them (``plan.tiled``).

    The gradient of a balanced divergence follows from the log-sum-exps of both models, which take no logits in memory.
    Of the others it also needs sum(h), which needs the log-sum-exps first: so the logits of r tokens, all columns of
    both models, stay in memory between the two. (Where memory is too small even for that, the products are taken again,
    in tiles.) A last pass computes the gradients, and writes grad_weight once for all R tokens. These are more
    products, but for so few tokens at a time, reading the heads and adding to grad_weight would take longer.
    """

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        self.constants = row_constants(opened.call)
        #: The part's statistics and constants, and where gradients add up the divergence of a balanced one.
        self.values: dict[str, Tensor] = {}
        self.value: Tensor | None = None

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        self.values = part.values
        self.value = self.values.get("divergence", torch.empty_like(part.values["lse"])).zero_()
        with_gradients = upstream is not None and self.divergence.balanced
        if self.call.plan.part_rows and not with_gradients:
            for at in blocks(len(part.hidden), self.call.plan.part_rows):
                self._fill_rows(part.at(at), self.value[at])
            self.logits = None  # tiles take its memory
            return
        self._compute_softmaxes(part)
        if not with_gradients:
            self._add_terms(part, self.value)

    def refill(self, part: Part, upstream: Upstream) -> None:
        self.values, self.value = part.values, torch.zeros_like(part.values["lse"])
        if not self.values.keys() >= {*self.constants}:
            super().refill(part, upstream)

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        out, width = None, padded(min(self.call.plan.tile_columns, self.vocab_size))
        gradient = part.hidden.new_empty(len(part.hidden), width)
        for columns, grad in self._gradient_tiles(part, upstream, gradient):
            out = head_grads.add(grad, part.hidden, columns, first=part.rows.start == 0, out=out)
        return out

    def _gradient_tiles(self, part: Part, upstream: Upstream, out: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Columns, and the gradient ``[R, C]`` there, in the memory of ``out``."""
        call, labels, value = self.call, part.labels, torch.empty_like(self.values["lse"])
        g, coefficients, sums = upstream.get("logp"), coefficients_of(upstream, self.values["lse"]), self._sums()
        for columns, student, teacher in self._tiles(part):
            width = columns.stop - columns.start
            grad, at = out[:, :width], labels - columns.start
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
            yield columns, grad
        # In the columns that only the student has, the gradient comes from the hard loss alone.
        for columns in blocks(self.vocab_size - self.shared, call.plan.tile_columns):
            columns = slice(columns.start + self.shared, columns.stop + self.shared)
            grad = linear_softmax_gradient_into(
                out[:, : columns.stop - columns.start],
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
            yield columns, grad

    def _compute_softmaxes(self, part: Part) -> None:
        """The statistics of both models, each by one product whose logits stay in registers."""
        opened, values, cosine = self.opened, self.values, self.divergence.form == "cosine"
        compute = partial(linear_exponentials, backend=self.call.backend)
        soft_epilogue, teacher_epilogue = self._soft_epilogues(part.rows)
        labels, shared_labels = part.here, self._shared_labels(part)
        own: dict[str, Tensor] = {name: values[name] for name in ("lse", "logp") if name in values}
        soft = {"entropy": values["entropy"]} if "entropy" in values else {}
        shared = opened.weight[: self.shared]
        if self.separate:
            compute(part.hidden, opened.weight, labels, None, opened.epilogue, found=own)
            own, labels = {"lse": values["soft_lse"]} if "soft_lse" in values else {}, shared_labels
        elif cosine and "logp" not in own:
            own["lse"].zero_()
            own = {}
        if own or soft:
            own = own or {"lse": torch.empty_like(values["lse"])}
            compute(part.hidden, shared, shared_labels, None, soft_epilogue, found=own | soft)
        if cosine:
            squares = torch.zeros(2, len(part.hidden), dtype=torch.float32, device=shared.device)
            for _, student, teacher in self._tiles(part):
                squares += square_sums(student, teacher, backend=self.call.backend)
            values["student_squares"].copy_(squares[0])
            values["teacher_squares"].copy_(squares[1])
        else:
            assert self.teacher is not None
            found, hidden = {"lse": values["teacher_lse"]}, self._teacher_hidden(part.rows)
            weight = self.teacher.weights.rows(slice(None), hidden.dtype)
            compute(hidden, weight, shared_labels, None, teacher_epilogue, found=found)

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
        hidden, (soft, of_teacher) = self._teacher_hidden(part.rows), self._soft_epilogues(part.rows)
        lse = self.values["soft_lse"] if "soft_lse" in self.values else self.values["lse"]
        teacher_lse = self.values.get("teacher_lse", lse)
        width = padded(min(self.call.plan.tile_columns, self.shared))
        both = hidden.new_empty(2, len(hidden), width, dtype=torch.float32)
        for columns in blocks(self.shared, self.call.plan.tile_columns):
            student, teacher = both[:, :, : columns.stop - columns.start]
            of_teacher_into = partial(self.teacher.into, teacher, hidden, columns.start, columns.stop)
            wait = start_beside(hidden.device, of_teacher_into)
            try:
                self.student.into(student, part.hidden, columns.start, columns.stop)
            finally:
                wait()
            yield (
                columns,
                Logits(student, lse, soft.columns(columns)),
                Logits(teacher, teacher_lse, of_teacher.columns(columns)),
            )
