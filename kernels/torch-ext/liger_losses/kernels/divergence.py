"""Divergences between two softmaxes, and their gradients, from both models' projections.

R rows (tokens), V columns (vocabulary). p is the student's softmax, q the teacher's, d = log p - log q.

Every divergence is a sum over the vocabulary of a function f of log p and log q, and with h = df / d log p its
gradient with respect to the student's logits is ``h - p sum(h)``: two sums per row, then one formula per entry.

Close to the teacher, a divergence is a second-order quantity made of first-order terms that cancel. Two rules keep its
digits: f is written so that no entry is negative (adding multiples of p - q, whose sum is 0, changes nothing), and
where d is small, f and h are computed as power series in d times a power of q.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels._tiles import processors
from ..kernels._triton import LOGIT_DTYPES, choose_backend, jit, tl, triton
from ..kernels.divergence_cosine import cosine_kernel, cosine_terms, squares_kernel
from ..kernels.divergence_forms import (
    FORMS,
    PLACES,
    VECTORS,
    Divergence,
    load_hard,
    projection_gradient_block,
    series_of,
    terms,
    terms_block,
)
from ..kernels.logit_transform import Epilogue, inverse_temperature
from ..kernels.softmax_stats import row_slices
from ..kernels.sums_of_both import Side, both_logits, log_sum_exp, log_sum_exp_of_parts

#: A probability of 0 has log p = -inf, and 0 * -inf is not 0 in floating point.
_LOWEST = -1e4
#: Temporaries of the reference implementation, each as large as the rows it works on.
TEMPORARIES = 16


class Logits(NamedTuple):
    """One model's projections ``[R, V]`` (fp32 or fp64), the log-sum-exp ``[R]`` of its logits, and what turns the
    projections into logits.

    With ``sums``, its part ``[2, R, P]`` of :func:`~liger_losses.kernels.sums_of_both.sums_of_both`,
    :func:`divergence_into` and :func:`divergence_sums_into` write ``lse`` before they read it (of ``cosine``, they do
    neither). Both models have them, or none.
    """

    projected: Tensor
    lse: Tensor
    epilogue: Epilogue = Epilogue()
    sums: Tensor | None = None

    def rows(self, rows: slice) -> Logits:
        sums = None if self.sums is None else self.sums[:, rows]
        return Logits(self.projected[rows], self.lse[rows], self.epilogue.rows(rows), sums)

    def logits(self) -> Tensor:
        return self.epilogue(self.projected)

    def for_kernel(self) -> Side:
        """The argument of the kernels."""
        return Side.of(self.projected, self.epilogue)

    def log_probs(self) -> Tensor:
        return (self.logits() - self.lse[:, None]).clamp_(min=_LOWEST)


class RowSums(NamedTuple):
    """Sums over a row of the whole vocabulary, ``[R]`` each, where both models' projections are a part of it.

    Args:
        h: sum of h (of ``cosine``: the distance). Without ``out``, it is written as the value is: this part's sum.
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
        return Coefficients(*(None if v is None else v[rows] for v in self))  # type: ignore[arg-type]

    def contiguous(self) -> Coefficients:
        """The coefficients as kernels read them: autograd hands on those of a plain sum with a stride of 0."""
        return Coefficients(*(None if v is None else v.contiguous() for v in self))  # type: ignore[arg-type]


