"""This checkout beside another one, both in one process, in turns: what a change costs or gains.

``python -m benchmarks.compare OTHER [--rounds 30] [--out FILE.json]``; needs a GPU. OTHER is a folder that holds a
``liger_losses`` package, of an earlier commit say (``git worktree add OTHER COMMIT``).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import MiB, environment, extra_bytes, release

#: The name under which the other package is imported.
OTHER = "liger_losses_other"
#: A GPU's clock falls under load: one call of each package in turn, and the ratio of the medians.
ROUNDS = 30
#: Calls that take fewer milliseconds are timed twenty at a time, queued while the device waits for so many cycles.
SHORT_CALL = 2.0
AHEAD_CYCLES = 10_000_000

Call = Callable[[], tuple[Tensor, ...]]
#: Makes the timed call of one package, given its importer.
Make = Callable[[Callable[[str], Any]], Call]


def import_other(folder: Path) -> None:
    """Make the other package importable as :data:`OTHER`: a copy in which its own name is replaced."""
    root = Path(tempfile.mkdtemp())
    for source in (folder / "liger_losses").rglob("*.py"):
        target = root / OTHER / source.relative_to(folder / "liger_losses")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text().replace("liger_losses", OTHER))
    sys.path.insert(0, str(root))


def importer(package: str) -> Callable[[str], Any]:
    """``module or attribute path in the package -> object``, such as ``kernels.rope:rope``."""

    def load(path: str) -> Any:
        module, _, name = path.rpartition(":")
        return getattr(importlib.import_module(f"{package}.{module}" if module else package), name)

    return load


def tensor(*shape: int, scale: float = 0.02, grad: bool = True) -> Tensor:
    values = torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale
    return values.requires_grad_(grad)


def labels_of(*shape: int, vocab_size: int, masked: float) -> Tensor:
    labels = torch.randint(vocab_size, shape, device="cuda")
    labels[..., : int(shape[-1] * masked)] = -100
    return labels


def loss_call(loss: Any, arguments: tuple[Any, ...], leaves: tuple[Tensor, ...]) -> Call:
    """Forward and backward; the gradients are returned, so that they count as outputs."""

    def call() -> tuple[Tensor, ...]:
        value = loss(*arguments)
        value = value[0] if isinstance(value, tuple) else value
        return (value.detach(), *torch.autograd.grad(value.sum(), leaves))

    return call


def cases() -> Iterator[tuple[str, Make]]:
    """Names, and what makes the call of one package; inputs are shared by both."""
    shapes = ((8192, 4096, 128256), (8192, 2048, 151936), (12288, 2560, 151936), (1000, 4096, 128256))
    for tokens, hidden_size, vocab_size in shapes:
        hidden, weight = tensor(tokens, hidden_size, scale=1.0), tensor(vocab_size, hidden_size)
        labels = labels_of(tokens, vocab_size=vocab_size, masked=0.0)
        given, size = (weight, hidden, labels), f"{tokens} x {hidden_size} x {vocab_size}"
        leaves = (hidden, weight)
        half = weight, hidden, labels_of(tokens, vocab_size=vocab_size, masked=0.5)

        def cross_entropy(load: Any, given: Any = given, leaves: Any = leaves) -> Call:
            return loss_call(load(":LigerFusedLinearCrossEntropyLoss")(), given, leaves)

        def logps(load: Any, given: Any = given, leaves: Any = leaves) -> Call:
            return loss_call(load(":linear_logps"), (given[1], given[0], given[2]), leaves)

        def without_gradient(load: Any, given: Any = given) -> Call:
            function, frozen = load(":linear_logps"), [part.detach() for part in given]
            return lambda: (function(frozen[1], frozen[0], frozen[2]),)

        yield f"cross-entropy {size}", cross_entropy
        yield f"log-probs {size}", logps
        yield f"log-probs without gradient {size}", without_gradient
        yield f"cross-entropy {size}, 50% masked", partial(cross_entropy, given=half)
        yield f"log-probs {size}, 50% masked", partial(logps, given=half)
        del hidden, weight, labels, given, leaves, half

    for pairs, length, hidden_size, vocab_size, masked, workspace in (
        (8, 1024, 4096, 128256, 0.5, None),
        (8, 1024, 2048, 151936, 0.5, int(4.5 * 2**30)),
        (3, 1536, 3584, 152064, 0.6, None),
    ):
        hidden, weight = tensor(2 * pairs, length, hidden_size, scale=1.0), tensor(vocab_size, hidden_size)
        ref_hidden, ref_weight = tensor(*hidden.shape, scale=1.0, grad=False), tensor(*weight.shape, grad=False)
        labels = labels_of(2 * pairs, length, vocab_size=vocab_size, masked=masked)
        given = (weight, hidden, labels, None, ref_hidden, ref_weight)
        leaves = (hidden, weight)

        def dpo(load: Any, given: Any = given, leaves: Any = leaves, workspace: Any = workspace) -> Call:
            return loss_call(load(":LigerFusedLinearDPOLoss")(workspace=workspace), given, leaves)

        limit = "" if workspace is None else f", {workspace // MiB} MiB"
        yield f"DPO {2 * pairs} x {length} x {hidden_size} x {vocab_size}, {masked:.0%} masked{limit}", dpo
        del hidden, weight, ref_hidden, ref_weight, labels, given, leaves

    for rows, length, hidden_size, vocab_size in ((16, 1024, 4096, 128256), (8, 1536, 2560, 151936)):
        hidden, weight = tensor(rows, length, hidden_size, scale=1.0), tensor(vocab_size, hidden_size)
        ids = torch.randint(vocab_size, (rows, length), device="cuda")
        old, ref = (torch.randn(rows, length, device="cuda") * 0.1 - 12 for _ in range(2))
        advantages, mask = torch.randn(rows, device="cuda"), torch.ones(rows, length, device="cuda")
        given = (hidden, weight, ids, mask, advantages, None, ref, old)
        leaves = (hidden, weight)

        def grpo(load: Any, given: Any = given, leaves: Any = leaves) -> Call:
            return loss_call(load(":LigerFusedLinearGRPOLoss")(), given, leaves)

        yield f"GRPO {rows} x {length} x {hidden_size} x {vocab_size}", grpo
        del hidden, weight, ids, given, leaves

    for tokens, hidden_size, vocab_size in ((8192, 2048, 151936), (6144, 1536, 151936)):
        hidden, weight = tensor(tokens, hidden_size, scale=1.0), tensor(vocab_size, hidden_size)
        teacher = (
            tensor(tokens, 2 * hidden_size, scale=1.0, grad=False),
            tensor(vocab_size, 2 * hidden_size, grad=False),
        )
        labels = labels_of(tokens, vocab_size=vocab_size, masked=0.0)
        given, leaves = (weight, hidden, labels, teacher), (hidden, weight)
        named = itertools.product(("JSD", "KL", "ReverseKL", "CosineSimilarity"), (None, 256 * MiB))
        for name, workspace in named:
            if workspace is None and name not in ("JSD", "KL"):
                continue
            options = {"weight_hard_loss": 0.0, "workspace": workspace}

            def distill(
                load: Any, given: Any = given, leaves: Any = leaves, name: str = name, options: Any = options
            ) -> Call:
                weight, hidden, labels, teacher = given
                loss, teacher = load(f":LigerFusedLinear{name}Loss")(**options), load(":Teacher")(*teacher)
                return loss_call(loss, (weight, hidden, labels, teacher), leaves)

            limit = "" if workspace is None else f", {workspace // MiB} MiB"
            yield f"{name} {tokens} x {hidden_size} x {vocab_size}{limit}", distill
        del hidden, weight, teacher, labels, given, leaves

    yield from other_heads()

    x, gate, up = (tensor(16384, size, scale=1.0) for size in (4096, 14336, 14336))
    vector, heads = tensor(4096, scale=1.0), [tensor(4, n, 4096, 128, scale=1.0) for n in (32, 8)]
    angles = [tensor(1, 4096, 128, scale=1.0, grad=False) for _ in range(2)]
    kernels: dict[str, tuple[str, Any, tuple[Tensor, ...]]] = {
        "RMSNorm 16384 x 4096": ("kernels.rms_norm:rms_norm", (x, vector), (x, vector)),
        "add + RMSNorm 16384 x 4096": ("kernels.rms_norm:add_rms_norm", (x, x, vector), (x, vector)),
        "LayerNorm 16384 x 4096": ("kernels.layer_norm:layer_norm", (x, vector, vector), (x, vector)),
        "SiLU-mul 16384 x 14336": ("kernels.glu:glu", (gate, up), (gate, up)),
        "RoPE 4 x 4096, 32 + 8 heads of 128": ("kernels.rope:rope", (*heads, *angles), tuple(heads)),
    }
    for name, (path, arguments, leaves) in kernels.items():

        def kernel(load: Any, path: str = path, arguments: Any = arguments, leaves: Any = leaves) -> Call:
            function = load(path)

            def call() -> tuple[Tensor, ...]:
                out = function(*arguments)
                outs = out if isinstance(out, tuple) else (out,)
                return (*outs, *torch.autograd.grad(outs, leaves, outs))

            return call

        yield name, kernel


def other_heads() -> Iterator[tuple[str, Make]]:
    """Quantized heads, kept columns, and several heads."""
    hidden, weight = tensor(8192, 4096, scale=1.0), tensor(128256, 4096)
    frozen, labels = weight.detach(), labels_of(8192, vocab_size=128256, masked=0.0)
    codes, size = (frozen * 1e3).round().clamp(-127, 127).to(torch.int8), "8192 x 4096 x 128256"
    ids = torch.randint(128256 - 64, (8192, 1), device="cuda") + torch.randperm(64, device="cuda")

    def quantized(load: Any, workspace: int | None) -> Call:
        class Int8(load(":QuantizedWeight")):  # type: ignore[misc]
            def rows(self, start: int, stop: int) -> Tensor:
                return codes[start:stop] * 1e-3

        head = load(":Head")(Int8(tuple(frozen.shape), torch.bfloat16, frozen.device))
        loss = load(":LigerFusedLinearCrossEntropyLoss")(workspace=workspace)
        return loss_call(loss, (head, hidden, labels), (hidden,))

    def kept(load: Any) -> Call:
        support, function = load(":TokenSupport")(ids, add_label=True), load(":linear_logps")
        return loss_call(lambda *given: function(*given, support=support), (hidden, weight, labels), (hidden, weight))

    def many(load: Any) -> Call:
        loss = load(":LigerFusedLinearCrossEntropyLoss")()
        return loss_call(loss, ([weight, frozen], [hidden, hidden], labels), (hidden, weight))

    yield f"cross-entropy of an int8 head {size}", lambda load: quantized(load, None)
    yield f"cross-entropy of an int8 head {size}, 300 MiB", lambda load: quantized(load, 300 * MiB)
    yield f"log-probs over 64 kept columns {size}", kept
    yield f"cross-entropy of two heads {size}", many


def compare(make: Make, packages: tuple[str, str], rounds: int) -> dict[str, Any]:
    """Medians and memory of both packages, called in turns, and whether their results are the same bits."""
    calls, device = [make(importer(package)) for package in packages], torch.device("cuda")
    results = [call() for call in calls]
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(*results, strict=True)]
    difference = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
    del results, pairs
    memory = [extra_bytes(call, device) / MiB for call in calls]
    times: list[list[float]] = [[], []]
    repeats = 1
    for round_ in range(rounds + 3):
        for which in (0, 1) if round_ % 2 else (1, 0):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(AHEAD_CYCLES * (repeats > 1))
            before.record()
            for _ in range(repeats):
                calls[which]()
            after.record()
            after.synchronize()
            if round_ >= 3:
                times[which].append(before.elapsed_time(after) / repeats)
        if round_ == 2 and before.elapsed_time(after) < SHORT_CALL:
            repeats = 20
    this, other = (statistics.median(part) for part in times)
    return {
        "this ms": this,
        "other ms": other,
        "ratio": this / other,
        "ratio of minima": min(times[0]) / min(times[1]),
        "this MiB": memory[0],
        "other MiB": memory[1],
        "same bits": same,
        "difference": difference,
    }


def main() -> None:
    """Print a table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import_other(arguments.other)
    torch.manual_seed(0)
    rows, lines = [], []
    for name, make in cases():
        if arguments.only not in name:
            continue
        release(torch.device("cuda"))
        row = {"case": name, **compare(make, ("liger_losses", OTHER), arguments.rounds)}
        rows.append(row)
        times = f"{row['this ms']:8.3f} {row['other ms']:8.3f}  x {row['ratio']:.3f} ({row['ratio of minima']:.3f})"
        bits = "same bits" if row["same bits"] else f"off by {row['difference']:.1e}"
        lines.append(f"{name:58} {times}  {row['this MiB']:6.0f} {row['other MiB']:6.0f} MiB  {bits}")
        print(lines[-1], flush=True)
    if arguments.out:
        facts = environment(torch.device("cuda"))
        arguments.out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
        header = f"{'case':58} {'this ms':>8} {'other ms':>8}  ratio of medians (of minima), peak extra memory\n"
        arguments.out.with_suffix(".txt").write_text(f"{json.dumps(facts)}\n\n{header}" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
