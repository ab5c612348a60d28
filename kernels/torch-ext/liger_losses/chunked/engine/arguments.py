"""Says how a loss or an operation is called, and a loss built, where arguments are missing or not known."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from ...chunked.engine.checks import LOSS_INPUTS

C = TypeVar("C", bound=Any)


def wrong_arguments(function: Callable[..., Any], count: int, keywords: Iterable[str], loss: Any = None) -> str | None:
    """What is wrong with a call that has so many positional arguments and these keywords; ``None`` if nothing is.

    ``loss`` is that whose ``forward`` the function is.
    """
    signature, keywords = inspect.signature(function), list(keywords)
    if loss is not None:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError as error:
        any_other = any(each.kind == each.VAR_KEYWORD for each in signature.parameters.values())
        known = [name for name, each in signature.parameters.items() if each.kind != each.VAR_KEYWORD]
        unknown = [] if any_other else [name for name in keywords if name not in known]
        reason = f"it has no {', '.join(f'{name}={meant(name, known)}' for name in unknown)}" if unknown else str(error)
        if loss is None:
            return f"{function.__name__}: {reason}; its arguments are {', '.join(known)}."
        named = f"Its arguments are {', '.join(known)}; it takes no logits: {LOSS_INPUTS}."
        advice = f"call it as {loss.call_forms}. {named}"
        if "ref_model" in keywords:
            advice = (
                "of a reference model, give ref_logps, or ref_hidden_states with ref_weight= (run "
                "loss_inputs(ref_model, ...) under torch.no_grad()): " + advice
            )
        return f"{type(loss).__name__}: {reason}; {advice}"
    return None


def options_of(cls: type[C], function: Callable[..., Any], options: Mapping[str, Any]) -> C:
    """An instance of a dataclass, the ``**options`` of a function; a TypeError that lists its arguments for others."""
    fields = cls.__match_args__
    unknown = ", ".join(f"{name!r}{meant(name, fields)}" for name in options if name not in fields)
    if unknown:
        parameters = inspect.signature(function).parameters.values()
        known = [*(each.name for each in parameters if each.kind != each.VAR_KEYWORD), *fields]
        raise TypeError(f"{function.__name__} has no argument {unknown}; its arguments are {', '.join(known)}.")
    return cls(**options)


def meant(name: str, known: Iterable[str]) -> str:
    """In brackets, which of the known names this one is close to, if it is close to one."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown_options(cls: type, unknown: Iterable[str]) -> str:
    """What is wrong with the keywords of a loss's constructor, and which there are."""
    known, kinds = dict[str, None](), (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        named = inspect.signature(vars(base).get("__init__", lambda **options: None)).parameters.values()
        known |= {each.name: None for each in named if each.kind not in kinds and each.name != "self"}
        if named and not any(each.kind == each.VAR_KEYWORD for each in named):
            break
    found = ", ".join(f"{name!r}{meant(name, known)}" for name in unknown)
    return f"{cls.__name__} has no option {found}; its options are {', '.join(known)}."
