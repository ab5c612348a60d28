"""Which tokens a call computes: masks, several tensors, any strides, none at all."""

import pytest
import torch

from liger_losses import EngineOptions, linear_logps, linear_token_loss
from tests.losses import CE
from tests.reference import gradients, peak_bytes, plain_statistics, problem

MiB = 2**20


@pytest.mark.parametrize("strategy", [None, "two_pass"])
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


def test_strided_hidden_states_are_not_copied_whole():
    hidden, weight, labels, _ = problem(shape=(4, 2000), h=256, v=512, masked=0.0)
    workspace = 4 * MiB
    shifted, targets = hidden[:, :-1], labels[:, 1:]
    assert shifted.numel() * 4 > workspace
    with torch.no_grad():
        assert peak_bytes(lambda: linear_logps(shifted, weight, targets, workspace=workspace)) <= workspace
    expected = linear_logps(hidden, weight, labels, shift=True)[:, :-1]
    torch.testing.assert_close(linear_logps(shifted, weight, targets), expected)


def test_a_column_that_no_token_can_have():
    """Tokens without loss count as tokens of column 0, whose log-probability may be -inf."""
    hidden, weight, labels, bias = problem(shape=(4, 7), bias=True)
    labels[labels == 0] = 1
    with torch.no_grad():
        bias[0] = -torch.inf
    loss = CE(compact=False)(weight, hidden, labels, bias=bias)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(
        (loss, *gradients(loss, (hidden, weight))), (expected, *gradients(expected, (hidden, weight)))
    )
