"""Heads of torchtitan; real.py has its loss class."""

import functools

import pytest
import torch
import torch.nn.functional as F

from liger_losses.integrations import torchtitan
from tests.reference import problem


def head_of(name, forward, **options):
    """A linear layer of a class with this ``forward``, of the layer and its input."""
    return type(name, (torch.nn.Linear,), {"forward": forward})(24, 61, **options)


def soft_capped(head, x, cap=None):
    """As the head of torchtitan's muse_glimmer: with a multiplier, and with or without a soft-cap."""
    logits = torch.nn.Linear.forward(head, x).float() * 2.5
    return logits if cap is None else cap * torch.tanh(logits / cap)


HEADS = {"plain": torch.nn.Linear.forward, "scaled": soft_capped}
HEADS["soft-capped"] = functools.partialmethod(soft_capped, cap=3.0)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_head_and_what_it_makes_of_its_logits(name, bias, sharded, one_process):
    hidden, _, labels, _ = problem(n=24)
    head = torch.nn.Linear(24, 61, bias=bias) if name == "plain" else head_of(name, HEADS[name], bias=bias)
    expected = F.cross_entropy(head(hidden), labels, reduction="sum")
    grads = torch.autograd.grad(expected / 2, (hidden, *head.parameters()))
    model = torch.nn.Sequential(torch.nn.Identity(), head)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(head)
        fully_shard(model)
    loss = torchtitan.cross_entropy_in_forward(head, model[0](hidden), labels)
    torch.testing.assert_close(loss, expected)
    (loss / 2).backward()
    found = [p.grad.full_tensor() if sharded else p.grad for p in head.parameters()]
    torch.testing.assert_close([hidden.grad, *found], list(grads))
    assert "forward" not in vars(head)


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
