"""The kinds of quantized weights and layers that are known, and how rows of each are dequantized.

V vocabulary size, H hidden size. None of the packages is imported before one of its layers is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...chunked.engine.documentation import see
from ...chunked.engine.quantized_weight import QuantizedWeight

#: From a tensor or layer to its rows, or ``None`` for one that holds an ordinary weight.
Finder = Callable[[Any], "QuantizedWeight | None"]
#: By a type, or by its module and name, for packages that may not be installed.
_FINDERS: dict[type | str, Finder] = {}


def register_quantized_weight(kind: type | str, finder: Finder) -> None:
    """Tell all heads how to read the weight of a type of tensors or layers.

    Args:
        kind: the type, whose subclasses are found too; or its module and name, as in
            ``"bitsandbytes.nn.modules.Linear4bit"``. The last registration of a type holds.
        finder: from an instance to a :class:`liger_losses.QuantizedWeight`, or to ``None`` if it holds an ordinary
            weight.

    Raises:
        TypeError: arguments of other types.
    """
    if not isinstance(kind, (type, str)) or not callable(finder):
        raise TypeError(
            f"register_quantized_weight takes a type (or its name) and a function, got {kind!r}, {finder!r}."
        )
    _FINDERS[kind] = finder


def find_quantized(value: Any) -> QuantizedWeight | None:
    """The quantized weight that a tensor or a layer is, or holds; ``None`` if there is none."""
    if isinstance(value, QuantizedWeight):
        return value
    finder = _finder(value)
    if finder is not None:
        return finder(value)
    return find_quantized(value.weight) if isinstance(value, nn.Linear) else None


def is_quantized(value: Any) -> bool:
    """Whether a tensor or a layer is of a kind that is known; nothing is run."""
    return _finder(value) is not None or (isinstance(value, nn.Linear) and _finder(value.weight) is not None)


def _finder(value: Any) -> Finder | None:
    if type(value) is nn.Parameter or type(value) is Tensor:  # torch.compile cannot go through their base classes
        return None
    for kind in type(value).__mro__:
        finder = _FINDERS.get(kind) or _FINDERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if finder is not None:
            return finder
    packed = isinstance(value, nn.Module) and all(isinstance(getattr(value, name, None), Tensor) for name in _PACKED)
    return _packed_rows if packed else None


# --- torchao ----------------------------------------------------------------------------------------------------------


class _TensorRows(QuantizedWeight):
    """A tensor subclass that can be sliced by rows, and dequantizes what it is."""

    def __init__(self, weight: Any) -> None:
        super().__init__(tuple(weight.shape), weight.dtype, weight.device)
        self.weight = weight.detach()

    def rows(self, start: int, stop: int) -> Tensor:
        rows: Tensor = self.weight[start:stop].dequantize()
        return rows


def _of_tensor(weight: Any) -> QuantizedWeight:
    if weight.requires_grad:
        raise TypeError(
            f"the quantized weight {type(weight).__name__} requires a gradient, which it cannot get here: call "
            "weight.requires_grad_(False), and train adapters (LoRA) instead."
        )
    return _TensorRows(weight)


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


class _Int8Rows(QuantizedWeight):
    """``W[v] = codes[v] scales[v] / 127`` of int8 codes ``[V, H]`` and fp32 scales ``[V]``."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        super().__init__((codes.shape[0], codes.shape[1]), torch.float16, codes.device)
        self.codes, self.scales = codes, scales

    def rows(self, start: int, stop: int) -> Tensor:
        return self.codes[start:stop] * (self.scales[start:stop, None].float() / 127)


def _of_linear8bit(layer: Any) -> QuantizedWeight | None:
    if layer.weight.is_floating_point():
        return None  # has_fp16_weights, or not on its device yet
    # The layer's first forward moves both from its weight to its state.
    state, weight = layer.state, layer.weight
    codes = weight.data if state.CB is None else state.CB
    scales = getattr(weight, "SCB", None) if state.SCB is None else state.SCB
    if scales is None:
        raise TypeError("Linear8bitLt has an int8 weight without its scales (SCB); load the model again.")
    return _Int8Rows(codes, scales)


