"""The divergences, and the functions that they sum over the vocabulary, for torch and for Triton.

p is the student's softmax, q the teacher's, d = log p - log q.

A new divergence is two functions ``(log p, log q, a, b, c) -> (f, h)``, one for torch and one for Triton, or one for
both, a row of :data:`FORMS`, and a constructor of :class:`Divergence`. f is the term of the divergence,
h = df / d log p.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import INTERPRETED, jit, tl
from liger_losses.kernels.targets import HAS_LIBDEVICE

#: Added before a logarithm is taken: far below fp32's rounding of any term.
_SMALLEST = 1e-37
#: Whether there are the fast functions that :func:`fast_exp` and :func:`fast_log` call.
_FAST = tl is not None and not INTERPRETED and HAS_LIBDEVICE
if _FAST:
    from triton.language.extra.cuda.libdevice import fast_expf, fast_logf
if tl is not None:  # the kernels of every device read it, and read no global that is no constexpr
    _FAST = tl.constexpr(_FAST)
#: A log-probability below this means a probability of 0: -inf, and the finite numbers that masks put in its place.
_ZERO_BELOW = -1e30
#: It counts as this many nats: its exponential is 0, and so is 0 times it, which 0 times -inf is not.
_LOG_OF_ZERO = -1e4
#: Logits that are all 0 have no direction.
SMALLEST_NORM = 1e-12


@dataclass(frozen=True)
class Divergence:
    """A sum over the vocabulary of a function of the student's softmax p and the teacher's softmax q.

    Use the constructors; ``form`` names one of :data:`FORMS`, and a, b, c are its parameters.
    """

    form: str
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0

    def __post_init__(self) -> None:
        if self.form not in FORMS and self.form != "cosine":
            raise ValueError(
                f"unknown divergence {self.form!r}; use a constructor: Divergence.forward_kl(), .reverse_kl(), "
                ".jsd(), .total_variation(), .cosine(), .alpha_beta(alpha, beta) or .mixture(teacher, of_teacher, "
                "of_student); or register_divergence()."
            )
        for name in ("a", "b", "c"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and -math.inf < float(value) < math.inf):
                raise ValueError(f"the parameters of a divergence must be finite numbers, got {value!r}.")

    @property
    def has_kernel(self) -> bool:
        """Whether a Triton kernel computes its terms."""
        return self.form not in FORMS or FORMS[self.form].triton is not None

    @property
    def by_entropy(self) -> bool:
        """Whether the parameter ``a`` is one of each row, which follows from the teacher's entropy."""
        return self.form == "kl_by_entropy"

    def row_parameter(self, entropy: Tensor) -> Tensor:
        """``a`` of each row ``[...]``, from the teacher's entropy there, in nats."""
        return torch.where(entropy > self.b, self.a, 0.0)

    def limited(self, limit: float) -> Divergence:
        """The sum of ``min(term, limit)`` over the vocabulary, as in OPSD (arXiv:2601.18734).

        Terms are as the divergence is written; they may be negative, and so may the sum.

        Raises:
            ValueError: the divergence is neither the forward KL, the reverse KL nor GKD's JSD.
        """
        limits = {"forward_kl": (limit,), "reverse_kl": (limit,), "gkd_mixture": (self.a, limit)}
        matched = self.form != "gkd_mixture" or (self.b, self.c) == (self.a, 1 - self.a)
        if self.form not in limits or not matched:
            raise ValueError(f"only the forward KL, the reverse KL and GKD's JSD take a limit per entry, got {self}.")
        if not (isinstance(limit, Real) and 0 < float(limit) < math.inf):
            raise ValueError(f"limit must be a positive number of nats, got {limit!r}.")
        return Divergence(f"limited_{self.form}", *limits[self.form])

    @classmethod
    def kl_by_entropy(cls, threshold: float, weight: float = 1.0) -> Divergence:
        """``KL(p || q) + weight [H(q) > threshold] KL(q || p)``, with the teacher's entropy H in nats: entropy-aware
        on-policy distillation (arXiv:2603.07079)."""
        return cls("kl_by_entropy", weight, threshold)

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
    def jsd(cls, beta: float = 0.5, convention: str = "gkd") -> Divergence:
        """The generalized Jensen-Shannon divergence with ``m = beta q + (1 - beta) p``.

        - ``convention="gkd"``: ``beta KL(q || m) + (1 - beta) KL(p || m)``, as in GKD (arXiv:2306.13649, eq. 1),
          liger-kernel and TRL. It goes to 0 towards both ends, so beta also changes its size.
        - ``convention="interpolated"``: ``(1 - beta) KL(q || m) + beta KL(p || m)``, which interpolates between
          ``KL(q || p)`` and ``KL(p || q)``. TRL's GKD used it until March 2025, with ``1 - beta`` for beta.

        In both, ``beta=0`` is ``KL(q || p)`` and ``beta=1`` is ``KL(p || q)``, and at 1/2 they are the same.

        Raises:
            TypeError, ValueError: a beta out of [0, 1], or another convention.
        """
        _check_parameter("beta", beta, 1.0)
        if convention not in ("gkd", "interpolated"):
            raise ValueError(f"unknown convention {convention!r}; it must be one of gkd, interpolated.")
        if beta in (0, 1):
            return cls.reverse_kl() if beta == 1 else cls.forward_kl()
        parts = (beta, 1 - beta) if convention == "gkd" else (1 - beta, beta)
        return cls.mixture(beta, *parts)

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

        Raises:
            TypeError, ValueError: alpha or beta out of their range.
        """
        _check_parameter("alpha", alpha)
        _check_parameter("beta", beta)
        if alpha + beta == 0:
            raise ValueError("alpha and beta must not both be 0: (1, 0) is KL(q || p), (0, 1) is KL(p || q).")
        if beta == 0:
            return cls("beta_zero", alpha)
        return cls("alpha_zero", beta) if alpha == 0 else cls("alpha_beta", alpha, beta)


def _check_parameter(name: str, value: Any, high: float = math.inf) -> None:
    """Raise TypeError or ValueError unless this is a finite number from 0 to ``high``."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not (0 <= value <= high and value < math.inf):  # type: ignore[operator]
        raise ValueError(f"{name} must lie in [0.0, {high}], got {value!r}.")


