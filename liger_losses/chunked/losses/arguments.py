"""Says how a loss is called and built, where arguments are missing or not known."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from liger_losses.chunked.engine.checks import LOSS_INPUTS

if TYPE_CHECKING:
    from liger_losses.chunked.losses.base import ChunkedLoss

F = TypeVar("F", bound=Callable[..., Any])


def check_arguments(loss: ChunkedLoss, forward: Any, arguments: Any, keywords: Any) -> None:
    """Raise a TypeError that says how a loss is called, if these are no arguments of its ``forward``."""
    signature = inspect.signature(forward)
    try:
        signature.bind(loss, *arguments, **keywords)
    except TypeError as error:
        unknown = [name for name in keywords if name not in signature.parameters]
        reason = f"it has no {_listed(unknown)}" if unknown else str(error)
        if options := [name for name in unknown if name in options_of(type(loss))]:
            given = ", ".join(f"{name}=..." for name in options)
            verb = "is an option" if len(options) == 1 else "are options"
            reason += f"; {_listed(options)} {verb} of the constructor, {type(loss).__name__}({given})"
        names = [name for name in signature.parameters if name not in ("self", "inputs")]
        advice = (
            f"call it as {loss.call_forms}. Its arguments are {', '.join(names)}; it takes no logits: {LOSS_INPUTS}."
        )
        if "ref_model" in keywords:
            advice = (
                "of a reference model, give ref_logps, or ref_hidden_states with ref_weight= (run "
                "loss_inputs(ref_model, ...) under torch.no_grad()): " + advice
            )
        raise TypeError(f"{type(loss).__name__}: {reason}; {advice}") from None


def explaining(forward: F) -> F:
    """The ``forward`` of a loss, which says how it is called if arguments are missing or not known."""

    @functools.wraps(forward)
    def wrapped(self: ChunkedLoss, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return forward(self, *arguments, **keywords)
        try:
            return forward(self, *arguments, **keywords)
        except TypeError:
            check_arguments(self, forward, arguments, keywords)
            raise

    return cast(F, wrapped)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"{name}=" for name in names)


def options_of(cls: type[ChunkedLoss]) -> list[str]:
    """The keywords that a constructor takes."""
    known, kinds = dict[str, None](), (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        named = inspect.signature(vars(base).get("__init__", lambda **options: None)).parameters.values()
        known |= {each.name: None for each in named if each.kind not in kinds and each.name != "self"}
        if named and not any(each.kind == each.VAR_KEYWORD for each in named):
            break
    return [*known]


def unknown_options(cls: type[ChunkedLoss], unknown: Iterable[str]) -> str:
    """What is wrong with the keywords of a constructor, and which there are."""
    known, found = options_of(cls), list[str]()
    for name in unknown:
        close = difflib.get_close_matches(name, known, 1)
        found.append(repr(name) + (f" (did you mean {close[0]!r}?)" if close else ""))
    return f"{cls.__name__} has no option {', '.join(found)}; its options are {', '.join(known)}."
