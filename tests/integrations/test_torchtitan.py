"""torchtitan's losses."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from liger_losses.integrations import torchtitan
from tests.reference import problem


def test_torchtitan_loss_under_fully_shard(tmp_path):
    from torch.distributed.fsdp import fully_shard

    hidden, weight, labels, _ = problem(n=24)
    head = torch.nn.Linear(24, 61, bias=False)
    head.weight.data.copy_(weight)
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    loss = torchtitan.cross_entropy_in_forward(head, hidden, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, head.weight)), expected_grads)
    assert "forward" not in vars(head)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Identity(), head)
        fully_shard(head)
        fully_shard(model)
        states = hidden.detach().requires_grad_()
        loss = torchtitan.cross_entropy_in_forward(head, model[0](states), labels)
        (loss / 2).backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(states.grad, expected_grads[0] / 2)
        torch.testing.assert_close(head.weight.grad.full_tensor(), expected_grads[1] / 2)
    finally:
        dist.destroy_process_group()


def test_torchtitan_loss_class(monkeypatch):
    from dataclasses import dataclass

    loss_module = types.ModuleType("torchtitan.components.loss")

    class ChunkedLossWrapper:
        @dataclass(kw_only=True, slots=True)
        class Config:
            num_chunks: int = 8

        def set_lm_head(self, lm_head):
            self.lm_head = lm_head

    loss_module.ChunkedLossWrapper = ChunkedLossWrapper
    for name in ("torchtitan", "torchtitan.components"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchtitan.components.loss", loss_module)
    torchtitan._loss_class.cache_clear()
    loss_class = torchtitan.LinearCrossEntropyLoss
    torchtitan._loss_class.cache_clear()
    assert issubclass(loss_class, ChunkedLossWrapper)
    loss = loss_class(loss_class.Config())
    hidden, _, labels, _ = problem(n=10)
    with pytest.raises(ValueError, match="call set_lm_head"):
        loss(hidden, labels)
    head = torch.nn.Linear(24, 61)
    loss.set_lm_head(head)
    value, metrics = loss(hidden, labels, torch.tensor(4.0))
    torch.testing.assert_close(value, F.cross_entropy(head(hidden), labels, reduction="sum") / 4)
    assert metrics == {}
