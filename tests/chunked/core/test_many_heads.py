"""Several hidden states and heads in one call: as the sum of single calls, without their sum of gradients or memory."""

import pytest
import torch
from torch import nn

from liger_losses import Head, linear_token_loss
from liger_losses.chunked.core import stream
from liger_losses.chunked.core.buffers import Gradients
from tests.losses import CE
from tests.reference import problem

K, H, V, SHAPE = 3, 24, 131, (2, 11)


@pytest.mark.parametrize(("which", "weights"), [([0, 0, 0], 1), ([0, 1, 2], 3), ([0, 1, 0], 2)])
def test_heads_of_one_call(which, weights, monkeypatch):
    """The host waits for the device once, and a weight's gradient has one buffer, whatever head object it is in."""
    waits, sizes, read, results = [], [], stream.start_reading, Gradients.results
    monkeypatch.setattr(stream, "start_reading", lambda *given: waits.append(1) or read(*given))
    monkeypatch.setattr(Gradients, "results", lambda grads: sizes.append(len(grads.buffers)) or results(grads))
    hidden, _, labels, _ = problem(0, H, V, shape=SHAPE)
    layers, states = [nn.Linear(H, V, bias=False) for _ in range(K)], [hidden.detach() * k for k in range(K)]
    CE(shift=[1, 2, 3])([Head.of(layers[i]) for i in which], states, labels)
    assert (waits, sizes) == ([1], [weights])


@pytest.mark.parametrize("name", ["weight", "bias", "shift", "transform", "heads"])
def test_token_inputs_of_any_name(name):
    hidden, weight, labels, _ = problem(0, H, V, shape=SHAPE)
    scale = torch.rand(SHAPE)
    loss, found = linear_token_loss(
        hidden, [weight] * K, labels, lambda s, labels, **given: -given[name] * s.logp, token_inputs={name: scale}
    )
    torch.testing.assert_close(loss, -sum((scale * values.logp).sum() for values in found))
