"""Where a GPU's time goes, by kind of kernel: `python -m benchmarks.breakdown [NAMES...]`."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.entries import GEMMS
from benchmarks.measure import Call, environment, milliseconds, release
from benchmarks.run import BENCHMARKS, sizes
from benchmarks.timeline import kernels_of

#: The first that occurs in a kernel's name; kernels run beside products only count where nothing above them runs.
KINDS = {
    "softmax in a product (Triton)": ("_exponentials_kernel", "_linear_statistics_kernel"),
    "products (cuBLAS)": ("nvjet", "gemm", "cutlass", "splitKreduce"),
    "everything else": ("",),
}


def spans(call: Call) -> list[tuple[int, int, str]]:
    """`(start, stop, kind)` in ns of each kernel and copy of one call."""
    kinds = KINDS.items()
    return [
        (kernel.start, kernel.stop, next(kind for kind, words in kinds if any(word in kernel.name for word in words)))
        for kernel in kernels_of(call)
    ]


def breakdown(call: Call) -> dict[str, float]:
    """ms in which each kind runs and none before it in :data:`KINDS`, and in which nothing runs."""
    events = spans(call)
    moments = sorted({t for start, stop, _ in events for t in (start, stop)})
    total = dict.fromkeys([*KINDS, "idle"], 0.0)
    active: list[tuple[int, int, str]] = []
    waiting = iter([*events, (moments[-1] + 1, 0, "")])
    following = next(waiting)
    for start, stop in pairwise(moments):
        while following[0] <= start:
            active.append(following)
            following = next(waiting)
        active = [event for event in active if event[1] > start]
        running = {kind for _, _, kind in active}
        total[next((kind for kind in KINDS if kind in running), "idle")] += (stop - start) / 1e6
    return total


def main() -> None:
    """Print a line per shape and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["cross_entropy", "logps", "frozen_head"])
    parser.add_argument("--out", type=Path, help="where to write JSON")
    options = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for benchmark in BENCHMARKS:
        if benchmark.name not in options.names:
            continue
        print(f"{benchmark.name:14} {'N x H x V':22} {'ms':>7} {'GEMMs':>7}  " + "  ".join([*KINDS, "idle"]))
        for shape in benchmark.shapes["cuda"]:
            inputs = benchmark.inputs(shape, device)
            ours, gemms = (benchmark.providers[name](inputs) for name in ("ours", GEMMS))
            times = [sorted(milliseconds(call, device) for _ in range(3))[1] for call in (ours, gemms)]
            parts = breakdown(ours)
            rows.append(
                {"benchmark": benchmark.name, "shape": sizes(shape), "ms": times[0], "gemms": times[1], **parts}
            )
            numbers = "  ".join(f"{value:{len(name)}.2f}" for name, value in parts.items())
            print(f"{'':14} {sizes(shape):22} {times[0]:7.2f} {times[1]:7.2f}  {numbers}", flush=True)
            del inputs, ours, gemms
            release(device)
    if options.out:
        options.out.write_text(json.dumps({"environment": environment(device), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
