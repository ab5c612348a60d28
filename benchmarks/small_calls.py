"""Losses of few tokens: calls queued one after another, as the host's time counts there; time over products.

``python -m benchmarks.small_calls [--other FOLDER] [--rounds 7] [--out FILE.json]``; needs a GPU. FOLDER holds a
``liger_losses`` package of another commit. Products are the bare matrix products of the same sizes: one forward, three
both ways. All providers take turns within a round; medians of the rounds count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.compare import OTHER, import_other, importer
from benchmarks.measure import environment

SHAPES = [
    (64, 576, 49152),
    (256, 576, 49152),
    (1024, 576, 49152),
    (4096, 576, 49152),
    (512, 2048, 151936),
    (256, 2048, 128256),
    (1024, 2048, 128256),
    (2048, 1024, 32000),
    (256, 4096, 128256),
    (512, 4096, 128256),
]
#: Calls that are queued before the host waits: fewer, where they take longer.
QUEUED, QUEUED_SECONDS = 12, 0.1
MASKED = 0.25

Call = Callable[[], Any]


def tasks(
    tokens: int, hidden_size: int, vocab_size: int, packages: list[str], peers: Mapping[str, Mapping[str, Any]] = {}
) -> dict[str, dict[str, Call]]:
    """By task and provider, what is timed. ``peers`` are functions of hidden states, weight and labels."""
    weight = (torch.randn(vocab_size, hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(vocab_size, (tokens,), device="cuda")
    labels[: int(tokens * MASKED)] = -100
    upstream, logits = torch.randn(tokens, device="cuda"), torch.empty(tokens, vocab_size, dtype=torch.bfloat16).cuda()

    def plain_cross_entropy(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((h @ w.t()).float(), y)

    def plain_logps(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        found = (h @ w.t()).float().log_softmax(-1).gather(-1, y.clamp(min=0)[:, None])[:, 0]
        return torch.where(y != -100, found, 0.0)

    def both_ways(function: Callable[[Tensor, Tensor, Tensor], Tensor], gradient: Tensor | None = None) -> Call:
        def call() -> None:
            function(hidden, weight, labels).backward(gradient)
            hidden.grad = weight.grad = None

        return call

    def forward(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
        @torch.no_grad()
        def call() -> None:
            function(hidden, weight, labels)

        return call

    def products(backward: bool) -> Call:
        @torch.no_grad()
        def call() -> None:
            hidden @ weight.t()
            if backward:
                _ = logits @ weight, logits.t() @ hidden

        return call

    torch._dynamo.reset()
    compiled = torch.compile(plain_cross_entropy), torch.compile(plain_logps)
    found = {
        "cross-entropy": {"products": products(True), "plain": both_ways(plain_cross_entropy)},
        "log-probs": {"products": products(True), "plain": both_ways(plain_logps, upstream)},
        "log-probs, forward": {"products": products(False), "plain": forward(plain_logps)},
    }
    found["cross-entropy"]["torch.compile"] = both_ways(compiled[0])
    found["log-probs"]["torch.compile"] = both_ways(compiled[1], upstream)
    found["log-probs, forward"]["torch.compile"] = forward(compiled[1])
    for package in packages:
        name, load = "other" if package == OTHER else "ours", importer(package)
        loss, logps = load(":LigerFusedLinearCrossEntropyLoss")(), load(":linear_logps")
        found["cross-entropy"][name] = both_ways(lambda h, w, y, loss=loss: loss(w, h, y))  # type: ignore[misc]
        found["log-probs"][name] = both_ways(logps, upstream)
        found["log-probs, forward"][name] = forward(logps)
    for task, functions in peers.items():
        for name, function in functions.items():
            found[task][name] = forward(function) if task.endswith("forward") else both_ways(function)
    return found


def _has_room(call: Call) -> bool:
    try:
        call()
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def milliseconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """The median time of a call of each provider, in turns; of those that have room."""
    calls = {name: call for name, call in calls.items() if _has_room(call)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):  # the first compiles
        for name in list(calls)[:: -1 if round_ % 2 else 1]:
            calls[name]()
            torch.cuda.synchronize()
            start = time.perf_counter()
            calls[name]()
            torch.cuda.synchronize()
            queued = max(2, min(QUEUED, int(QUEUED_SECONDS / (time.perf_counter() - start))))
            start = time.perf_counter()
            for _ in range(queued):
                calls[name]()
            torch.cuda.synchronize()
            if round_:
                times[name].append((time.perf_counter() - start) / queued * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Print a line for each task and shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--first", type=int, help="only so many shapes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    packages = ["liger_losses"]
    if options.other is not None:
        import_other(options.other)
        packages.append(OTHER)
    rows = []
    for shape in SHAPES[: options.first]:
        for task, calls in tasks(*shape, packages).items():
            found = milliseconds(calls, options.rounds)
            rows.append({"task": task, "shape": shape, "milliseconds": {n: round(t, 3) for n, t in found.items()}})
            over = "  ".join(f"{n} {t / found['products']:5.2f}" for n, t in found.items() if n != "products")
            size = " x ".join(map(str, shape))
            print(f"{task:20} {size:20} products {found['products']:6.3f} ms  {over}", flush=True)
    if options.out:
        text = {"environment": environment(torch.device("cuda")), "masked": MASKED, "rows": rows}
        options.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
