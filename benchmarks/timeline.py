"""The kernels of one call on a GPU, one after another, and the gaps between them."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import Call


class Kernel(NamedTuple):
    """A kernel or a copy; times are in ns."""

    start: int
    stop: int
    name: str
    stream: int


def kernels_of(call: Call) -> list[Kernel]:
    """What one call runs on the GPU, by torch's profiler.

    It is the second of two calls under the profiler: ranks that begin together have no other distance to each other.
    """
    call()
    torch.cuda.synchronize()
    # Of the host nothing is recorded, which would slow it down.
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            call()
            torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    found = sorted(
        Kernel(event.start_ns(), event.start_ns() + event.duration_ns(), event.name(), event.device_resource_id())
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith("Activity Buffer")
    )
    return found[len(found) // 2 :]


def gaps_of(kernels: list[Kernel]) -> list[tuple[int, int, str]]:
    """``(duration, start, name of the kernel that follows)`` of each time without a kernel, the longest first."""
    found, busy_until = [], kernels[0].stop
    for kernel in kernels[1:]:
        if kernel.start > busy_until:
            found.append((kernel.start - busy_until, busy_until, kernel.name))
        busy_until = max(busy_until, kernel.stop)
    return sorted(found, reverse=True)


def report(kernels: list[Kernel], least_us: float = 20.0) -> str:
    """The sums, the longest gaps, kernels by their time, and those above ``least_us`` in order."""
    origin, end, gaps = kernels[0].start, max(kernel.stop for kernel in kernels), gaps_of(kernels)
    by_name: dict[str, list[int]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name[:90]].append(kernel.stop - kernel.start)
    idle = sum(gap for gap, *_ in gaps) / 1e6
    lines = [
        f"{(end - origin) / 1e6:.3f} ms from the first kernel to the last, {idle:.3f} ms of them in {len(gaps)} gaps "
        f"without any; {len(kernels)} kernels and copies"
    ]
    for gap, start, name in gaps[:10]:
        lines.append(f"  gap {gap / 1e3:8.1f} us at {(start - origin) / 1e6:8.3f} ms, before {name[:80]}")
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:25]:
        lines.append(f"  {sum(times) / 1e6:9.3f} ms {len(times):4} x {name}")
    lines.append(f"  in order (start ms, ms, stream, name), those above {least_us:g} us:")
    for start, stop, name, stream in kernels:
        if stop - start > least_us * 1e3:
            lines.append(f"  {(start - origin) / 1e6:9.3f} {(stop - start) / 1e6:7.3f} {stream:4} {name[:80]}")
    return "\n".join(lines)
