"""Losses over a grid of tokens and heads: time over the bare products', one line a provider.

``python -m benchmarks.grid [--tokens 256 4096] [--heads 0] [--rounds 3] [--out FILE.json]``; needs a GPU. It takes the
tasks and providers of :mod:`benchmarks.small_calls`, and liger-kernel and TRL where they are installed. With ``--out``,
a table and a picture are written beside the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.entries import TRL_CHUNK
from benchmarks.measure import release, save
from benchmarks.small_calls import MASKED, TINY, Inputs, milliseconds, tasks

TOKENS = (128, 256, 512, 1024, 4096, 16384)
#: Hidden size and vocabulary size.
HEADS = (
    (576, 49152),
    (1024, 151936),
    (2048, 128256),
    (3072, 128256),
    (4096, 128256),
    (5120, 131072),
    (2304, 256000),
)
TASKS = ("cross-entropy", "log-probs, forward")


def peers() -> dict[str, dict[str, Any]]:
    """By task, a function of hidden states, weight and labels of each other library that is installed."""
    found: dict[str, dict[str, Any]] = {name: {} for name in TASKS}
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        found["cross-entropy"]["liger-kernel"] = lambda h, w, y: loss(w, h, y)
    except ImportError:
        pass
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ImportError:
        return found

    def logps(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        active = y != -100  # TRL's trainers drop the others, as this does
        return ChunkedLogProbFunction.apply(h[active], w, None, y[active], 1.0, TRL_CHUNK, None, 1.0, ())[0]

    found["cross-entropy"]["TRL"] = lambda h, w, y: -logps(h, w, y).mean()
    found["log-probs, forward"]["TRL"] = logps
    return found


def line(row: dict[str, Any]) -> str:
    """One cell: the products' time, and each provider's over it."""
    found, size = row["milliseconds"], " x ".join(map(str, row["shape"]))
    over = "  ".join(f"{n} {t / found['products']:5.2f}" for n, t in found.items() if n != "products")
    rivals = [found[name] for name in ("plain", "torch.compile") if name in found]
    behind = f"  ours over the faster of plain and torch.compile {found['ours'] / min(rivals):.2f}" if rivals else ""
    return f"{row['task']:20} {size:22} products {found['products']:7.3f} ms  {over}{behind}"


def draw(rows: list[dict[str, Any]], device: str, file: Path) -> None:
    """Time over products against tokens: one panel for each task and head, one line a provider."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heads = list(dict.fromkeys(tuple(row["shape"][1:]) for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row["milliseconds"] if name != "products"))
    kinds = [task for task in TASKS if any(row["task"] == task for row in rows)]
    size = (3.2 * len(heads), 3.2 * len(kinds))
    figure, panels = pyplot.subplots(len(kinds), len(heads), figsize=size, layout="constrained", squeeze=False)
    for i, task in enumerate(kinds):
        for j, head in enumerate(heads):
            panel, chosen = panels[i][j], [r for r in rows if r["task"] == task and tuple(r["shape"][1:]) == head]
            for number, name in enumerate(names):
                found = [(r["shape"][0], r["milliseconds"]) for r in chosen if name in r["milliseconds"]]
                points = [(tokens, times[name] / times["products"]) for tokens, times in found]
                if points:
                    ours = name == "ours"
                    panel.plot(*zip(*points, strict=True), marker="o" if ours else ".", lw=2.2 if ours else 1.2,
                               color=f"C{number}", label=name)  # fmt: skip
            panel.set(xscale="log", yscale="log", ylim=(0.7, None), title=f"{task}, {head[0]} x {head[1]}")
            panel.set_xscale("log", base=2)
            panel.grid(alpha=0.3)
            panel.title.set_fontsize(8)
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
    parser.add_argument("--tasks", nargs="*", default=TASKS, choices=TASKS)
    parser.add_argument(
        "--without", nargs="*", default=(), help="providers that are left out: torch.compile takes long"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draw", action="store_true", help="only draw the rows of the file")
    parser.add_argument("--tiny", action="store_true", help="one tiny cell on the CPU, to see that everything runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.draw:
        made = json.loads(options.out.read_text())
        return draw(made["rows"], made["environment"]["device"], options.out.with_suffix(".png"))
    device, rows = torch.device("cpu" if options.tiny else "cuda"), list[dict[str, Any]]()
    others = {} if options.tiny else peers()
    cells = [(tokens, *HEADS[i]) for i in options.heads for tokens in options.tokens]
    for shape in [TINY] if options.tiny else cells:
        torch._dynamo.reset()
        for task, calls in tasks(Inputs(*shape, device.type), ["liger_losses"], others).items():
            if task not in options.tasks:
                continue
            chosen = {name: call for name, call in calls.items() if name not in options.without}
            found = {name: round(ms, 3) for name, ms in milliseconds(chosen, options.rounds).items()}
            rows.append({"task": task, "shape": shape, "masked": MASKED, "milliseconds": found})
            print(line(rows[-1]), flush=True)
        release(device)
        if options.out:
            save(options.out, device, rows, __doc__, map(line, rows))
    if options.out:
        name = "CPU" if options.tiny else torch.cuda.get_device_name()
        draw(rows, name, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
