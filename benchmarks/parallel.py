"""Losses on a vocabulary that several GPUs share, beside bare products, a whole head, liger-kernel and plain PyTorch.

    python -m benchmarks.parallel                     # on all GPUs of this machine
    python -m benchmarks.parallel --tiny              # on two CPU processes, small sizes: to see that it runs

Every rank makes the same hidden states and labels, and its own rows of one weight. A time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import MiB, NotRun, Timed, extra_bytes, in_turns, release, save, start_ranks
from liger_losses import (
    Head,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    Teacher,
    linear_logps,
)

#: Tokens, hidden size, vocabulary size; the last vocabulary is no multiple of the number of GPUs.
SHAPES = ((8192, 4096, 128256), (16384, 8192, 128256), (8192, 4096, 151669))
TINY = ((64, 32, 301),)
SEQUENCES = 8


class Inputs:
    """The tensors of a call, the same on all ranks but for the rows of the weights."""

    def __init__(self, tokens: int, hidden: int, vocab: int, device: torch.device) -> None:
        g = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        ranks, rank = dist.get_world_size(), dist.get_rank()

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*size, device=device, dtype=dtype, generator=g).mul_(scale)

        rows = -(-vocab // ranks)
        self.rows = slice(rank * rows, min((rank + 1) * rows, vocab))
        self.hidden = normal(SEQUENCES, tokens // SEQUENCES, hidden).requires_grad_()
        self.other = normal(SEQUENCES, tokens // SEQUENCES, hidden)
        self.labels = torch.randint(vocab, self.hidden.shape[:-1], device=device, generator=g)
        self.mask = torch.ones_like(self.labels)
        self.whole, self.whole_ref = (normal(vocab, hidden, scale=hidden**-0.5) for _ in range(2))
        self.whole.requires_grad_()
        self.weight = self.whole.detach()[self.rows].clone().requires_grad_()
        self.ref_weight = self.whole_ref[self.rows].clone()
        self.signs = torch.linspace(-1.0, 1.0, SEQUENCES, device=device)
        self.old_logps = torch.full(self.labels.shape, -(float(vocab) ** 0.2), device=device)
        self.group = dist.group.WORLD


#: By loss: products of the size N H V / ranks that it takes, and the loss from (inputs, head, reference's head).
LOSSES: dict[str, tuple[int, Callable[[Inputs, Any, Any], Tensor]]] = {
    "cross-entropy": (3, lambda d, head, ref: LigerFusedLinearCrossEntropyLoss()(head, d.hidden, d.labels)),
    "log-probs and entropy": (
        4,
        lambda d, head, ref: sum(linear_logps(d.hidden, head, d.labels, entropy=True)[:2]).sum(),  # type: ignore[arg-type]
    ),
    "DPO": (
        5,
        lambda d, head, ref: LigerFusedLinearDPOLoss()(head, d.hidden, d.labels, None, d.other, ref)[0],
    ),
    "GRPO": (
        3,
        lambda d, head, ref: LigerFusedLinearGRPOLoss(beta=0.0)(
            d.hidden, head, d.labels, d.mask, d.signs, old_per_token_logps=d.old_logps
        )[0],
    ),
    "JSD": (4, lambda d, head, ref: LigerFusedLinearJSDLoss()(head, d.hidden, d.labels, Teacher(d.other, ref))[0]),
}


def bare(d: Inputs, products: int) -> Callable[[], tuple[Tensor, ...]]:
    """The products alone, on this rank's rows, and the sum of ``grad_hidden`` over the ranks.

    The rows are filled up to a multiple of 64: other products take three times as long.
    """
    hidden, weight = d.hidden.detach().flatten(0, 1), d.weight.detach()
    weight = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 64))
    rows = max(1, min(len(hidden), 2**31 // weight.shape[0]))
    logits = hidden.new_empty(rows, weight.shape[0])
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def call() -> tuple[Tensor, ...]:
        for start in range(0, len(hidden), rows):
            part, out = hidden[start : start + rows], grad_hidden[start : start + rows]
            for _ in range(products - 2):
                torch.mm(part, weight.t(), out=logits[: len(part)])
            torch.mm(logits[: len(part)], weight, out=out)
            torch.mm(logits[: len(part)].t(), part, out=grad_weight)
        dist.all_reduce(grad_hidden, group=d.group)
        return grad_hidden, grad_weight

    return call


def with_gradients(loss: Callable[[], Tensor], *leaves: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        found = loss()
        return found.detach(), *torch.autograd.grad(found, leaves)

    return call


def ours(d: Inputs, name: str) -> Callable[[], tuple[Tensor, ...]]:
    head, ref = Head(d.weight, group=d.group), Head(d.ref_weight, group=d.group)
    return with_gradients(lambda: LOSSES[name][1](d, head, ref), d.hidden, d.weight)


def whole(d: Inputs, name: str) -> Callable[[], tuple[Tensor, ...]]:
    """The whole head on each GPU."""
    return with_gradients(lambda: LOSSES[name][1](d, d.whole, d.whole_ref), d.hidden, d.whole)


def plain(d: Inputs, name: str) -> Callable[[], tuple[Tensor, ...]]:
    """PyTorch's DTensor and ``loss_parallel``, whose logits each rank has for its own columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    if name != "cross-entropy":
        raise NotRun("loss_parallel has the cross-entropy alone")
    mesh = init_device_mesh(d.hidden.device.type, (dist.get_world_size(),))
    weight = DTensor.from_local(d.weight, mesh, [Shard(0)], shape=d.whole.shape, stride=d.whole.stride())
    labels = DTensor.from_local(d.labels.flatten(), mesh, [Replicate()])

    def call() -> tuple[Tensor, ...]:
        hidden = DTensor.from_local(d.hidden.flatten(0, 1), mesh, [Replicate()])
        with loss_parallel():
            logits = torch.nn.functional.linear(hidden, weight)
            loss = torch.nn.functional.cross_entropy(logits.float(), labels)
            grads = torch.autograd.grad(loss, (hidden, d.weight))
        grad_hidden = grads[0]
        if grad_hidden.placements == (Partial(),):
            grad_hidden = grad_hidden.redistribute(placements=[Replicate()])
        return loss.detach().to_local(), grad_hidden.to_local(), grads[1]

    return call


