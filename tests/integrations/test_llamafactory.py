"""LLaMA-Factory's kernel."""

import sys
import types

from liger_losses.integrations import llamafactory
from tests.integrations.models import is_patched, llama


def test_llamafactory_kernel(monkeypatch):
    registered = {}
    base = types.ModuleType("base")
    base.KernelPlugin = lambda name: types.SimpleNamespace(register=lambda: lambda cls: registered.update({name: cls}))
    path = "llamafactory.v1.plugins.model_plugins.kernels.base"
    parts = path.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, path, base)
    llamafactory.register()
    config = {"name": "liger_losses", "patch_options": {"rope": False}}
    model = registered["liger_losses"].apply(model=llama(), config=config, require_logits=True)
    assert is_patched(model)
