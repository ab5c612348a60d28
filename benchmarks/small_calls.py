"""Losses of few tokens: calls queued one after another, as the host's time counts there; time over products.

``python -m benchmarks.small_calls [--other FOLDER] [--rounds 7] [--only TEXT] [--out FILE.json]``. FOLDER holds a
``liger_losses`` package of another commit. Products are the bare matrix products of the same sizes: one forward, three
both ways. All providers take turns within a round; medians of the rounds count. Numbers need a GPU; ``--device cpu
--tiny`` shows without one that every call runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.compare import OTHER, import_other, importer
from benchmarks.measure import environment

SHAPES = [
    (64, 576, 49152),
    (256, 576, 49152),
    (1024, 576, 49152),
    (4096, 576, 49152),
    (512, 2048, 151936),
    (256, 2048, 128256),
    (1024, 2048, 128256),
    (2048, 1024, 32000),
    (256, 4096, 128256),
    (512, 4096, 128256),
]
#: The shapes of losses on whole completions: one pair, or four completions, of these tokens in all.
COMPLETION_SHAPES = [(256, 576, 49152), (512, 2048, 151936), (2048, 1024, 32000)]
TINY = (16, 32, 96)
#: Calls that are queued before the host waits: fewer, where they take longer.
QUEUED, QUEUED_SECONDS = 12, 0.1
MASKED = 0.25

Call = Callable[[], Any]


class Inputs:
    """What all tasks of a shape share."""

    def __init__(self, tokens: int, hidden_size: int, vocab_size: int, device: str) -> None:
        self.options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.sizes, self.device = (tokens, hidden_size, vocab_size), device
        self.weight = (torch.randn(vocab_size, hidden_size, **self.options) * 0.02).requires_grad_()
        self.hidden = self.states(tokens)
        # Numbers as logits are: a GPU multiplies zeros at a higher clock.
        self.logits = (self.hidden @ self.weight.t()).detach()

    def states(self, *rows: int) -> Tensor:
        """Hidden states of so many tokens."""
        return torch.randn(*rows, self.sizes[1], **self.options).requires_grad_()

    def labels(self, *rows: int) -> Tensor:
        """Labels, of which each row begins with a masked quarter."""
        found = torch.randint(self.sizes[2], rows, device=self.device)
        found[..., : int(rows[-1] * MASKED)] = -100
        return found

    def both_ways(self, function: Callable[..., Any], *inputs: Tensor, gradient: Tensor | None = None) -> Call:
        """Calls a function of these inputs, which returns a loss or a tuple that begins with one, and its backward."""

        def call() -> None:
            found = function(*inputs)
            (found[0] if isinstance(found, tuple) else found).backward(gradient)
            for part in (*inputs, self.weight):
                part.grad = None

        return call

    def products(self, backward: bool) -> Call:
        """The bare products: of all logits, and with ``backward`` those of both gradients."""

        @torch.no_grad()
        def call() -> None:
            self.hidden @ self.weight.t()
            if backward:
                _ = self.logits @ self.weight, self.logits.t() @ self.hidden

        return call


def _packages(packages: Sequence[str]) -> Iterator[tuple[str, Callable[[str], Any]]]:
    """The name of each package in the results, and its importer."""
    for package in packages:
        yield "other" if package == OTHER else "ours", importer(package)


def _forward(function: Callable[..., Any], *inputs: Tensor) -> Call:
    @torch.no_grad()
    def call() -> None:
        function(*inputs)

    return call


def plain_logps(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Log-probabilities of the labels, 0 for masked tokens."""
    found = (h @ w.t()).float().log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
    return torch.where(y != -100, found, 0.0)


