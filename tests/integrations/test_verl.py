"""verl: its plugin, and its own head beside ours."""

import importlib
import sys
import types

import pytest
import torch

from liger_losses.integrations import verl
from tests.reference import double, plain_statistics, problem, relative_error
from tests.test_run import ROOT


def verl_modules(monkeypatch):
    """Modules with verl's names, and one that has imported a head by name."""
    for name in ("verl", "verl.utils", "verl.utils.experimental", "verl.utils.kernel"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    torch_head, triton_head, caller = (
        types.ModuleType(name)
        for name in (verl._TORCH_HEAD, verl._TRITON_HEAD, "verl.models.mcore.model_forward_fused")
    )
    for module in (torch_head, triton_head, caller):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    torch_head.FusedLinearForPPO = type("FusedLinearForPPO", (torch.nn.Module,), {"forward": lambda self, *a: "verl's"})
    triton_head.linear_cross_entropy = caller.linear_cross_entropy = lambda *a: "verl's"
    caller.preprocess_thd_engine = caller.postprocess_thd_engine = lambda *a, **k: None
    return torch_head, triton_head, caller


def test_verl_plugin_installs_both_heads(monkeypatch):
    torch_head, triton_head, caller = verl_modules(monkeypatch)
    monkeypatch.delitem(sys.modules, "liger_losses.integrations.verl_plugin", raising=False)
    try:
        importlib.import_module("liger_losses.integrations.verl_plugin")
        hidden, weight, labels, _ = problem(shape=(2, 7), masked=0.0)
        arguments = {"hidden_states": hidden, "vocab_weights": weight, "input_ids": labels, "temperature": 0.7}
        logps, entropy = torch_head.FusedLinearForPPO().forward(**arguments)
        assert logps.shape == entropy.shape == labels.shape
        for head in (triton_head, caller):
            flat = head.linear_cross_entropy(hidden, weight, labels.int(), 0.7, "none")
            torch.testing.assert_close(flat, (logps.flatten(), entropy.flatten()))
            assert head.linear_cross_entropy(hidden, weight, labels, 0.7, "sum")[0] == logps.flatten().sum()
        grads = torch.autograd.grad(logps.sum() - 0.1 * entropy.sum(), (hidden, weight))
        exact = double(hidden, weight)
        statistics = plain_statistics(*exact, labels, temperature=0.7)
        expected = torch.autograd.grad(statistics["logp"].sum() - 0.1 * statistics["entropy"].sum(), exact)
        values = (statistics["logp"], statistics["entropy"], *expected)
        for found, value in zip((logps, entropy, *grads), values, strict=True):
            assert relative_error(found, value) < 1e-5
        verl.install()
        assert len(verl._REPLACEMENTS._replaced) == 3
        with pytest.raises(ValueError, match="reduction must be none, sum or mean"):
            caller.linear_cross_entropy(hidden, weight, labels, 0.7, "median")
        since = types.ModuleType("verl.imported_since")
        since.linear_cross_entropy = triton_head.linear_cross_entropy
        monkeypatch.setitem(sys.modules, since.__name__, since)
    finally:
        verl.uninstall()
    assert since.linear_cross_entropy is triton_head.linear_cross_entropy
    assert torch_head.FusedLinearForPPO().forward() == caller.linear_cross_entropy() == "verl's"


def test_verl_of_another_version_is_left_with_a_warning(monkeypatch):
    torch_head, _, _ = verl_modules(monkeypatch)
    del torch_head.FusedLinearForPPO
    monkeypatch.delitem(sys.modules, "liger_losses.integrations.verl_plugin", raising=False)
    with pytest.warns(UserWarning, match=r"verl runs with its own.*has no .*FusedLinearForPPO"):
        importlib.import_module("liger_losses.integrations.verl_plugin")
    assert not verl._REPLACEMENTS._replaced


def test_a_verl_that_fails_otherwise_is_left_with_a_warning(monkeypatch):
    def fail():
        raise AttributeError("partially initialized module")

    monkeypatch.setattr(verl, "install", fail)
    monkeypatch.delitem(sys.modules, "liger_losses.integrations.verl_plugin", raising=False)
    with pytest.warns(UserWarning, match=r"verl runs with its own.*AttributeError\('partially"):
        importlib.import_module("liger_losses.integrations.verl_plugin")


def test_verl_finds_the_entry_point():
    tomllib = pytest.importorskip("tomllib")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    for module in points.values():
        assert importlib.util.find_spec(module), module


@pytest.mark.peers
def test_the_same_as_verls_own_head():
    real = pytest.importorskip(verl._TORCH_HEAD, reason="verl is not installed")
    hidden, weight, labels, _ = problem(n=600, masked=0.0, shape=(2, 300))
    found = []
    verl.uninstall()
    for ours in (False, True):
        if ours:
            verl.install()
        logps, entropy = real.FusedLinearForPPO()(hidden, weight, labels, temperature=0.7)
        found.append((logps, entropy, *torch.autograd.grad(logps.sum() - 0.1 * entropy.sum(), (hidden, weight))))
    verl.uninstall()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
