"""What lives until backward, as a structure and a list of tensors, which ``save_for_backward`` takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from liger_losses.chunked.core.plan import Plan
from liger_losses.chunked.core.ranks import Ranks
from liger_losses.chunked.core.statistics import Statistic

#: Types of what holds no tensors, which is most of what a call knows.
PLAIN = {type(None), bool, int, float, str, slice, Statistic, Ranks, Plan}


class Place(NamedTuple):
    """The number of a tensor in the list."""

    number: int


class Packed(NamedTuple):
    """A dataclass of this type, of what its constructor takes."""

    kind: Any
    values: dict[str, Any]


def pack(value: Any) -> tuple[Any, list[Tensor]]:
    """``value`` with a place in the list for each tensor, which has one however often it occurs; and the list.

    Autograd keeps no tensor that was made in inference mode: a copy takes its place.
    """
    tensors = list[Tensor]()
    return _packed(value, tensors, {}), tensors


def _packed(value: Any, tensors: list[Tensor], numbers: dict[int, int]) -> Any:
    """``numbers`` are those of tensors in the list, by their ids."""
    kind: Any = type(value)
    if isinstance(value, Tensor):
        number = numbers.setdefault(id(value), len(tensors))
        if number == len(tensors):
            tensors.append(value.clone() if value.is_inference() else value)
        return Place(number)
    if kind in (list, tuple):
        return kind([item if type(item) in PLAIN else _packed(item, tensors, numbers) for item in value])
    if kind is dict:
        return {name: item if type(item) in PLAIN else _packed(item, tensors, numbers) for name, item in value.items()}
    if not hasattr(kind, "__dataclass_fields__"):
        return value
    values, changes = dict[str, Any](), False
    for name in kind.__match_args__:  # what its constructor takes
        item = getattr(value, name)
        values[name] = item if type(item) in PLAIN else _packed(item, tensors, numbers)
        changes = changes or values[name] is not item
    return Packed(kind, values) if changes else value


def unpack(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    """The inverse of :func:`pack`."""
    kind: Any = type(value)
    if kind is Place:
        return tensors[value.number]
    if kind is Packed:
        return value.kind(**unpack(value.values, tensors))
    if kind in (list, tuple):
        return kind([unpack(item, tensors) for item in value])
    if kind is dict:
        return {name: item if type(item) in PLAIN else unpack(item, tensors) for name, item in value.items()}
    return value