class _Blocks4bit(QuantizedWeight):
    """4-bit codes, two a byte, row after row; ``blocksize`` of them share a scale, and the scales may be quantized."""

    def __init__(self, weight: Any) -> None:
        self.state = weight.quant_state
        super().__init__(tuple(self.state.shape), self.state.dtype, weight.device)
        self.codes = weight.data.view(torch.uint8).flatten()

    def rows(self, start: int, stop: int) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        width, size = self.shape[1], self.state.blocksize
        first, last = start * width // size, -(-stop * width // size)  # whole blocks that have these rows
        count = min(last * size, self.shape[0] * width) - first * size
        codes = self.codes[first * size // 2 : -(-(first * size + count) // 2)]
        state = QuantState(
            absmax=self._scales(first, last),
            shape=torch.Size((count,)),
            code=self.state.code,
            blocksize=size,
            quant_type=self.state.quant_type,
            dtype=self.state.dtype,
        )
        values = dequantize_4bit(codes[:, None], state).flatten()
        return values[start * width - first * size :][: (stop - start) * width].view(stop - start, width)

    def _scales(self, first: int, last: int) -> Tensor:
        """The scales of some blocks, fp32."""
        from bitsandbytes.functional import dequantize_blockwise

        absmax, nested = self.state.absmax, self.state.state2
        if nested is None:
            scales: Tensor = absmax[first:last]
            return scales.float()
        start, stop = first // nested.blocksize, -(-last // nested.blocksize)
        cut = _copy_of(nested, absmax=nested.absmax[start:stop])
        scales = dequantize_blockwise(absmax[start * nested.blocksize : stop * nested.blocksize], cut)
        return scales[first - start * nested.blocksize :][: last - first].float() + self.state.offset


def _copy_of(state: Any, **changes: Any) -> Any:
    """A bitsandbytes ``QuantState`` with other fields."""
    names = ("absmax", "shape", "code", "blocksize", "quant_type", "dtype", "offset", "state2")
    return type(state)(**{name: getattr(state, name) for name in names} | changes)


def _of_params4bit(weight: Any) -> QuantizedWeight | None:
    return None if weight.quant_state is None else _Blocks4bit(weight)  # None: not on its device yet


def _of_linear4bit(layer: Any) -> QuantizedWeight | None:
    state = getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)
    if state is None:
        return None
    if getattr(layer.weight, "quant_state", None) is None:  # fully_shard has made the weight another one
        layer.weight.quant_state = state
    if getattr(state, "packing_format_for_cpu", False):
        # On some CPUs, a forward in evaluation lays the weight out in another order; the next one does so again.
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

        layer.weight.data, layer.weight.quant_state = _convert_weight_packed_for_cpu_inverse(layer.weight.data, state)
    return _Blocks4bit(layer.weight)


# --- GPTQ -------------------------------------------------------------------------------------------------------------

_PACKED = ("qweight", "qzeros", "scales")
#: What was found for layers: the address of the codes, and the number that is added to their zero points.
_zero_offsets: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()


