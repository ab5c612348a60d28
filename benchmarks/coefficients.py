"""Time of both ways through the head against the share f of tokens that have a coefficient.

python -m benchmarks.coefficients [--out FILE.json]

All tokens need the product of the statistics, 2 N H V floating-point operations, and those with a coefficient two
gradient products: the bare products are one of N tokens and two of f N. Each loss runs in turns with them, and with
the same loss where all tokens have a coefficient. The device has work before each call, as it has in a
training step; in a column of its own it is idle, and waits until the host has launched the first product.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare import AHEAD_CYCLES
from benchmarks.measure import save
from liger_losses import LigerFusedLinearGRPOLoss, linear_logps

SHARES = (1.0, 0.8, 0.5, 0.2)
SHAPES = ((8192, 4096, 128256), (8192, 2048, 151936))
COMPLETIONS = 128


def timed(run: Callable[[], object], device: torch.device, idle: bool = False) -> float:
    """Milliseconds on the device, the host's wait included; on an ``idle`` one, the host's first launches too."""
    if device.type != "cuda":
        run()
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    if idle:  # after as long a pause, in which the card cools
        torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def losses(hidden: Tensor, weight: Tensor, labels: Tensor, share: float) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute a loss, of which the given share of the tokens has a gradient."""
    n, device, g = len(labels), labels.device, torch.Generator(labels.device).manual_seed(1)
    upstream = torch.randn(n, device=device, generator=g)
    upstream[torch.randperm(n, device=device, generator=g)[round(share * n) :]] = 0.0
    ids, size = labels.view(COMPLETIONS, -1), (COMPLETIONS, n // COMPLETIONS)
    advantages = torch.randn(COMPLETIONS, device=device, generator=g)
    advantages[round(share * COMPLETIONS) :] = 0.0
    mask, grpo = torch.ones(size, device=device), LigerFusedLinearGRPOLoss(beta=0.0)
    states = hidden.view(*size, -1)
    return {
        "linear_logps": lambda: (linear_logps(hidden, weight, labels) * upstream).sum(),
        "GRPO": lambda: grpo(states, weight, ids, mask, advantages, num_items_in_batch=n)[0],
    }


def products(hidden: Tensor, weight: Tensor, share: float) -> Callable[[], None]:
    """The bare products, one after another; the operands of the gradient products are logits."""
    logits, count = hidden.detach() @ weight.detach().t(), round(share * len(hidden))
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)

    @torch.no_grad()
    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits[:count], weight, out=of_hidden[:count])
        torch.mm(logits[:count].t(), hidden[:count], out=of_weight)

    return run


def measure(shape: tuple[int, int, int], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each share and loss."""
    n, h, v = shape
    g = torch.Generator(device).manual_seed(0)
    hidden, weight = (
        torch.randn(size, h, device=device, generator=g).mul_(scale).to(torch.bfloat16).requires_grad_()
        for size, scale in ((n, 1.0), (v, h**-0.5))
    )
    labels = torch.randint(v, (n,), device=device, generator=g)
    rows, whole = [], losses(hidden, weight, labels, 1.0)
    for share in SHARES:
        for name, loss in losses(hidden, weight, labels, share).items():

            def both_ways(loss: Callable[[], Tensor]) -> None:
                hidden.grad = weight.grad = None
                loss().backward()

            # The card's clock falls with what it does: the products take turns with the losses.
            runs = {"left out": partial(both_ways, loss), "all": partial(both_ways, whole[name])}
            runs |= {"idle": runs["left out"], "products": products(hidden, weight, share)}
            times: dict[str, list[float]] = {name: [] for name in runs}
            for i in range(rounds + 2):
                for key in [*runs][:: 1 if i % 2 else -1]:
                    times[key].append(timed(runs[key], device, idle=key == "idle"))
            found = {key: median(values[2:]) for key, values in times.items()}
            rows.append({"shape": shape, "share": share, "loss": name, "rounds": times, **found})
            print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    skipped, whole, bare = row["left out"], row["all"], row["products"]
    ratios = f"{skipped / bare:5.3f} of the products, {whole / skipped:5.3f} times as fast" if bare and skipped else ""
    return (
        f"{' x '.join(map(str, row['shape'])):22} f {row['share']:3}  {row['loss']:12} left out {skipped:7.3f} ms  "
        f"all {whole:7.3f} ms  products {bare:7.3f} ms  {ratios}, on an idle device {row['idle']:7.3f} ms"
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = ((256, 32, 512),) if options.tiny else SHAPES
    rows = [row for shape in shapes for row in measure(shape, options.rounds, device)]
    if options.out:
        save(options.out, device, rows, __doc__, map(line, rows))


if __name__ == "__main__":
    main()
