"""Quantized heads are dequantized once for each pass: as a whole where they fit, else in tiles for all tokens."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses import (
    Head,
    LigerFusedLinearCrossEntropyLoss,
    LogitTransform,
    linear_logps,
    linear_statistics,
    linear_token_loss,
)
from liger_losses.chunked.engine import blocks
from liger_losses.chunked.engine.adapters import LowRank
from liger_losses.chunked.engine.call import make_call
from liger_losses.chunked.engine.plan import EngineOptions
from liger_losses.chunked.engine.query import Query
from liger_losses.kernels._triton import INTERPRETED, triton
from liger_losses.kernels.linear_exp import linear_exponentials
from liger_losses.kernels.logit_transform import Epilogue
from tests.quantized_layers import Int8Weight
from tests.reference import assert_as_exact_as_plain, double, peak_bytes, plain_statistics, problem, relative_error

V, H, T = 100, 40, 40
#: Bytes of workspaces in which the head is dequantized as a whole, and slab by slab.
WHOLE, SLABS = 60_000, 32_000
interpreted = pytest.mark.skipif(not INTERPRETED or triton is None, reason="needs Triton's interpreter")
FLOAT32, BFLOAT16, FLOAT16 = (torch.float32, "torch"), (torch.bfloat16, "triton"), (torch.float16, "triton")


@pytest.fixture(autouse=True)
def few_tiles_at_once(monkeypatch):
    """Statistics of tiles are merged several times."""
    monkeypatch.setattr(blocks, "MOST_TILES", 2)


def cases(options, few):
    """Each option with each workspace and kind; kernels of all but a few of these take long in the interpreter."""
    return [
        pytest.param(option, workspace, *kind, marks=marks_of(kind, (option, workspace, kind) in few))
        for option in options
        for workspace in (WHOLE, SLABS)
        for kind in (FLOAT32, BFLOAT16, FLOAT16)
    ]


def marks_of(kind, quick):
    return [] if kind == FLOAT32 else [interpreted] if quick else [interpreted, pytest.mark.slow]


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


MANY = ("lse", "logp", "entropy", "mean_logp", "log_sum_sq_probs")


@pytest.mark.parametrize(
    ("names", "workspace", "dtype", "backend"), cases([("logp",), MANY], {(MANY, SLABS, BFLOAT16)})
)
def test_statistics(names, workspace, dtype, backend):
    hidden, quantized, weight, labels, bias = inputs(dtype, bias=True)
    bias, classes = bias.detach(), torch.rand(V, generator=torch.Generator().manual_seed(1)).to(dtype)
    metrics = ("mean_logit",) if names == ("logp",) else ("argmax", "mean_logit")
    transform = {"temperature": 0.8, "logit_scale": 1.2, "softcap": 5.0}
    head, options = (
        Head(quantized, bias, LogitTransform(**transform)),
        EngineOptions(backend=backend, workspace=workspace),
    )
    call = make_call(hidden, head, labels, Query(names, metrics, class_weight=classes), options)[1]
    assert (call.work.dequantized_bytes > 0, call.work.walks) == (workspace == WHOLE, workspace == SLABS)
    assert call.work.fused == (backend == "triton")
    if workspace == SLABS:
        assert call.plan.tile_columns < V // 2
    found = linear_statistics(hidden, head, labels, names, metrics=metrics, class_weight=classes, options=options)
    ours = gradients(found._asdict(), names, hidden)
    blocks = -(-call.tokens.count // call.plan.tile_rows) if call.work.walks else 1
    assert 1 <= quantized.counts.min() <= quantized.counts.max() <= 2 * blocks
    results = []
    for h, w, b, c in ((hidden, weight, bias, classes), double(hidden, weight, bias, classes)):
        exact = plain_statistics(h, w, labels, b, c, **transform)
        results.append(*gradients(exact, names, h))
    assert_as_exact_as_plain(*ours, *results)
    assert all(relative_error(getattr(found, name), exact[name]) < 1e-6 for name in names)
    assert relative_error(found.mean_logit, exact["mean_logit"]) < 5e-6
    if found.argmax is not None:
        assert torch.equal(found.argmax, (h @ w.t() + b).argmax(-1) * (labels >= 0))


@pytest.mark.parametrize(
    ("rank", "workspace", "dtype", "backend"), cases([0, 4], {(0, SLABS, BFLOAT16), (4, WHOLE, BFLOAT16)})
)
def test_cross_entropy_and_lora(rank, workspace, dtype, backend):
    hidden, quantized, weight, labels, _ = inputs(dtype)
    g = torch.Generator().manual_seed(3)
    a, b = ((torch.randn(*shape, generator=g) * 0.3).to(dtype).requires_grad_() for shape in ((4, H), (V, 4)))
    parts, adapters = ((hidden, a, b), (LowRank(a, b, 0.7),)) if rank else ((hidden,), ())
    head = Head(quantized, adapters=adapters)
    loss = LigerFusedLinearCrossEntropyLoss(workspace=workspace, backend=backend)(head, hidden, labels)
    found = torch.autograd.grad(loss, parts)
    if workspace == WHOLE:
        assert (quantized.counts == 1).all()

    def plain(w, h, a=None, b=None):
        logits = h @ w.t() if a is None else h @ w.t() + 0.7 * (h @ a.t()) @ b.t()
        return F.cross_entropy(logits.to(torch.promote_types(torch.float32, h.dtype)), labels)

    results = []
    for w, *rest in ((weight, *parts), double(weight, *parts)):
        value = plain(w, *rest)
        results.append(torch.autograd.grad(value, rest))
    assert relative_error(loss, value) < (1e-4 if rank and dtype != torch.float32 else 1e-6)
    for ours, rounded, exact in zip(found, *results, strict=True):
        assert_as_exact_as_plain(ours, rounded, exact)


@interpreted
@pytest.mark.slow
def test_unlikely_labels():
    """Exponentials relative to the label would overflow in some slabs: sums of the others are scaled."""
    hidden, _, _, _ = problem(T, H, V, dtype=torch.bfloat16)
    weight = torch.zeros(V, H)
    weight[:, 0] = torch.linspace(-60, 60, V)[torch.randperm(V, generator=torch.Generator().manual_seed(0))]
    weight[:, 1:] = torch.randn(V, H - 1, generator=torch.Generator().manual_seed(1)) * 0.3
    with torch.no_grad():
        hidden[:, 0] = torch.where(torch.arange(T) % 2 == 0, 2.0, -2.0)
    labels = torch.randint(V, (T,), generator=torch.Generator().manual_seed(2))
    quantized = Counted(weight)
    weight = quantized.rows(0, V).bfloat16()
    options = EngineOptions(backend="triton", workspace=SLABS)
    assert make_call(hidden, Head(quantized), labels, Query(("logp",)), options)[1].strategy == "two_pass"
    logps = linear_logps(hidden, Head(quantized), labels, backend="triton", workspace=SLABS)
    assert logps.min() < -200
    (ours,) = torch.autograd.grad(logps.sum(), hidden)
    (ordinary,) = torch.autograd.grad(linear_logps(hidden, weight, labels, backend="triton").sum(), hidden)
    h, w = double(hidden, weight)
    exact = plain_statistics(h, w, labels)["logp"]
    (gradient,) = torch.autograd.grad(exact.sum(), h)
    assert relative_error(logps, exact) < 1e-6
    assert relative_error(ours, gradient) < 1.3 * relative_error(ordinary, gradient)


@pytest.mark.parametrize("compact", [True, False])
def test_several_tensors_temperatures_and_a_trained_bias(compact):
    """Through slabs: masked tokens, lists of hidden states, a separable loss of several statistics."""
    hidden, quantized, weight, labels, bias = inputs(torch.float32, bias=True)
    options = EngineOptions(workspace=30_000, compact=compact)
    with torch.no_grad():
        temperature = torch.linspace(0.5, 2, T)
    head = Head(quantized, bias, LogitTransform(temperature))
    assert make_call(hidden, head, labels, Query(("logp", "entropy")), options)[1].work.walks

    def token_loss(found, labels):
        return -found.logp + 0.1 * found.entropy

    loss, _ = linear_token_loss(hidden, head, labels, token_loss, ("logp", "entropy"), options=options)
    x, w, z = double(hidden, weight, bias)
    log_p = ((x @ w.t() + z) / temperature.double()[:, None]).log_softmax(-1)
    active = labels >= 0
    entropy = -(log_p.exp() * log_p).sum(-1)
    exact = (0.1 * entropy - log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0])[active].sum()
    assert relative_error(loss, exact) < 1e-6
    for ours, theirs in zip(
        *(torch.autograd.grad(v, p) for v, p in ((loss, (hidden, bias)), (exact, (x, z)))), strict=True
    ):
        assert relative_error(ours, theirs) < 2e-6
    parts, targets = hidden.detach().split([18, 22]), labels.split([18, 22])
    parts = [part.requires_grad_() for part in parts]
    head = Head(quantized, bias)
    found = linear_statistics(parts, head, targets, ("logp",), options=options)
    value = sum((one.logp * (i + 1)).sum() for i, one in enumerate(found))
    exact = [plain_statistics(p.detach().double(), w, t, z)["logp"] for p, t in zip(parts, targets, strict=True)]
    assert all(relative_error(one.logp, e) < 1e-6 for one, e in zip(found, exact, strict=True))
    assert all(g.shape == p.shape for g, p in zip(torch.autograd.grad(value, parts), parts, strict=True))


@pytest.mark.parametrize(  # the workspace is three times the weight in floating point, divided by this
    ("fraction", "lora"),
    [(1, True), (2, False), *(pytest.param(5, lora, marks=pytest.mark.slow) for lora in (False, True))],
)
def test_memory(fraction, lora):
    """Everything a call allocates stays within the workspace, however little of the head fits."""
    size, columns, tokens = 64, 4_000, 400
    torch.manual_seed(0)
    quantized = Counted(torch.randn(columns, size))
    hidden, labels = torch.randn(tokens, size, requires_grad=True), torch.randint(columns, (tokens,))
    a, b = torch.randn(2, size, requires_grad=True), torch.zeros(columns, 2, requires_grad=True)
    head = Head(quantized, adapters=(LowRank(a, b),) if lora else ())
    workspace = columns * size * 4 * 3 // fraction

    def call():
        linear_logps(hidden, head, labels, workspace=workspace, entropy=True).logp.sum().backward()

    peak = peak_bytes(call)
    outputs = 2 * hidden.numel() * 4 * (1 + lora) + (2 * b.numel() * 4 + 2 * a.numel() * 4) * lora
    assert peak < workspace + outputs
    assert quantized.most <= columns // 4


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


def test_a_larger_workspace_is_never_too_small():
    """Where the tokens' vectors leave no room for the head as a whole, it is dequantized slab by slab."""
    hidden, quantized, _, labels, _ = inputs(torch.float32)
    hidden, labels = hidden.detach().repeat(50, 1).requires_grad_(), labels.repeat(50)
    calls = [
        make_call(hidden, Head(quantized), labels, Query(("entropy",)), EngineOptions(workspace=workspace))[1]
        for workspace in range(125_000, 480_000, 8_000)
    ]
    assert [call.work.walks for call in calls] == sorted([call.work.walks for call in calls], reverse=True)
    assert calls[0].work.walks
    assert not calls[-1].work.walks


@pytest.mark.parametrize("active", [slice(0, 30), slice(60, 100)], ids=["first", "last"])
def test_columns_without_probability(active):
    """Where a bias of -inf leaves slabs without any probability, all else is as without them."""
    hidden, quantized, weight, labels, _ = inputs(torch.float32)
    labels = torch.where(labels >= 0, labels % (active.stop - active.start) + active.start, labels)
    bias = torch.full((V,), -torch.inf)
    bias[active] = 0.0
    names, options = ("logp", "entropy", "lse", "log_sum_sq_probs"), EngineOptions(workspace=SLABS)
    assert make_call(hidden, Head(quantized, bias), labels, Query(names), options)[1].plan.tile_columns < 30
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
