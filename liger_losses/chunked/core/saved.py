"""What lives until backward, as a structure and a list of tensors, which ``save_for_backward`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from liger_losses.chunked.core.plan import Plan
from liger_losses.chunked.core.ranks import Ranks
from liger_losses.chunked.core.statistics import Statistic

#: Types of what holds no tensors, which is most of what a call knows.
PLAIN = {type(None), bool, int, float, str, slice, Statistic, Ranks, Plan}


class OfTensors(int):
    """The number of a tensor in the list."""


class OfThings(int):
    """The number of a thing in the structure."""


#: A thing's type, the names of its parts (none of a sequence), and these parts.
Thing = tuple[Any, Any, list[Any]]


def pack(value: Any) -> tuple[list[Thing], list[Tensor]]:
    """All things that ``value`` is made of, each before its parts; and tensors, of which each is there once.

    These are lists, dictionaries, and dataclasses that compare by identity, as those that hold tensors do. Autograd
    keeps no tensor that was made in inference mode: a copy takes its place.
    """
    things, structure, tensors, numbers = [value], list[Thing](), list[Tensor](), dict[int, int]()
    for thing in things:  # which grow
        kind: Any = type(thing)
        names, parts = None, thing
        if kind is dict:
            names, parts = tuple(thing), thing.values()
        elif kind not in (list, tuple):
            names = kind.__match_args__  # what its constructor takes
            parts = [getattr(thing, name) for name in names]
        packed = list[Any]()
        for part in parts:
            of: Any = type(part)
            if of in PLAIN:
                packed.append(part)
            elif isinstance(part, Tensor):
                packed.append(OfTensors(numbers.setdefault(id(part), len(tensors))))
                if packed[-1] == len(tensors):
                    tensors.append(part.clone() if part.is_inference() else part)
            elif of in (list, tuple, dict) or (hasattr(of, "__dataclass_fields__") and of.__eq__ is object.__eq__):
                packed.append(OfThings(len(things)))
                things.append(part)
            else:
                packed.append(part)
        structure.append((kind, names, packed))
    return structure, tensors


def unpack(structure: Sequence[Thing], tensors: tuple[Tensor, ...]) -> Any:
    """The inverse of :func:`pack`."""
    things = list[Any](structure)
    for number in reversed(range(len(things))):
        kind, names, packed = structure[number]
        parts = list[Any]()
        for part in packed:
            of = type(part)
            parts.append(tensors[part] if of is OfTensors else things[part] if of is OfThings else part)
        if names is None:
            things[number] = kind(parts)
        else:
            named = dict(zip(names, parts, strict=True))
            things[number] = named if kind is dict else kind(**named)
    return things[0]
