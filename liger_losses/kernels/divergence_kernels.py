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
def divergence_kernel(
    value, student, teacher, out, out_stride, columns,
    coef, labels, hard_p, hard_label, hard_lse, temperature, row_sums,
    student_lse, teacher_lse, parameter, series, student_squares, teacher_squares,
    FORM: tl.constexpr, BALANCED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: its sums from left to right, then its gradient from right to left (from left to right with
    ``row_sums``).

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
            # Where the sums are known, the gradient may take the memory of the student's projections: from left to
            # right, entries in half precision take the place of those that were read.
            block = i if FORM is None or row_sums is not None else blocks - 1 - i
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
            # A narrower `out` overwrites this block and what lies to its left: all of it must have been read.
            tl.debug_barrier()
            _store_gradient(out, grad, s, at, inside, hard_p, hard, temperature, student.transform, inverse)
    tl.store(value + place, tl.sum(f_sum, 0))


@jit(do_not_specialize_on_alignment=["student_out", "teacher_out"])
def squares_kernel(student_out, teacher_out, student, teacher, columns, BLOCK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    s_square, t_square = _row_squares(student, teacher, row, columns, BLOCK)
    tl.store(student_out + row, s_square)
    tl.store(teacher_out + row, t_square)
