"""The report on an installation."""

import pathlib
import re
import runpy
import sys
import time

import pytest
import torch

import liger_losses
from liger_losses import doctor
from liger_losses.patching.report import Entry, PatchReport
from tests.models import SIZES

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def config(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 32, "num_hidden_layers": 3, "architectures": ["LlamaForCausalLM"]}
    transformers.LlamaConfig(**SIZES | sizes).save_pretrained(tmp_path)
    return tmp_path


def test_an_installation_without_a_model(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    for line in printed.splitlines():
        assert len(line) <= 60 or " " not in line.strip()  # a link is not broken
    *_, end = printed.partition("What to do")
    assert re.findall(r"^  (\d)\. ", end, re.MULTILINE) == ["1", "2", "3"]
    assert f"torch         {torch.__version__}" in printed
    assert f"liger_losses  {liger_losses.__version__}" in printed
    assert "LIGER_LOSSES_BACKEND is " in printed
    assert "CPU, " in printed
    assert "patch() on" not in printed


def test_a_model_by_its_configuration(config, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor", str(config)])
    monkeypatch.delitem(sys.modules, "liger_losses.doctor")  # `python -m` runs it as another module
    with pytest.raises(SystemExit) as done:
        runpy.run_module("liger_losses.doctor", run_name="__main__")
    out, err = capsys.readouterr()
    assert done.value.code == 0, err
    assert "LlamaForCausalLM" in out
    assert "model.layers.*.mlp" in out
    assert "LazyLinear 1" in out
    printed = " ".join(out.split())
    kind, report = doctor.patch_report(str(config / "config.json"))
    for line in (kind, *str(report).splitlines()):
        assert " ".join(line.split()) in printed
    assert "3. Call liger_losses.patch(model)" in printed


def test_a_model_that_is_not_there(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    assert doctor.main([str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "cannot be built" in printed.err
    assert "no_such_type" in printed.err
    assert "Versions" in printed.out
    order = []
    with monkeypatch.context() as patched:
        patched.setattr(doctor, "show", lambda title, lines: order.append(title))
        patched.setattr(doctor, "print", lambda text, **_: order.append("error"), raising=False)
        doctor.main([str(tmp_path)])
    assert order == ["error", "Versions", "Devices", "TRL"]


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    assert doctor.main(["nobody/no-such-model"]) == 1
    assert waits == []
    message = capsys.readouterr().err
    assert "it is not in the local cache, and http://127.0.0.1:9 does not answer" in message
    assert "Give the id or folder" in message


def test_features_of_the_installed_trl_are_named(monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    import trl.trainer.dpo_trainer as module

    from liger_losses.trl.features import FEATURES

    lines = list(doctor.trl_features())
    count = len(FEATURES)
    assert lines[0] == f"liger_losses.trl.enable() will work for {count} of {count} features"
    assert lines[1] == f"features: {', '.join(feature.name for feature in FEATURES)}"
    assert "call liger_losses.trl.enable(kernels=True)" in doctor.trl_advice(lines)
    monkeypatch.setattr(module, "add_fused_lm_head", lambda model, scale: None)
    lines = list(doctor.trl_features())
    assert lines[0] == f"liger_losses.trl.enable() will work for {count - 2} of {count} features"
    missing = "trl.trainer.dpo_trainer.add_fused_lm_head has an unknown parameter scale"
    assert lines[2:] == [f"LEFT OUT: DPO: {missing}", "LEFT OUT: adapters on the head in DPO: DPO is missing"]
    assert "install trl==1.16.*" in doctor.trl_advice(lines)


def test_what_needs_another_package_is_said(monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines = list(doctor.trl_features())
    assert lines[2] == "NEEDS peft: adapters on the head in SFT: peft is not installed"
    assert "call liger_losses.trl.enable(kernels=True)" in doctor.trl_advice(lines)


def test_without_trl(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    (line,) = doctor.trl_features()
    assert "not usable" in line
    assert 'pip install "trl>=1.15"' in doctor.trl_advice([line])


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv("LIGER_LOSSES_BACKEND", "triton")
    monkeypatch.setattr("liger_losses.kernels._triton.INTERPRETED", False)
    lines = list(doctor.devices())
    assert "LIGER_LOSSES_BACKEND is triton" in lines
    assert any(line.startswith("CPU") and "calls will fail" in line for line in lines)


def test_what_to_do_about_kernels(monkeypatch):
    monkeypatch.delenv("LIGER_LOSSES_BACKEND", raising=False)
    monkeypatch.setattr(doctor, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "Nothing about kernels: without a GPU" in doctor.kernels_advice()
    monkeypatch.setenv("LIGER_LOSSES_BACKEND", "triton")
    assert "Unset LIGER_LOSSES_BACKEND: without a GPU" in doctor.kernels_advice()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "Nothing about kernels: Triton's" in doctor.kernels_advice()
    monkeypatch.setenv("LIGER_LOSSES_BACKEND", "torch")
    assert "Unset LIGER_LOSSES_BACKEND: torch" in doctor.kernels_advice()
    monkeypatch.delenv("LIGER_LOSSES_BACKEND")
    monkeypatch.setattr(doctor, "triton", None)
    assert "Install triton" in doctor.kernels_advice()


def test_what_to_do_about_a_model():
    lazy, left = (
        PatchReport([Entry("lm_head", "Linear", "LazyLinear")]),
        PatchReport([Entry("head", "Odd", None, "why")]),
    )
    assert "liger_losses.patch(model)" in doctor.model_advice(lazy)
    assert "errors/#models-that-cannot-be-patched" in doctor.model_advice(left)
    assert "doctor MODEL" in doctor.model_advice(None)


def test_defaults_that_differ_are_those_of_the_packages():
    """The table, on its page too; values of packages that are installed are read."""
    from liger_losses.defaults import DEFAULTS, VERSIONS

    page = (ROOT / "docs" / "defaults.md").read_text()
    for row in DEFAULTS:
        loss = getattr(liger_losses, f"LigerFusedLinear{row.loss.partition(',')[0]}Loss")
        if row.option in loss.option_names:
            assert getattr(loss(), row.option) == row.here
        cells = [f"`{row.others[p][0]}`: `{row.others[p][1]!r}`" if p in row.others else "" for p in VERSIONS]
        assert (
            f"| {row.loss} | `{row.option}` | `{row.here!r}` | {' | '.join(cells)} |".replace("|  |", "| |").replace(
                "|  |", "| |"
            )
            in page
        )
    for package, version in VERSIONS.items():
        assert version in page, package
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    if not trl.__version__.startswith(VERSIONS["trl"]):
        pytest.skip("another version of TRL")
    for row in DEFAULTS:
        name, value = row.others.get("trl", ("", None))
        *path, option = name.split(".")
        if path:
            module = __import__("trl." + ".".join(path[:-1]), fromlist=["x"]) if path[:-1] else trl
            assert getattr(module, path[-1]).__dataclass_fields__[option].default == value
