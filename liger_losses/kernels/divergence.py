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
from liger_losses.kernels._triton import INTERPRETED, LOGIT_DTYPES, choose_backend, jit, tl, triton
from liger_losses.kernels.divergence_forms import FORMS, Divergence, cosine_terms, finite_logs
from liger_losses.kernels.divergence_terms import KernelSeries, series_argument, terms, terms_block
from liger_losses.kernels.logit_transform import (
    Epilogue,
    KernelTransform,
    inverse_temperature,
    transform_block,
    transform_gradient,
)
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
        return Coefficients(*(None if v is None else v[rows] for v in self))  # type: ignore[arg-type]

    def contiguous(self) -> Coefficients:
        """The coefficients as kernels read them: for a plain sum, autograd passes them with a stride of 0."""
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
            _squares_kernel[(count,)](*found, *sides, columns, BLOCK=block, num_warps=_WARPS)
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
#: Entries and warps of a program that keeps its part of a row in registers, and the most parts of a row: at most one
#: for each multiprocessor, so that no part waits for one that cannot start. The interpreter runs one after the other.
_SHARED_BLOCK, _SHARED_WARPS = 4096, 4
_MOST_PARTS = 1 if INTERPRETED else 64


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
    shared = min(_SHARED_BLOCK, triton.next_power_of_2(columns))
    parts = triton.cdiv(columns, shared)
    waits = parts <= min(_MOST_PARTS, processors(value.device))
    if waits and out is not None and sums is None and form is not None and not form.balanced:
        places = torch.full((2 * rows * parts + 1,), -1, dtype=torch.int32, device=value.device)
        _shared_rows_kernel[(rows * parts,)](
            *common[:-1], *rest[:-2], places, parts, FORM=form.triton,
            PARTS=triton.next_power_of_2(parts), BLOCK=shared, num_warps=_SHARED_WARPS,
        )  # fmt: skip
        return
    parts = 1
    if out is None and not whole_rows and form is not None:
        parts = min(processors(value.device) * _PROGRAMS // rows, triton.cdiv(columns, block))
    if parts < 2:
        _divergence_kernel[(rows, 1)](*common, *rest, **launch)
        return
    sums_of_parts = torch.empty(2, parts, rows, device=value.device)
    common = sums_of_parts[0], *common[1:-1], None if sums is None else sums_of_parts[1]
    _divergence_kernel[(rows, parts)](*common, *rest, **launch)
    value.copy_(sums_of_parts[0].sum(0))
    if sums is not None:
        sums.h.copy_(sums_of_parts[1].sum(0))


@jit
def _both_logits(student, teacher, row, block, columns, inverse, BLOCK: tl.constexpr):
    """The columns of a block, which of them are inside the vocabulary, and a row's logits of both models there.

    Both models have the same temperatures; ``inverse`` is what :func:`inverse_temperature` returned.
    """
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    s = tl.load(student.projected + row * student.stride + at, mask=inside, other=0.0)
    t = tl.load(teacher.projected + row * teacher.stride + at, mask=inside, other=0.0)
    if student.bias is not None or student.transform.factor is not None:
        s = transform_block(s, student.bias, at, inside, student.transform, inverse)
    if teacher.bias is not None or teacher.transform.factor is not None:
        t = transform_block(t, teacher.bias, at, inside, teacher.transform, inverse)
    return at, inside, s, t


@jit
def _load_hard(labels, hard_p, hard_label, hard_lse, row):
    """A row's label, its factors of a hard loss, and its log-sum-exp; without a hard loss, unused numbers."""
    hard = (-1, 0.0, 0.0, 0.0)
    if hard_p is not None:
        label = tl.load(labels + row).to(tl.int32)
        hard = (label, tl.load(hard_p + row), tl.load(hard_label + row), tl.load(hard_lse + row))
    return hard


@jit
def _store_gradient(out, grad, s, at, inside, hard_p, hard, temperature, transform, inverse):
    """From d divergence / d logits to d loss / d projections of the student, whose logits are s.

    ``hard`` is what :func:`_load_hard` returned, of a hard loss if ``hard_p`` is not ``None``.
    """
    label, p_coef, label_coef, lse = hard
    if hard_p is not None:
        if transform.temperature is not None:
            temperature = 1.0 / inverse
        p1 = tl.exp(s * temperature - lse)
        grad += temperature * (p1 * p_coef + tl.where(at == label, label_coef, 0.0))
    if transform.factor is not None:
        grad = transform_gradient(grad, s, transform, inverse)
    tl.store(out + at, grad.to(out.dtype.element_ty), mask=inside)


@jit
def _row_squares(student, teacher, row, columns, BLOCK: tl.constexpr):
    """A row's sums of squared logits."""
    inverse = inverse_temperature(student.transform, row, True, 0)
    s_sum = tl.zeros((BLOCK,), tl.float32)
    t_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.cdiv(columns, BLOCK)):
        _at, inside, s, t = _both_logits(student, teacher, row, i, columns, inverse, BLOCK)
        s_sum += tl.where(inside, s * s, 0.0)
        t_sum += tl.where(inside, t * t, 0.0)
    return tl.sum(s_sum, 0), tl.sum(t_sum, 0)


