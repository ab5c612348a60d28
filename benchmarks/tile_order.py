"""The product with exponentials by each kernel and order of tiles, checked, and timed in turns with cuBLAS's product.

``python -m benchmarks.tile_order [--rounds 4] [--seconds 150] [--losses] [--out FILE.json]``; needs a Hopper GPU,
because a GPU without groups of warps has one kernel. Each candidate's exponentials and statistics are compared with
fp64 once; each line of the table has the medians of a size over cuBLAS's, with exponentials stored and added up alone.

With ``--losses``, cross-entropy is timed both ways with some of the orders, in turns with its bare products: between
products of gradients, the card's clock is lower, and kernels that need less bandwidth are faster. The labels are
prefetched, as a patched model does, and the device has work before each call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.coefficients import products, timed
from benchmarks.measure import environment
from liger_losses import LigerFusedLinearCrossEntropyLoss
from liger_losses.kernels import linear_exp
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.reading import ask_about_labels
from liger_losses.kernels.targets import Order

HIDDEN_SIZES, TOKENS, VOCABULARIES = (4096, 2048, 896, 3072, 5120, 576), (4096, 16384, 1024), (128256, 151936, 32000)
#: Of a check: tokens, hidden size, vocabulary; many tiles, and none of them whole.
CHECKED = (1500, 1032, 9000)
#: Multiplications of one measurement, at least.
WORK = 2e12


#: The order that the library chooses, and those that it might choose. Other numbers of row tiles have no sums of all
#: tiles of a group of warps.
CANDIDATES: dict[str, Order | None] = {
    "chosen": None,
    **{f"turn {together}": Order(True, together) for together in (2, 4, 8, 12)},
    **{f"turn {together}t": Order(True, together, of_tiles=True) for together in (4, 8, 16, 33, 66)},
    **{f"whole {together}": Order(False, together) for together in (2, 4, 8, 16, 33)},
}
#: Of losses: which of them, and the sizes.
IN_LOSSES = ("chosen", "turn 4", "whole 33")
LOSSES = [
    (tokens, hidden_size, vocab_size)
    for tokens in (16384, 4096)
    for hidden_size, vocab_size in ((2048, 128256), (2560, 151936), (3072, 128256), (4096, 128256), (5120, 131072))
] + [(1024, 4096, 128256), (1024, 5120, 131072)]


@contextmanager
def using(order: Order | None) -> Iterator[None]:
    """Take the tiles of all products in this order; ``None``: in the library's."""
    kept: Any = linear_exp.order_of
    linear_exp.order_of = kept if order is None else lambda *given: order
    try:
        yield
    finally:
        linear_exp.order_of = kept


def problem(tokens: int, hidden_size: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a head, labels and the labels' logits."""
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device="cuda", generator=g).bfloat16()
    weight = torch.randn(vocab_size, hidden_size, device="cuda", generator=g).bfloat16() * hidden_size**-0.5
    labels = torch.randint(vocab_size, (tokens,), device="cuda", generator=g)
    return hidden, weight, labels, (hidden * weight[labels]).float().sum(1)


def run(inputs: tuple[Tensor, Tensor, Tensor, Tensor], out: Tensor | None, found: Exponentials) -> None:
    hidden, weight, labels, label_logit = inputs
    linear_exponentials(hidden, weight, labels, out, found=found, label_logit=label_logit, backend="triton")


def check(order: Order | None) -> str:
    """An empty text, or what is wrong: values against fp64, bits of repeated calls."""
    tokens, hidden_size, vocab_size = CHECKED
    hidden, weight, labels, _ = problem(tokens, hidden_size, vocab_size)
    z = hidden.double() @ weight.double().t()
    label_logit = z.gather(1, labels[:, None])[:, 0]
    e = (z - label_logit[:, None]).exp().scatter(1, labels[:, None], 0.0)
    exact = {"lse": z.logsumexp(1), "logp": label_logit - z.logsumexp(1)}
    wrong, runs = [], list[Tensor]()
    for stored in (True, False, True):
        out = torch.full((tokens, vocab_size), float("nan"), dtype=torch.bfloat16, device="cuda") if stored else None
        found = Exponentials.into({"lse": torch.full((tokens,), float("nan"), device="cuda")})
        with using(order):
            run((hidden, weight, labels, label_logit.float()), out, found)
        for name, values in exact.items():
            if not (getattr(found, name) - values).abs().max() < 2e-5:
                wrong.append(f"{name}, stored: {stored}")
        if out is not None:
            runs += [out, found.lse]
            if not ((out - e).abs() <= 8e-3 * (e + 1e-3)).all():
                wrong.append("exponentials")
    if not all(torch.equal(a, b) for a, b in zip(runs[:2], runs[2:], strict=True)):
        wrong.append("other bits in the second run")
    return "; ".join(wrong)


