"""Measures what README.md and docs/performance.md show, on one GPU, prints their tables, and draws README's picture.

``python -m benchmarks.readme [--only REGEX] [--rounds 6] [--out FILE.json]``. A file that ``--out`` names keeps
its other rows; ``--draw`` only prints and draws it. Providers take turns.
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
#: Rows: the name of a case of benchmarks.steps. README.md and its picture have the first four.
STEPS = {
    "SFT step, Llama-3.2-1B, 4 x 4096 tokens": "SFT Llama-3.2-1B 4 x 4096",
    "SFT step, Qwen2.5-1.5B, 4 x 4096 tokens": "SFT Qwen2.5-1.5B 4 x 4096",
    "DPO step in TRL, Qwen2.5-1.5B, 8 x 2048 tokens": "DPO in TRL Qwen2.5-1.5B 8 x 2048, checkpointing",
    "GRPO step in TRL, Qwen2.5-1.5B, 8 x 2048 tokens": "GRPO in TRL Qwen2.5-1.5B 8 x 2048, checkpointing",
    "SFT step, Llama-3.2-1B, 4 x 4096 tokens, checkpointing": "SFT Llama-3.2-1B 4 x 4096, checkpointing",
    "SFT step, Llama-3.2-1B, 1 x 16384 tokens": "SFT Llama-3.2-1B 1 x 16384",
    "SFT step, Qwen2.5-1.5B, 4 x 4096 tokens, checkpointing": "SFT Qwen2.5-1.5B 4 x 4096, checkpointing",
    "SFT step, Llama-3-8B, 16 of 32 layers, 4 x 4096 tokens": "SFT Llama-3-8B half 4 x 4096",
    "SFT step, Llama-3-8B, 4 x 4096 tokens, checkpointing": "SFT Llama-3-8B 4 x 4096, checkpointing",
}
IN_README, SFT = list(STEPS)[:4], [name for name in STEPS if name.startswith("SFT")]
LOSSES = {
    "cross-entropy, 8192 x 4096 x 128256": "cross_entropy",
    "DPO, 16384 x 4096 x 128256, half masked": "dpo",
    "JSD, 8192 x 2048 x 151936": "jsd",
}
#: What providers of a step in TRL and of a loss are called in these columns.
OF_TRL = {"plain": "plain", "TRL+liger-kernel": "liger-kernel", "TRL": "TRL", "ours+kernels": "ours"}
OF_LOSSES = {"plain torch": "plain", "liger-kernel": "liger-kernel", "TRL": "TRL", "ours": "ours"}


def of_steps(only: str, rounds: int, device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Training steps: tokens per second and peak memory."""
    rows = []
    for name, wanted in [row for row in STEPS.items() if re.search(only, row[0])]:
        case = next(case for case in steps.CASES if case.name == wanted)
        columns = {provider: provider for provider in steps.SFT} if case.task == "SFT" else OF_TRL
        case = replace(case, model="tiny", sequences=4, length=32) if tiny else case
        for row in steps.measure(case, list(columns), rounds, device):
            values = [row.get(value) for value in ("tokens_per_second", "peak_gib")]
            rows.append({"name": name, "column": columns[row["provider"]], "values": values, "row": row})
            print(steps.line(row), flush=True)
    return rows


def of_losses(only: str, rounds: int, device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Losses on the head, at their first shape: milliseconds, and memory beyond inputs and outputs."""
    rows = []
    for name, wanted in [row for row in LOSSES.items() if re.search(only, row[0])]:
        benchmark = next(benchmark for benchmark in BENCHMARKS if benchmark.name == wanted)
        providers = {name: made for name, made in benchmark.providers.items() if name in OF_LOSSES}
        shape = shapes_for(benchmark, device, tiny)[0]
        for row in measure(replace(benchmark, providers=providers, baseline=None), shape, device, rounds):
            values = [row.median_ms, row.extra_mib]
            rows.append({"name": name, "column": OF_LOSSES[row.provider], "values": values, "row": vars(row)})
    return rows


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of README.md's table and, behind empty lines, of those of docs/performance.md."""
    values = {(row["name"], row["column"]): row["values"] for row in rows if None not in row["values"]}
    measured = [name for name in (*STEPS, *LOSSES) if (name, "ours") in values]
    sft, losses = ([name for name in measured if name in kind] for kind in (SFT, LOSSES))
    trl = [name for name in measured if name in IN_README and name not in SFT]

    def line(label: str, names: list[str], columns: str, form: str, index: int, unit: float, best: Any = min) -> str:
        """The largest number of the names in each column, and the best of the columns bold."""
        lists = [[values[n, c][index] / unit for n in names if (n, c) in values] for c in columns.split()]
        texts = [form.format(max(numbers)) if numbers else DASH for numbers in lists]
        first = form.format(best(max(numbers) for numbers in lists if numbers))
        return f"| {label} | " + " | ".join(f"**{text}**" if text == first else text for text in texts) + " |"

    lines, columns = [], "plain TRL liger-kernel ours"
    for name in (name for name in measured if name in IN_README):
        label = ", ".join(re.sub(" step.*?,", ",", name).split(", ")[:2])
        lines.append(line(f"{label}: tokens/s", [name], columns, "{:.1f}k", 0, 1e3, max))
        if name in SFT:
            lines.append(line("peak memory", [name], columns, "{:.1f} GiB", 1, 1))
    if trl:
        lines.append(line("peak memory of both, at most", trl, columns, "{:.1f} GiB", 1, 1))
    for form, index, unit, best in (("{:.1f}", 0, 1e3, max), ("{:.1f}", 1, 1, min)):
        lines.append("")
        for name in sft:
            label = name.partition(", ")[2].replace(" tokens", "")
            lines.append(line(label, [name], "plain liger-kernel ours", form, index, unit, best))
            if index == 0 and (name, "liger-kernel") in values:
                lines[-1] += f" {100 * values[name, 'ours'][0] / values[name, 'liger-kernel'][0] - 100:+.0f} % |"
    for form, index, unit in (("{:.1f}", 0, 1), ("{:.2f}", 1, 1024)):
        lines += ["", *(line(name, [name], "plain liger-kernel TRL ours", form, index, unit) for name in losses)]
    return lines


def draw(rows: list[dict[str, Any]], device: str, file: Path) -> None:
    """The speed of training steps and their peak memory, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    values = {(row["name"], row["column"]): row["values"] for row in rows if None not in row["values"]}
    names = [name for name in IN_README if any(name == shown for shown, _ in values)]
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
    parser.add_argument("--only", default="", help="a regular expression that the names of rows match")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--draw", action="store_true", help="only print and draw the rows of the file")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU too: to see that everything runs")
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.exists() else {"rows": []}
    if not options.draw:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        chosen = options.only, options.rounds, device, options.tiny
        rows = of_steps(*chosen) + of_losses(*chosen)
        measured = {row["name"] for row in rows}
        kept = {**about(device), "rows": [row for row in kept["rows"] if row["name"] not in measured] + rows}
    print(*tables(kept["rows"]), sep="\n")
    if options.out:
        options.out.write_text(json.dumps(kept, indent=1) + "\n")
        options.out.with_suffix(".txt").write_text("\n".join([*header(kept), *tables(kept["rows"])]) + "\n")
        draw(kept["rows"], kept["environment"]["device"], options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
