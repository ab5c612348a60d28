"""The kernels of :mod:`liger_losses.kernels.divergence`, and what they share."""

from __future__ import annotations

from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.divergence_terms import terms_block
from liger_losses.kernels.logit_transform import inverse_temperature, transform_block, transform_gradient


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
_OF_MODELS = ["student_lse", "teacher_lse", "parameter"]


@jit(do_not_specialize_on_alignment=["value", "h_out", *_OF_MODELS])
def divergence_sums_kernel(
    value, h_out, student, teacher, student_lse, teacher_lse, parameter, series, columns,
    FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row, or for a part of it: the sums of its columns."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    s_lse = tl.load(student_lse + row)
    t_lse = tl.load(teacher_lse + row)
    a = series.a
    if parameter is not None:
        a = tl.load(parameter + row)
    inverse = inverse_temperature(student.transform, row, True, 0)
    blocks = tl.cdiv(columns, BLOCK)
    of_part = tl.cdiv(blocks, tl.num_programs(1))
    f_sum = tl.zeros((BLOCK,), tl.float32)
    h_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(part * of_part, tl.minimum((part + 1) * of_part, blocks)):
        _at, _inside, _s, _p, f, h = _terms(
            student, teacher, row, i, columns, inverse, s_lse, t_lse, a, series, FORM, BLOCK
        )
        f_sum += f
        h_sum += h if FORM is not None else f
    place = part * tl.num_programs(0) + row
    tl.store(value + place, tl.sum(f_sum, 0))
    tl.store(h_out + place, tl.sum(h_sum, 0))


@jit(do_not_specialize_on_alignment=[*_OF_MODELS, "row_sums", "coef", "labels", "hard_p", "hard_label", "hard_lse"])
def divergence_gradient_kernel(
    out, out_stride, student, teacher, student_lse, teacher_lse, parameter, series, columns,
    row_sums, coef, labels, hard_p, hard_label, hard_lse, temperature,
    FORM: tl.constexpr, BALANCED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row, from left to right: the gradient may take the memory of the student's projections, and
    entries in half precision take the place of those that were read."""
    row = tl.program_id(0).to(tl.int64)
    s_lse = tl.load(student_lse + row)
    t_lse = tl.load(teacher_lse + row)
    a = series.a
    if parameter is not None:
        a = tl.load(parameter + row)
    inverse = inverse_temperature(student.transform, row, True, 0)
    total = tl.load(row_sums + row)
    row_coef = tl.load(coef + row)
    hard = _load_hard(labels, hard_p, hard_label, hard_lse, row)
    out += row * out_stride
    for i in range(tl.cdiv(columns, BLOCK)):
        at, inside, s, p, _f, h = _terms(
            student, teacher, row, i, columns, inverse, s_lse, t_lse, a, series, FORM, BLOCK
        )
        if BALANCED:
            grad = row_coef * h
        else:
            grad = row_coef * (h - p * total)
        if FORM is None:
            grad *= s_lse
        # A narrower `out` overwrites this block and what lies to its left: all of it must have been read.
        tl.debug_barrier()
        _store_gradient(out, grad, s, at, inside, hard_p, hard, temperature, student.transform, inverse)


@jit(do_not_specialize_on_alignment=["student_out", "teacher_out"])
def squares_kernel(student_out, teacher_out, student, teacher, columns, BLOCK: tl.constexpr):
    """One program per row: its sums of squared logits."""
    row = tl.program_id(0).to(tl.int64)
    inverse = inverse_temperature(student.transform, row, True, 0)
    s_sum = tl.zeros((BLOCK,), tl.float32)
    t_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.cdiv(columns, BLOCK)):
        _at, inside, s, t = _both_logits(student, teacher, row, i, columns, inverse, BLOCK)
        s_sum += tl.where(inside, s * s, 0.0)
        t_sum += tl.where(inside, t * t, 0.0)
    tl.store(student_out + row, tl.sum(s_sum, 0))
    tl.store(teacher_out + row, tl.sum(t_sum, 0))
