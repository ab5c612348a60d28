"""This checkout beside another one, both in one process, in turns: what a change costs or gains.

``python -m benchmarks.compare OTHER [--only TEXT] [--rounds 20] [--out FILE.json]``; needs a GPU. OTHER is a folder
that holds a ``liger_losses`` package, of an earlier commit say (``git worktree add OTHER COMMIT``). The cases use
public names alone, so that any two versions can be compared. A round is a call of each package, and the next round
calls them in the other order (A B, B A). The result of a case is the median of the rounds' ratios, with the 95 %
interval of a bootstrap.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import MiB, environment, extra_bytes, release

#: The name under which the other package is imported.
OTHER = "liger_losses_other"
ROUNDS = 20
#: Calls that take fewer milliseconds are timed twenty at a time, queued while the device waits for so many cycles.
SHORT_CALL = 2.0
AHEAD_CYCLES = 10_000_000
#: Calls that take more milliseconds have half as many rounds.
LONG_CALL = 150.0

Call = Callable[[], tuple[Tensor, ...]]
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
    values = torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale
    return values.requires_grad_(grad)


@lru_cache(1)
def inputs(tokens: int, hidden_size: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ``lm_head``'s weight and labels, which both packages and all calls of one size share."""
    labels = torch.randint(vocab_size, (tokens,), device="cuda")
    return tensor(tokens, hidden_size, scale=1.0), tensor(vocab_size, hidden_size), labels


def masked(labels: Tensor, share: float) -> Tensor:
    return labels.index_fill(0, torch.arange(int(len(labels) * share), device="cuda"), -100)


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
    upstream = (torch.arange(len(labels), device="cuda") < live * len(labels)).float()
    return loss_call(load("linear_logps"), (hidden, weight, labels), (hidden, weight), upstream)


def logps_without_gradient(load: Load, size: Size) -> Call:
    hidden, weight, labels = (part.detach() for part in inputs(*size))
    function = load("linear_logps")
    return lambda: (function(hidden, weight, labels),)


