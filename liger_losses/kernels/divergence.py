"""Divergences between two softmaxes, and their gradients, from both models' projections.

R rows (tokens), V columns (vocabulary). p is the student's softmax, q the teacher's, d = log p - log q.

Every divergence is a sum over the vocabulary of a function f of log p and log q, and with h = df / d log p its
gradient with respect to the student's logits is ``h - p sum(h)``: two sums per row, then one formula per entry.

Close to the teacher, a divergence is a second-order quantity made of first-order terms that cancel. Two rules keep its
digits: f is written so that no entry is negative (adding multiples of p - q, whose sum is 0, changes nothing), and
where d is small, f comes from the series of ``excess(d) = exp(d) - 1 - d``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import choose_backend, jit, tl, triton
from liger_losses.kernels.linear_exp import log1p
from liger_losses.kernels.logit_transform import LogitTransform, transform_block
from liger_losses.kernels.softmax_stats import row_slices

#: A probability of 0 has log p = -inf, and 0 * -inf is not 0 in floating point.
_LOWEST = -1e4
#: Logits that are all 0 have no direction.
_SMALLEST_NORM = 1e-12
#: Temporaries of the torch twin, in blocks of the slice it works on.
TEMPORARIES = 16


@dataclass(frozen=True)
class Divergence:
    """Which function of p (the student's) and q (the teacher's) is summed over the vocabulary.

    Use the constructors; ``form`` names one of :data:`FORMS`, and a, b, c are its parameters.
    """

    form: str
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0

    @classmethod
    def forward_kl(cls) -> Divergence:
        """``KL(q || p) = sum q (log q - log p)``."""
        return cls("forward_kl")

    @classmethod
    def reverse_kl(cls) -> Divergence:
        """``KL(p || q) = sum p (log p - log q)``."""
        return cls("reverse_kl")

    @classmethod
    def mixture(cls, teacher: float, of_teacher: float, of_student: float) -> Divergence:
        """``of_teacher KL(q || m) + of_student KL(p || m)`` with ``m = teacher q + (1 - teacher) p``."""
        return cls("mixture", teacher, of_teacher, of_student)

    @classmethod
    def total_variation(cls) -> Divergence:
        """``1/2 sum |p - q|``."""
        return cls("total_variation")

    @classmethod
    def cosine(cls) -> Divergence:
        """``1 - cos(student's logits, teacher's logits)``, of the logits themselves."""
        return cls("cosine")

    @classmethod
    def alpha_beta(cls, alpha: float, beta: float) -> Divergence:
        """``sum (a/s q^s + b/s p^s - q^a p^b) / (a b)`` with ``s = a + b``, for a, b >= 0, not both 0, and its limits.

        Source: Cichocki, Cruces and Amari, Entropy 13 (2011), 134-170, equations 15 and 19. (1, 0) is ``KL(q || p)``,
        (0, 1) is ``KL(p || q)``.
        """
        if beta == 0:
            return cls("beta_zero", alpha)
        return cls("alpha_zero", beta) if alpha == 0 else cls("alpha_beta", alpha, beta)


class Logits(NamedTuple):
    """A model's side: projections ``[R, V]`` (fp32 or fp64), log-sum-exp ``[R]`` of its logits, how they become
    logits, and the bias ``[V]`` that is added before."""

    projected: Tensor
    lse: Tensor
    transform: LogitTransform = LogitTransform()
    bias: Tensor | None = None

    def rows(self, rows: slice) -> Logits:
        return Logits(self.projected[rows], self.lse[rows], self.transform, self.bias)

    def logits(self) -> Tensor:
        return self.transform(self.projected, self.bias)

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
    if choose_backend(student.projected, backend) == "triton":
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
        f, h = FORMS[divergence.form].torch(log_p, teacher.log_probs(), divergence.a, divergence.b, divergence.c)
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
    return transform.chain_(grad, transform(student.projected, student.bias))


# --- The forms, for torch -------------------------------------------------------------------------------------------


def _small(d: Tensor) -> Tensor:
    """Where the series is the more exact: its nine terms reach fp32's precision at 0.5, fp64's at 0.02."""
    return d.abs() < (0.02 if d.dtype == torch.float64 else 0.5)


def _excess(d: Tensor) -> Tensor:
    """``exp(d) - 1 - d`` where it is small, by its series."""
    total = torch.full_like(d, 1 / 362880)
    for factorial in (40320, 5040, 720, 120, 24, 6, 2):
        total = total.mul_(d).add_(1 / factorial)
    return total.mul_(d).mul_(d)


def _forward_kl(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, q, d = log_p.exp(), log_q.exp(), log_p - log_q
    near, e = _small(d), _excess(d)
    return torch.where(near, q * e, p - q - q * d), torch.where(near, q * (d + e), p - q)


def _reverse_kl(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, q, d = log_p.exp(), log_q.exp(), log_p - log_q
    return torch.where(_small(d), p * _excess(-d), q - p + p * d), p * d


def _mixture(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, q, d = log_p.exp(), log_q.exp(), log_p - log_q
    near, e = _small(d), _excess(d)
    difference = torch.where(near, q * (d + e), p - q)
    # log(m / q) and log(m / p), from the larger of both.
    ratio = (-d.abs()).exp()
    far = torch.where(d > 0, (1 - a) + a * ratio, a + (1 - a) * ratio).log() + d.clamp(min=0)
    to_q = torch.where(near, ((1 - a) * (d + e)).log1p(), far)
    to_p = to_q - d
    of_teacher = torch.where(near, q * _excess(to_q), (1 - a) * difference - q * to_q)
    of_student = torch.where(near, p * _excess(to_p), -a * difference - p * to_p)
    weight = (1 - a) * (-to_p).exp()
    h = (b * (1 - a) - c * a) * difference * weight - c * p * to_p
    return b * of_teacher + c * of_student, h


def _total_variation(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, q, d = log_p.exp(), log_q.exp(), log_p - log_q
    difference = torch.where(_small(d), q * (d + _excess(d)), p - q)
    return difference.abs() / 2, p * d.sign() / 2


def _alpha_beta(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    s, d = a + b, log_p - log_q
    near = _small(d * max(s, 1.0))
    p_s, q_s, both = (s * log_p).exp(), (s * log_q).exp(), (a * log_q + b * log_p).exp()
    f = torch.where(near, q_s * (b / s * _excess(s * d) - _excess(b * d)), b / s * p_s + a / s * q_s - both) / (a * b)
    h = torch.where(near, both * (a * d + _excess(a * d)), p_s - both) / a
    return f, h


def _alpha_zero(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    d = log_p - log_q
    p_a, q_a = (a * log_p).exp(), (a * log_q).exp()
    return torch.where(_small(a * d), p_a * _excess(-a * d), q_a - p_a + a * p_a * d) / a**2, p_a * d


def _beta_zero(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    d = log_p - log_q
    near, e = _small(a * d), _excess(a * d)
    p_a, q_a = (a * log_p).exp(), (a * log_q).exp()
    f = torch.where(near, q_a * e, p_a - q_a - a * q_a * d) / a**2
    return f, torch.where(near, q_a * (a * d + e), p_a - q_a) / a


# --- The same for Triton -------------------------------------------------------------------------------------------


@jit
def _excess_t(d):
    e = 1 / 40320 + d * (1 / 362880)
    e = 1 / 720 + d * (1 / 5040 + d * e)
    e = 1 / 24 + d * (1 / 120 + d * e)
    return d * d * (0.5 + d * (1 / 6 + d * e))


@jit
def _forward_kl_t(log_p, log_q, a, b, c):
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    d = log_p - log_q
    near = tl.abs(d) < 0.5
    e = _excess_t(d)
    return tl.where(near, q * e, p - q - q * d), tl.where(near, q * (d + e), p - q)


@jit
def _reverse_kl_t(log_p, log_q, a, b, c):
    p = tl.exp(log_p)
    d = log_p - log_q
    return tl.where(tl.abs(d) < 0.5, p * _excess_t(-d), tl.exp(log_q) - p + p * d), p * d


@jit
def _mixture_t(log_p, log_q, a, b, c):
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    d = log_p - log_q
    near = tl.abs(d) < 0.5
    near_d = tl.where(near, d, 0.0)
    rise = near_d + _excess_t(near_d)
    difference = tl.where(near, q * rise, p - q)
    ratio = tl.exp(-tl.abs(d))
    far = tl.log(tl.where(d > 0, (1 - a) + a * ratio, a + (1 - a) * ratio)) + tl.maximum(d, 0.0)
    to_q = tl.where(near, log1p((1 - a) * rise), far)
    to_p = to_q - d
    of_teacher = tl.where(near, q * _excess_t(to_q), (1 - a) * difference - q * to_q)
    of_student = tl.where(near, p * _excess_t(to_p), -a * difference - p * to_p)
    weight = (1 - a) * tl.exp(-to_p)
    h = (b * (1 - a) - c * a) * difference * weight - c * p * to_p
    return b * of_teacher + c * of_student, h


@jit
def _total_variation_t(log_p, log_q, a, b, c):
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    d = log_p - log_q
    difference = tl.where(tl.abs(d) < 0.5, q * (d + _excess_t(d)), p - q)
    return tl.abs(difference) / 2, p * tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, 0.0))


@jit
def _alpha_beta_t(log_p, log_q, a, b, c):
    s = a + b
    d = log_p - log_q
    near = tl.abs(d) * tl.maximum(s, 1.0) < 0.5
    p_s = tl.exp(s * log_p)
    q_s = tl.exp(s * log_q)
    both = tl.exp(a * log_q + b * log_p)
    f = tl.where(near, q_s * (b / s * _excess_t(s * d) - _excess_t(b * d)), b / s * p_s + a / s * q_s - both)
    h = tl.where(near, both * (a * d + _excess_t(a * d)), p_s - both)
    return f / (a * b), h / a


@jit
def _alpha_zero_t(log_p, log_q, a, b, c):
    d = log_p - log_q
    p_a = tl.exp(a * log_p)
    near = tl.abs(a * d) < 0.5
    f = tl.where(near, p_a * _excess_t(-a * d), tl.exp(a * log_q) - p_a + a * p_a * d)
    return f / (a * a), p_a * d


@jit
def _beta_zero_t(log_p, log_q, a, b, c):
    d = log_p - log_q
    p_a = tl.exp(a * log_p)
    q_a = tl.exp(a * log_q)
    near = tl.abs(a * d) < 0.5
    e = _excess_t(a * d)
    f = tl.where(near, q_a * e, p_a - q_a - a * q_a * d)
    return f / (a * a), tl.where(near, q_a * (a * d + e), p_a - q_a) / a


def _cosine(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of the sum, and its gradient with respect to the student's logits."""
    norms = [logits.norm(dim=1, keepdim=True).clamp(min=_SMALLEST_NORM) for logits in (student, teacher)]
    unit = student / norms[0]
    difference = unit - teacher / norms[1]
    # 1 - cos from the distance of the unit vectors, as the cosine of close ones has lost its digits.
    f = difference.square() / 2
    return f, (difference - unit * f.sum(1, keepdim=True)) / norms[0]


