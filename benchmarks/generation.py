"""Greedy generation of patched models: milliseconds of a new token, which the host decides.

python -m benchmarks.generation [--modules] [--launches] [--only NAME] [--out FILE.json]

The models have real shapes and random weights, in bf16. All providers take turns in one process, each on a copy of the
model; medians of the rounds count. Whether they choose the same tokens is found in fp32, as ties in bf16 are decided by
rounding. With ``--modules``, the library's kinds of modules are patched one at a time, too. With ``--launches``, the
launches of a token are counted at the end: a profiler makes what is launched afterwards slower.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.grpo_steps import timed
from benchmarks.measure import save
from benchmarks.models import MODELS, build

NAMES = ("Llama-3.2-1B", "Qwen3-0.6B")
BATCHES = (1, 16)
PROMPT, NEW, COMPARED = 64, 48, 16
KINDS = ("norms", "mlps", "rope", "loss_head")


class Patched:
    """A copy of a model as a provider patches it, and the names of its file that the provider replaces."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.model = name, copy.deepcopy(model)
        self.file = vars(sys.modules[type(model).__module__])
        before = dict(self.file)
        if name == "liger-kernel":
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=self.model)
        elif name != "plain":
            from liger_losses import patch

            kinds = {kind: name in ("ours", f"ours, {kind}") for kind in KINDS}
            patch(self.model, **kinds)
        self.replaced = {key: value for key, value in self.file.items() if value is not before.get(key)}
        self.file.update(before)

    @contextmanager
    def in_place(self) -> Iterator[Any]:
        """The model, with what its provider replaces in its file, which all models share."""
        before = {key: self.file[key] for key in self.replaced}
        self.file.update(self.replaced)
        try:
            yield self.model
        finally:
            self.file.update(before)


def generate(patched: Patched, ids: Tensor, new: int) -> Tensor:
    """The tokens that greedy generation adds; the mask is given, so that nothing is looked for in the ids."""
    with patched.in_place() as model:
        found: Tensor = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new,
            max_new_tokens=new,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
    return found[:, ids.shape[1] :]


def launches(patched: Patched, ids: Tensor) -> float:
    """Kernels and copies of a new token."""

    def events(new: int) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            generate(patched, ids, new)
            torch.cuda.synchronize()
        on_device = torch.autograd.DeviceType.CUDA
        return sum(event.count for event in profiler.key_averages() if event.device_type == on_device)

    return (events(5) - events(1)) / 4


def every(name: str, providers: list[str], device: torch.device) -> list[Patched]:
    """A copy of a model for each provider."""
    model = build(name, device).eval()
    model.config.use_cache = True
    return [Patched(provider, model) for provider in providers]


def prompt(name: str, batch: int, device: torch.device) -> Tensor:
    """Random tokens."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(2, MODELS[name][1]["vocab_size"], (batch, PROMPT), device=device, generator=generator)


def measure(name: str, providers: list[str], rounds: int, new: int, device: torch.device) -> list[dict[str, Any]]:
    """One row for each batch size."""
    rows, models = [], every(name, providers, device)
    for batch in BATCHES:
        ids = prompt(name, batch, device)
        for patched in models:
            generate(patched, ids, 2)  # compiles
        gc.collect()
        gc.freeze()  # to look through all that was imported takes longer than a token
        times: dict[str, list[float]] = {patched.name: [] for patched in models}
        for patched in [p for i in range(rounds) for p in models[:: -1 if i % 2 else 1]]:
            times[patched.name].append(timed(lambda p=patched, x=ids: generate(p, x, new), device) / new)
        medians = {provider: round(median(found), 3) for provider, found in times.items()}
        rows.append({"model": name, "batch": batch, "milliseconds": medians, "rounds": times})
    gc.unfreeze()
    for patched in models:
        patched.model.float()
    for row in rows:
        tokens = [generate(patched, prompt(name, row["batch"], device), min(new, COMPARED)) for patched in models]
        row["same_tokens"] = {
            p.name: float((t == tokens[0]).float().mean()) for p, t in zip(models, tokens, strict=True)
        }
        print("\n".join(lines(row)), flush=True)
    return rows


def lines(row: dict[str, Any]) -> list[str]:
    """A line for each provider; times are also given over the faster one of plain and liger-kernel."""
    times = row["milliseconds"]
    best = min(time for provider, time in times.items() if not provider.startswith("ours"))
    return [
        f"{row['model']:15} batch {row['batch']:2}  {provider:16} {time:8.3f} ms a token  {time / best:6.3f}  "
        f"{row['same_tokens'][provider]:.1%} of the tokens are the first's"
        for provider, time in times.items()
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", action="store_true")
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--only", default="", help="only models whose names contain this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=NEW, help="tokens that are generated")
    parser.add_argument("--providers", default="plain,liger-kernel,ours", help="with commas between them")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    providers = options.providers.split(",") + [f"ours, {kind}" for kind in KINDS if options.modules]
    names = ["tiny"] if options.tiny else [name for name in NAMES if options.only in name]
    rows = [row for name in names for row in measure(name, providers, options.rounds, options.new, device)]
    for name in names if options.launches and device.type == "cuda" else []:
        counts = {p.name: launches(p, prompt(name, 1, device)) for p in every(name, providers, device)}
        rows.append({"model": name, "launches": counts})
        print(f"{name}: launches of a token: {counts}", flush=True)
    if options.out:
        save(options.out, device, rows, [line for row in rows if "batch" in row for line in lines(row)])


if __name__ == "__main__":
    main()
