"""Training steps on one long sequence with gradient checkpointing: time and memory by its length, and the longest.

``python -m benchmarks.long_context [--model NAME] [--limit SECONDS] [--longest] [--stand-in] [--out FILE.json]``.
Lengths double from 4096, until there is no memory or the next step would go beyond the limit of seconds per provider.
With ``--longest``, lengths between the last that trained and the first that did not are tried too. ``--stand-in``
replaces attention, whose time grows with the square of the length, by a function that saves the same tensors and
computes nothing: memory is then measured in seconds, and the time is that of everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import NotRun, milliseconds, release, save
from benchmarks.models import MODELS, build
from benchmarks.steps import liger_kernel

LENGTHS = tuple(2**i for i in range(12, 22))
PROVIDERS = ("plain", "liger-kernel", "liger-kernel + TiledMLP", "ours", "ours + tile_mlps")


class _StandIn(torch.autograd.Function):
    """Saves what attention saves, and leaves its results without values."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors[:3])


def _attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    return _StandIn.apply(q, k, v).transpose(1, 2).contiguous(), None


def patched(provider: str, model: Any, tiles: int | bool) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Patch the model as the provider does; what its steps run within."""
    if provider.startswith("ours"):
        from liger_losses import patch

        patch(model, tile_mlps=tiles if provider.endswith("tile_mlps") else False)
    if not provider.startswith("liger-kernel"):
        return contextlib.nullcontext
    if not provider.endswith("TiledMLP"):
        return liger_kernel(model)
    within = liger_kernel(model, swiglu=False)
    from liger_kernel.ops import LigerSiLUMulFunction, apply_tiled_mlp

    def compute(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        return mlp.down_proj(LigerSiLUMulFunction.apply(mlp.gate_proj(x), mlp.up_proj(x)))

    for layer in model.model.layers:
        layer.mlp.forward = lambda x, mlp=layer.mlp: apply_tiled_mlp(compute, mlp, x)
    return within


def measure(provider: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row for each length."""
    tiny = options.model == "tiny"
    model, rows = build(options.model, device, checkpointing=True), list[dict[str, Any]]()
    if options.stand_in:
        model.set_attn_implementation("stand_in")
    within = patched(provider, model, 16 if tiny else True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    started, fits, too_long, waiting = time.perf_counter(), 0, 0, list(options.lengths)
    while waiting:
        length = waiting.pop(0)
        # Attention's time grows with the square of the length, everything else's with the length.
        last = next((row for row in reversed(rows) if "ms" in row), None)
        expected = last["ms"] / 1e3 * (length / last["tokens"]) ** (1 if options.stand_in else 2) if last else 0.0
        row: dict[str, Any] = {"model": options.model, "provider": provider, "tokens": length}
        rows.append(row)
        if time.perf_counter() - started + 2 * expected > options.limit:
            row["note"] = f"not run: about {expected:.0f} s"
            break
        release(device)
        ids = torch.randint(MODELS[options.model][1]["vocab_size"], (1, length), device=device)

        def step(ids: torch.Tensor = ids) -> tuple[torch.Tensor, ...]:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (loss.detach(),)

        try:
            with within():
                step()
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                row["ms"] = milliseconds(step, device)
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            fits = length
        except RuntimeError as reason:  # no memory, or no GPU for a peer
            optimizer.zero_grad()
            row["note"] = f"{type(reason).__name__}: {str(reason)[:100]}"
            too_long, waiting = length, []
        if options.longest and fits and not waiting and too_long - fits > 0.04 * fits:
            waiting = [(fits + too_long) // 4096 * 2048]
        print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    times = f"{row['ms']:10.1f} ms {row['peak_gib']:8.2f} GiB" if "ms" in row else row["note"]
    return f"{row['model']:15} {row['provider']:24} {row['tokens']:>8} tokens  {times}"


def main() -> None:
    """Measure the providers one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="Llama-3.2-1B", choices=MODELS)
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="with commas between them")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of steps for each provider")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    from transformers import AttentionInterface

    AttentionInterface.register("stand_in", _attend)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for provider in options.providers.split(","):
        try:
            rows += measure(provider, options, device)
        except NotRun as reason:
            print(f"{provider}: {reason}")
        release(device)
        if options.out:
            save(options.out, device, rows, map(line, rows))


if __name__ == "__main__":
    main()
