"""Triton where it is installed; a package that imports without it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
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


@cache
def warn_once(message: str) -> None:
    """Say so the first time."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)
