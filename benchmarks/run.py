"""Runs benchmarks and prints a table for each: `python -m benchmarks.run [NAMES...]`."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    cross_entropy_entries,
    distillation_entries,
    kept_columns_entries,
    logps_entries,
    many_heads_entries,
    objectives_entries,
    policy_entries,
    preference_entries,
)
from benchmarks.entries import Benchmark, Shape
from benchmarks.measure import Call, MiB, NotRun, Timed, extra_bytes, in_turns, release, save

BENCHMARKS = (
    *cross_entropy_entries.BENCHMARKS,
    *logps_entries.BENCHMARKS,
    *preference_entries.BENCHMARKS,
    *policy_entries.BENCHMARKS,
    *distillation_entries.BENCHMARKS,
    *kept_columns_entries.BENCHMARKS,
    *many_heads_entries.BENCHMARKS,
    *objectives_entries.BENCHMARKS,
)


@dataclass
class Row:
    """What was measured of one provider on one shape; `None` for what was not.

    Args:
        status: `ok`, `not run` (the note says why), `out of memory` or `failed`.
        ratio: median time over the baseline's.
        tflops: the benchmark's nominal work over the median time, in TFLOP/s.
        extra_mib: peak memory beyond inputs and outputs.
    """

    provider: str
    status: str = "ok"
    note: str = ""
    median_ms: float | None = None
    ratio: float | None = None
    tflops: float | None = None
    extra_mib: float | None = None
    loss: float | None = None


def attempt(row: Row, device: torch.device, work: Callable[..., Any], *given: Any) -> Any:
    """The work's result; where it raises, `None`, and the row says why."""
    try:
        return work(*given)
    except NotRun as reason:
        row.status, row.note = "not run", str(reason)
    except torch.OutOfMemoryError:
        row.status, row.note = "out of memory", "out of memory"
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        # A host's allocator has no exception class of its own.
        full = "DefaultCPUAllocator" in first
        row.status = "out of memory" if full else "failed"
        row.note = "out of memory" if full else f"{type(error).__name__}: {first[:120]}"
    # The exception is gone here, and with it the frames that held tensors.
    release(device)
    return None


def measure(benchmark: Benchmark, shape: Shape, device: torch.device, rounds: int) -> list[Row]:
    """All providers on one shape: time in turns, so that a clock that changes changes for all; then memory."""
    row = Row("(inputs)")
    inputs = attempt(row, device, benchmark.inputs, shape, device)
    if inputs is None:
        return [row]
    rows = {name: Row(name) for name in benchmark.providers}
    calls: dict[str, Call] = {}
    for name, provider in benchmark.providers.items():
        call = attempt(rows[name], device, provider, inputs)
        if call is not None:
            attempt(rows[name], device, warm_up, rows[name], call, device)
            calls[name] = call
        release(device)
        # Collecting garbage again and again among all that was imported would take longer than most calls.
        gc.freeze()
    times = in_turns({name: Timed(calls[name]) for name in running(calls, rows)}, rounds, device)
    for name in running(calls, rows):
        # The baseline's buffers are allocated before it is called, so that its memory would mean nothing.
        if name != benchmark.baseline:
            extra = attempt(rows[name], device, extra_bytes, calls[name], device)
            rows[name].extra_mib = None if extra is None else round(extra / MiB, 3)
            release(device)
    for row in rows.values():
        summarise(row, times.get(row.provider, []), times.get(benchmark.baseline or "", []), benchmark, shape)
    return list(rows.values())


def running(calls: dict[str, Call], rows: dict[str, Row]) -> list[str]:
    """The providers that have not failed so far."""
    return [name for name in calls if rows[name].status == "ok"]


def warm_up(row: Row, call: Call, device: torch.device) -> None:
    """Compile, tune and allocate whatever the first call does, and note the loss."""
    outputs = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # errors of the device's show up here, not in the next provider
    row.loss = float(outputs[0]) if outputs else None


def summarise(row: Row, times: list[float], baseline: list[float], benchmark: Benchmark, shape: Shape) -> None:
    """Complete a row from its times."""
    if row.status != "ok":
        return
    median = statistics.median(times)
    row.median_ms = round(median, 4)
    row.ratio = round(median / statistics.median(baseline), 4) if baseline else None
    row.tflops = round(benchmark.flops * shape.kept * shape.hidden * shape.vocab / median / 1e9, 4)


# --- What is printed and kept --------------------------------------------------------------------------------------


def line(size: str, row: Row, baseline: str | None) -> str:
    """A row of a table."""
    if row.median_ms is None:
        return f"{size:24} {row.provider:34} {row.note}"
    ratio = "" if row.ratio is None else f"{row.ratio:8.3f} x {baseline}"
    extra = "" if row.extra_mib is None else f"{row.extra_mib:9.1f} MiB"
    loss = "" if row.loss is None else f"  loss {row.loss:.4f}"
    speed = f"{row.median_ms:10.2f} ms {row.tflops:8.3g} TFLOP/s"
    return f"{size:24} {row.provider:34} {speed} {ratio:16} {extra:13} {loss}".rstrip()


def sizes(shape: Shape) -> str:
    """Tokens, hidden size and vocabulary size."""
    return f"{shape.tokens} x {shape.hidden} x {shape.vocab}"


def describe(shape: Shape) -> str:
    """What a shape has beside its sizes."""
    masked = f", {shape.masked:.0%} masked" if shape.masked else ""
    sequences = f", {shape.sequences} sequences" if shape.sequences > 1 else ""
    return str(shape.dtype).removeprefix("torch.") + sequences + masked


def shapes_for(benchmark: Benchmark, device: torch.device, tiny: bool) -> tuple[Shape, ...]:
    """The benchmark's shapes on a device; tiny ones suit any."""
    if not tiny:
        return benchmark.shapes.get(device.type, ())
    return tuple(shape.tiny() for shape in benchmark.shapes.get(device.type) or next(iter(benchmark.shapes.values())))


def main() -> int:
    """Run what the command line names; 1 if a provider failed other than by absence or lack of memory."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; all that suit the device if none")
    parser.add_argument("--rounds", type=int, default=10 if torch.cuda.is_available() else 3)
    parser.add_argument("--out", type=Path, help="where to write JSON; the tables go beside it as .txt")
    parser.add_argument("--tiny", action="store_true", help="divide all sizes by 64, to see that everything runs")
    parser.add_argument("--list", action="store_true", help="say which benchmarks there are")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; --list names them")
    if options.list:
        for benchmark in BENCHMARKS:
            print(f"{benchmark.name:18} {', '.join(benchmark.shapes):10} {benchmark.title}")
            print(f"{'':29} {'; '.join(benchmark.providers)}")
        return 0
    device, failed = torch.device("cuda" if torch.cuda.is_available() else "cpu"), False
    rows, lines = list[dict[str, Any]](), list[str]()
    for benchmark in BENCHMARKS:
        shapes = shapes_for(benchmark, device, options.tiny) if benchmark.name in (options.names or names) else ()
        for shape in shapes:
            found = measure(benchmark, shape, device, options.rounds)
            release(device)
            gc.unfreeze()
            failed |= any(row.status == "failed" for row in found)
            rows += [{"benchmark": benchmark.name, "size": sizes(shape), **vars(row)} for row in found]
            titles = [] if shape != shapes[0] else [f"{benchmark.name}: {benchmark.title}; {describe(shape)}"]
            printed = [*titles, *(line(sizes(shape), row, benchmark.baseline) for row in found), ""]
            print(*printed, sep="\n", flush=True)
            lines += printed
            if options.out:  # a run that is cut short leaves what it had
                save(options.out, device, rows, lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
