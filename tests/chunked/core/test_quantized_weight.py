"""Quantized heads: exact against the dequantized weight in float64, in bounded memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from liger_losses import EngineOptions, Head, linear_statistics
from liger_losses.chunked.core import stream
from tests.reference import Int8Weight, double, plain_statistics, problem, relative_error, weighted

V, H = 120, 40  # rows of 40 start inside of blocks of 64


def linear(dtype=torch.float32, bias=False, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(H, V, bias=bias, dtype=dtype)


@pytest.fixture
def plans(monkeypatch):
    """Those of calls."""
    made, plans = [], stream.plans
    monkeypatch.setattr(stream, "plans", lambda *call: made.extend(plans(*call)) or made[-1:])
    return made


#: In which a head of 100 x 40 is dequantized by tiles of columns for 40 tokens.
SMALL = EngineOptions(workspace=20_000)


def small():
    hidden, weight, labels, _ = problem(40, 40, 100, scale=2.0, masked=0.1)
    return hidden, Int8Weight(weight), labels


@pytest.mark.parametrize("active", [slice(0, 30), slice(60, 100)], ids=["first", "last"])
def test_columns_without_probability(active, plans):
    """Where a bias of -inf leaves tiles without any probability, all else is as without them."""
    hidden, quantized, labels = small()
    labels = torch.where(labels >= 0, labels % (active.stop - active.start) + active.start, labels)
    bias = torch.full((100,), -torch.inf)
    bias[active] = 0.0
    names = ("logp", "entropy", "lse", "log_sum_sq_probs")
    found = linear_statistics(hidden, Head(quantized, bias), labels, names, metrics="argmax", options=SMALL)
    assert plans[0].tile is not None
    assert plans[0].products.columns < 50
    x, w = double(hidden, quantized.rows(0, 100))
    exact = plain_statistics(x, w[active], torch.where(labels >= 0, labels - active.start, labels))
    assert all(relative_error(getattr(found, name), exact[name]) < 1e-6 for name in names)
    assert torch.equal(found.argmax, ((x @ w[active].t()).argmax(-1) + active.start) * (labels >= 0))
    ours, theirs = (weighted([getattr(values, name) for name in names]) for values in (found, SimpleNamespace(**exact)))
    assert relative_error(*(torch.autograd.grad(value, of)[0] for value, of in ((ours, hidden), (theirs, x)))) < 1e-5


def test_a_token_that_is_not_finite(plans):
    """It is NaN alone, and its argmax is still a column."""
    hidden, quantized, labels = small()
    with torch.no_grad():
        hidden[3] = torch.nan
    names, labels = ("logp", "entropy"), labels.clamp(min=0)
    found = linear_statistics(hidden, Head(quantized), labels, names, metrics="argmax", options=SMALL)
    assert plans[0].tile is not None
    grad = torch.autograd.grad((found.logp + found.entropy).sum(), hidden)[0]
    for value in (found.logp, found.entropy, grad.sum(1)):
        assert torch.equal(value.isnan(), torch.arange(40) == 3)
    assert found.argmax.max() < 100
