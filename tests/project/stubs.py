"""Writes the stubs by which type checkers and editors know the options and calls of losses: liger_losses/*.pyi.

The options stand in one dataclass for each family of losses, and the names of a call's arguments in its forms, from
which these stubs are made. Nothing reads them when the library runs.

python -m tests.project.stubs  # after a change of an option or a call: `make stubs`
"""

from __future__ import annotations

import inspect
import pathlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

import liger_losses
from liger_losses import functional
from liger_losses.checks import RANGES
from liger_losses.chunked.losses.dpo import DPOOptions

FOLDER = pathlib.Path(liger_losses.__file__).parent
HEADER = '''"""Types for checkers and editors, written by tests/project/stubs.py (`make stubs`): do not edit."""

# mypy: disable-error-code="override, misc, overload-overlap, overload-cannot-match"
# pyright: reportIncompatibleMethodOverride=false, reportOverlappingOverload=false
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import TypeVar, Unpack

'''
HEAD, HEADS = "Tensor | nn.Module | Head", "Tensor | nn.Module | Head | Sequence[Tensor | nn.Module | Head]"
TENSORS, PAIR = "Tensor | Sequence[Tensor]", "Completions | tuple[Tensor, Tensor]"
#: The types of the documented arguments; what is not here has the type that `forward` gives it.
ARGUMENTS = {
    "head": HEAD,
    **dict.fromkeys(("hidden_states", "labels"), "Tensor"),
    "bias": "Tensor | None",
    **dict.fromkeys(("chosen", "rejected", "desirable", "undesirable", "completions"), PAIR),
    "teacher": "Teacher | TeacherLogits | TeacherTopK | Teachers",
    "num_items_in_batch": "Tensor | int | None",
    "token_weights": "Tensor | None",
}
#: The same where there are lists of heads.
SEVERAL = {"head": HEADS, "hidden_states": TENSORS, "labels": TENSORS, "bias": f"{TENSORS} | None"} | {
    "num_items_in_batch": "Any",
    "token_weights": f"{TENSORS} | None",
}
#: What calls return where `forward` says less.
RESULTS = {
    "PreferenceLoss": "tuple[Tensor, PreferenceMetrics]",
    "DistillationLoss": "tuple[Tensor, DistillationMetrics]",
    "LigerFusedLinearCrossEntropyLoss": "R",
}
#: liger-kernel's names of arguments that its form of a call needs, and their types.
LIGER = {
    **dict.fromkeys(("lin_weight", "student_weight", "teacher_weight"), HEAD),
    **dict.fromkeys(("_input", "target", "student_input", "teacher_input", "true_labels"), "Tensor"),
}
#: And in calls with lists of heads.
OF_LISTS = {"lin_weight": HEADS, "_input": TENSORS, "target": TENSORS}
#: What only liger-kernel's form has, after the arguments of a shorter form.
OF_OTHER_FORMS = ("target", "true_labels", "student_bias", "teacher_bias")
MANY = "tuple[Any, ManyHeadsMetrics]"
#: The calls of operations: the types of arguments, and what is returned.
ONE = {"weight": HEAD, "hidden_states": "Tensor", "labels": "Tensor", "bias": "Tensor | None", "selected": "Any"}
EACH = {"weight": HEADS, "hidden_states": TENSORS, "labels": TENSORS, "bias": f"{TENSORS} | None", "selected": "Any"}
PLAIN = {"entropy": "Literal[False]", "lse": "Literal[False]", "shift": "bool | int"}
OPERATIONS = {
    "linear_logps": [(ONE | PLAIN, "Tensor"), (ONE | {"shift": "bool | int"}, "Statistics"), (EACH, "list[Any]")],
    "linear_statistics": [(ONE, "Statistics"), (EACH, "list[Statistics]")],
    "linear_token_loss": [(ONE, "tuple[Tensor, Statistics]"), (EACH, "tuple[Tensor, list[Statistics]]")],
    "linear_divergence": [(ONE, "Statistics")],
    "linear_divergence_loss": [(ONE, "tuple[Tensor, Statistics]")],
}
#: The functions whose options are fields of a dataclass.
WITH_OPTIONS = {"dpo_loss": DPOOptions, "grpo_loss": functional.PolicyOptions}


def parameters_of(function: object, skip: int = 0) -> dict[str, inspect.Parameter]:
    """The parameters of a function by name."""
    return dict([*inspect.signature(function).parameters.items()][skip:])  # type: ignore[arg-type]


class Written(NamedTuple):
    """A signature as it stands in a stub: parameters by position, the types of others by keyword, and the result."""

    positional: list[str]
    keywords: dict[str, str]
    result: str


