"""The files around the code agree with it, and with each other."""

import pathlib
import re
import subprocess

import pytest

import liger_losses
from liger_losses.checks import DOCUMENTATION
from tests.project.test_docs import anchors_of

ROOT = pathlib.Path(__file__).parents[2]
yaml = pytest.importorskip("yaml")


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def project():
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    return tomllib.loads(text("pyproject.toml"))["project"]


def test_what_is_tested_is_what_is_claimed():
    declared = project()
    matrix = yaml.safe_load(text(".github/workflows/test.yml"))["jobs"]["test"]["strategy"]["matrix"]
    classifiers = re.findall(r"Python :: (3\.\d+)", " ".join(declared["classifiers"]))
    assert matrix["python"] == classifiers
    assert declared["requires-python"] == f">={classifiers[0]}"
    (oldest,) = re.findall(r"torch>=([\d.]+)", " ".join(declared["dependencies"]))
    assert f'"torch=={oldest}.*"' in text("Makefile")
    assert {"test-oldest", "test", "test-newest"} == set(matrix["target"])


def test_versions_agree():
    version = liger_losses.__version__
    assert yaml.safe_load(text("CITATION.cff"))["version"] == version
    heading = r"^## ([\w.]+) - (?:not released yet|never released|\d{4}-\d\d-\d\d)$"
    assert re.findall(heading, text("CHANGELOG.md"), re.MULTILINE)[0] == version
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


def test_errors_link_to_headings_that_exist():
    """Those that ``see("...")`` names in the library."""
    calls = (re.findall(r'\bsee\("([^"]+)"\)', path.read_text()) for path in (ROOT / "liger_losses").rglob("*.py"))
    linked = {name for names in calls for name in names}
    assert len(linked) >= 10
    explicit = re.findall(r"\{ *#([\w-]+)", text("docs/errors.md"))
    assert linked <= anchors_of(ROOT / "docs/errors.md") | {*explicit}
