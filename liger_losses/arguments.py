"""Errors for missing and unknown arguments, which say how a loss or an operation is called, and a loss built."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from liger_losses.checks import LOSS_INPUTS, meant

C = TypeVar("C", bound=Any)
P = ParamSpec("P")
R = TypeVar("R")


#: Options of TRL and verl that have another name here: one that serves instead, and how.
ELSEWHERE = {
    "rpo_alpha": ("compute_nll_loss", "compute_nll_loss=True, and alpha= as the factor of the likelihood"),
    "reference_free": ("use_ref_model", "use_ref_model=False"),
    "epsilon": ("epsilon_low", "epsilon_low= and epsilon_high=, both of which TRL's epsilon sets"),
    **dict.fromkeys(("clip_ratio", "clip_range"), ("epsilon_low", "epsilon_low= and epsilon_high=")),
    "clip_ratio_c": ("delta", "delta="),
    "kl_coef": ("use_bias_correction_kl", "beta="),
    "loss_agg_mode": ("normalizer", "normalizer="),
    "num_generations": ("loss_type", "advantages of the group, which the call takes; prompts= says what a group is"),
    "scale_rewards": ("normalizer", "advantages that are scaled before the call"),
    "mask_truncated_completions": ("normalizer", "0 in the call's mask for their tokens"),
}


def unknown_names(names: Iterable[str], known: Sequence[str]) -> str:
    """Names that there are not, each with what may have been meant."""
    hints = {name: hint for name, (option, hint) in ELSEWHERE.items() if option in known}
    return ", ".join(
        [f"{name!r}" + (f" (use {hints[name]})" if name in hints else meant(name, known)) for name in names]
    )


def call_forms(loss: Any) -> str:
    """How a loss is called."""
    return " or ".join([f"loss({', '.join(form)})" for form in loss.forms])


def wrong_arguments(function: Callable[..., Any], count: int, keywords: Iterable[str], loss: Any = None) -> str | None:
    """What is wrong with a call that has so many positional arguments and these keywords; ``None`` if nothing is.

    ``loss`` is the class whose ``forward`` the function is.
    """
    parameters, keywords = [*inspect.signature(function).parameters.values()][loss is not None :], list(keywords)
    try:
        inspect.Signature(parameters).bind(*[None] * count, **dict.fromkeys(keywords))
        return None
    except TypeError as error:
        reason = str(error)
    names = [p.name for p in parameters if p.kind != p.VAR_KEYWORD]
    unknown = [name for name in keywords if name not in names] if len(names) == len(parameters) else []
    form, options = ((), ()) if loss is None else (loss.forms[0], loss.option_names)
    if unknown:
        known = [*names, *form]
        hints = [f"{name}={'' if name in options else meant(name, known)}" for name in unknown]
        reason = f"it has no {', '.join(hints)}"
    if loss is None:
        return f"{function.__name__}: {reason}; its arguments are {', '.join(names)}."
    for name, parameter in zip(form, names, strict=False):
        reason = reason.replace(repr(parameter), repr(name))
    misplaced = [name for name in unknown if name in options]
    if misplaced:
        moved = ", ".join([f"{name}=..." for name in misplaced])
        reason += f"; options go to the constructor, {loss.__name__}({moved})"
    advice = f"call it as {call_forms(loss)}. Its arguments are {', '.join([*form, *names[len(form) :]])}"
    liger = [name for name in names[: len(form)] if name not in form]
    advice += f", or {', '.join(liger)} as in liger-kernel" if liger else ""
    if "ref_model" in keywords:
        advice = (
            "of a reference model, give ref_logps, or ref_hidden_states with ref_weight= (run loss_inputs(ref_model, "
            f"...) under torch.no_grad()): {advice}"
        )
    return f"{loss.__name__}: {reason}; {advice}; it takes no logits: {LOSS_INPUTS}."


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


def by_parameter_names(loss: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """A call's keywords, of which the documented names become those of ``forward``'s parameters."""
    renamed = {loss.parameters_named.get(name, name): value for name, value in keywords.items()}
    if len(renamed) < len(keywords):
        names = ", ".join([f"{name}=" for name in keywords])
        raise TypeError(
            f"{type(loss).__name__}: two of {names} are the same argument, or of two forms of the call; call it as "
            f"{call_forms(loss)}."
        )
    return renamed


def typed_as(parameters: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function with ``**options``: for checkers, editors and ``help``, it takes what a dataclass does."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        by_position = [*inspect.signature(function).parameters.values()][:-1]
        known = {p.name: p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(parameters).parameters.values()}
        known |= {p.name: p for p in by_position}
        function.__signature__ = inspect.Signature([*known.values()])  # type: ignore[attr-defined]
        return function

    return decorate


def options_of(cls: type[C], function: Callable[..., Any], options: Mapping[str, Any]) -> C:
    """An instance of a dataclass, the ``**options`` of a function; a TypeError that lists its arguments for others."""
    listed = inspect.signature(function).parameters
    check_known(function.__name__, "argument", options, cls.__dataclass_fields__, listed)
    return cls(**options)


def check_known(owner: str, kind: str, names: Iterable[str], known: Container[str], listed: Iterable[str]) -> None:
    """Raise TypeError, with a list of those that there are, for names of arguments or options that are not known."""
    unknown = [name for name in names if name not in known]
    if unknown:
        there = [name for name in listed if name != "compiled"]  # which has no effect
        raise TypeError(f"{owner} has no {kind} {unknown_names(unknown, there)}; its {kind}s are {', '.join(there)}.")


def options_signature(cls: Any, positions: Sequence[str]) -> inspect.Signature:
    """The fields of a loss's options, of which those of ``positions`` come first, by position or by name."""
    kind, known = inspect.Parameter, inspect.signature(cls.options_type).parameters
    kinds = {name: kind.POSITIONAL_OR_KEYWORD if name in positions else kind.KEYWORD_ONLY for name in known}
    names = sorted(known, key=[*positions, *[field.name for field in fields(cls.options_type)]].index)
    return inspect.Signature([known[name].replace(kind=kinds[name]) for name in names])


