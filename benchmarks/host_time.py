"""The host's time before a call's first product, without a GPU: kernels are compiled for Hopper, and none is launched.

``python -m benchmarks.host_time [--other FOLDER] [--rounds 300] [--only TEXT] [--profile] [--backward]``. FOLDER holds
a ``liger_losses`` package of another commit, which is called in turns with this checkout's.

Tensors lie on the CPU and are passed off as a GPU's, and what is large is allocated and never filled. The engine and
Triton take the way that they take on an H200, up to Triton's driver, in whose place a stand-in notes the time. What
CUDA's own calls take is left out: allocations, launches, copies, events. Times are of the process's own thread, so that
other work on the machine counts less; compare minima where there is much of it.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from benchmarks.compare import OTHER, import_other, importer
from liger_losses.kernels.reading import label_facts

ROUNDS = 300
#: Rounds before those that count, in which kernels are compiled.
FIRST_ROUNDS = 20
#: The names of the kernels that multiply hidden states by the head begin with these.
PRODUCTS = ("_exponentials_kernel", "_linear_statistics_kernel")

#: What is read of the device's properties.
H200 = SimpleNamespace(
    memory_clock_rate=3_201_000, memory_bus_width=6144, multi_processor_count=132, total_memory=140 * 2**30
)

Call = Callable[[], object]


class Launcher:
    """Stands in for the function that Triton compiles to launch one kernel."""

    #: Nanoseconds that this stand-in took to compute what the kernel of ``label_facts`` writes.
    counting: ClassVar[int] = 0
    #: When the first product of the call was launched.
    first_product: ClassVar[int | None] = None

    def __init__(self, source: Any, metadata: Any) -> None:
        self.is_product, self.counts_labels = source.name.startswith(PRODUCTS), source.name == "_label_facts_kernel"

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        if self.is_product and Launcher.first_product is None:
            Launcher.first_product = time.thread_time_ns() - Launcher.counting
        elif self.counts_labels:  # the host reads the number of active tokens
            start = time.thread_time_ns()
            out, labels = rest[4:6]
            out.copy_(label_facts([labels], -100)[0])
            Launcher.counting += time.thread_time_ns() - start


class Driver:
    """Stands in for Triton's driver of a GPU; its compute capability is by default 90, which is 9.0, an H200's."""

    launcher_cls = Launcher

    def __init__(self, capability: int = 90) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, kernel, shared, device: (1, 1, 32, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Event:
    """Stands in for an event of CUDA."""

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def without_gpu(packages: Sequence[str]) -> None:
    """Make these packages of this process take tensors on the CPU for an H200's, whose kernels are not launched."""
    from triton.runtime.driver import driver

    def product(a: Any, b: Any, *more: Any, out: Any = None, out_dtype: Any = None, **options: Any) -> Any:
        if Launcher.first_product is None:
            Launcher.first_product = time.thread_time_ns() - Launcher.counting
        return empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype) if out is None else out

    large: dict[Any, Tensor] = {}

    def empty(*size: Any, **options: Any) -> Tensor:
        """Large tensors share memory, as a GPU's allocator keeps it: asking the system for it takes longer."""
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if math.prod(shape) < 2**16:
            return allocate(*size, **options)
        key = tuple(shape), options.get("dtype")
        if key not in large:
            large[key] = allocate(*size, **options)
        return large[key].detach()

    def masked_fill(tensor: Tensor, mask: Tensor, value: float) -> Tensor:
        return fill(tensor, mask, value) if tensor.numel() < 2**16 else torch.empty_like(tensor)

    allocate, fill = torch.empty, Tensor.masked_fill
    driver.set_active(Driver())
    of_torch: dict[Any, dict[str, Any]] = {
        torch: {
            "empty": empty,
            "zeros": empty,
            **dict.fromkeys(("mm", "addmm"), product),
        },
        Tensor: {
            "is_cuda": True,
            "index_select": lambda matrix, dim, index: matrix.new_empty(len(index), *matrix.shape[1:]),
            "masked_fill": masked_fill,
            "index_copy_": lambda matrix, dim, index, source: matrix,
        },
        torch.cuda: {
            "Event": Event,
            "current_device": lambda: -1,  # what a tensor on the CPU says
            "current_stream": lambda device=None: None,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: H200,
            "is_current_stream_capturing": lambda: False,
        },
    }
    for owner, names in of_torch.items():
        for name, stand_in in names.items():
            setattr(owner, name, stand_in)
    for package in packages:
        load = importer(package)
        load(":LigerFusedLinearCrossEntropyLoss")
        load("kernels._triton:choose_backend").__globals__["INTERPRETED"] = True  # a kernel may be given such tensors
        aligned = load("kernels.matmul:_aligned")
        stand_ins = {
            "matmul_into": lambda out, a, b, *, accumulate=False, to=aligned: to(out, a, b, accumulate),
            "processors": lambda device: 132,
            "host_checks": lambda device: False,
            "assert_on_device": lambda right: None,
            "MIN_FLOPS": {"cpu": 8e12},  # a GPU's
        }
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == package:
                for key, stand_in in stand_ins.items():
                    if hasattr(module, key):
                        setattr(module, key, stand_in)


