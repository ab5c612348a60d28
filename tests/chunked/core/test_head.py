"""Heads: what makes one, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from liger_losses import Head, LogitTransform, linear_logps, linear_statistics, patch
from liger_losses.chunked.core.head import LowRank
from tests.losses import CE
from tests.models import small
from tests.reference import Int8Weight, problem


def test_a_head_of_tensors_modules_and_heads():
    hidden, weight, labels, bias = problem(20, 8, 31, bias=True)
    transform = LogitTransform(0.7, 1.3, 4.0)
    expected = linear_statistics(hidden, weight, labels, "logp", bias=bias, transform=transform).logp
    layer = nn.Linear(8, 31)
    layer.weight, layer.bias = map(nn.Parameter, (weight.detach(), bias.detach()))
    for head in (
        Head(weight, bias, transform),
        Head.of(weight, bias, transform),
        Head.of(layer, transform=transform),
        Head.of(Head(weight, bias), transform=transform),
        Head.of(Head(weight, transform=transform), bias),
        Head.of(Head(weight, bias, LogitTransform(softcap=4.0)), transform=transform),
    ):
        assert torch.equal(linear_statistics(hidden, head, labels, "logp").logp, expected)
    tied = nn.Embedding(31, 8, _weight=weight.detach())
    assert torch.equal(linear_logps(hidden, tied, labels), linear_logps(hidden, weight, labels))
    assert torch.equal(linear_logps(hidden, layer, labels), linear_logps(hidden, weight, labels, bias=bias))


def test_a_copy_of_a_head_multiplies_by_what_replaces_its_parts():
    hidden, weight, labels, _ = problem(20, 8, 31)
    adapter, quantized = LowRank(torch.randn(3, 8), torch.randn(31, 3)), Int8Weight(-weight.detach())
    adapted = Head(weight, adapters=(adapter,))
    for copy, expected in (
        (replace(Head(weight), weight=-weight), Head(-weight)),
        (replace(Head(weight), adapters=(adapter,)), adapted),
        (replace(adapted, adapters=()), Head(weight)),
        (replace(Head(Int8Weight(weight.detach())), quantized=quantized), Head(quantized)),
    ):
        ours, theirs = (linear_statistics(hidden, head, labels, "logp").logp for head in (copy, expected))
        assert torch.equal(ours, theirs)


def test_some_rows_of_a_head_and_a_constant_have_its_adapters():
    hidden, weight, labels, bias = problem(20, 8, 31, bias=True)
    a, b = torch.randn(3, 8, requires_grad=True), torch.randn(31, 3, requires_grad=True)
    head = Head(weight, bias, adapters=(LowRank(a, b, 0.7),))
    first = linear_logps(hidden, head.columns(slice(20)), labels % 20)
    logps = (hidden @ (weight + 0.7 * b @ a)[:20].t() + bias[:20]).log_softmax(-1)
    torch.testing.assert_close(first, logps.gather(-1, labels[..., None] % 20)[..., 0])
    assert not linear_logps(hidden.detach(), head.detach(), labels).requires_grad


def test_a_scale_of_each_entry_is_trained():
    """Of a bias and of adapters too, before a soft-cap."""
    hidden, weight, labels, bias = problem(20, 8, 31, bias=True, dtype=torch.float64)
    scale = torch.linspace(0.5, 2.0, 31, dtype=torch.float64, requires_grad=True)
    a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 8), (31, 2)))
    leaves = (hidden, weight, bias, scale, a, b)
    head = Head(weight, bias, LogitTransform(softcap=3.0), adapters=(LowRank(a, b, 0.7),)).scaled(scale)
    logits = (hidden @ (weight + 0.7 * b @ a).t() + bias) * scale
    logps = (3 * torch.tanh(logits / 3)).log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    expected = torch.where(labels >= 0, logps, 0.0)
    found = linear_logps(hidden, head, labels)
    torch.testing.assert_close(found, expected)
    for loss in (lambda x: x.sum(), lambda x: x.square().sum()):
        torch.testing.assert_close(
            torch.autograd.grad(loss(found), leaves, retain_graph=True),
            torch.autograd.grad(loss(expected), leaves, retain_graph=True),
        )
    for refused, given in ((head, scale[1:]), (Head(Int8Weight(weight.detach())), scale)):
        with pytest.raises(ValueError, match="scale"):
            refused.scaled(given)


class Scaled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class ScaledRows(nn.Embedding):
    """As Gemma's embedding, whose scale is not that of the head that is tied to it."""

    def forward(self, input):
        return super().forward(input) * 2


class Named(nn.Linear):
    """A linear layer by another name, as fully_shard makes them."""


@pytest.mark.parametrize("compiled", [True, False])
def test_a_linear_layer_with_a_forward_of_its_own_is_refused(compiled):
    """Its weight and bias are not all that it computes."""
    hidden, _, labels, _ = problem(16, 24, 61)
    loss = CE()

    def call(layer):
        return loss(layer, hidden, labels)

    call = torch.compile(call, backend="eager") if compiled else call
    with pytest.raises(
        TypeError, match=r"Scaled.*has a forward of its own.*Head\(layer.weight, layer.bias, LogitTrans"
    ):
        call(Scaled(24, 61))
    assigned, moved, prepared = (nn.Linear(24, 61) for _ in range(3))
    assigned.forward = lambda input: nn.Linear.forward(assigned, input) * 2
    with pytest.raises(TypeError, match=r"Linear, a linear layer that has a forward of its own"):
        call(assigned)
    # As accelerate assigns one, which moves tensors, or calls the layer's under autocast.
    moved.forward, moved._hf_hook = moved.forward, object()
    prepared.forward = prepared._original_forward = prepared.forward
    for kind in (prepared, *[Named(24, 61), ScaledRows(61, 24), moved] * (not compiled)):  # compiling takes seconds
        expected = loss(kind.weight, hidden, labels, getattr(kind, "bias", None))
        assert torch.equal(call(kind), expected)
    layer = Scaled(24, 61)
    expected = nn.functional.cross_entropy(layer(hidden), labels)
    given = Head(layer.weight, layer.bias, LogitTransform(1.0, 2.0))
    torch.testing.assert_close(loss(given, hidden, labels), expected)


def test_the_head_of_a_patched_model_is_taken():
    model = small()
    hidden, _, labels, _ = problem(16, model.config.hidden_size, model.config.vocab_size)
    expected = CE()(model.lm_head, hidden, labels)
    assert patch(model).replaced
    assert torch.equal(CE()(model.lm_head, hidden, labels), expected)
