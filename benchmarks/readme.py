"""Measures what README.md shows, on one GPU, prints its table's rows, and draws its picture.

``python -m benchmarks.readme [--only steps|losses] [--rounds 6] [--out FILE.json]``. A file that ``--out`` names keeps
its other rows; ``--draw`` only draws it. Providers take turns.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import steps
from benchmarks.measure import about, header
from benchmarks.run import BENCHMARKS, measure, shapes_for

DASH = "\N{EN DASH}"
#: Columns: how they are named in the picture, and their colours.
COLUMNS = {
    "plain": ("plain PyTorch", "0.6"),
    "liger-kernel": ("liger-kernel", "C0"),
    "TRL": ("TRL 1.16", "C1"),
    "ours": ("liger_losses", "C3"),
}
#: Rows: the name of a case of benchmarks.steps.
STEPS = {
    "SFT step, Llama-3.2-1B, 4 x 4096 tokens": "SFT Llama-3.2-1B 4 x 4096",
    "SFT step, Qwen2.5-1.5B, 4 x 4096 tokens": "SFT Qwen2.5-1.5B 4 x 4096",
    "DPO step in TRL, Qwen2.5-1.5B, 8 x 2048 tokens": "DPO in TRL Qwen2.5-1.5B 8 x 2048, checkpointing",
    "GRPO step in TRL, Qwen2.5-1.5B, 8 x 2048 tokens": "GRPO in TRL Qwen2.5-1.5B 8 x 2048, checkpointing",
}
LOSSES = {
    "cross-entropy, 8192 x 4096 x 128256": "cross_entropy",
    "DPO, 16384 x 4096 x 128256, half masked": "dpo",
    "JSD, 8192 x 2048 x 151936": "jsd",
}
#: What providers of a step in TRL and of a loss are called in these columns.
OF_TRL = {"plain": "plain", "TRL+liger-kernel": "liger-kernel", "TRL": "TRL", "ours+kernels": "ours"}
OF_LOSSES = {"plain torch": "plain", "liger-kernel": "liger-kernel", "TRL": "TRL", "ours": "ours"}


def of_steps(rounds: int, device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Training steps: tokens per second and peak memory."""
    rows = []
    for name, wanted in STEPS.items():
        case = next(case for case in steps.CASES if case.name == wanted)
        columns = {provider: provider for provider in steps.SFT} if case.task == "SFT" else OF_TRL
        case = replace(case, model="tiny", sequences=4, length=32) if tiny else case
        for row in steps.measure(case, list(columns), rounds, device):
            values = [row.get(value) for value in ("tokens_per_second", "peak_gib")]
            rows.append({"name": name, "column": columns[row["provider"]], "values": values, "row": row})
            print(steps.line(row), flush=True)
    return rows


def of_losses(rounds: int, device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Losses on the head, at their first shape: milliseconds, and memory beyond inputs and outputs."""
    rows = []
    for name, wanted in LOSSES.items():
        benchmark = next(benchmark for benchmark in BENCHMARKS if benchmark.name == wanted)
        providers = {name: made for name, made in benchmark.providers.items() if name in OF_LOSSES}
        shape = shapes_for(benchmark, device, tiny)[0]
        for row in measure(replace(benchmark, providers=providers, baseline=None), shape, device, rounds):
            values = [row.median_ms, row.extra_mib]
            rows.append({"name": name, "column": OF_LOSSES[row.provider], "values": values, "row": vars(row)})
    return rows


def written(name: str, values: list[float | None]) -> str:
    """As the table has it: `61.2k tokens/s, 26.3 GiB`, or `55.0 ms, 0.06 GiB`; nothing for what was not measured."""
    first, second = values
    if first is None or second is None:
        return ""
    if name in STEPS:
        return f"{first / 1000:.1f}k tokens/s, {second:.1f} GiB"
    return f"{first:.1f} ms, {second / 1024:.2f} GiB"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of README.md."""
    cells = {(row["name"], row["column"]): written(row["name"], row["values"]) for row in rows}
    cells |= {key: re.sub("^([^,]+)", r"**\1**", cell) for key, cell in cells.items() if key[1] == "ours"}
    names = [name for name in (STEPS | LOSSES) if any(name == row["name"] for row in rows)]
    return [f"| {name} | {' | '.join(cells.get((name, c), '') or DASH for c in COLUMNS)} |" for name in names]


def draw(rows: list[dict[str, Any]], device: str, file: Path) -> None:
    """The speed of training steps and their peak memory, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    values = {(row["name"], row["column"]): row["values"] for row in rows if None not in row["values"]}
    names = [name for name in STEPS if any(name == shown for shown, _ in values)]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    titles = "Thousand tokens per second (higher is better)", "Peak memory, GiB (lower is better)"
    for panel, index, title, unit in zip(panels, (0, 1), titles, (1000, 1), strict=True):
        for place, (column, (label, colour)) in enumerate(COLUMNS.items()):
            bars = [(x, values[name, column][index] / unit) for x, name in enumerate(names) if (name, column) in values]
            drawn = panel.bar([x + 0.2 * place - 0.3 for x, _ in bars], [y for _, y in bars], 0.2, color=colour)
            panel.bar_label(drawn, fmt="%.0f", fontsize=8)
            drawn.set_label(label)
        labels = [", ".join(name.split(", ")[:2]).replace(" step", "").replace(", ", "\n") for name in names]
        panel.set_xticks(range(len(names)), labels, fontsize=8)
        panel.set_title(title, fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].legend(fontsize=9)
    figure.suptitle(f"Training steps in bf16, forward to optimizer; one {device}", fontsize=10)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Measure, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file; the rows go beside it as .txt, and the picture as .png")
    parser.add_argument("--only", choices=("steps", "losses"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--draw", action="store_true", help="only draw the file")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU too: to see that everything runs")
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.exists() else {"rows": []}
    if not options.draw:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        rows = [] if options.only == "losses" else of_steps(options.rounds, device, options.tiny)
        rows += [] if options.only == "steps" else of_losses(options.rounds, device, options.tiny)
        measured = {row["name"] for row in rows}
        kept = {**about(device), "rows": [row for row in kept["rows"] if row["name"] not in measured] + rows}
        print(*table(kept["rows"]), sep="\n")
        if options.out:
            options.out.write_text(json.dumps(kept, indent=1) + "\n")
            options.out.with_suffix(".txt").write_text("\n".join([*header(kept), *table(kept["rows"])]) + "\n")
    if options.out:
        draw(kept["rows"], kept["environment"]["device"], options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
