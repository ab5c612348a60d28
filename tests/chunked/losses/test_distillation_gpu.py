"""Distillation on a GPU: exact, within its workspace, and the same bits every time."""

import itertools

import pytest
import torch

import liger_losses
from liger_losses import DistillationLoss, Divergence, Teacher
from tests.chunked.core.test_stream_gpu import MiB
from tests.losses import JSD, KL
from tests.reference import assert_as_exact_as_plain

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["forward KL", "reverse KL", "JSD", "cosine", "total variation"])
def test_distillation(name, bias, dtype):
    """Two heads with odd vocabularies, and a hard loss at another temperature, in several blocks."""
    from tests.chunked.losses import test_distillation as cpu

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size, scale=1.0):
        return torch.randn(*size, device="cuda", generator=generator).mul_(scale).to(dtype)

    labels = torch.randint(1001, (3, 333), device="cuda", generator=generator)
    labels[:, :50] = -100
    hidden, weight, own = normal(3, 333, 96), normal(1031, 96, scale=0.1), normal(1031)
    teacher = [normal(3, 333, 128), normal(1001, 128, scale=0.1), normal(1001) if bias else None]
    leaves = [t.requires_grad_() for t in ((hidden, weight, own) if bias else (hidden, weight))]
    given = (hidden, weight, own if bias else None, labels, *teacher)
    exact_in = [
        t if t is None or t.dtype == torch.int64 else t.detach().double().requires_grad_(t.requires_grad) for t in given
    ]
    exact = cpu.plain(name, *exact_in, 0.3, 0.7, 2.0)
    rough = cpu.plain(name, *given, 0.3, 0.7, 2.0)
    exact_grads = torch.autograd.grad(exact, exact_in[: len(leaves)])
    rough_grads = torch.autograd.grad(rough, leaves)
    for options in ({}, {"workspace": 6 * MiB}, {"workspace": 2 * MiB}):  # the last one in tiles, without a bias
        loss = DistillationLoss(cpu.divergence(name), 0.3, 0.7, temperature=2.0, **options)
        value, _ = loss(weight, hidden, labels, Teacher(*teacher), bias=given[2])
        assert abs(value - exact) <= max(2 * abs(rough - exact), 1e-6 * abs(exact))
        grads = torch.autograd.grad(value, leaves)
        for ours, plain, right in zip(grads, rough_grads, exact_grads, strict=True):
            assert_as_exact_as_plain(ours, plain, right, floor=1e-5 if dtype == torch.float32 else None)


def test_distillation_stays_under_its_workspace_and_repeats_itself():
    hidden = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(50257, 256, device="cuda", dtype=torch.bfloat16).mul_(0.1).requires_grad_()
    teacher = Teacher(hidden.detach().roll(1, 0), weight.detach().roll(1, 0))
    labels = torch.randint(50257, (4096,), device="cuda")
    for workspace in (None, 24 * MiB):  # cuBLAS allocates its own workspaces at the first call, and on a second stream
        JSD(workspace=workspace)(weight, hidden, labels, teacher)
    # The smaller ones in tiles of the vocabulary, whose sums are cut by the processors alone.
    for workspace, kind in itertools.product((24 * MiB, 64 * MiB, 300 * MiB, None), (JSD, KL)):
        loss, results = kind(0.0, 1.0, workspace=workspace), []
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            value, _ = loss(weight, hidden, labels, teacher)
            extra = torch.cuda.max_memory_allocated() - before - 2 * (weight.numel() + hidden.numel())
            assert workspace is None or extra <= workspace, f"{extra / MiB:.0f} MiB"
            results.append((value.detach(), *torch.autograd.grad(value, (hidden, weight))))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("k", [8, 64, 256])
def test_the_largest_log_probabilities(k):
    """Of a vocabulary with more groups of columns than are kept; in bf16, ids may differ where logits nearly tie."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(517, 256, generator=g).bfloat16().cuda().requires_grad_()
    weight = (torch.randn(66001, 256, generator=g) / 16).bfloat16().cuda().requires_grad_()
    found = liger_losses.linear_topk(hidden, weight, k, rest=True)
    logits = hidden.double() @ weight.double().t()
    exact = logits.log_softmax(-1).topk(k, -1)
    torch.testing.assert_close(found.logps.double(), exact.values, rtol=1e-4, atol=1e-4)
    picked = logits.log_softmax(-1).gather(-1, found.ids)
    torch.testing.assert_close(found.logps.double(), picked, rtol=1e-4, atol=1e-4)
    rest = logits.log_softmax(-1).scatter(-1, found.ids, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(found.rest.double(), rest, rtol=1e-4, atol=1e-4)
    grads = [torch.autograd.grad(x.exp().sum(), (hidden, weight)) for x in (found.logps, exact.values)]
    for ours, true in zip(*grads, strict=True):
        assert float((ours - true).norm() / true.norm()) < 2e-2


@pytest.mark.parametrize(
    "options", [{"top_k": 64, "tail": "none"}, {"top_k": 64, "top_k_of": "teacher"}, {"entry_limit": 0.05}, {}], ids=str
)
def test_distillation_on_the_students_tokens(options):
    """As on a CPU in float64."""
    g, results = torch.Generator().manual_seed(0), []
    given = [
        torch.randn(*size, generator=g) / size[-1] ** 0.25
        for size in ((2, 70, 64), (9001, 64), (2, 70, 96), (9001, 96))
    ]
    labels = torch.zeros(2, 70, dtype=torch.long)
    labels[1, 30:] = -100
    which = Divergence.reverse_kl() if options else Divergence.kl_by_entropy(6.0)
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        hidden, weight, states, head = (x.bfloat16().to(device, dtype) for x in given)
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
        loss = liger_losses.DistillationLoss(which, 0.0, 1.0, **options)
        value, _ = loss(weight, hidden, labels.to(device), liger_losses.Teacher(states, head))
        results.append([x.double().cpu() for x in (value.detach(), *torch.autograd.grad(value, (hidden, weight)))])
    for exact, ours in zip(*results, strict=True):
        assert float((ours - exact).norm() / exact.norm()) < 3e-2
