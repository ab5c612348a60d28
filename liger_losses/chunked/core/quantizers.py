"""Frozen weights in any format, the kinds of layers that are known, and how rows of each are dequantized.

V vocabulary size, H hidden size. None of the packages is imported before one of its layers is seen. What a layer's
numbers mean is read from its type and attributes; a layer that does not say it is an error, and no layer is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.checks import see


class QuantizedWeight:
    """A frozen weight ``[V, H]`` in any format, which can return some of its rows in floating point.

    To support a format, derive from this class and define :meth:`rows`. :class:`liger_losses.Head` takes an instance as
    the weight. With :func:`liger_losses.register_quantized_weight`, every operation, ``patch`` and TRL's trainers find
    it in tensors or layers of a type.

    Args:
        shape: ``(V, H)``.
        dtype: the floating-point dtype of the dequantized weight. Products are computed in the hidden states' dtype.
        device: where the rows are.

    Attributes:
        temporary_bytes: the most bytes that :meth:`rows` allocates for each entry of its result, including the result.

    Raises:
        TypeError, ValueError: a dtype that is not floating point, or sizes that are not positive.
    """

    temporary_bytes = 10

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str) -> None:
        if not dtype.is_floating_point:
            raise TypeError(f"dtype= of a QuantizedWeight is that of its rows, such as torch.bfloat16, got {dtype}.")
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"a QuantizedWeight must have the shape (vocab_size, hidden_size), got {tuple(shape)}.")
        self.shape, self.dtype, self.device = (int(shape[0]), int(shape[1])), dtype, torch.device(device)

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows ``start`` to ``stop``, dequantized: ``[stop - start, H]``, floating point, on the device."""
        raise NotImplementedError

    def part(self, start: int, stop: int) -> QuantizedWeight:
        """The weight of only these rows."""
        if (start, stop) == (0, self.shape[0]):
            return self
        like = torch.empty(stop - start, self.shape[1], dtype=self.dtype, device="meta")
        part = _Rows(like, self.device, lambda first, last: self.rows(start + first, start + last))
        part.temporary_bytes = self.temporary_bytes
        return part

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, device={self.device})"


#: From a tensor or layer to its rows, or ``None`` for one that holds an ordinary weight.
Finder = Callable[[Any], "QuantizedWeight | None"]


def register_quantized_weight(kind: type | str, finder: Finder) -> None:
    """Register how to read the quantized weight of a type of tensors or layers.

    Args:
        kind: the type, including its subclasses; or its module and name, as in
            ``"bitsandbytes.nn.modules.Linear4bit"``. A later registration of a type replaces an earlier one.
        finder: a function of an instance that returns a :class:`liger_losses.QuantizedWeight`, or ``None`` if the
            instance holds an ordinary weight.

    Raises:
        TypeError: arguments of other types.
    """
    if not isinstance(kind, (type, str)) or not callable(finder):
        raise TypeError(
            f"register_quantized_weight takes a type, or its name, and a function, got {kind!r}, {finder!r}."
        )
    _FINDERS[kind] = finder


def find_quantized(value: Any) -> QuantizedWeight | None:
    """The quantized weight that a tensor or a layer is, or holds; ``None`` if there is none.

    Raises:
        TypeError: a quantized layer whose layout is not known.
    """
    if isinstance(value, QuantizedWeight):
        return value
    finder = _finder(value)
    if finder is not None:
        return finder(value)
    return find_quantized(value.weight) if isinstance(value, nn.Linear) else None


def is_quantized(value: Any) -> bool:
    """Whether a tensor or a layer is of a kind that is known, or that looks like GPTQ's."""
    return _finder(value) is not None or (isinstance(value, nn.Linear) and _finder(value.weight) is not None)


def _finder(value: Any) -> Finder | None:
    if type(value) is nn.Parameter or type(value) is Tensor:  # torch.compile cannot go through their base classes
        return None
    for kind in type(value).__mro__:
        finder = _FINDERS.get(kind) or _FINDERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if finder is not None:
            return finder
    packed = [isinstance(getattr(value, name, None), Tensor) for name in ("qweight", "qzeros", "scales")]
    return _refuse if isinstance(value, nn.Module) and all(packed) else None


