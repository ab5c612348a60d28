"""This checkout beside another one, both in one process, in turns: what a change costs or gains.

``python -m benchmarks.compare OTHER [--only REGEX] [--rounds 20] [--drawn SEED] [--out FILE.json]``. OTHER is a folder
that holds a ``liger_losses`` package, of an earlier commit say (``git worktree add OTHER COMMIT``). The cases use
public names alone, so that any two versions can be compared. A round is a call of each package, and the next round
calls them in the other order (A B, B A). The result of a case is the median of the rounds' ratios, with the 95 %
interval of a bootstrap. Whole steps are compared by ``benchmarks.steps --other OTHER``.
"""

from __future__ import annotations

import argparse
import importlib
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Call, MiB, Timed, extra_bytes, in_turns, interval, release, save

#: The name under which the other package is imported.
OTHER = "liger_losses_other"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: What sizes are drawn from.
HIDDEN_SIZES = (1536, 2560, 3584, 7168)
VOCABULARIES = (49152, 152064, 256000)
#: Arguments of tiny cases.
TINY = {"size": (64, 32, 512), "sizes": (32, 64), "count": 8}

#: The attribute of one package at a path such as ``Teacher`` or ``modules:RMSNorm``.
Load = Callable[[str], Any]
#: Makes the timed call of one package.
Make = Callable[[Load], Call]


def import_other(folder: Path) -> None:
    """Make the other package importable as :data:`OTHER`: a copy in which its own name is replaced."""
    root = Path(tempfile.mkdtemp())
    for source in (folder / "liger_losses").rglob("*.py"):
        target = root / OTHER / source.relative_to(folder / "liger_losses")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text().replace("liger_losses", OTHER))
    sys.path.insert(0, str(root))


def importer(package: str) -> Load:
    """``[module:]name in the package -> object``, such as ``Teacher`` or ``modules:RMSNorm``."""

    def load(path: str) -> Any:
        module, _, name = path.rpartition(":")
        return getattr(importlib.import_module(f"{package}.{module}" if module else package), name)

    return load


def tensor(*shape: int, scale: float = 0.02, grad: bool = True) -> Tensor:
    values = torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * scale
    return values.requires_grad_(grad)


