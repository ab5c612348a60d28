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

from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, triton
from liger_losses.kernels.divergence_forms import FORMS, SMALLEST_NORM, Divergence, cosine_terms, finite_logs
from liger_losses.kernels.divergence_kernels import (
    divergence_gradient_kernel,
    divergence_sums_kernel,
    squares_kernel,
)
from liger_losses.kernels.divergence_terms import Series, series_of, terms
from liger_losses.kernels.logit_transform import Epilogue, KernelTransform
from liger_losses.kernels.softmax_stats import row_slices
from liger_losses.kernels.targets import target_of

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


def divergence_sums(
    student: Logits,
    teacher: Logits,
    divergence: Divergence,
    *,
    squares: Tensor | None = None,
    parameter: Tensor | None = None,
    whole_rows: bool = False,
    scratch: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """``[2, R]``: each row's divergence, and its sum of h (of ``cosine``: the distance again), over these columns.

    Args:
        student, teacher: :class:`Logits` of both models, whose transforms have the same temperature.
        divergence: which divergence.
        squares: ``[2, R]``, of ``cosine``: the :func:`square_sums` of all columns.
        parameter: ``[R]``, the divergence's ``a`` of each row, where that follows from the teacher's entropy.
        whole_rows: sum each row in an order that does not depend on R, at the cost of idle processors for few rows.
        scratch: bytes for temporaries of the reference implementation; unbounded by default.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.
    """
    count, columns = student.projected.shape
    if _runs_in_triton(student, divergence, backend):
        block = min(_BLOCK, triton.next_power_of_2(columns))
        parts = target_of(student.lse.device).processors * _PROGRAMS // max(count, 1)
        parts = 1 if whole_rows else max(1, min(parts, triton.cdiv(columns, block)))
        sums = torch.empty(2, parts, count, dtype=torch.float32, device=student.lse.device)
        if count:
            models, launch = _for_kernel(student, teacher, divergence, squares, parameter)
            divergence_sums_kernel[(count, parts)](*sums, *models, columns, **launch, BLOCK=block, num_warps=_WARPS)
        return sums.sum(1) if parts > 1 else sums[:, 0]
    sums = student.projected.new_empty(2, count)
    for part in row_slices(student.projected, None if scratch is None else scratch * 4 // TEMPORARIES):
        # The sum of a single row would be shared by threads, and taken in another order.
        rows: Any = [part.start, part.start] if whole_rows and part.stop - part.start == 1 else part
        sides = student.rows(rows), teacher.rows(rows)
        if divergence.form == "cosine":
            f = h = cosine_terms(sides[0].logits(), sides[1].logits(), *_rows(rows, squares, 1))[0]
        else:
            f, h = terms(divergence, sides[0].log_probs(), sides[1].log_probs(), *_rows(rows, parameter))
        sums[:, part] = torch.stack([f.sum(1), h.sum(1)])[:, : part.stop - part.start]
        del f, h  # their memory is free before the next slice's temporaries are allocated
    return sums


def divergence_gradient_into(
    out: Tensor,
    student: Logits,
    teacher: Logits,
    divergence: Divergence,
    coefficients: Coefficients,
    h: Tensor,
    *,
    labels: Tensor | None = None,
    squares: Tensor | None = None,
    parameter: Tensor | None = None,
    scratch: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """The loss's gradient with respect to the student's projections.

    Args:
        out: ``[R, V]``, of any floating-point dtype; it may be the student's ``projected``.
        coefficients: the loss's derivatives.
        h: ``[R]``, the second of :func:`divergence_sums`, of all columns.
        labels: ``[R]`` int64, for the coefficients of a hard loss; from V on, they are labels of further columns.
        student, teacher, divergence, squares, parameter, scratch, backend: as in :func:`divergence_sums`.

    Returns:
        ``out``.
    """
    count, columns = student.projected.shape
    if _runs_in_triton(student, divergence, backend):
        # A temperature of each token is in the transform.
        temperature, c = student.epilogue.transform.temperature, coefficients.contiguous()
        if count:
            models, launch = _for_kernel(student, teacher, divergence, squares, parameter)
            divergence_gradient_kernel[(count,)](
                out, out.stride(0), *models, columns, h, c.divergence, labels, *c[1:],
                1.0 if isinstance(temperature, Tensor) else float(temperature), **launch,
                BALANCED=divergence.form in FORMS and FORMS[divergence.form].balanced,
                BLOCK=min(_BLOCK, triton.next_power_of_2(columns)), num_warps=_WARPS,
            )  # fmt: skip
        return out
    for rows in row_slices(student.projected, None if scratch is None else scratch * 4 // TEMPORARIES):
        sides, c = (student.rows(rows), teacher.rows(rows)), coefficients.rows(rows)
        of_rows = *_rows(rows, labels), *_rows(rows, squares, 1), *_rows(rows, parameter)
        out[rows].copy_(_gradient_torch(*sides, divergence, c, h[rows], *of_rows))
    return out


def _rows(rows: Any, values: Tensor | None, dimension: int = 0) -> tuple[Tensor | None]:
    return (None if values is None else values[:, rows] if dimension else values[rows],)


def square_sums(student: Logits, teacher: Logits, *, scratch: int | None = None, backend: str | None = None) -> Tensor:
    """``[2, R]``: each row's sum of squared logits of student and teacher, which ``cosine`` needs.

    Args:
        student, teacher, scratch, backend: as in :func:`divergence_sums`.
    """
    squares = torch.empty(2, *student.lse.shape, dtype=student.projected.dtype, device=student.lse.device)
    if choose_backend(backend, [student.projected], dtypes=LOGIT_DTYPES) == "triton":
        count, columns = student.projected.shape
        if count:
            block = min(_BLOCK, triton.next_power_of_2(columns))
            sides = student.for_kernel(), teacher.for_kernel()
            squares_kernel[(count,)](*squares, *sides, columns, BLOCK=block, num_warps=_WARPS)
        return squares
    for rows in row_slices(student.projected, scratch):
        for i, model in enumerate((student, teacher)):
            squares[i, rows] = model.rows(rows).logits().square().sum(1)
    return squares


def _gradient_torch(
    student: Logits,
    teacher: Logits,
    divergence: Divergence,
    c: Coefficients,
    total: Tensor,
    labels: Tensor | None,
    squares: Tensor | None,
    parameter: Tensor | None,
) -> Tensor:
    """The reference implementation, ``[R, V]``; ``total`` is the sum of h."""
    log_p, transform = student.log_probs(), student.epilogue.transform
    if divergence.form == "cosine":
        _, grad = cosine_terms(student.logits(), teacher.logits(), squares, total)
    else:
        _, h = terms(divergence, log_p, teacher.log_probs(), parameter)
        grad = h.addcmul_(log_p.exp(), total[:, None], value=-1.0)
    grad.mul_(c.divergence[:, None])
    if c.hard_p is not None:
        assert c.hard_label is not None
        assert c.hard_lse is not None
        assert labels is not None
        # The same logits at temperature 1, and their gradients in units of this temperature.
        temperature = transform.column(log_p)
        hard = (log_p + student.lse[:, None]).mul_(temperature).sub_(c.hard_lse[:, None]).exp_()
        grad.addcmul_(hard, c.hard_p[:, None] * temperature)
        inside, at = labels < grad.shape[1], labels[:, None].clamp(max=grad.shape[1] - 1)
        added = torch.where(inside, c.hard_label, 0.0)[:, None] * temperature
        grad.scatter_(1, at, grad.gather(1, at) + added)
    return transform.chain_(grad, student.logits())


class Side(NamedTuple):
    """One model's :class:`Logits` in a kernel, which gets the log-sum-exp separately: it is a slice of a vector."""

    projected: Tensor
    stride: int
    bias: Tensor | None
    transform: KernelTransform


#: For the cosine distance.
_NO_SERIES = Series(0.0, 0.0, 0.0)
#: Entries and warps of a program.
_BLOCK, _WARPS = 2048, 8
#: Programs for each multiprocessor, of which it runs some at a time: rows that are fewer are summed in parts.
_PROGRAMS = 8


def _runs_in_triton(student: Logits, divergence: Divergence, backend: str | None) -> bool:
    return divergence.has_kernel and choose_backend(backend, [student.projected], dtypes=LOGIT_DTYPES) == "triton"


def _for_kernel(
    student: Logits, teacher: Logits, divergence: Divergence, squares: Tensor | None, parameter: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What both kernels are given of the models and the divergence; of the cosine, inverse norms as log-sum-exps."""
    scales, series, form = [student.lse, teacher.lse], _NO_SERIES, None
    if divergence.form == "cosine":
        assert squares is not None
        scales = list(squares.sqrt().clamp_(min=SMALLEST_NORM).reciprocal_())
    else:
        series, form = series_of(divergence), FORMS[divergence.form].triton
    return (student.for_kernel(), teacher.for_kernel(), *scales, parameter, series), {"FORM": form}
