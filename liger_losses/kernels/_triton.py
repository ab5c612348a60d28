"""Triton where it is installed; a package that imports without it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch, and systems other than Linux
    triton = tl = None  # type: ignore[assignment, unused-ignore]

#: `torch` or `triton` for every kernel, unless a call says otherwise.
BACKEND_VARIABLE = "LIGER_LOSSES_BACKEND"
BACKENDS = ("torch", "triton")


#: Whether kernels run in Triton's interpreter, on any device.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit`` with its options, or the bare function where it will never be launched."""
    if function is None:
        return lambda function: jit(function, **options)
    return function if triton is None else triton.jit(function, **options)


def choose_backend(tensor: torch.Tensor, backend: str | None = None) -> str:
    """``triton`` for fp32 on a GPU, else ``torch``; an explicit choice or the environment variable decides first.

    Raises:
        ValueError: an unknown name, or ``triton`` for a tensor or machine that it cannot serve.
    """
    asked = backend or os.environ.get(BACKEND_VARIABLE)
    if asked is not None and asked not in BACKENDS:
        raise ValueError(
            f"backend must be one of {', '.join(BACKENDS)}, got {asked!r} ({BACKEND_VARIABLE} or backend=)."
        )
    on_gpu = tensor.device.type == "cuda"
    able = tensor.dtype == torch.float32 and (on_gpu or INTERPRETED)
    if asked == "triton":
        if triton is None:
            raise ValueError("backend='triton' was asked for, but triton is not installed.")
        if not able:
            raise ValueError(
                f"backend='triton' serves half and single precision on GPUs, got {tensor.dtype} logits on "
                f"{tensor.device}; leave the backend out, or use 'torch'."
            )
        return asked
    if asked is None and on_gpu and able:
        if triton is not None:
            return "triton"
        warn_once("triton is not installed: the slower torch kernels run on the GPU. Install triton to mend this.")
    return "torch"


#: What elementwise and row-wise kernels serve; all of them compute in fp32.
HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


def choose_floating_backend(
    backend: str | None, tensors: tuple[torch.Tensor | None, ...], obstacle: str | None = None
) -> str:
    """``triton`` for half and single precision on a GPU, else ``torch``; an explicit choice decides first.

    Args:
        backend: the caller's choice, or None; then the environment variable's.
        tensors: all floating-point inputs; None stands for one that was left out.
        obstacle: why Triton cannot serve this call for another reason, or None.

    Raises:
        ValueError: an unknown name, or ``triton`` for tensors or a machine that it cannot serve.
    """
    asked = backend or os.environ.get(BACKEND_VARIABLE)
    if asked is not None and asked not in BACKENDS:
        raise ValueError(
            f"backend must be one of {', '.join(BACKENDS)}, got {asked!r} ({BACKEND_VARIABLE} or backend=)."
        )
    if asked == "torch" or (asked is None and not (tensors[0] is not None and tensors[0].is_cuda)):
        return "torch"
    if triton is None:
        obstacle = "triton is not installed"
    for tensor in tensors:
        if tensor is not None:
            if tensor.dtype not in HALF_AND_SINGLE:
                obstacle = f"it computes in fp32, and one of the tensors is {tensor.dtype}"
            elif not (tensor.is_cuda or INTERPRETED):
                obstacle = f"it needs a GPU, and one of the tensors is on {tensor.device}"
    if obstacle is None:
        return "triton"
    if asked == "triton":
        raise ValueError(f"backend='triton' cannot serve this call: {obstacle}; leave the backend out, or use 'torch'.")
    warn_once(f"A slower torch kernel runs instead of a Triton kernel: {obstacle}.")
    return "torch"


_NOTHING = nullcontext()


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's, in the forward of a model over several GPUs."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _NOTHING


@cache
def warn_once(message: str) -> None:
    """Say so the first time."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)
