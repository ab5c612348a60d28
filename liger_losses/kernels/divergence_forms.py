"""The divergences: the terms that are summed over the vocabulary, for torch and for Triton.

p is the student's softmax, q the teacher's, d = log p - log q.

A new divergence is two functions ``(log p, log q, a, b, c) -> (f, h)``, one for torch and one for Triton, a row of
:data:`FORMS`, and a constructor of :class:`Divergence`. f is the term of the divergence, h = df / d log p.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import INTERPRETED, LOGIT_DTYPES, choose_backend, jit, tl, triton
from liger_losses.kernels.targets import HAS_LIBDEVICE

try:
    from torch.utils._python_dispatch import _disable_current_modes as _without_modes
except ImportError:  # torch has no public name for it
    _without_modes = contextlib.nullcontext  # type: ignore[assignment]

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
                ".total_variation(), .cosine(), .alpha_beta(alpha, beta) or .mixture(teacher, of_teacher, of_student), "
                "which with 0.5 for each is the Jensen-Shannon divergence; or register_divergence()."
            )
        for name in ("a", "b", "c"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and -math.inf < float(value) < math.inf):
                raise ValueError(f"the parameters of a divergence must be finite numbers, got {value!r}.")

    @property
    def balanced(self) -> bool:
        """Whether ``sum_v h`` is 0 for all p and q: see :class:`Form`."""
        return self.form in FORMS and FORMS[self.form].balanced

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


# --- The forms --------------------------------------------------------------------------------------------------------


# Those that are sums, products and exponentials are written once, for both: in torch, ``exp`` is its own.


def _forward_kl(log_p, log_q, a, b, c, exp=fast_exp):
    p = exp(log_p)
    q = exp(log_q)
    return p - q - q * (log_p - log_q), p - q


def _reverse_kl(log_p, log_q, a, b, c, exp=fast_exp):
    p = exp(log_p)
    h = p * (log_p - log_q)
    return exp(log_q) - p + h, h


def _kl_by_entropy(log_p, log_q, a, b, c, exp=fast_exp):
    p = exp(log_p)
    q = exp(log_q)
    d = log_p - log_q
    return q - p + p * d + a * (p - q - q * d), p * d + a * (p - q)


def _alpha_beta(log_p, log_q, a, b, c, exp=fast_exp):
    s = a + b
    p_s = exp(s * log_p)
    both = exp(a * log_q + b * log_p)
    return (b / s * p_s + a / s * exp(s * log_q) - both) / (a * b), (p_s - both) / a


def _alpha_zero(log_p, log_q, a, b, c, exp=fast_exp):
    p_a = exp(a * log_p)
    d = log_p - log_q
    return (exp(a * log_q) - p_a + a * p_a * d) / (a * a), p_a * d


def _beta_zero(log_p, log_q, a, b, c, exp=fast_exp):
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


def _total_variation(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    return (p - log_q.exp()).abs() / 2, p * (log_p - log_q).sign() / 2


@jit
def _total_variation_t(log_p, log_q, a, b, c):
    p = fast_exp(log_p)
    d = log_p - log_q
    return tl.abs(p - fast_exp(log_q)) / 2, p * tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, 0.0))


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


def _limited(f: Tensor, h: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    return f.clamp(max=limit), torch.where(f < limit, h, 0.0)


def _limited_forward_kl(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    q = log_q.exp()
    return _limited(q * (log_q - log_p), -q, a)


@jit
def _limited_forward_kl_t(log_p, log_q, a, b, c):
    q = fast_exp(log_q)
    f = q * (log_q - log_p)
    return tl.minimum(f, a), tl.where(f < a, -q, 0.0)


def _limited_reverse_kl(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, d = log_p.exp(), log_p - log_q
    return _limited(p * d, p * (d + 1), a)


@jit
def _limited_reverse_kl_t(log_p, log_q, a, b, c):
    p = fast_exp(log_p)
    d = log_p - log_q
    return tl.minimum(p * d, a), tl.where(p * d < a, p * (d + 1), 0.0)


def _limited_gkd_mixture(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    p, q = log_p.exp(), log_q.exp()
    log_m = (a * q + (1 - a) * p + _SMALLEST).log()
    h = (1 - a) * p * (log_p - log_m)
    return _limited(a * q * (log_q - log_m) + h, h, b)


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
    return Form(partial(form, exp=torch.exp), jit(form), **properties)


#: What a :class:`Divergence` may sum.
FORMS = {
    "forward_kl": _of_both(_forward_kl, balanced=True, added=lambda a, b, c: 1.0),
    "reverse_kl": _of_both(_reverse_kl, added=lambda a, b, c: -1.0),
    "mixture": Form(_mixture, _mixture_t, added=lambda a, b, c: b * (1 - a) - c * a),
    "gkd_mixture": Form(_mixture, _gkd_mixture_t),
    "kl_by_entropy": _of_both(_kl_by_entropy, smooth=False),
    "limited_forward_kl": Form(_limited_forward_kl, _limited_forward_kl_t, smooth=False),
    "limited_reverse_kl": Form(_limited_reverse_kl, _limited_reverse_kl_t, smooth=False),
    "limited_gkd_mixture": Form(_limited_gkd_mixture, _limited_gkd_mixture_t, smooth=False),
    "total_variation": Form(_total_variation, _total_variation_t, smooth=False),
    "alpha_beta": _of_both(_alpha_beta, power=lambda a, b, c: a + b),
    "alpha_zero": _of_both(_alpha_zero, power=lambda a, b, c: a),
    "beta_zero": _of_both(_beta_zero, power=lambda a, b, c: a),
}


# --- Close to the teacher -------------------------------------------------------------------------------------------

#: Coefficients of a power series; the rest is below fp32's rounding within the radius.
TERMS = 9
#: Points of the circle on which a form is evaluated. The functions are analytic in more than its radius (up to pi).
_POINTS = 64


class Series(NamedTuple):
    """Where ``|d| < radius``: ``f = q^power sum_n f_n d^n``, and h likewise."""

    power: float
    radius: float
    f: list[float]
    h: list[float]


@cache
def series_of(divergence: Divergence) -> Series:
    """The power series of a divergence; its radius is 0 where there is none.

    The coefficients are ``f_n = 1/N sum_k f(d_k) d_k^-n`` on the circle ``d_k = r exp(2 pi i k / N)`` (Cauchy's
    formula): the reference form, evaluated on complex numbers with q = 1.
    """
    form, parameters = FORMS[divergence.form], (divergence.a, divergence.b, divergence.c)
    power = form.power(*parameters)
    if not form.smooth:
        return Series(power, 0.0, [0.0] * TERMS, [0.0] * TERMS)
    radius = 0.5 / max(power, 1.0)
    with _without_modes():  # torch.compile may be tracing, but these are numbers, which are cached
        angles = torch.arange(_POINTS, dtype=torch.float64, device="cpu") * (2 * math.pi / _POINTS)
        d = torch.polar(torch.full_like(angles, 2 * radius), angles)
        powers = torch.stack([d**-n for n in range(TERMS)])
        values = form.torch(d, torch.zeros_like(d), *parameters)
        f, h = ((powers * value).mean(1).real.tolist() for value in values)
    # Where both models agree, a divergence is 0 and has a minimum: what the sums leave there is rounding.
    f[0] = f[1] = h[0] = 0.0
    return Series(power, radius, f, h)


def finite_logs(logs: Tensor) -> Tensor:
    """Log-probabilities, with -10,000 where the probability is 0 (:data:`_ZERO_BELOW`)."""
    return logs.masked_fill(logs < max(_ZERO_BELOW, torch.finfo(logs.dtype).min), _LOG_OF_ZERO)


def terms(
    divergence: Divergence, log_p: Tensor, log_q: Tensor, parameter: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """f and h of every entry, in torch; ``parameter [...]`` is ``a`` of each row, where rows have one."""
    a = divergence.a if parameter is None else parameter[..., None]
    f, h = FORMS[divergence.form].torch(log_p, log_q, a, divergence.b, divergence.c)
    series = series_of(divergence)
    d = log_p - log_q
    # In fp64 within a smaller radius, where the omitted terms are below its rounding.
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


@jit
def terms_block(s, t, s_lse, t_lse, a, series, FORM: tl.constexpr):
    """p, f and h of a block of both models' logits, which are -inf outside the vocabulary; ``a`` is the row's."""
    log_p = s - s_lse
    log_q = t - t_lse
    log_p = tl.where(log_p < -1e30, -1e4, log_p)  # as finite_logs
    log_q = tl.where(log_q < -1e30, -1e4, log_q)
    f, h = FORM(log_p, log_q, a, series.b, series.c)
    if series.coefficients is not None:
        d = log_p - log_q
        near = tl.abs(d) < series.radius
        q = fast_exp(log_q if series.power is None else series.power * log_q)
        # f begins with d^2, h with d.
        of_f = series.coefficients[6]
        of_h = series.coefficients[14]
        for n in tl.static_range(6):
            of_f = of_f * d + series.coefficients[5 - n]
            of_h = of_h * d + series.coefficients[13 - n]
        of_h = of_h * d + series.coefficients[7]
        f = tl.where(near, q * d * d * of_f, f)
        h = tl.where(near, q * d * of_h, h)
    return fast_exp(log_p), f, h


class KernelSeries(NamedTuple):
    """A divergence's parameters and power series in a kernel; see :func:`series_argument`."""

    a: float
    b: float
    c: float
    radius: float
    power: float | None
    coefficients: tuple[float, ...] | None  # arguments, which the device reads from its constant memory


