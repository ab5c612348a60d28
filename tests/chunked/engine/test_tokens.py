"""Which tokens a call computes: masks, several tensors, any strides, none at all."""

import pytest
import torch

from liger_losses import EngineOptions, linear_logps, linear_statistics, linear_token_loss
from tests.reference import assert_close_gradients, gradients, peak_bytes, plain_statistics, problem, weighted

MiB = 2**20


@pytest.mark.parametrize("strategy", ["one_pass", "two_pass", "resident"])
def test_masked_inputs_never_leak_into_token_losses(strategy):
    hidden, weight, labels, _ = problem(13, dtype=torch.float64)
    # In the loss it is 0, of which this function and its derivative are not finite.
    poison = torch.where(labels == -100, float("nan"), 0.7)
    options = EngineOptions(compact=False, strategy=strategy)
    loss, _ = linear_token_loss(
        hidden, weight, labels, lambda s, y, w: -s.logp / w, token_inputs={"w": poison}, options=options
    )
    grads = torch.autograd.grad(loss, (hidden, weight))
    expected = -1 / 0.7 * plain_statistics(hidden, weight, labels)["logp"].sum()
    torch.testing.assert_close((loss, *grads), (expected, *torch.autograd.grad(expected, (hidden, weight))))


@pytest.mark.parametrize("strategy", ["two_pass", "resident"])
def test_labels_that_changed_before_backward_are_an_error(strategy):
    hidden, weight, labels, _ = problem(13, masked=0.0)
    logps = linear_statistics(hidden, weight, labels, options=EngineOptions(strategy=strategy)).logp
    labels.fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logps.sum().backward()


def test_several_tensors_are_one_stream():
    """Of one, no token is active, and one needs no gradient."""
    parts = [problem(shape=(2, t), dtype=torch.float64, seed=t) for t in (3, 5, 1)]
    weight = parts[0][1]
    labels = [p[2] for p in parts]
    labels[2][:] = -100
    hidden = [p[0].requires_grad_(i != 1) for i, p in enumerate(parts)]
    exact = [plain_statistics(h, weight, y)["logp"] for h, y in zip(hidden, labels, strict=True)]
    for chunk_size in (None, 1, 4):
        found = linear_statistics(hidden, weight, labels, options=EngineOptions(chunk_size=chunk_size))
        for f, e in zip(found, exact, strict=True):
            torch.testing.assert_close(f.logp, e)
        assert_close_gradients(weighted([f.logp for f in found]), weighted(exact), [*hidden, weight])


def test_strided_hidden_states_are_not_copied_whole():
    hidden, weight, labels, _ = problem(shape=(4, 2000), h=256, v=512, masked=0.0)
    workspace = 4 * MiB
    shifted, targets = hidden[:, :-1], labels[:, 1:]
    assert shifted.numel() * 4 > workspace
    with torch.no_grad():
        assert peak_bytes(lambda: linear_logps(shifted, weight, targets, workspace=workspace)) <= workspace
    expected = linear_logps(hidden, weight, labels, shift=True)[:, :-1]
    torch.testing.assert_close(linear_logps(shifted, weight, targets), expected)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0)])
def test_empty_batches(shape):
    hidden, weight, labels, _ = problem(shape=shape)
    logps = linear_logps(hidden, weight, labels)
    assert logps.shape == shape
    loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: s.logp)
    for value in (logps.sum(), loss):
        assert value == 0
        grad_hidden, grad_weight = gradients(value, (hidden, weight))
        assert grad_hidden.shape == hidden.shape
        assert (grad_weight == 0).all()
