"""Runs benchmarks and prints a table for each: `python -m benchmarks.run [NAMES...]`."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
from benchmarks.measure import Call, MiB, NotRun, Timed, about, extra_bytes, header, in_turns, release

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
    min_ms: float | None = None
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
    """Complete a row from its times, and hold it to its workspace."""
    if row.status != "ok":
        return
    median = statistics.median(times)
    row.median_ms, row.min_ms = round(median, 4), round(min(times), 4)
    row.ratio = round(median / statistics.median(baseline), 4) if baseline else None
    row.tflops = round(benchmark.flops * shape.kept * shape.hidden * shape.vocab / median / 1e9, 4)
    if row.provider in benchmark.bounded and row.extra_mib is not None and shape.workspace is not None:
        limit = shape.workspace / MiB
        if row.extra_mib > limit:
            row.status, row.note = "failed", f"over its workspace of {limit:g} MiB"


# --- What is printed and kept --------------------------------------------------------------------------------------

_COLUMNS = ("N x H x V", "provider", "median ms", "min ms", "x GEMMs", "TFLOP/s", "extra MiB", "loss", "note")


def number(value: float | None, digits: int) -> str:
    """A number with so many decimals, `-` for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def cells(shape: str, row: Row) -> tuple[str, ...]:
    """A row's text, column by column."""
    return (
        shape,
        row.provider,
        number(row.median_ms, 2),
        number(row.min_ms, 2),
        number(row.ratio, 2),
        number(row.tflops, 3 if (row.tflops or 0) < 10 else 0),
        number(row.extra_mib, 1),
        number(row.loss, 4),
        row.note,
    )


def table(benchmark: Benchmark, results: Iterable[tuple[Shape, list[Row]]]) -> str:
    """The aligned table of a benchmark."""
    lines: list[tuple[str, ...]] = [_COLUMNS]
    details = []
    for shape, rows in results:
        details.append(describe(shape))
        lines += [cells(sizes(shape) if i == 0 else "", row) for i, row in enumerate(rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    left = (0, 1, len(_COLUMNS) - 1)
    aligned = [
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    title = f"{benchmark.name}: {benchmark.title}"
    text = f"{', '.join(dict.fromkeys(details))}; {benchmark.flops:g} N H V floating-point operations"
    return "\n".join([title, text, aligned[0], "-" * len(aligned[0]), *aligned[1:], ""])


def sizes(shape: Shape) -> str:
    """Tokens, hidden size and vocabulary size."""
    return f"{shape.tokens} x {shape.hidden} x {shape.vocab}"


def describe(shape: Shape) -> str:
    """What a shape has beside its sizes."""
    masked = f", {shape.masked:.0%} masked" if shape.masked else ""
    sequences = f", {shape.sequences} sequences" if shape.sequences > 1 else ""
    workspace = "" if shape.workspace is None else f", workspace {shape.workspace / MiB:g} MiB"
    return str(shape.dtype).removeprefix("torch.") + sequences + masked + workspace


def record(benchmark: Benchmark, results: Iterable[tuple[Shape, list[Row]]]) -> dict[str, Any]:
    """A benchmark's results as JSON has them."""
    return {
        "name": benchmark.name,
        "title": benchmark.title,
        "flops": benchmark.flops,
        "baseline": benchmark.baseline,
        "results": [
            {
                "shape": {**asdict(shape), "dtype": str(shape.dtype).removeprefix("torch."), "kept": shape.kept},
                "rows": [asdict(row) for row in rows],
            }
            for shape, rows in results
        ],
    }


def shapes_for(benchmark: Benchmark, device: torch.device, tiny: bool) -> tuple[Shape, ...]:
    """The benchmark's shapes on a device; tiny ones suit any."""
    if not tiny:
        return benchmark.shapes.get(device.type, ())
    return tuple(shape.tiny() for shape in benchmark.shapes.get(device.type) or next(iter(benchmark.shapes.values())))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; all that suit the device if none")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, help="times that each provider is timed; 10 on CUDA, 3 on a CPU")
    parser.add_argument("--out", type=Path, help="where to write JSON; the tables go beside it as .txt")
    parser.add_argument("--tiny", action="store_true", help="divide all sizes by 64, to see that everything runs")
    parser.add_argument("--list", action="store_true", help="say which benchmarks there are")
    options = parser.parse_args(argv)
    unknown = set(options.names) - {benchmark.name for benchmark in BENCHMARKS}
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; --list names them")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if options.rounds is None:
        options.rounds = 1 if options.tiny else 10 if options.device == "cuda" else 3
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line names; 1 if a provider failed other than by absence or lack of memory."""
    options = arguments(argv)
    if options.list:
        for benchmark in BENCHMARKS:
            print(f"{benchmark.name:18} {', '.join(benchmark.shapes):10} {benchmark.title}")
            print(f"{'':29} {'; '.join(benchmark.providers)}")
        return 0
    device = torch.device(options.device)
    report: dict[str, Any] = {**about(device), "rounds": options.rounds, "tiny": options.tiny, "benchmarks": []}
    texts = [*header(report)[:2], f"median of {options.rounds} rounds\n"]
    print("\n".join(texts), flush=True)
    failed = False
    for benchmark in BENCHMARKS:
        if options.names and benchmark.name not in options.names:
            continue
        shapes = shapes_for(benchmark, device, options.tiny)
        if not shapes:
            if options.names:
                print(f"{benchmark.name}: suits {', '.join(benchmark.shapes)}, not {device.type}\n", flush=True)
            continue
        results = []
        for shape in shapes:
            print(f"{benchmark.name} {sizes(shape)}", file=sys.stderr, flush=True)
            results.append((shape, measure(benchmark, shape, device, options.rounds)))
            release(device)
        gc.unfreeze()
        failed |= any(row.status == "failed" for _, rows in results for row in rows)
        report["benchmarks"].append(record(benchmark, results))
        texts.append(table(benchmark, results))
        print(texts[-1], flush=True)
        if options.out is not None:
            # After each benchmark, so that a run that is cut short leaves what it had.
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            options.out.with_suffix(".txt").write_text("\n".join(texts), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
