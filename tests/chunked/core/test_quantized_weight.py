"""Quantized heads: exact against the dequantized weight in float64, in bounded memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_losses import Head, QuantizedWeight, linear_logps, register_quantized_weight
from liger_losses.chunked.core.adapters import LowRank
from liger_losses.chunked.core.quantizers import _FINDERS, find_quantized
from tests.losses import CE
from tests.quantized_layers import LAYERS, dequantized
from tests.reference import Int8Weight, assert_as_exact_as_plain, double, problem, relative_error

V, H = 120, 40  # rows of 40 start inside of blocks of 64
SLOW = pytest.mark.slow


def linear(dtype=torch.float32, bias=False, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(H, V, bias=bias, dtype=dtype)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_of_quantized_layers(name, dtype):
    layer = LAYERS[name](linear(dtype, bias=True))
    hidden, _, labels, _ = problem(60, H, V, dtype=dtype)
    weight = dequantized(layer).detach()

    def plain(h, w, b):
        return F.cross_entropy((h @ w.t() + b).to(torch.promote_types(torch.float32, h.dtype)), labels)

    bias = layer.bias.detach().to(dtype).requires_grad_()
    layer.bias = nn.Parameter(bias)
    loss = CE(workspace=200_000)(Head.of(layer), hidden, labels)
    loss.backward()
    x, w, b = double(hidden, weight, bias)
    expected = torch.autograd.grad(plain(x, w, b), (x, b))
    rounded = torch.autograd.grad(plain(hidden, weight.to(dtype), bias), (hidden, bias))
    assert_as_exact_as_plain(loss, plain(hidden, weight.to(dtype), bias), plain(x, w, b))
    for ours, theirs, exact in zip((hidden.grad, layer.bias.grad), rounded, expected, strict=True):
        assert_as_exact_as_plain(ours, theirs, exact)
    assert all(p.grad is None for p in layer.parameters() if p is not layer.bias)


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


def test_what_is_refused():
    hidden, weight, labels, _ = problem(20, H, V)
    head = Head(Int8Weight(weight))
    with pytest.raises(ValueError, match=r"hidden_states must be \[..., 40\] to fit the weight \(120, 40\)"):
        linear_logps(hidden[:, :30], head, labels)
    a, b = lora()
    with pytest.raises(ValueError, match=r"\[rank, hidden_size\] and \[vocab_size, rank\], of a head \(120, 40\)"):
        linear_logps(hidden, Head(weight, adapters=(LowRank(a[:, :30], b),)), labels)
    with pytest.raises(TypeError, match="ProcessGroup"):
        Head(Int8Weight(weight), group="tp")
    with pytest.raises(TypeError, match="a type"):
        register_quantized_weight(3, print)
    with pytest.raises(ValueError, match="vocab_size, hidden_size"):
        QuantizedWeight((3,), torch.float32, "cpu")
    assert find_quantized(weight) is None


@pytest.mark.parametrize(
    "name", ["packed 4 bit", *(pytest.param(n, marks=SLOW) for n in ("torchao int8", "bitsandbytes nf4, nested"))]
)
def test_a_compiled_function_ends_its_graph(name):
    layer, loss_function = LAYERS[name](linear()), CE()
    hidden, _, labels, _ = problem(20, H, V)
    compiled = torch.compile(lambda hidden: loss_function(layer, hidden * 2, labels), backend="eager")
    assert torch.equal(compiled(hidden), loss_function(layer, hidden * 2, labels))