def written(
    parameters: Mapping[str, inspect.Parameter], types: Mapping[str, str], result: str, me: str = ""
) -> Written:
    """A signature with these types instead of its own."""
    positional, keywords, kind = [me] if me else [], dict[str, str](), inspect.Parameter
    for name, each in parameters.items():
        annotation = types.get(name, "Any" if each.annotation is kind.empty else str(each.annotation))
        aliases = {"AnyHead": HEAD, "AnyTeacher": ARGUMENTS["teacher"], "OneOrEach": "Any"}
        for alias, spelled in (aliases | dict.fromkeys(RANGES, "float")).items():
            annotation = re.sub(rf"\b{alias}\b", spelled, annotation)  # names of the library's own files
        if each.kind == kind.KEYWORD_ONLY and each.default is not kind.empty:
            keywords[name] = annotation
        else:
            default = "" if each.default is kind.empty else " = ..."
            stars = {kind.VAR_POSITIONAL: "*", kind.VAR_KEYWORD: "**"}.get(each.kind, "")
            positional.append(f"{stars}{name}: {annotation}{default}")
    return Written(positional, keywords, result)


#: Keywords that several signatures share: the fields of a TypedDict, by its name.
Shared = dict[str, dict[str, str]]


def shared(name: str, signatures: Sequence[Written], others: Shared) -> Iterator[str]:
    """A TypedDict of the keywords that all of these signatures have, added to ``others``, if it makes them shorter."""
    count, items = len(signatures), [each.keywords.items() for each in signatures]
    base = max((each for each in others if others[each].items() <= items[0]), key=lambda e: len(others[e]), default="")
    fields = {k: v for k, v in items[0] if all((k, v) in each for each in items) and k not in others.get(base, {})}
    if count * len(fields) > count + len(fields) + 3:
        yield f"class {name}({base or 'TypedDict'}, total=False):"
        yield from (f"    {key}: {value}" for key, value in fields.items())
        others[name] = fields | others.get(base, {})


def functions(name: str, calls: Sequence[Written], others: Shared, indent: str = "") -> Iterator[str]:
    """A function with one call, or overloads."""
    lines = []
    for positional, keywords, result in calls:
        parameters, fits = [*positional], [each for each in others if others[each].items() <= keywords.items()]
        options = max(fits, key=lambda each: len(others[each]), default=None)
        own = {k: v for k, v in keywords.items() if options is None or k not in others[options]}
        variadic = [parameters.pop()] if parameters and parameters[-1].startswith("**") else []
        parameters += ["*"] if own else []
        parameters += [f"{key}: {value} = ..." for key, value in own.items()] + variadic
        parameters += [] if options is None else [f"**options: Unpack[{options}]"]
        lines.append(f"{indent}def {name}({', '.join(parameters)}) -> {result}: ...")
    for line in dict.fromkeys(lines):
        yield from ([f"{indent}@overload", line] if len({*lines}) > 1 else [line])


def calls_of(loss: Any) -> Iterator[Written]:
    """The calls of a loss: by the documented names of each form, and by liger-kernel's, which `forward` has."""
    given, result = parameters_of(loss.forward, 1), str(inspect.signature(loss.forward).return_annotation)
    if "Any" in result:
        result = next((RESULTS[each.__name__] for each in loss.__mro__ if each.__name__ in RESULTS), result)
    for form in loss.forms:
        parameters = in_form(given, form)
        yield written(parameters, ARGUMENTS, result, "self")
        if loss.options_type.several:
            yield written(parameters, SEVERAL, MANY, "self")
    needed = {name: each.replace(default=inspect.Parameter.empty) for name, each in given.items() if name in LIGER}
    if needed:
        last = "Any" if "teacher_input" in needed else result
        yield written(given | needed, ARGUMENTS | LIGER, last, "self")
        if loss.options_type.several:
            yield written(given | needed, SEVERAL | OF_LISTS, MANY, "self")


def in_form(given: Mapping[str, inspect.Parameter], form: Sequence[str]) -> dict[str, inspect.Parameter]:
    """The parameters of `forward` with a form's names. What belongs to another form is left out; keywords follow it."""
    kind, found = inspect.Parameter, dict[str, inspect.Parameter]()
    keyword = any(ARGUMENTS.get(name) == PAIR for name in form)  # beside completions, so that `*sides` can be checked
    for old, new in zip(given, form, strict=False):
        found[new] = given[old].replace(name=new, default=kind.empty)
    for name, each in [*given.items()][len(form) :]:
        if name in OF_OTHER_FORMS:
            keyword = True
        elif name not in found:
            variadic = each.kind in (kind.VAR_KEYWORD, kind.VAR_POSITIONAL)
            found[name] = each.replace(kind=kind.KEYWORD_ONLY) if keyword and not variadic else each
    return found


def constructors(name: str, loss: Any) -> list[Written]:
    """The constructor of a loss; overloads where its options decide what a call returns."""
    options = parameters_of(loss)
    if not loss.options_type.several:
        return [written(options, {}, "None", "self")]
    plain = {option: "Literal[False]" for option in options if option.startswith("return_")}
    return [written(options, types, "None", f"self: {name}[{r}]") for r, types in (("Tensor", plain), ("Any", {}))]


