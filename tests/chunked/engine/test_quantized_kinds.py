"""Rows of quantized weights are those of the package that made them."""

import pytest
import torch

from liger_losses import (
    Head,
)
from tests.chunked.engine.test_quantized_weight import H, V, linear
from tests.quantized_layers import LAYERS, PackedLinear, dequantized


@pytest.mark.parametrize("name", LAYERS)
def test_rows_are_those_of_the_package(name):
    layer = LAYERS[name](linear(torch.bfloat16))
    whole, found = dequantized(layer), Head.of(layer).quantized
    assert found.shape == (V, H)
    for start, stop in ((0, V), (0, 1), (17, 18), (31, 101), (119, 120)):
        rows = found.rows(start, stop)
        assert rows.is_floating_point()
        torch.testing.assert_close(rows.float(), whole[start:stop].float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.part(30, 90).rows(5, 20).float(), whole[35:50].float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [4, 8])  # of 8 bits, one more or less is about 2 % of a weight
def test_the_zero_points_of_both_formats(bits):
    for offset in (0, 1):
        layer = PackedLinear(linear(), bits=bits, group=8, zero_offset=offset)
        assert Head.of(layer).quantized.zero_offset == offset
        assert Head.of(layer).quantized.zero_offset == offset  # as it was found before