def dpo(load: Load, size: Size, **options: Any) -> Call:
    """Half of each completion is a masked prompt. Policy and reference are of one size."""
    hidden, weight, labels = inputs(*size)
    rows = max(size[0] // 1024, 2)
    labels = labels.view(rows, -1).clone()
    labels[:, : labels.shape[1] // 2] = -100
    states = hidden.detach().view(rows, -1, size[1]).requires_grad_()
    reference = states.detach().flip(0), weight.detach().flip(0)
    loss = load("LigerFusedLinearDPOLoss")(**options)
    return loss_call(loss, (weight, states, labels, None, *reference), (states, weight))


def grpo(load: Load, size: Size, live: float = 1.0) -> Call:
    """``live``: the share of the completions whose advantage is not 0."""
    hidden, weight, labels = inputs(*size)
    rows = max(size[0] // 1024, 8)
    labels, states = labels.view(rows, -1), hidden.detach().view(rows, -1, size[1]).requires_grad_()
    generator = torch.Generator("cuda").manual_seed(0)
    noise = partial(torch.randn, device="cuda", generator=generator)
    advantages = noise(rows) * (torch.arange(rows, device="cuda") < live * rows)
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
    ids = torch.randint(size[2] - count, (size[0], 1), device="cuda") + torch.randperm(count, device="cuda")
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
    module, hidden = load(f"modules:{name}")(*sizes).to("cuda", torch.bfloat16), tensor(16384, sizes[0], scale=1.0)
    leaves = (hidden, *module.parameters())

    def call() -> tuple[Tensor, ...]:
        output = module(hidden)
        return (output, *torch.autograd.grad(output, leaves, output))

    return call


#: Sizes of released models, for whole steps.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-1B": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "Qwen2.5-0.5B": (
        "Qwen2Config",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
    ),
}


def step(load: Load, model_name: str, rows: int, length: int, *, preference: bool) -> Call:
    """A training step with AdamW: SFT by ``patch`` and ``labels=``, or DPO on ``loss_inputs``, itself the reference."""
    import transformers

    torch.manual_seed(0)
    kind, sizes = CONFIGURATIONS[model_name]
    config = getattr(transformers, kind)(**sizes, use_cache=False, tie_word_embeddings=True)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    load("patch")(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(config.vocab_size, (rows, length), device="cuda")
    labels = ids.clone()
    labels[:, : length // 2 if preference else 0] = -100
    loss_inputs, loss_function = load("loss_inputs"), load("LigerFusedLinearDPOLoss")()
    batch = {"input_ids": ids, "labels": labels}

    def call() -> tuple[Tensor, ...]:
        if preference:
            with torch.no_grad():
                reference, reference_states, _ = loss_inputs(model, **batch)
            head, states, shifted = loss_inputs(model, **batch)
            loss = loss_function(head, states, shifted, ref_input=reference_states, ref_weight=reference)[0]
        else:
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.detach(),)

    return call


def cases() -> Iterator[tuple[str, Make]]:
    """Names, and what makes the call of one package; both share the inputs."""
    for tokens, hidden_size in (
        *((tokens, hidden_size) for hidden_size in (2048, 4096) for tokens in (1024, 4096, 16384)),
        *((tokens, 2048) for tokens in (32768, 65536)),
    ):
        size = (tokens, hidden_size, 128256)
        text = " x ".join(map(str, size))
        for name, make in (("cross-entropy", cross_entropy), ("log-probs", logps), ("DPO", dpo), ("GRPO", grpo)):
            yield f"{name} {text}", partial(make, size=size)
        if tokens <= 16384:
            yield f"log-probs without gradient {text}", partial(logps_without_gradient, size=size)
            for name in ("JSD", "KL"):
                yield f"{name} {text}", partial(distillation, size=size, name=name)
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
    yield f"cross-entropy of two heads {text}", partial(two_heads, size=size)

    for model_name, rows, length in (("Llama-1B", 4, 4096), ("Qwen2.5-0.5B", 8, 2048), ("Qwen2.5-0.5B", 2, 1024)):
        for name, preference in (("SFT", False), ("DPO", True)):
            make = partial(step, model_name=model_name, rows=rows, length=length, preference=preference)
            yield f"{name} step {model_name} {rows} x {length}", make

    inputs.cache_clear()
    for name, sizes in (("RMSNorm", (4096,)), ("LayerNorm", (4096,)), ("SwiGLUMLP", (4096, 14336))):
        text = " x ".join(map(str, (16384, *sizes)))
        yield f"{name} {text}", partial(layer, name=name, sizes=sizes)


def interval(ratios: list[float], draws: int = 1000) -> tuple[float, float]:
    """The 95 % interval of the median by a bootstrap."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def compare(make: Make, packages: tuple[str, str], rounds: int) -> dict[str, Any]:
    """Medians and memory of both packages, called in turns, and how far their results differ."""
    calls = list[Call]()
    for package in packages:
        torch.manual_seed(0)
        calls.append(make(importer(package)))
    return in_turns(calls, rounds)


def in_turns(calls: list[Call], rounds: int) -> dict[str, Any]:
    """Medians and memory of two calls, and how far their results differ."""
    device = torch.device("cuda")
    pairs = [(a.float(), b.float()) for a, b in zip(*(call() for call in calls), strict=True)]
    difference = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
    del pairs
    memory = [extra_bytes(call, device) / MiB for call in calls]
    times: list[list[float]] = [[], []]
    repeats, round_ = 1, 0
    while round_ < rounds + 3:
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
        if round_ == 2 and before.elapsed_time(after) > LONG_CALL:
            rounds = min(rounds, 10)
        round_ += 1
    ratios = [this / other for this, other in zip(*times, strict=True)]
    return {
        "this ms": statistics.median(times[0]),
        "other ms": statistics.median(times[1]),
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


def main() -> None:
    """Print a table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="run the cases whose names contain one of these, separated by |")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import_other(arguments.other)
    torch.manual_seed(0)
    facts = environment(torch.device("cuda"))
    header = f"{'case':58} {'this ms':>8} {'other ms':>8}  ratio (95 % interval), peak extra memory"
    rows, lines = [], [json.dumps(facts), "", header]
    for name, make in cases():
        if not any(text in name for text in arguments.only.split("|")):
            continue
        release(torch.device("cuda"))
        row = {"case": name, **compare(make, ("liger_losses", OTHER), arguments.rounds)}
        rows.append(row)
        lines.append(line(row))
        print(lines[-1], flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
            arguments.out.with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
