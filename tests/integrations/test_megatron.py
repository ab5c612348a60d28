"""Megatron's output processor."""

import types

import pytest
import torch
import torch.nn.functional as F

from liger_losses.integrations import megatron
from tests.reference import problem


def test_megatron_output_processor():
    hidden, weight, labels, bias = problem(shape=(3, 5), bias=True)
    group = types.SimpleNamespace(size=lambda: 1)
    layer = types.SimpleNamespace(weight=weight, bias=bias, tp_group=group, sequence_parallel=False)
    arguments = {"hidden_states": hidden.transpose(0, 1), "output_layer": layer, "output_weight": None}
    mask = (labels != -100).float()
    options = {"scale_logits": lambda logits: logits * 0.5, "context": megatron.OutputOptions(ignore_index=-7)}
    losses = megatron.output_processor(**arguments, labels=labels.clamp(min=0), loss_mask=mask, **options)
    logits = (hidden @ weight.t() + bias) * 0.5
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    torch.testing.assert_close(losses, expected)
    tied = {**arguments, "output_weight": weight.detach()[:40]}
    layer.bias = None
    losses = megatron.output_processor(**tied, labels=labels.clamp(0, 39))
    logits = (hidden @ tied["output_weight"].t()).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.clamp(0, 39).flatten(), reduction="none").view_as(labels)
    torch.testing.assert_close(losses, expected)
    with pytest.raises(ValueError, match="give labels="):
        megatron.output_processor(**arguments, labels=None)
    with pytest.raises(TypeError, match=r"multiplies in MXFP8.*set fp8_output_proj=False"):
        megatron.output_processor(**arguments, labels=labels, config=types.SimpleNamespace(fp8_output_proj=True))


def test_what_is_beside_the_weight_of_megatrons_layer():
    """A bias that the layer returns is not in the logits; what a layer inside of it adds cannot be left out."""
    hidden, weight, labels, bias = problem(shape=(3, 5), bias=True)
    layer = torch.nn.Module()
    layer.weight, layer.bias = weight, bias
    layer.tp_group, layer.skip_bias_add = types.SimpleNamespace(size=lambda: 1), True
    arguments = {"hidden_states": hidden.transpose(0, 1), "output_layer": layer, "labels": labels.clamp(min=0)}
    losses = megatron.output_processor(**arguments, output_weight=None)
    expected = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), arguments["labels"].flatten(), reduction="none")
    torch.testing.assert_close(losses, expected.view_as(labels))
    layer.adapter = torch.nn.Linear(3, 3)
    for given in (None, weight):
        with pytest.raises(TypeError, match=r"output layer is a Module that contains other layers \(adapter\).*merge"):
            megatron.output_processor(**arguments, output_weight=given)
