"""Measures what the table of README.md has, on one GPU, and prints its rows: `python -m benchmarks.readme`.

Each provider of training steps runs in a process of its own; the losses on the head are timed in turns in another.
`--large` measures Llama-3-8B too, `--only` some of the processes; a file that `--out` names keeps the other rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import end_to_end
from benchmarks.measure import environment

STEP = ("tokens_per_second", "peak_gib")
HEAD = ("median_ms", "extra_mib")
DASH = "\N{EN DASH}"
COLUMNS = ("plain", "liger-kernel", "TRL", "ours")
#: A row's name in README.md, what is measured, and where a provider goes by another name than its column's.
STEPS = {
    "SFT step, Llama-3.2-1B, 4 x 4096 tokens": end_to_end.Case("SFT", "Llama-3.2-1B", 4, 4096),
    "SFT step, Qwen2.5-1.5B, 4 x 4096 tokens": end_to_end.Case("SFT", "Qwen2.5-1.5B", 4, 4096),
    "DPO step, Qwen2.5-1.5B, 8 x 2048 tokens": end_to_end.Case("DPO", "Qwen2.5-1.5B", 8, 2048, 0.5, True),
}
LARGE = {"DPO step, Llama-3-8B, 8 x 2048 tokens": end_to_end.Case("DPO", "Llama-3-8B", 8, 2048, 0.5, True)}
HEADS = {
    "cross-entropy, 8192 x 4096 x 128256": "cross_entropy",
    "DPO, 16384 x 4096 x 128256, half masked": "dpo",
    "JSD, 8192 x 2048 x 151936": "jsd",
}
#: What a column is in a step of TRL's.
IN_TRL = {"liger-kernel": "TRL+liger-kernel", "ours": "ours+kernels"}
PROCESSES = ("plain", "liger-kernel", "TRL", "ours", "heads")


def steps(column: str, large: bool, tiny: bool) -> list[dict[str, Any]]:
    """Training steps of one provider: SFT without TRL; DPO with all logits, with TRL's head (beside liger-kernel's
    kernels in that column), or with ours."""
    found = []
    for name, case in (STEPS | LARGE if large else STEPS).items():
        in_trl = case.task == "DPO"
        if column == "TRL" and not in_trl:
            continue
        if tiny:
            case = replace(case, model="tiny", sequences=2, length=32)
        provider = IN_TRL.get(column, column) if in_trl else column
        (row,) = end_to_end.run(provider, [case], steps=5)
        found.append({"name": name, "column": column, "values": [row.get(value) for value in STEP], "row": row})
    return found


def heads(tiny: bool) -> list[dict[str, Any]]:
    """The losses on the head, at their first shape, all providers in turns."""
    from benchmarks.run import BENCHMARKS, measure, shapes_for

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for name, benchmark in ((name, b) for name, wanted in HEADS.items() for b in BENCHMARKS if b.name == wanted):
        columns = {"plain torch" if column == "plain" else column: column for column in COLUMNS}
        chosen = {name: provider for name, provider in benchmark.providers.items() if name in columns}
        shape = shapes_for(benchmark, device, tiny)[0]
        for row in measure(replace(benchmark, providers=chosen, baseline=None), shape, device, 1 if tiny else 10):
            values = [getattr(row, value) for value in HEAD]
            found.append({"name": name, "column": columns[row.provider], "values": values, "row": vars(row)})
    return found


def written(name: str, values: list[float | None]) -> str:
    """As the table has it: `61.2k tokens/s, 26.3 GiB`, or `55.0 ms, 0.06 GiB`; nothing for what was not measured."""
    if None in values:
        return ""
    first, second = values
    if " step" in name:
        return f"{first / 1000:.1f}k tokens/s, {second:.1f} GiB"
    return f"{first:.1f} ms, {second / 1024:.2f} GiB"


def bold(cell: str) -> str:
    """With the time, or the rate, in bold."""
    first, comma, second = cell.partition(",")
    return f"**{first}**{comma}{second}" if cell else ""


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of README.md."""
    cells = {(row["name"], row["column"]): written(row["name"], row["values"]) for row in rows}
    cells |= {key: bold(cell) for key, cell in cells.items() if key[1] == "ours"}
    names = [name for name in (STEPS | LARGE | HEADS) if any(name == row["name"] for row in rows)]
    return "\n".join(f"| {name} | {' | '.join(cells.get((name, c), DASH) for c in COLUMNS)} |" for name in names)


def main() -> None:
    """Spawn the processes, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file; the rows go beside it as .txt")
    parser.add_argument("--only", default=",".join(PROCESSES), help=f"with commas between them: {', '.join(PROCESSES)}")
    parser.add_argument("--large", action="store_true", help="Llama-3-8B too")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        on_heads = options.process == "heads"
        rows = heads(options.tiny) if on_heads else steps(options.process, options.large, options.tiny)
        options.out.write_text(json.dumps(rows))
        return
    rows = json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    for process in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "benchmarks.readme", "--process", process, "--out", str(file)]
            subprocess.run(command + ["--large"] * options.large + ["--tiny"] * options.tiny, check=True)
            new = json.loads(file.read_text())
        measured = {(row["name"], row["column"]) for row in new}
        rows = [row for row in rows if (row["name"], row["column"]) not in measured] + new
        if options.out:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            options.out.write_text(json.dumps({"environment": environment(device), "rows": rows}, indent=1) + "\n")
            options.out.with_suffix(".txt").write_text(f"{json.dumps(environment(device))}\n\n{table(rows)}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
