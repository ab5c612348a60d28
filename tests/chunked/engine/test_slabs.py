"""Quantized heads are dequantized once for each pass: as a whole where they fit, else in tiles for all tokens."""

import pytest
import torch

from liger_losses import Head, linear_logps, linear_statistics
from liger_losses.chunked.engine import blocks
from liger_losses.chunked.engine.adapters import LowRank
from liger_losses.chunked.engine.call import make_call
from liger_losses.chunked.engine.plan import EngineOptions
from liger_losses.chunked.engine.query import Query
from liger_losses.kernels.linear_exp import linear_exponentials
from liger_losses.kernels.logit_transform import Epilogue
from tests.kernels.cases import interpreted
from tests.reference import (
    Int8Weight,
    double,
    peak_bytes,
    plain_statistics,
    problem,
    relative_error,
)

V, H, T = 100, 40, 40
#: Bytes of workspaces in which the head is dequantized as a whole, and slab by slab.
WHOLE, SLABS = 60_000, 32_000
FLOAT32, BFLOAT16, FLOAT16 = (torch.float32, "torch"), (torch.bfloat16, "triton"), (torch.float16, "triton")


@pytest.fixture(autouse=True)
def few_tiles_at_once(monkeypatch):
    """Statistics of tiles are merged several times."""
    monkeypatch.setattr(blocks, "MOST_TILES", 2)


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


def gradients(values, names, parts):
    """Of a sum of statistics with random weights."""
    upstream = [
        torch.randn(T, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(len(names))
    ]
    values = [values[name] for name in names]
    return torch.autograd.grad(values, parts, [g.to(value.dtype) for g, value in zip(upstream, values, strict=True)])


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


@pytest.mark.parametrize("lora", [False, True])
def test_memory_where_logits_are_kept(lora):
    """A head that was dequantized as a whole stays with them until backward, which makes no second one."""
    size, columns, tokens = 64, 2_000, 20
    quantized = Int8Weight(torch.randn(columns, size, generator=torch.Generator().manual_seed(0)))
    hidden, labels = torch.randn(tokens, size, requires_grad=True), torch.arange(tokens)
    a, b = torch.randn(2, size, requires_grad=True), torch.zeros(columns, 2, requires_grad=True)
    head = Head(quantized, adapters=(LowRank(a, b),) if lora else ())
    workspace = int(columns * (size + 2) * 4 * 2.2)
    expanded = head.expand(hidden) if lora else (hidden, head)
    call = make_call(*expanded, labels, Query(("logp", "entropy")), EngineOptions(workspace=workspace))[1]
    assert call.strategy == "resident"
    assert call.work.dequantized_bytes

    def run():
        linear_logps(hidden, head, labels, workspace=workspace, entropy=True).logp.sum().backward()

    outputs = 2 * hidden.numel() * 4 * (1 + lora) + (2 * b.numel() * 4 + 2 * a.numel() * 4) * lora
    assert peak_bytes(run) < workspace + outputs


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
    for ours, theirs in zip(gradients(found._asdict(), names, hidden), gradients(exact, names, x), strict=True):
        assert relative_error(ours, theirs) < 1e-5


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


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
def test_log_sum_exps_of_columns_without_probability(backend):
    hidden, weight = torch.randn(3, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    bias = torch.full((16,), -torch.inf)
    found = linear_exponentials(hidden, weight, torch.arange(3), None, Epilogue(bias=bias), backend=backend)
    assert torch.equal(found.lse, torch.full((3,), -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=[interpreted, pytest.mark.slow])])
def test_the_same_bits_in_any_batch(dtype):
    """A head that is dequantized as a whole has the bits of the ordinary one."""
    hidden, quantized, weight, labels, _ = inputs(dtype)
    backend, labels = "torch" if dtype == torch.float32 else "triton", labels.clamp(min=0)
    head, ordinary = Head(quantized, batch_invariant=True), Head(weight, batch_invariant=True)
    options = {"entropy": True, "backend": backend}
    expected = linear_logps(hidden, ordinary, labels, **options)
    for tokens, workspace in ((slice(0, T), None), (slice(3, 4), WHOLE), (slice(5, 30, 3), 2 * WHOLE)):
        found = linear_logps(hidden[tokens], head, labels[tokens], workspace=workspace, **options)
        assert torch.equal(found.logp, expected.logp[tokens])
        assert torch.equal(found.entropy, expected.entropy[tokens])
