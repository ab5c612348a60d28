"""Time, memory, and what they were measured on. No benchmark is known here."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

MiB = 2**20

#: Calls that take fewer milliseconds are timed twenty at a time, queued while the device waits for so many cycles.
SHORT_CALL = 2.0
AHEAD_CYCLES = 10_000_000

#: What a provider builds from its inputs: a call that returns the loss and the gradients it has allocated.
Call = Callable[[], tuple[Tensor, ...]]

#: Distributions whose versions decide what was measured.
_DISTRIBUTIONS = ("torch", "triton", "transformers", "trl", "liger-kernel")


class NotRun(Exception):
    """A provider cannot run here; the message says why, and goes into the table."""


def release(device: torch.device) -> None:
    """Give unused memory back, so that what one provider left behind does not count against the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Timed:
    """What a provider runs, and within which context, which is entered before the clock starts."""

    call: Call
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def in_turns(timed: Mapping[str, Timed], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of every provider's calls, which have run before: a round is one of each, the next the other way.

    Calls that take less than :data:`SHORT_CALL` are timed twenty at a time, which the host queues while the device
    waits, as it does behind a model's work. A time is the slowest rank's.
    """
    times: dict[str, list[float]] = {name: [] for name in timed}
    repeats = dict.fromkeys(timed, 1)
    for round_ in range(-1, rounds):
        for name in list(timed)[:: -1 if round_ % 2 else 1]:
            with timed[name].within():
                ms = slowest(milliseconds(timed[name].call, device, repeats[name]))
            if round_ >= 0:
                times[name].append(ms)
            elif ms < SHORT_CALL and device.type == "cuda":
                repeats[name] = 20
    return times


def milliseconds(call: Call, device: torch.device, repeats: int = 1) -> float:
    """How long one of so many calls takes."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) * 1e3 / repeats
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(AHEAD_CYCLES * (repeats > 1))
    before.record()
    for _ in range(repeats):
        call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / repeats


def interval(values: Sequence[float], draws: int = 1000) -> tuple[float, float]:
    """The 95 % interval of the median by a bootstrap."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def extra_bytes(call: Call, device: torch.device) -> int:
    """The peak of what a call allocates, less its outputs."""
    peak, outputs = _peak_cuda(call, device) if device.type == "cuda" else _peak_cpu(call)
    return max(peak - storage_bytes(outputs), 0)


def _peak_cuda(call: Call, device: torch.device) -> tuple[int, tuple[Tensor, ...]]:
    """The allocator's peak above what was allocated before the call, and the call's outputs."""
    release(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    outputs = call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, outputs


def _peak_cpu(call: Call) -> tuple[int, tuple[Tensor, ...]]:
    """The peak of the running total of the allocator's events, temporaries inside operators among them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        outputs = call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            total += event.nbytes()
            peak = max(peak, total)
    return peak, outputs


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def check_host_memory(needed: int, device: torch.device) -> None:
    """Refuse what would take over a quarter of the host's memory: a host that runs out does not raise, it kills."""
    if device.type != "cpu":
        return
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total // 4:
        raise NotRun(f"not run: needs {needed / 2**30:.1f} GiB of {total / 2**30:.1f}")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware."""
    import liger_losses

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "liger-losses": liger_losses.__version__,
        **{name: _version(name) for name in _DISTRIBUTIONS},
    }


def _version(distribution: str) -> str | None:
    """The installed version, `None` where there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The processor's name as Linux has it, else what Python knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


# --- Several processes ------------------------------------------------------------------------------------------------


def start_ranks(work: Callable[..., None], ranks: int | None, *arguments: Any) -> None:
    """Run ``work(device, *arguments)`` on so many processes of a group, by default on all GPUs, or two on a CPU."""
    ranks = ranks or max(2, torch.cuda.device_count())
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        raise SystemExit(f"{ranks} processes need {ranks} GPUs, and there are {torch.cuda.device_count()}.")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    mp.spawn(_member, (ranks, port, work, arguments), nprocs=ranks)


def _member(rank: int, ranks: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))  # which transformers reads
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if cuda else "gloo", init_method=address, rank=rank, world_size=ranks)
    work(device, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def slowest(value: float) -> float:
    """The largest of all ranks' values; without a group, the value."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


# --- What is written --------------------------------------------------------------------------------------------------


def commit() -> str:
    """This checkout's commit; a copy of a tree has none, so that the variable ``COMMIT`` may name it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or done.stdout.strip() or "unknown"


def about(device: torch.device) -> dict[str, Any]:
    """When, of which commit, by which command and on what something is measured."""
    now = datetime.now(timezone.utc).isoformat(timespec="minutes")
    command = f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}".rstrip()
    return {"date": now, "commit": commit(), "command": command, "environment": environment(device)}


def header(facts: Mapping[str, Any]) -> list[str]:
    """The first lines of a file of results."""
    versions = ", ".join(f"{name} {value}" for name, value in facts["environment"].items() if value is not None)
    return [f"{facts['date']}, commit {facts['commit']}: {facts['command']}", versions, ""]


def save(out: Path, device: torch.device, rows: Sequence[Any], lines: Iterable[str]) -> None:
    """Write the rows as JSON, and the lines of a table as text beside it."""
    facts = about(device)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".txt").write_text("\n".join([*header(facts), *lines]) + "\n", encoding="utf-8")
