"""Divergences between two softmaxes, and their gradients, from both models' projections.

R rows (tokens), V columns (vocabulary). p is the student's softmax, q the teacher's, d = log p - log q.

Every divergence is a sum over the vocabulary of a function f of log p and log q, and with h = df / d log p its
gradient with respect to the student's logits is ``h - p sum(h)``: two sums per row, then one formula per entry.

Close to the teacher, a divergence is a second-order quantity made of first-order terms that cancel. Two rules keep its
digits: f is written so that no entry is negative (adding multiples of p - q, whose sum is 0, changes nothing), and
where d is small, f and h are power series in d times a power of q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import choose_backend, jit, tl, triton
from liger_losses.kernels.logit_transform import LogitTransform, transform_block
from liger_losses.kernels.softmax_stats import row_slices

#: A probability of 0 has log p = -inf, and 0 * -inf is not 0 in floating point.
_LOWEST = -1e4
#: Below it, nothing that is multiplied by a logarithm matters.
_SMALLEST = 1e-37
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
        matched = of_teacher * (1 - teacher) == of_student * teacher
        return cls("gkd_mixture" if matched else "mixture", teacher, of_teacher, of_student)

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


class Series(NamedTuple):
    """Where ``|d| < radius``: ``f = q^power sum_n f_n d^n``, and h likewise."""

    power: float
    f: list[float]
    h: list[float]
    radius: float = 0.5


#: Of a power series; the rest is below fp32's rounding within the radius.
_TERMS = 9
_EXP = [1 / math.factorial(n) for n in range(_TERMS)]


def _add(first: list[float], second: list[float]) -> list[float]:
    return [x + y for x, y in zip_longest(first, second, fillvalue=0.0)]


def _subtract(first: list[float], second: list[float]) -> list[float]:
    return [x - y for x, y in zip_longest(first, second, fillvalue=0.0)]


def _multiply(first: list[float], second: list[float]) -> list[float]:
    pairs = [(i + j, x * y) for i, x in enumerate(first) for j, y in enumerate(second)]
    return [math.fsum(value for at, value in pairs if at == n) for n in range(_TERMS)]


def _divide(first: list[float], second: list[float]) -> list[float]:
    quotient: list[float] = []
    for n in range(_TERMS):
        known = math.fsum(x * second[n - i] for i, x in enumerate(quotient))
        quotient.append((first[n] - known) / second[0])
    return quotient


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
    return transform.chain_(grad, transform(student.projected, student.bias))


# --- The forms --------------------------------------------------------------------------------------------------------
#
# Each three times: for torch and for Triton (log p, log q, a, b, c) -> (f, h), as they are written down; and (a, b, c)
# -> the power s of q, and the coefficients of f / q^s and h / q^s in d, where those would cancel.


def _forward_kl(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, q = log_p.exp(), log_q.exp()
    return p - q - q * (log_p - log_q), p - q


@jit
def _forward_kl_t(log_p, log_q, a, b, c):
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    return p - q - q * (log_p - log_q), p - q


def _forward_kl_series(a: float, b: float, c: float) -> Series:
    return Series(1.0, _subtract(_EXP, [1.0, 1.0]), _subtract(_EXP, [1.0]))


def _reverse_kl(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, h = log_p.exp(), log_p.exp() * (log_p - log_q)
    return log_q.exp() - p + h, h


@jit
def _reverse_kl_t(log_p, log_q, a, b, c):
    p = tl.exp(log_p)
    h = p * (log_p - log_q)
    return tl.exp(log_q) - p + h, h


def _reverse_kl_series(a: float, b: float, c: float) -> Series:
    h = _multiply(_EXP, [0.0, 1.0])
    return Series(1.0, _subtract(h, _subtract(_EXP, [1.0])), h)


def _mixture(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, q = log_p.exp(), log_q.exp()
    m = a * q + (1 - a) * p
    log_m = m.clamp(min=_SMALLEST).log()
    of_student = p * (log_p - log_m)
    f = b * (q * (log_q - log_m) + m - q) + c * (of_student + m - p)
    k = b * (1 - a) - c * a
    h = c * of_student
    return f, h if k == 0 else h + k * (1 - a) * (p - q) * p / m.clamp(min=_SMALLEST)


@jit
def _mixture_t(log_p, log_q, a, b, c):
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    m = tl.maximum(a * q + (1 - a) * p, 1e-37)
    log_m = tl.log(m)
    of_student = p * (log_p - log_m)
    f = b * (q * (log_q - log_m) + m - q) + c * (of_student + m - p)
    return f, c * of_student + (b * (1 - a) - c * a) * (1 - a) * (p - q) * (p / m)


@jit
def _gkd_mixture_t(log_p, log_q, a, b, c):
    """The mixture where ``b (1 - a) = c a``, as in GKD's JSD: one term of h vanishes."""
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    m = tl.maximum(a * q + (1 - a) * p, 1e-37)
    log_m = tl.log(m)
    of_student = p * (log_p - log_m)
    f = b * (q * (log_q - log_m) + m - q) + c * (of_student + m - p)
    return f, c * of_student


def _mixture_series(a: float, b: float, c: float) -> Series:
    m = [a + (1 - a), *((1 - a) * x for x in _EXP[1:])]  # m / q
    share = _divide([(1 - a) * x for x in _EXP], m)  # (1 - a) p / m, the derivative of log(m / q)
    log_m = [0.0, *(x / (n + 1) for n, x in enumerate(share[:-1]))]
    of_student = _multiply(_EXP, _subtract([0.0, 1.0], log_m))
    f = _add(
        [b * x for x in _subtract(_subtract(m, [1.0]), log_m)],
        [c * x for x in _add(of_student, _subtract(m, _EXP))],
    )
    bent = _multiply(_subtract(_EXP, [1.0]), share)
    return Series(1.0, f, _add([c * x for x in of_student], [(b * (1 - a) - c * a) * x for x in bent]))


