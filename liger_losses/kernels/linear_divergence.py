"""A divergence from a teacher in the epilogue of the student's ``hidden @ weight.T``: its logits stay in registers.

N tokens, H the student's hidden size, C columns of both models' vocabulary (a slice of it, or all). The teacher's
projections of these columns are in memory; f, h and d are those of :mod:`liger_losses.kernels.divergence`.

The gradient ``h - p sum(h)`` needs the log-sum-exp of both models and one more number per token, sum(h). Each of them
takes a pass over the vocabulary, whatever the number of columns that fit the memory. A balanced divergence, whose
sum(h) is 0 for all p and q, needs no such pass: of the forward KL, ``h = p - q``, and both add up to 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import (
    aligned,
    descriptor,
    has_tma,
    project_tile,
    split_tile,
    store_tile,
    tile_position,
    tiles_of,
    with_contiguous_rows,
)
from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.divergence import (
    Coefficients,
    Logits,
    RowSums,
    divergence_into,
    load_hard,
    projection_gradient_block,
    series_argument,
    square_sums,
)
from liger_losses.kernels.divergence_forms import FORMS, SMALLEST_NORM, Divergence, terms_block
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, transform_block

#: Row tiles that walk the columns together, so that the cache serves each part of the head to all of them.
_GROUP = 8


class _Tile(NamedTuple):
    """Columns of a tile, its parts (4 or 8), programs that share a multiprocessor, and the launch's options."""

    columns: int
    parts: int
    programs: int
    options: dict[str, int]


_WIDE = _Tile(256, 4, 1, {"num_warps": 8})
#: One of two programs multiplies while the other takes the divergence. Both fit a multiprocessor of Hopper: 64K
#: registers, of which a thread gets 128, and 227 KiB of shared memory.
_NARROW = _Tile(128, 8, 2, {"num_warps": 8, "maxnreg": 128})
_TILE = _WIDE


class Product(NamedTuple):
    """One model's logits ``epilogue(hidden @ weight.T)`` of some columns, before they are computed.

    Args:
        hidden: ``[N, H]``.
        weight: ``[C, H]``, rows contiguous, of the same dtype.
        lse: ``[N]``, the log-sum-exp of the logits of all columns.
        epilogue: from projections to logits, of these columns.
    """

    hidden: Tensor
    weight: Tensor
    lse: Tensor
    epilogue: Epilogue = Epilogue()

    def logits(self) -> Logits:
        return Logits(self.hidden.float() @ self.weight.float().t(), self.lse, self.epilogue)


def linear_divergence_into(
    value: Tensor,
    student: Product,
    teacher: Logits,
    divergence: Divergence,
    sums: RowSums,
    *,
    out: Tensor | None = None,
    coefficients: Coefficients | None = None,
    labels: Tensor | None = None,
    first_column: int = 0,
    backend: str = "torch",
) -> None:
    """Add some columns' part of each token's divergence and of sum(h), or write the loss's gradient there.

    Args:
        value: ``[N]`` fp32. The sum of f over these columns is added to it without ``out``; with ``out``, if the
            divergence is balanced.
        student: the student's product.
        teacher: the teacher's projections ``[N, C]`` in fp32, with the log-sum-exp of all columns.
        divergence: which divergence.
        sums: without ``out``, these columns' part of sum(h) is added to ``h``; with ``out``, ``h`` is that of all
            columns (of a balanced divergence, it is not read). ``squares`` of all columns, of ``cosine``.
        out: ``[N, C]``, rows contiguous, for the gradient with respect to the student's projections, rounded once.
        coefficients: the loss's derivatives; needed with ``out``.
        labels: ``[N]`` int64, indices into the whole vocabulary, for the coefficients of a hard loss.
        first_column: where these columns begin in the vocabulary.
        backend: ``torch`` also holds the student's logits; ``triton`` does not, for fp16 and bf16.
    """
    if backend == "triton":
        _launch((value, sums.h), student, teacher, divergence, sums, out, coefficients, labels, first_column)
        return
    part, both = torch.empty_like(value), (student.logits(), teacher)
    if out is None:
        found = sums._replace(h=torch.empty_like(sums.h))
        divergence_into(part, *both, divergence, sums=found, backend=backend)
        value += part
        sums.h.add_(found.h)
        return
    if labels is not None:
        inside = (labels >= first_column) & (labels < first_column + out.shape[1])
        labels = torch.where(inside, labels - first_column, out.shape[1])
    balanced = is_balanced(divergence)
    known = sums._replace(h=torch.zeros_like(sums.h)) if balanced else sums
    divergence_into(
        part, *both, divergence, out=out, coefficients=coefficients, labels=labels, sums=known, backend=backend
    )
    if balanced:
        value += part


