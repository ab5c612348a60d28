"""Training steps on one long sequence with gradient checkpointing: time and memory by its length, and the longest.

python -m benchmarks.long_context [--only "1B full"] [--limit SECONDS] [--out FILE.json]

Every provider runs in a process of its own, on lengths that double from 4096 to 2,097,152, until there is no memory or
the next step would go beyond the limit of seconds per provider. With ``--longest``, lengths between the last that
trained and the first that did not are tried too: first the one that the last two peaks let expect. ``--stand-in``
replaces attention, whose time grows with the square of the length, by a function that saves the same tensors and
computes nothing: memory is then measured in seconds, and the time is that of everything else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import environment, release
from benchmarks.models import MODELS

LENGTHS = tuple(2**i for i in range(12, 22))
TINY = (64, 128)
PROVIDERS = ("plain", "liger-kernel", "liger-kernel + TiledMLP", "ours", "ours + tile_mlps")
#: By name: the model, and whether LoRA is trained (rank 16, all linear layers of the decoder) or all weights.
RUNS = {
    "1B full": ("Llama-3.2-1B", False),
    "1B LoRA": ("Llama-3.2-1B", True),
    "8B full": ("Llama-3-8B", False),
    "8B LoRA": ("Llama-3-8B", True),
}
_LINEARS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


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


def build(run: str, provider: str, device: torch.device, stand_in: bool, tiny: bool) -> Any:
    """The model as the provider patches it, in bf16 with random weights."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    name, lora = RUNS[run]
    kind, sizes = MODELS["tiny" if tiny else name]
    AttentionInterface.register("stand_in", _attend)
    config = AutoConfig.for_model(kind, **{**sizes, "max_position_embeddings": LENGTHS[-1]})
    torch.manual_seed(0)
    with torch.device(device):
        attention = {"attn_implementation": "stand_in"} if stand_in else {}
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **attention)
    if provider.startswith("liger-kernel"):
        _patch_liger(model, tiled=provider.endswith("TiledMLP"))
    if lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, target_modules=_LINEARS, task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    if provider.startswith("ours"):
        from liger_losses import patch

        patch(model, tile_mlps=(16 if tiny else True) if provider.endswith("tile_mlps") else False)
    model.train()
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _patch_liger(model: Any, tiled: bool) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, **({"swiglu": False} if tiled else {}))
    if tiled:
        from liger_kernel.ops import LigerSiLUMulFunction, apply_tiled_mlp

        def compute(mlp: Any, x: torch.Tensor) -> torch.Tensor:
            return mlp.down_proj(LigerSiLUMulFunction.apply(mlp.gate_proj(x), mlp.up_proj(x)))

        for layer in model.model.layers:
            layer.mlp.forward = lambda x, mlp=layer.mlp: apply_tiled_mlp(compute, mlp, x)


def step(model: Any, optimizer: Any, length: int, device: torch.device) -> tuple[float, float, float]:
    """Milliseconds, the peak in GiB, and the loss of one training step."""
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (1, length), device=device, generator=torch.Generator(device).manual_seed(length))
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = float(loss.detach())
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return (time.perf_counter() - start) * 1e3, peak, value


def measure(run: str, provider: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each length, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = TINY if options.tiny else tuple(options.lengths or LENGTHS)
    try:
        model = build(run, provider, device, options.stand_in, options.tiny)
    except ImportError as reason:
        return [_row(provider, lengths[0], note=f"{type(reason).__name__}: {str(reason)[:100]}")]
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=1e-5, fused=device.type == "cuda"
    )
    rows: list[dict[str, Any]] = []
    started, fits, too_long = time.perf_counter(), 0, 0
    waiting = list(lengths)
    while waiting:
        length = waiting.pop(0)
        trained = [row for row in rows if row["median_ms"] is not None]
        # Attention's time grows with the square of the length, everything else's with the length.
        growth = 1 if options.stand_in else 2
        expected = trained[-1]["median_ms"] / 1e3 * (length / trained[-1]["tokens"]) ** growth if trained else 0.0
        if time.perf_counter() - started + expected > options.limit:
            rows.append(_row(provider, length, note=f"not run: about {expected:.0f} s"))
            break
        release(device)
        try:
            if not fits or expected < options.limit / 10:  # the first compiles, the short ones vary
                step(model, optimizer, length, device)
            milliseconds, peak, loss = step(model, optimizer, length, device)
            rows.append(_row(provider, length, milliseconds, peak, note=f"loss {loss:.4f}"))
            fits = length
        except RuntimeError as reason:  # no memory, or no GPU for a peer
            optimizer.zero_grad()
            rows.append(_row(provider, length, note=f"{type(reason).__name__}: {str(reason)[:100]}"))
            too_long, waiting = length, []
        if options.longest and fits and not waiting:
            waiting = _between(fits, too_long, expected_longest(rows, device))
        print(line(run, rows[-1]), flush=True)
    return rows


