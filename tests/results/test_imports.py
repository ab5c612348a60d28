"""Tests of results know results: of the package, they and what they share import public names alone."""

import ast
import re
from pathlib import Path

import pytest

import liger_losses

FOLDER = Path(__file__).parent
PUBLIC = {"functional", "chunked", *liger_losses.__all__}
#: What they share with other tests, and imports nothing of the inside either.
SHARED = [FOLDER.parent / f"{name}.py" for name in ("losses", "processes", "reference")]


def inside_of(source: str) -> set[str]:
    """Modules of the package that a file names, in imports, attributes or strings, and of the tests beside the seam."""
    tree = ast.parse(source)
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names = re.findall(r"\b(?:liger_losses|ll)\.((?:[a-z_]+\.?)+)", source)
    named = {name for name in names if name.strip(".") not in PUBLIC}
    shared = ("tests.results", "tests.seam", *(f"tests.{path.stem}" for path in SHARED))
    return named | {name for name in modules if name.startswith("tests.") and not name.startswith(shared)}


@pytest.mark.parametrize(
    "path", [*FOLDER.glob("[!t]*.py"), *FOLDER.glob("test_[!i]*.py"), *SHARED], ids=lambda path: path.stem
)
def test_nothing_of_the_inside_is_imported(path):
    assert not inside_of(path.read_text())