@cache
def series_argument(divergence: Divergence) -> KernelSeries:
    """``coefficients`` are f's of d^2 to d^8 and h's of d to d^8, ``None`` without a series; ``power`` is ``None`` for
    1."""
    series = series_of(divergence)
    a, b, c = (float(parameter) for parameter in (divergence.a, divergence.b, divergence.c))
    power = None if series.power == 1 else float(series.power)
    coefficients = None
    if series.radius > 0:
        coefficients = *series.f[2:], *series.h[1:]
    return KernelSeries(a, b, c, series.radius, power, coefficients)


#: Entries that a program of :func:`summed_terms` takes at a time.
_TERMS = 1024


def summed_terms(
    divergence: Divergence, log_p: Tensor, log_q: Tensor, parameter: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of f over each row, ``[...]``, and h of every entry ``[..., C]``, from log-probabilities ``[..., C]``.

    Args:
        divergence, parameter: which divergence, and its ``a`` of each row, ``[...]``, where rows have one.
        log_p, log_q: the student's and the teacher's.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.
    """
    if not divergence.has_kernel or choose_backend(backend, [log_p, log_q], dtypes=LOGIT_DTYPES) == "torch":
        f, h = terms(divergence, log_p, log_q, parameter)
        return f.sum(-1), h
    log_p, log_q = log_p.contiguous(), log_q.contiguous()
    value, h, columns = log_p.new_empty(log_p.shape[:-1]), torch.empty_like(log_p), log_p.shape[-1]
    if h.numel():
        block = min(_TERMS, triton.next_power_of_2(columns))
        _summed_terms_kernel[(triton.cdiv(value.numel(), _TERMS // block),)](
            value, h, log_p, log_q, None if parameter is None else parameter.contiguous(), value.numel(), columns,
            series_argument(divergence), FORM=FORMS[divergence.form].triton, ROWS=_TERMS // block, BLOCK=block,
        )  # fmt: skip
    return (value if h.numel() else value.zero_()), h


@jit(do_not_specialize=["rows"])
def _summed_terms_kernel(
    value, h_out, log_p, log_q, parameter, rows, columns, series,
    FORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for ``ROWS`` rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a = series.a
    if parameter is not None:
        a = tl.load(parameter + row, mask=row < rows, other=0.0)[:, None]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        place = row[:, None] * columns + at[None, :]
        s = tl.load(log_p + place, mask=inside, other=0.0)
        t = tl.load(log_q + place, mask=inside, other=0.0)
        _p, f, h = terms_block(s, t, 0.0, 0.0, a, series, FORM)
        tl.store(h_out + place, h, mask=inside)
        total += tl.where(inside, f, 0.0)
    tl.store(value + row, tl.sum(total, 1), mask=row < rows)