def divergence_into(
    value: Tensor,
    student: Logits,
    teacher: Logits,
    divergence: Divergence,
    *,
    out: Tensor | None = None,
    coefficients: Coefficients | None = None,
    labels: Tensor | None = None,
    first_column: int = 0,
    sums: RowSums | None = None,
    accumulate: bool = False,
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
        labels: ``[R]`` int64, for the coefficients of a hard loss; those of no column here are labels of others.
        first_column: the label of the first column.
        sums: where the projections are a part of the vocabulary; the divergences are then sums over this part.
        accumulate: add to ``value`` instead of overwriting it.
        scratch: bytes for temporaries of the reference implementation; unbounded by default.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.

    Returns:
        ``value``.
    """
    if choose_backend(backend, [student.projected], dtypes=LOGIT_DTYPES) == "triton":
        c = (coefficients or Coefficients(value)).contiguous()
        _divergence_triton(value, [student, teacher], divergence, out, c, labels, first_column, sums, accumulate)
        return value
    _write_log_sum_exps(student, teacher, divergence)
    write = Tensor.add_ if accumulate else Tensor.copy_
    for rows in row_slices(student.projected, None if scratch is None else scratch * 4 // TEMPORARIES):
        part = None if out is None or coefficients is None else coefficients.rows(rows)
        row_labels = None if labels is None else labels[rows] - first_column
        row_sums = None if sums is None else sums.rows(rows)
        sides = student.rows(rows), teacher.rows(rows)
        found, total, grad = _divergence_torch(*sides, divergence, part, row_labels, row_sums)
        write(value[rows], found)
        if row_sums is not None and part is None:
            write(row_sums.h, total)
        if out is not None and grad is not None:
            out[rows].copy_(grad)
        del grad  # its memory is free before the next slice's temporaries are allocated
    return value


def divergence_sums_into(
    found: Tensor, student: Logits, teacher: Logits, divergence: Divergence, *, backend: str = "torch"
) -> None:
    """Each row's divergence and sum of h, in P parts, of which the caller takes the sum: of many rows at once.

    Args:
        found: ``[2, P, R]``, the tensor to write both into, rows contiguous. :func:`row_parts` says which P is fast.
        student, teacher, backend: as in :func:`divergence_into`.
        divergence: which divergence; not ``cosine``.
    """
    if backend == "torch":
        found.zero_()
        divergence_into(found[0, 0], student, teacher, divergence, sums=RowSums(found[1, 0]), backend=backend)
        return
    rows = len(student.projected)
    if rows:
        arguments, launch = _arguments(found[0, 0], student, teacher, None, Coefficients(found), found[1, 0])
        rest, options = _arguments_of_form(student, teacher, divergence)
        grid = rows, found.shape[1]
        _divergence_kernel[grid](**arguments, **rest, part_stride=found.stride(1), **launch, **options)


def row_parts(rows: int, columns: int, device: torch.device) -> int:
    """How many programs share a row, where rows are so few that they would leave multiprocessors idle."""
    blocks = triton.cdiv(columns, min(_BLOCK, triton.next_power_of_2(columns)))
    return max(1, min(processors(device) * _PROGRAMS // rows, blocks)) if rows else 1


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
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The reference implementation: the divergences and the sums of h ``[R]``, and the gradient ``[R, V]`` if there are
    coefficients. ``labels`` count from the first column."""
    log_p, transform = student.log_probs(), student.epilogue.transform
    known = None if sums is None or coefficients is None else sums.h
    if divergence.form == "cosine":
        squares = None if sums is None else sums.squares
        f, grad = cosine_terms(student.logits(), teacher.logits(), squares, known)
        total = f.sum(1)
    else:
        f, h = terms(divergence, log_p, teacher.log_probs())
        total = h.sum(1) if known is None else known
        grad = h.addcmul_(log_p.exp(), total[:, None], value=-1.0)
    value = f.sum(1)
    if coefficients is None:
        return value, total, None
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
        inside, at = (labels >= 0) & (labels < grad.shape[1]), labels[:, None].clamp(0, grad.shape[1] - 1)
        added = torch.where(inside, hard_label, 0.0)[:, None] * temperature
        grad.scatter_(1, at, grad.gather(1, at) + added)
    return value, total, transform.chain_(grad, student.logits())


def _write_log_sum_exps(student: Logits, teacher: Logits, divergence: Divergence) -> None:
    """Those that are to be taken from sums of parts of the rows."""
    for model in (student, teacher):
        if model.sums is not None and divergence.form != "cosine":
            model.lse.copy_(log_sum_exp(model.sums))


class KernelSeries(NamedTuple):
    """A divergence's parameters and power series in a kernel; see :func:`series_argument`."""

    a: float
    b: float
    c: float
    radius: float
    power: float | None
    coefficients: tuple[float, ...] | None  # arguments, which the device reads from its constant memory


@cache
def series_argument(divergence: Divergence) -> KernelSeries:
    """``coefficients`` are f's of d^2 to d^8 and h's of d to d^8, ``None`` without a series; ``power`` is ``None`` for
    1."""
    series = series_of(divergence)
    a, b, c = (float(parameter) for parameter in (divergence.a, divergence.b, divergence.c))
    power = None if series.power == 1 else float(series.power)
    coefficients = None
    if series.radius > 0:
        coefficients = *series.f[2:], *series.h[1:]
    return KernelSeries(a, b, c, series.radius, power, coefficients)


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
    labels: Tensor | None,
    first_column: int,
    sums: RowSums | None,
    accumulate: bool,
) -> None:
    student, teacher = models
    rows, columns = student.projected.shape
    if not rows:
        return
    cosine, h = divergence.form == "cosine", None if sums is None else sums.h
    parts = row_parts(rows, columns, value.device) if out is None and not cosine else 1
    if parts > 1:
        found, write = torch.empty(2, parts, rows, device=value.device), Tensor.add_ if accumulate else Tensor.copy_
        divergence_sums_into(found, student, teacher, divergence, backend="triton")
        write(value, found[0].sum(0))
        if h is not None:
            write(h, found[1].sum(0))
        return
    arguments, launch = _arguments(value, student, teacher, out, c, h)
    arguments |= {"labels": labels, "first_column": first_column, "ACCUMULATE": accumulate}
    if cosine:
        squares = (None, None) if sums is None or sums.squares is None else sums.squares
        cosine_kernel[(rows,)](**arguments, student_squares=squares[0], teacher_squares=squares[1], **launch)
        return
    rest, options = _arguments_of_form(student, teacher, divergence)
    _divergence_kernel[(rows, 1)](**arguments, **rest, part_stride=0, **launch, **options)


