"""MkDocs hooks: files of the repository outside docs/ become pages of the site, or files that its pages link to.

The notebook becomes a page with its outputs. MathJax, which renders the formulas, comes from the package
django-static-mathjax and is served with the site.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
#: Files that are pages of the site, and their names there.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "kernels/README.md": "hub_kernel.md",
    "examples/README.md": "examples.md",
    "examples/quickstart.ipynb": "notebook.md",
}
MATHJAX = "mathjax/tex-svg.js"
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
_FENCES = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
#: What the pages link to outside docs/; the same for all pages of a build.
_linked: dict[str, str] = {}


def _source(page: str) -> str:
    """The path in the repository of a page of the site."""
    return next((path for path, name in PAGES.items() if name == page), f"docs/{page}")


def _target(page: str, link: str) -> str:
    """A link of a file in the repository, as a link between pages and files of the site."""
    path, mark, fragment = link.partition("#")
    if not path or path.startswith("quickstart_plots/") or re.match(r"[a-z]+:", path):
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_source(page)), path))
    if path in PAGES:
        path = PAGES[path]
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    else:
        shown = Path(path).suffix in (".png", ".svg", ".txt")
        _linked[path] = path = f"files/{path}" if shown else f"files/{path}.txt"  # browsers show text
    return path + mark + fragment


def _rewritten(page: str, markdown: str) -> str:
    parts = _FENCES.split(markdown)
    for number in range(0, len(parts), 2):
        parts[number] = _LINK.sub(lambda m: m.group(1) + _target(page, m.group(2)) + m.group(3), parts[number])
    return "".join(parts)


def _listing(folder: Path) -> str:
    """The files of a folder, as text."""
    return "\n".join(sorted(path.name for path in folder.iterdir() if not path.name.startswith((".", "__"))))


def _notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its plots by the names under which the page shows them."""
    parts, plots = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                name = f"plot_{len(plots) + 1}.png"
                plots[name] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![What the cell above draws](quickstart_plots/{name})")
    return "\n\n".join(parts) + "\n", plots


def _mathjax() -> Path:
    """MathJax's one file that reads TeX and draws SVG; it loads nothing else."""
    found = importlib.util.find_spec("mathjax")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the formulas need MathJax: pip install django-static-mathjax")
    return Path(found.origin).parent / "static/mathjax/es5/tex-svg.js"


def on_config(config):
    """Take the addresses of the site and the repository from pyproject.toml."""
    addresses = dict(re.findall(r'^(\w+) = "(https://[^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    config.site_url, config.repo_url = addresses["Documentation"], addresses["Repository"]
    config.repo_name = "/".join(config.repo_url.split("/")[-2:])
    return config


def on_files(files, config):
    """Add the pages that are elsewhere, and every file that a page links to."""
    for path, name in PAGES.items():
        if path.endswith(".ipynb"):
            content, plots = _notebook(ROOT / path)
            files.append(File.generated(config, name, content=content))
            for plot, data in plots.items():
                files.append(File.generated(config, f"quickstart_plots/{plot}", content=data))
        else:
            files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, MATHJAX, abs_src_path=str(_mathjax())))
    _linked.clear()
    for file in list(files.documentation_pages()):
        _rewritten(file.src_uri, file.content_string)
    for path, name in _linked.items():
        if (ROOT / path).is_dir():
            files.append(File.generated(config, name, content=_listing(ROOT / path)))
        else:
            files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite links to what is outside docs/."""
    return _rewritten(page.file.src_uri, markdown)
