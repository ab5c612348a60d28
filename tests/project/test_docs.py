"""Every Python block of README.md and docs/ runs, and every link leads somewhere.

Readers paste what they see, so nothing runs that is not on the page: a block that has ``import torch`` runs by itself,
and the blocks after it continue it. Before a block, ``<!-- test: skip (reason) -->`` leaves it out; after one,
``<!-- test: after`` ... ``-->`` holds code that undoes what it did to the process. At the top of a page,
``<!-- test: slow -->`` marks it as slow, ``<!-- test: needs NAME -->`` says which package it takes, and with
``<!-- test: skip page (reason) -->`` only the blocks after a ``<!-- test: run -->`` run.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import sys

import pytest
import torch

from tests.models import with_lora
from tests.processes import printed_by

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^ *```")
SKIP = re.compile(r"^<!-- test: skip \((.+)\) -->$")
SKIP_PAGE = re.compile(r"^<!-- test: skip page \((.+)\) -->$", re.MULTILINE)
NEEDS = re.compile(r"^<!-- test: needs (\w+) -->$", re.MULTILINE)


class Block:
    """Consecutive lines of code; ``code`` has an empty line for each line of the page above them."""

    def __init__(self, start, lines, skip=None):
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        self.start, self.skip = start, skip
        self.lines = [line[indent:] for line in lines]
        self.starts_anew = "import torch" in self.lines

    def code(self):
        return "\n" * self.start + "\n".join(self.lines) + "\n"


def blocks_of(path):
    """The Python blocks of a page, and what is undone after them, in order."""
    text, found, number = path.read_text(), [], 0
    lines, whole = text.splitlines(), SKIP_PAGE.search(text)
    by_default = skip = whole.group(1) if whole else None
    while number < len(lines):
        line = lines[number].strip()
        if match := SKIP.match(line):
            skip = match.group(1)
        elif line == "<!-- test: run -->":
            skip = None
        elif line == "<!-- test: after":
            end = lines.index("-->", number)
            found.append(Block(number + 1, lines[number + 1 : end]))
            number = end
        elif FENCE.match(line):
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            if line == "```python":
                found.append(Block(number + 1, lines[number + 1 : end], skip))
            skip, number = by_default, end
        number += 1
    return found


def modules_of(blocks):
    """The code of each block that starts anew with those that continue it; every line has its number in the page."""
    modules = []
    for block in blocks:
        if block.skip is None:
            if block.starts_anew or not modules:
                modules.append([])
            modules[-1] += [""] * (block.start - len(modules[-1])) + block.lines
    return ["\n".join(lines) + "\n" for lines in modules]


def run(code, path, folder, monkeypatch):
    """Run code in a folder of its own, from a file, as Triton reads the source of its kernels."""
    name = f"docs_{path.stem}_{len(code) - len(code.lstrip())}".lower()
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
        if any(block.skip is None for block in blocks_of(path)):
            slow = "<!-- test: slow -->" in path.read_text()
            yield pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("path", pages())
def test_a_pages_code_runs(path, tmp_path, monkeypatch):
    for package in ["trl", *NEEDS.findall(path.read_text())]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    for code in modules_of(blocks_of(path)):
        module = run(code, path, tmp_path, monkeypatch)
        torch.compiler.reset()  # compiled code removes its own names from the module, which must still be there
        vars(module).clear()  # what a page registers would keep its patched models for other tests


@pytest.mark.parametrize("name", ["losses", "distillation"])
def test_a_pages_code_runs_on_a_model_with_lora(name, tmp_path, monkeypatch):
    """What takes a model's head and hidden states: the code before that of trainers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_config", with_lora(transformers.AutoModelForCausalLM.from_config)
    )
    path = ROOT / "docs" / f"{name}.md"
    run(modules_of(blocks_of(path))[0], path, tmp_path, monkeypatch)


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


def changed_by(diff, text_of):
    """The new text of each file in a diff whose hunks are found by their lines."""
    for part in re.split(r"^--- a/.*\n", diff, flags=re.MULTILINE)[1:]:
        name, *hunks = re.split(r"^@@\n", part, flags=re.MULTILINE)
        name = name.strip().removeprefix("+++ b/")
        text = text_of(name)
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in (" ", sign)) for sign in "-+")
            assert text.count(old) == 1, f"{name} has no, or several places like\n{old}"
            text = text.replace(old, new)
        yield name, text


@pytest.mark.parametrize("run_it", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_new_statistic(run_it, tmp_path):
    """The diff of extending.md fits the code; in a copy of the package, the page's check of it passes."""
    page = (ROOT / "docs" / "extending.md").read_text()
    diff = re.search(r"```diff\n(.*?)```\n", page, re.DOTALL)
    files = dict(changed_by(diff.group(1), lambda name: (ROOT / name).read_text()))
    assert len(files) == 3
    if not run_it:
        return
    shutil.copytree(ROOT / "liger_losses", tmp_path / "liger_losses", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (check,) = [block for block in blocks_of(ROOT / "docs" / "extending.md") if block.skip]
    printed_by("-c", check.code(), cwd=tmp_path, PYTHONPATH=str(tmp_path))


# --- Links -----------------------------------------------------------------------------------------------------------

LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/README.md")
TEXTS = [*(ROOT / name for name in NAMES), *PAGES]


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


#: A name in backticks, with or without arguments, and the file that the text puts it in.
NAMED = re.compile(r"`([A-Za-z_.][\w./-]*)(?:\([^`]*\))?`(?:\s+(?:in|of)\s+\[?`([\w./-]+\.py)`)?")
#: Placeholders, what a command makes, and files and names of other projects.
NOT_OURS = re.compile(r".*/x/.*|kernels/torch-ext|masking_utils\.py|_from_config|_apply_liger_\w+|__\w+__")


def test_files_and_names_in_backticks_exist():
    """Files, and names that are this library's: private, with a file beside them, or with the package's name."""
    tops = ("liger_losses", "tests", "docs", "benchmarks", "examples", "kernels", ".github")
    files = {f"/{path.relative_to(ROOT)}": path for top in tops for path in (ROOT / top).rglob("*")}
    words, absent = set(re.findall(r"\w+", "".join(p.read_text() for p in files.values() if p.suffix == ".py"))), []
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for name, file in NAMED.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            path, word = file or name, name.rpartition(".")[2]
            if file or path.endswith(".py") or (path.split("/")[0] in tops and "/" in path[:-1]):
                found = [files[each] for each in files if each.endswith("/" + path.rstrip("/"))]
                exists = found and (not file or re.search(rf"\b{word}\b", found[0].read_text()))
            else:
                exists = word in words or not (word.startswith("_") or name.startswith("liger_losses."))
            absent += [] if exists or NOT_OURS.fullmatch(path) else [f"{page.name}: {name} {file}"]
    assert absent == []


def test_every_public_name_is_in_the_reference():
    import liger_losses
    from liger_losses import functional

    text = (ROOT / "docs" / "api.md").read_text()
    names = {f"liger_losses.{name}" for name in liger_losses.__all__ if name != "functional"}
    names |= {f"liger_losses.functional.{name}" for name in functional.__all__}
    listed = re.findall(r"^::: (.+)$", text, re.MULTILINE)
    assert names <= {*listed}
    assert len(listed) == len({*listed})


def test_every_page_is_on_the_site_or_left_out():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [path.name for path in PAGES if not re.search(rf"(: |^  ){path.name}$", navigation, re.MULTILINE)] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
