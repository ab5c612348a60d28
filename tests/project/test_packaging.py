"""What is published: both distributions, as they are built."""

import email
import pathlib
import re
import shutil
import subprocess
import tarfile
import zipfile

import pytest

import liger_losses
from tests.processes import printed_by
from tests.project.test_project_files import project

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


def build(kind, source, target):
    """The name of the distribution that setuptools builds from a folder."""
    pytest.importorskip("setuptools", minversion="77")
    code = f"from setuptools import build_meta as b; print('built', b.build_{kind}({str(target)!r}))"
    return target / printed_by("-c", code, cwd=source).split()[-1]


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
