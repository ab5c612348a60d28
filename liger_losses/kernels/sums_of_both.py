"""Sums over rows of both models' logits, in one launch: what the log-sum-exps of a divergence are made of.

R rows (tokens), V columns (vocabulary), P parts of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import jit, tl, triton
from liger_losses.kernels.logit_transform import Epilogue, KernelTransform, inverse_temperature, transform_block

#: Columns of a part, and warps of a program.
_COLUMNS, _WARPS = 4096, 8


class Side(NamedTuple):
    """One model's projections in a kernel: rows that are ``stride`` apart, and what turns them into logits."""

    projected: Tensor
    stride: int
    bias: Tensor | None
    transform: KernelTransform

    @classmethod
    def of(cls, projected: Tensor, epilogue: Epilogue) -> Side:
        return cls(projected, projected.stride(0), epilogue.bias, epilogue.transform.for_kernel())


def sums_of_both(
    student: Tensor,
    teacher: Tensor,
    student_epilogue: Epilogue = Epilogue(),
    teacher_epilogue: Epilogue = Epilogue(),
    *,
    backend: str = "torch",
) -> Tensor:
    """The largest logit of each part of a row, and the sum of exponentials relative to it, of both models.

    ``lse = log sum_p sum_p exp(top_p)``: the kernel that reads the logits next takes it from these.

    Args:
        student, teacher: projections ``[R, V]`` fp32, rows contiguous.
        student_epilogue, teacher_epilogue: from projections to logits; both have the same temperature.
        backend: ``torch`` holds one model's logits three more times, and has one part; ``triton`` holds none.

    Returns:
        ``[2, 2, R, P]`` fp32: of student and teacher, the largest logits and the sums.
    """
    models = (student, student_epilogue), (teacher, teacher_epilogue)
    rows, columns = student.shape
    if backend == "torch":
        sums = student.new_empty(2, 2, rows, 1)
        for found, (projected, epilogue) in zip(sums, models, strict=True):
            logits = epilogue(projected)
            found[0] = _finite(logits.amax(1, keepdim=True))
            found[1] = (logits - found[0]).exp().sum(1, keepdim=True)
        return sums
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    sums = torch.empty(2, 2, rows, triton.cdiv(columns, block), device=student.device)
    if rows:
        sides = (Side.of(*model) for model in models)
        _sums_of_both_kernel[(rows, sums.shape[3])](sums, *sides, columns, BLOCK=block, num_warps=_WARPS)
    return sums


def log_sum_exp(sums: Tensor) -> Tensor:
    """``[R]``, from one model's maxima and sums ``[2, R, P]``."""
    return (sums[0] + sums[1].log()).logsumexp(1)


def _finite(tops: Tensor) -> Tensor:
    """Finite where all logits are -inf, and where one is inf: the sum is inf then, as torch's is."""
    return tops.clamp(-3.0e38, torch.finfo(torch.float32).max)


@jit
def both_logits(student, teacher, row, block, columns, inverse, BLOCK: tl.constexpr):
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
def log_sum_exp_of_parts(sums, row, rows, parts, PARTS: tl.constexpr):
    """A row's log-sum-exp, from one model's maxima and sums of its ``parts``, of which there are at most ``PARTS``."""
    at = tl.arange(0, PARTS)
    tops = tl.load(sums + row * parts + at, mask=at < parts, other=-3.0e38)
    totals = tl.load(sums + (rows + row) * parts + at, mask=at < parts, other=0.0)
    top = tl.max(tops, 0)
    return top + tl.log(tl.sum(totals * tl.exp(tops - top), 0))


@jit
def _store_part(sums, place, size, z, inside):
    """One model's maximum and sum of a part; the sums follow ``size`` maxima."""
    z = tl.where(inside, z, float("-inf"))
    top = tl.minimum(tl.maximum(tl.max(z, 0), -3.0e38), 3.4028234663852886e38)  # as `_finite` does
    tl.store(sums + place, top)
    tl.store(sums + size + place, tl.sum(tl.exp(z - top), 0))


@jit
def _sums_of_both_kernel(sums, student, teacher, columns, BLOCK: tl.constexpr):
    """One program per row and part."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    inverse = 1.0
    if student.transform.temperature is not None:
        inverse = inverse_temperature(student.transform, row, True, 0)
    _at, inside, s, t = both_logits(student, teacher, row, part, columns, inverse, BLOCK)
    size = tl.num_programs(0) * parts
    _store_part(sums, row * parts + part, size, s, inside)
    _store_part(sums + 2 * size, row * parts + part, size, t, inside)
