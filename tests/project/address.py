"""The repository's address stands in pyproject.toml, in the line ``Repository``; other files repeat it.

python -m tests.project.address  # after a change of that line, changes them: `make address`
"""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).parents[2]
SUFFIXES = (".md", ".yml", ".cff", ".py", ".toml", ".ipynb")


def read(path: str, pattern: str) -> tuple[str, str]:
    """Owner and name of the repository, by an address in a file."""
    found = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{path} has no {pattern}"
    return found[1], found[2]


def declared() -> tuple[str, str]:
    """As pyproject.toml says."""
    return read("pyproject.toml", r'^Repository = "https://github\.com/([\w.-]+)/([\w.-]+)"$')


def current() -> tuple[str, str]:
    """As the library says, which links to the documentation in its errors."""
    path = "liger_losses/checks.py"
    return read(path, r'^DOCUMENTATION = "https://([\w.-]+)\.github\.io/([\w.-]+)/"$')


def addresses(owner: str, name: str) -> tuple[str, str]:
    """Of the repository, and of its documentation."""
    return f"https://github.com/{owner}/{name}", f"https://{owner}.github.io/{name}"


def uses() -> list[tuple[str, int, str]]:
    """Every line with an address that is, or may once have been, the repository's: file, number, address."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    name = re.escape(current()[1])
    ours, found = re.compile(rf"https://(?:github\.com/[\w.-]+/{name}|[\w.-]+\.github\.io/{name})(?![\w-])"), []
    for path in (path for path in listed if path.endswith(SUFFIXES) and (ROOT / path).is_file()):
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
            found += [(path, number, address) for address in ours.findall(line)]
    return found


def main() -> None:
    """Write the declared address to every file."""
    old, new = addresses(*current()), addresses(*declared())
    for path in {path for path, _, _ in uses()}:
        text = (ROOT / path).read_text(encoding="utf-8")
        for before, after in zip(old, new, strict=True):
            text = re.sub(re.escape(before) + r"(?![\w-])", after, text)
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