def liger(d: Inputs, name: str) -> Callable[[], tuple[Tensor, ...]]:
    """liger-kernel's tensor-parallel function: log-probabilities, and equal shards only."""
    if name not in ("cross-entropy", "log-probs and entropy"):
        raise NotRun("liger-kernel has log-probabilities alone")
    if d.whole.shape[0] % dist.get_world_size():
        raise NotRun("liger-kernel takes equal shards only")
    try:
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyTPFunction
    except ImportError as error:
        raise NotRun(str(error)) from None
    entropy = name != "cross-entropy"

    def loss() -> Tensor:
        hidden, labels = d.hidden.flatten(0, 1), d.labels.flatten()
        found = LigerFusedLinearScaledCrossEntropyTPFunction.apply(
            hidden, d.weight, labels, d.group, 1.0, -100, 1, entropy
        )
        if entropy:
            return (found[1] - found[0]).sum()
        return (found[0] if isinstance(found, tuple) else found).mean()

    return with_gradients(loss, d.hidden, d.weight)


PROVIDERS = {"ours": ours, "whole head": whole, "loss_parallel": plain, "liger-kernel": liger}


def measure(shape: tuple[int, int, int], name: str, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """One row for each provider, which take turns."""
    d = Inputs(*shape, device)
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {"bare": bare(d, LOSSES[name][0])}
    for provider, make in PROVIDERS.items():
        row: dict[str, Any] = {"loss": name, "shape": shape, "provider": provider}
        try:
            calls[provider] = make(d, name)
            row["value"] = float(calls[provider]()[0])
        except (NotRun, torch.cuda.OutOfMemoryError) as error:
            row["not run"] = str(error).splitlines()[0]
            calls.pop(provider, None)
        rows.append(row)
    calls["bare"]()
    times = in_turns({provider: Timed(call) for provider, call in calls.items()}, rounds, device)
    medians = {provider: statistics.median(values) for provider, values in times.items()}
    for row in rows:
        if row["provider"] in calls:
            row["ms"], row["bare ms"] = medians[row["provider"]], medians["bare"]
            row["rounds"] = [round(ms, 2) for ms in times[row["provider"]]]
            row["extra MiB"] = extra_bytes(calls[row["provider"]], device) / MiB
    return rows


def work(device: torch.device, arguments: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    shapes = TINY if arguments.tiny else [SHAPES[i] for i in arguments.only or range(len(SHAPES))]
    for shape, name in itertools.product(shapes, arguments.losses):
        rows += [row | {"ranks": dist.get_world_size()} for row in measure(shape, name, arguments.rounds, device)]
        release(device)
        if dist.get_rank() == 0:
            print(*(line(row) for row in rows if (row["shape"], row["loss"]) == (shape, name)), sep="\n", flush=True)
        if dist.get_rank() == 0 and arguments.out is not None:
            save(arguments.out, device, rows, map(line, rows))


def line(row: dict[str, Any]) -> str:
    shape = " x ".join(map(str, row["shape"]))
    start = f"{row['loss']:22} {shape:24} {row['provider']:14}"
    if "not run" in row:
        return f"{start} {row['not run']}"
    ratio = row["ms"] / row["bare ms"]
    return f"{start} {row['ms']:9.2f} ms {ratio:6.2f} x bare {row['extra MiB']:9.0f} MiB  loss {row['value']:.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses", nargs="*", default=list(LOSSES), help=f"of {', '.join(LOSSES)}")
    parser.add_argument("--ranks", type=int, help="processes; all GPUs, or two processes on a CPU, by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--only", type=int, nargs="*", help=f"which shapes, from 0 to {len(SHAPES) - 1}")
    parser.add_argument("--out", type=Path, help="a JSON file, beside which the table is written as text")
    arguments = parser.parse_args()
    unknown = set(arguments.losses) - set(LOSSES)
    if unknown:
        parser.error(f"unknown losses {sorted(unknown)}; they are {', '.join(LOSSES)}")
    start_ranks(work, arguments.ranks, arguments)


if __name__ == "__main__":
    main()
