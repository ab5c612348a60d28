"""Rows of quantized weights are those of the package that made them."""

import pytest
import torch

from liger_losses import Head, register_quantized_weight
from liger_losses.chunked.core.quantizers import _FINDERS, GPTQRows
from tests.chunked.core.test_quantized_weight import H, V, linear
from tests.quantized_layers import LAYERS, PackedLinear, bnb_linear, dequantized


def assert_rows_are(whole, found, tolerance=1e-6):
    assert found.shape == (V, H)
    for start, stop in ((0, V), (0, 1), (17, 18), (31, 101), (len(whole) - 1, len(whole))):
        rows = found.rows(start, stop)
        assert rows.is_floating_point()
        torch.testing.assert_close(rows.float(), whole[start:stop].float(), rtol=tolerance, atol=tolerance / 10)
    part = found.part(30, 90).rows(5, 20)
    torch.testing.assert_close(part.float(), whole[35:50].float(), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_are_those_of_the_package(name):
    layer = LAYERS[name](linear(torch.bfloat16))
    assert_rows_are(dequantized(layer), Head.of(layer).quantized)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_rows_in_the_layout_of_cpus_that_generate(kind):
    functional = pytest.importorskip("bitsandbytes.functional")
    rows, width = 96, 128  # the layout takes 32 rows at a time
    layer = bnb_linear(torch.nn.Linear(width, rows, bias=False, dtype=torch.bfloat16), nested=False, kind=kind)
    whole = dequantized(layer)
    packed, state = functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    layer.weight.data, layer.weight.quant_state, before = packed, state, packed.clone()
    found = Head.of(layer).quantized
    for start, stop in ((0, rows), (0, 1), (31, 65), (95, 96)):
        torch.testing.assert_close(found.rows(start, stop), whole[start:stop], rtol=1e-2, atol=1e-4)  # scales in bf16
    assert layer.weight.data_ptr() == packed.data_ptr()  # the layer is left as it is
    assert torch.equal(packed, before)
    assert state.packing_format_for_cpu


def packaged(name, zero_offset, bases=(PackedLinear,), **attributes):
    """A layer of a class that bears the name of a package's."""
    module, _, kind = name.rpartition(".")
    cls = type(kind, bases, {"__module__": module, "__qualname__": kind, **attributes})
    return cls(linear(), group=8, zero_offset=zero_offset)


TORCH = "gptqmodel.nn_modules.qlinear.torch.TorchLinear"


@pytest.mark.parametrize(
    ("name", "offset", "attributes"),
    [
        (TORCH, 1, {"qzero_format": lambda layer: 1}),
        (TORCH, 0, {"qzero_format": lambda layer: 2}),
        ("gptqmodel.nn_modules.qlinear.tritonv2.TritonV2QuantLinear", 0, {"qzero_format": lambda layer: 2}),
    ],
)
def test_zero_points_are_read_as_the_layer_says(name, offset, attributes, monkeypatch):
    monkeypatch.delitem(_FINDERS, PackedLinear)
    layer = packaged(name, offset, **attributes, forward=None)  # which nobody calls
    assert Head.of(layer).quantized.zero_offset == offset
    assert_rows_are(dequantized(layer), Head.of(layer).quantized)


def test_layouts_that_are_not_known(monkeypatch):
    monkeypatch.delitem(_FINDERS, PackedLinear)
    fused = packaged("gptqmodel.nn_modules.qlinear.torch_fused.Fused", 0, (type(packaged(TORCH, 0)),))
    for layer, words in (
        (PackedLinear(linear()), "layout differs from package to package"),
        (packaged("gptqmodel.nn_modules.qlinear.exllamav2.ExllamaV2QuantLinear", 1), "layout differs"),
        (fused, "may reorder what it has loaded"),
        (packaged(TORCH, 0, adapter=torch.nn.Identity(), qzero_format=lambda layer: 2), "or add an adapter"),
    ):
        with pytest.raises(TypeError, match=rf"{words}.*register_quantized_weight\({type(layer).__name__}, function\)"):
            Head.of(layer)
    layer = PackedLinear(linear(), bits=8, group=8, zero_offset=0)
    register_quantized_weight(PackedLinear, lambda layer: GPTQRows(layer, zero_offset=0))
    assert_rows_are(dequantized(layer), Head.of(layer).quantized)
    layer.bits = 3
    with pytest.raises(TypeError, match="not in GPTQ's layout of 2, 4 or 8 bits"):
        Head.of(layer)
