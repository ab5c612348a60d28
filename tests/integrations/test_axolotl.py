"""axolotl's plugin."""

import sys
import types

import pytest

from tests.integrations.models import is_patched, llama


def test_axolotl_plugin(monkeypatch):
    base = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {"__init__": lambda self: None})
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    from liger_losses.integrations import axolotl

    axolotl._plugin_class.cache_clear()
    plugin = axolotl.Plugin()
    axolotl._plugin_class.cache_clear()
    model = llama()
    cfg = types.SimpleNamespace(rl=None, liger_losses={"rope": False})
    plugin.pre_model_load(cfg)
    plugin.post_model_load(cfg, model)
    assert is_patched(model)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        axolotl.Other  # noqa: B018
