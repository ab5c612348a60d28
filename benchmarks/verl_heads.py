"""Log-probabilities and entropies as verl's trainers take them: this library, and verl's torch, Triton and liger heads.

    python -m benchmarks.verl_heads --verl FOLDER   # FOLDER holds the package verl, unpacked from its wheel

Only the files of verl's heads are read, without its other dependencies. Each round times each provider once, in turn.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import MiB, extra_bytes, milliseconds, release
from liger_losses.integrations.verl import logps_and_entropy

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


def providers(folder: Path | None, cuda: bool) -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """By name, functions of hidden states, weight and labels."""
    found: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "ours": lambda h, w, y: logps_and_entropy(h, w, y, TEMPERATURE)
    }
    if folder is None:
        return found
    torch_head, triton_head = load_heads(folder)
    found["verl torch"] = lambda h, w, y: torch_head.FusedLinearForPPO()(h, w, y, TEMPERATURE)
    if cuda:
        found["verl triton"] = lambda h, w, y: triton_head.linear_cross_entropy(h, w, y, TEMPERATURE, "none")
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


def measure(
    shape: tuple[int, int, int], folder: Path | None, rounds: int, device: torch.device, gradient: bool
) -> None:
    """Print a line for each provider."""
    tokens, hidden_size, vocab = shape
    g = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(tokens, hidden_size, generator=g, device=device).to(dtype).requires_grad_(gradient)
    weight = (torch.randn(vocab, hidden_size, generator=g, device=device) / hidden_size**0.5).to(dtype)
    weight.requires_grad_(gradient)
    labels = torch.randint(vocab, (tokens,), generator=g, device=device)
    upstream = torch.randn(tokens, generator=g, device=device)

    def call_of(head: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            with torch.set_grad_enabled(gradient):
                logps, entropy = head(hidden, weight, labels)
                if not gradient:
                    return logps, entropy
                loss = (upstream * logps).sum() - 0.01 * entropy.float().sum()
            return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))

        return call

    calls = {"products": bare_products(hidden, weight, gradient)}
    calls |= {name: call_of(head) for name, head in providers(folder, device.type == "cuda").items()}
    expected, errors, times, extra = None, {}, {}, {}
    for name, call in list(calls.items()):
        try:
            out = call()
            times[name] = []
            if name != "products":
                compared = out[1:] if gradient else out  # the loss is a sum that nearly cancels
                expected = compared if expected is None else expected
                pairs = zip(compared, expected, strict=True)
                errors[name] = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
                del compared, pairs
            del out
            extra[name] = extra_bytes(call, device) / MiB
        except Exception as error:  # a provider that cannot run here has a line that says so
            print(f"{'x'.join(map(str, shape))} {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            del calls[name]
        release(device)
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(milliseconds(call, device))
    work = (8 if gradient else 2) * tokens * hidden_size * vocab
    for name in calls:
        ms = statistics.median(times[name])
        print(
            f"{'x'.join(map(str, shape)):<20}{'both' if gradient else 'forward':<9}{name:<13}{ms:9.2f} ms "
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape in ((64, 128, 384),) if given.tiny else SHAPES[: given.shapes]:
        for gradient in (True, False):
            measure(shape, given.verl, given.rounds, device, gradient)


if __name__ == "__main__":
    main()
