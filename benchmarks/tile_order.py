"""How many row tiles walk the vocabulary together in the kernels for Hopper GPUs: whole calls over bare products.

``python -m benchmarks.tile_order [--rounds 6] [--out FILE.json]``; needs a Hopper GPU. Each order of tiles and the
products take turns, because a GPU's clock falls under load.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import environment
from liger_losses import LigerFusedLinearCrossEntropyLoss
from liger_losses.kernels import hopper_pipeline

#: Tokens, hidden size, vocabulary size.
SIZES = [
    (4096, 2048, 128256), (16384, 2048, 128256), (4096, 4096, 128256), (16384, 4096, 128256), (8192, 3072, 128256),
    (4096, 1024, 151936), (16384, 576, 49152), (8192, 5120, 131072), (12000, 2304, 256000), (1500, 4096, 128256),
]  # fmt: skip
ORDERS = (8, 4, 2)
#: Rows of the products at a time, whose result is kept in bf16.
ROWS = 2048


def use(group: int) -> None:
    hopper_pipeline.GROUP = group
    hopper_pipeline._group_of_stores = lambda device: group  # type: ignore[assignment]


def milliseconds(call: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def measure(tokens: int, hidden_size: int, vocab_size: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the products both ways and forward, and the ratios of each order."""
    torch.manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, hidden_size, **kind, requires_grad=True)  # type: ignore[call-overload]
    weight = (torch.randn(vocab_size, hidden_size, **kind) * hidden_size**-0.5).requires_grad_()  # type: ignore[call-overload]
    labels = torch.randint(vocab_size, (tokens,), device="cuda")
    loss = LigerFusedLinearCrossEntropyLoss()
    h, w = hidden.detach(), weight.detach()
    logits = h.new_empty(min(ROWS, tokens), vocab_size)
    grad_hidden, grad_weight = torch.empty_like(h), torch.empty_like(w)

    def products(both: bool) -> None:
        for part, grad in zip(h.split(ROWS), grad_hidden.split(ROWS), strict=True):
            out = logits[: len(part)]
            torch.mm(part, w.t(), out=out)
            if both:
                torch.mm(out, w, out=grad)
                torch.mm(out.t(), part, out=grad_weight)

    def ours(both: bool) -> None:
        hidden.grad = weight.grad = None
        with torch.set_grad_enabled(both):
            value = loss(weight, hidden, labels)
        if both:
            value.backward()  # type: ignore[union-attr]

    found: dict[str, float] = {}
    for both, name in ((True, "both ways"), (False, "forward")):
        repeats = max(1, round(2e13 / ((6 if both else 2) * tokens * hidden_size * vocab_size)))
        taken: dict[int, list[float]] = {order: [] for order in (0, *ORDERS)}
        for turn in range(rounds + 1):
            for order in taken:
                use(order or ORDERS[0])
                call = ours if order else products
                spent = milliseconds(partial(call, both), repeats)
                if turn:  # the first one compiles
                    taken[order].append(spent)
        base = statistics.median(taken.pop(0))
        found[f"products {name}, ms"] = round(base, 3)
        found |= {f"{name}, {order}": round(statistics.median(spent) / base, 3) for order, spent in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, object] = {"environment": environment(torch.device("cuda"))}
    for size in SIZES:
        results[" x ".join(map(str, size))] = found = measure(*size, options.rounds)
        print(*size, found, flush=True)
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
