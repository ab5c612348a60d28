"""The GPU of the head is current where Triton launches, whichever was before."""

import pytest
import torch

from liger_losses import LigerFusedLinearCrossEntropyLoss, linear_logps
from liger_losses.chunked.accelerators import label_rows, linear_exp, linear_stats
from liger_losses.chunked.core import stream
from liger_losses.kernels import reading, softmax_grad, softmax_stats
from liger_losses.kernels._triton import INTERPRETED
from tests.reference import problem

MODULES = label_rows, linear_exp, linear_stats, reading, softmax_grad, softmax_stats
KERNELS = [(module, name) for module in MODULES for name in vars(module) if name.endswith("_kernel")]
#: Calls, and how many kernels they launch: one counts the labels of each target.
CALLS = {
    "one pass": (7, lambda h, w, y, **on: LigerFusedLinearCrossEntropyLoss(**on)(w, h, y)),
    "statistics": (5, lambda h, w, y, **on: linear_logps(h.detach(), w.detach(), y, **on).sum()),
    "two passes": (7, lambda h, w, y, **on: linear_logps(h, w, y, **on).sum()),
    "several heads": (14, lambda h, w, y, **on: LigerFusedLinearCrossEntropyLoss(**on)([w, w * 1], h, [y, y])[0]),
}


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("launches", "call"), CALLS.values(), ids=CALLS)
def test_device_is_current_at_every_launch(launches, call, autocast, monkeypatch):
    current, launched = [], []

    class Watched:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            launched.append((self.name, bool(current)))
            return self.kernel[grid]

    class Within:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            current.append(self.tensor.device)

        def __exit__(self, *error):
            current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", Within)
    for module in (*MODULES, stream):
        if hasattr(module, "device_of"):
            monkeypatch.setattr(module, "device_of", Within)
    for module, name in KERNELS:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, Watched(name, getattr(module, name)))
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
