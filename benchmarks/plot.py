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


#: The lines of the README's picture: a provider, its name there, and its colour.
README_LINES = (("plain", "plain", "0.55"), ("liger-kernel", "liger-kernel", "C0"), ("ours", "liger_losses", "C3"))


def draw_for_readme(benchmark: dict[str, Any], device: str, file: Path) -> None:
    """Tokens per second and memory of training steps by the length of the sequence, on linear scales."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times, memory = series(benchmark, "median_ms"), series(benchmark, "peak_gib")
    figure, (speed, peak) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for provider, name, colour in README_LINES:
        style = {"color": colour, "marker": "o", "linewidth": 2.4 if provider == "ours" else 1.6}
        lengths = [tokens for tokens, _ in times[provider]]
        speed.plot(lengths, [tokens / ms for tokens, ms in times[provider]], label=name, **style)
        peak.plot(lengths, [gib for _, gib in memory[provider]], label=name, **style)
    speed.set(title="Thousand tokens per second (higher is better)", ylim=0)
    peak.set(title="Peak memory, GiB (lower is better)", ylim=0)
    for panel in (speed, peak):
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [f"{tokens // 1024}k" for tokens in lengths])
        panel.set_xlabel("tokens in the sequence")
        panel.grid(alpha=0.3)
    peak.legend(loc="upper left")
    title = benchmark["title"].replace("checkpointed", "gradient checkpointing")
    figure.suptitle(f"Training steps of {title}; one {device}", fontsize=10)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Draw every benchmark of the file that varies one size, beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--readme", action="store_true", help="the README's picture, of benchmarks.long_context's file")
    options = parser.parse_args()
    file = options.file
    report = json.loads(file.read_text(encoding="utf-8"))
    if options.readme:
        draw_for_readme(report["benchmarks"][0], report["environment"]["device"], file.with_name("readme.png"))
        return
    for benchmark in report["benchmarks"]:
        if benchmark.get("axis"):
            target = file.with_name(f"{file.stem}_{benchmark['name']}.png")
            draw(benchmark, report["environment"]["device"], target)
            print(target)


if __name__ == "__main__":
    main()
