"""Several hidden states and heads in one call: as the sum of single calls, without their sum of gradients or memory."""

import pytest
import torch
from torch import nn

from liger_losses import Head, functional, linear_token_loss
from liger_losses.chunked.core import stream
from liger_losses.chunked.core.buffers import Gradients
from tests.losses import CE
from tests.reference import peak_bytes, problem

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


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.float16, "mean"), (torch.float32, "none")])
def test_what_is_kept_until_backward_fits_one_workspace(dtype, reduction):
    """Where logits stay until backward, as losses of log-probabilities and fp16 have it."""
    n, h, v, count = 64, 16, 1000, 8
    hidden = [torch.randn(n, h, dtype=dtype, requires_grad=True) for _ in range(count)]
    heads = [torch.randn(v, h, dtype=dtype, requires_grad=True) for _ in range(count)]
    labels = [torch.randint(v, (n,)) for _ in range(count)]
    leaves = [*hidden, *heads]

    def gradients(losses):
        loss = losses[0] if reduction == "mean" else torch.stack(losses[0]).sum()
        return torch.autograd.grad(loss, leaves)

    one = n * v * 4 + 2**16  # the logits of one head
    loss_module = CE(reduction=reduction, workspace=3 * one)
    found = gradients(loss_module(heads, hidden, labels))
    outputs = sum(grad.nbytes for grad in found)
    assert peak_bytes(lambda: gradients(loss_module(heads, hidden, labels))) - outputs <= 3 * one
    plain_losses = [
        nn.functional.cross_entropy(a.float() @ w.float().T, y, reduction=reduction)
        for a, w, y in zip(hidden, heads, labels, strict=True)
    ]
    plain = gradients([sum(plain_losses) if reduction == "mean" else plain_losses])
    torch.testing.assert_close(found, plain, atol=1e-3, rtol=1e-3)


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
