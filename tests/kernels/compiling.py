"""Compiles for a GPU what the calls of :mod:`tests.kernels.launches` launch, on any machine, and runs nothing.

``python -m tests.kernels.compiling sm_90`` prints a line for each launch, and at the end the kernels without one;
``python -m tests.kernels.compiling gfx942 all RMSNorm`` does so for the calls whose names contain a text.

The library runs with tensors that have no values, and believes itself on the GPU. Triton finds the types of the
arguments, as for any launch, and what it would compile is kept; then it is compiled for the GPU as its target.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

KiB = 1024


class Target(NamedTuple):
    """A GPU: what Triton calls its architecture, threads of a warp, the compute capability that torch tells, its
    multiprocessors, and bytes of shared memory that a program can take."""

    architecture: int | str
    warp: int
    capability: tuple[int, int]
    processors: int
    shared_memory: int

    @property
    def triton(self) -> GPUTarget:
        return GPUTarget("cuda" if isinstance(self.architecture, int) else "hip", self.architecture, self.warp)


#: One GPU of each architecture, by the name that its compiler has for it.
TARGETS = {
    "sm_80": Target(80, 32, (8, 0), 108, 163 * KiB),  # A100
    "sm_86": Target(86, 32, (8, 6), 82, 99 * KiB),  # RTX 3090
    "sm_89": Target(89, 32, (8, 9), 128, 99 * KiB),  # RTX 4090
    "sm_90": Target(90, 32, (9, 0), 132, 227 * KiB),  # H100, H200
    "sm_100": Target(100, 32, (10, 0), 148, 227 * KiB),  # B200
    "sm_103": Target(103, 32, (10, 3), 148, 227 * KiB),  # B300
    "sm_120": Target(120, 32, (12, 0), 170, 99 * KiB),  # RTX 5090
    "gfx90a": Target("gfx90a", 64, (9, 0), 104, 64 * KiB),  # MI250X
    "gfx942": Target("gfx942", 64, (9, 4), 304, 64 * KiB),  # MI300X
    "gfx950": Target("gfx950", 64, (9, 5), 256, 160 * KiB),  # MI355X
    "gfx1201": Target("gfx1201", 32, (12, 0), 32, 64 * KiB),  # RX 9070 XT
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


def tell(target: Target, assign: Callable[[Any, str, Any], None] = setattr) -> None:
    """Torch tells of a GPU what it tells in its builds for CUDA and for ROCm."""
    cuda, shared = isinstance(target.architecture, int), target.shared_memory
    of_kind = {"shared_memory_per_block_optin": shared} if cuda else {"gcnArchName": f"{target.architecture}:sramecc+"}
    properties = SimpleNamespace(
        shared_memory_per_block=48 * KiB if cuda else shared,
        multi_processor_count=target.processors,
        warp_size=target.warp,
        **of_kind,
    )
    assign(torch.version, "hip", None if cuda else "7.0")
    assign(torch.cuda, "get_device_capability", lambda device=None: target.capability)
    assign(torch.cuda, "get_device_properties", lambda device: properties)
    assign(torch.cuda, "get_device_name", lambda device=None: "a GPU")


def pretend(target: Target) -> None:
    """Let this process, which has not imported the library yet, take tensors without values for tensors on a GPU."""
    assert "liger_losses" not in sys.modules
    tell(target)
    torch.is_autocast_enabled = lambda kind=None: False  # torch knows no autocast of the meta device

    from liger_losses import checks
    from liger_losses.kernels import _triton, targets

    known = targets.target_of(torch.device("cuda"))
    for module in list(sys.modules.values()):
        if module.__name__.startswith("liger_losses.") and hasattr(module, "target_of"):
            module.target_of = lambda device_: known  # which the calls ask of the meta device
    _triton.INTERPRETED = True  # kernels take tensors that are not on a GPU
    os.environ[_triton.BACKEND_VARIABLE] = "triton"
    checks.WITHOUT_VALUES = ()
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target.triton, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )


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


def riskiest(found: list[Launch]) -> list[Launch]:
    """What each target's registers and shared memory decide about: the launches of kernels over tiles of products and
    of whole rows with the most arguments. And a divergence, whose functions are not those of every compiler."""
    products = "linear_exp._exponentials", "linear_exp._hard_rows"
    kinds = (*products, "rms_norm._backward", "divergence_kernels.divergence")
    # Of rows of an odd length, Blackwell's tensor cores multiply nothing.
    fewest_first = sorted(
        found, key=lambda launch: ("odd" not in launch.call, -str(launch.signature).count("constexpr"))
    )
    most = {launch.name: launch for launch in fewest_first if launch.name.startswith(kinds)}
    return list(most.values())


def not_launched(found: list[Launch]) -> list[str]:
    """Functions for GPUs that no launch runs, none takes as an argument, and no other such function calls."""
    import liger_losses

    for package in (liger_losses.kernels, liger_losses.layers, liger_losses.chunked.accelerators):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
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
    # Of forms, also the functions that they take by default.
    jitted = [function for function in functions | used if isinstance(function, JITFunction)]
    defaults = [parameter.default for function in jitted for parameter in function.signature.parameters.values()]
    used |= {default for default in defaults if isinstance(default, JITFunction)}
    return sorted(f"{f.module}.{f.__name__}" for f in functions - used if f.__name__ not in called)


def spilled(asm: Mapping[str, Any]) -> int:
    """Bytes of a thread that are in memory for want of registers, as LLVM or NVIDIA's assembler says."""
    if "amdgcn" in asm:
        return int(re.findall(r"\.private_segment_fixed_size: +(\d+)$", asm["amdgcn"], re.MULTILINE)[-1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage)))


def compiled(launch: Launch) -> dict[str, Any]:
    """Bytes that a thread spills into memory, shared memory and threads of a program, and whether Blackwell's tensor
    cores multiply; or the compiler's error."""
    line: dict[str, Any] = {"kernel": launch.name, "call": launch.call}
    target = driver.active.get_current_target()
    try:
        source = launch.kernel.ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
        made = triton.compile(source, target=target, options=launch.options)
    except Exception as error:
        return line | {"error": f"{type(error).__name__}: {error}"}
    threads = launch.options["num_warps"] * target.warp_size
    tcgen05 = "tcgen05.mma" in made.asm.get("ptx", "")
    return line | {"spilled": spilled(made.asm), "shared": made.metadata.shared, "threads": threads, "tcgen05": tcgen05}


def main(target: str, choice: str = "all", text: str = "") -> Iterator[dict[str, Any]]:
    """A line for each launch, or the riskiest, of the calls whose names contain the text; and at the end the kernels
    without a launch, and those whose multiplications and additions are not contracted, as Triton may be told to do."""
    pretend(TARGETS[target])
    from tests.kernels import launches

    found = recorded({name: call for name, call in launches.calls().items() if text in name})
    yield from map(compiled, riskiest(found) if choice == "riskiest" else found)
    if not text:
        apart = sorted({launch.name for launch in found if not launch.options["enable_fp_fusion"]})
        yield {"not launched": not_launched(found), "not contracted": apart}


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("Triton's interpreter compiles nothing: unset TRITON_INTERPRET.")
    for line in main(*sys.argv[1:]):
        print(json.dumps(line), flush=True)
