"""The benchmarks of shared prompts: their summaries and pictures, and runs of a tiny model."""

import json
import subprocess
import sys

import pytest

from benchmarks import shared_prompts
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


def test_a_series_is_drawn_and_fills_the_page(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    page, picture = tmp_path / "docs" / "page.md", tmp_path / "results" / "series.png"
    for folder in (page.parent, picture.parent):
        folder.mkdir()
    text = shared_prompts.PAGE.read_text()
    page.write_text(text)
    monkeypatch.setattr(shared_prompts, "PAGE", page)
    found = {"milliseconds": {"repeated": 60.0, "shared": 40.4}, "times_as_fast": 1.485, "interval": [1.4, 1.6]}
    rows = [{**vars(case), **found} for case in shared_prompts.series(2048)]
    shared_prompts.draw(rows, "H200", picture)
    shared_prompts.fill_page(rows, "H200", picture)
    lines = page.read_text().splitlines()
    assert "![Speed by the share of the prompt](../results/series.png)" in lines
    assert "| GRPO | 1024 + 1024 | 1.78 times | 60 / 40 | 1.49 times |" in lines
    assert len([line for line in lines if line.startswith("| DPO | ") and "+" in line]) == 4
    assert [text.splitlines()[i] for i in (0, -1)] == [lines[i] for i in (0, -1)]
    shared_prompts.fill_page(rows, "H200", picture)
    assert page.read_text().splitlines() == lines


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
