"""Triton if it is installed; the package can be imported without it."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch

from liger_losses.caller import warn

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch, and systems other than Linux
    triton = tl = None  # type: ignore[assignment, unused-ignore]

#: Environment variable: `torch` or `triton` for all kernels whose caller chooses no backend.
BACKEND_VARIABLE = "LIGER_LOSSES_BACKEND"
BACKENDS = ("torch", "triton")
#: Whether kernels run in Triton's interpreter, on any device.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Options of every launch that says nothing else. Triton contracts multiplications and additions by default up to 3.9,
#: and not from 3.10 on: the kernels were measured with it, and have the same bits with every version's default.
_OPTIONS = {"enable_fp_fusion": True}


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit`` with its options; without Triton, the bare function, which is never launched."""
    if function is None:
        return lambda function: jit(function, **options)
    return function if triton is None else with_options(triton.jit(function, **options))


def with_options(kernel: Any) -> Any:
    """The kernel, every launch of which has :data:`_OPTIONS`."""
    run = partial(kernel.run, **_OPTIONS)
    kernel.run = run if INTERPRETED else Run(run, kernel.arg_names)
    return kernel


#: For AMD GPUs, Triton also compiles by how much memory each tensor has: its compiled kernels are not kept.
KEEPS = torch.version.hip is None


class Run:
    """Launches a kernel. Triton finds the compiled kernel by all arguments, which takes the host longer than to launch.

    Here, the first launch of a ``kind=`` finds it for all others: the device, and all that Triton compiles for. The
    interpreter, which compiles nothing, does without.
    """

    def __init__(self, run: Callable[..., Any], names: list[str]) -> None:
        self.run, self.names, self.found, self.keeps = run, names, dict[Any, Any](), KEEPS

    def __call__(self, *arguments: Any, grid: Any, warmup: bool, kind: Hashable = None, **named: Any) -> Any:
        """Launch it; of what is given by name, kernels do without what is not."""
        found, launches = self.found.get(kind, _NOT_FOUND)
        if found is not None and not warmup:
            launch = launches.get(grid)
            if launch is None:
                if len(launches) >= _MOST_KINDS:
                    launches.clear()
                launch = launches[grid] = found[(*grid, 1, 1)[:3]]
            try:
                launch(*arguments, *map(named.get, self.names[len(arguments) :]))
                return found
            except TypeError:  # a version of Triton whose compiled kernels take other arguments: nothing was launched
                self.found, self.keeps = {}, False
        found = self.run(*arguments, grid=grid, warmup=warmup, **named)
        if kind is not None and found is not None and self.keeps and not warmup:
            if len(self.found) >= _MOST_KINDS:
                self.found.clear()
            self.found[kind] = found, {}
        return found


_MOST_KINDS = 1024
#: In the place of a compiled kernel, and what launches it for each grid.
_NOT_FOUND: tuple[Any, dict[Any, Any]] = None, {}


class Launcher:
    """A kernel all of whose launches have arguments of one kind: the same dtypes, alignments, integers and constants.

    Triton finds the compiled kernel by the arguments of each launch, which takes the host longer than to launch it.
    Here, the first launch finds it for all. Arguments are given by position, constants too.
    """

    def __init__(self, kernel: Any, *programs: int, **options: Any) -> None:
        self.kernel, self.grid, self.options = kernel, (*programs, 1, 1)[:3], options
        self.compiled: Callable[..., Any] | None = None
        self.keeps = KEEPS

    def __call__(self, *arguments: Any) -> None:
        """Launch it."""
        if self.compiled is not None:
            try:
                self.compiled(*arguments)
                return
            except TypeError:  # a version of Triton whose compiled kernels take other arguments: nothing was launched
                self.compiled, self.keeps = None, False
        found = self.kernel[self.grid](*arguments, **self.options)
        if self.keeps and found is not None:  # the interpreter compiles nothing
            self.compiled = found[self.grid]


def kinds(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """What Triton compiles for, of each tensor: see :class:`Run`."""
    return tuple([t if t is None else (t.dtype, t.stride(), t.data_ptr() % 16) for t in tensors])


#: What elementwise and row-wise kernels serve; all of them compute in fp32.
HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
#: What the kernels that read logits serve. The reference runs for fp64 logits.
LOGIT_DTYPES = (torch.float32,)


def choose_backend(
    backend: str | None,
    operands: Iterable[torch.Tensor | tuple[torch.device, torch.dtype] | None],
    *,
    dtypes: tuple[torch.dtype, ...] = HALF_AND_SINGLE,
    unsupported_reason: str | None = None,
) -> str:
    """``triton`` for tensors on a GPU that it supports, else ``torch``; an explicit choice decides first.

    Args:
        backend: the caller's choice; ``None`` for the value of the environment variable :data:`BACKEND_VARIABLE`.
        operands: the floating-point inputs, ``(device, dtype)`` of tensors that do not exist yet, or ``None`` for an
            input that was left out. The first one's device decides without an explicit choice.
        dtypes: the dtypes that the Triton kernel supports: :data:`HALF_AND_SINGLE`, or :data:`LOGIT_DTYPES`, for which
            ``torch`` runs in any other dtype without a warning.
        unsupported_reason: another reason why Triton cannot compute this call, or ``None``.

    Returns:
        ``torch`` or ``triton``.

    Raises:
        ValueError: an unknown name, or an explicit ``triton`` that cannot compute these operands on this machine.
    """
    asked = backend or os.environ.get(BACKEND_VARIABLE)
    if asked is not None and asked not in BACKENDS:
        raise ValueError(
            f"backend must be one of {', '.join(BACKENDS)}, got {asked!r} ({BACKEND_VARIABLE} or backend=)."
        )
    present = [o if isinstance(o, tuple) else (o.device, o.dtype) for o in operands if o is not None]
    if asked == "torch" or (asked is None and present[0][0].type != "cuda"):
        return "torch"
    warns = True
    for device, dtype in present:
        if dtype not in dtypes:
            names = ", ".join(str(supported).removeprefix("torch.") for supported in dtypes)
            unsupported_reason = f"it computes in fp32, from {names}, and one of the tensors is {dtype}"
            warns = dtypes is not LOGIT_DTYPES
        elif not (device.type == "cuda" or INTERPRETED):
            unsupported_reason = f"it needs a GPU, and one of the tensors is on {device}"
    if triton is None:
        unsupported_reason, warns = "triton is not installed", True
    if unsupported_reason is None:
        return "triton"
    if asked == "triton":
        raise ValueError(
            f"backend='triton' cannot serve this call: {unsupported_reason}; leave the backend out, or use 'torch'."
        )
    if warns:
        warn_once(f"A slower torch kernel runs instead of a Triton kernel: {unsupported_reason}.")
    return "torch"


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current, where Triton launches: a model may be spread over several GPUs."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


@cache
def warn_once(message: str) -> None:
    """Warn with this message the first time only."""
    warn(message, RuntimeWarning)
