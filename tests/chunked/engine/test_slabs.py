"""Quantized heads are dequantized once for each pass: as a whole where they fit, else in tiles for all tokens."""

from types import SimpleNamespace

import pytest
import torch

from liger_losses import Head, linear_statistics
from liger_losses.chunked.engine.call import make_call
from liger_losses.chunked.engine.plan import EngineOptions
from liger_losses.chunked.engine.query import Query
from tests.reference import (
    Int8Weight,
    double,
    plain_statistics,
    problem,
    relative_error,
    weighted,
)

V, H, T = 100, 40, 40
#: Bytes of workspaces in which the head is dequantized as a whole, and slab by slab.
WHOLE, SLABS = 60_000, 32_000


class Counted(Int8Weight):
    """Counts how often each row was dequantized."""

    def __init__(self, weight):
        super().__init__(weight)
        self.counts = torch.zeros(len(weight), dtype=torch.int64)

    def rows(self, start, stop):
        self.counts[start:stop] += 1
        return super().rows(start, stop)


def inputs(dtype, **options):
    hidden, weight, labels, bias = problem(T, H, V, dtype=dtype, scale=2.0, masked=0.1, **options)
    quantized = Counted(weight.float())
    weight = quantized.rows(0, V).to(dtype)
    quantized.counts.zero_()
    return hidden, quantized, weight, labels, bias


@pytest.mark.parametrize("workspace", [WHOLE, SLABS])
def test_rows_are_dequantized_once_for_each_pass(workspace):
    hidden, quantized, _, labels, _ = inputs(torch.float32)
    options, names = EngineOptions(workspace=workspace), ("logp", "entropy")
    call = make_call(hidden, Head(quantized), labels, Query(names), options)[1]
    assert (call.work.dequantized_bytes > 0, call.work.walks) == (workspace == WHOLE, workspace == SLABS)
    found = linear_statistics(hidden, Head(quantized), labels, names, options=options)
    torch.autograd.grad((found.logp + found.entropy).sum(), hidden)
    parts = -(-call.tokens.count // call.plan.tile_rows) if call.work.walks else 1
    assert 1 <= quantized.counts.min() <= quantized.counts.max() <= 2 * parts


@pytest.mark.parametrize("active", [slice(0, 30), slice(60, 100)], ids=["first", "last"])
def test_columns_without_probability(active):
    """Where a bias of -inf leaves slabs without any probability, all else is as without them."""
    hidden, quantized, weight, labels, _ = inputs(torch.float32)
    labels = torch.where(labels >= 0, labels % (active.stop - active.start) + active.start, labels)
    bias = torch.full((V,), -torch.inf)
    bias[active] = 0.0
    names, options = ("logp", "entropy", "lse", "log_sum_sq_probs"), EngineOptions(workspace=SLABS)
    assert make_call(hidden, Head(quantized, bias), labels, Query(names), options)[1].plan.tile_columns < 50
    found = linear_statistics(hidden, Head(quantized, bias), labels, names, metrics="argmax", options=options)
    x, w = double(hidden, weight)
    inside = torch.where(labels >= 0, labels - active.start, labels)
    exact = plain_statistics(x, w[active], inside)
    assert all(relative_error(getattr(found, name), exact[name]) < 1e-6 for name in names)
    assert torch.equal(found.argmax, ((x @ w[active].t()).argmax(-1) + active.start) * (labels >= 0))
    ours, theirs = (weighted([getattr(values, name) for name in names]) for values in (found, SimpleNamespace(**exact)))
    assert relative_error(*(torch.autograd.grad(value, of)[0] for value, of in ((ours, hidden), (theirs, x)))) < 1e-5


def test_a_token_that_is_not_finite():
    """It is NaN alone, and its argmax is still a column."""
    hidden, quantized, _, labels, _ = inputs(torch.float32)
    options, labels = EngineOptions(workspace=SLABS), labels.clamp(min=0)
    with torch.no_grad():
        hidden[3] = torch.nan
    assert make_call(hidden, Head(quantized), labels, Query(("logp", "entropy")), options)[1].work.walks
    found = linear_statistics(hidden, Head(quantized), labels, ("logp", "entropy"), metrics="argmax", options=options)
    grad = torch.autograd.grad((found.logp + found.entropy).sum(), hidden)[0]
    broken = torch.arange(T) == 3
    for value in (found.logp, found.entropy, grad.sum(1)):
        assert torch.equal(value.isnan(), broken)
    assert found.argmax.max() < V
