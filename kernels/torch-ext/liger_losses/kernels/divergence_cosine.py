"""The cosine distance of both models' logits, and its gradient: the one divergence that is of no softmaxes.

R rows (tokens), V columns (vocabulary).
"""

from __future__ import annotations

from torch import Tensor

from ..kernels._triton import jit, tl
from ..kernels.divergence_forms import PLACES, VECTORS, load_hard, projection_gradient_block
from ..kernels.logit_transform import inverse_temperature
from ..kernels.sums_of_both import both_logits

#: Logits that are all 0 have no direction.
SMALLEST_NORM = 1e-12


def cosine_terms(
    student: Tensor,
    teacher: Tensor,
    squares: Tensor | None = None,
    distance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The terms of the cosine distance of logits, and its gradient with respect to the student's logits.

    Of a part of the vocabulary, ``squares [2, R]`` (both rows' sums of squares) and ``distance [R]`` are those of the
    whole.
    """
    found = [logits.norm(dim=1) for logits in (student, teacher)] if squares is None else squares.sqrt()
    norms = [norm[:, None].clamp(min=SMALLEST_NORM) for norm in found]
    unit = student / norms[0]
    difference = unit - teacher / norms[1]
    # 1 - cos from the distance of the unit vectors, as the cosine of close ones has lost its digits.
    f = difference.square() / 2
    distance = f.sum(1) if distance is None else distance
    return f, (difference - unit * distance[:, None]) / norms[0]


@jit
def _row_squares(student, teacher, row, columns, BLOCK: tl.constexpr):
    """A row's sums of squared logits."""
    inverse = 1.0
    if student.transform.temperature is not None:
        inverse = inverse_temperature(student.transform, row, True, 0)
    s_sum = tl.zeros((BLOCK,), tl.float32)
    t_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.cdiv(columns, BLOCK)):
        _at, inside, s, t = both_logits(student, teacher, row, i, columns, inverse, BLOCK)
        s_sum += tl.where(inside, s * s, 0.0)
        t_sum += tl.where(inside, t * t, 0.0)
    return tl.sum(s_sum, 0), tl.sum(t_sum, 0)


@jit(do_not_specialize_on_alignment=["student_out", "teacher_out"])
def squares_kernel(student_out, teacher_out, student, teacher, columns, BLOCK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    s_square, t_square = _row_squares(student, teacher, row, columns, BLOCK)
    tl.store(student_out + row, s_square)
    tl.store(teacher_out + row, t_square)


@jit(
    do_not_specialize=PLACES[:1],
    do_not_specialize_on_alignment=[*VECTORS, "student_squares", "teacher_squares"],
)
def cosine_kernel(
    value, student, teacher, out, out_stride, columns,
    coef, labels, first_column, hard_p, hard_label, hard_lse, temperature, row_sums,
    student_squares, teacher_squares,
    ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: the norms, then the distance of the unit vectors, then the gradient."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(columns, BLOCK)
    inverse = 1.0
    if student.transform.temperature is not None:
        inverse = inverse_temperature(student.transform, row, True, 0)
    if student_squares is not None:
        s_square = tl.load(student_squares + row)
        t_square = tl.load(teacher_squares + row)
    else:
        s_square, t_square = _row_squares(student, teacher, row, columns, BLOCK)
    s_scale = 1 / tl.maximum(tl.sqrt(s_square), 1e-12)
    t_scale = 1 / tl.maximum(tl.sqrt(t_square), 1e-12)
    f_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(blocks):
        at, inside, s, t = both_logits(student, teacher, row, blocks - 1 - i, columns, inverse, BLOCK)
        difference = s * s_scale - t * t_scale
        f_sum += difference * difference / 2
    total = tl.sum(f_sum, 0)
    if ACCUMULATE:
        tl.store(value + row, total + tl.load(value + row))
    else:
        tl.store(value + row, total)
    if out is None:
        if row_sums is not None:
            if ACCUMULATE:
                tl.store(row_sums + row, total + tl.load(row_sums + row))
            else:
                tl.store(row_sums + row, total)
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
            at, inside, s, t = both_logits(student, teacher, row, i, columns, inverse, BLOCK)
            unit = s * s_scale
            grad = row_coef * (unit - t * t_scale - unit * total) * s_scale
            grad = projection_gradient_block(grad, s, at == label, hard, temperature, student.transform, inverse)
            tl.store(out + at, grad.to(out.dtype.element_ty), mask=inside)
