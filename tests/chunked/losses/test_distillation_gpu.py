"""Distillation on a GPU: exact, within its workspace, and the same bits every time."""

import itertools

import pytest
import torch

from liger_losses import (
    DistillationLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLLoss,
    Teacher,
)
from tests.chunked.engine.test_stream_gpu import MiB
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
        LigerFusedLinearJSDLoss(workspace=workspace)(weight, hidden, labels, teacher)
    # The smaller ones in tiles of the vocabulary, whose sums are cut by the processors alone.
    for workspace, kind in itertools.product(
        (24 * MiB, 64 * MiB, 300 * MiB, None), (LigerFusedLinearJSDLoss, LigerFusedLinearKLLoss)
    ):
        loss, results = kind(0.0, 1.0, workspace=workspace), []
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            value, _ = loss(weight, hidden, labels, teacher)
            extra = torch.cuda.max_memory_allocated() - before - 2 * (weight.numel() + hidden.numel())
            assert workspace is None or extra <= workspace, f"{extra / MiB:.0f} MiB"
            results.append((value.detach(), *torch.autograd.grad(value, (hidden, weight))))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
