"""What lives until backward, as a structure and a list of tensors, which ``save_for_backward`` takes."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from liger_losses.chunked.core.ranks import Ranks
from liger_losses.chunked.core.statistics import Statistic

#: Types of what holds no tensors, which is most of what a call knows.
PLAIN = {type(None), bool, int, float, str, slice, Statistic, Ranks}


@dataclass(frozen=True)
class Place:
    """The number of a tensor in the list."""

    number: int


@dataclass(frozen=True)
class Packed:
    """A dataclass of this type whose fields hold tensors."""

    kind: type
    values: dict[str, Any]


def place_of(value: Tensor, tensors: list[Tensor]) -> int:
    """The number of a tensor in the list, to which it is added where it is not there yet."""
    for number, tensor in enumerate(tensors):
        if tensor is value:
            return number
    copied = not is_dynamo_compiling() and value.is_inference()
    tensors.append(value.clone() if copied else value)
    return len(tensors) - 1


def pack(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` with a place in the list for each tensor, which has one however often it occurs.

    Autograd keeps no tensor that was made in inference mode: a copy takes its place.
    """
    if isinstance(value, Tensor):
        return Place(place_of(value, tensors))
    if type(value) in (list, tuple):
        parts = [item if type(item) in PLAIN else pack(item, tensors) for item in value]
        return type(value)(parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    if type(value) is dict:
        return {name: pack(item, tensors) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        kind: Any = type(value)
        items = [(name, getattr(value, name)) for name in kind.__match_args__]  # what its constructor takes
        packed = {name: item if type(item) in PLAIN else pack(item, tensors) for name, item in items}
        return Packed(kind, packed) if any(packed[name] is not item for name, item in items) else value
    return value


def unpack(value: Any, tensors: list[Tensor]) -> Any:
    """The inverse of :func:`pack`."""
    if isinstance(value, Place):
        return tensors[value.number]
    if isinstance(value, Packed):
        return value.kind(**{name: unpack(item, tensors) for name, item in value.values.items()})
    if type(value) in (list, tuple):
        return type(value)([unpack(item, tensors) for item in value])
    if type(value) is dict:
        return {name: unpack(item, tensors) for name, item in value.items()}
    return value