class _PackedRows(QuantizedWeight):
    """GPTQ's layout: ``W[v, h] = scales[g, v] (q[h, v] - zeros[g, v] - zero_offset)``, ``g = g_idx[h]``.

    Of b bits, int32 numbers hold 32 / b codes each: ``qweight [H b / 32, V]`` along the hidden size, ``qzeros
    [groups, V b / 32]`` along the vocabulary.
    """

    def __init__(self, layer: Any, bits: int, zero_offset: int = 0) -> None:
        self.qweight, self.qzeros, self.scales = layer.qweight, layer.qzeros, layer.scales
        self.temporary_bytes = 16 + self.scales.element_size()
        self.bits, self.zero_offset, hidden_size = bits, zero_offset, layer.qweight.shape[0] * 32 // bits
        super().__init__((layer.qweight.shape[1], hidden_size), layer.scales.dtype, layer.qweight.device)
        groups = len(layer.scales)
        g_idx = getattr(layer, "g_idx", None)
        if g_idx is None or g_idx.numel() != hidden_size:
            g_idx = torch.arange(hidden_size, device=self.device) // -(-hidden_size // groups)
        self.groups = g_idx.long()

    def rows(self, start: int, stop: int) -> Tensor:
        each = 32 // self.bits
        codes = self._unpack(self.qweight[:, start:stop].t())
        first = start // each
        zeros = self._unpack(self.qzeros[:, first : -(-stop // each)])[:, start - first * each :][:, : stop - start]
        scales, zeros = (values.t()[:, self.groups] for values in (self.scales[:, start:stop], zeros))
        return scales * (codes - (zeros + self.zero_offset))

    def _unpack(self, packed: Tensor) -> Tensor:
        """``[n, m] -> [n, m 32 / b]``."""
        shifts = torch.arange(0, 32, self.bits, device=packed.device, dtype=torch.int32)
        return ((packed[..., None] >> shifts) & (2**self.bits - 1)).flatten(-2)


def _packed_rows(layer: Any) -> QuantizedWeight:
    """The rows of a layer that is packed as GPTQ's are; layers of another layout raise TypeError.

    Checkpoints differ in their zero points, and some kernels reorder what they have loaded, so the rows are compared
    with what the layer computes, once.
    """
    name = type(layer).__name__
    bits = getattr(layer, "bits", 0)
    groups, columns = layer.scales.shape if layer.scales.dim() == 2 else (0, 0)
    fits = bits in (2, 4, 8) and layer.qweight.dtype == layer.qzeros.dtype == torch.int32 and groups > 0
    if not fits or layer.qweight.shape[-1] != columns or layer.qzeros.shape != (groups, columns * bits // 32):
        raise TypeError(_say_how_to_register(name, "it has qweight, but not in GPTQ's layout of 2, 4 or 8 bits"))
    address, offset = _zero_offsets.get(layer, (0, 0))
    if address == layer.qweight.data_ptr():
        return _PackedRows(layer, bits, offset)
    found = [_PackedRows(layer, bits, offset) for offset in (0, 1)]
    # Of 8 bits, one more or less is within the tolerance: what is closer holds.
    errors = [disagreement(layer, rows) for rows in found]
    offset = errors.index(min(errors))
    if errors[offset] <= _TOLERANCE:
        _zero_offsets[layer] = layer.qweight.data_ptr(), offset
        return found[offset]
    raise TypeError(_say_how_to_register(name, "what it computes is not what its packed weight says"))


#: How far a layer's product may be from that with its rows, of the latter's norm.
_TOLERANCE = 0.02


def disagreement(layer: nn.Module, found: QuantizedWeight) -> float:
    """How far what a layer computes is from the product with the rows that were found, the first and the last."""
    size, (vocab_size, hidden_size) = 64, found.shape
    # The layer's own forward, also where it was patched to return lazy logits.
    own = getattr(type(layer), "_liger_original", type(layer)).forward
    forward = vars(layer).get("forward") or partial(own, layer)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, hidden_size, generator=generator).to(found.device, found.dtype)
    with torch.enable_grad():  # in evaluation, layers may change how their weight is laid out
        logits: Tensor = forward(hidden.requires_grad_()).float()
    if logits.shape != (2, vocab_size):
        return math.inf
    errors = []
    with torch.no_grad():
        bias = getattr(layer, "bias", None)
        for start in {0, max(vocab_size - size, 0)}:
            stop = min(start + size, vocab_size)
            expected = hidden.float() @ found.rows(start, stop).float().t()
            expected = expected if bias is None else expected + bias[start:stop].float()
            error = (logits[:, start:stop] - expected).norm()
            errors.append(float(error / expected.norm()) if error != 0 else 0.0)
    return max(math.inf if math.isnan(error) else error for error in errors)


def _say_how_to_register(name: str, why: str) -> str:
    return (
        f"cannot read rows of the quantized layer {name}: {why}; register a function that can: "
        f"liger_losses.register_quantized_weight({name}, function)." + see("quantized-heads-and-adapters")
    )


for _kind, _find in (
    ("torchao.utils.TorchAOBaseTensor", _of_tensor),
    ("bitsandbytes.nn.modules.Linear8bitLt", _of_linear8bit),
    ("bitsandbytes.nn.modules.Linear4bit", _of_linear4bit),
    ("bitsandbytes.nn.modules.Params4bit", _of_params4bit),
):
    register_quantized_weight(_kind, _find)
