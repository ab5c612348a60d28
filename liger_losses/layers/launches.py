"""Launches of the layers' kernels, for which Triton looks for a compiled kernel once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels._triton import device_of


class Launches:
    """Launches kernels, and keeps what Triton has compiled for each kind of arguments, at most ``most`` of them.

    At every launch, Triton looks for the compiled kernel by all arguments, which takes the host longer than the launch.
    A training step of a small model has hundreds of launches. A kind is what Triton compiles by: dtype, device and
    alignment of tensors, and other arguments as they are.
    """

    def __init__(self, most: int = 4096) -> None:
        self.most = most
        self.compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, kernel: Any, programs: int, *arguments: Any, num_warps: int) -> None:
        """Launch a kernel, whose first argument is a tensor; all are given by position, constants too."""
        kinds = [(a.dtype, a.device, a.data_ptr() % 16) if isinstance(a, Tensor) else a for a in arguments]
        key = kernel, programs, num_warps, *kinds
        run = self.compiled.get(key)
        with device_of(arguments[0]):
            if run is not None:
                run(*arguments)
                return
            compiled = kernel[(programs,)](*arguments, num_warps=num_warps)
        if compiled is not None and torch.version.cuda:  # for AMD, Triton also compiles by sizes of tensors
            if len(self.compiled) >= self.most:
                self.compiled.clear()
            self.compiled[key] = compiled[programs, 1, 1]


launch = Launches()
