"""The examples do what the README says of them."""

import importlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
from unittest import mock

import pytest

from liger_losses.trl import disable
from tests.models import tiny_model
from tests.processes import BACKENDS, start

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch):
    """Imports an example anew, with what is patched."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def fresh(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return fresh


@pytest.fixture
def run_here(load, monkeypatch, capsys):
    """Runs an example in this process, where torch and TRL are imported already; what it prints."""

    def run(name, *arguments):
        if "trl" in name:
            pytest.importorskip("trl", reason="TRL is not installed")
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        try:
            load(name).main()
        finally:
            disable()
        return capsys.readouterr().out

    return run


def test_shared_prompts_take_fewer_tokens_for_the_same_losses(run_here):
    printed = run_here("prompts_once", "--steps", 2, "--shots", 1, "--answers", 3, "--hidden-size", 16)
    for repeated, shared in re.findall(r"repeated: (.*?)   shared: (.*)", printed):
        assert repeated == shared
    assert "times fewer tokens" in printed


@pytest.fixture
def saved_model(tmp_path):
    """A tiny model with its tokenizer, and preference pairs, as files."""
    model, tokenizer, text = tiny_model()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    sides = ("prompt", "chosen", "rejected")
    rows = [{side: [{"role": "user", "content": text(3 + i % 3)}] for side in sides} for i in range(24)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path


def files_of(folder):
    """Arguments that name the files of :func:`saved_model`, and where an example writes."""
    return [f"--model={folder}/model", f"--output={folder}/out", f"--dataset={folder}/pairs.jsonl"]


_DEMO = ["--steps=4", "--batch-size=2", "--held-out=4", "--learning-rate=1e-2"]


def test_the_demo_trains_as_plain_trl_does(saved_model, run_here, monkeypatch):
    """Both of its runs, and what it says of them; each is a process of its own there."""
    out = saved_model / "out"

    def run_worker(command):
        run_here("trl_dpo", *command[2:])
        return mock.Mock(returncode=0)

    monkeypatch.setattr(subprocess, "run", run_worker)
    printed = run_here("trl_dpo", *files_of(saved_model), *_DEMO, "--compare-steps=3", "--lengths")
    ours, plain = (json.loads((out / f"{worker}.json").read_text()) for worker in ("liger_losses", "plain_trl"))
    assert (len(ours["loss"]), len(plain["loss"])) == (4, 3)
    for name in ("loss", "margin"):
        assert ours[name][:3] == pytest.approx(plain[name], rel=1e-3, abs=1e-5)
    assert plain["loss"][0] != plain["loss"][-1]
    assert (out / "model" / "config.json").is_file()
    assert printed.splitlines()[-1].startswith("The losses of liger_losses and plain TRL, step by step: ")
    for line in ("this library by enable(", "reward accuracy", "peak memory, MiB", "tokens per second", "loss, step 3"):
        assert line in printed


def test_both_sides_of_longer_pairs_have_one_loss(load, tmp_path):
    module = load("longer_pairs")
    found = {side: module.measure(side, 16, 64, [9, 5]) for side in module.SIDES}
    plain, ours = found.values()
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in plain], rel=1e-5)
    assert module.peak_mib() > 10
    assert all(row["seconds"] > 0 and row["mib"] >= 0 for row in (*plain, *ours))
    module.draw(tmp_path / "new" / "plot.png", [5, 9], found)
    assert (tmp_path / "new" / "plot.png").read_bytes()[1:4] == b"PNG"


_TRAINED, _GENERATED = "--steps=2 --batch-size=4", "--steps=2 --group=2 --new-tokens=4"
_SHORT_TEXTS = f"{_TRAINED} --pretraining=6 --length=12 --top-k=16 --tail=none"
#: By example: of which files it takes the first, arguments, and what it prints.
RUNS = [
    ("custom_loss", 0, "", "Cal-DPO"),
    ("kto", 3, _TRAINED, "mean reward of held-out completions"),
    ("distill", 3, f"{_TRAINED} --layers=2", "student's perplexity of held-out text"),
    ("medusa", 3, f"{_TRAINED} --own-heads --prompts=2 --new-tokens=4", "tokens per step of decoding"),
    ("grpo", 2, _GENERATED, "mean reward of the first three steps"),
    ("grpo", 2, f"{_GENERATED} --steps=1 --loss-type=grpo --top-p=0.9", "step   1"),
    ("trl_grpo", 2, _GENERATED, "mean reward of the first three steps"),
    ("trl_distill", 3, f"{_TRAINED} --layers=2 --new-tokens=4", "student's perplexity of held-out text"),
    ("on_policy_distillation", 0, _SHORT_TEXTS, "KL(student, teacher) on held-out text"),
]


@pytest.mark.parametrize(("name", "files", "arguments", "expected"), RUNS)
def test_the_examples_run(saved_model, run_here, name, files, arguments, expected):
    printed = run_here(name, *files_of(saved_model)[:files], *arguments.split())
    assert expected in printed
    assert "nan" not in printed


@pytest.mark.slow
def test_distillation_from_files(saved_model, run_here, tmp_path):
    """The teacher of an earlier process: the losses are those of the teacher beside the student, but for bf16."""
    common = [*files_of(saved_model), *_TRAINED.split(), "--layers=2"]
    modes = [], ["--save-teacher", tmp_path], ["--teacher", tmp_path]
    beside, saved, files = (run_here("distill", *common, *more) for more in modes)
    assert "bytes a token" in saved
    beside, files = ([line.split()[3] for line in one.splitlines() if "step" in line] for one in (beside, files))
    assert len(files) == 2
    assert [float(loss) for loss in files] == pytest.approx([float(loss) for loss in beside], abs=2e-3)


def losses_in(printed):
    """Of each step."""
    return [float(loss) for loss in re.findall(r"^(?:loss, )?step +\d+ +(?:loss )? *(\S+)$", printed, re.MULTILINE)]


def as_by_torchrun(rank, name, arguments, variables):
    """An example on processes that have torchrun's environment, and have imported what takes long."""
    os.environ.update(variables)
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    importlib.import_module(name).main()


