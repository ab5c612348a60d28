"""How liger-kernel's functions, and the ``apply`` of its autograd functions, are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


def applied(loss: type, names: str, **defaults: Any) -> Callable[..., Any]:
    """A function of the arguments of a loss's constructor and call, by liger-kernel's names and in their order.

    Args:
        names: the arguments, which the signature then has, as liger-kernel's models read them there: ``theirs:ours``
            for one that has another name in the loss, ``theirs:`` for one without effect.
        defaults: by the loss's names, those that differ from its own.
    """
    pairs = [name.partition(":") for name in names.split()]
    ours = {theirs: own if colon else theirs for theirs, colon, own in pairs}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind, default=None) for name in ours])
    # A temperature that is a number is the constructor's, one per token the call's.
    of_call = inspect.signature(loss.forward).parameters  # type: ignore[attr-defined]

    def apply(*arguments: Any, **keywords: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **keywords).arguments
        except TypeError as error:
            raise TypeError(f"{loss.__name__}{signature}: {error}") from None
        values = {**defaults, **{ours[name]: value for name, value in bound.items() if ours[name]}}
        call = {n: v for n, v in values.items() if n in of_call and (n != "temperature" or isinstance(v, Tensor))}
        return loss(**{name: value for name, value in values.items() if name not in call})(**call)

    apply.__doc__ = f"{loss.__name__} by position: {', '.join(ours)}."
    vars(apply)["__signature__"] = signature
    return apply
