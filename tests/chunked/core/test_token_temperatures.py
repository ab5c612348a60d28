"""A temperature per token: values and gradients are those of each token's own logits, by every route."""

from types import SimpleNamespace

import torch

from liger_losses import (
    linear_logps,
)
from liger_losses.integrations import megatron, verl
from tests.reference import gradients, problem


def temperatures(shape, seed=5, dtype=torch.float32):
    return (0.4 + 1.6 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def test_in_the_places_of_other_heads():
    hidden, weight, labels, _ = problem(6, 8, 31, shape=(2, 3))
    t = temperatures((2, 3))
    expected = linear_logps(hidden, weight, labels, temperature=t)
    logps, _ = verl.linear_cross_entropy(hidden, weight, labels.flatten(), t)
    torch.testing.assert_close(logps.view(2, 3), expected)
    layer = SimpleNamespace(weight=weight, bias=None, tp_group=SimpleNamespace(size=lambda: 1))
    losses = megatron.output_processor(
        hidden_states=hidden.transpose(0, 1), output_layer=layer, output_weight=None, labels=labels,
        context=megatron.OutputOptions(temperature=t),
    )  # fmt: skip
    torch.testing.assert_close(-losses, expected)


def test_a_changed_temperature_does_not_reach_backward():
    hidden, weight, labels, _ = problem(6, 8, 31, masked=0.0)
    t = temperatures(6)
    (expected,) = gradients(linear_logps(hidden, weight, labels, temperature=t.clone()).sum(), (weight,))
    logps = linear_logps(hidden, weight, labels, temperature=t)
    t.fill_(3.0)
    torch.testing.assert_close(gradients(logps.sum(), (weight,))[0], expected)