def _arguments(
    value: Tensor, student: Logits, teacher: Logits, out: Tensor | None, c: Coefficients, h: Tensor | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """What both kernels take, without labels by default; and how they are launched."""
    columns, temperature = student.projected.shape[1], student.epilogue.transform.temperature
    arguments = {
        "value": value,
        "student": student.for_kernel(),
        "teacher": teacher.for_kernel(),
        "out": out,
        "out_stride": 0 if out is None else out.stride(0),
        "columns": columns,
        "coef": None if out is None else c.divergence,
        "labels": None,
        "first_column": 0,
        "hard_p": c.hard_p,
        "hard_label": c.hard_label,
        "hard_lse": c.hard_lse,
        "temperature": 1.0 if isinstance(temperature, Tensor) else float(temperature),  # a tensor is in the transform
        "row_sums": h,
        "ACCUMULATE": False,
    }
    return arguments, {"BLOCK": min(_BLOCK, triton.next_power_of_2(columns)), "num_warps": _WARPS}


def _arguments_of_form(
    student: Logits, teacher: Logits, divergence: Divergence
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the kernel of all divergences but ``cosine`` takes beside, and its options."""
    form, parts = FORMS[divergence.form], 0 if student.sums is None else student.sums.shape[2]
    arguments = {
        "student_lse": student.lse,
        "teacher_lse": teacher.lse,
        "student_sums": student.sums,
        "teacher_sums": teacher.sums,
        "lse_parts": parts,
        "series": series_argument(divergence),
    }
    padded_parts = triton.next_power_of_2(parts) if parts else 0
    return arguments, {"FORM": form.triton, "BALANCED": form.balanced, "LSE_PARTS": padded_parts}


@jit(
    do_not_specialize=PLACES,
    do_not_specialize_on_alignment=[*VECTORS, "student_lse", "teacher_lse", "student_sums", "teacher_sums"],
)
def _divergence_kernel(
    value, student, teacher, out, out_stride, columns,
    coef, labels, first_column, hard_p, hard_label, hard_lse, temperature, row_sums,
    student_lse, teacher_lse, student_sums, teacher_sums, lse_parts, series, part_stride,
    FORM: tl.constexpr, BALANCED: tl.constexpr, ACCUMULATE: tl.constexpr, LSE_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: its sums from left to right, then its gradient from right to left.

    The blocks read last are still in the cache when the gradient reads them again. For a balanced form, whose sum of h
    is known, the gradient's loop takes the sum of f as well. So it does where ``row_sums`` are given.

    Without a gradient, several programs may share a row: each writes the sums of its columns.

    With ``student_sums``, each program takes the log-sum-exps from the sums of the row's parts, and the first writes
    them.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if student_sums is not None:
        s_lse = log_sum_exp_of_parts(student_sums, row, tl.num_programs(0), lse_parts, LSE_PARTS)
        t_lse = log_sum_exp_of_parts(teacher_sums, row, tl.num_programs(0), lse_parts, LSE_PARTS)
        if part == 0:
            tl.store(student_lse + row, s_lse)
            tl.store(teacher_lse + row, t_lse)
    else:
        s_lse = tl.load(student_lse + row)
        t_lse = tl.load(teacher_lse + row)
    inverse = 1.0
    if student.transform.temperature is not None:
        inverse = inverse_temperature(student.transform, row, True, 0)
    blocks = tl.cdiv(columns, BLOCK)
    f_sum = tl.zeros((BLOCK,), tl.float32)
    h_sum = tl.zeros((BLOCK,), tl.float32)
    if out is None or not (BALANCED or row_sums is not None):
        of_part = tl.cdiv(blocks, tl.num_programs(1))
        for i in range(part * of_part, tl.minimum((part + 1) * of_part, blocks)):
            at, inside, s, t = both_logits(student, teacher, row, i, columns, inverse, BLOCK)
            s = tl.where(inside, s, float("-inf"))
            t = tl.where(inside, t, float("-inf"))
            p, f, h = terms_block(s, t, s_lse, t_lse, series, FORM)
            f_sum += f
            h_sum += h
    total = tl.sum(h_sum, 0)
    place = part * part_stride + row
    if out is None:
        if row_sums is not None:
            if ACCUMULATE:
                total += tl.load(row_sums + place)
            tl.store(row_sums + place, total)
    else:
        out += row * out_stride
        if row_sums is not None:
            total = tl.load(row_sums + row)
        row_coef = tl.load(coef + row)
        if hard_p is not None:
            hard = load_hard(hard_p, hard_label, hard_lse, row, True)
            label = (tl.load(labels + row) - first_column).to(tl.int32)
        else:
            hard = (None, None, None)
            label = -1
        for i in range(blocks):
            at, inside, s, t = both_logits(student, teacher, row, blocks - 1 - i, columns, inverse, BLOCK)
            s = tl.where(inside, s, float("-inf"))
            t = tl.where(inside, t, float("-inf"))
            p, f, h = terms_block(s, t, s_lse, t_lse, series, FORM)
            if BALANCED or row_sums is not None:
                f_sum += f
            if BALANCED:
                grad = row_coef * h
            else:
                grad = row_coef * (h - p * total)
            grad = projection_gradient_block(grad, s, at == label, hard, temperature, student.transform, inverse)
            tl.store(out + at, grad.to(out.dtype.element_ty), mask=inside)
    divergence = tl.sum(f_sum, 0)
    if ACCUMULATE:
        divergence += tl.load(value + place)
    tl.store(value + place, divergence)
