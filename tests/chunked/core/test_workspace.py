"""The default workspace: what takes more memory for more speed, and how users bound it."""

import importlib.util
import threading

import pytest
import torch

import liger_losses
from liger_losses import linear_logps, set_default_workspace
from liger_losses.chunked.core import options as settings
from liger_losses.chunked.core import plan
from liger_losses.chunked.core.options import default_bound
from tests.losses import CE
from tests.reference import problem

MiB, GiB = 2**20, 2**30


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setattr(settings.process, "bytes", None)


def test_text_and_numbers():
    for given, size in ((5, 5), ("5", 5), ("300MiB", 300 * MiB), (" 1.5 gib ", 3 * GiB // 2), ("2GB", 2 * 10**9)):
        assert settings.bytes_of(given) == size


def test_settings_nest_and_belong_to_a_thread():
    set_default_workspace("3MiB")
    found = []
    with liger_losses.workspace("2MiB"):
        with liger_losses.workspace(None):
            assert default_bound() is None
        assert default_bound() == 2 * MiB
        thread = threading.Thread(target=lambda: found.append(default_bound()))
        thread.start()
        thread.join()
    assert found == [default_bound()] == [3 * MiB]
    set_default_workspace(None)
    assert default_bound() is None


def test_the_environment_variable(monkeypatch):
    monkeypatch.setenv("LIGER_LOSSES_WORKSPACE", "7 MiB")
    spec = importlib.util.spec_from_file_location("another", settings.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "another", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(settings.process, "bytes", module.process.bytes)
    assert default_bound() == 7 * MiB
    monkeypatch.setenv("LIGER_LOSSES_WORKSPACE", "")
    spec.loader.exec_module(module)
    assert module.process.bytes is None
    monkeypatch.setattr(settings.process, "bytes", "much")
    hidden, weight, labels, _ = problem(20, 8, 31)
    with pytest.raises(ValueError, match="LIGER_LOSSES_WORKSPACE must be"):
        linear_logps(hidden, weight, labels)


def test_compiled_functions_read_it_when_they_run(monkeypatch):
    bounds, read = [], plan.default_bound
    monkeypatch.setattr(plan, "default_bound", lambda: bounds.append(read()) or bounds[-1])
    hidden, weight, labels, _ = problem(20, 8, 31)
    loss = CE()
    compiled = torch.compile(lambda h: loss(weight, h, labels), backend="eager")
    for bound in (None, MiB, 2 * MiB):
        bounds.clear()
        with liger_losses.workspace(bound):
            compiled(hidden)
        assert set(bounds) == {bound}