@lru_cache(1)
def inputs(tokens: int, hidden_size: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ``lm_head``'s weight and labels, which both packages and all calls of one size share."""
    labels = torch.randint(vocab_size, (tokens,), device=DEVICE)
    return tensor(tokens, hidden_size, scale=1.0), tensor(vocab_size, hidden_size), labels


def masked(labels: Tensor, share: float) -> Tensor:
    return labels.index_fill(0, torch.arange(int(len(labels) * share), device=DEVICE), -100)


def loss_call(
    loss: Any, arguments: tuple[Any, ...], leaves: tuple[Tensor, ...], upstream: Tensor | None = None
) -> Call:
    """Forward and backward; the gradients are returned, so that they count as outputs."""

    def call() -> tuple[Tensor, ...]:
        value = loss(*arguments)
        value = value[0] if isinstance(value, tuple) else value
        return (value.detach(), *torch.autograd.grad(value.sum() if upstream is None else value, leaves, upstream))

    return call


Size = tuple[int, int, int]


def cross_entropy(load: Load, size: Size, share: float = 0.0, **options: Any) -> Call:
    hidden, weight, labels = inputs(*size)
    loss = load("LigerFusedLinearCrossEntropyLoss")(**options)
    return loss_call(loss, (weight, hidden, masked(labels, share)), (hidden, weight))


def logps(load: Load, size: Size, live: float = 1.0) -> Call:
    """``live``: the share of the tokens whose upstream gradient is not 0."""
    hidden, weight, labels = inputs(*size)
    upstream = (torch.arange(len(labels), device=DEVICE) < live * len(labels)).float()
    return loss_call(load("linear_logps"), (hidden, weight, labels), (hidden, weight), upstream)


def trainer_logps(load: Load, size: Size) -> Call:
    """What TRL's trainers ask for: entropies and the likeliest tokens are metrics, but may have a gradient."""
    hidden, weight, labels = inputs(*size)
    function = partial(load("linear_statistics"), statistics=("logp", "entropy"), metrics=("argmax",))
    return loss_call(lambda *tensors: function(*tensors).logp, (hidden, weight, labels), (hidden, weight))


def logps_without_gradient(load: Load, size: Size) -> Call:
    hidden, weight, labels = (part.detach() for part in inputs(*size))
    function = load("linear_logps")
    return lambda: (function(hidden, weight, labels),)


def completions_of(tokens: int, least: int) -> int:
    """How many: a power of two, of about a thousand tokens each."""
    return 1 << (max(tokens // 1024, least).bit_length() - 1)


def dpo(load: Load, size: Size, **options: Any) -> Call:
    """Half of each completion is a masked prompt. Policy and reference are of one size."""
    hidden, weight, labels = inputs(*size)
    rows = completions_of(size[0], 2)
    labels = labels.view(rows, -1).clone()
    labels[:, : labels.shape[1] // 2] = -100
    states = hidden.detach().view(rows, -1, size[1]).requires_grad_()
    reference = states.detach().flip(0), weight.detach().flip(0)
    loss = load("LigerFusedLinearDPOLoss")(**options)
    return loss_call(loss, (weight, states, labels, None, *reference), (states, weight))


def grpo(load: Load, size: Size, live: float = 1.0) -> Call:
    """``live``: the share of the completions whose advantage is not 0."""
    hidden, weight, labels = inputs(*size)
    rows = completions_of(size[0], 8)
    labels, states = labels.view(rows, -1), hidden.detach().view(rows, -1, size[1]).requires_grad_()
    generator = torch.Generator(DEVICE).manual_seed(0)
    noise = partial(torch.randn, device=DEVICE, generator=generator)
    advantages = noise(rows) * (torch.arange(rows, device=DEVICE) < live * rows)
    old, ref = (noise(labels.shape) * 0.1 - 12 for _ in range(2))
    loss = load("LigerFusedLinearGRPOLoss")(beta=0.0 if live < 1 else 0.04)
    arguments = (states, weight, labels, torch.ones_like(labels), advantages, None, None if live < 1 else ref, old)
    return loss_call(loss, arguments, (states, weight))


def distillation(load: Load, size: Size, name: str, **options: Any) -> Call:
    hidden, weight, labels = inputs(*size)
    teacher = load("Teacher")(hidden.detach().flip(0), weight.detach().flip(0))
    loss = load(f"LigerFusedLinear{name}Loss")(weight_hard_loss=0.0, **options)
    return loss_call(loss, (weight, hidden, labels, teacher), (hidden, weight))


def quantized(load: Load, size: Size, **options: Any) -> Call:
    hidden, weight, labels = inputs(*size)
    codes = (weight.detach() * 1e3).round().clamp(-127, 127).to(torch.int8)

    class Int8(load("QuantizedWeight")):  # type: ignore[misc]
        def rows(self, start: int, stop: int) -> Tensor:
            return codes[start:stop] * 1e-3

    head = load("Head")(Int8(tuple(weight.shape), torch.bfloat16, weight.device))
    return loss_call(load("LigerFusedLinearCrossEntropyLoss")(**options), (head, hidden, labels), (hidden,))


def kept_columns(load: Load, size: Size, count: int) -> Call:
    hidden, weight, labels = inputs(*size)
    ids = torch.randint(size[2] - count, (size[0], 1), device=DEVICE) + torch.randperm(count, device=DEVICE)
    support = load("TokenSupport")(ids, add_label=True)
    function = partial(load("linear_logps"), support=support)
    return loss_call(function, (hidden, weight, labels), (hidden, weight))


def two_heads(load: Load, size: Size) -> Call:
    hidden, weight, labels = inputs(*size)
    heads = [weight, weight.detach()]
    loss = load("LigerFusedLinearCrossEntropyLoss")()
    return loss_call(loss, (heads, [hidden, hidden], labels), (hidden, weight))


def layer(load: Load, name: str, sizes: tuple[int, ...]) -> Call:
    torch.manual_seed(0)
    module, hidden = load(f"modules:{name}")(*sizes).to(DEVICE, torch.bfloat16), tensor(16384, sizes[0], scale=1.0)
    leaves = (hidden, *module.parameters())

    def call() -> tuple[Tensor, ...]:
        output = module(hidden)
        return (output, *torch.autograd.grad(output, leaves, output))

    return call


LOSSES: dict[str, Callable[..., Call]] = {
    "cross-entropy": cross_entropy,
    "log-probs": logps,
    "log-probs, entropy and argmax": trainer_logps,
    "DPO": dpo,
    "GRPO": grpo,
    "log-probs without gradient": logps_without_gradient,
    "JSD": partial(distillation, name="JSD"),
    "KL": partial(distillation, name="KL"),
}


def cases() -> Iterator[tuple[str, Make]]:
    """Names, and what makes the call of one package; both share the inputs."""
    for tokens, hidden_size in (
        *((tokens, hidden_size) for hidden_size in (2048, 4096) for tokens in (1024, 4096, 16384)),
        *((tokens, 2048) for tokens in (32768, 65536)),
    ):
        size = (tokens, hidden_size, 128256)
        text = " x ".join(map(str, size))
        for name, make in LOSSES.items():
            if tokens <= 16384 or name not in ("log-probs without gradient", "JSD", "KL"):
                yield f"{name} {text}", partial(make, size=size)
        if tokens == 16384:
            yield f"cross-entropy {text}, 300 MiB", partial(cross_entropy, size=size, workspace=300 * MiB)
            yield f"DPO {text}, 300 MiB", partial(dpo, size=size, workspace=300 * MiB)
            yield f"JSD {text}, 300 MiB", partial(distillation, size=size, name="JSD", workspace=300 * MiB)
            for live in (0.5, 0.2):
                yield f"log-probs {text}, {live:.0%} live", partial(logps, size=size, live=live)
                yield f"GRPO {text}, {live:.0%} live", partial(grpo, size=size, live=live)
                yield f"cross-entropy {text}, {1 - live:.0%} masked", partial(cross_entropy, size=size, share=1 - live)

    size, text = (8192, 4096, 128256), "8192 x 4096 x 128256"
    yield f"cross-entropy of an int8 head {text}", partial(quantized, size=size)
    yield f"cross-entropy of an int8 head {text}, 300 MiB", partial(quantized, size=size, workspace=300 * MiB)
    for count in (8, 64, 256):
        yield f"log-probs over {count} kept columns {text}", partial(kept_columns, size=size, count=count)
    for of in ("student", "teacher"):
        yield (
            f"KL of the {of}'s 64 likeliest {text}",
            partial(distillation, size=size, name="KL", top_k=64, top_k_of=of, tail="none"),
        )
    yield f"cross-entropy of two heads {text}", partial(two_heads, size=size)

    inputs.cache_clear()
    for name, sizes in (("RMSNorm", (4096,)), ("LayerNorm", (4096,)), ("SwiGLUMLP", (4096, 14336))):
        text = " x ".join(map(str, (16384, *sizes)))
        yield f"{name} {text}", partial(layer, name=name, sizes=sizes)


def drawn(seed: str) -> Iterator[tuple[str, Make]]:
    """Cases of three sizes drawn by a seed, the commit say: none of them has a number of tokens that tiles divide."""
    draw = random.Random(seed)
    for hidden_size, vocab_size in zip(draw.sample(HIDDEN_SIZES, 3), draw.sample(VOCABULARIES, 3), strict=True):
        size = (8 * draw.choice([n for n in range(128, 1024) if n % 16]), hidden_size, vocab_size)
        text = " x ".join(map(str, size))
        for name, make in LOSSES.items():
            yield f"{name} {text}", partial(make, size=size)


def compare(make: Make, packages: tuple[str, str], rounds: int) -> dict[str, Any]:
    """Medians and memory of both packages, called in turns, and how far their results differ."""
    calls = list[Call]()
    for package in packages:
        torch.manual_seed(0)
        calls.append(make(importer(package)))
    return beside(calls, rounds)


def beside(calls: list[Call], rounds: int) -> dict[str, Any]:
    """Medians and memory of two calls, and how far their results differ."""
    pairs = [(a.float(), b.float()) for a, b in zip(*(call() for call in calls), strict=True)]
    difference = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
    del pairs
    memory = [extra_bytes(call, DEVICE) / MiB for call in calls]
    this, other = in_turns(dict(zip("ab", map(Timed, calls), strict=True)), rounds, DEVICE).values()
    ratios = [a / b for a, b in zip(this, other, strict=True)]
    return {
        "this ms": statistics.median(this),
        "other ms": statistics.median(other),
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
        "rounds": rounds,
        "this MiB": memory[0],
        "other MiB": memory[1],
        "difference": difference,
    }


def line(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    times = f"{row['this ms']:8.3f} {row['other ms']:8.3f}  x {row['ratio']:.3f} ({low:.3f} to {high:.3f})"
    memory = f"{row['this MiB']:6.0f} {row['other MiB']:6.0f} MiB"
    return f"{row['case']:58} {times}  {memory}  results differ by {row['difference']:.1e}"


def tiny(make: Any) -> Make:
    """The case with tiny sizes."""
    return partial(make, **{name: TINY[name] for name in TINY.keys() & make.keywords.keys()})


HEADER = f"{'case':58} {'this ms':>8} {'other ms':>8}  ratio (95 % interval), peak extra memory"


def main() -> None:
    """Print a table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="a regular expression that the names of cases match")
    parser.add_argument("--drawn", metavar="SEED", help="cases of three sizes drawn by this seed instead")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU too: to see that everything runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import_other(options.other)
    rows, lines = list[dict[str, Any]](), [HEADER]
    print(HEADER)
    for name, make in drawn(options.drawn) if options.drawn else cases():
        if not re.search(options.only, name):
            continue
        make = tiny(make) if options.tiny else make
        release(DEVICE)
        rows.append({"case": name, **compare(make, ("liger_losses", OTHER), options.rounds)})
        lines.append(line(rows[-1]))
        print(lines[-1], flush=True)
        if options.out:
            save(options.out, DEVICE, rows, lines)


if __name__ == "__main__":
    main()
