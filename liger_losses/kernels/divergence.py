"""Divergences between two softmaxes, and their gradients, from both models' projections.

R rows (tokens), V columns (vocabulary). p is the student's softmax, q the teacher's, d = log p - log q.

Every divergence is a sum over the vocabulary of a function f of log p and log q, and with h = df / d log p its
gradient with respect to the student's logits is ``h - p sum(h)``: two sums per row, then one formula per entry.

Close to the teacher, a divergence is a second-order quantity made of first-order terms that cancel. Two rules keep its
digits: f is written so that no entry is negative (adding multiples of p - q, whose sum is 0, changes nothing), and
where d is small, f and h are computed as power series in d times a power of q.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import processors
from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, triton
from liger_losses.kernels.divergence_forms import FORMS, Divergence, cosine_terms, finite_logs
from liger_losses.kernels.divergence_kernels import divergence_kernel, squares_kernel
from liger_losses.kernels.divergence_terms import KernelSeries, series_argument, terms
from liger_losses.kernels.logit_transform import Epilogue, KernelTransform
from liger_losses.kernels.softmax_stats import row_slices

#: Temporaries of the reference implementation, each as large as the rows it works on.
TEMPORARIES = 16


class Logits(NamedTuple):
    """One model's projections ``[R, V]`` (fp32 or fp64), the log-sum-exp ``[R]`` of its logits, and what turns the
    projections into logits."""

    projected: Tensor
    lse: Tensor
    epilogue: Epilogue = Epilogue()

    def rows(self, rows: slice) -> Logits:
        return Logits(self.projected[rows], self.lse[rows], self.epilogue.rows(rows))

    def logits(self) -> Tensor:
        return self.epilogue(self.projected)

    def for_kernel(self) -> Side:
        """The argument of the kernels."""
        return Side(self.projected, self.projected.stride(0), self.epilogue.bias, self.epilogue.transform.for_kernel)

    def log_probs(self) -> Tensor:
        return finite_logs(self.logits() - self.lse[:, None])


class RowSums(NamedTuple):
    """Sums over a row of the whole vocabulary, ``[R]`` each, where both models' projections are a part of it.

    Args:
        h: sum of h (of ``cosine``: the distance). Without ``out``, it is written: this part's sum.
        squares: ``[2, R]``, of ``cosine``: the sums of squared logits of student and teacher.
    """

    h: Tensor
    squares: Tensor | None = None

    def rows(self, rows: slice) -> RowSums:
        return RowSums(self.h[rows], None if self.squares is None else self.squares[:, rows])


class Coefficients(NamedTuple):
    """The loss's derivatives for each row, ``[R]`` each.

    Args:
        divergence: d loss / d divergence.
        hard_p, hard_label: a hard loss adds ``hard_p p1 + hard_label onehot(label)`` to the gradient with respect to
            the student's logits at temperature 1, whose softmax is p1; all three or none are given.
        hard_lse: the log-sum-exp of these logits, and of further columns that only the student has.
    """

    divergence: Tensor
    hard_p: Tensor | None = None
    hard_label: Tensor | None = None
    hard_lse: Tensor | None = None

    def rows(self, rows: slice) -> Coefficients:
        return Coefficients._make([None if v is None else v[rows] for v in self])

    def contiguous(self) -> Coefficients:
        """The coefficients as kernels read them: for a plain sum, autograd passes them with a stride of 0."""
        return Coefficients._make([None if v is None else v.contiguous() for v in self])


def divergence_into(
    value: Tensor,
    student: Logits,
    teacher: Logits,
    divergence: Divergence,
    *,
    out: Tensor | None = None,
    coefficients: Coefficients | None = None,
    labels: Tensor | None = None,
    sums: RowSums | None = None,
    parameter: Tensor | None = None,
    whole_rows: bool = False,
    scratch: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Each row's divergence and, if asked for, the loss's gradient with respect to the student's projections.

    Args:
        value: ``[R]``, the tensor to write the divergences into.
        student, teacher: :class:`Logits` of both models, whose transforms have the same temperature.
        divergence: which divergence.
        out: ``[R, V]`` for the gradient, of any floating-point dtype; it may be the student's ``projected``.
        coefficients: the loss's derivatives; needed with ``out``.
        labels: ``[R]`` int64, for the coefficients of a hard loss; from V on, they are labels of further columns.
        sums: where the projections are a part of the vocabulary; the divergences are then sums over this part.
        parameter: ``[R]``, the divergence's ``a`` of each row, where that follows from the teacher's entropy.
        whole_rows: sum each row in an order that does not depend on R, at the cost of idle processors for few rows.
        scratch: bytes for temporaries of the reference implementation; unbounded by default.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.

    Returns:
        ``value``.
    """
    if divergence.has_kernel and choose_backend(backend, [student.projected], dtypes=LOGIT_DTYPES) == "triton":
        c = (coefficients or Coefficients(value)).contiguous()
        _divergence_triton(value, [student, teacher], divergence, out, c, labels, sums, parameter, whole_rows)
        return value
    for part in row_slices(student.projected, None if scratch is None else scratch * 4 // TEMPORARIES):
        # The sum of a single row would be shared by threads, and taken in another order.
        twice = whole_rows and part.stop - part.start == 1
        rows: Any = [part.start, part.start] if twice else part
        wanted = None if out is None or coefficients is None else coefficients.rows(rows)
        row_labels = None if labels is None else labels[rows]
        row_sums = None if sums is None else sums.rows(rows)
        sides = student.rows(rows), teacher.rows(rows)
        own = None if parameter is None else parameter[rows]
        values, grad = _divergence_torch(*sides, divergence, wanted, row_labels, row_sums, own)
        value[part] = values[: len(value[part])]
        if twice and sums is not None and row_sums is not None:  # which was a copy
            sums.h[part] = row_sums.h[:1]
        if out is not None and grad is not None:
            out[part].copy_(grad[: len(out[part])])
        del grad  # its memory is free before the next slice's temporaries are allocated
    return value


def square_sums(student: Logits, teacher: Logits, *, scratch: int | None = None, backend: str | None = None) -> Tensor:
    """``[2, R]``: each row's sum of squared logits of student and teacher, which ``cosine`` needs.

    Args:
        student, teacher, scratch, backend: as in :func:`divergence_into`.
    """
    found = torch.empty(2, *student.lse.shape, dtype=student.projected.dtype, device=student.lse.device)
    if choose_backend(backend, [student.projected], dtypes=LOGIT_DTYPES) == "triton":
        count, columns = student.projected.shape
        if count:
            block = min(_BLOCK, triton.next_power_of_2(columns))
            sides = student.for_kernel(), teacher.for_kernel()
            squares_kernel[(count,)](*found, *sides, columns, BLOCK=block, num_warps=_WARPS)
        return found
    for rows in row_slices(student.projected, scratch):
        for i, model in enumerate((student, teacher)):
            found[i, rows] = model.rows(rows).logits().square().sum(1)
    return found


def _divergence_torch(
    student: Logits,
    teacher: Logits,
    divergence: Divergence,
    coefficients: Coefficients | None,
    labels: Tensor | None,
    sums: RowSums | None,
    parameter: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The reference implementation: the divergences ``[R]``, and the gradient ``[R, V]`` if there are coefficients."""
    log_p, transform = student.log_probs(), student.epilogue.transform
    known = None if sums is None or coefficients is None else sums.h
    if divergence.form == "cosine":
        squares = None if sums is None else sums.squares
        f, grad = cosine_terms(student.logits(), teacher.logits(), squares, known)
        total = f.sum(1)
    else:
        f, h = terms(divergence, log_p, teacher.log_probs(), parameter)
        total = h.sum(1) if known is None else known
        grad = h.addcmul_(log_p.exp(), total[:, None], value=-1.0)
    value = f.sum(1)
    if sums is not None and known is None:
        sums.h.copy_(total)
    if coefficients is None:
        return value, None
    coef, hard_p, hard_label, hard_lse = coefficients
    grad.mul_(coef[:, None])
    if hard_p is not None:
        assert hard_label is not None
        assert hard_lse is not None
        assert labels is not None
        # The same logits at temperature 1, and their gradients in units of this temperature.
        temperature = transform.column(log_p)
        hard = (log_p + student.lse[:, None]).mul_(temperature).sub_(hard_lse[:, None]).exp_()
        grad.addcmul_(hard, hard_p[:, None] * temperature)
        inside, at = labels < grad.shape[1], labels[:, None].clamp(max=grad.shape[1] - 1)
        added = torch.where(inside, hard_label, 0.0)[:, None] * temperature
        grad.scatter_(1, at, grad.gather(1, at) + added)
    return value, transform.chain_(grad, student.logits())


class Side(NamedTuple):
    """One model's :class:`Logits` in a kernel, which gets the log-sum-exp separately: it is a slice of a vector."""

    projected: Tensor
    stride: int
    bias: Tensor | None
    transform: KernelTransform


#: For the cosine distance.
_NO_SERIES = KernelSeries(0.0, 0.0, 0.0, 0.0, None, None)
#: Entries and warps of a program.
_BLOCK, _WARPS = 2048, 8
#: Programs for each multiprocessor, of which it runs some at a time: rows that are fewer are summed in parts.
_PROGRAMS = 8


def _divergence_triton(
    value: Tensor,
    models: list[Logits],
    divergence: Divergence,
    out: Tensor | None,
    c: Coefficients,
    labels: Any,
    sums: RowSums | None,
    parameter: Tensor | None,
    whole_rows: bool,
) -> None:
    student, teacher = models
    rows, columns = student.projected.shape
    temperature = student.epilogue.transform.temperature
    temperature = 1.0 if isinstance(temperature, Tensor) else float(temperature)  # a tensor is in the transform
    if not rows:
        return
    common: tuple[Any, ...] = (
        value, student.for_kernel(), teacher.for_kernel(), out, 0 if out is None else out.stride(0), columns,
        c.divergence, labels, *c[1:], temperature,
        None if sums is None else sums.h,
    )  # fmt: skip
    block, form = min(_BLOCK, triton.next_power_of_2(columns)), FORMS.get(divergence.form)
    launch: dict[str, Any] = {"BLOCK": block, "num_warps": _WARPS, "FORM": None, "BALANCED": False}
    squares = (None, None) if sums is None or sums.squares is None else sums.squares
    rest: tuple[Any, ...] = (None, None, None, _NO_SERIES, *squares)
    if form is not None:
        rest = (student.lse, teacher.lse, parameter, series_argument(divergence), None, None)
        launch |= {"FORM": form.triton, "BALANCED": form.balanced}
    parts = 1
    if out is None and not whole_rows and form is not None:
        parts = min(processors(value.device) * _PROGRAMS // rows, triton.cdiv(columns, block))
    if parts < 2:
        divergence_kernel[(rows, 1)](*common, *rest, **launch)
        return
    sums_of_parts = torch.empty(2, parts, rows, dtype=torch.float32, device=value.device)
    common = sums_of_parts[0], *common[1:-1], None if sums is None else sums_of_parts[1]
    divergence_kernel[(rows, parts)](*common, *rest, **launch)
    torch.sum(sums_of_parts[0], 0, out=value)
    if sums is not None:
        torch.sum(sums_of_parts[1], 0, out=sums.h)
