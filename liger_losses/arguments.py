"""Errors for missing and unknown arguments, which say how a loss or an operation is called, and a loss built."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from torch import nn

from liger_losses.checks import LOSS_INPUTS, meant

C = TypeVar("C", bound=Any)


def wrong_arguments(function: Callable[..., Any], count: int, keywords: Iterable[str], loss: Any = None) -> str | None:
    """What is wrong with a call that has so many positional arguments and these keywords; ``None`` if nothing is.

    ``loss`` is the class whose ``forward`` the function is.
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
        options = [] if loss is None else [name for name in unknown if name in loss.option_names]
        documented = [] if loss is None else [name for form in loss.forms for name in form]
        names = [*known, *documented]
        known_or_not = ", ".join(f"{name}={'' if name in options else meant(name, names)}" for name in unknown)
        reason = f"it has no {known_or_not}" if unknown else str(error)
        for old, new in zip(known, loss.forms[0] if loss else (), strict=False):
            reason = reason.replace(f"argument: {old!r}", f"argument: {new!r}")
        if {*unknown} & {*documented}:
            named = ", ".join(f"{name}=" for name in unknown if name in documented)
            reason = f"{named} beside an argument that is the same one, or that belongs to another form of the call"
        if options:
            named, given = (", ".join(f"{name}={value}" for name in options) for value in ("", "..."))
            verb = "is an option" if len(options) == 1 else "are options"
            reason += f"; {named} {verb} of the constructor, {loss.__name__}({given})"
        if loss is None:
            return f"{function.__name__}: {reason}; its arguments are {', '.join(known)}."
        named = f"Its arguments are {', '.join(dict.fromkeys([*loss.forms[0], *known[len(loss.forms[0]) :]]))}"
        others = [name for name in known[: len(loss.forms[0])] if name not in documented]
        named += f", or {', '.join(others)} as in liger-kernel" if others else ""
        named += f"; it takes no logits: {LOSS_INPUTS}."
        advice = f"call it as {loss.call_forms}. {named}"
        if "ref_model" in keywords:
            advice = (
                "of a reference model, give ref_logps, or ref_hidden_states with ref_weight= (run "
                "loss_inputs(ref_model, ...) under torch.no_grad()): " + advice
            )
        return f"{loss.__name__}: {reason}; {advice}"
    return None


def lists_arguments(function: C) -> C:
    """Decorate a function: wrong arguments raise a TypeError that lists its arguments.

    If it has the attribute ``arguments_elsewhere``, that says of other functions' arguments what to do instead.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        message = wrong_arguments(function, len(arguments), keywords)
        if message is not None:
            elsewhere = getattr(wrapped, "arguments_elsewhere", {})
            hints = [hint for name, hint in elsewhere.items() if difflib.get_close_matches(name, keywords, 1)]
            raise TypeError(" ".join([message, *hints]))
        return function(*arguments, **keywords)

    return wrapped  # type: ignore[return-value]


def by_forward_names(loss: Any, count: int, keywords: dict[str, Any]) -> dict[str, Any]:
    """A call's keywords by the names of the parameters of ``forward``, beside so many arguments by position.

    ``loss.forms`` are the documented names by position, of each form of the call. The first form counts that has all
    those which ``forward`` does not have, and in which nothing is given twice. Without one, the keywords stay as they
    are, for which :func:`wrong_arguments` has an error.
    """
    names = loss.argument_names
    documented = [name for name in keywords if name not in names and any(name in form for form in loss.forms)]
    for form in loss.forms if documented else ():
        if all(name in form for name in documented):
            renamed = {name: names[form.index(name)] for name in documented}
            if all(new not in keywords and names.index(new) >= count for new in renamed.values()):
                return {renamed.get(name, name): value for name, value in keywords.items()}
    return keywords


def options_of(cls: type[C], function: Callable[..., Any], options: Mapping[str, Any]) -> C:
    """An instance of a dataclass, the ``**options`` of a function; a TypeError that lists its arguments for others."""
    names = [*cls.__dataclass_fields__]
    unknown = ", ".join(f"{name!r}{meant(name, names)}" for name in options if name not in names)
    if unknown:
        parameters = inspect.signature(function).parameters.values()
        known = [*(each.name for each in parameters if each.kind != each.VAR_KEYWORD), *names]
        raise TypeError(f"{function.__name__} has no argument {unknown}; its arguments are {', '.join(known)}.")
    return cls(**options)


def constructor_signature(cls: Any) -> inspect.Signature:
    """What a loss's constructor takes: what subclasses name in theirs, then the fields of its options."""
    kind, known, positions = inspect.Parameter, dict[str, inspect.Parameter](), cls.positions
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        if "__init__" in vars(base):
            named = [*inspect.signature(base.__init__).parameters.values()][1:]
            kinds = {each.kind for each in named}
            known = {
                each.name: each for each in named if each.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
            } | known
            positions = positions if kind.VAR_POSITIONAL in kinds else ()
            if kind.VAR_KEYWORD not in kinds:
                return inspect.Signature([*known.values()])
    options = {field.name: field for field in fields(cls.options_type)}
    for name in sorted(options.keys() - known.keys(), key=[*positions, *options].index):
        how = kind.POSITIONAL_OR_KEYWORD if name in positions else kind.KEYWORD_ONLY
        default = kind.empty if options[name].default is MISSING else options[name].default
        known[name] = inspect.Parameter(name, how, default=default, annotation=options[name].type)
    return inspect.Signature(sorted(known.values(), key=lambda each: each.kind))


def named_options(cls: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a loss's constructor by name; a TypeError for too many, and for unknown ones."""
    names, known = cls.positions, [field.name for field in fields(cls.options_type)]
    if len(arguments) > len(names):
        raise TypeError(
            f"{cls.__name__} takes at most {len(names)} options by position, got {len(arguments)}: {', '.join(names)}."
        )
    by_position = dict(zip(names, arguments, strict=False))
    twice = ", ".join(name for name in by_position if name in options)
    if twice:
        raise TypeError(f"{cls.__name__} was given {twice} by position and by name; leave one out.")
    unknown = [name for name in options if name not in known]
    if unknown:
        known = cls.option_names  # beside these, what constructors of subclasses name
        found = ", ".join(f"{name!r}{meant(name, known)}" for name in unknown)
        raise TypeError(f"{cls.__name__} has no option {found}; its options are {', '.join(known)}.")
    named = by_position | dict(options)
    required = [field.name for field in fields(cls.options_type) if field.default is field.default_factory is MISSING]
    missing = ", ".join(f"{name}=" for name in required if name not in named)
    if missing:
        raise TypeError(f"{cls.__name__} needs {missing}; its options are {', '.join(cls.option_names)}.")
    return named
