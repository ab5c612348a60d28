"""Errors of loss and gradients against float64, at the benchmarks' shapes: `python -m benchmarks.precision`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cross_entropy_entries import (
    liger_cross_entropy,
    our_cross_entropy,
    plain_cross_entropy,
    trl_cross_entropy,
)
from benchmarks.entries import LARGE, Provider, Shape, TokenInputs, needs_cuda, token_inputs
from benchmarks.measure import NotRun, release, save
from benchmarks.run import sizes

#: For machines without a GPU.
SMALL = (Shape(1024, 64, 4096, torch.bfloat16),)
#: Logits are often this much wider in trained models than in random ones, whose standard deviation is 1.
WIDE = 4.0
BLOCKS = (1, 4, 32)


def exact(inputs: TokenInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy and its gradients by hidden states and weight, in float64, some tokens at a time."""
    hidden, weight, labels = inputs.hidden.detach(), inputs.weight.detach().double(), inputs.labels
    step = max(1, 2**33 // (8 * len(weight)))
    loss, grad_hidden, grad_weight = [], [], torch.zeros_like(weight)
    for rows in (slice(i, i + step) for i in range(0, len(hidden), step)):
        logits = hidden[rows].double() @ weight.t()
        log_p = torch.log_softmax(logits, -1)
        loss.append(log_p.gather(1, labels[rows, None]).sum())
        grad = log_p.exp_()
        grad[torch.arange(len(grad), device=grad.device), labels[rows]] -= 1
        grad /= len(hidden)
        grad_hidden.append(grad @ weight)
        grad_weight.addmm_(grad.t(), hidden[rows].double())
    return -torch.stack(loss).sum() / len(hidden), torch.cat(grad_hidden), grad_weight


def relative(value: Tensor, reference: Tensor) -> float:
    """`|value - reference| / |reference|`, a few rows at a time."""
    if not value.dim():
        return float((value.double() - reference).abs() / reference.abs())
    pairs = zip(value.split(8192), reference.split(8192), strict=True)
    squares = sum((part.double() - other).square().sum() for part, other in pairs)
    return float(squares.sqrt() / reference.norm())


def providers(shape: Shape) -> dict[str, Provider]:
    """What is compared: the last ones are this library's in so many blocks."""
    chunks = {f"ours, {n} block{'s' * (n > 1)}": -(-shape.tokens // n) for n in BLOCKS}
    return {
        "plain torch": plain_cross_entropy,
        "liger-kernel": needs_cuda(liger_cross_entropy),
        "TRL": trl_cross_entropy,
        "ours": our_cross_entropy(),
        **{
            name: our_cross_entropy(chunk_size=size, workspace=2 * size * (2 * shape.vocab + 16 * shape.hidden) + 2**26)
            for name, size in chunks.items()
        },
    }


def errors(shape: Shape, width: float, device: torch.device) -> Iterator[dict[str, object]]:
    """One row per provider."""
    inputs = token_inputs(shape, device)
    with torch.no_grad():
        inputs.hidden.mul_(width)
    reference = exact(inputs)
    absent = torch.ones(shape.vocab, dtype=torch.bool, device=device)
    absent[inputs.labels] = False
    for name, provider in providers(shape).items():
        row: dict[str, object] = {"shape": sizes(shape), "logits": width, "provider": name}
        try:
            found = provider(inputs)()
        except (NotRun, torch.OutOfMemoryError) as reason:
            yield {**row, "note": str(reason)[:60]}
            continue
        for what, value, right in zip(("loss", "grad_hidden", "grad_weight"), found, reference, strict=True):
            row[what] = relative(value, right)
        row["grad_weight_of_absent_labels"] = relative(found[2][absent], reference[2][absent])
        yield row
        del found
        release(device)


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write JSON; the table goes beside it as .txt")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    columns = ("loss", "grad_hidden", "grad_weight", "grad_weight_of_absent_labels")
    rows = []
    lines = [f"{'N x H x V':24} {'logits':>6} {'provider':18} " + " ".join(f"{name:>14}" for name in columns)]
    print(lines[0])
    for shape in LARGE if device.type == "cuda" else SMALL:
        for width in (1.0, WIDE):
            for row in errors(shape, width, device):
                rows.append(row)
                numbers = " ".join(f"{row[name]:14.2e}" if name in row else f"{'-':>14}" for name in columns)
                lines.append(f"{row['shape']:24} {width:6g} {row['provider']:18} {numbers} {row.get('note', '')}")
                print(lines[-1], flush=True)
            release(device)
    if arguments.out:
        save(arguments.out, device, rows, lines)


if __name__ == "__main__":
    main()
