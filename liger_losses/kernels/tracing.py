"""What torch.compile needs to know of a call: its tensors, and a text that describes everything else.

While torch.compile traces a function, a call of this library becomes one operator of the graph. An operator takes
tensors and strings, so that a call is written down by :func:`encode` while it is traced, and made again from what
:func:`decode` reads when the compiled graph runs. What it returns is found beforehand by making it within
:func:`without_values`, in which nothing is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import torch
import torch.fx.experimental.symbolic_shapes as symbolic_shapes
from torch import Tensor, nn

C = TypeVar("C", bound=Any)

#: Whether torch.compile knows a number while it traces; where torch cannot say, all numbers are taken to change.
has_static_value: Callable[[Any], bool] = getattr(symbolic_shapes, "has_static_value", lambda value: False)
#: Dataclasses and named tuples that may be arguments of a call, and their fields.
_records: dict[str, tuple[type, tuple[str, ...]]] = {}


class _State(threading.local):
    """Read directly and not through functions, as every call reads it.

    ``shapes_only``: only shapes and dtypes are asked for; tensors have no values, no kernel runs, no state changes.
    ``recorded``: the statistics that a call computes are appended to it. ``known``: backward makes the call again and
    takes them from here; a loss's own state does not change a second time.
    """

    shapes_only = False
    recorded: list[Tensor] | None = None
    known: Iterator[Tensor] | None = None


state = _State()


def record(cls: C) -> C:
    """A dataclass or named tuple that may be an argument of a call in a compiled function."""
    assert cls.__name__ not in _records, f"two records are called {cls.__name__}"
    _records[cls.__name__] = cls, cls.__match_args__
    return cls


def changes_state() -> bool:
    """Whether a call may change a loss's own state: not for its shapes alone, nor when backward repeats it."""
    return not state.shapes_only and state.known is None


@contextmanager
def without_values() -> Iterator[None]:
    """Within this context, calls return tensors without values, from tensors without values."""
    before, state.shapes_only = state.shapes_only, True
    try:
        yield
    finally:
        state.shapes_only = before


def is_weight_and_bias(layer: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
    """Whether a layer's weight and bias are all that its logits are made of.

    A linear layer of a subclass may have a forward of its own, which scales them, say; one of this library says
    ``computes_linear``. An embedding's forward is not that of the head that shares its weight.
    """
    if isinstance(layer, nn.Embedding):
        return True
    kind = type(layer)
    return isinstance(layer, nn.Linear) and (kind.forward is nn.Linear.forward or hasattr(kind, "computes_linear"))


def encode(value: Any, tensors: list[Tensor]) -> str | None:
    """A Python literal that describes an argument, whose tensors are appended; ``None`` if nothing can describe it.

    A tensor that is already there is not appended again: it has one gradient, the sum of all its uses. torch.compile
    traces this function.
    """
    if isinstance(value, Tensor):
        # Of a DTensor, an operator's gradients would not know the placements; quantized tensors have no operators.
        if hasattr(value, "full_tensor") or hasattr(type(value), "__tensor_flatten__") or hasattr(value, "quant_state"):
            return None
        for i, tensor in enumerate(tensors):
            if tensor is value:
                return f"('tensor', {i})"
        tensors.append(value)
        return f"('tensor', {len(tensors) - 1})"
    if value is None or isinstance(value, (bool, str)):
        return f"('constant', {value!r})"
    if isinstance(value, (int, float)):
        if has_static_value(value):
            return f"('constant', {value!r})"
        # A number that changes from call to call: as text, it would be compiled anew for each value; and a float also
        # as the argument of any function but sums and products with tensors.
        tensors.append(torch.ones((), dtype=torch.float64) * value)
        return f"('{'int' if isinstance(value, int) else 'float'}', {len(tensors) - 1})"
    if isinstance(value, torch.dtype):
        return f"('dtype', {str(value)!r})"
    if isinstance(value, dict):
        keys, values = ", ".join([repr(key) for key in value]), encode(list(value.values()), tensors)
        return None if values is None else f"('dict', [{keys}], {values})"
    kind = type(value).__name__
    if isinstance(value, (nn.Linear, nn.Embedding)):
        if not is_weight_and_bias(value):  # refused outside of the operator
            return None
        if not value.weight.is_floating_point():  # quantized
            return None
        kind, parts = "Head", [value.weight, getattr(value, "bias", None), None]
    elif kind in _records:
        parts = [getattr(value, name) for name in _records[kind][1]]
    elif isinstance(value, (list, tuple, nn.ModuleList)):
        kind, parts = "tuple", list(value)
    else:
        return None
    forms = []
    for part in parts:
        form = encode(part, tensors)
        if form is None:
            return None
        forms.append(form)
    return f"('{kind}', [{', '.join(forms)}])"


def decode(form: Any, tensors: Sequence[Tensor]) -> Any:
    """The argument whose description :func:`encode` wrote, from the literal's value and the tensors."""
    kind, *parts = form
    if kind == "tensor":
        return tensors[parts[0]]
    if kind in ("int", "float"):
        # Numbers that change are not known before the graph runs. Every number that is checked may be 1.
        number = tensors[parts[0]]
        return {"int": int, "float": float}[kind](1 if state.shapes_only else number.item())
    if kind == "constant":
        return parts[0]
    if kind == "dtype":
        return getattr(torch, parts[0].removeprefix("torch."))
    if kind == "dict":
        return dict(zip(parts[0], decode(parts[1], tensors), strict=True))
    values = tuple(decode(part, tensors) for part in parts[0])
    return values if kind == "tuple" else _records[kind][0](*values)
