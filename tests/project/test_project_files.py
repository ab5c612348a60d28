"""The files around the code agree with it, and with each other."""

import pathlib
import re
import subprocess
import sys

import pytest

import liger_losses
from liger_losses.checks import DOCUMENTATION
from tests.project.test_docs import anchors_of

ROOT = pathlib.Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
yaml = pytest.importorskip("yaml")


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def loaded(name):
    return yaml.safe_load(text(name))


def project():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    import tomllib

    return tomllib.loads(text("pyproject.toml"))["project"]


def targets():
    """The targets of the Makefile that have a rule."""
    return set(re.findall(r"^([a-z][a-z-]*):", text("Makefile"), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(path):
    workflow = loaded(path)
    called = set()
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] if "run" in str(job["steps"]) else True
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            matrix = job.get("strategy", {}).get("matrix", {})
            for line in step.get("run", "").splitlines():
                for name in re.findall(r"make (\S+(?: [^}]*}})?)", line):
                    called |= set(matrix["target"]) if "matrix.target" in name else {name}
    assert called, "nothing is run"
    assert called <= targets(), called - targets()


def test_what_is_tested_is_what_is_claimed():
    declared = project()
    matrix = loaded(".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    classifiers = re.findall(r"Python :: (3\.\d+)", " ".join(declared["classifiers"]))
    assert matrix["python"] == classifiers
    assert declared["requires-python"] == f">={classifiers[0]}"
    (oldest,) = re.findall(r"torch>=([\d.]+)", " ".join(declared["dependencies"]))
    assert f'"torch=={oldest}.*"' in text("Makefile")
    assert {"test-oldest", "test", "test-newest"} == set(matrix["target"])


def test_versions_agree():
    version = liger_losses.__version__
    assert loaded("CITATION.cff")["version"] == version
    headings = re.findall(r"^## (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    released = [
        re.fullmatch(r"([\w.]+) - (not released yet|never released|\d{4}-\d\d-\d\d)", each) for each in headings
    ]
    assert all(released), headings
    assert released[0][1] == version
    # A tag exists once its version is released: no link leads to one before.
    assert "releases/tag" not in text("CHANGELOG.md")


def test_every_address_is_the_one_in_pyproject():
    """`make address` changes them."""
    urls = project()["urls"]
    assert urls["Documentation"] == DOCUMENTATION
    own, name = {urls["Repository"], DOCUMENTATION.rstrip("/")}, urls["Repository"].rpartition("/")[2]
    pattern = rf"https://(github\.com/[A-Za-z0-9_.-]+|[A-Za-z0-9_.-]+\.github\.io)/{name}"
    found = subprocess.run(["git", "grep", "-hoE", pattern], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("there is no git here")
    assert {*found.stdout.split()} == own


def test_prose_has_lines_of_at_most_120_characters():
    """In every Markdown file; rows of tables, code, and lines with an address may be longer."""
    folders = ("", "docs/", "benchmarks/", "examples/", "kernels/", ".github/")
    found = []
    for path in (path for folder in folders for path in sorted((ROOT / folder).glob("*.md"))):
        code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code ^= line.lstrip().startswith("```")
            if len(line) > 120 and not code and not line.startswith("|") and "://" not in line:
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert found == []


def test_errors_link_to_headings_that_exist():
    """Those that ``see("...")`` names in the library."""
    calls = (re.findall(r'\bsee\("([^"]+)"\)', path.read_text()) for path in (ROOT / "liger_losses").rglob("*.py"))
    linked = {name for names in calls for name in names}
    assert len(linked) >= 10
    explicit = re.findall(r"\{ *#([\w-]+)", text("docs/errors.md"))
    assert linked <= anchors_of(ROOT / "docs/errors.md") | {*explicit}
