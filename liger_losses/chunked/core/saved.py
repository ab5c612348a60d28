"""What lives until backward, as a structure and a list of tensors, which ``save_for_backward`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from liger_losses.kernels.reading import version_of


@dataclass(frozen=True)
class Place:
    """The number of a tensor in the list."""

    number: int


@dataclass(frozen=True, eq=False)
class Unread:
    """A tensor that only a second backward reads: that it has not changed is seen then, and not by the first one."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class Packed:
    """A dataclass of this type whose fields hold tensors."""

    kind: type
    values: dict[str, Any]


def pack(value: Any, tensors: list[Tensor], unread: Sequence[Tensor] = ()) -> Any:
    """``value`` with a place in the list for each tensor, which has one however often it occurs.

    Autograd keeps no tensor that was made in inference mode: a copy takes its place. The ``unread`` stay as they are.
    """
    if isinstance(value, Tensor):
        if any(tensor is value for tensor in unread):
            return Unread(value, version_of(value))
        for number, tensor in enumerate(tensors):
            if tensor is value:
                return Place(number)
        tensors.append(value.clone() if value.is_inference() else value)
        return Place(len(tensors) - 1)
    if type(value) in (list, tuple):
        return type(value)([pack(item, tensors, unread) for item in value])
    if type(value) is dict:
        return {name: pack(item, tensors, unread) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        values = {f.name: pack(getattr(value, f.name), tensors, unread) for f in fields(value) if f.init}
        return Packed(type(value), values) if _has_places(values) else value
    return value


def _has_places(value: Any) -> bool:
    if isinstance(value, (Place, Unread, Packed)):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    return type(value) in (list, tuple) and any(_has_places(item) for item in value)


def unpack(value: Any, tensors: list[Tensor]) -> Any:
    """The inverse of :func:`pack`."""
    if isinstance(value, Place):
        return tensors[value.number]
    if isinstance(value, Unread):
        if version_of(value.tensor) != value.version:
            raise RuntimeError("labels that a second backward needs have been modified by an inplace operation.")
        return value.tensor
    if isinstance(value, Packed):
        return value.kind(**{name: unpack(item, tensors) for name, item in value.values.items()})
    if type(value) in (list, tuple):
        return type(value)([unpack(item, tensors) for item in value])
    if type(value) is dict:
        return {name: unpack(item, tensors) for name, item in value.items()}
    return value