@jit
def fast_exp(x):
    """exp(x), 0 where it is below the smallest normal number, for which Triton's takes three more instructions."""
    if _FAST:
        return fast_expf(x)
    else:
        return tl.exp(x)


@jit
def fast_log(x):
    """log(x) for x > 0 by CUDA's ``__logf``, faster than Triton's. Its error is up to 4e-7 for x in [0.5, 2], however
    small the logarithm is, and a few units in the last place elsewhere."""
    if _FAST:
        return fast_logf(x)
    else:
        return tl.log(x)


@jit
def choose(condition, x, y):
    return tl.where(condition, x, y)


def finite_logs(logs: Tensor) -> Tensor:
    """Log-probabilities, with -10,000 where the probability is 0 (:data:`_ZERO_BELOW`)."""
    return logs.masked_fill(logs < max(_ZERO_BELOW, torch.finfo(logs.dtype).min), _LOG_OF_ZERO)


# --- The forms --------------------------------------------------------------------------------------------------------


# Most are written once, for both: in torch, ``exp`` and ``where`` are its own.


def _forward_kl(log_p, log_q, a, b, c, exp: tl.constexpr = fast_exp):
    p = exp(log_p)
    q = exp(log_q)
    return p - q - q * (log_p - log_q), p - q


def _reverse_kl(log_p, log_q, a, b, c, exp: tl.constexpr = fast_exp):
    p = exp(log_p)
    h = p * (log_p - log_q)
    return exp(log_q) - p + h, h


def _kl_by_entropy(log_p, log_q, a, b, c, exp: tl.constexpr = fast_exp):
    p = exp(log_p)
    q = exp(log_q)
    d = log_p - log_q
    return q - p + p * d + a * (p - q - q * d), p * d + a * (p - q)


def _alpha_beta(log_p, log_q, a, b, c, exp: tl.constexpr = fast_exp):
    s = a + b
    p_s = exp(s * log_p)
    both = exp(a * log_q + b * log_p)
    return (b / s * p_s + a / s * exp(s * log_q) - both) / (a * b), (p_s - both) / a


def _alpha_zero(log_p, log_q, a, b, c, exp: tl.constexpr = fast_exp):
    p_a = exp(a * log_p)
    d = log_p - log_q
    return (exp(a * log_q) - p_a + a * p_a * d) / (a * a), p_a * d


def _beta_zero(log_p, log_q, a, b, c, exp: tl.constexpr = fast_exp):
    p_a = exp(a * log_p)
    q_a = exp(a * log_q)
    return (p_a - q_a - a * q_a * (log_p - log_q)) / (a * a), (p_a - q_a) / a


