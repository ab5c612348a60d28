"""The report on an installation."""

import pathlib
import subprocess
import sys

import pytest
import torch

import liger_losses
from liger_losses import doctor

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments):
    command = [sys.executable, "-m", "liger_losses.doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


@pytest.fixture
def config(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    return tmp_path


def test_an_installation_without_a_model():
    done = run()
    assert done.returncode == 0, done.stderr
    assert f"torch         {torch.__version__}" in done.stdout
    assert f"liger_losses  {liger_losses.__version__}" in done.stdout
    assert "LIGER_LOSSES_BACKEND is " in done.stdout
    assert "CPU, " in done.stdout
    assert "patch()" not in done.stdout


def test_a_model_by_its_configuration(config):
    done = run(config)
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout
    assert "model.layers.*.mlp" in done.stdout
    assert "LazyLinear 1" in done.stdout
    assert doctor.patch_report(str(config / "config.json")) in done.stdout


def test_a_model_that_is_not_there(tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    assert doctor.main([str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "cannot be built" in printed.err
    assert "no_such_type" in printed.err
    assert "Versions" in printed.out


def test_missing_patch_points_are_named(monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    import trl.trainer.dpo_trainer as module

    assert list(doctor.trl_patch_points())[-1] == "liger_losses.trl.enable() will work"
    original = module.add_fused_lm_head
    monkeypatch.setattr(module, "add_fused_lm_head", lambda model: None)
    lines = list(doctor.trl_patch_points())
    assert any("MISSING" in line and "(DPO) takes no temperature" in line for line in lines)
    assert "will refuse this version" in lines[-1]
    monkeypatch.delattr(module, "add_fused_lm_head")
    assert any("(DPO) is not there" in line for line in doctor.trl_patch_points())
    monkeypatch.undo()
    assert module.add_fused_lm_head is original


def test_without_trl(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    (line,) = doctor.trl_patch_points()
    assert "not usable" in line


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv("LIGER_LOSSES_BACKEND", "triton")
    monkeypatch.setattr("liger_losses.kernels._triton.INTERPRETED", False)
    lines = list(doctor.devices())
    assert "LIGER_LOSSES_BACKEND is triton" in lines
    assert any(line.startswith("CPU") and "calls will fail" in line for line in lines)
