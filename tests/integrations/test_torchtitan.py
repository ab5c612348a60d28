"""torchtitan's losses."""

import functools
import sys
import types
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from liger_losses.integrations import torchtitan
from tests.reference import problem


def test_torchtitan_loss_under_fully_shard(one_process):
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
    model = torch.nn.Sequential(torch.nn.Identity(), head)
    fully_shard(head)
    fully_shard(model)
    states = hidden.detach().requires_grad_()
    loss = torchtitan.cross_entropy_in_forward(head, model[0](states), labels)
    (loss / 2).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(states.grad, expected_grads[0] / 2)
    torch.testing.assert_close(head.weight.grad.full_tensor(), expected_grads[1] / 2)


def head_of(name, forward, **options):
    """A linear layer of a class with this ``forward``, of the layer and its input."""
    return type(name, (torch.nn.Linear,), {"forward": forward})(24, 61, **options)


def soft_capped(head, x, cap=None):
    """As the head of torchtitan's muse_glimmer: with a multiplier, and with or without a soft-cap."""
    logits = torch.nn.Linear.forward(head, x).float() * 2.5
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("cap", [3.0, None])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_head_that_transforms_its_logits(cap, bias, sharded, tmp_path):
    hidden, _, labels, _ = problem(n=24)
    head = head_of("SoftCapped", functools.partialmethod(soft_capped, cap=cap), bias=bias)
    expected = F.cross_entropy(head(hidden), labels, reduction="sum")
    expected.backward()
    grads = [hidden.grad.clone(), *(p.grad.clone() for p in head.parameters())]
    hidden.grad = None
    head.zero_grad()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
        fully_shard(head)
    try:
        loss = torchtitan.cross_entropy_in_forward(head, hidden, labels)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        found = [p.grad.full_tensor() if sharded else p.grad for p in head.parameters()]
        torch.testing.assert_close([hidden.grad, *found], grads)
    finally:
        if sharded:
            dist.destroy_process_group()


LORA = torch.nn.Sequential(torch.nn.Linear(24, 2), torch.nn.Linear(2, 61))
FORWARDS = {
    "Adapted": lambda head, x: torch.nn.Linear.forward(head, x) + head.lora(x),  # as torchtitan's LoRA layers
    "Normalized": lambda head, x: F.linear(x, F.normalize(head.weight, dim=-1)),
    "Shifted": lambda head, x: torch.nn.Linear.forward(head, x) + torch.arange(61),
    "FromOtherInputs": lambda head, x: torch.nn.Linear.forward(head, x * 2),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_head_that_is_no_product_is_refused(name):
    hidden, _, labels, _ = problem(n=24)
    head = head_of(name, FORWARDS[name])
    if name == "Adapted":
        head.lora = LORA
    with pytest.raises(TypeError, match=rf"{name}.*does not compute .*keep torchtitan's ChunkedLossWrapper"):
        torchtitan.cross_entropy_in_forward(head, hidden, labels)


def test_torchtitan_loss_class(monkeypatch):
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
    with pytest.raises(ValueError, match="call its set_lm_head"):
        loss(hidden, labels)
    head = torch.nn.Linear(24, 61)
    loss.set_lm_head(head)
    value, metrics = loss(hidden, labels, torch.tensor(4.0))
    torch.testing.assert_close(value, F.cross_entropy(head(hidden), labels, reduction="sum") / 4)
    assert metrics == {}