def constructor_signature(cls: Any) -> inspect.Signature:
    """What a loss's constructor takes: what subclasses name in theirs, then the fields of its options."""
    kind, known, positions = inspect.Parameter, dict[str, inspect.Parameter](), cls.positions
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        if "__init__" in vars(base):
            named = [*inspect.signature(base.__init__).parameters.values()][1:]
            kinds = {p.kind for p in named}
            known = {p.name: p for p in named if p.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)} | known
            positions = positions if kind.VAR_POSITIONAL in kinds else ()
            if kind.VAR_KEYWORD not in kinds:
                return inspect.Signature([*known.values()])
    known = {**known, **options_signature(cls, positions).parameters, **known}
    return inspect.Signature(sorted(known.values(), key=lambda p: p.kind))


def named_options(cls: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a loss's constructor by name; a TypeError for too many, unknown and missing ones, and for what
    belongs to the call."""
    options, positions, signature = cls.options_type.folded(options), cls.positions, cls.options_signature
    if not options.keys() <= signature.parameters.keys():
        check_known(cls.__name__, "option", options, signature.parameters, cls.option_names)
    try:
        named = signature.bind(*arguments, **options).arguments
    except TypeError as error:
        raise TypeError(f"{cls.__name__}: {error}; its options are {', '.join(cls.option_names)}.") from None
    check_no_inputs(cls, named)
    first = named.get("ignore_index")
    if arguments and isinstance(first, float) and "ignore_index" in positions:
        option = positions[positions.index("ignore_index") + 1]
        raise TypeError(
            f"ignore_index must be an integer, got {first!r}: it is the first option by position; pass others by "
            f"keyword, such as {option}={first!r}."
        )
    return named


def check_no_inputs(cls: Any, options: Mapping[str, Any]) -> None:
    """Raise TypeError if an option is a layer, a head, or a tensor that it cannot be: these belong to the call."""
    known = cls.options_type.__dataclass_fields__
    for name, value in options.items():
        if isinstance(value, Tensor) and value.dim() <= 1 and "Tensor" in str(known[name].type):
            continue
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, (Tensor, nn.Module)) or hasattr(part, "vocab_size"):
                shape = f"{list(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(
                    f"{cls.__name__} was given a tensor or a head as its option {name} ({shape}): options go to the "
                    f"constructor, tensors and heads to the call; add (), {cls.__name__}()(...)."
                )
