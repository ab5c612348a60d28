"""What is published: both distributions are built, and the wheel is installed where there is nothing but torch.

``-I`` leaves PYTHONPATH out, by which this checkout may be found.
"""

import email
import importlib.metadata
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import liger_losses
from tests.project.test_project_files import project

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


def run(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def build(kind, source, target):
    """The name of the distribution that setuptools builds from a folder."""
    pytest.importorskip("setuptools", minversion="77")
    code = f"from setuptools import build_meta as b; print('built', b.build_{kind}({str(target)!r}))"
    return target / run(sys.executable, "-c", code, cwd=source).split()[-1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The source distribution of this checkout, and the wheel of what it holds."""
    folder = tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not files:
        pytest.skip("there is no git here, which says what a clean checkout has")
    for name in files:
        (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "checkout" / name)
    sdist = build("sdist", folder / "checkout", folder)
    with tarfile.open(sdist) as files:
        files.extractall(folder, filter="data")
    return sdist, build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


@pytest.fixture(scope="module")
def python(distributions, tmp_path_factory):
    """The interpreter of an environment that has the wheel, torch, and what torch needs."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)
    python = next(folder.glob("venv/*/python"))
    (visible := folder / "visible").mkdir()
    for path in files_of("torch", "triton", "numpy"):
        (visible / path.name).symlink_to(path)
    site = run(python, "-c", "from sysconfig import get_path; print(get_path('purelib'))", cwd=folder).strip()
    (pathlib.Path(site) / "torch.pth").write_text(str(visible))
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", distributions[1], cwd=folder)
    return python


def files_of(*names):
    """The files and folders in site-packages of some distributions and of what they need."""
    pending, seen, paths = list(names), set(), set()
    while pending:
        try:
            distribution = importlib.metadata.distribution(pending.pop())
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra, or of another platform
        if distribution.name not in seen:
            seen.add(distribution.name)
            pending += [re.match(r"[\w.-]+", line)[0] for line in distribution.requires or () if "extra ==" not in line]
            paths |= {distribution.locate_file(file.parts[0]) for file in distribution.files if file.parts[0] != ".."}
    return sorted(path for path in paths if path.exists() and path.name != "__pycache__")


def test_the_wheel_holds_the_package_and_nothing_else(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(f"liger_losses-{liger_losses.__version__}.dist-info/METADATA").decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"liger_losses"}
    packaged = {name for name in names if name.startswith("liger_losses/")}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "liger_losses").rglob("*.py")}
    assert packaged == sources | {"liger_losses/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "Project-URL: Documentation, https://" in metadata
    assert "Requires-Python: >=3.10" in metadata


def test_the_page_of_the_index_links_to_files_that_exist(distributions):
    """Rendered as the index does it: pictures and links are addresses, the project's of this version."""
    markdown = pytest.importorskip("readme_renderer.markdown")
    with zipfile.ZipFile(distributions[1]) as wheel:
        text = wheel.read(f"liger_losses-{liger_losses.__version__}.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = markdown.render(metadata.get_payload())
    pictures, links = re.findall(r'<img src="([^"]+)"', page), re.findall(r'<a href="([^"#]+)', page)
    assert len(pictures) >= 1
    assert len(links) > 10
    repository = project()["urls"]["Repository"]
    for target, kind in [*((picture, "raw") for picture in pictures), *((link, "blob") for link in links)]:
        assert target.startswith("https://"), target
        if target.startswith(repository):
            path = target.removeprefix(f"{repository}/{kind}/v{liger_losses.__version__}/")
            assert (ROOT / path).exists(), target


def test_the_source_distribution_has_its_license_and_leaves_the_tests_out(distributions):
    with tarfile.open(distributions[0]) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "setup.py"} <= names
    assert "liger_losses/py.typed" in names
    assert {name.split("/")[0] for name in names if "/" in name} == {"liger_losses", "liger_losses.egg-info"}


def test_everything_imports_where_there_is_torch_alone(python, tmp_path):
    sources = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "liger_losses").rglob("*.py")]
    modules = sorted(".".join(path.parts).removesuffix(".__init__") for path in sources)
    code = f"""
import importlib, importlib.util
assert importlib.util.find_spec("transformers") is None
for name in {modules}:
    importlib.import_module(name)
import liger_losses
print(liger_losses.__file__)
"""
    where = run(python, "-I", "-c", code, cwd=tmp_path)
    assert str(python.parent.parent) in where


def test_a_loss_and_the_doctor_run_where_there_is_torch_alone(python, tmp_path):
    code = """
import torch
from liger_losses import LigerFusedLinearCrossEntropyLoss
print(float(LigerFusedLinearCrossEntropyLoss()(torch.zeros(8, 3), torch.ones(5, 3), torch.arange(5))))
"""
    assert float(run(python, "-I", "-c", code, cwd=tmp_path)) == pytest.approx(math.log(8))
    assert 'pip install "trl>=1.15"' in run(python, "-I", "-m", "liger_losses.doctor", cwd=tmp_path)