def milliseconds(call: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def measure(tokens: int, hidden_size: int, vocab_size: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of cuBLAS's product, and the ratios of each candidate, stored and alone."""
    inputs = problem(tokens, hidden_size, vocab_size)
    out = torch.empty(tokens, vocab_size, dtype=torch.bfloat16, device="cuda")
    found = Exponentials.into({"lse": torch.empty(tokens, device="cuda")})
    times = max(1, round(WORK / (2 * tokens * hidden_size * vocab_size)))
    product = partial(torch.mm, inputs[0], inputs[1].t(), out=out)
    taken, names = dict[tuple[bool, str], list[float]](), [*CANDIDATES]
    of_product = list[float]()
    milliseconds(product, times)
    for turn in range(rounds):
        # The order of a round is turned, because a product finds the clock that those before it leave.
        for number in range(len(CANDIDATES)):
            name = names[(number + turn * 5) % len(names)]
            if number % 5 == 0:
                of_product.append(milliseconds(product, times))
            for stored in (True, False):
                with using(CANDIDATES[name]):
                    spent = milliseconds(partial(run, inputs, out if stored else None, found), times)
                taken.setdefault((stored, name), []).append(spent)
    base = statistics.median(of_product)
    ratios = {kind: round(statistics.median(spent) / base, 3) for kind, spent in taken.items()}
    return {
        "cuBLAS, ms": round(base, 3),
        "cuBLAS, spread": round((max(of_product) - min(of_product)) / base, 3),
        "stored": {name: ratio for (stored, name), ratio in ratios.items() if stored},
        "alone": {name: ratio for (stored, name), ratio in ratios.items() if not stored},
    }


def of_losses(tokens: int, hidden_size: int, vocab_size: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of the bare products of a cross-entropy, and the ratios of the whole of it with each order."""
    hidden, weight, labels, _ = problem(tokens, hidden_size, vocab_size)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    loss = LigerFusedLinearCrossEntropyLoss()

    def both_ways(order: Order | None) -> None:
        hidden.grad = weight.grad = None
        with using(order):
            loss(weight, hidden, labels).backward()

    runs: dict[str, Callable[[], object]] = {"products": products(hidden, weight, 1.0)}
    runs |= {name: partial(both_ways, CANDIDATES[name]) for name in IN_LOSSES}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for number in range(len(runs)):
            name = [*runs][(number + turn) % len(runs)]
            ask_about_labels(labels)
            taken[name].append(timed(runs[name], hidden.device))
    found = {name: statistics.median(spent[2:]) for name, spent in taken.items()}
    base = found.pop("products")
    return {"products, ms": round(base, 3), **{name: round(spent / base, 3) for name, spent in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no further size after so many")
    parser.add_argument("--losses", action="store_true", help="time cross-entropy instead of one product")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begun = time.perf_counter()
    properties: Any = torch.cuda.get_device_properties("cuda")
    told = ("memory_clock_rate", "memory_bus_width", "L2_cache_size", "multi_processor_count", "clock_rate")
    results: dict[str, Any] = {
        "environment": environment(torch.device("cuda")),
        "properties": {name: getattr(properties, name, None) for name in told},
        "checks": {} if options.losses else {name: check(order) or "right" for name, order in CANDIDATES.items()},
    }
    print(results["properties"], results["checks"], f"{time.perf_counter() - begun:.0f} s", flush=True)
    for size_of_loss in LOSSES if options.losses else ():
        size = "cross-entropy " + " x ".join(map(str, size_of_loss))
        results[size] = found = of_losses(*size_of_loss, options.rounds)
        print(f"{size:34}", *[f"{name} {value}" for name, value in found.items()], sep="  ", flush=True)
        torch.cuda.empty_cache()
    if options.losses:
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
        return
    print("ratios to cuBLAS's product:", *CANDIDATES, sep="  ")
    for vocab_size, tokens, hidden_size in itertools.product(VOCABULARIES, TOKENS, HIDDEN_SIZES):
        if time.perf_counter() - begun > options.seconds:
            print("out of time")
            break
        size = f"{tokens} x {hidden_size} x {vocab_size}"
        results[size] = found = measure(tokens, hidden_size, vocab_size, options.rounds)
        for kind in ("stored", "alone"):
            ratios = " ".join(f"{found[kind][name]:.2f}" for name in CANDIDATES)
            print(f"{size} {kind:6} {found['cuBLAS, ms']:7.3f} ms  {ratios}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