def cases(tokens: int, hidden_size: int, vocab_size: int) -> Iterator[tuple[str, Callable[[str], Call]]]:
    """Names, and what makes the call of one package; the inputs are shared."""
    # Never filled, and so never in memory.
    weight = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16)
    hidden = torch.empty(tokens, hidden_size, dtype=torch.bfloat16)
    size = f"{tokens} x {hidden_size} x {vocab_size}"
    for masked in (0.0, 0.5):
        labels = torch.randint(vocab_size, (tokens,))
        labels[: int(tokens * masked)] = -100
        said = ", half masked" if masked else ""

        def logps(package: str, labels: Tensor = labels) -> Call:
            function = importer(package)(":linear_logps")
            return lambda: function(hidden, weight, labels, backend="triton")

        def cross_entropy(package: str, labels: Tensor = labels) -> Call:
            loss = importer(package)(":LigerFusedLinearCrossEntropyLoss")(backend="triton")
            trained = [part.detach().requires_grad_() for part in (weight, hidden)]
            return lambda: loss(*trained, labels)

        def dpo(package: str, labels: Tensor = labels) -> Call:
            load = importer(package)
            loss, completions = load(":LigerFusedLinearDPOLoss")(backend="triton"), load(":Completions")
            head = weight.detach().requires_grad_()
            half, reference = tokens // 2, torch.zeros(1)
            rows = slice(0, half), slice(half, tokens)
            states = [hidden[part][None].detach().requires_grad_() for part in rows]
            pair = zip(states, [labels[part][None] for part in rows], strict=True)
            chosen, rejected = (completions(*of_one, ref_logps=reference) for of_one in pair)
            return lambda: loss(head, chosen, rejected)

        def grpo(package: str, labels: Tensor = labels) -> Call:
            loss = importer(package)(":LigerFusedLinearGRPOLoss")(beta=0.0, backend="triton")
            head, count = weight.detach().requires_grad_(), tokens // 4 * 4
            states = hidden[:count].view(4, -1, hidden_size).detach().requires_grad_()
            mask, ids = (labels[:count] >= 0).view(4, -1), labels[:count].clamp(min=0).view(4, -1)
            advantages, old = torch.tensor([1.0, -1.0, 0.5, -0.5]), torch.zeros(ids.shape)
            return lambda: loss(states, head, ids, mask, advantages, old_per_token_logps=old)

        def largest(package: str, labels: Tensor | None = labels if masked else None) -> Call:
            load = importer(package)
            function, options = load(":linear_topk"), load(":EngineOptions")(backend="triton")
            return lambda: function(hidden, weight, 64, labels, options=options)

        yield f"forward log-probabilities {size}{said}", logps
        yield f"cross-entropy {size}{said}", cross_entropy
        yield f"DPO of one pair {size}{said}", dpo
        yield f"GRPO of four completions {size}{said}", grpo
        yield f"the k largest {size}{said}", largest


def both_ways(call: Call) -> Call:
    """The call of a loss, and its backward."""

    def run() -> object:
        found: Any = call()
        loss = found[0] if isinstance(found, tuple) else found
        leaves, functions = [], [loss.grad_fn]
        while functions:
            function = functions.pop()
            leaves += [function.variable] if hasattr(function, "variable") else []
            functions += [before for before, _ in getattr(function, "next_functions", ()) if before is not None]
        return found, torch.autograd.grad(loss, leaves) if leaves else ()

    return run


class Times(NamedTuple):
    """Microseconds to the first product's launch and to the end, medians and minima."""

    product: float
    least_product: float
    end: float
    least_end: float


def measure(calls: Sequence[Call], rounds: int) -> list[Times]:
    """The times of each call, in turns."""
    times: list[list[tuple[float, float]]] = [[] for _ in calls]
    for round_ in range(FIRST_ROUNDS + rounds):
        order = range(len(calls))
        for which in order if round_ % 2 else reversed(order):
            Launcher.first_product, Launcher.counting = None, 0
            start = time.thread_time_ns()
            result = calls[which]()
            end = time.thread_time_ns() - Launcher.counting
            del result
            if Launcher.first_product is None:
                raise RuntimeError(f"no product was launched; the names of products begin with {', '.join(PRODUCTS)}")
            if round_ >= FIRST_ROUNDS:
                times[which].append(((Launcher.first_product - start) / 1e3, (end - start) / 1e3))
    columns = [list(zip(*found, strict=True)) for found in times]
    return [Times(*(of(column) for column in both for of in (statistics.median, min))) for both in columns]


def profiled(call: Call, rounds: int) -> None:
    """Print where the host's time goes, by function."""
    for _ in range(FIRST_ROUNDS):
        call()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(rounds):
        call()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--profile", action="store_true", help="also print this checkout's functions by their time")
    parser.add_argument("--backward", action="store_true", help="the end is the end of backward")
    parser.add_argument("--size", type=int, nargs=3, default=(1000, 4096, 128256), metavar=("N", "H", "V"))
    arguments = parser.parse_args()
    packages = ["liger_losses"]
    if arguments.other is not None:
        import_other(arguments.other)
        packages.append(OTHER)
    without_gpu(packages)
    torch.set_num_threads(1)
    titles = [f"{'first product':>17} {'end':>17}"] * len(packages)
    print(f"{'microseconds, medians (minima)':60}{' | '.join(titles)}")
    for name, make in cases(*arguments.size):
        if arguments.only not in name:
            continue
        try:
            calls = [both_ways(make(package)) if arguments.backward else make(package) for package in packages]
        except AttributeError as error:  # the other commit has no such operation
            print(f"{name:60}{error}")
            continue
        times = ["{:8.1f} ({:6.1f}) {:8.1f} ({:6.1f})".format(*found) for found in measure(calls, arguments.rounds)]
        print(f"{name:60}{' | '.join(times)}", flush=True)
        if arguments.profile:
            profiled(calls[0], arguments.rounds)


if __name__ == "__main__":
    main()