@jit
def _terms(
    student, teacher, row, block, columns, inverse, s_lse, t_lse, a, series, FORM: tl.constexpr, BLOCK: tl.constexpr
):
    """The columns of a block, which of them are inside, the student's logits, and p, f and h.

    Without a form, of the cosine distance: f and h of unit vectors, whose scales are ``s_lse`` and ``t_lse``, and the
    student's in the place of p.
    """
    at, inside, s, t = _both_logits(student, teacher, row, block, columns, inverse, BLOCK)
    if FORM is None:
        p = s * s_lse
        h = p - t * t_lse
        f = h * h / 2
    else:
        s = tl.where(inside, s, float("-inf"))
        t = tl.where(inside, t, float("-inf"))
        p, f, h = terms_block(s, t, s_lse, t_lse, a, series, FORM)
    return at, inside, s, p, f, h


#: Arguments whose alignment is no reason to compile again: slices of vectors begin anywhere.
_VECTORS = ["value", "labels", "coef", "hard_p", "hard_label", "hard_lse", "row_sums"]
_OF_MODELS = ["student_lse", "teacher_lse", "parameter", "student_squares", "teacher_squares"]


@jit(do_not_specialize_on_alignment=[*_VECTORS, *_OF_MODELS])
def _divergence_kernel(
    value, student, teacher, out, out_stride, columns,
    coef, labels, hard_p, hard_label, hard_lse, temperature, row_sums,
    student_lse, teacher_lse, parameter, series, student_squares, teacher_squares,
    FORM: tl.constexpr, BALANCED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: its sums from left to right, then its gradient from right to left.

    The blocks read last are still in the cache when the gradient reads them again. For a balanced form, whose sum of h
    is known, the gradient's loop takes the sum of f as well. So it does where ``row_sums`` are given.

    Without a gradient, several programs may share a row: each writes the sums of its columns.

    Without a form, it is the cosine distance: the norms of both rows, which are there or computed first, take the place
    of the log-sum-exps, and the sum of f takes the place of the sum of h. Each loop then begins where the one before it
    ended.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if FORM is None:
        if student_squares is not None:
            s_square = tl.load(student_squares + row)
            t_square = tl.load(teacher_squares + row)
        else:
            s_square, t_square = _row_squares(student, teacher, row, columns, BLOCK)
        s_lse = 1 / tl.maximum(tl.sqrt(s_square), 1e-12)
        t_lse = 1 / tl.maximum(tl.sqrt(t_square), 1e-12)
    else:
        s_lse = tl.load(student_lse + row)
        t_lse = tl.load(teacher_lse + row)
    a = series.a
    if parameter is not None:
        a = tl.load(parameter + row)
    inverse = inverse_temperature(student.transform, row, True, 0)
    blocks = tl.cdiv(columns, BLOCK)
    f_sum = tl.zeros((BLOCK,), tl.float32)
    h_sum = tl.zeros((BLOCK,), tl.float32)
    if out is None or not (BALANCED or row_sums is not None):
        of_part = tl.cdiv(blocks, tl.num_programs(1))
        for i in range(part * of_part, tl.minimum((part + 1) * of_part, blocks)):
            block = i if FORM is not None else blocks - 1 - i
            at, inside, s, p, f, h = _terms(
                student, teacher, row, block, columns, inverse, s_lse, t_lse, a, series, FORM, BLOCK
            )
            f_sum += f
            h_sum += h if FORM is not None else f
    total = tl.sum(h_sum, 0)
    place = part * tl.num_programs(0) + row
    if out is None:
        if row_sums is not None:
            tl.store(row_sums + place, total)
    else:
        out += row * out_stride
        if row_sums is not None:
            total = tl.load(row_sums + row)
        row_coef = tl.load(coef + row)
        hard = _load_hard(labels, hard_p, hard_label, hard_lse, row)
        for i in range(blocks):
            block = blocks - 1 - i if FORM is not None else i
            at, inside, s, p, f, h = _terms(
                student, teacher, row, block, columns, inverse, s_lse, t_lse, a, series, FORM, BLOCK
            )
            if BALANCED or row_sums is not None:
                f_sum += f
            if BALANCED:
                grad = row_coef * h
            else:
                grad = row_coef * (h - p * total)
            if FORM is None:
                grad *= s_lse
            _store_gradient(out, grad, s, at, inside, hard_p, hard, temperature, student.transform, inverse)
    tl.store(value + place, tl.sum(f_sum, 0))


@jit
def _announce(place, total):
    """Write a sum that other programs wait for. They read -1 until then: no float32 that is written has these bits."""
    tl.atomic_xchg(place, tl.where(total == total, total, float("nan")).to(tl.int32, bitcast=True), sem="relaxed")


@jit
def _sum_of_announced(places, parts, PARTS: tl.constexpr):
    """Wait until all parts have announced their sums, and add them up."""
    part = tl.arange(0, PARTS)
    found = tl.load(places + part, mask=part < parts, other=0, volatile=True)
    while tl.max((found == -1).to(tl.int32), 0) > 0:
        found = tl.load(places + part, mask=part < parts, other=0, volatile=True)
    return tl.sum(found.to(tl.float32, bitcast=True), 0)


@jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=[*_VECTORS, *_OF_MODELS])
def _shared_rows_kernel(
    value, student, teacher, out, out_stride, columns,
    coef, labels, hard_p, hard_label, hard_lse, temperature,
    student_lse, teacher_lse, parameter, series, places, parts,
    FORM: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The divergence and the gradient of a form that is not balanced, from logits that are read once.

    ``parts`` programs share a row. Each keeps the terms of its columns until it has the sum of h of all.

    ``places`` are the number of programs that have started, less one, and the sums of each part's h and f, or -1. As
    programs are numbered in the order in which they start, all parts of the first row that is not complete are running
    or next to start.
    """
    number = tl.atomic_add(places, 1, sem="relaxed") + 1
    row = (number // parts).to(tl.int64)
    part = number % parts
    places += 1 + row * parts * 2
    a = series.a
    if parameter is not None:
        a = tl.load(parameter + row)
    inverse = inverse_temperature(student.transform, row, True, 0)
    s_lse = tl.load(student_lse + row)
    t_lse = tl.load(teacher_lse + row)
    at, inside, s, p, f, h = _terms(student, teacher, row, part, columns, inverse, s_lse, t_lse, a, series, FORM, BLOCK)
    _announce(places + part, tl.sum(h, 0))
    _announce(places + parts + part, tl.sum(f, 0))
    hard = _load_hard(labels, hard_p, hard_label, hard_lse, row)
    grad = tl.load(coef + row) * (h - p * _sum_of_announced(places, parts, PARTS))
    out += row * out_stride
    _store_gradient(out, grad, s, at, inside, hard_p, hard, temperature, student.transform, inverse)
    if part == 0:
        tl.store(value + row, _sum_of_announced(places + parts, parts, PARTS))


@jit(do_not_specialize_on_alignment=["student_out", "teacher_out"])
def _squares_kernel(student_out, teacher_out, student, teacher, columns, BLOCK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    s_square, t_square = _row_squares(student, teacher, row, columns, BLOCK)
    tl.store(student_out + row, s_square)
    tl.store(teacher_out + row, t_square)
