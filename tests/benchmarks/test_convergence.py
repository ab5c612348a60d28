"""The study of convergence: its tables and plots, and a run of two steps."""

import json
import subprocess
import sys

import pytest

from benchmarks.convergence import ROOT, distance, short_words, smooth


def test_distances_are_of_the_last_half():
    assert distance([9.0, 9.0, 1.0, 2.0], [0.0, 0.0, 2.0, 4.0]) == 1.5
    assert smooth([0.0, 3.0, 6.0], width=3) == [1.5, 3.0, 4.5]


def test_the_reward_counts_short_words():
    completions = [[{"role": "assistant", "content": text}] for text in ('I am "so-so", dear campers!', "", "- 42")]
    assert short_words(completions) == [0.8, 0.0, 0.0]


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
