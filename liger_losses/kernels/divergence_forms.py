"""The divergences: what is summed over the vocabulary, for torch and for Triton, and how it is close to the teacher.

p is the student's softmax, q the teacher's, d = log p - log q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import jit, tl

#: Below it, nothing that is multiplied by a logarithm matters.
_SMALLEST = 1e-37
#: Logits that are all 0 have no direction.
_SMALLEST_NORM = 1e-12


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
