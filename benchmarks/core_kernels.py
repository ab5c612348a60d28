"""Norms, gated units and rotary embeddings beside others, as fractions of a copy's speed.

``python -m benchmarks.core_kernels [--out FILE.json]``; needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import environment, release
from liger_losses.layers.glu import glu
from liger_losses.layers.layer_norm import layer_norm
from liger_losses.layers.rms_norm import add_rms_norm, rms_norm
from liger_losses.layers.rope import rope

#: Written between timed calls, so that no call finds its inputs in the cache.
FLUSH_BYTES = 2**28
#: The device waits so many cycles before each timed call: the host is ahead of it, and has a column of its own.
AHEAD_CYCLES = 3_000_000
#: Columns of the table.
COLUMNS = ("provider", "forward ms", "of copy", "backward ms", "of copy", "host us")

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """Inputs of these shapes, and those who compute the same function of them.

    Args:
        name, shapes: what is measured; vectors are weights.
        forward_bytes, backward_bytes: the least that must be read and written, in bytes per byte of the first input.
        providers: by name, functions of the inputs that return one tensor or several.
        frozen: how many inputs, counted from the last, need no gradient.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    forward_bytes: float
    backward_bytes: float
    providers: dict[str, Function]
    frozen: int = 0
    compiled: str = "eager"
    small: tuple[tuple[int, ...], ...] = field(default=())


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As LlamaRMSNorm writes it."""
    u = x.float()
    return weight * (u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As a decoder layer writes it."""
    summed = residual + x
    return eager_rms_norm(summed, weight), summed


