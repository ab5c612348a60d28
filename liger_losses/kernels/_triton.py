"""Triton if it is installed; the package can be imported without it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
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
    kernel.run = partial(kernel.run, **_OPTIONS)
    return kernel


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
    if asked == "torch":
        return asked
    warns, chosen = True, asked is not None
    for operand in operands:
        if operand is None:
            continue
        device, dtype = operand if isinstance(operand, tuple) else (operand.device, operand.dtype)
        if not chosen and device.type != "cuda":
            return "torch"
        chosen = True
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


def power_of_two(number: int) -> int:
    """The smallest power of two that is no smaller than ``number``."""
    return 1 << max(number - 1, 0).bit_length()


@cache
def warn_once(message: str) -> None:
    """Warn with this message the first time only."""
    warn(message, RuntimeWarning)