def add_square_sums_(squares: Tensor, student: Product, teacher: Logits, *, backend: str = "torch") -> None:
    """Add the sums of some columns' squared logits, of student and teacher, to ``squares [2, N]`` in fp32.

    Args:
        student, teacher, backend: as in :func:`linear_divergence_into`; the log-sum-exps are not read.
    """
    if backend == "triton":
        _launch(squares.unbind(), student, teacher, Divergence.cosine())
    else:
        squares += square_sums(student.logits(), teacher, backend=backend)


def is_balanced(divergence: Divergence) -> bool:
    """Whether sum(h) is 0 for all p and q."""
    return divergence.form in FORMS and FORMS[divergence.form].balanced


def _launch(
    totals: tuple[Tensor, ...],
    student: Product,
    teacher: Logits,
    divergence: Divergence,
    sums: RowSums | None = None,
    out: Tensor | None = None,
    coefficients: Coefficients | None = None,
    labels: Tensor | None = None,
    first_column: int = 0,
) -> None:
    """Launch the kernel, and add to the totals."""
    hidden, tokens = with_contiguous_rows(student.hidden), len(student.hidden)
    if not tokens:
        return
    tiles = tiles_of(hidden, student.weight, student.epilogue, columns=_TILE.columns)
    row_tiles, column_tiles, processors, arguments = tiles
    programs = min(processors * _TILE.programs, row_tiles * column_tiles)
    arguments |= {"PARTS": _TILE.parts} | _TILE.options
    partial = torch.empty(2, column_tiles, tokens, device=hidden.device)
    for name, matrix in (("teacher", teacher.projected), ("out", out)):
        if matrix is not None and has_tma(matrix.device) and aligned(matrix):
            arguments[name] = descriptor(matrix, arguments["BLOCK_N"], _TILE.columns // _TILE.parts)
            arguments[f"{name}_stride"] = None
        else:
            arguments |= {name: matrix, f"{name}_stride": None if matrix is None else matrix.stride(0)}
    rows: tuple[Tensor | None, ...] = (student.lse, teacher.lse)
    form, balanced, series = None, is_balanced(divergence), None
    if divergence.form != "cosine":
        form, series = FORMS[divergence.form].triton, series_argument(divergence)
    elif sums is None or sums.squares is None:
        rows = None, None
    else:
        rows = tuple(square.sqrt().clamp(min=SMALLEST_NORM).reciprocal() for square in sums.squares)
    temperature = student.epilogue.transform.temperature
    temperature = 1.0 if isinstance(temperature, Tensor) else float(temperature)  # a tensor is in the transform
    c = (coefficients or Coefficients(totals[0])).contiguous()
    _linear_divergence_kernel[(programs,)](
        **arguments,
        teacher_bias=teacher.epilogue.bias, teacher_transform=teacher.epilogue.transform.for_kernel(),
        student_rows=rows[0], teacher_rows=rows[1], h_sum=None if out is None or balanced else totals[1],
        coef=c.divergence, labels=labels, hard_p=c.hard_p, hard_label=c.hard_label, hard_lse=c.hard_lse,
        temperature=temperature, series=series, first_column=first_column,
        partial=partial, programs=programs, FORM=form, GROUP=_GROUP,
    )  # fmt: skip
    if out is None or balanced:
        for total, part in zip(totals if out is None else totals[:1], partial, strict=False):
            total += part.sum(0)


#: Arguments whose alignment is no reason to compile again: slices of vectors begin anywhere.
_VECTORS = ["student_rows", "teacher_rows", "h_sum", "coef", "labels", "hard_p", "hard_label", "hard_lse", "partial"]


@jit(
    do_not_specialize=["tokens", "vocab_size", "first_column", "programs"],
    do_not_specialize_on_alignment=["hidden", "weight", "out", "teacher", *_VECTORS],
)
def _linear_divergence_kernel(
    hidden, weight, hidden_stride, weight_stride, tokens, vocab_size, hidden_size,
    bias, transform, teacher, teacher_stride, teacher_bias, teacher_transform,
    student_rows, teacher_rows, h_sum, coef, labels, hard_p, hard_label, hard_lse, temperature, series,
    first_column, partial, programs,
    FORM: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, out=None, out_stride=None,
):  # fmt: skip
    """Persistent programs. Both models' logits meet in 4 or 8 parts of a tile, as what follows takes many registers.

    ``student_rows`` and ``teacher_rows`` are the rows' log-sum-exps; of the cosine, which has no ``FORM``, the inverse
    norms, or ``None`` to sum the squares.
    """
    row_tiles = tl.cdiv(tokens, BLOCK_N)
    column_tiles = tl.cdiv(vocab_size, BLOCK_V)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, programs, flatten=True):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP)
        first_row = row_tile * BLOCK_N
        first_of_tile = column_tile * BLOCK_V
        z = project_tile(
            hidden, weight, hidden_stride, weight_stride, first_row, first_of_tile, tokens, vocab_size, hidden_size,
            BLOCK_N, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        rows = first_row + tl.arange(0, BLOCK_N)
        valid = rows < tokens
        inverse = 1.0
        if transform.temperature is not None:  # of both models
            inverse = inverse_temperature(transform, rows, valid, 1)
        if student_rows is not None:
            s_row = tl.load(student_rows + rows, mask=valid, other=0.0)[:, None]
            t_row = tl.load(teacher_rows + rows, mask=valid, other=0.0)[:, None]
        if out is not None:
            row_coef = tl.load(coef + rows, mask=valid, other=0.0)[:, None]
            if hard_p is not None:
                hard = load_hard(hard_p, hard_label, hard_lse, rows[:, None], valid[:, None])
                label = (tl.load(labels + rows, mask=valid, other=-1).to(tl.int32) - first_column)[:, None]
            else:
                hard = (None, None, None)
                label = -1
            if h_sum is not None:
                total = tl.load(h_sum + rows, mask=valid, other=0.0)[:, None]
        f_sum = tl.zeros((BLOCK_N,), tl.float32)
        other_sum = tl.zeros((BLOCK_N,), tl.float32)
        left, right = split_tile(z, BLOCK_N, BLOCK_V)
        first, second = split_tile(left, BLOCK_N, BLOCK_V // 2)
        third, fourth = split_tile(right, BLOCK_N, BLOCK_V // 2)
        for part in tl.static_range(PARTS):
            start = first_of_tile + part * (BLOCK_V // PARTS)
            columns = start + tl.arange(0, BLOCK_V // PARTS)
            inside = columns < vocab_size
            if part < PARTS // 2:
                s = first if part < PARTS // 4 else second
            else:
                s = third if part < 3 * PARTS // 4 else fourth
            if PARTS == 8:
                even, odd = split_tile(s, BLOCK_N, BLOCK_V // 4)
                s = even if part % 2 == 0 else odd
            if teacher_stride is None:
                t = teacher.load([first_row, start])
            else:
                t = tl.load(
                    teacher + rows.to(tl.int64)[:, None] * teacher_stride + columns[None, :],
                    mask=valid[:, None] & inside[None, :],
                    other=0.0,
                )
            if bias is not None or transform.factor is not None:
                s = transform_block(s, bias, columns, inside, transform, inverse)
            if teacher_bias is not None or teacher_transform.factor is not None:
                t = transform_block(t, teacher_bias, columns, inside, teacher_transform, inverse)
            if column_tile == column_tiles - 1:  # nowhere else are columns beyond the vocabulary
                outside = 0.0 if FORM is None else float("-inf")
                s = tl.where(inside[None, :], s, outside)
                t = tl.where(inside[None, :], t, outside)
            if FORM is not None:
                p, f, other = terms_block(s, t, s_row, t_row, series, FORM)
                grad = other
                if h_sum is not None:
                    grad = other - p * total
            elif student_rows is None:
                f = s * s
                other = t * t
            else:
                difference = s * s_row - t * t_row
                f = difference * difference / 2
                other = f
                if h_sum is not None:
                    grad = (difference - s * s_row * total) * s_row
            if out is not None:
                at_label = columns[None, :] == label
                grad = projection_gradient_block(grad * row_coef, s, at_label, hard, temperature, transform, inverse)
                store_tile(out, out_stride, grad, rows, columns, first_row, start, tokens, vocab_size)
            if h_sum is None:
                f_sum += tl.sum(f, 1)
                if out is None:
                    other_sum += tl.sum(other, 1)
        if h_sum is None:
            at = partial + column_tile * tokens + rows
            tl.store(at, f_sum, mask=valid)
            if out is None:
                tl.store(at + column_tiles * tokens, other_sum, mask=valid)
