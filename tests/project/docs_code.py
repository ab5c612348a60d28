"""`python -m tests.project.docs_code`: the Python blocks of README.md and docs/ for the type checkers.

Writes the blocks to build/docs_code, as :mod:`tests.project.test_docs` runs them; an error's line is the line of the
page. `make lint` checks the files with mypy, and `make pyright` with pyright.
"""

import shutil

from tests.project.test_docs import PAGES, ROOT, blocks_of, modules_of

FOLDER = ROOT / "build" / "docs_code"
#: A page continues its variables from block to block, with other types, and leaves out annotations.
HEADER = "# mypy: allow-redefinition-new, allow-untyped-defs\n"
#: Packages whose annotations do not fit calls that they document. pyproject.toml tells mypy to skip them; for pyright,
#: everything in them is Any.
UNTYPED = ("transformers", "transformers/distributed", "trl", "datasets", "accelerate")


def write():
    """One file for each block that starts anew, with the blocks that continue it."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for path in [*PAGES, ROOT / "README.md"]:
        blocks = blocks_of(path)
        codes = [block.code() for block in blocks] if path.name == "README.md" else modules_of(blocks)
        for code in codes:
            lines = len(code) - len(code.lstrip("\n"))
            name = f"{path.stem.lower()}_{lines + 1}.py"
            (FOLDER / name).write_text(HEADER + code[1:])  # the first line is empty: blocks begin below a heading
    for name in UNTYPED:
        (FOLDER / "stubs" / name).mkdir(parents=True, exist_ok=True)
        (FOLDER / "stubs" / name / "__init__.pyi").write_text("def __getattr__(name: str): ...\n")


if __name__ == "__main__":
    write()
