"""Quantized heads on a GPU: Triton's kernels on logits, products on a second stream, in bf16."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses import Head, Teacher, linear_logps
from liger_losses.chunked.engine.adapters import LowRank
from liger_losses.chunked.engine.call import make_call
from liger_losses.chunked.engine.plan import EngineOptions
from liger_losses.chunked.engine.query import Query
from tests.losses import CE, JSD
from tests.reference import Int8Weight, assert_as_exact_as_plain, double, relative_error

pytestmark = pytest.mark.gpu
T, H, V = 700, 256, 5003


def inputs():
    torch.manual_seed(0)
    quantized = Int8Weight(torch.randn(V, H, device="cuda") / 16)
    hidden = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(V, (T,), device="cuda")
    labels[:50] = -100
    a = torch.randn(8, H, device="cuda", dtype=torch.bfloat16).div(16).requires_grad_()
    b = torch.randn(V, 8, device="cuda", dtype=torch.bfloat16).div(4).requires_grad_()
    return quantized, hidden, labels, a, b


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("workspace", [None, 2**23, 2**22])  # with the last, slab by slab
def test_cross_entropy_and_lora(workspace, lora):
    quantized, hidden, labels, a, b = inputs()
    head = Head(quantized, adapters=(LowRank(a, b, 0.5),) if lora else ())
    parts = (hidden, a, b) if lora else (hidden,)
    loss = CE(workspace=workspace)(head, hidden, labels)
    found = (loss, *torch.autograd.grad(loss, parts))

    def plain(w, x, a=None, b=None):
        logits = x @ w.t() if a is None else x @ w.t() + 0.5 * (x @ a.t()) @ b.t()
        return F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), labels)

    results = []
    for tensors in (parts, double(*parts)):
        value = plain(quantized.rows(0, V).bfloat16().to(tensors[0].dtype), *tensors)
        results.append((value, *torch.autograd.grad(value, tensors)))
    for ours, rounded, exact in zip(found, *results, strict=True):
        assert_as_exact_as_plain(ours, rounded, exact)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("masked", [0, 400])
def test_memory_of_slabs(masked, entropy):
    """A head of 62 MiB, with a workspace of 60: each row is dequantized twice for every block of tokens."""
    quantized = Int8Weight(torch.randn(32_000, 1024, device="cuda") / 32)
    hidden = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(32_000, (4096,), device="cuda")
    labels[:masked] = -100
    options, names = EngineOptions(workspace=60 * 2**20), ("logp", "entropy") if entropy else ("logp",)
    call = make_call(hidden, Head(quantized), labels, Query(names), options)[1]
    assert call.work.walks

    def run():
        found = linear_logps(hidden, Head(quantized), labels, workspace=60 * 2**20, entropy=entropy)
        logp = found.logp if entropy else found
        return logp, *torch.autograd.grad(logp.sum() + (found.entropy.sum() if entropy else 0), hidden)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, gradient = run()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 60 * 2**20 + 2 * hidden.numel() * 2  # and the gradient, with its copy of a forward that keeps one
    weight = quantized.rows(0, 32_000).bfloat16()
    for workspace in (None, 60 * 2**20):
        ordinary = linear_logps(hidden, weight, labels, workspace=workspace, entropy=entropy)
        expected = ordinary.logp if entropy else ordinary
        value = expected.sum() + (ordinary.entropy.sum() if entropy else 0)
        assert relative_error(logp, expected) < 1e-6
        assert relative_error(gradient, *torch.autograd.grad(value, hidden)) < 5e-3


def test_unlikely_labels_in_slabs():
    """Exponentials relative to the label would overflow in some slabs."""
    quantized, hidden, labels, *_ = inputs()
    quantized.scales *= 1 + 100 * torch.rand(V, 1, device="cuda")
    weight = quantized.rows(0, V).bfloat16()
    results = []
    for head, options in ((Head(quantized), {"workspace": 2**22}), (weight, {}), (weight.double(), {})):
        states = hidden.detach().to(head.dtype if isinstance(head, torch.Tensor) else hidden.dtype).requires_grad_()
        logp = linear_logps(states, head, labels, **options)
        results.append((logp, *torch.autograd.grad(logp.sum(), states)))
    ours, ordinary, exact = results
    assert exact[0].min() < -100
    assert relative_error(ours[0], exact[0]) < 1e-6
    assert relative_error(ours[1], exact[1]) < 1.3 * relative_error(ordinary[1], exact[1])


def test_log_probabilities_and_distillation():
    quantized, hidden, labels, *_ = inputs()
    weight = quantized.rows(0, V).bfloat16()
    teacher_hidden = hidden.detach() * 1.1
    results = []
    for head in (Head(quantized), weight):
        found = linear_logps(hidden, head, labels, entropy=True)
        value = found.logp.sum() + found.entropy.sum()
        loss, _ = JSD()(head, hidden, labels, Teacher(teacher_hidden, head))
        results.append((value, *torch.autograd.grad(value, hidden), loss, *torch.autograd.grad(loss, hidden)))
    assert all(relative_error(a, b) < 1e-2 for a, b in zip(*results, strict=True))
