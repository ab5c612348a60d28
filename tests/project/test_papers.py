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


def test_rows_of_tables_stand_beside_their_papers():
    """The name of each, with the equation that the table knows."""
    tables = [path.read_text() for path in (ROOT / "chunked" / "losses").glob("*.py")]
    source = r'^    "(\w+)": .*# .*?arXiv:(\d{4}\.\d{5})(?:, eq\. (\d+))?'
    rows = [row for table in tables for row in re.findall(source, table, re.MULTILINE)]
    assert len(rows) > 15
    for name, paper, equation in rows:
        (line,) = [line for line in PAGE.splitlines() if f"abs/{paper}" in line]
        assert f'"{name}"' in line, name
        assert not equation or re.search(rf"eq\. (\d+, )*{equation}\b", line), (name, equation)
