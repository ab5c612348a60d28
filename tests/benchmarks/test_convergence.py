"""The study of convergence: its tables and plots, and a run of two steps."""

import json
import subprocess
import sys

import pytest

from benchmarks.convergence import ROOT, distance, draw, short_words, smooth, table


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
