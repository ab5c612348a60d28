"""The package without the private names of torch that it uses: see :mod:`tests.project.private_names`."""

import ast
import itertools
import json
import pathlib
import re
import subprocess
import sys

import pytest
from torch import nn

import liger_losses
from liger_losses.layers.plain import _HOOKS, is_plain_linear
from tests.project.private_names import AT_IMPORT, HOOKS, IN_CALLS

#: Of transformers and accelerate, which modules need not have; of named tuples; and the package's own.
OTHERS = {"_C", "_apply_gate", "_hf_hook", "_original_forward", "_fields", "_make", "_replace", "_asdict", "_input"}
OTHERS |= {"_attn_implementation", "_can_set_attn_implementation", "_is_stateful"}
LISTED = [*itertools.chain.from_iterable(AT_IMPORT), *IN_CALLS]


def test_without_private_names():
    """In one process, as starting it takes longer than a name does."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.project.private_names"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    cases = [*(names[-1][1] for names in AT_IMPORT), *(name for _, name in IN_CALLS)]
    for name, line in zip(cases, lines, strict=True):
        kind, reasons = json.loads(line)
        is_lazy = name != "_make_wrapper_subclass" and "backward" not in name
        expected = ["hooks"] * (4 - is_lazy) if name in HOOKS else [] if is_lazy else [name]
        assert kind == ("LazyLogits" if is_lazy else "Tensor"), f"{name}: {kind}"
        assert [word in reason for word, reason in zip(expected, reasons, strict=True)] == [True] * len(expected), name


@pytest.mark.parametrize("name", _HOOKS)
def test_a_layer_whose_hooks_cannot_be_told_is_called(name):
    layer = nn.Linear(2, 3)
    assert is_plain_linear(layer)
    delattr(layer, name)
    assert not is_plain_linear(layer)


def test_the_list_has_the_names_that_the_package_uses():
    """Private names that are read, imported or written as words, and that it defines nowhere; all of the list are used.

    Places in packages that it integrates with are names too, and have tests of their own.
    """
    used, own, text = set(), set(), ""
    folder = pathlib.Path(liger_losses.__file__).parent
    for path in folder.rglob("*.py"):
        if path.relative_to(folder).parts[0] in ("trl", "integrations"):
            continue
        text += path.read_text()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                (own if isinstance(node.ctx, ast.Store) else used).add(name)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
                own |= {alias.asname for alias in node.names if alias.asname}
                if not str(node.module).startswith("liger_losses"):
                    used |= {alias.name for alias in node.names} | {*str(node.module).split(".")}
            elif isinstance(node, ast.Constant) and re.fullmatch(r"[a-zA-Z_.]*\b_[a-z]\w+", str(node.value)):
                used |= {*str(node.value).split(".")}
    listed = {part for place, name in LISTED for part in f"{place}.{name}".split(".")}
    private = {name for name in used - own if re.match("_[^_]", name) and not name.startswith("_liger")}
    assert HOOKS == _HOOKS
    assert private - OTHERS <= listed
    assert not [name for _, name in LISTED if name not in text]
