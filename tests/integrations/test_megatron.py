"""Megatron's output processor on layers that real.py's model does not have."""

import types

import pytest
import torch
import torch.nn.functional as F

from liger_losses.integrations import megatron
from tests.reference import problem


@pytest.mark.parametrize("skips", [True, False])
def test_a_bias_that_the_layer_returns_is_not_in_the_logits(skips):
    hidden, weight, labels, bias = problem(shape=(3, 5), bias=True)
    group = types.SimpleNamespace(size=lambda: 1)
    layer = types.SimpleNamespace(weight=weight, bias=bias, tp_group=group, skip_bias_add=skips)
    arguments = {"hidden_states": hidden.transpose(0, 1), "output_layer": layer, "output_weight": None}
    labels[0, 0] = 0
    context = megatron.OutputOptions(ignore_index=0)
    losses = megatron.output_processor(**arguments, labels=labels.clamp(min=0), context=context)
    logits = hidden @ weight.t() + (0 if skips else bias)
    labels[labels == 0] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    torch.testing.assert_close(losses, expected)
