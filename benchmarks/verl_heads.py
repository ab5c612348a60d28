"""Log-probabilities and entropies as verl's trainers take them: this library, and verl's torch, Triton and liger heads.

    python -m benchmarks.verl_heads --verl FOLDER   # FOLDER holds the package verl, unpacked from its wheel
    torchrun --nproc-per-node 2 -m benchmarks.verl_heads --verl FOLDER   # ranks share the vocabulary, as in Megatron

Only the files of verl's heads are read, without its other dependencies. Each round times each provider once, in turn.
With several ranks, a time is the slowest rank's, and speed and memory are those of a rank.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import MiB, extra_bytes, milliseconds, release
from liger_losses.integrations.verl import fused_linear_for_ppo

SHAPES = ((8192, 4096, 128256), (8192, 2048, 151936), (16384, 3584, 152064), (2048, 4096, 128256))
TEMPERATURE = 0.7


def load_heads(folder: Path) -> tuple[Any, Any]:
    """verl's modules of the torch (and liger) head and of the Triton head, without its packages' ``__init__``."""
    for name in ("verl", "verl.utils", "verl.utils.experimental", "verl.utils.kernel"):
        package: Any = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    device: Any = types.ModuleType("verl.utils.device")  # the real one imports all of verl
    device.get_torch_device, device.get_device_name = lambda: torch.cuda, lambda: "cuda"
    device.is_cuda_available = torch.cuda.is_available()
    device.get_device_capability = lambda index=0: torch.cuda.get_device_capability(index)
    sys.modules["verl.utils.device"] = device
    torch_head = importlib.import_module("verl.utils.experimental.torch_functional")
    return torch_head, importlib.import_module("verl.utils.kernel.linear_cross_entropy")


def providers(
    folder: Path | None, cuda: bool, group: dist.ProcessGroup | None
) -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """By name, functions of hidden states, weight and labels."""
    found: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "ours": lambda h, w, y: fused_linear_for_ppo(None, h, w, y, TEMPERATURE, group)
    }
    if folder is None:
        return found
    torch_head, triton_head = load_heads(folder)
    if cuda:
        found["verl triton"] = lambda h, w, y: triton_head.linear_cross_entropy(h, w, y, TEMPERATURE, "none", group)
    if group is None:  # the others know no shards of the vocabulary
        found["verl torch"] = lambda h, w, y: torch_head.FusedLinearForPPO()(h, w, y, TEMPERATURE)
    if group is None and cuda and torch_head._LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY is not None:
        found["verl liger"] = lambda h, w, y: torch_head.FusedLinearForPPO(impl_backend="liger")(h, w, y, TEMPERATURE)
    return found


def bare_products(hidden: Tensor, weight: Tensor, gradient: bool) -> Callable[[], tuple[Tensor, ...]]:
    """The matrix products alone, for 2048 tokens at a time: logits; for gradients, logits again and both of these."""
    logits = hidden.new_empty(min(2048, len(hidden)), len(weight))
    grads = torch.empty_like(hidden), torch.empty_like(weight)

    def call() -> tuple[Tensor, ...]:
        for block, grad in zip(hidden.detach().split(2048), grads[0].split(2048), strict=True):
            part = logits[: len(block)]
            torch.mm(block, weight.detach().t(), out=part)
            if gradient:
                torch.mm(block, weight.detach().t(), out=part)
                torch.mm(part, weight.detach(), out=grad)
                torch.mm(part.t(), block, out=grads[1])
        return (logits[:1, 0], *grads)

    return call


def slowest(ms: float, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """The time of the slowest rank."""
    times = torch.tensor(ms, device=device)
    if group is not None:
        dist.all_reduce(times, dist.ReduceOp.MAX, group)
    return float(times)


def measure(
    shape: tuple[int, int, int], given: argparse.Namespace, device: torch.device, group: Any, gradient: bool
) -> None:
    """Print a line for each provider."""
    tokens, hidden_size, vocab = shape
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if vocab % ranks:  # verl's head needs shards of one size
        raise ValueError(f"{ranks} ranks cannot share {vocab} columns equally.")
    show = print if rank == 0 else lambda *_, **__: None
    name_of_shape = "x".join(map(str, shape)) + (f"/{ranks}" if group else "")
    g = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(tokens, hidden_size, generator=g, device=device).to(dtype).requires_grad_(gradient)
    whole = (torch.randn(vocab, hidden_size, generator=g, device=device) / hidden_size**0.5).to(dtype)
    weight = whole.chunk(ranks)[rank].clone().requires_grad_(gradient)
    del whole
    labels = torch.randint(vocab, (tokens,), generator=g, device=device)
    # As those of a policy loss with a bonus for entropy. verl's Triton head wants them contiguous.
    upstream = torch.randn(tokens, generator=g, device=device), torch.full((tokens,), -0.01, device=device)

    def call_of(head: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            with torch.set_grad_enabled(gradient):
                outputs = head(hidden, weight, labels)
            if not gradient:
                return outputs
            grads = [grad.to(out.dtype) for grad, out in zip(upstream, outputs, strict=True)]
            return torch.autograd.grad(outputs, (hidden, weight), grads)

        return call

    calls = {"products": bare_products(hidden, weight, gradient)}
    calls |= {name: call_of(head) for name, head in providers(given.verl, device.type == "cuda", group).items()}
    expected: tuple[Tensor, ...] | None = None
    errors: dict[str, float] = {}
    extra: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    for name, call in list(calls.items()):
        try:
            out = call()
            times[name] = []
            if name != "products":
                expected = out if expected is None else expected
                pairs = zip(out, expected, strict=True)
                errors[name] = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
            del out
            extra[name] = extra_bytes(call, device) / MiB
        except Exception as error:  # a provider that cannot run here has a line that says so
            show(f"{name_of_shape} {name}: {type(error).__name__}: {str(error).partition(chr(10))[0][:120]}")
            del calls[name]
        release(device)
    for _ in range(given.rounds):
        for name, call in calls.items():
            times[name].append(slowest(milliseconds(call, device), device, group))
    work = (8 if gradient else 2) * tokens * hidden_size * vocab / ranks
    for name in calls:
        ms = statistics.median(times[name])
        show(
            f"{name_of_shape:<20}{'both' if gradient else 'forward':<9}{name:<13}{ms:9.2f} ms "
            f"{work / ms / 1e9:7.0f} TFLOP/s {extra[name]:8.0f} MiB   differs from ours by {errors.get(name, 0.0):.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="the folder that holds the package verl")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many shapes")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    group = None
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
        group = dist.group.WORLD
    for shape in ((64, 128, 384),) if given.tiny else SHAPES[: given.shapes]:
        for gradient in (True, False):
            measure(shape, given, device, group, gradient)
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
