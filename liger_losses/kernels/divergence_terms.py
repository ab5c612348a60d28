"""The terms of a divergence at every entry, for torch and for Triton: by its form, or close to the teacher by a series.

p is the student's softmax, q the teacher's, d = log p - log q, f the term of the divergence, h = df / d log p.
"""

from __future__ import annotations

import contextlib
import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.divergence_forms import FORMS, Divergence, fast_exp
from liger_losses.kernels.matmul import wide_dtype

try:
    from torch.utils._python_dispatch import _disable_current_modes as _without_modes
except ImportError:  # torch has no public name for it
    _without_modes = contextlib.nullcontext  # type: ignore[assignment]

#: Coefficients of a power series; the rest is below fp32's rounding within the radius.
TERMS = 9
#: Points of the circle on which a form is evaluated. The functions are analytic in more than its radius (up to pi).
_POINTS = 64


class Series(NamedTuple):
    """A divergence's parameters and power series, for torch and for kernels: where ``|d| < radius``,
    ``f = q^power sum_n f_n d^n``, and h likewise."""

    a: float
    b: float
    c: float
    radius: float = 0.0
    power: float | None = None  # None for 1
    #: f's of d^2 to d^8 and h's of d to d^8, which a device reads from its constant memory; ``None`` without a series.
    coefficients: tuple[float, ...] | None = None


@cache
def series_of(divergence: Divergence) -> Series:
    """The power series of a divergence; its radius is 0 where there is none.

    The coefficients are ``f_n = 1/N sum_k f(d_k) d_k^-n`` on the circle ``d_k = r exp(2 pi i k / N)`` (Cauchy's
    formula): the reference form, evaluated on complex numbers with q = 1.
    """
    form, parameters = FORMS[divergence.form], (float(divergence.a), float(divergence.b), float(divergence.c))
    if not form.smooth:
        return Series(*parameters)
    power = float(form.power(*parameters))
    radius = 0.5 / max(power, 1.0)
    with _without_modes():  # torch.compile may be tracing, but these are numbers, which are cached
        angles = torch.arange(_POINTS, dtype=torch.float64, device="cpu") * (2 * math.pi / _POINTS)
        d = torch.polar(torch.full_like(angles, 2 * radius), angles)
        powers = torch.stack([d**-n for n in range(TERMS)])
        values = form.torch(d, torch.zeros_like(d), *parameters)
        f, h = ((powers * value).mean(1).real.tolist() for value in values)
    # Where both models agree, a divergence is 0 and has a minimum: what the sums leave there is rounding.
    return Series(*parameters, radius, None if power == 1 else power, (*f[2:], *h[1:]))


def terms(
    divergence: Divergence, log_p: Tensor, log_q: Tensor, parameter: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """f and h of every entry, in torch; ``parameter [...]`` is ``a`` of each row, where rows have one."""
    a = divergence.a if parameter is None else parameter[..., None]
    f, h = FORMS[divergence.form].torch(log_p, log_q, a, divergence.b, divergence.c)
    series = series_of(divergence)
    if series.coefficients is None:
        return f, h
    d = log_p - log_q
    # In fp64 within a smaller radius, where the omitted terms are below its rounding.
    near = d.abs() < series.radius * (0.04 if d.dtype == torch.float64 else 1.0)
    d, q = d.clamp(-series.radius, series.radius), (log_q if series.power is None else series.power * log_q).exp()
    # f and h as one number, in half the operations.
    total = torch.zeros_like(d, dtype=wide_dtype(d.dtype).to_complex())
    for both in map(complex, (0.0, *series.coefficients[:7])[::-1], series.coefficients[:6:-1]):
        total.mul_(d).add_(both)
    total *= q * d
    return torch.where(near, total.real.to(f), f), torch.where(near, total.imag.to(h), h)


def summed_terms(
    divergence: Divergence, log_p: Tensor, log_q: Tensor, parameter: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of f over each row, ``[...]``, and h of every entry ``[..., C]``."""
    f, h = terms(divergence, log_p, log_q, parameter)
    return f.sum(-1), h


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
