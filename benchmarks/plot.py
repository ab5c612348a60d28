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


def main() -> None:
    """Draw every benchmark of the file that varies one size, beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    report = json.loads(file.read_text(encoding="utf-8"))
    for benchmark in report["benchmarks"]:
        if benchmark.get("axis"):
            target = file.with_name(f"{file.stem}_{benchmark['name']}.png")
            draw(benchmark, report["environment"]["device"], target)
            print(target)


if __name__ == "__main__":
    main()