def _total_variation(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    return (p - log_q.exp()).abs() / 2, p * (log_p - log_q).sign() / 2


@jit
def _total_variation_t(log_p, log_q, a, b, c):
    p = tl.exp(log_p)
    d = log_p - log_q
    return tl.abs(p - tl.exp(log_q)) / 2, p * tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, 0.0))


def _total_variation_series(a: float, b: float, c: float) -> Series:
    """First order itself: it has no power series, and needs none."""
    return Series(1.0, [0.0], [0.0], radius=0.0)


def _alpha_beta(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    s = a + b
    p_s, both = (s * log_p).exp(), (a * log_q + b * log_p).exp()
    return (b / s * p_s + a / s * (s * log_q).exp() - both) / (a * b), (p_s - both) / a


@jit
def _alpha_beta_t(log_p, log_q, a, b, c):
    s = a + b
    p_s = tl.exp(s * log_p)
    both = tl.exp(a * log_q + b * log_p)
    return (b / s * p_s + a / s * tl.exp(s * log_q) - both) / (a * b), (p_s - both) / a


def _alpha_beta_series(a: float, b: float, c: float) -> Series:
    s = a + b
    f = [0.0, 0.0, *((b / s * s**n - b**n) / (a * b) * x for n, x in enumerate(_EXP[2:], 2))]
    return Series(s, f, [(s**n - b**n) / a * x for n, x in enumerate(_EXP)], radius=0.5 / max(s, 1.0))


def _alpha_zero(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p_a, d = (a * log_p).exp(), log_p - log_q
    return ((a * log_q).exp() - p_a + a * p_a * d) / a**2, p_a * d


@jit
def _alpha_zero_t(log_p, log_q, a, b, c):
    p_a = tl.exp(a * log_p)
    d = log_p - log_q
    return (tl.exp(a * log_q) - p_a + a * p_a * d) / (a * a), p_a * d


def _alpha_zero_series(a: float, b: float, c: float) -> Series:
    whole = [a**n * x for n, x in enumerate(_EXP)]  # exp(a d)
    h = _multiply(whole, [0.0, 1.0])
    f = _subtract([a * x for x in h], _subtract(whole, [1.0]))
    return Series(a, [x / a**2 for x in f], h, radius=0.5 / max(a, 1.0))


def _beta_zero(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p_a, q_a = (a * log_p).exp(), (a * log_q).exp()
    return (p_a - q_a - a * q_a * (log_p - log_q)) / a**2, (p_a - q_a) / a


@jit
def _beta_zero_t(log_p, log_q, a, b, c):
    p_a = tl.exp(a * log_p)
    q_a = tl.exp(a * log_q)
    return (p_a - q_a - a * q_a * (log_p - log_q)) / (a * a), (p_a - q_a) / a


def _beta_zero_series(a: float, b: float, c: float) -> Series:
    whole = [a**n * x for n, x in enumerate(_EXP)]
    f, h = _subtract(whole, [1.0, a]), _subtract(whole, [1.0])
    return Series(a, [x / a**2 for x in f], [x / a for x in h], radius=0.5 / max(a, 1.0))


def _cosine(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of the sum, and its gradient with respect to the student's logits."""
    norms = [logits.norm(dim=1, keepdim=True).clamp(min=_SMALLEST_NORM) for logits in (student, teacher)]
    unit = student / norms[0]
    difference = unit - teacher / norms[1]
    # 1 - cos from the distance of the unit vectors, as the cosine of close ones has lost its digits.
    f = difference.square() / 2
    return f, (difference - unit * f.sum(1, keepdim=True)) / norms[0]


class Form(NamedTuple):
    """The three of a form, and whether ``sum(h)`` is 0 whatever p and q are."""

    torch: Callable[..., tuple[Tensor, Tensor]]
    triton: Any
    series: Callable[[float, float, float], Series]
    balanced: bool = False


#: What a :class:`Divergence` may sum.
FORMS = {
    "forward_kl": Form(_forward_kl, _forward_kl_t, _forward_kl_series, balanced=True),
    "reverse_kl": Form(_reverse_kl, _reverse_kl_t, _reverse_kl_series),
    "mixture": Form(_mixture, _mixture_t, _mixture_series),
    "gkd_mixture": Form(_mixture, _gkd_mixture_t, _mixture_series),
    "total_variation": Form(_total_variation, _total_variation_t, _total_variation_series),
    "alpha_beta": Form(_alpha_beta, _alpha_beta_t, _alpha_beta_series),
    "alpha_zero": Form(_alpha_zero, _alpha_zero_t, _alpha_zero_series),
    "beta_zero": Form(_beta_zero, _beta_zero_t, _beta_zero_series),
}


def terms(divergence: Divergence, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """f and h of every entry, for torch."""
    form = FORMS[divergence.form]
    f, h = form.torch(log_p, log_q, divergence.a, divergence.b, divergence.c)
    series = form.series(divergence.a, divergence.b, divergence.c)
    # In fp64, only where the terms left out are smaller still.
    d = log_p - log_q
    near = d.abs() < series.radius * (0.04 if d.dtype == torch.float64 else 1.0)
    d, q = d.clamp(-series.radius, series.radius), (series.power * log_q).exp()
    return tuple(  # type: ignore[return-value]
        torch.where(near, q * _polynomial(coefficients, d), far) for coefficients, far in ((series.f, f), (series.h, h))
    )


def _polynomial(coefficients: Sequence[float], d: Tensor) -> Tensor:
    total = torch.full_like(d, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total.mul_(d).add_(coefficient)
    return total


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
