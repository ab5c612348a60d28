"""Axolotl's plugin, without Axolotl; real.py has it in Axolotl's plugin manager."""

import sys
import types
import warnings

import pytest

import liger_losses
from liger_losses.integrations import axolotl
from tests.integrations.models import is_patched, llama


def test_the_plugin_patches_with_the_options_of_the_yaml_file(monkeypatch):
    """Where TRL's version is refused, it says so, and patches the model."""
    pytest.importorskip("trl", reason="TRL is not installed")

    def refused():
        raise RuntimeError("not today")

    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    base = types.SimpleNamespace(BasePlugin=object)
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    monkeypatch.setattr(axolotl, "announce", lambda *_: None)
    monkeypatch.setattr(liger_losses.trl, "enable", refused)
    plugin, model = axolotl._plugin_class.__wrapped__()(), llama()
    with warnings.catch_warnings(action="error"):
        plugin.pre_model_load(types.SimpleNamespace(rl=None))
    with pytest.warns(UserWarning, match="keep TRL's own heads, and the model is patched: not today"):
        plugin.pre_model_load(types.SimpleNamespace(rl="dpo"))
    plugin.post_model_load(types.SimpleNamespace(liger_losses={"rope": False}), model)
    assert is_patched(model)
    assert "rope" not in model.liger_report.counts
    assert axolotl.Args(liger_losses={"rope": False}).liger_losses == {"rope": False}
