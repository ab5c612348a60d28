"""Losses over a grid of tokens and heads: time over the bare products', one line a provider, and a picture.

``python -m benchmarks.grid [--tokens 1024 4096] [--heads 0] [--without PROVIDERS] [--rounds 5] [--out FILE.json]``. A
quarter of the tokens is masked; the products are those of the others.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.entries import GEMMS, Shape
from benchmarks.measure import release, save
from benchmarks.run import BENCHMARKS, measure, sizes

TOKENS = (256, 1024, 4096, 16384)
#: Hidden size and vocabulary size.
HEADS = ((576, 49152), (2048, 128256), (4096, 128256))
#: By the name of the benchmark.
TASKS = {"cross_entropy": "cross-entropy", "logps_no_grad": "log-probs, forward"}
PROVIDERS = (GEMMS, "plain torch", "torch.compile", "liger-kernel", "TRL", "ours")


def line(row: dict[str, Any]) -> str:
    """One cell: the products' time, and each provider's over it."""
    over = "  ".join(f"{name} {ratio:5.2f}" for name, ratio in row["over_products"].items())
    return f"{row['task']:20} {row['size']:22} products {row['products_ms']:8.3f} ms  {over}"


def draw(rows: list[dict[str, Any]], device: str, file: Path) -> None:
    """Time over products against tokens: one panel for each task and head, one line a provider."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heads = list(dict.fromkeys((row["shape"]["hidden"], row["shape"]["vocab"]) for row in rows))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    size = (3.2 * len(heads), 3.2 * len(tasks))
    figure, panels = pyplot.subplots(len(tasks), len(heads), figsize=size, layout="constrained", squeeze=False)
    for i, task in enumerate(tasks):
        for panel, (hidden, vocab) in zip(panels[i], heads, strict=True):
            some = [
                r for r in rows if r["task"] == task and (r["shape"]["hidden"], r["shape"]["vocab"]) == (hidden, vocab)
            ]
            for number, name in enumerate(PROVIDERS[1:]):
                points = [(r["shape"]["tokens"], r["over_products"][name]) for r in some if name in r["over_products"]]
                if points:
                    width = 2.2 if name == "ours" else 1.2
                    panel.plot(*zip(*points, strict=True), marker=".", lw=width, color=f"C{number}", label=name)
            panel.set(xscale="log", yscale="log", ylim=(0.9, None))
            panel.set_title(f"{task}, {hidden} x {vocab}", fontsize=8)
            panel.set_xscale("log", base=2)
            panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=7)
    figure.supxlabel("tokens, a quarter of them masked", fontsize=9)
    figure.supylabel("time over the bare products", fontsize=9)
    figure.suptitle(device, fontsize=9)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Print a line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--heads", type=int, nargs="*", default=range(len(HEADS)), help="which, from 0")
    parser.add_argument("--without", nargs="*", default=(), help="providers; torch.compile takes long")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="one tiny cell, on a CPU too: to see that everything runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, rows = torch.device("cuda" if torch.cuda.is_available() else "cpu"), list[dict[str, Any]]()
    cells = [Shape(tokens, *HEADS[i], masked=0.25) for i in options.heads for tokens in options.tokens]
    for shape in [Shape(64, 32, 512, masked=0.25)] if options.tiny else cells:
        for benchmark in (benchmark for benchmark in BENCHMARKS if benchmark.name in TASKS):
            wanted = set(PROVIDERS) - set(options.without)
            providers = {name: made for name, made in benchmark.providers.items() if name in wanted}
            results = {
                r.provider: r for r in measure(replace(benchmark, providers=providers), shape, device, options.rounds)
            }
            over = {name: row.ratio for name, row in results.items() if row.ratio is not None and name != GEMMS}
            cell = {"task": TASKS[benchmark.name], "size": sizes(shape), "products_ms": results[GEMMS].median_ms}
            kept = {**asdict(shape), "dtype": str(shape.dtype)}
            rows.append(cell | {"over_products": over, "shape": kept, "rows": [vars(row) for row in results.values()]})
            print(line(rows[-1]), flush=True)
        release(device)
        if options.out:
            save(options.out, device, rows, map(line, rows))
    if options.out:
        draw(rows, torch.cuda.get_device_name() if device.type == "cuda" else "CPU", options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
