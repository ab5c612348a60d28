"""Every Python block of README.md and docs/ runs, and every link leads somewhere.

A page's blocks run in order as one module; the README's run on their own, as people copy them. Before a block,
``<!-- test: skip (reason) -->`` leaves it out, and ``<!-- test: setup`` ... ``-->`` holds code that runs before it. A
page that takes longer has ``<!-- test: slow -->`` at its top.
"""

import importlib.util
import os
import pathlib
import re
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^ *```")
SKIP = re.compile(r"^<!-- test: skip \((.+)\) -->$")


class Block:
    """Consecutive lines of code; ``code`` has an empty line for each line of the page above them."""

    def __init__(self, start, lines, skip=None):
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        self.start, self.skip = start, skip
        self.lines = [line[indent:] for line in lines]

    def code(self):
        return "\n" * self.start + "\n".join(self.lines) + "\n"


def blocks_of(path):
    """The Python blocks and set-up code of a page, in order."""
    lines, found, skip, number = path.read_text().splitlines(), [], None, 0
    while number < len(lines):
        line = lines[number].strip()
        if match := SKIP.match(line):
            skip = match.group(1)
        elif line == "<!-- test: setup":
            end = lines.index("-->", number)
            found.append(Block(number + 1, lines[number + 1 : end]))
            number = end
        elif FENCE.match(line):
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            if line == "```python":
                found.append(Block(number + 1, lines[number + 1 : end], skip))
            skip, number = None, end
        number += 1
    return found


def page_code(blocks):
    """One module of all blocks, in which every line has the number that it has in the page."""
    lines = []
    for block in blocks:
        if block.skip is None:
            lines += [""] * (block.start - len(lines)) + block.lines
    return "\n".join(lines) + "\n"


def run(code, path, folder, monkeypatch):
    """Run code in a folder of its own, from a file, as Triton reads the source of its kernels."""
    name = f"docs_{path.stem}".lower()
    file = folder / f"{name}.py"
    file.write_text(code)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    torch.manual_seed(0)
    try:
        spec.loader.exec_module(module)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return module


def pages():
    for path in PAGES:
        if blocks_of(path):
            slow = "<!-- test: slow -->" in path.read_text()
            yield pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("path", pages())
def test_a_pages_code_runs(path, tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    run(page_code(blocks_of(path)), path, tmp_path, monkeypatch)


@pytest.mark.parametrize("block", blocks_of(ROOT / "README.md"), ids=lambda block: f"line {block.start}")
def test_a_snippet_of_the_readme_runs_as_it_stands(block, tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    import liger_losses.trl

    assert block.skip is None
    try:
        module = run(block.code(), ROOT / "README.md", tmp_path, monkeypatch)
    finally:
        liger_losses.trl.disable()
    loss = getattr(module, "loss", None)
    assert loss is None or loss.isfinite()


# --- Links -------------------------------------------------------------------------------------------------------------

LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]


def anchors_of(path):
    """The fragments that GitHub and MkDocs give the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        found = pathlib.Path(os.path.normpath(path.parent / file)) if file else path
        assert found.exists(), f"{path.name} links to {target}"
        if fragment and found.suffix == ".md":
            assert fragment in anchors_of(found), f"{path.name} links to {target}, which has no such heading"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
