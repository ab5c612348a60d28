"""The options of a call, as users give them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

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
        chunk_size: the largest number of tokens whose logits one block of the forward pass holds.
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