def two_processes(folder, name, *arguments, backend="gloo", **variables):
    """What the first of them prints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    variables |= {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    start(as_by_torchrun, 2, folder, name, arguments, variables, backend=None)
    return (folder / "0").read_text()


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS)
def test_dpo_with_fsdp2_on_two_processes(tmp_path, backend):
    from transformers import AutoModelForCausalLM

    losses = losses_in(two_processes(tmp_path, "fsdp2", "--output", str(tmp_path), backend=backend))
    assert len(losses) == 20
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)  # the model is its own reference
    assert losses[-1] < 0.45
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]


@pytest.mark.distributed
@pytest.mark.slow
def test_the_demo_on_two_processes(saved_model):
    """They train with DDP on a CPU, where accelerate has no FSDP."""
    pytest.importorskip("trl", reason="TRL is not installed")
    arguments = [*files_of(saved_model), *_DEMO]
    losses = losses_in(two_processes(saved_model, "trl_dpo", *arguments, ACCELERATE_USE_CPU="true"))
    assert len(losses) == 4
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[0] != losses[-1]
    assert (saved_model / "out" / "model" / "config.json").is_file()


def test_the_configuration_of_accelerate_is_one_of_fsdp2():
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = config_args.load_config_from_file(str(EXAMPLES / "accelerate_fsdp2.yaml"))
    assert config.distributed_type.value == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensor_parallelism_on_two_processes(tmp_path, backend):
    pytest.importorskip("transformers", minversion="5.23")
    printed = two_processes(tmp_path, "tensor_parallel", "--steps=3", backend=backend)
    losses = losses_in(printed)
    assert len(losses) == 3  # one process prints
    assert losses[2] < losses[0] - 0.3
    assert "lm_head" in printed
    assert "DPO loss 0.6931" in printed  # the model is its own reference
