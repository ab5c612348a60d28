"""Time and memory of gated MLPs in a patched stack of layers, forward and backward, on a GPU.

python -m benchmarks.mlp_memory            # this checkout
PYTHONPATH=OTHER python -m benchmarks.mlp_memory --label other   # the package of another checkout

Prints, for each size and way of training, milliseconds and the peak above what is there before, in bytes per token.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import liger_losses
from liger_losses.patching.patch import patch

#: Hidden size, intermediate size, layers, tokens.
SIZES = {
    "Qwen2.5-0.5B": (896, 4864, 8, 16384),
    "Qwen3-1.7B": (2048, 6144, 8, 8192),
    "Llama-3.2-3B": (3072, 8192, 4, 8192),
    "Gemma-2-2B": (2304, 9216, 4, 4096),
}


class MLP(nn.Module):
    """The MLP of Llama, as transformers has it."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def step(layers: Any, x: Tensor, checkpointed: bool) -> None:
    """Forward and backward of residual layers."""
    for layer in layers:
        x = x + (checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x))
    x.sum().backward()


def measure(layers: Any, x: Tensor, checkpointed: bool) -> tuple[float, float]:
    """The median of milliseconds, and the bytes per token at the peak, gradients of weights left out."""
    times = []
    for _ in range(12):
        layers.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(layers, x, checkpointed)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - before
    return statistics.median(times[2:]), peak / x.shape[:-1].numel()


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--label", default="this checkout")
    label = parser.parse_args().label
    print(f"{label}: {liger_losses.__file__}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for name, (hidden, inner, count, tokens) in SIZES.items():
        for way in ("trained", "frozen"):
            torch.manual_seed(0)
            layers = nn.ModuleList(MLP(hidden, inner) for _ in range(count)).to("cuda", torch.bfloat16)
            layers.requires_grad_(way == "trained")
            x = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            report = patch(layers)
            assert len(report.replaced) == count
            for checkpointed in (False, True):
                ms, peak = measure(layers, x, checkpointed)
                how = "checkpointed" if checkpointed else "whole"
                print(f"{name:14} {way:8} {how:13} {ms:9.2f} ms {peak:10.0f} B/token")


if __name__ == "__main__":
    main()
