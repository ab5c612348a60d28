"""Power series of divergences close to the teacher."""

import math

import pytest
import torch

from liger_losses.functional import forward_kl
from liger_losses.kernels.divergence_forms import FORMS
from liger_losses.kernels.divergence_terms import series_of
from tests.reference import divergence


def exponential(s=1.0):
    """The power series of ``exp(s d)``."""
    return [s**n / math.factorial(n) for n in range(9)]


#: (f, h) in powers of d = log p - log q, for q = 1; derived by hand.
POWER_SERIES = {
    "forward KL": ([0, 0, *exponential()[2:]], [0, *exponential()[1:]]),
    "reverse KL": ([0, 0, *((n - 1) / math.factorial(n) for n in range(2, 9))], [0, *exponential()[:8]]),
    "JSD": (
        [0, 0, 1 / 8, 1 / 16, 1 / 64, 1 / 384, 1 / 2304, 1 / 11520, 1.0850694444444441e-05],
        [0, 1 / 4, 3 / 16, 1 / 16, 5 / 384, 1 / 384, 7 / 11520, 1 / 11520, -2.325148809523812e-06],
    ),
    "interpolated JSD 0.3": (
        [0, 0, 0.185, 0.09416666666666665, 0.022391666666666664, 0.0035518333333333313, 0.0007174388888888889]
        + [0.00014298174603174607, 5.825694444444443e-06],
        [0, 0.37, 0.2825, 0.08956666666666666, 0.01775916666666666, 0.004304633333333332, 0.0010008722222222218]
        + [4.6605555555555544e-05, -6.529121031746025e-06],
    ),
    "alpha-beta 1.2 0.8": (
        [0, 0, *((0.4 * x - y) / 0.96 for x, y in zip(exponential(2.0)[2:], exponential(0.8)[2:], strict=True))],
        [0, *((x - y) / 1.2 for x, y in zip(exponential(2.0)[1:], exponential(0.8)[1:], strict=True))],
    ),
    "alpha-beta 0 0.5": (
        [0, 0, *(0.5**n * (n - 1) / math.factorial(n) / 0.25 for n in range(2, 9))],
        [0, *exponential(0.5)[:8]],
    ),
    "alpha-beta 0.5 0": (
        [0, 0, *(x / 0.25 for x in exponential(0.5)[2:])],
        [0, *(x / 0.5 for x in exponential(0.5)[1:])],
    ),
}


@pytest.mark.parametrize("name", POWER_SERIES)
def test_power_series(name):
    """The coefficients that are computed from the formulas equal those that were derived by hand."""
    series = series_of(divergence(name))
    for found, expected in zip((series.f, series.h), POWER_SERIES[name], strict=True):
        assert found == pytest.approx(expected, rel=0, abs=1e-13)


@pytest.mark.parametrize("gap", [2e2, 2e4, 2e6])
def test_however_unlikely_a_column_is(gap):
    """``KL(q || p) = 1/2 (log 1/2 - 0) + 1/2 (log 1/2 + gap)``; the gradient is p - q."""
    log_p = torch.tensor([0.0, -gap], requires_grad=True)
    found = forward_kl(log_p, torch.full((2,), 0.5).log())
    assert found.item() == pytest.approx(gap / 2 - math.log(2), rel=1e-6)
    (grad,) = torch.autograd.grad(found, log_p)
    assert grad.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("zero", [-math.inf, torch.finfo(torch.float32).min])
def test_columns_without_a_probability_add_nothing(zero):
    log_p, log_q = torch.tensor([math.log(0.25), math.log(0.75), zero]), torch.tensor([math.log(0.5)] * 2 + [zero])
    assert torch.equal(forward_kl(log_p, log_q), forward_kl(log_p[:2], log_q[:2]))


@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("limited")])
def test_a_limit_does_not_hide_nan(name):
    terms = FORMS[name].torch(torch.tensor([torch.nan, -1.0]), torch.tensor([-1.0, -1.0]), 0.5, 0.5, 0.5)
    assert terms[0].isnan().tolist() == [True, False]