def class_of(name: str, loss: Any, public: Mapping[str, Any], others: Shared) -> tuple[list[str], list[str]]:
    """The bases of a loss's stub, and its body: options and calls."""
    base = next((each.__name__ for each in loss.__mro__[1:] if public.get(each.__name__) is each), None)
    bases = [*([base] if base else []), f"_{loss.__module__.rpartition('.')[2]}.{name}"]
    bases += ["Generic[R]"] if loss.options_type.several else []
    body = [*functions("__init__", constructors(name, loss), others, "    ")]
    if base is None or public[base].forward is not loss.forward:
        body += functions("__call__", [*calls_of(loss)], {}, "    ")
    return bases, body


def package() -> str:
    """The stub of liger_losses."""
    public = {name: getattr(liger_losses, name) for name in liger_losses.__all__}
    losses = {name: each for name, each in public.items() if issubclass_of(each, liger_losses.ChunkedLoss)}
    lines = [HEADER]
    lines += [f"from liger_losses import {name} as {name}" for name in ("functional", "modules", "trl")]
    for name, module in liger_losses._WHERE.items():
        stubbed = name in losses or name in OPERATIONS
        if not stubbed:
            lines.append(f"from liger_losses.{module} import {name} as {name}")
    files = sorted({loss.__module__.removeprefix("liger_losses.chunked.losses.") for loss in losses.values()})
    lines += [f"from liger_losses.chunked.losses import {file} as _{file}" for file in files]
    lines += ['R = TypeVar("R", default=Tensor)', "__version__: str", f"__all__ = {liger_losses.__all__}"]
    others: Shared = {}
    for base in ("ChunkedLoss", "DistillationLoss", "PreferenceLoss"):
        family = [each for each in losses.values() if issubclass_of(each, losses[base])]
        lines += shared(f"_{base}Options", [one for each in family for one in constructors("", each)], others)
    classes = {
        name: class_of(name, losses[name], losses, others)
        for name in sorted(losses, key=lambda name: len(losses[name].__mro__))
    }
    inherits = {name: bases[0] in classes and classes[bases[0]][1] == body for name, (bases, body) in classes.items()}
    bodies = Counter("\n".join(body) for name, (_, body) in classes.items() if not inherits[name])
    known = dict[str, str]()  # the stub of losses with the same options and calls
    for name, (bases, body) in classes.items():
        text = "\n".join(body)
        if not inherits[name] and bodies[text] > 1:
            if text not in known:
                known[text] = f"_{losses[name].__mro__[1].__name__}"
                lines += [f"class {known[text]}({bases[0]}):", text]
            bases = [known[text], *bases[1:]]
        lines += [f"class {name}({', '.join(bases)}):", "    ..." if inherits[name] or text in known else text]
    for name, rows in OPERATIONS.items():
        given, calls = parameters_of(public[name]), list[Written]()
        for types, result in rows:
            calls.append(written(given, types, result))
            renamed = {("head" if each == "weight" else each): value for each, value in given.items()}
            calls.append(written(renamed, types | {"head": types.get("weight", HEAD)}, result))
        own: Shared = {}
        lines += shared(f"_{name}_options", calls, own)
        lines += functions(name, calls, own)
    return "\n".join(lines) + "\n"


def of_functional() -> str:
    """The stub of liger_losses.functional."""
    lines, kind = [HEADER], inspect.Parameter
    for name in functional.__all__:
        if name not in WITH_OPTIONS:
            lines.append(f"from {getattr(functional, name).__module__} import {name} as {name}")
    lines.append(f"__all__ = {functional.__all__}")
    for name, options in WITH_OPTIONS.items():
        function = getattr(functional, name)
        given = {name: each for name, each in parameters_of(function).items() if each.kind != kind.VAR_KEYWORD}
        for field in fields(options):
            default = kind.empty if field.default is MISSING else field.default
            given[field.name] = kind(field.name, kind.KEYWORD_ONLY, default=default, annotation=field.type)
        result = str(inspect.signature(function).return_annotation)
        lines += functions(name, [written(given, {}, result)], {})
    return "\n".join(lines) + "\n"


def issubclass_of(value: object, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def stubs() -> dict[str, str]:
    """Each stub's text, by its name."""
    found = {"__init__.pyi": package(), "functional.pyi": of_functional()}
    for command in (["check", "--fix-only", "--select", "F401,I"], ["format"]):
        for name, text in found.items():
            line = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(FOLDER / name), "-"]
            done = subprocess.run(line, input=text, capture_output=True, text=True, check=False)
            assert not done.returncode, done.stderr
            found[name] = done.stdout
    return found


if __name__ == "__main__":
    for name, text in stubs().items():
        (FOLDER / name).write_text(text)
