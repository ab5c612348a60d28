"""Quantized heads: exact against the dequantized weight in float64, in bounded memory."""

import pytest
import torch
from torch import nn

from liger_losses import Head, QuantizedWeight, linear_logps, register_quantized_weight
from liger_losses.chunked.engine.adapters import LowRank
from liger_losses.chunked.engine.quantized_kinds import _FINDERS
from tests.losses import CE
from tests.quantized_layers import LAYERS
from tests.reference import Int8Weight, problem, relative_error

V, H = 120, 40  # rows of 40 start inside of blocks of 64


def linear(dtype=torch.float32, bias=False, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(H, V, bias=bias, dtype=dtype)


def lora(rank=4, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rank, H), (V, rank)))
    return (a * 0.2).requires_grad_(), (b * 0.2).requires_grad_()


def test_a_type_of_ones_own():
    class Halves(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.register_buffer("halves", weight.detach().to(torch.float16))
            self.bias = None

    class Rows(QuantizedWeight):
        def __init__(self, layer):
            super().__init__(tuple(layer.halves.shape), torch.float32, layer.halves.device)
            self.layer = layer

        def rows(self, start, stop):
            return self.layer.halves[start:stop].float()

    hidden, weight, labels, _ = problem(20, H, V)
    layer = Halves(weight)
    with pytest.raises(TypeError, match="Halves, which is no nn.Linear; .*register_quantized_weight"):
        linear_logps(hidden, layer, labels)
    register_quantized_weight(Halves, Rows)
    try:
        expected = linear_logps(hidden, layer.halves.float(), labels)
        torch.testing.assert_close(linear_logps(hidden, layer, labels), expected)
    finally:
        del _FINDERS[Halves]


def test_hidden_states_of_any_dtype_and_autocast():
    quantized = Int8Weight(torch.randn(V, H))
    labels = torch.randint(V, (30,))
    states = torch.randn(30, H, dtype=torch.float64)
    exact = (states @ quantized.rows(0, V).double().t()).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        found = linear_logps(states.to(dtype), Head(quantized), labels)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert relative_error(found, exact) < bound
    a, b = lora(3)
    head = Head(quantized, adapters=(LowRank(a, b * 0),))
    hidden = states.to(torch.bfloat16).requires_grad_()
    linear_logps(hidden, head, labels).sum().backward()  # adapters in fp32, as PEFT has them
    assert b.grad is not None
    assert b.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_logps(states.float(), head, labels)
    assert relative_error(found, exact) < 1e-2


@pytest.mark.parametrize(
    "name",
    ["packed 4 bit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("torchao int8", "bitsandbytes nf4, nested"))],
)
def test_a_compiled_function_ends_its_graph(name):
    layer, loss_function = LAYERS[name](linear()), CE()
    hidden, _, labels, _ = problem(20, H, V)
    compiled = torch.compile(lambda hidden: loss_function(layer, hidden * 2, labels), backend="eager")
    assert torch.equal(compiled(hidden), loss_function(layer, hidden * 2, labels))
