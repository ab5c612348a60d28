"""The page of papers: it has all that the package names, and its calls are calls."""

import re
from pathlib import Path

import liger_losses

ROOT = Path(liger_losses.__file__).parent
PAGE = (ROOT.parent / "docs" / "papers.md").read_text()


def test_every_paper_that_the_package_names_has_a_row_and_the_reverse():
    named = {number for path in ROOT.rglob("*.py") for number in re.findall(r"arXiv:(\d{4}\.\d{5})", path.read_text())}
    assert named == set(re.findall(r"abs/(\d{4}\.\d{5})", PAGE))


def test_the_calls_are_calls():
    calls = [call for line in PAGE.splitlines() if line.startswith("| ") for call in re.findall("`(.*?)`", line)]
    assert len(calls) > 50
    names = {name: getattr(liger_losses, name) for name in dir(liger_losses) if name != "trl"}
    for call in calls:
        assert callable(eval(call, names)), call
