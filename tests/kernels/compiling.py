"""Compiles for a GPU what the calls of :mod:`tests.kernels.launches` launch, on any machine, and runs nothing.

``python -m tests.kernels.compiling h200`` prints a line for each launch, and at the end the kernels without one;
``python -m tests.kernels.compiling h200 all RMSNorm`` does so for the calls whose names contain a text.

The library runs with tensors that have no values, and believes itself on the GPU. Triton finds the types of the
arguments, as for any launch, and what it would compile is kept; then it is compiled for the GPU as its target.
"""

from __future__ import annotations

import ast
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import liger_losses.kernels
from benchmarks.host_time import Driver
from liger_losses.chunked.engine import checks, two_models
from liger_losses.kernels import _tiles, _triton
from tests.kernels import launches


class Device(NamedTuple):
    """A GPU: its compute capability (90 is 9.0), multiprocessors, and bytes of shared memory that a program can take.

    The smaller GPUs of a generation run the same code with less shared memory.
    """

    capability: int
    processors: int
    shared_memory: int


DEVICES = {
    "h200": Device(90, 132, 232448),
    "b200": Device(100, 148, 232448),
    "rtx5090": Device(120, 170, 101376),
    "a100": Device(80, 108, 166912),
    "rtx4090": Device(89, 128, 101376),
}


class Launch(NamedTuple):
    """A launch that is the first of its kind: the call that it is part of, and all that is compiled into the kernel."""

    call: str
    kernel: JITFunction
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.module.rpartition('.')[2]}.{self.kernel.__name__}"

    def facts(self) -> set[tuple[str, str, str]]:
        """The type of each argument, each constant and option."""
        kinds = (self.signature, self.constants, self.options)
        return {(self.name, f"{i} {what}", str(value)) for i, kind in enumerate(kinds) for what, value in kind.items()}


def pretend(device: Device) -> None:
    """Let this process take tensors without values for tensors on a GPU."""
    properties = SimpleNamespace(shared_memory_per_block_optin=device.shared_memory)
    torch.cuda.get_device_capability = lambda device_=None: divmod(device.capability, 10)
    torch.cuda.get_device_properties = lambda device_: properties
    torch.cuda.get_device_name = lambda device_=None: "a GPU that is not there"
    torch.is_autocast_enabled = lambda kind=None: False  # torch knows no autocast of the meta device
    accelerated = _tiles.has_tma(torch.device("cuda"))
    _tiles.has_tma = lambda device_: accelerated
    for module in list(sys.modules.values()):
        if module.__name__.startswith("liger_losses.") and hasattr(module, "processors"):
            module.processors = lambda device_: device.processors
    _triton.INTERPRETED = True  # kernels take tensors that are not on a GPU
    os.environ[_triton.BACKEND_VARIABLE] = "triton"
    checks.WITHOUT_VALUES = ()
    two_models._DEVICES_OF_LSE = ("meta",)
    driver.set_active(Driver(device.capability))


def recorded(calls: Mapping[str, Callable[[], None]]) -> list[Launch]:
    """What the calls launch, each kind once."""
    found: dict[Any, Launch] = {}
    call = ""

    def keep(
        kernel: JITFunction, key: Any, signature: Any, _: int, constants: Any, options: Any, attributes: Any, *rest: Any
    ) -> None:
        found.setdefault((kernel, key), Launch(call, kernel, signature, constants, attributes, vars(options)))

    JITFunction._do_compile = keep  # and nothing is launched that was not compiled
    for call, run in calls.items():  # noqa: B007, as `keep` reads it
        run()
    return list(found.values())


def covering(found: list[Launch]) -> list[Launch]:
    """Those that have a fact that no launch before them has: not every combination of the facts."""
    known, chosen = set[tuple[str, str, str]](), []
    for launch in found:
        if not launch.facts() <= known:
            known |= launch.facts()
            chosen.append(launch)
    return chosen


def ends(found: list[Launch]) -> list[Launch]:
    """Of each kernel, a launch with the fewest arguments, and one with the most: others are ``None``."""
    by_size = sorted(found, key=lambda launch: str(launch.signature).count("constexpr"))
    most = {launch.name: launch for launch in by_size}
    fewest = {launch.name: launch for launch in reversed(by_size)}
    return [*most.values(), *(launch for name, launch in fewest.items() if launch is not most[name])]


#: Which launches are compiled.
CHOICES = {"all": list, "covering": covering, "ends": ends}


def not_launched(found: list[Launch]) -> list[str]:
    """Functions for GPUs that no launch runs, none takes as an argument, and no other such function calls."""
    for module in pkgutil.iter_modules(liger_losses.kernels.__path__, "liger_losses.kernels."):
        importlib.import_module(module.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("liger_losses.")]
    functions = {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
    called = {
        node.id
        for function in functions
        for node in ast.walk(function.parse())
        if isinstance(node, ast.Name) and node.id != function.__name__
    }
    used = {launch.kernel for launch in found} | {
        value for launch in found for value in launch.constants.values() if isinstance(value, JITFunction)
    }
    return sorted(f"{f.module}.{f.__name__}" for f in functions - used if f.__name__ not in called)


def compiled(launch: Launch) -> dict[str, Any]:
    """Registers of a thread, bytes that it spills into memory, shared memory of a program; or the compiler's error."""
    line: dict[str, Any] = {"kernel": launch.name, "call": launch.call}
    start = time.perf_counter()
    try:
        source = launch.kernel.ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
        made = triton.compile(source, target=driver.active.get_current_target(), options=launch.options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        of = {kind: int(number) for kind, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
        line |= {"registers": of["REG"], "spilled": of["STACK"] + of["LOCAL"], "shared": made.metadata.shared}
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"
    return line | {"seconds": round(time.perf_counter() - start, 2)}


_launches: list[Launch] = []


def _compiled(number: int) -> dict[str, Any]:
    return compiled(_launches[number])


def main(device: str, choice: str = "all", text: str = "") -> Iterator[dict[str, Any]]:
    """A line for each launch of the calls whose names contain the text, and one of the kernels without a launch."""
    pretend(DEVICES[device])
    found = recorded({name: call for name, call in launches.calls().items() if text in name})
    _launches[:] = CHOICES[choice](found)
    # Processes that are forked have what was recorded.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_compiled, range(len(_launches)))
    if not text:
        yield {"not launched": not_launched(found)}


if __name__ == "__main__":
    if _triton.INTERPRETED:
        raise SystemExit("Triton's interpreter compiles nothing: unset TRITON_INTERPRET.")
    for line in main(*sys.argv[1:]):
        print(json.dumps(line), flush=True)
