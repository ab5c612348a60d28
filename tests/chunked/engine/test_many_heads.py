"""Several hidden states and heads in one call: as the sum of single calls, without their sum of gradients or memory."""

import pytest
import torch
from torch import nn

from liger_losses import Head, functional, linear_token_loss
from liger_losses.chunked.engine import autograd_functions
from liger_losses.chunked.engine.tokens import Tokens
from tests.losses import CE
from tests.reference import linear_of, problem

K, H, V, SHAPE = 3, 24, 131, (2, 11)


@pytest.fixture
def streams(monkeypatch):
    """The calls that were streamed."""
    found, stream = [], autograd_functions.Stream
    counted = lambda call, *more, **options: found.append(call) or stream(call, *more, **options)  # noqa: E731
    monkeypatch.setattr(autograd_functions, "Stream", counted)
    return found


def test_a_head_of_several_targets_is_one_stream(streams, monkeypatch):
    """And the host waits for the device once for all heads."""
    selections, select = [], Tokens.select
    monkeypatch.setattr(Tokens, "select", lambda *given: selections.append(given[0]) or select(*given))
    hidden, _, labels, _ = problem(0, H, V, shape=SHAPE)
    layers, states = [nn.Linear(H, V, bias=False) for _ in range(K)], [hidden * k for k in range(K)]
    for which, expected in (([0, 0, 0], [K]), ([0, 1, 2], [1] * K), ([0, 1, 0], [2, 1])):
        CE(shift=[1, 2, 3])([Head.of(layers[i]) for i in which], states, labels)  # an object each
        assert [len(call.tokens.shapes) for call in streams] == expected
        assert len(selections) == 1
        streams.clear()
        selections.clear()


@pytest.mark.parametrize("name", ["weight", "bias", "shift", "transform", "heads"])
def test_token_inputs_of_any_name(name):
    hidden, weight, labels, _ = problem(0, H, V, shape=SHAPE)
    scale = torch.rand(SHAPE)
    loss, found = linear_token_loss(
        hidden, [weight] * K, labels, lambda s, labels, **given: -given[name] * s.logp, token_inputs={name: scale}
    )
    torch.testing.assert_close(loss, -sum((scale * values.logp).sum() for values in found))


def test_the_pure_function_of_lists():
    logps, lse = [-torch.rand(n) for n in (3, 5)], [torch.rand(n) for n in (3, 5)]
    scales = [torch.tensor(0.5), torch.tensor(2.0)]
    found = functional.cross_entropy(logps, lse=lse, lse_square_scale=0.1, ce_scale=scales)
    for k in range(2):
        single = functional.cross_entropy(logps[k], lse=lse[k], lse_square_scale=0.1, ce_scale=scales[k])
        assert all(torch.equal(a, b) for a, b in zip(found[k][:2], single[:2], strict=True))


def test_a_repeated_head_in_a_compiled_function(streams):
    """It is one stream there too."""
    hidden, weight, labels, _ = problem(0, H, V, shape=SHAPE)
    loss, layer = CE(shift=[1, 2, 3]), linear_of(weight)

    def function(hidden):
        return loss([layer] * K, [hidden, 2 * hidden, torch.sin(hidden)], labels)[0]

    expected = torch.autograd.grad(function(hidden), [layer.weight, hidden])
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(hidden)
    assert [len(call.tokens.shapes) for call in streams] == [K, K]
    torch.testing.assert_close(torch.autograd.grad(found, [layer.weight, hidden]), expected)
