"""How a call streams: the options that users set, and the strategies that the engine chooses from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from liger_losses.chunked.engine.checks import check_names
from liger_losses.kernels import BACKENDS

#: Each strategy, with its cost in N H V floating-point operations (with a frozen head in brackets).
STRATEGIES = {
    "statistics": "nothing needs a gradient: statistics only. 2",
    "one_pass": "separable loss: loss and gradients of a block while its logits exist. 6 (4)",
    "resident": "coupled loss whose logits fit the workspace: they stay there until backward. 6 (4)",
    "frozen_head": "coupled loss of one statistic, frozen head: its gradient per token, [N, H], saved for backward. 4",
    "two_pass": "coupled loss: statistics first, then every block again, once the upstream gradients are known. 8 (6)",
}


@dataclass(frozen=True)
class EngineOptions:
    """How to stream; no option changes a result beyond rounding.

    Args:
        ignore_index: the label of tokens without loss.
        compact: drop tokens without loss before the projection, at the cost of one host synchronization. With False,
            they are projected and their results multiplied by 0: their hidden states must be finite.
        workspace: bytes for everything beyond inputs and outputs; chosen from the shapes by default.
        chunk_size: the largest number of tokens whose logits one block of the forward pass holds.
        accum_dtype: dtype in which grad_weight is accumulated, ``torch.float32`` or ``None`` for the weight's own. It
            costs a buffer of the weight's size.
        backend: ``torch`` or ``triton`` for the work between the products; chosen from the device by default, or by
            the environment variable ``LIGER_LOSSES_BACKEND``.
        strategy: force one of :data:`STRATEGIES` (for tests and measurements).

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

    def __post_init__(self) -> None:
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise TypeError(f"ignore_index must be an integer, got {self.ignore_index!r}.")
        for name in ("workspace", "chunk_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
        if self.accum_dtype not in (None, torch.float32):
            raise ValueError(f"accum_dtype must be torch.float32 or None, got {self.accum_dtype!r}.")
        if self.backend is not None:
            check_names([self.backend], BACKENDS, "backend")
        if self.strategy is not None:
            check_names([self.strategy], STRATEGIES, "strategy")