class Form(NamedTuple):
    """``(log p, log q, a, b, c) -> (f, h)`` for either backend, and whether ``sum(h)`` is 0 whatever p and q are."""

    torch: Callable[..., tuple[Tensor, Tensor]]
    triton: Any
    balanced: bool = False


#: What a :class:`Divergence` may sum.
FORMS = {
    "forward_kl": Form(_forward_kl, _forward_kl_t, balanced=True),
    "reverse_kl": Form(_reverse_kl, _reverse_kl_t),
    "mixture": Form(_mixture, _mixture_t),
    "total_variation": Form(_total_variation, _total_variation_t),
    "alpha_beta": Form(_alpha_beta, _alpha_beta_t),
    "alpha_zero": Form(_alpha_zero, _alpha_zero_t),
    "beta_zero": Form(_beta_zero, _beta_zero_t),
}


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
    form = FORMS.get(divergence.form)
    own, theirs = student.transform.kernel_arguments(), teacher.transform.kernel_arguments()
    given = coefficients or Coefficients(value)
    _divergence_kernel[(rows,)](
        value,
        student.projected,
        teacher.projected,
        out,
        student.projected.stride(0),
        teacher.projected.stride(0),
        0 if out is None else out.stride(0),
        student.lse,
        teacher.lse,
        student.bias,
        teacher.bias,
        labels,
        *(None if part is None else part.contiguous() for part in given),
        columns,
        own["scale"],
        own["softcap"],
        theirs["scale"],
        theirs["softcap"],
        student.transform.temperature,
        1.0 / student.transform.temperature,
        divergence.a,
        divergence.b,
        divergence.c,
        FORM=None if form is None else form.triton,
        BALANCED=form is not None and form.balanced,
        GRADIENT=out is not None,
        HAS_HARD=given.hard_p is not None,
        STUDENT_SCALE=own["HAS_SCALE"],
        STUDENT_SOFTCAP=own["HAS_SOFTCAP"],
        TEACHER_SCALE=theirs["HAS_SCALE"],
        TEACHER_SOFTCAP=theirs["HAS_SOFTCAP"],
        STUDENT_BIAS=student.bias is not None,
        TEACHER_BIAS=teacher.bias is not None,
        BLOCK=min(4096, triton.next_power_of_2(columns)),
        num_warps=8,
    )


