"""The benchmarks run at tiny sizes, and the studies' two ways to train have one loss."""

import importlib.util
import json
import pathlib
import re

import pytest

from tests.processes import printed_by

ROOT = pathlib.Path(__file__).parents[2]
_SEEDS, _STEPS = ["--seeds", "0"], ["--pretrain=2", "--steps=2"]
_TINY = ["--model=tiny", "--batch-size=8", *_STEPS, *_SEEDS]
#: Arguments, and what is printed; the results of the studies are in a file.
RUNS = {
    "grid": (["--tiny", "--rounds=1", "--without", "torch.compile"], "cross-entropy        64 x 32 x 512"),
    "steps": (["--tiny", "--rounds=1", "--only", "^SFT Qwen2.5-1.5B 4 x 4096$", "--providers=plain,ours"], "of ours"),
    "readme": (["--tiny", "--rounds=1"], "| cross-entropy, 8192 x 4096 x 128256 |"),
    "reuse": (["--tiny", "--rounds=1"], "a prompt once"),
    "shared_prompts": (["--tiny", "--rounds=1"], "times as fast"),
    "generation": (["--tiny", "--rounds=1", "--new=2", "--providers=plain,ours"], "100.0% of the tokens"),
    "parallel": (["--tiny", "--rounds=1", "cross-entropy"], "loss_parallel"),
    "convergence": (["--methods", "dpo", "grpo", "shared_dpo", *_TINY], ""),
}
QUICK = ("grid", "steps")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in RUNS])
def test_a_benchmark_runs(name, tmp_path):
    for package in ("trl", "matplotlib", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    arguments, printed = RUNS[name]
    out = f"--out={tmp_path / 'r.json'}"
    assert printed in printed_by("-m", f"benchmarks.{name}", *arguments, out, TRITON_INTERPRET="0")
    runs = json.loads((tmp_path / "r.json").read_text()).get("runs", []) if name not in QUICK else []
    for one, other in zip(runs[::2], runs[1::2], strict=True):
        assert one["provider"] != other["provider"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in ("performance", "memory", "trl"))])
def test_numbers_in_tables_are_in_the_files_of_results(page):
    """Cells that are a number; thousands as `49.0k`, and MiB as GiB."""
    number, files = r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*[\w])", (ROOT / "benchmarks" / "results").glob("*.txt")
    values = {float(value) for file in files for value in re.findall(number + r"|\d+\.\d+(?=k)", file.read_text())}
    cells = re.findall(r"(?<=\|) \**(\d+\.\d+)(?:k| GiB)?\**(?= \|)", (ROOT / page).read_text())
    shown = [(float(cell), 0.5001 * 10.0 ** -len(cell.partition(".")[2])) for cell in cells]
    measured = [value / unit for value in values for unit in (1, 1000, 1024)]
    assert len(cells) >= 9
    assert [x for x, rounding in shown if not any(abs(x - value) <= rounding for value in measured)] == []
