"""Losses over many blocks: exact by every strategy, and safe to use anywhere autograd goes."""

import pytest
import torch

from liger_losses import EngineOptions, linear_statistics, linear_token_loss
from tests.reference import problem

MiB = 2**20
TRANSFORM = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 5.0}
OPTIONS = {
    "resident": EngineOptions(strategy="resident"),
    "two_pass": EngineOptions(strategy="two_pass", chunk_size=4, workspace=60_000),
}


def weighted(values, seed=3):
    """A fixed random linear function of tensors, so that every statistic and token has its own upstream gradient."""
    g = torch.Generator().manual_seed(seed)
    return sum((v * torch.randn(v.shape, generator=g, dtype=torch.float64).to(v)).sum() for v in values)


@pytest.mark.parametrize("strategy", ["one_pass", "resident", "two_pass", "frozen_head"])
def test_repeated_backward_and_determinism(strategy):
    hidden, weight, labels, _ = problem(40, 16, 101)
    weight.requires_grad_(strategy != "frozen_head")

    def build():
        options = EngineOptions(strategy=strategy, chunk_size=None if strategy == "resident" else 7)
        if strategy == "one_pass":
            return linear_token_loss(hidden, weight, labels, lambda s, y: -s.logp, options=options)[0]
        return -linear_statistics(hidden, weight, labels, options=options).logp.sum()

    inputs = [t for t in (hidden, weight) if t.requires_grad]
    loss = build()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    snapshot = [g.clone() for g in first]
    for g in first:
        g.mul_(7)  # what was handed out belongs to the caller
    second = torch.autograd.grad(3 * loss, inputs, retain_graph=True)
    third = torch.autograd.grad(loss, inputs)
    for a, b, c in zip(snapshot, second, third, strict=True):
        torch.testing.assert_close(3 * a, b)
        assert torch.equal(a, c), "not the same bit for bit"
    again = build()
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(snapshot, torch.autograd.grad(again, inputs), strict=True))
