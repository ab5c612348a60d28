"""The files around the code agree with it, and with each other."""

import pathlib
import re
import shutil
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


def test_a_person_starts_the_release_which_publishes_without_a_token():
    workflow = loaded(".github/workflows/release.yml")
    jobs, started = workflow["jobs"], workflow[True]  # "on" is YAML's word for true
    assert [*started] == ["workflow_dispatch"]
    assert [*jobs] == ["build", "index", "tag", "hub"]
    assert all(job["environment"] for name, job in jobs.items() if name in ("index", "hub"))  # whose owners approve
    assert jobs["index"]["permissions"] == {"id-token": "write"}
    assert "password" not in text(".github/workflows/release.yml")


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


def test_make_alone_says_what_there_is():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    (named,) = re.findall(r"^\.PHONY: (.+)$", text("Makefile"), re.MULTILINE)
    helped = re.findall(r"^make (\S+)  ", done.stdout, re.MULTILINE)
    assert "demo" in helped
    assert {*helped} <= {*named.split()}


def test_the_release_list_names_what_is_said_of_the_package_index():
    sentence = "Not on the package index yet"
    files = [path for path in ("README.md", "docs/quick_start.md") if sentence in text(path)]
    _, _, release = text("CONTRIBUTING.md").partition("## Release")
    assert (sentence in release) == bool(files)
    assert all(path in release for path in files)
    assert "pip install liger-losses" not in (text("README.md") if files else "")


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


def test_the_address_changes_at_once(tmp_path):
    if shutil.which("make") is None or shutil.which("git") is None:
        pytest.skip("make or git is not installed")
    for name in ("Makefile", "pyproject.toml", "README.md", "liger_losses/checks.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for command in ("git init -q", "git add .", "make address TO=new-owner/new-name"):
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    changed = (tmp_path / "liger_losses/checks.py").read_text()
    assert 'DOCUMENTATION = "https://new-owner.github.io/new-name/"' in changed
    assert 'Repository = "https://github.com/new-owner/new-name"' in (tmp_path / "pyproject.toml").read_text()
    assert project()["urls"]["Repository"] not in (tmp_path / "README.md").read_text()


def test_the_readme_has_the_commands_that_need_no_installation():
    lines = text("README.md").splitlines()
    for target in ("demo", "test"):
        assert any(line.split("#")[0].strip() == f"make {target}" for line in lines), target
        assert f"\n{target}:" in text("Makefile"), target


def test_the_readmes_table_is_what_its_benchmark_prints():
    from benchmarks import readme

    _, _, section = text("README.md").partition("\n## Performance\n")
    header, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    columns = [cell.strip(" *") for cell in header.strip("|").split("|")][1:]
    assert columns == ["plain", "liger-kernel", "TRL 1.16", "liger_losses"]
    assert readme.COLUMNS == ("plain", "liger-kernel", "TRL", "ours")
    names = [row.split("|")[1].strip() for row in rows]
    assert [name for name in names if not name.startswith("longest")] == [*readme.STEPS, *readme.HEADS]
    row = {"name": names[0], "column": "ours", "values": (63512, 22.94)}
    assert readme.table([row]) == f"| {names[0]} | {' | '.join([readme.DASH] * 3)} | **63.5k tokens/s**, 22.9 GiB |"


def test_the_readmes_steps_are_those_of_each_column(monkeypatch):
    from benchmarks import end_to_end, readme

    rates = {"tokens_per_second": 1, "peak_gib": 1}
    monkeypatch.setattr(end_to_end, "run", lambda provider, cases, steps: [{"provider": provider, **rates}])
    measured = {
        column: {(row["name"].split()[0], row["row"]["provider"]) for row in readme.steps(column, False, True)}
        for column in readme.COLUMNS
    }
    assert measured == {
        "plain": {("SFT", "plain"), ("DPO", "plain")},
        "liger-kernel": {("SFT", "liger-kernel"), ("DPO", "TRL+liger-kernel")},
        "TRL": {("DPO", "TRL")},
        "ours": {("SFT", "ours"), ("DPO", "ours+kernels")},
    }


def test_prose_has_lines_of_at_most_120_characters():
    """In every Markdown file; rows of tables, code, and lines with an address may be longer."""
    folders = ("", "docs/", "benchmarks/", "kernels/", ".github/")
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
