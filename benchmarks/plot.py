"""Time and memory against a size, from a result file: `python -m benchmarks.plot benchmarks/results/gpu.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LABELS = {"tokens": "tokens", "vocab": "vocabulary size"}
PANELS = (("median_ms", "ms, forward and backward"), ("extra_mib", "MiB beyond inputs and outputs"))


def series(benchmark: dict[str, Any], measure: str) -> dict[str, list[tuple[int, float]]]:
    """`(size, value)` of each provider that was measured."""
    found: dict[str, list[tuple[int, float]]] = {}
    for result in benchmark["results"]:
        for row in result["rows"]:
            if row["status"] == "ok" and row[measure] is not None:
                found.setdefault(row["provider"], []).append((result["shape"][benchmark["axis"]], row[measure]))
    return found


def draw(benchmark: dict[str, Any], device: str, file: Path) -> None:
    """One panel for time, one for memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = benchmark.get("panels", PANELS)
    names = list(series(benchmark, chosen[0][0]))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for panel, (measure, label) in zip(panels, chosen, strict=True):
        for name, points in series(benchmark, measure).items():
            ours = name.startswith("ours")
            style = "--" if name == benchmark["baseline"] else "-"
            panel.plot(
                *zip(*points, strict=True),
                style,
                marker="o" if ours else ".",
                label=name,
                color=colours[name],
                linewidth=2.2 if ours else 1.2,
            )
        panel.set(xscale="log", yscale="log", xlabel=LABELS[benchmark["axis"]], ylabel=label)
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    fixed = next(iter(benchmark["results"]))["shape"]
    sizes = ", ".join(
        f"{LABELS.get(k, 'hidden size')} {fixed[k]}"
        for k in ("tokens", "hidden", "vocab")
        if k in fixed and k != benchmark["axis"]
    )
    where = f"{sizes}; {device}" if sizes else device
    figure.suptitle(f"{benchmark['title']} ({where})", fontsize=10)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


#: The bars of the README's picture: a column of benchmarks.readme, its name there, and its colour.
README_BARS = (
    ("plain", "plain PyTorch", "0.6"),
    ("liger-kernel", "liger-kernel", "C0"),
    ("TRL", "TRL 1.16", "C1"),
    ("ours", "liger_losses", "C3"),
)


def draw_for_readme(rows: list[dict[str, Any]], device: str, file: Path) -> None:
    """The time of losses on the head, and the peak memory of training steps, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["name"] for row in rows))
    steps = [name for name in names if " step" in name]
    values = {(row["name"], row["column"]): row["values"] for row in rows}
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    losses = [name for name in names if name not in steps]
    for panel, shown, index, title in (
        (panels[0], losses, 0, "Time of a loss, ms (lower is better)"),
        (panels[1], steps, 1, "Peak memory of a step, GiB (lower is better)"),
    ):
        for place, (column, label, colour) in enumerate(README_BARS):
            found = [(x, values[name, column][index]) for x, name in enumerate(shown) if (name, column) in values]
            bars = panel.bar([x + 0.2 * place - 0.3 for x, _ in found], [y for _, y in found], 0.2, color=colour)
            panel.bar_label(bars, fmt="%.0f", fontsize=9)
            bars.set_label(label)
        labels = [", ".join(name.split(", ")[:2]).replace(" step, ", "\n").replace(", ", "\n") for name in shown]
        panel.set_xticks(range(len(shown)), labels, fontsize=8)
        panel.set_title(title, fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].legend(fontsize=9)
    figure.suptitle(f"Forward and backward, bf16; one {device}", fontsize=10)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Draw every benchmark of the file that varies one size, beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--readme", action="store_true", help="the README's picture, of benchmarks.readme's file")
    options = parser.parse_args()
    file = options.file
    report = json.loads(file.read_text(encoding="utf-8"))
    if options.readme:
        draw_for_readme(report["rows"], report["environment"]["device"], file.with_name("readme.png"))
        return
    for benchmark in report["benchmarks"]:
        if benchmark.get("axis"):
            target = file.with_name(f"{file.stem}_{benchmark['name']}.png")
            draw(benchmark, report["environment"]["device"], target)
            print(target)


if __name__ == "__main__":
    main()
