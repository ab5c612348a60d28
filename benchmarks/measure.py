"""Time, memory, and what they were measured on. No benchmark is known here."""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

MiB = 2**20

#: What a provider builds from its inputs: a call that returns the loss and the gradients it has allocated.
Call = Callable[[], tuple[Tensor, ...]]

#: Distributions whose versions decide what was measured.
_DISTRIBUTIONS = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "quack-kernels")


class NotRun(Exception):
    """A provider cannot run here; the message says why, and goes into the table."""


def release(device: torch.device) -> None:
    """Give unused memory back, so that what one provider left behind does not count against the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def milliseconds(call: Call, device: torch.device) -> float:
    """How long one call takes. On CUDA it is called once before, because `release` has emptied the allocator."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    call()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


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


def save(out: Path, device: torch.device, rows: Sequence[Any], description: str | None, lines: Iterable[str]) -> None:
    """Write the rows as JSON, and the description with the lines of a table as text beside it."""
    facts = environment(device)
    out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
    out.with_suffix(".txt").write_text("\n".join([json.dumps(facts), "", description or "", *lines]) + "\n")
