"""Frameworks that tests write, and integrations that are taken back."""

import importlib
import sys

import pytest
import torch.distributed as dist


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


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def installed():
    """Installs an integration, and takes it back."""
    done = []

    def install(module):
        done.append(module)
        module.install()

    yield install
    for module in done:
        module.uninstall()
