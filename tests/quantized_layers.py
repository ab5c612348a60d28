"""Quantized layers for tests: of the packages that are installed, and one packed as GPTQ's are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from liger_losses import register_quantized_weight
from liger_losses.chunked import GPTQRows


class PackedLinear(nn.Module):
    """GPTQ's layout: codes of some bits in int32, packed along the hidden size; zero points, along the vocabulary."""

    def __init__(self, linear, bits=4, group=16, zero_offset=1, shuffled=True):
        super().__init__()
        weight, each = linear.weight.detach().float().t(), 32 // bits  # [H, V]
        self.in_features, self.out_features, self.bits, self.zero_offset = *weight.shape, bits, zero_offset
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(weight), generator=generator) if shuffled else torch.arange(len(weight))
        g_idx = torch.empty(len(weight), dtype=torch.int32)
        g_idx[order] = torch.arange(len(weight), dtype=torch.int32) // group
        low, high = (
            torch.stack([getattr(weight[g_idx == g], side)(0) for g in range(int(g_idx.max()) + 1)])
            for side in ("amin", "amax")
        )
        scales = (high - low) / (2**bits - 1)
        zeros = (-low / scales).round().clamp(zero_offset, 2**bits - 1)
        codes = (weight / scales[g_idx] + zeros[g_idx]).round().clamp(0, 2**bits - 1)
        self.register_buffer("qweight", self._pack(codes.t().int(), each).t().contiguous())
        self.register_buffer("qzeros", self._pack((zeros - zero_offset).int(), each))
        self.register_buffer("scales", scales.to(linear.weight.dtype))
        self.register_buffer("g_idx", g_idx)
        self.bias = linear.bias

    def _pack(self, codes, each):
        codes = codes.long().view(*codes.shape[:-1], -1, each)
        packed = (codes << torch.arange(0, 32, self.bits)).sum(-1)
        return torch.where(packed >= 2**31, packed - 2**32, packed).int()

    def _unpack(self, packed):
        return ((packed[..., None] >> torch.arange(0, 32, self.bits).int()) & (2**self.bits - 1)).flatten(-2)

    def dequantize_weight(self):
        """``[H, V]``."""
        codes, zeros = self._unpack(self.qweight.t()).t(), self._unpack(self.qzeros)
        groups = self.g_idx.long()
        return self.scales[groups] * (codes - zeros[groups] - self.zero_offset)

    def forward(self, hidden):
        logits = hidden @ self.dequantize_weight().to(hidden.dtype)
        return logits if self.bias is None else logits + self.bias


register_quantized_weight(PackedLinear, lambda layer: GPTQRows(layer, layer.zero_offset))


def torchao_linear(linear, config="Int8WeightOnlyConfig"):
    quantization = pytest.importorskip("torchao.quantization")
    options = {}
    if config == "IntxWeightOnlyConfig":
        options = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(8)}
    holder = nn.Sequential(linear)
    quantization.quantize_(holder, getattr(quantization, config)(**options))
    return holder[0]


def bnb_linear(linear, bits=4, nested=True, kind="nf4"):
    bnb = pytest.importorskip("bitsandbytes")
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    weight = linear.weight.detach()
    if bits == 8:
        layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        layer = bnb.nn.Linear4bit(*sizes, compute_dtype=weight.dtype)
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=nested)
    layer.bias = linear.bias
    return layer.to("cpu")


#: By name, from a linear layer to a quantized one.
LAYERS = {
    "packed 4 bit": PackedLinear,
    "packed 8 bit": lambda linear: PackedLinear(linear, bits=8, zero_offset=0, shuffled=False),
    "torchao int8": torchao_linear,
    "torchao int4": lambda linear: torchao_linear(linear, "IntxWeightOnlyConfig"),
    "torchao float8": lambda linear: torchao_linear(linear, "Float8WeightOnlyConfig"),
    "bitsandbytes 8 bit": lambda linear: bnb_linear(linear, 8),
    "bitsandbytes nf4, nested": bnb_linear,
    "bitsandbytes fp4": lambda linear: bnb_linear(linear, nested=False, kind="fp4"),
}


def dequantized(layer):
    """The whole weight ``[V, H]`` of a quantized layer, as its own package dequantizes it."""
    if isinstance(layer, PackedLinear):
        return layer.dequantize_weight().t()
    weight = layer.weight
    if type(layer).__name__ == "Linear8bitLt":
        codes, scales = (weight.data, weight.SCB) if layer.state.SCB is None else (layer.state.CB, layer.state.SCB)
        return codes.float() * scales[:, None] / 127
    if type(layer).__name__ == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state).view(weight.quant_state.shape)
    return weight.dequantize()