def eager_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """As apply_rotary_pos_emb writes it."""

    def rotate_half(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return tuple(x * cos + rotate_half(x) * sin for x in (q, k))


def liger(name: str, *arguments: Any, **options: Any) -> Function | None:
    """A function of liger-kernel, or None where it is not installed."""
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return None
    function = getattr(functional, name)
    return lambda *inputs: function(*inputs, *arguments, **options)


def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """It takes heads first."""
    from liger_kernel.transformers.functional import liger_rope

    return liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def cases() -> Iterator[Case]:
    """What is measured."""
    for rows, columns in ((16384, 4096), (4096, 2048), (32768, 1024)):
        yield Case(
            f"RMSNorm {rows} x {columns}",
            ((rows, columns), (columns,)),
            2,
            3,
            {
                "eager": eager_rms_norm,
                "F.rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
                "liger-kernel": liger("liger_rms_norm", 1e-6, in_place=False),
                "liger_losses": rms_norm,
            },
            small=((16, columns), (columns,)),
        )
    shape = (8192, 14336)
    yield Case(
        "SiLU-mul 8192 x 14336",
        (shape, shape),
        3,
        5,
        {
            "eager": lambda gate, up: F.silu(gate) * up,
            "liger-kernel": liger("liger_swiglu"),
            "liger_losses": glu,
        },
        small=((16, 14336), (16, 14336)),
    )
    shape = (16384, 4096)
    yield Case(
        "add + RMSNorm 16384 x 4096",
        (shape, shape, (4096,)),
        4,
        4,
        {
            "eager": eager_add_rms_norm,
            "liger-kernel": liger("liger_fused_add_rms_norm", 1e-6, in_place=False),
            "liger_losses": add_rms_norm,
        },
        small=((16, 4096), (16, 4096), (4096,)),
    )
    yield Case(
        "LayerNorm 16384 x 4096",
        (shape, (4096,), (4096,)),
        2,
        3,
        {
            "F.layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
            "liger-kernel": liger("liger_layer_norm", 1e-5),
            "liger_losses": layer_norm,
        },
        compiled="F.layer_norm",
        small=((16, 4096), (4096,), (4096,)),
    )
    yield Case(
        "RoPE 4 x 4096 tokens, 32 and 8 heads of 128",
        ((4, 4096, 32, 128), (4, 4096, 8, 128), (1, 4096, 128), (1, 4096, 128)),
        2.5,
        2.5,
        {
            "eager": eager_rope,
            "liger-kernel": liger_rope if liger("liger_rope") else None,
            "liger_losses": lambda *inputs: rope(*inputs, unsqueeze_dim=2),
        },
        frozen=2,
        small=((1, 16, 32, 128), (1, 16, 8, 128), (1, 16, 128), (1, 16, 128)),
    )


class Call:
    """One provider on inputs of its own: some write over theirs."""

    def __init__(self, function: Function, originals: list[Tensor], frozen: int) -> None:
        self.function, self.originals = function, originals
        count = len(originals) - frozen
        self.inputs = [x.clone().requires_grad_(i < count) for i, x in enumerate(originals)]
        self.needed = self.inputs[:count]
        self.outputs: tuple[Tensor, ...] = ()
        self.upstream: list[Tensor] = []

    def forward(self) -> None:
        outputs = self.function(*self.inputs)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def backward(self) -> None:
        torch.autograd.grad(self.outputs, self.needed, self.upstream, retain_graph=True)

    def prepare(self) -> None:
        """The inputs as they were, outputs with a graph, and upstream gradients for them."""
        for x, original in zip(self.inputs, self.originals, strict=True):
            x.data.copy_(original)
        if not self.upstream:
            self.forward()
            self.upstream = [torch.randn_like(y) for y in self.outputs]


class Copy:
    """As many bytes, read and written by a copy."""

    def __init__(self, forward_bytes: int, backward_bytes: int) -> None:
        self.buffers = [torch.randint(256, (2, n // 2), dtype=torch.uint8, device="cuda") for n in
                        (forward_bytes, backward_bytes)]  # fmt: skip

    def prepare(self) -> None:
        pass

    def forward(self) -> None:
        self.buffers[0][0].copy_(self.buffers[0][1])

    def backward(self) -> None:
        self.buffers[1][0].copy_(self.buffers[1][1])


def milliseconds(calls: dict[str, Any], step: str, rounds: int, flush: Tensor) -> dict[str, float]:
    """The median time of each call's step, all calls taking turns."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call.prepare()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(AHEAD_CYCLES)
            before.record()
            getattr(call, step)()
            after.record()
            events[name].append((before, after))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def host_microseconds(call: Call, repeats: int = 50) -> float:
    """How long the host takes for a forward and a backward, on inputs that take the device no time."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call.forward()
            call.backward()
        times.append((time.perf_counter() - start) / repeats * 1e6)
    return min(times)


def measure(case: Case, rounds: int, compile_: bool, flush: Tensor) -> dict[str, dict[str, float | None]]:
    """All providers of one case: milliseconds, fractions of the copy's speed, microseconds of the host."""
    functions = {name: function for name, function in case.providers.items() if function is not None}
    host = {}
    for name, function in functions.items():
        call = Call(function, [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in case.small], case.frozen)
        call.prepare()
        call.backward()
        host[name] = host_microseconds(call)

    if compile_:  # once, for the large inputs: its host time is not measured
        torch._dynamo.reset()
        functions["torch.compile"] = torch.compile(case.providers[case.compiled], dynamic=False)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in case.shapes]
    unit = inputs[0].numel() * inputs[0].element_size()
    calls: dict[str, Any] = {"copy": Copy(int(case.forward_bytes * unit), int(case.backward_bytes * unit))}
    calls |= {name: Call(function, inputs, case.frozen) for name, function in functions.items()}
    for call in calls.values():  # to compile, and to tune
        call.prepare()
        call.backward()
    forward, backward = (milliseconds(calls, step, rounds, flush) for step in ("forward", "backward"))
    rows = {
        name: {
            "forward_ms": forward[name],
            "forward_of_copy": forward["copy"] / forward[name],
            "backward_ms": backward[name],
            "backward_of_copy": backward["copy"] / backward[name],
            "host_us": host.get(name),
        }
        for name in calls
    }
    del calls
    release(torch.device("cuda"))
    return rows


def table(name: str, rows: dict[str, dict[str, float | None]]) -> str:
    """One case, as text."""
    lines = [name, "{:>16} {:>11} {:>8} {:>12} {:>8} {:>8}".format(*COLUMNS)]
    for provider, row in rows.items():
        forward, forward_of, backward, backward_of, host = row.values()
        shown = "" if host is None else f"{host:.0f}"
        lines.append(
            f"{provider:>16} {forward:>11.4f} {forward_of:>8.0%} {backward:>12.4f} {backward_of:>8.0%} {shown:>8}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="FILE.json; the tables go to FILE.txt beside it")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a GPU.")
    torch.manual_seed(0)
    # Graphs are kept from one timed backward to the next.
    torch._functorch.config.donated_buffer = False
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    results: dict[str, Any] = {"environment": environment(torch.device("cuda")), "cases": {}}
    texts = []
    for case in cases():
        if arguments.only not in case.name:
            continue
        results["cases"][case.name] = measure(case, arguments.rounds, not arguments.no_compile, flush)
        texts.append(table(case.name, results["cases"][case.name]))
        print(texts[-1], flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
            arguments.out.with_suffix(".txt").write_text("\n".join(texts))


if __name__ == "__main__":
    main()
