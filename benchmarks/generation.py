"""Greedy generation of patched models: milliseconds of a new token, which the host decides.

``python -m benchmarks.generation [--only NAME] [--rounds 7] [--out FILE.json]``. The models have real shapes and random
weights, in bf16; providers take turns, each on a copy of the model. Whether they choose the same tokens is found in
fp32, as ties in bf16 are decided by rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Timed, in_turns, save
from benchmarks.models import MODELS, build
from benchmarks.steps import liger_kernel

NAMES = ("Llama-3.2-1B", "Qwen3-0.6B")
BATCHES = (1, 16)
PROMPT, NEW, COMPARED = 64, 48, 16


def patched(provider: str, model: Any) -> tuple[Any, Callable[[], contextlib.AbstractContextManager[Any]]]:
    """A copy of the model as the provider patches it, and what it runs within."""
    from liger_losses import patch

    model = copy.deepcopy(model)
    if provider == "liger-kernel":
        return model, liger_kernel(model)
    if provider == "ours":
        patch(model)
    return model, contextlib.nullcontext


def generate(model: Any, ids: Tensor, new: int) -> Tensor:
    """The tokens that greedy generation adds; the mask is given, so that nothing is looked for in the ids."""
    lengths = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    found: Tensor = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **lengths)
    return found[:, ids.shape[1] :]


def measure(name: str, providers: list[str], rounds: int, new: int, device: torch.device) -> list[dict[str, Any]]:
    """One row for each batch size."""
    rows, model = [], build(name, device).eval()
    model.config.use_cache = True
    models = {provider: patched(provider, model) for provider in providers}
    for batch in BATCHES:
        generator = torch.Generator(device).manual_seed(0)
        ids = torch.randint(2, MODELS[name][1]["vocab_size"], (batch, PROMPT), device=device, generator=generator)

        def call(model: Any, ids: Tensor = ids, new: int = new) -> tuple[Tensor, ...]:
            return (generate(model, ids, new),)

        timed = {p: Timed(lambda m=m, call=call: call(m), within) for p, (m, within) in models.items()}
        for one in timed.values():
            with one.within():
                one.call()  # compiles
        gc.collect()
        gc.freeze()  # to look through all that was imported takes longer than a token
        times = {provider: median(found) / new for provider, found in in_turns(timed, rounds, device).items()}
        gc.unfreeze()
        rows.append({"model": name, "batch": batch, "milliseconds": times, "ids": ids})
    for model, _ in models.values():
        model.float()
    for row in rows:
        tokens, ids = {}, row.pop("ids")
        for provider, (model, within) in models.items():
            with within():
                tokens[provider] = generate(model, ids, min(new, COMPARED))
        row["same_tokens"] = {p: float((t == tokens[providers[0]]).float().mean()) for p, t in tokens.items()}
        print(*lines(row), sep="\n", flush=True)
    return rows


def lines(row: dict[str, Any]) -> list[str]:
    """A line for each provider."""
    return [
        f"{row['model']:15} batch {row['batch']:2}  {provider:16} {ms:8.3f} ms a token  "
        f"{row['same_tokens'][provider]:.1%} of the tokens are the first's"
        for provider, ms in row["milliseconds"].items()
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only models whose names contain this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=NEW, help="tokens that are generated")
    parser.add_argument("--providers", default="plain,liger-kernel,ours", help="with commas between them")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ["tiny"] if options.tiny else [name for name in NAMES if options.only in name]
    providers = options.providers.split(",")
    rows = [row for name in names for row in measure(name, providers, options.rounds, options.new, device)]
    if options.out:
        save(options.out, device, rows, [line for row in rows for line in lines(row)])


if __name__ == "__main__":
    main()
