"""A griffe extension: docstrings with Sphinx's roles and literal blocks, as Markdown."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|data|attr|mod):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Turns ``:func:`a.b.name``` into code, as names that other pages have are not always on the site."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(lambda match: f"`{match.group(1).split('.')[-1]}`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


class PublicNames(griffe.Extension):
    """Finds the package's public names, which are imported when they are read, in the modules that its table names."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for module, names in ast.literal_eval(str(pkg["_MODULES"].value)).items():
            for name in names.split():
                pkg.set_member(name, griffe.Alias(name, f"{pkg.name}.{module}.{name}", parent=pkg))


class Options(griffe.Extension):
    """Shows in a loss's signature the options that its constructor takes: the fields of their dataclass."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for loss in list(_classes(pkg)):
            constructor = loss.members.get("__init__")
            decorators = [] if constructor is None else [str(each.value) for each in constructor.decorators]
            names = [name for name in decorators if name.startswith("constructor(")]
            if names:
                options = _fields(loss.module[names[0][len("constructor(") : -1]])
                variadic = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)
                own = [each for each in constructor.parameters if each.kind not in variadic]
                kind = griffe.ParameterKind.keyword_only
                named = [griffe.Parameter(name, annotation=a, kind=kind, default=x) for name, (a, x) in options.items()]
                loss.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*own, *named)))
                loss.overloads.pop("__init__", None)


def _fields(options: griffe.Class) -> dict[str, tuple[Any, Any]]:
    """Annotations and defaults of a dataclass's fields; classes that derive from one of options are dataclasses too."""
    fields: dict[str, tuple[Any, Any]] = {}
    for base in (*reversed(options.mro()), options):
        for name, member in base.members.items():
            annotated = "instance-attribute" in member.labels and member.annotation is not None
            if annotated and str(member.annotation) != "ClassVar":
                value = member.value
                if isinstance(value, griffe.ExprCall):  # field(default=...)
                    value = next((part.value for part in value.arguments if part.name == "default"), None)
                fields[name] = (member.annotation, value)
    return fields


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if not member.is_alias and member.is_class:
            yield member
        elif not member.is_alias and member.is_module:
            yield from _classes(member)