@jit
def _log_probs(z, lse, inside):
    """Log-probabilities of a block, of no probability outside of the vocabulary."""
    return tl.where(inside, tl.maximum(z - lse, -1e4), -1e4)


@jit
def _logits(
    projected,
    at,
    inside,
    bias,
    scale,
    softcap,
    inverse_temperature,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
):
    """A block of logits, 0 outside of the vocabulary."""
    x = tl.load(projected + at, mask=inside, other=0.0)
    if BIAS:
        x += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return transform_block(x, scale, softcap, inverse_temperature, SCALE, SOFTCAP)


@jit(
    do_not_specialize_on_alignment=[
        "value",
        "student",
        "teacher",
        "out",
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
    student_lse,
    teacher_lse,
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
    inverse_temperature,
    a,
    b,
    c,
    FORM: tl.constexpr,
    BALANCED: tl.constexpr,
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

    What was read last is still in the cache when the gradient reads it again. Where the sum of h is known, sums and
    gradient are one loop. Without a form, it is the cosine: norms first, then the distance of the unit vectors.
    """
    COSINE: tl.constexpr = FORM is None
    FIRST: tl.constexpr = not (BALANCED and GRADIENT)
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    s_lse = tl.load(student_lse + row)
    t_lse = tl.load(teacher_lse + row)
    blocks = tl.cdiv(columns, BLOCK)
    f_sum = tl.zeros((BLOCK,), tl.float32)
    h_sum = tl.zeros((BLOCK,), tl.float32)
    if FIRST:
        for i in range(blocks):
            at = i * BLOCK + tl.arange(0, BLOCK)
            inside = at < columns
            s = _logits(
                student,
                at,
                inside,
                student_bias,
                student_scale,
                student_softcap,
                inverse_temperature,
                STUDENT_SCALE,
                STUDENT_SOFTCAP,
                STUDENT_BIAS,
            )
            t = _logits(
                teacher,
                at,
                inside,
                teacher_bias,
                teacher_scale,
                teacher_softcap,
                inverse_temperature,
                TEACHER_SCALE,
                TEACHER_SOFTCAP,
                TEACHER_BIAS,
            )
            if COSINE:
                f_sum += s * s
                h_sum += t * t
            else:
                f, h = FORM(_log_probs(s, s_lse, inside), _log_probs(t, t_lse, inside), a, b, c)
                f_sum += f
                h_sum += h
    total = tl.sum(h_sum, 0)
    s_scale = 0.0
    t_scale = 0.0
    if COSINE:
        s_scale = 1 / tl.maximum(tl.sqrt(tl.sum(f_sum, 0)), 1e-12)
        t_scale = 1 / tl.maximum(tl.sqrt(total), 1e-12)
        f_sum = tl.zeros((BLOCK,), tl.float32)
        for i in range(blocks):
            at = i * BLOCK + tl.arange(0, BLOCK)
            inside = at < columns
            s = _logits(
                student,
                at,
                inside,
                student_bias,
                student_scale,
                student_softcap,
                inverse_temperature,
                STUDENT_SCALE,
                STUDENT_SOFTCAP,
                STUDENT_BIAS,
            )
            t = _logits(
                teacher,
                at,
                inside,
                teacher_bias,
                teacher_scale,
                teacher_softcap,
                inverse_temperature,
                TEACHER_SCALE,
                TEACHER_SOFTCAP,
                TEACHER_BIAS,
            )
            difference = s * s_scale - t * t_scale
            f_sum += difference * difference / 2
        total = tl.sum(f_sum, 0)
    if GRADIENT:
        out += row * out_stride
        coef = tl.load(divergence_coef + row)
        if HAS_HARD:
            p1_coef = tl.load(hard_p + row)
            label_coef = tl.load(hard_label + row)
            p1_lse = tl.load(hard_lse + row)
            label = tl.load(labels + row).to(tl.int32)
        for i in range(blocks):
            at = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
            inside = at < columns
            s = _logits(
                student,
                at,
                inside,
                student_bias,
                student_scale,
                student_softcap,
                inverse_temperature,
                STUDENT_SCALE,
                STUDENT_SOFTCAP,
                STUDENT_BIAS,
            )
            t = _logits(
                teacher,
                at,
                inside,
                teacher_bias,
                teacher_scale,
                teacher_softcap,
                inverse_temperature,
                TEACHER_SCALE,
                TEACHER_SOFTCAP,
                TEACHER_BIAS,
            )
            if COSINE:
                unit = s * s_scale
                grad = coef * (unit - t * t_scale - unit * total) * s_scale
            else:
                log_p = _log_probs(s, s_lse, inside)
                f, h = FORM(log_p, _log_probs(t, t_lse, inside), a, b, c)
                if BALANCED:
                    f_sum += f
                    grad = coef * h
                else:
                    grad = coef * (h - tl.exp(log_p) * total)
            if HAS_HARD:
                p1 = tl.exp(s * temperature - p1_lse)
                grad += temperature * (p1 * p1_coef + tl.where(at == label, label_coef, 0.0))
            if STUDENT_SOFTCAP:
                x = s * temperature / student_softcap
                grad *= 1 - x * x
            if STUDENT_SCALE:
                grad *= student_scale * inverse_temperature
            tl.store(out + at, grad.to(out.dtype.element_ty), mask=inside)
    tl.store(value + row, tl.sum(f_sum, 0))