def tasks(
    inputs: Inputs, packages: Sequence[str], peers: Mapping[str, Mapping[str, Any]] = {}
) -> dict[str, dict[str, Call]]:
    """By task and provider, what is timed. ``peers`` are functions of hidden states, weight and labels."""
    tokens, h, w = inputs.sizes[0], inputs.hidden, inputs.weight
    labels, upstream = inputs.labels(tokens), torch.randn(tokens, device=inputs.device)

    def plain_cross_entropy(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((h @ w.t()).float(), y)

    compiled = torch.compile(plain_cross_entropy), torch.compile(plain_logps)
    functions: dict[str, dict[str, Any]] = {
        "cross-entropy": {"plain": plain_cross_entropy, "torch.compile": compiled[0]},
        "log-probs": {"plain": plain_logps, "torch.compile": compiled[1]},
    }
    for name, load in _packages(packages):
        loss = load(":LigerFusedLinearCrossEntropyLoss")()
        functions["cross-entropy"][name] = lambda h, w, y, loss=loss: loss(w, h, y)
        functions["log-probs"][name] = load(":linear_logps")
    functions["log-probs, forward"] = dict(functions["log-probs"])
    found: dict[str, dict[str, Call]] = {}
    for task, of_task in functions.items():
        backward, gradient = not task.endswith("forward"), None if task == "cross-entropy" else upstream
        found[task] = {"products": inputs.products(backward)}
        for name, function in {**of_task, **peers.get(task, {})}.items():
            call = inputs.both_ways(function, h, w, labels, gradient=gradient)
            found[task][name] = call if backward else _forward(function, h, w, labels)
    return found


def tasks_of_completions(inputs: Inputs, packages: Sequence[str]) -> dict[str, dict[str, Call]]:
    """DPO of one pair, whose reference's log-probabilities are given, and GRPO of four completions."""
    tokens, weight, device = inputs.sizes[0], inputs.weight, inputs.device
    sides = [inputs.states(1, tokens // 2) for _ in range(2)]
    labels = [inputs.labels(1, tokens // 2) for _ in sides]
    reference = [torch.full((1,), -0.5 * tokens, device=device) for _ in sides]
    rows = (4, tokens // 4)
    states, advantages = inputs.states(*rows), torch.tensor([1.0, -1.0, 0.5, -0.5], device=device)
    mask, ids = inputs.labels(*rows) != -100, torch.randint(inputs.sizes[2], rows, device=device)
    old = torch.full(rows, -math.log(inputs.sizes[2]), device=device)

    def plain_dpo(chosen: Tensor, rejected: Tensor) -> Tensor:
        logps = plain_logps(torch.cat([chosen, rejected]), weight, torch.cat(labels)).sum(-1)
        ratios = logps - torch.cat(reference)
        return -F.logsigmoid(0.1 * (ratios[:1] - ratios[1:])).mean()

    def plain_grpo(states: Tensor) -> Tensor:
        logps = plain_logps(states, weight, torch.where(mask, ids, -100))
        ratio, gain = (logps - old).exp(), advantages[:, None]
        objective = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -torch.where(mask, objective, 0.0).sum() / mask.sum()

    functions: dict[str, dict[str, Any]] = {
        "DPO": {"plain": plain_dpo, "torch.compile": torch.compile(plain_dpo)},
        "GRPO": {"plain": plain_grpo, "torch.compile": torch.compile(plain_grpo)},
    }
    for name, load in _packages(packages):
        completions, of_pairs = load(":Completions"), load(":LigerFusedLinearDPOLoss")()
        of_group = load(":LigerFusedLinearGRPOLoss")(beta=0.0)

        def dpo(*sides: Tensor, make: Any = completions, loss: Any = of_pairs) -> Any:
            each = zip(sides, labels, reference, strict=True)
            return loss(weight, *[make(part, y, ref_logps=logps) for part, y, logps in each])

        def grpo(states: Tensor, loss: Any = of_group) -> Any:
            return loss(states, weight, ids, mask, advantages, old_per_token_logps=old)

        functions["DPO"][name], functions["GRPO"][name] = dpo, grpo
    given = {"DPO": sides, "GRPO": [states]}
    return {
        task: {"products": inputs.products(True)}
        | {name: inputs.both_ways(function, *given[task]) for name, function in of_task.items()}
        for task, of_task in functions.items()
    }


def _has_room(call: Call) -> bool:
    try:
        call()
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """The median time of a call of each provider, in turns; of those that have room."""
    calls = {name: call for name, call in calls.items() if _has_room(call)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):  # the first compiles
        for name in list(calls)[:: -1 if round_ % 2 else 1]:
            calls[name]()
            _wait()
            start = time.perf_counter()
            calls[name]()
            _wait()
            queued = max(2, min(QUEUED, int(QUEUED_SECONDS / (time.perf_counter() - start))))
            start = time.perf_counter()
            for _ in range(queued):
                calls[name]()
            _wait()
            if round_:
                times[name].append((time.perf_counter() - start) / queued * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Print a line for each task and shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--first", type=int, help="only so many shapes")
    parser.add_argument("--only", default="", help="the tasks whose names contain this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one tiny shape")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    packages = ["liger_losses"]
    if options.other is not None:
        import_other(options.other)
        packages.append(OTHER)
    rows = []
    of_tokens = [(shape, tasks) for shape in SHAPES[: options.first]]
    of_completions = [(shape, tasks_of_completions) for shape in COMPLETION_SHAPES[: options.first]]
    for shape, make in [(TINY, tasks), (TINY, tasks_of_completions)] if options.tiny else of_tokens + of_completions:
        torch._dynamo.reset()
        for task, calls in make(Inputs(*shape, options.device), packages).items():
            if options.only not in task:
                continue
            found = milliseconds(calls, options.rounds)
            rows.append({"task": task, "shape": shape, "milliseconds": {n: round(t, 3) for n, t in found.items()}})
            over = "  ".join(f"{n} {t / found['products']:5.2f}" for n, t in found.items() if n != "products")
            size = " x ".join(map(str, shape))
            print(f"{task:20} {size:20} products {found['products']:6.3f} ms  {over}", flush=True)
    if options.out:
        text = {"environment": environment(torch.device(options.device)), "masked": MASKED, "rows": rows}
        options.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
