"""What pyproject.toml cannot say: the package index has no files beside the README, so its links become addresses."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
#: A picture or a link of Markdown to a file of the repository.
LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)")


def description() -> str:
    """README.md with the addresses of this version's pictures and pages in the repository."""
    pyproject, package = (ROOT / name for name in ("pyproject.toml", "liger_losses/__init__.py"))
    (repository,) = re.findall(r'^Repository = "(.+)"$', pyproject.read_text(encoding="utf-8"), re.MULTILINE)
    (version,) = re.findall(r'^__version__ = "(.+)"$', package.read_text(encoding="utf-8"), re.MULTILINE)
    kinds = {"!": "raw", "": "blob"}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return LINK.sub(lambda link: f"{link[1]}{link[2]}{repository}/{kinds[link[1]]}/v{version}/", text)


setup(long_description=description(), long_description_content_type="text/markdown")
