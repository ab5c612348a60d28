"""Every Python block of README.md and docs/ runs, and every link leads somewhere.

Readers paste what they see, so nothing runs that is not on the page: a block that has ``import torch`` runs by itself,
and the blocks after it continue it. Before a block, ``<!-- test: skip (reason) -->`` leaves it out; after one,
``<!-- test: after`` ... ``-->`` holds code that undoes what it did to the process. At the top of a page,
``<!-- test: slow -->`` marks it as slow, ``<!-- test: needs NAME -->`` says which package it takes, and with
``<!-- test: skip page (reason) -->`` only the blocks after a ``<!-- test: run -->`` run.
"""

import os
import pathlib
import re
import runpy
import shutil
import textwrap
from typing import NamedTuple

import pytest
import torch

from tests.processes import printed_by

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NEEDS = re.compile(r"^<!-- test: needs (\w+) -->$", re.MULTILINE)
#: What is said of the block that follows, a block, or what is undone.
BLOCK = r"^(?:<!-- test: (skip \(|run)[^\n]*-->\n+)?(?: *```python\n(.*?)^ *```|<!-- test: after\n(.*?)^-->)$"


class Block(NamedTuple):
    """Consecutive lines of code; ``code`` has an empty line for each line of the page above them."""

    start: int
    text: str
    skip: bool = False

    def code(self):
        return "\n" * self.start + self.text


def blocks_of(path):
    """The Python blocks of a page, and what is undone after them, in order."""
    page, blocks = path.read_text(), []
    skips_all = "<!-- test: skip page" in page
    for match in re.finditer(BLOCK, page, re.MULTILINE | re.DOTALL):
        mark, code, after = match.groups()
        skip = after is None and mark != "run" and (mark is not None or skips_all)
        start = page.count("\n", 0, match.start(2 if after is None else 3))
        blocks.append(Block(start, textwrap.dedent(code or after), skip))
    return blocks


def modules_of(blocks):
    """The code of each block that starts anew with those that continue it; every line has its number in the page."""
    modules = []
    for block in (block for block in blocks if not block.skip):
        if not modules or re.search("^import torch$", block.text, re.MULTILINE):
            modules.append("")
        modules[-1] += "\n" * (block.start - modules[-1].count("\n")) + block.text
    return modules


def run(code, path, folder, monkeypatch):
    """The variables of code that runs in a folder of its own; from a file, as Triton reads the source of kernels."""
    name = f"docs_{path.stem}_{len(code) - len(code.lstrip())}".lower()
    (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    try:
        return runpy.run_path(f"{name}.py", run_name=name)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def pages():
    for path in PAGES:
        if modules_of(blocks_of(path)):
            slow = "<!-- test: slow -->" in path.read_text()
            yield pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("path", pages())
def test_a_pages_code_runs(path, tmp_path, monkeypatch):
    for package in ["trl", *NEEDS.findall(path.read_text())]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    for code in modules_of(blocks_of(path)):
        variables = run(code, path, tmp_path, monkeypatch)
        torch.compiler.reset()  # compiled code removes its own names from the module, which must still be there
        variables.clear()  # what a page registers would keep its patched models for other tests


@pytest.mark.parametrize("block", blocks_of(ROOT / "README.md"), ids=lambda block: f"line {block.start}")
def test_a_snippet_of_the_readme_runs_as_it_stands(block, tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    import liger_losses.trl

    assert not block.skip
    try:
        loss = run(block.code(), ROOT / "README.md", tmp_path, monkeypatch).get("loss")
    finally:
        liger_losses.trl.disable()
    assert loss is None or loss.isfinite()


@pytest.mark.parametrize("run_it", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_new_statistic(run_it, tmp_path):
    """The diff of extending.md fits the code; in a copy of the package, the page's check of it passes."""
    shutil.copytree(ROOT / "liger_losses", tmp_path / "liger_losses", ignore=shutil.ignore_patterns("__pycache__"))
    diff = re.search(r"```diff\n(.*?)```\n", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)[1]
    files = re.findall(r"^\+\+\+ b/([^\n]*)\n@@\n(.*?)(?=^--- a/|\Z)", diff, re.MULTILINE | re.DOTALL)
    assert len(files) == 3
    for (name, hunks), file in ((pair, tmp_path / pair[0]) for pair in files):
        for hunk in hunks.split("@@\n"):
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in (" ", sign)) for sign in "-+")
            assert file.read_text().count(old) == 1, f"{name} has no, or several places like\n{old}"
            file.write_text(file.read_text().replace(old, new))
    (check,) = [block for block in blocks_of(ROOT / "docs" / "extending.md") if block.skip]
    if run_it:
        printed_by("-c", check.code(), cwd=tmp_path, PYTHONPATH=str(tmp_path))


# --- Links -----------------------------------------------------------------------------------------------------------

LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/README.md")
TEXTS = [*(ROOT / name for name in NAMES), *PAGES]


def without_code(path):
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def anchors_of(path):
    """The fragments that GitHub and MkDocs give the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_code(path), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in (target for target in LINK.findall(without_code(path)) if not re.match(r"[a-z]+:", target)):
        file, _, fragment = target.partition("#")
        found = pathlib.Path(os.path.normpath(path.parent / file)) if file else path
        assert found.exists(), f"{path.name} links to {target}"
        if fragment and found.suffix == ".md":
            assert fragment in anchors_of(found), f"{path.name} links to {target}, which has no such heading"


#: Placeholders, what a command makes, and files and names of other projects.
NOT_OURS = re.compile(r".*/x/.*|kernels/torch-ext|masking_utils\.py|_from_config|_apply_liger_\w+|__\w+__")


def test_files_and_names_in_backticks_exist():
    """Files, and names that are this library's: private, or with the package's name."""
    tops = ("liger_losses", "tests", "docs", "benchmarks", "examples", "kernels", ".github")
    files = {f"/{path.relative_to(ROOT)}": path for top in tops for path in (ROOT / top, *(ROOT / top).rglob("*"))}
    words = {*re.findall(r"\w+", "".join(p.read_text() for p in files.values() if p.suffix == ".py"))}
    pages = (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    for page, name in ((p.name, name) for p in pages for name in re.findall(r"`([A-Za-z_.][\w./-]*)", without_code(p))):
        if name.endswith(".py") or name.startswith(tuple(f"{top}/" for top in tops)):
            exists = any(file.endswith(f"/{name}".rstrip("/")) for file in files)
            assert exists or NOT_OURS.fullmatch(name), (page, name)
        elif name.startswith(("_", "liger_losses.")):
            assert name.rpartition(".")[2] in words or NOT_OURS.fullmatch(name), (page, name)


def test_every_public_name_is_in_the_reference():
    import liger_losses
    from liger_losses import functional

    text = (ROOT / "docs" / "api.md").read_text()
    names = {f"liger_losses.{name}" for name in liger_losses.__all__ if name != "functional"}
    names |= {f"liger_losses.functional.{name}" for name in functional.__all__}
    listed = re.findall(r"^::: (.+)$", text, re.MULTILINE)
    assert names <= {*listed}
    assert len(listed) == len({*listed})
