"""What users may set: the options of a call, and the memory of calls without ``workspace=``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral
from types import SimpleNamespace

import torch

from liger_losses.checks import check_names
from liger_losses.kernels import BACKENDS


@dataclass(frozen=True)
class EngineOptions:
    """Options of a call. They change results only by rounding.

    Args:
        ignore_index: the label of masked tokens.
        compact: drop masked tokens before the projection, at the cost of one host synchronization. With False, they
            are projected, and their results are 0.
        workspace: bytes for everything beyond inputs and outputs. By default chosen from the shapes, the device's
            memory and :func:`liger_losses.set_default_workspace`.
        chunk_size: the largest number of tokens whose whole rows of logits exist at a time.
        accum_dtype: dtype in which the gradient of the weight is accumulated: ``torch.float32``, which takes a buffer
            of the weight's size, or ``None`` for the weight's dtype where that is as exact as plain PyTorch.
        backend: ``torch`` or ``triton`` for the work between the products; chosen from the device by default, or by
            the environment variable ``LIGER_LOSSES_BACKEND``.
        strategy: ``two_pass`` computes logits again in backward, although they could be kept (for tests and
            measurements).
        keep: bytes of blocks that may live until backward; by default as the workspace, or a part of a GPU's memory.
            Not with ``two_pass``, which keeps none.

    Raises:
        TypeError, ValueError: an option of the wrong type or out of its range.
    """

    ignore_index: int = -100
    compact: bool = True
    workspace: int | None = None
    chunk_size: int | None = None
    accum_dtype: torch.dtype | None = None
    backend: str | None = None
    strategy: str | None = None
    keep: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, Integral):
            raise TypeError(f"ignore_index must be an integer, got {self.ignore_index!r}.")
        if isinstance(self.compact, (str, float)):  # all texts would be true
            raise TypeError(f"compact must be True or False, got {self.compact!r}.")
        for name, least in (("workspace", 1), ("chunk_size", 1), ("keep", 0)):
            value = getattr(self, name)
            what = "a positive integer" if least else "a number of bytes, 0 or more"
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < least):
                raise ValueError(f"{name} must be {what}, got {value!r}.")
        if self.accum_dtype not in (None, torch.float32):
            raise ValueError(f"accum_dtype must be torch.float32 or None, got {self.accum_dtype!r}.")
        for name, known in (("backend", BACKENDS), ("strategy", ("two_pass",))):
            if getattr(self, name) is not None:
                check_names([getattr(self, name)], known, name)
        if self.strategy == "two_pass":
            if self.keep:
                raise ValueError(f"strategy='two_pass' keeps no blocks, got keep={self.keep}; leave one of them out.")
            object.__setattr__(self, "keep", 0)


# --- The default workspace: a setting of the process, and of a part of the program ------------------------------------

#: Environment variable: the process's setting until :func:`set_default_workspace` changes it.
WORKSPACE_VARIABLE = "LIGER_LOSSES_WORKSPACE"

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}

#: The process's setting: bytes, the variable's text, or ``None`` for no bound. The first call reads the text, as
#: ``import liger_losses`` must not fail for it.
process = SimpleNamespace(bytes=os.environ.get(WORKSPACE_VARIABLE) or None)
#: The setting within :func:`workspace`, in a tuple; ``None`` outside.
context: ContextVar[tuple[int | None] | None] = ContextVar("liger_losses.workspace", default=None)


def bytes_of(value: int | str, name: str = "the default workspace") -> int:
    """Bytes, from a number or from text such as ``300MiB`` or ``1.5 GiB`` (or ``MB``, ``GB``: powers of 1000).

    Raises:
        TypeError, ValueError: anything else, or less than one byte.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f'{name} must be a number of bytes, such as 314572800, "300MiB" or "2GiB", got {value!r}.')
        size = int(float(match[1]) * _UNITS[match[2]])
    elif isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f'{name} must be a number of bytes, or text such as "300MiB", got {value!r}.')
    else:
        size = int(value)
    if size < 1:
        raise ValueError(f"{name} must be positive, got {value!r}.")
    return size


def set_default_workspace(value: int | str | None) -> None:
    """Bound the memory of calls that give no ``workspace=``, for the whole process.

    A call takes less than the bound if more memory would not make it faster. Without a bound, it takes as much as keeps
    the device busy (at most 1.5 GiB). A loss that couples tokens takes up to 1/32 of the GPU's memory, if it can then
    keep its logits until backward instead of computing them twice. Each such call keeps its logits until its backward,
    or until its graph is freed. How much memory is free has no influence.

    Args:
        value: bytes, or text such as ``"300MiB"``; ``None`` for no bound. The environment variable
            ``LIGER_LOSSES_WORKSPACE`` is the setting of a new process.

    Raises:
        TypeError, ValueError: no positive number of bytes.
    """
    process.bytes = None if value is None else bytes_of(value)


@contextmanager
def workspace(value: int | str | None) -> Iterator[None]:
    """``with liger_losses.workspace("300MiB"):`` is :func:`set_default_workspace` for the calls within, of this thread.

    A call's ``workspace=`` takes precedence. In asyncio, each task has a separate setting. A compiled function reads
    the setting when it runs, so put the context around its call.

    Backward uses the setting that forward has read. There are two exceptions, in which backward computes forward again
    and reads the setting again: activation checkpointing, and compiled operations with a result per token, such as
    :func:`liger_losses.linear_logps`. On a GPU, they do so in a thread of autograd, where only the setting of the
    process applies.

    Args:
        value: as in :func:`set_default_workspace`.

    Raises:
        TypeError, ValueError: no positive number of bytes.
    """
    before = context.set((None if value is None else bytes_of(value),))
    try:
        yield
    finally:
        context.reset(before)


def default_bound() -> int | None:
    """The bytes that the user has set for calls that give no workspace, or ``None``."""
    within = context.get()
    size = process.bytes if within is None else within[0]
    return bytes_of(size, WORKSPACE_VARIABLE) if isinstance(size, str) else size
