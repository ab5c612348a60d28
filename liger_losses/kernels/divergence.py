"""Divergences between two softmaxes, and their gradients, from both models' projections.

R rows (tokens), V columns (vocabulary). p is the student's softmax, q the teacher's, d = log p - log q.

Every divergence is a sum over the vocabulary of a function f of log p and log q, and with h = df / d log p its
gradient with respect to the student's logits is ``h - p sum(h)``: two sums per row, then one formula per entry.

Close to the teacher, a divergence is a second-order quantity made of first-order terms that cancel. Two rules keep its
digits: f is written so that no entry is negative (adding multiples of p - q, whose sum is 0, changes nothing), and
where d is small, f and h are power series in d times a power of q.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, jit, tl, triton
from liger_losses.kernels.divergence_forms import _TERMS, FORMS, Divergence, Series, _cosine, terms
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform, transform_block
from liger_losses.kernels.softmax_stats import row_slices

#: A probability of 0 has log p = -inf, and 0 * -inf is not 0 in floating point.
_LOWEST = -1e4
#: Temporaries of the torch twin, in blocks of the slice it works on.
TEMPORARIES = 16


class Logits(NamedTuple):
    """One model's projections ``[R, V]`` (fp32 or fp64), the log-sum-exp ``[R]`` of its logits, and what turns the
    projections into logits."""

    projected: Tensor
    lse: Tensor
    epilogue: Epilogue = Epilogue()

    def rows(self, rows: slice) -> Logits:
        return Logits(self.projected[rows], self.lse[rows], self.epilogue)

    def logits(self) -> Tensor:
        return self.epilogue(self.projected)

    @property
    def transform(self) -> LogitTransform:
        return self.epilogue.transform

    @property
    def bias(self) -> Tensor | None:
        return self.epilogue.bias

    def log_probs(self) -> Tensor:
        return (self.logits() - self.lse[:, None]).clamp_(min=_LOWEST)


class Coefficients(NamedTuple):
    """d loss / d statistic of each row, ``[R]``: of the divergence and, with the softmax p1 of the logits at
    temperature 1, ``hard_p p1 + hard_label onehot(label)``."""

    divergence: Tensor
    hard_p: Tensor | None = None
    hard_label: Tensor | None = None
    hard_lse: Tensor | None = None

    def rows(self, rows: slice) -> Coefficients:
        return Coefficients(*(None if v is None else v[rows] for v in self))  # type: ignore[arg-type]


def divergence_into(
    value: Tensor,
    student: Logits,
    teacher: Logits,
    divergence: Divergence,
    *,
    out: Tensor | None = None,
    coefficients: Coefficients | None = None,
    labels: Tensor | None = None,
    scratch: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Each row's divergence and, if asked for, the loss's gradient with respect to the student's projections.

    Args:
        value: ``[R]``, where the divergences go.
        student, teacher: :class:`Logits` of both; both transforms divide by the same temperature.
        divergence: which.
        out: ``[R, V]`` for the gradient, of any floating-point dtype; it may be the student's ``projected``.
        coefficients: what the gradient is multiplied by; needed with ``out``.
        labels: ``[R]`` int64, for the coefficients of a hard loss.
        scratch: bytes for temporaries of the torch twin; unbounded by default.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.

    Returns:
        ``value``.
    """
    if choose_backend(backend, [student.projected], dtypes=LOGIT_DTYPES) == "triton":
        _divergence_triton(value, student, teacher, divergence, out, coefficients, labels)
        return value
    for rows in row_slices(student.projected, None if scratch is None else scratch * 4 // TEMPORARIES):
        grad = _divergence_torch(
            value[rows],
            student.rows(rows),
            teacher.rows(rows),
            divergence,
            None if out is None or coefficients is None else coefficients.rows(rows),
            None if labels is None else labels[rows],
        )
        if out is not None and grad is not None:
            out[rows].copy_(grad)
        del grad  # or it would still be there beside the next slice's
    return value


def _divergence_torch(
    value: Tensor,
    student: Logits,
    teacher: Logits,
    divergence: Divergence,
    coefficients: Coefficients | None,
    labels: Tensor | None,
) -> Tensor | None:
    """The reference: the gradient ``[R, V]`` if there are coefficients."""
    log_p, transform = student.log_probs(), student.transform
    if divergence.form == "cosine":
        f, grad = _cosine(student.logits(), teacher.logits())
    else:
        f, h = terms(divergence, log_p, teacher.log_probs())
        grad = h.addcmul_(log_p.exp(), h.sum(1, keepdim=True), value=-1.0)
    value.copy_(f.sum(1))
    if coefficients is None:
        return None
    grad.mul_(coefficients.divergence[:, None])
    if coefficients.hard_p is not None:
        assert coefficients.hard_lse is not None
        assert coefficients.hard_label is not None
        assert labels is not None
        # The same logits at temperature 1, and their gradients in units of this temperature.
        hard = (log_p + student.lse[:, None]).mul_(transform.temperature).sub_(coefficients.hard_lse[:, None]).exp_()
        grad.addcmul_(hard, coefficients.hard_p[:, None], value=transform.temperature)
        at_label = grad.gather(1, labels[:, None]) + coefficients.hard_label[:, None] * transform.temperature
        grad.scatter_(1, labels[:, None], at_label)
    return transform.chain_(grad, student.logits())


@cache
def _series_on(series: Callable[..., Series], a: float, b: float, c: float, device: torch.device) -> Tensor:
    """``[2, 9]`` fp32: the coefficients where the kernel reads them."""
    found = series(a, b, c)
    padded = [[*part, *[0.0] * (_TERMS - len(part))] for part in (found.f, found.h)]
    return torch.tensor(padded, dtype=torch.float32, device=device)


#: Entries and warps of a program.
_BLOCK, _WARPS = 2048, 8


def _divergence_triton(
    value: Tensor,
    student: Logits,
    teacher: Logits,
    divergence: Divergence,
    out: Tensor | None,
    coefficients: Coefficients | None,
    labels: Tensor | None,
) -> None:
    rows, columns = student.projected.shape
    if not rows:
        return
    own, theirs = student.transform.kernel_arguments(), teacher.transform.kernel_arguments()
    given = coefficients or Coefficients(value)
    common = {
        "value": value,
        "student": student.projected,
        "teacher": teacher.projected,
        "out": out,
        "student_stride": student.projected.stride(0),
        "teacher_stride": teacher.projected.stride(0),
        "out_stride": 0 if out is None else out.stride(0),
        "student_bias": student.bias,
        "teacher_bias": teacher.bias,
        "labels": labels,
        "divergence_coef": given.divergence.contiguous(),
        "hard_p": given.hard_p,
        "hard_label": given.hard_label,
        "hard_lse": given.hard_lse,
        "columns": columns,
        "student_scale": own["scale"],
        "student_softcap": own["softcap"],
        "teacher_scale": theirs["scale"],
        "teacher_softcap": theirs["softcap"],
        "temperature": float(student.transform.temperature),
        "GRADIENT": out is not None,
        "HAS_HARD": given.hard_p is not None,
        "STUDENT_SCALE": own["HAS_SCALE"],
        "STUDENT_SOFTCAP": own["HAS_SOFTCAP"],
        "TEACHER_SCALE": theirs["HAS_SCALE"],
        "TEACHER_SOFTCAP": theirs["HAS_SOFTCAP"],
        "STUDENT_BIAS": student.bias is not None,
        "TEACHER_BIAS": teacher.bias is not None,
        "BLOCK": min(_BLOCK, triton.next_power_of_2(columns)),
        "num_warps": _WARPS,
    }
    if divergence.form == "cosine":
        _cosine_kernel[(rows,)](**common)
        return
    form, parameters = FORMS[divergence.form], (divergence.a, divergence.b, divergence.c)
    series = form.series(*parameters)
    _divergence_kernel[(rows,)](
        **common,
        student_lse=student.lse,
        teacher_lse=teacher.lse,
        a=parameters[0],
        b=parameters[1],
        c=parameters[2],
        series=_series_on(form.series, *parameters, value.device),
        radius=series.radius,
        power=series.power,
        FORM=form.triton,
        BALANCED=form.balanced,
        SERIES=series.radius > 0,
        POWER=series.power != 1,
    )


@jit
def _both_logits(
    student,
    teacher,
    at,
    inside,
    student_bias,
    teacher_bias,
    student_scale,
    student_softcap,
    teacher_scale,
    teacher_softcap,
    inverse_temperature,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    STUDENT_BIAS: tl.constexpr,
    TEACHER_BIAS: tl.constexpr,
):
    """A block of either model's logits, 0 outside of the vocabulary."""
    s = tl.load(student + at, mask=inside, other=0.0)
    t = tl.load(teacher + at, mask=inside, other=0.0)
    if STUDENT_BIAS:
        s += tl.load(student_bias + at, mask=inside, other=0.0).to(tl.float32)
    if TEACHER_BIAS:
        t += tl.load(teacher_bias + at, mask=inside, other=0.0).to(tl.float32)
    s = transform_block(s, student_scale, student_softcap, inverse_temperature, STUDENT_SCALE, STUDENT_SOFTCAP)
    t = transform_block(t, teacher_scale, teacher_softcap, inverse_temperature, TEACHER_SCALE, TEACHER_SOFTCAP)
    return s, t


@jit
def _projection_gradient(
    grad,
    s,
    at,
    row,
    labels,
    hard_p,
    hard_label,
    hard_lse,
    temperature,
    scale,
    softcap,
    HAS_HARD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """From the gradient by the student's logits s, with a hard loss's added, to that by its projections."""
    if HAS_HARD:
        p1 = tl.exp(s * temperature - tl.load(hard_lse + row))
        at_label = at == tl.load(labels + row).to(tl.int32)
        hard = p1 * tl.load(hard_p + row) + tl.where(at_label, tl.load(hard_label + row), 0.0)
        grad += temperature * hard
    if HAS_SOFTCAP:
        x = s * temperature / softcap
        grad *= 1 - x * x
    if HAS_SCALE:
        grad *= scale / temperature
    return grad


@jit
def _terms_t(
    log_p,
    log_q,
    a,
    b,
    c,
    series,
    radius,
    power,
    FORM: tl.constexpr,
    SERIES: tl.constexpr,
    POWER: tl.constexpr,
):
    """f and h of a block."""
    f, h = FORM(log_p, log_q, a, b, c)
    if SERIES:
        d = log_p - log_q
        near = tl.abs(d) < radius
        q = tl.exp(power * log_q) if POWER else tl.exp(log_q)
        # f begins with d^2, h with d.
        of_f = tl.load(series + 8)
        of_h = tl.load(series + 17)
        for n in tl.static_range(6):
            of_f = of_f * d + tl.load(series + 7 - n)
            of_h = of_h * d + tl.load(series + 16 - n)
        of_h = of_h * d + tl.load(series + 10)
        f = tl.where(near, q * d * d * of_f, f)
        h = tl.where(near, q * d * of_h, h)
    return f, h


@jit(
    do_not_specialize_on_alignment=[
        "value",
        "student_lse",
        "teacher_lse",
        "student_bias",
        "teacher_bias",
        "labels",
        "divergence_coef",
        "hard_p",
        "hard_label",
        "hard_lse",
    ],
)
def _divergence_kernel(
    value,
    student,
    teacher,
    out,
    student_stride,
    teacher_stride,
    out_stride,
    student_bias,
    teacher_bias,
    labels,
    divergence_coef,
    hard_p,
    hard_label,
    hard_lse,
    columns,
    student_scale,
    student_softcap,
    teacher_scale,
    teacher_softcap,
    temperature,
    student_lse,
    teacher_lse,
    a,
    b,
    c,
    series,
    radius,
    power,
    FORM: tl.constexpr,
    BALANCED: tl.constexpr,
    SERIES: tl.constexpr,
    POWER: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_HARD: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    STUDENT_BIAS: tl.constexpr,
    TEACHER_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: its sums from left to right, then its gradient from right to left.

    What was read last is still in the cache when the gradient reads it again. Where the sum of h is known, the
    gradient's loop takes the sum of f as well.
    """
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    s_lse = tl.load(student_lse + row)
    t_lse = tl.load(teacher_lse + row)
    blocks = tl.cdiv(columns, BLOCK)
    f_sum = tl.zeros((BLOCK,), tl.float32)
    h_sum = tl.zeros((BLOCK,), tl.float32)
    if not (BALANCED and GRADIENT):
        for i in range(blocks):
            at = i * BLOCK + tl.arange(0, BLOCK)
            s, t = _both_logits(
                student,
                teacher,
                at,
                at < columns,
                student_bias,
                teacher_bias,
                student_scale,
                student_softcap,
                teacher_scale,
                teacher_softcap,
                1 / temperature,
                STUDENT_SCALE,
                STUDENT_SOFTCAP,
                TEACHER_SCALE,
                TEACHER_SOFTCAP,
                STUDENT_BIAS,
                TEACHER_BIAS,
            )
            log_p = tl.where(at < columns, tl.maximum(s - s_lse, -1e4), -1e4)
            log_q = tl.where(at < columns, tl.maximum(t - t_lse, -1e4), -1e4)
            f, h = _terms_t(log_p, log_q, a, b, c, series, radius, power, FORM, SERIES, POWER)
            f_sum += f
            h_sum += h
    if GRADIENT:
        out += row * out_stride
        total = tl.sum(h_sum, 0)
        coef = tl.load(divergence_coef + row)
        for i in range(blocks):
            at = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
            s, t = _both_logits(
                student,
                teacher,
                at,
                at < columns,
                student_bias,
                teacher_bias,
                student_scale,
                student_softcap,
                teacher_scale,
                teacher_softcap,
                1 / temperature,
                STUDENT_SCALE,
                STUDENT_SOFTCAP,
                TEACHER_SCALE,
                TEACHER_SOFTCAP,
                STUDENT_BIAS,
                TEACHER_BIAS,
            )
            log_p = tl.where(at < columns, tl.maximum(s - s_lse, -1e4), -1e4)
            log_q = tl.where(at < columns, tl.maximum(t - t_lse, -1e4), -1e4)
            f, h = _terms_t(log_p, log_q, a, b, c, series, radius, power, FORM, SERIES, POWER)
            if BALANCED:
                f_sum += f
                grad = coef * h
            else:
                grad = coef * (h - tl.exp(log_p) * total)
            grad = _projection_gradient(
                grad,
                s,
                at,
                row,
                labels,
                hard_p,
                hard_label,
                hard_lse,
                temperature,
                student_scale,
                student_softcap,
                HAS_HARD,
                STUDENT_SCALE,
                STUDENT_SOFTCAP,
            )
            tl.store(out + at, grad.to(out.dtype.element_ty), mask=at < columns)
    tl.store(value + row, tl.sum(f_sum, 0))


@jit(
    do_not_specialize_on_alignment=[
        "value",
        "student_bias",
        "teacher_bias",
        "labels",
        "divergence_coef",
        "hard_p",
        "hard_label",
        "hard_lse",
    ],
)
def _cosine_kernel(
    value,
    student,
    teacher,
    out,
    student_stride,
    teacher_stride,
    out_stride,
    student_bias,
    teacher_bias,
    labels,
    divergence_coef,
    hard_p,
    hard_label,
    hard_lse,
    columns,
    student_scale,
    student_softcap,
    teacher_scale,
    teacher_softcap,
    temperature,
    GRADIENT: tl.constexpr,
    HAS_HARD: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    STUDENT_BIAS: tl.constexpr,
    TEACHER_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: the norms, then the distance of the unit vectors, then the gradient."""
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    blocks = tl.cdiv(columns, BLOCK)
    s_sum = tl.zeros((BLOCK,), tl.float32)
    t_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(blocks):
        at = i * BLOCK + tl.arange(0, BLOCK)
        s, t = _both_logits(
            student,
            teacher,
            at,
            at < columns,
            student_bias,
            teacher_bias,
            student_scale,
            student_softcap,
            teacher_scale,
            teacher_softcap,
            1 / temperature,
            STUDENT_SCALE,
            STUDENT_SOFTCAP,
            TEACHER_SCALE,
            TEACHER_SOFTCAP,
            STUDENT_BIAS,
            TEACHER_BIAS,
        )
        s_sum += s * s
        t_sum += t * t
    s_scale = 1 / tl.maximum(tl.sqrt(tl.sum(s_sum, 0)), 1e-12)
    t_scale = 1 / tl.maximum(tl.sqrt(tl.sum(t_sum, 0)), 1e-12)
    f_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(blocks):
        at = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        s, t = _both_logits(
            student,
            teacher,
            at,
            at < columns,
            student_bias,
            teacher_bias,
            student_scale,
            student_softcap,
            teacher_scale,
            teacher_softcap,
            1 / temperature,
            STUDENT_SCALE,
            STUDENT_SOFTCAP,
            TEACHER_SCALE,
            TEACHER_SOFTCAP,
            STUDENT_BIAS,
            TEACHER_BIAS,
        )
        difference = s * s_scale - t * t_scale
        f_sum += difference * difference / 2
    total = tl.sum(f_sum, 0)
    if GRADIENT:
        out += row * out_stride
        coef = tl.load(divergence_coef + row)
        for i in range(blocks):
            at = i * BLOCK + tl.arange(0, BLOCK)
            s, t = _both_logits(
                student,
                teacher,
                at,
                at < columns,
                student_bias,
                teacher_bias,
                student_scale,
                student_softcap,
                teacher_scale,
                teacher_softcap,
                1 / temperature,
                STUDENT_SCALE,
                STUDENT_SOFTCAP,
                TEACHER_SCALE,
                TEACHER_SOFTCAP,
                STUDENT_BIAS,
                TEACHER_BIAS,
            )
            unit = s * s_scale
            grad = coef * (unit - t * t_scale - unit * total) * s_scale
            grad = _projection_gradient(
                grad,
                s,
                at,
                row,
                labels,
                hard_p,
                hard_label,
                hard_lse,
                temperature,
                student_scale,
                student_softcap,
                HAS_HARD,
                STUDENT_SCALE,
                STUDENT_SOFTCAP,
            )
            tl.store(out + at, grad.to(out.dtype.element_ty), mask=at < columns)
    tl.store(value + row, total)
