"""The study of convergence: its tables and plots, and a run of two steps."""

import json
import subprocess
import sys

import pytest

from benchmarks.convergence import ROOT, distance, draw, short_words, smooth, table, visible_gpus


def run_of(method, provider, seed, curve):
    key = "reward" if method == "grpo" else "loss"
    return {
        "method": method,
        "provider": provider,
        "seed": seed,
        key: curve,
        "evaluation": {"held-out loss": curve[-1]},
    }


def test_distances_are_of_the_last_half():
    assert distance([9.0, 9.0, 1.0, 2.0], [0.0, 0.0, 2.0, 4.0]) == 1.5
    assert smooth([0.0, 3.0, 6.0], width=3) == [1.5, 3.0, 4.5]


def test_the_reward_counts_short_words():
    completions = [[{"role": "assistant", "content": text}] for text in ('I am "so-so", dear campers!', "", "- 42")]
    assert short_words(completions) == [0.8, 0.0, 0.0]


def test_the_page_has_the_settings_of_the_results():
    report = json.loads((ROOT / "benchmarks" / "results" / "convergence.json").read_text())
    lines = (ROOT / "docs" / "convergence.md").read_text().splitlines()
    rows = {cells[1].strip(): cells[2:-1] for line in lines if len(cells := line.split("|")) == 7}
    for column, method in enumerate(("sft", "dpo", "distillation", "grpo")):
        of, runs = report["settings"][method], [run for run in report["runs"] if run["method"] == method]
        cells = {name: row[column].strip() for name, row in rows.items()}
        assert int(cells["steps"]) == of["steps"] == len(runs[0]["loss"])
        assert float(cells["learning rate"]) == of["learning_rate"]
        assert int(cells["batch of a step"].split()[0]) == of["batch_size"]
        assert [int(seed) for seed in cells["seeds"].split(",")] == sorted({run["seed"] for run in runs})


def test_the_table_sets_providers_beside_seeds(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    curves = {("plain", 0): [4.0, 2.0], ("plain", 1): [4.0, 3.0], ("liger_losses", 0): [4.0, 2.25]}
    curves["liger_losses", 1] = [4.0, 3.25]
    runs = [run_of(method, *case, curve) for method in ("sft", "grpo") for case, curve in curves.items()]
    lines = [line.split() for line in table(runs).splitlines()]
    assert ["sft", "held-out", "loss", "2.5000", "±", "0.7071", "2.7500", "±", "0.7071"] in lines
    assert ["sft", "mean", "|loss", "-", "loss|", "of", "one", "seed", "0.2500"] in lines
    assert ["plain,", "two", "seeds", "1.0000"] in lines
    draw(runs, tmp_path / "curves.png", [("sft", "loss", ("plain", "liger_losses"))])
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.parametrize(("visible", "count", "expected"), [(None, 2, ["0", "1"]), ("3", 1, ["3"]), ("", 0, [""])])
def test_runs_take_the_gpus_that_are_visible(monkeypatch, visible, count, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == expected


def test_a_study_that_was_cut_short_goes_on(tmp_path, monkeypatch):
    from benchmarks import convergence

    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out, started = tmp_path / "r.json", []

    class Done:
        returncode = 0

    def run(command, **_):
        flags = dict(flag[2:].split("=") for flag in command[3:])
        started.append((flags["worker"], int(flags["seed"]), flags["provider"]))
        folder = convergence.Path(flags["folder"])
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps(run_of(*[started[-1][i] for i in (0, 2, 1)], [4.0, 2.0])))
        return Done()

    monkeypatch.setattr(convergence.subprocess, "run", run)
    monkeypatch.setattr(convergence, "prepare", lambda *_: "model")
    monkeypatch.setattr(sys, "argv", ["convergence", "--methods", "sft", "--seeds", "0", f"--out={out}"])
    assert convergence.main() == 0
    monkeypatch.setattr(
        sys, "argv", ["convergence", "--methods", "sft", "--resume", "--seeds", "0", "1", f"--out={out}"]
    )
    assert convergence.main() == 0
    assert sorted(started) == [("sft", seed, provider) for seed in (0, 1) for provider in ("liger_losses", "plain")]
    assert len(json.loads(out.read_text())["runs"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_two_steps_of_both_providers(tmp_path, method):
    pytest.importorskip("trl", reason="TRL is not installed")
    flags = [
        "--model=tiny",
        "--pretrain=2",
        "--steps=2",
        "--batch-size=8",
        "--seeds",
        "0",
        f"--out={tmp_path / 'r.json'}",
    ]
    command = [sys.executable, "-m", "benchmarks.convergence", "--methods", method, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, ours = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert (plain["provider"], ours["provider"]) == ("plain", "liger_losses")
    assert len(ours["loss"]) == 2
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-3, abs=1e-4)
    assert ours["evaluation"] == pytest.approx(plain["evaluation"], rel=1e-3, abs=1e-3)
    assert (tmp_path / "r.png").is_file()
