"""The benchmarks of shared prompts: their summaries and pictures, and runs of a tiny model."""

import json
import subprocess
import sys

import pytest

from benchmarks.convergence import ROOT
from benchmarks.shared_prompts_convergence import METHODS, summary


def runs_of(apart):
    """Curves of three seeds, which are 1 apart; those with shared prompts are so far from the others."""
    keys = [*METHODS["dpo"].curves, "grad_norm"]
    return [
        {"method": "dpo", "provider": way, "seed": seed, "tokens": {"shared": 1, "repeated": 2}, "seconds": 1.0}
        | {key: [seed + apart * (way == "shared")] * 8 for key in keys}
        for seed in range(3)
        for way in ("repeated", "shared")
    ]


@pytest.mark.parametrize(("apart", "found"), [(0.5, "deviation of seeds 1: within"), (5.0, ": NOT within")])
def test_the_summary_says_whether_runs_are_within_the_spread(apart, found):
    lines = summary(runs_of(apart))
    assert lines[0].startswith("dpo: 3 seeds, 8 steps; 2.00 times fewer tokens")
    assert [found in line for line in lines[2::3]] == [True] * 3
    assert f"one seed {apart:.3g}, two seeds of repeated prompts 2" in lines[3]


@pytest.mark.slow
def test_two_steps_of_both_ways(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed")
    flags = ["--pretrain=2", "--steps=2", "--hidden-size=32", "--seeds", "0", "1", f"--out={tmp_path / 'r.json'}"]
    command = [sys.executable, "-m", "benchmarks.shared_prompts_convergence", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    for repeated, shared in zip(runs[::2], runs[1::2], strict=True):
        assert (repeated["provider"], shared["provider"]) == ("repeated", "shared")
        assert shared["loss"] == pytest.approx(repeated["loss"], rel=1e-3, abs=1e-4)
        assert shared["tokens"]["repeated"] > 1.3 * shared["tokens"]["shared"]
    assert "within the spread" in (tmp_path / "r.txt").read_text()
