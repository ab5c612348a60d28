"""Frameworks that tests write."""

import importlib
import sys

import pytest


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """Writes a framework's modules, by their names, where Python finds them."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def write(**sources):
        for name, source in sources.items():
            path = tmp_path.joinpath(*name.split("."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(source.lstrip())
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]