def _cannot_read(layer: Any, why: str) -> TypeError:
    name = type(layer).__name__
    return TypeError(
        f"cannot read rows of the quantized layer {name}: {why}; register a function that can: "
        f"liger_losses.register_quantized_weight({name}, function)." + see("quantized-heads-and-adapters")
    )


def _refuse(layer: Any) -> QuantizedWeight:
    raise _cannot_read(layer, "it has qweight, qzeros and scales, whose layout differs from package to package")


class _Rows(QuantizedWeight):
    """A weight whose rows a function dequantizes."""

    def __init__(self, like: Any, device: torch.device, rows: Callable[[int, int], Tensor]) -> None:
        super().__init__(tuple(like.shape), like.dtype, device)
        self.rows = rows  # type: ignore[assignment, method-assign]


def _of_tensor(weight: Any) -> QuantizedWeight:
    """A tensor subclass (torchao's) that can be sliced by rows, and dequantizes what it is."""
    if weight.requires_grad:
        raise TypeError(
            f"the quantized weight {type(weight).__name__} requires a gradient, but quantized weights get none: "
            "call weight.requires_grad_(False), and train adapters (LoRA) instead."
        )
    return _Rows(weight, weight.device, lambda start, stop: weight.detach()[start:stop].dequantize())


def _of_linear8bit(layer: Any) -> QuantizedWeight | None:
    """bitsandbytes': ``W[v] = codes[v] scales[v] / 127`` of int8 codes ``[V, H]`` and fp32 scales ``[V]``."""
    if layer.weight.is_floating_point():
        return None  # has_fp16_weights, or not on its device yet
    # The layer's first forward moves both from its weight to its state.
    state, weight = layer.state, layer.weight
    codes = weight.data if state.CB is None else state.CB
    scales = getattr(weight, "SCB", None) if state.SCB is None else state.SCB
    if scales is None:
        raise TypeError("Linear8bitLt has an int8 weight without its scales (SCB); load the model again.")
    like = torch.empty(codes.shape, dtype=torch.float16, device="meta")
    return _Rows(like, codes.device, lambda start, stop: codes[start:stop] * (scales[start:stop, None].float() / 127))


def _of_4bit(weight: Any, state: Any) -> QuantizedWeight | None:
    if state is None:  # not on its device yet
        return None
    rows = _rows_4bit_cpu if getattr(state, "packing_format_for_cpu", False) else _rows_4bit
    return _Rows(state, weight.device, partial(rows, weight.data.view(torch.uint8), state))