def _mixture(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, q = log_p.exp(), log_q.exp()
    m = a * q + (1 - a) * p + _SMALLEST  # not a clamp, which complex numbers lack
    log_m = m.log()
    of_student = p * (log_p - log_m)
    f = b * (q * (log_q - log_m) + m - q) + c * (of_student + m - p)
    k = b * (1 - a) - c * a
    h = c * of_student
    return f, h if k == 0 else h + k * (1 - a) * (p - q) * p / m


@jit
def _mixture_parts(log_p, log_q, a):
    """p, q, m, log p - log m and log q - log m, from ``log m = max + log(a or 1 - a + the other exp(-|d|))``.

    The fast logarithm's absolute error is enough there: close to the teacher, where log p - log m is small, f and h are
    power series.
    """
    d = log_p - log_q
    p = fast_exp(log_p)
    q = fast_exp(log_q)
    ratio = fast_exp(-tl.abs(d))
    log_m = fast_log(tl.where(d < 0, a + (1 - a) * ratio, a * ratio + (1 - a)))  # less the larger one's
    return p, q, a * q + (1 - a) * p, tl.minimum(d, 0.0) - log_m, -tl.maximum(d, 0.0) - log_m


@jit
def _mixture_t(log_p, log_q, a, b, c):
    p, q, m, of_p, of_q = _mixture_parts(log_p, log_q, a)
    of_student = p * of_p
    f = b * (q * of_q + m - q) + c * (of_student + m - p)
    return f, c * of_student + (b * (1 - a) - c * a) * (1 - a) * (p - q) * (p / tl.maximum(m, 1e-37))


@jit
def _gkd_mixture_t(log_p, log_q, a, b, c):
    """The mixture where ``b (1 - a) = c a``, as in GKD's JSD: one term of h vanishes."""
    p, q, m, of_p, of_q = _mixture_parts(log_p, log_q, a)
    of_student = p * of_p
    return b * (q * of_q + m - q) + c * (of_student + m - p), c * of_student


def _total_variation(log_p, log_q, a, b, c, exp: tl.constexpr = fast_exp, where: tl.constexpr = choose):
    p = exp(log_p)
    d = log_p - log_q
    half = where(d > 0, 0.5, where(d < 0, -0.5, 0.0))
    return half * (p - exp(log_q)), p * half


def cosine_terms(
    student: Tensor, teacher: Tensor, squares: Tensor | None = None, distance: Tensor | None = None
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


def _limited_forward_kl(log_p, log_q, a, b, c, exp: tl.constexpr = fast_exp, where: tl.constexpr = choose):
    q = exp(log_q)
    f = q * (log_q - log_p)
    return where(f > a, a, f), where(f > a, 0.0, -q)  # NaN stays


def _limited_reverse_kl(log_p, log_q, a, b, c, exp: tl.constexpr = fast_exp, where: tl.constexpr = choose):
    p = exp(log_p)
    d = log_p - log_q
    return where(p * d > a, a, p * d), where(p * d > a, 0.0, p * (d + 1))


def _limited_gkd_mixture(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, q = log_p.exp(), log_q.exp()
    log_m = (a * q + (1 - a) * p + _SMALLEST).log()
    h = (1 - a) * p * (log_p - log_m)
    f = a * q * (log_q - log_m) + h
    return f.clamp(max=b), torch.where(f < b, h, 0.0)


@jit
def _limited_gkd_mixture_t(log_p, log_q, a, b, c):
    p, q, _m, of_p, of_q = _mixture_parts(log_p, log_q, a)
    h = (1 - a) * p * of_p
    f = a * q * of_q + h
    return tl.minimum(f, b), tl.where(f < b, h, 0.0)


class Form(NamedTuple):
    """A row of :data:`FORMS`: ``(log p, log q, a, b, c) -> (f, h)`` in torch and in Triton, and their properties."""

    torch: Callable[..., tuple[Tensor, Tensor]]
    triton: Any
    balanced: bool = False  # whether sum(h) is 0 for all p and q
    power: Callable[[float, float, float], float] = lambda a, b, c: 1.0  # the s for which f / q^s depends on d alone
    smooth: bool = True  # whether f / q^s is a power series in d
    #: The multiple of p - q that was added to the terms of the divergence as it is written.
    added: Callable[[float, float, float], float] = lambda a, b, c: 0.0


def _of_both(form: Callable[..., Any], **properties: Any) -> Form:
    """The row of a form that is written once."""
    functions = {"exp": torch.exp, "where": torch.where}
    of_torch = {name: functions[name] for name in signature(form).parameters if name in functions}
    return Form(partial(form, **of_torch), jit(form), **properties)


#: What a :class:`Divergence` may sum.
FORMS = {
    "forward_kl": _of_both(_forward_kl, balanced=True, added=lambda a, b, c: 1.0),
    "reverse_kl": _of_both(_reverse_kl, added=lambda a, b, c: -1.0),
    "mixture": Form(_mixture, _mixture_t, added=lambda a, b, c: b * (1 - a) - c * a),
    "gkd_mixture": Form(_mixture, _gkd_mixture_t),
    "kl_by_entropy": _of_both(_kl_by_entropy, smooth=False),
    "limited_forward_kl": _of_both(_limited_forward_kl, smooth=False),
    "limited_reverse_kl": _of_both(_limited_reverse_kl, smooth=False),
    "limited_gkd_mixture": Form(_limited_gkd_mixture, _limited_gkd_mixture_t, smooth=False),
    "total_variation": _of_both(_total_variation, smooth=False),
    "alpha_beta": _of_both(_alpha_beta, power=lambda a, b, c: a + b),
    "alpha_zero": _of_both(_alpha_zero, power=lambda a, b, c: a),
    "beta_zero": _of_both(_beta_zero, power=lambda a, b, c: a),
}
