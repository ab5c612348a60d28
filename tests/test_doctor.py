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
from tests.models import SIZES

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def config(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 32, "num_hidden_layers": 3, "architectures": ["LlamaForCausalLM"]}
    transformers.LlamaConfig(**SIZES | sizes).save_pretrained(tmp_path)
    return tmp_path


def test_an_installation_without_a_model(capsys):
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert f"torch         {torch.__version__.partition('+')[0]}" in printed  # with its build or without
    assert f"liger_losses  {liger_losses.__version__}" in printed
    assert "LIGER_LOSSES_BACKEND is " in printed
    assert "CPU, " in printed
    assert "patch() on" not in printed


def test_a_model_by_its_configuration(config, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor", str(config / "config.json"), "--tokens", "256", "--gpu", "1GB"])
    monkeypatch.delitem(sys.modules, "liger_losses.doctor")  # `python -m` runs it as another module
    with pytest.raises(SystemExit) as done:
        runpy.run_module("liger_losses.doctor", run_name="__main__")
    out, err = capsys.readouterr()
    assert done.value.code == 0, err
    for line in ("LlamaForCausalLM", "model.layers.*.mlp", "lm_head", "SFT on 256 tokens", "6 N H V for"):
        assert line in out
    assert len(re.findall(r"with(?:out)? patch\(\) +0\.0 GiB; \d+,\d+ tokens fit 1\.0 GB", out)) == 2
    for arguments, said in (
        (["--gpu", "4GB"], "need a MODEL and at least one token, got MODEL None and 4096"),
        (["x", "--tokens", "-1"], "at least one token, got MODEL x and -1"),
        (["x", "--tokens", "0"], "at least one token, got MODEL x and 0"),
        (["x", "--gpu", "big"], "--gpu must be a number of bytes"),
        (["x", "--gpu", "0"], "--gpu must be positive, got '0'"),
    ):
        with pytest.raises(SystemExit):
            doctor.main(arguments)
        assert said in capsys.readouterr().err


def test_without_transformers_and_trl(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    (line,) = doctor.trl_features()
    assert 'not installed; for its trainers, pip install "trl>=1.15"' in line
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert doctor.main(["Qwen/Qwen2.5-1.5B"]) == 1
    printed = capsys.readouterr()
    assert "pip install transformers" in printed.err
    assert "Defaults that differ" not in printed.out


def test_a_model_that_is_not_there(tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    assert doctor.main([str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "Versions" in printed.out
    assert re.search("cannot be built.*no_such_type", printed.err, re.DOTALL)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')  # for which transformers lists all causal models
    assert doctor.main([str(tmp_path)]) == 1
    advice = capsys.readouterr().err.split("cannot be built: ValueError: Unrecognized configuration")[1]
    assert len(advice) < 1000
    assert advice.splitlines()[1] == doctor.TAKES


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_steps_memory_is_what_was_measured_on_a_gpu(checkpointing):
    """benchmarks/results/doctor_h200.txt."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from benchmarks.models import MODELS

    name = "Llama-3.2-1B"
    kind, sizes = MODELS[name]
    results = (ROOT / "benchmarks" / "results" / "doctor_h200.txt").read_text()
    model = doctor.model_of(transformers.AutoConfig.for_model(kind, **sizes), checkpointing)
    for patched in (False, True):
        if patched:
            liger_losses.patch(model)
        how = rf"{'yes' if checkpointing else 'no'} +{'with' if patched else 'without'}"
        (row,) = re.findall(rf"^{name} +(\d+) x (\d+) +{how} +[\d.]+ +([\d.]+)", results, re.MULTILINE)
        step = doctor.step_bytes(model, int(row[0]) * int(row[1]), 150 * 10**9, patched=patched)
        assert step / 2**30 == pytest.approx(float(row[2]), rel=0.02)
    products = [doctor.head_plan(model, 16384, 24 * 10**9, couples=couples)[1] for couples in (False, True)]
    assert products == [6, 8]  # as docs/memory.md has them


def test_a_step_that_does_not_run_is_said():
    (line,) = doctor.step_line(torch.nn.Linear(2, 2), 256, 0, patched=False)
    assert line.startswith("this model does not run on the meta device: TypeError: ")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    model = doctor.model_of(transformers.BertConfig(**sizes, num_hidden_layers=1, vocab_size=64))
    step, larger = doctor.step_line(model, 256, 10**9, patched=False)
    assert re.fullmatch(r" +0\.0 GiB", step)
    assert larger.startswith("no larger step runs on the meta device: RuntimeError: ")


def test_the_largest_step_that_fits():
    steep = lambda tokens: max(1000 + tokens, 10 * tokens - 20_000)  # noqa: E731
    flat = lambda tokens: 1000 + tokens + min(20 * tokens, 400_000)  # noqa: E731  # a patched head's buffers stop growing
    for memory, size, least, most in (
        (steep, 1100, 0, 0),
        (steep, 3000, 1920, 2000),
        (steep, 10**6, 100_000, 102_000),
        (flat, 10**6, 587_000, 599_000),
    ):
        for start in (1, 4096, 10**6):
            assert least <= doctor.most_tokens(memory, size, start) <= most


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(time, "sleep", None)
    assert doctor.main(["nobody/no-such-model"]) == 1
    message = capsys.readouterr().err
    assert "it is no folder, it is not in the local cache, and http://127.0.0.1:9 does not answer" in message
    assert "Give the id or folder" in message


def test_features_of_the_installed_trl_are_named(monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    import trl.trainer.dpo_trainer as module

    from liger_losses.trl.features import FEATURES

    assert [line.split("  ")[0] for line in doctor.trl_features()] == list(FEATURES)
    assert {line.split()[-1] for line in doctor.trl_features()} == {"works"}
    monkeypatch.setattr(module, "add_fused_lm_head", lambda model, scale: None)
    left = [re.sub("  +", " ", line) for line in doctor.trl_features() if not line.endswith("works")]
    missing = "left out: trl.trainer.dpo_trainer.add_fused_lm_head has an unknown parameter scale"
    assert left == [f"any head in DPO {missing}"]


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv("LIGER_LOSSES_BACKEND", "triton")
    monkeypatch.setattr("liger_losses.kernels._triton.INTERPRETED", False)
    lines = list(doctor.devices())
    assert "LIGER_LOSSES_BACKEND is triton" in lines
    assert any(line.startswith("CPU") and "calls will fail" in line for line in lines)


def test_defaults_that_differ_are_those_of_the_packages():
    """The table, on its page too; values of packages that are installed are read."""
    from liger_losses.defaults import DEFAULTS, VERSIONS

    page = (ROOT / "docs" / "policy_losses.md").read_text()
    for row in DEFAULTS:
        loss = getattr(liger_losses, f"LigerFusedLinear{row.loss.partition(',')[0]}Loss")
        if row.option in loss.option_names:
            assert getattr(loss(), row.option) in (None, row.here)
        cells = [f" `{row.others[p][0]}`: `{row.others[p][1]!r}`" if p in row.others else "" for p in VERSIONS]
        assert f"| {row.loss} | `{row.option}` | `{row.here!r}` |{' |'.join(cells)} |" in page
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    if not trl.__version__.startswith(VERSIONS["trl"]):
        pytest.skip("another version of TRL")
    for row in DEFAULTS:
        name, value = row.others.get("trl", ("", None))
        *path, option = name.split(".")
        if path:
            module = __import__("trl." + ".".join(path[:-1]), fromlist=["x"]) if path[:-1] else trl
            assert getattr(module, path[-1]).__dataclass_fields__[option].default == value
