"""What a loss keeps from batch to batch: sums over all data-parallel processes, and a coefficient that follows them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.checks import check_range
from liger_losses.chunked.core.agreement import all_gather


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_processes(values: Tensor) -> Tensor:
    """All processes' values, added up entry by entry; the values themselves where there is one."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def gather_over_processes(values: Tensor) -> Tensor:
    """All processes' values ``[n]``, of which each may have another number."""
    if world_size() == 1:
        return values
    sizes = values.new_zeros(world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = len(values)
    counts = sum_over_processes(sizes).tolist()
    padded = values.new_zeros(max(1, *counts))
    padded[: len(values)] = values
    gathered = padded.new_empty(len(counts), len(padded))
    all_gather(gathered.view(-1), padded)
    return torch.cat([row[:count] for row, count in zip(gathered, counts, strict=True)])


class AdaptiveEntropy:
    """A coefficient of the entropy bonus that rises while the entropy is at or below a target (arXiv:2505.22312).

    A batch counts when its loss is called, so one whose loss runs inside of activation checkpointing counts twice.

    Args:
        coef: the initial coefficient.
        target: nats per token.
        low, high: bounds of the coefficient.
        delta: the change of the coefficient in every :meth:`step`.
    """

    def __init__(
        self, coef: float = 0.0, *, target: float, low: float = 0.0, high: float = 1.0, delta: float = 0.005
    ) -> None:
        for name, value in {"coef": coef, "target": target, "low": low, "delta": delta}.items():
            check_range(name, value, 0.0, math.inf)
        check_range("high", high, low, math.inf)
        self.value, self.target, self.low, self.high, self.delta = coef, target, low, high, delta
        self.last_entropy = math.inf
        self._window = torch.zeros(2, dtype=torch.float32)
        self._update_tensor()

    def _update_tensor(self) -> None:
        #: :attr:`coef` for torch.compile, which would compile a function again for every other number.
        self.coef_tensor = torch.tensor(self.coef, dtype=torch.float32, device="cpu")

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint; the loss that holds this object saves it too."""
        return {"value": self.value, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint."""
        self.value, self.last_entropy = state["value"], state["last_entropy"]
        self._update_tensor()

    @property
    def coef(self) -> float:
        """The coefficient for the next batches: 0 while entropy is above the target, or not known yet."""
        return self.value if self.last_entropy <= self.target else 0.0

    def observe(self, entropy_sum: Tensor, tokens: Tensor) -> None:
        """Add a batch to the window since the last step."""
        values = torch.stack([entropy_sum.detach().float(), tokens.float()])
        self._window = self._window.to(values.device) + values

    def step(self) -> None:
        """Update the coefficient from the window's mean entropy over all processes; call it after optimizer steps."""
        # All processes take part, including those without a batch.
        total, tokens = sum_over_processes(self._window).tolist()
        self._window = torch.zeros_like(self._window)
        if not tokens:
            return
        self.last_entropy = total / tokens
        change = self.delta if self.last_entropy <= self.target else -self.delta
        self.value = min(max(self.value + change, self.low), self.high)
        self._update_tensor()
