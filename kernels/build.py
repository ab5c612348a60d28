"""Build the Hub kernel from the library.

    python kernels/build.py  # writes kernels/torch-ext and kernels/build, neither of which git tracks

``kernels/torch-ext/liger_losses`` is the source as kernel-builder expects it: the files of ``kernels/source`` and every
module of the library that they import, unchanged but for two things. Imports are relative, as a kernel has no fixed
name; and torch operators get the namespace of ``_ops.py``, as versions of a kernel may be loaded beside one another.

``kernels/build/torch-BACKEND`` is what ``kernels`` loads: the same files, ``_ops.py`` and ``metadata.json``.
"""

from __future__ import annotations

import argparse
import ast
import base64
import functools
import hashlib
import json
import re
import shutil
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY, SOURCE, TARGET = FOLDER.parent / "liger_losses", FOLDER / "source", FOLDER / "torch-ext" / "liger_losses"
#: kernel-builder writes it too; of a build, so that it belongs to no source.
OPS = '''"""The namespace of this build's torch operators."""

import torch

_NAME = "{id}"
ops = getattr(torch.ops, _NAME)


def add_op_namespace_prefix(name: str) -> str:
    """The full name of an operator."""
    return f"{{_NAME}}::{{name}}"
'''


def file_of(module: str) -> tuple[str, Path] | None:
    """Where a module of the package is in the kernel, and in this repository; ``None`` if there is no such module."""
    parts = module.split(".")[1:]
    for name in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
        for root in (SOURCE, LIBRARY):
            if (root / name).is_file():
                return name, root / name
    return None


def own_imports(text: str) -> list[ast.ImportFrom]:
    """The statements by which a file of the library imports others of it, also those within functions."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return [node for node in found if (node.module or "").split(".")[0] == "liger_losses"]


def as_kernel_file(name: str, text: str, imports: list[ast.ImportFrom]) -> str:
    """One file of the library as a file of the kernel."""
    dots = "." * (name.count("/") + 1)
    lines = text.splitlines(keepends=True)
    for node in imports:
        lines[node.lineno - 1] = re.sub(r"from liger_losses\.?", f"from {dots}", lines[node.lineno - 1], count=1)
    text = "".join(lines).replace("torch.ops.liger_losses.", "ops.")
    text, operators = re.subn(r'"liger_losses::(\w+)"', r'add_op_namespace_prefix("\1")', text)
    if operators:
        line = f"from {dots}_ops import add_op_namespace_prefix, ops\n"
        text = re.sub(r"^from \.", line + "from .", text, count=1, flags=re.MULTILINE)
    return text


@functools.cache
def sources() -> dict[str, str]:
    """Every file of the kernel by its path: what ``kernels/source`` has, and what that imports, directly or not."""
    modules = ["liger_losses", "liger_losses.layers"]
    files: dict[str, str] = {}
    for module in modules:
        found = file_of(module)
        if found is None or found[0] in files:
            continue
        name, path = found
        text = path.read_text()
        imports = own_imports(text)
        files[name] = as_kernel_file(name, text, imports)
        modules.append(module.rpartition(".")[0] or "liger_losses")
        for node in imports:  # `from a import b` may mean the module a.b
            modules += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return dict(sorted(files.items()))


def write(folder: Path, files: dict[str, str]) -> None:
    """Replace a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def general() -> dict[str, object]:
    """The values of ``[general]`` in build.toml, which are numbers, strings and lists of strings in one line each."""
    section = (FOLDER / "build.toml").read_text().partition("[general]")[2].partition("\n[")[0]
    return {key: json.loads(value) for key, value in re.findall(r"^([\w-]+) = (.+)$", section, re.MULTILINE)}


def build(folder: Path) -> None:
    """Write the variants of all backends, from the library as it is."""
    options, files = general(), sources()
    name = str(options["name"]).replace("-", "_")
    unique = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:8]
    for backend in options["backends"]:  # type: ignore[attr-defined]
        identifier = f"_{name}_{backend}_{unique}"
        variant = {**files, "_ops.py": OPS.format(id=identifier)}
        digests = {
            path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for path, text in variant.items()
        }
        metadata = {
            "name": options["name"],
            "id": identifier,
            "version": options["version"],
            "license": options["license"],
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": dict(sorted(digests.items()))},
        }
        variant["metadata.json"] = json.dumps(metadata, indent=2) + "\n"
        write(folder / f"torch-{backend}", variant)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the Hub kernel from the library.")
    parser.add_argument("--output", type=Path, default=FOLDER / "build", help="the folder of the build variants")
    arguments = parser.parse_args()
    write(TARGET, sources())
    build(arguments.output)


if __name__ == "__main__":
    main()
