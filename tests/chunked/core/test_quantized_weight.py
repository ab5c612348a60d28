"""Quantized heads: exact against the dequantized weight in float64, in bounded memory."""

import torch
from torch import nn

from liger_losses import Head, linear_logps
from liger_losses.chunked.core.adapters import LowRank
from tests.losses import CE
from tests.quantized_layers import LAYERS
from tests.reference import Int8Weight, problem, relative_error

V, H = 120, 40  # rows of 40 start inside of blocks of 64


def linear(dtype=torch.float32, bias=False, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(H, V, bias=bias, dtype=dtype)


def test_adapters_in_fp32_and_autocast():
    """As PEFT has them; gradients are in their dtype."""
    hidden, weight, labels, _ = problem(30, H, V, masked=0.0)
    quantized, a, b = Int8Weight(weight), torch.randn(3, H), torch.zeros(V, 3, requires_grad=True)
    exact = (hidden @ quantized.rows(0, V).t()).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    head = Head(quantized, adapters=(LowRank(a, b),))
    linear_logps(hidden.detach().bfloat16().requires_grad_(), head, labels).sum().backward()
    assert b.grad is not None
    assert b.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_logps(hidden, head, labels)
    assert relative_error(found, exact) < 1e-2


def test_a_compiled_function_ends_its_graph():
    layer, loss_function = LAYERS["packed 4 bit"](linear()), CE()
    hidden, _, labels, _ = problem(20, H, V)
    compiled = torch.compile(lambda hidden: loss_function(layer, hidden * 2, labels), backend="eager")
    assert torch.equal(compiled(hidden), loss_function(layer, hidden * 2, labels))