def _rows_4bit(packed: Tensor, state: Any, start: int, stop: int) -> Tensor:
    """bitsandbytes': two codes a byte, row after row; ``blocksize`` of them share a scale.

    Scales may be quantized themselves, in blocks: of codes and scales, whole blocks that have these rows.
    """
    from bitsandbytes.functional import QuantState, dequantize_4bit

    (height, width), nested = state.shape, state.state2
    scales = 1 if nested is None else nested.blocksize
    size = state.blocksize * scales
    first = start * width // size
    last = -(-stop * width // size)
    count = min(last * size, height * width) - first * size
    codes = packed.flatten()[first * size // 2 : -(-(first * size + count) // 2), None]
    fields = {name: getattr(state, name) for name in ("code", "blocksize", "quant_type", "dtype", "offset")}
    if nested is not None:
        of_scales = {name: getattr(nested, name) for name in ("code", "blocksize", "dtype")}
        fields["state2"] = QuantState(absmax=nested.absmax[first:last], **of_scales)
    absmax = state.absmax[first * scales : last * scales]
    absmax = absmax.float() if nested is None else absmax
    part = QuantState(absmax=absmax, shape=torch.Size((count,)), **fields)
    values: Tensor = dequantize_4bit(codes, part).flatten()
    return values[start * width - first * size :][: (stop - start) * width].view(stop - start, width)


def _rows_4bit_cpu(packed: Tensor, state: Any, start: int, stop: int) -> Tensor:
    """As bitsandbytes lays out 4-bit weights on CPUs with bf16 instructions when it generates.

    32 rows take ``[H / 2, 32]`` bytes: each line has two columns of these rows, rows 0 to 15 in the low halves and rows
    16 to 31 in the high ones. The scales are ``[H / blocksize, V]``.
    """
    width = state.shape[1]
    first = start % 32
    part = packed.view(-1, width // 2, 32)[start // 32 : -(-stop // 32)]
    codes = torch.cat([part & 15, part >> 4], -1).unflatten(-1, (32, 2)).transpose(1, 2).reshape(-1, width)
    values = state.code.float()[codes[first : first + stop - start].int()]
    scales = state.absmax.t()[start:stop, :, None].float()
    return (values.unflatten(1, (scales.shape[1], -1)) * scales).flatten(1).to(state.dtype)


class GPTQRows(QuantizedWeight):
    """GPTQ's layout: ``W[v, h] = scales[g, v] (q[h, v] - zeros[g, v] - zero_offset)``, ``g = g_idx[h]``.

    Of b bits, int32 numbers hold 32 / b codes each: ``qweight [H b / 32, V]`` along the hidden size, ``qzeros
    [groups, V b / 32]`` along the vocabulary.

    Args:
        layer: it has these tensors, and ``bits``: 2, 4 or 8.
        zero_offset: 1 for checkpoints of the format ``gptq``, which store zero points less 1; 0 for ``gptq_v2``.

    Raises:
        TypeError: tensors of other shapes or dtypes.
    """

    def __init__(self, layer: Any, zero_offset: int) -> None:
        self.qweight, self.qzeros, self.scales = layer.qweight, layer.qzeros, layer.scales
        self.bits, self.zero_offset = getattr(layer, "bits", 0), zero_offset
        groups, columns = self.scales.shape if self.scales.dim() == 2 else (0, 0)
        fits = self.bits in (2, 4, 8) and self.qweight.dtype == self.qzeros.dtype == torch.int32
        if not fits or self.qweight.shape[-1] != columns or self.qzeros.shape != (groups, columns * self.bits // 32):
            raise _cannot_read(layer, "its tensors are not in GPTQ's layout of 2, 4 or 8 bits")
        self.temporary_bytes = 16 + self.scales.element_size()
        super().__init__((columns, len(self.qweight) * 32 // self.bits), self.scales.dtype, self.qweight.device)
        g_idx = getattr(layer, "g_idx", None)
        if g_idx is None or g_idx.numel() != self.shape[1]:
            g_idx = torch.arange(self.shape[1], device=self.device) // -(-self.shape[1] // groups)
        self.groups = g_idx.long()

    def rows(self, start: int, stop: int) -> Tensor:
        count = 32 // self.bits
        codes = self._unpack(self.qweight[:, start:stop].t())
        first = start // count
        zeros = self._unpack(self.qzeros[:, first : -(-stop // count)])[:, start - first * count :][:, : stop - start]
        scales, zeros = (values.t()[:, self.groups] for values in (self.scales[:, start:stop], zeros))
        return scales * (codes - (zeros + self.zero_offset))

    def _unpack(self, packed: Tensor) -> Tensor:
        """``[n, m] -> [n, m 32 / b]``."""
        shifts = torch.arange(0, 32, self.bits, device=packed.device, dtype=torch.int32)
        return ((packed[..., None] >> shifts) & (2**self.bits - 1)).flatten(-2)


#: GPTQModel's layers that keep GPTQ's layout. (Others reorder what they have loaded, subclasses of these too.)
_GPTQ = [
    f"gptqmodel.nn_modules.qlinear.{name}{end}"
    for name in ("torch.Torch", "tritonv2.TritonV2")
    for end in ("QuantLinear", "Linear")
]


def _of_gptq(layer: Any) -> QuantizedWeight:
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(layer).__mro__]
    first = next(name for name in names if name.startswith("gptqmodel."))
    if first not in _GPTQ or getattr(layer, "adapter", None) is not None:
        raise _cannot_read(layer, "its package may reorder what it has loaded, or add an adapter")
    return GPTQRows(layer, {1: 1, 2: 0}[layer.qzero_format()])


#: By a type, or by its module and name, for packages that may not be installed.
_FINDERS: dict[type | str, Finder] = {
    "torchao.utils.TorchAOBaseTensor": _of_tensor,
    "bitsandbytes.nn.modules.Linear8bitLt": _of_linear8bit,
    # The layer has the state where fully_shard has made its weight another one.
    "bitsandbytes.nn.modules.Linear4bit": lambda layer: _of_4bit(
        layer.weight, getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)
    ),
    "bitsandbytes.nn.modules.Params4bit": lambda weight: _of_4bit(weight, weight.quant_state),
    **dict.fromkeys(_GPTQ, _of_gptq),
}