def expected_longest(rows: list[dict[str, Any]], device: torch.device) -> int:
    """Tokens at which the peak would be the device's memory, along the line through the last two that trained; or 0."""
    trained = sorted((row["tokens"], row["peak_gib"]) for row in rows if row["peak_gib"])[-2:]
    if device.type != "cuda" or len(trained) < 2 or trained[0][1] >= trained[1][1]:
        return 0
    (fewer, less), (more, peak) = trained
    memory = torch.cuda.mem_get_info(device)[1] / 2**30
    return int(more + (0.985 * memory - peak) * (more - fewer) / (peak - less))


def _between(fits: int, too_long: int, expected: int) -> list[int]:
    """The next length to try, a multiple of 2048, if the longest is not known to 4 % yet."""
    following = min(expected, int(0.97 * too_long) if too_long else expected) or (fits + too_long) // 2
    following = following // 2048 * 2048
    close = bool(too_long) and too_long - fits <= 0.04 * fits
    return [] if close or following <= 1.01 * fits else [following]


def _row(
    provider: str, length: int, milliseconds: float | None = None, peak: float | None = None, note: str = ""
) -> dict[str, Any]:
    row: dict[str, Any] = {"provider": provider, "tokens": length, "status": "ok", "median_ms": None, "peak_gib": None}
    if milliseconds is None:
        return {**row, "status": "not run", "note": note}
    return {**row, "median_ms": round(milliseconds, 1), "peak_gib": round(peak or 0.0, 2), "note": note}


def line(run: str, row: dict[str, Any]) -> str:
    """One line of the table."""
    shown = [f"{row[name]:.2f}" if row[name] is not None else "-" for name in ("median_ms", "peak_gib")]
    return f"{run:8} {row['provider']:24} {row['tokens']:>8} tokens {shown[0]:>12} ms {shown[1]:>8} GiB  {row['note']}"


def main() -> None:
    """Spawn a process for each provider, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help=f"one of {', '.join(RUNS)}")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="with commas between them")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of steps for each provider and model")
    parser.add_argument("--lengths", type=int, nargs="*", help="instead of powers of two from 4096 to 2,097,152")
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--provider", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.provider:
        rows = measure(options.only, options.provider, options)
        if options.out:
            options.out.write_text(json.dumps(rows))
        return
    benchmarks = []
    for run in [options.only] if options.only else RUNS:
        rows = []
        for provider in options.providers.split(","):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rows.json"
                command = [sys.executable, "-m", "benchmarks.long_context", "--only", run, "--provider", provider]
                command += ["--limit", str(options.limit), "--out", str(file)]
                flags = ("longest", "stand_in", "tiny")
                command += [f"--{name.replace('_', '-')}" for name in flags if getattr(options, name)]
                command += ["--lengths", *map(str, options.lengths)] if options.lengths else []
                subprocess.run(command, check=True)
                rows += json.loads(file.read_text())
        benchmarks.append(_benchmark(run, rows, options.stand_in))
        if options.out:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            report = {"environment": environment(device), "benchmarks": benchmarks}
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            table = [line(found["run"], row) for found in benchmarks for row in found["rows"]]
            options.out.with_suffix(".txt").write_text("\n".join(table) + "\n")


def _benchmark(run: str, rows: list[dict[str, Any]], stand_in: bool) -> dict[str, Any]:
    """As ``benchmarks.plot`` reads it."""
    name, lora = RUNS[run]
    lengths = sorted({row["tokens"] for row in rows})
    results = [{"shape": {"tokens": n}, "rows": [row for row in rows if row["tokens"] == n]} for n in lengths]
    return {
        "run": run,
        "rows": rows,
        "name": f"{run.replace(' ', '_')}{'_without_attention' if stand_in else ''}",
        "title": f"{name}, {'LoRA' if lora else 'all weights'}, checkpointed" + ", no attention" * stand_in,
        "axis": "tokens",
        "baseline": "plain",
        "panels": [["median_ms", "ms per training step"], ["peak_gib", "peak GiB"]],
        "results": results,
    }


if __name__ == "__main__":
    main()
