"""What lives until backward, as a structure and a list of tensors, which ``save_for_backward`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from liger_losses.chunked.core.plan import Plan
from liger_losses.chunked.core.ranks import Ranks
from liger_losses.chunked.core.statistics import Statistic

#: Types of what holds no tensors, which is most of what a call knows.
PLAIN = {type(None), bool, int, float, str, slice, Statistic, Ranks, Plan}


class Saved(int):
    """The number of a tensor in the list."""


class Packed(NamedTuple):
    """The type of a list, tuple, dictionary or dataclass, the names of its parts (none of a sequence), and these."""

    kind: Any
    names: Any
    parts: list[Any]


def pack(value: Any, tensors: dict[int, Tensor]) -> Any:
    """What ``value`` is made of, without its tensors, which are added to ``tensors``, each once, by their ids.

    These are lists, dictionaries, and dataclasses that compare by identity, as those that hold tensors do. Autograd
    keeps no tensor that was made in inference mode: a copy takes its place.
    """
    kind: Any = type(value)
    names, parts, packed = None, value, list[Any]()
    if kind is dict:
        names, parts = tuple(value), value.values()
    elif hasattr(kind, "__dataclass_fields__") and kind.__eq__ is object.__eq__:
        names = kind.__match_args__  # what its constructor takes
        parts = [getattr(value, name) for name in names]
    elif kind not in (list, tuple):
        return value
    for part in parts:
        if type(part) in PLAIN:
            packed.append(part)
        elif not isinstance(part, Tensor):
            packed.append(pack(part, tensors))
        else:
            if id(part) not in tensors:
                tensors[id(part)] = part.clone() if part.is_inference() else part
            packed.append(Saved(list(tensors).index(id(part))))
    return Packed(kind, names, packed)


def unpack(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of :func:`pack`."""
    if type(value) is Saved:
        return tensors[value]
    if type(value) is not Packed:
        return value
    parts = [part if type(part) in PLAIN else unpack(part, tensors) for part in value.parts]
    if value.names is None:
        return value.kind(parts)
    named = dict(zip(value.names, parts, strict=True))
    return named if value.kind is dict else value.kind(**named)
