"""A griffe extension: docstrings with Sphinx's roles and literal blocks, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|data|attr|mod):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Turns ``:func:`a.b.name``` into code, as names that other pages have are not always on the site."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(lambda match: f"`{match.group(1).split('.')[-1]}`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
