"""The GPU of the head is current where Triton launches, whichever was before."""

import contextlib
from unittest import mock

import pytest
import torch

from liger_losses import LigerFusedLinearCrossEntropyLoss, linear_logps
from liger_losses.chunked.accelerators import label_rows, linear_exp
from liger_losses.chunked.core import stream
from liger_losses.kernels import reading, softmax_grad, softmax_stats
from liger_losses.kernels._triton import INTERPRETED
from tests.reference import problem

MODULES = label_rows, linear_exp, reading, softmax_grad, softmax_stats
KERNELS = [(module, name) for module in MODULES for name in vars(module) if name.endswith("_kernel")]
#: Calls, and how many kernels they launch: one counts the labels of each target.
CALLS = {
    "one pass": (8, lambda h, w, y, **on: LigerFusedLinearCrossEntropyLoss(**on)(w, h, y)),
    "statistics": (6, lambda h, w, y, **on: linear_logps(h.detach(), w.detach(), y, **on).sum()),
    "two passes": (8, lambda h, w, y, **on: linear_logps(h, w, y, **on).sum()),
    "several heads": (16, lambda h, w, y, **on: LigerFusedLinearCrossEntropyLoss(**on)([w, w * 1], h, [y, y])[0]),
}


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("launches", "call"), CALLS.values(), ids=CALLS)
def test_device_is_current_at_every_launch(launches, call, autocast, monkeypatch):
    current, launched = [], []

    @contextlib.contextmanager
    def within(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    for owner in (torch.cuda, *MODULES, stream):
        monkeypatch.setattr(owner, "device_of", within, raising=False)
    for module, name in KERNELS:
        watched, kernel = mock.MagicMock(), getattr(module, name)
        watched.__getitem__.side_effect = lambda grid, name=name, kernel=kernel: (
            launched.append((name, bool(current))) or kernel[grid]
        )
        monkeypatch.setattr(module, name, watched)
    hidden, weight, labels, _ = problem(20, 16, 40, dtype=torch.bfloat16, masked=0.3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = call(hidden, weight, labels, backend="triton")
    if loss.requires_grad:
        loss.backward()
    assert len(launched) == launches
    assert all(inside for _, inside in launched), launched
    assert not current


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("call", [call for _, call in CALLS.values()], ids=CALLS)
def test_head_on_another_gpu(call):
    found = []
    for device in ("cuda:0", "cuda:1"):
        hidden, weight, labels, _ = problem(300, 256, 4096, dtype=torch.bfloat16, masked=0.3)
        leaves = [t.detach().to(device).requires_grad_() for t in (hidden, weight)]
        loss = call(*leaves, labels.to(device))
        gradients = torch.autograd.grad(loss, leaves) if loss.requires_grad else ()
        assert torch.cuda.current_device() == 0
        found.append([t.cpu() for t in (loss, *gradients)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
