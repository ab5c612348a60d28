"""What lives until backward, as a structure and a list of tensors, which ``save_for_backward`` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
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


def pack(value: Any) -> tuple[Any, list[Tensor]]:
    """``value`` with a place in the list for each tensor, which has one however often it occurs; and the list.

    Autograd keeps no tensor that was made in inference mode: a copy takes its place.
    """
    tensors, numbers = list[Tensor](), dict[int, int]()

    def place(tensor: Tensor) -> Place:
        number = numbers.setdefault(id(tensor), len(tensors))
        if number == len(tensors):
            tensors.append(tensor.clone() if tensor.is_inference() else tensor)
        return Place(number)

    return _changed(value, place), tensors


def unpack(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    """The inverse of :func:`pack`."""
    return _changed(value, lambda place: tensors[place.number])


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with what ``change`` makes of each tensor or place in its lists, dictionaries and dataclasses."""
    kind: Any = type(value)
    if isinstance(value, (Tensor, Place)):
        return change(value)
    if kind in (list, tuple, dict):
        names, read = (value if kind is dict else range(len(value))), value.__getitem__
    elif hasattr(kind, "__dataclass_fields__"):
        names, read = kind.__match_args__, partial(getattr, value)  # what its constructor takes
    else:
        return value
    changes: dict[Any, Any] = {}
    for name in names:
        if type(item := read(name)) not in PLAIN and (changed := _changed(item, change)) is not item:
            changes[name] = changed
    if not changes:
        return value
    if hasattr(kind, "__dataclass_fields__"):
        return replace(value, **changes)
    items = dict(value if kind is dict else enumerate(value)) | changes
    return items if kind is dict else kind(items.values())
