"""What a loss keeps from batch to batch: sums over all data-parallel processes, and which batches it has counted; and a
coefficient that follows them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.checks import check_range
from liger_losses.chunked.engine.agreement import all_gather


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


#: How many batches are remembered: so many forwards may lie between a batch's own forward and its backward.
REMEMBERED = 64


def no_batches(width: int) -> Tensor:
    """A memory ``[REMEMBERED, width]`` of no batch. It is int64, which no cast of a module to another dtype changes."""
    return torch.full((REMEMBERED, width), -1, dtype=torch.int64)


def bits_of(values: Tensor) -> Tensor:
    """Floating-point numbers as int64."""
    return values.view({4: torch.int32, 8: torch.int64}[values.element_size()]).long()


def find_batch(memory: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a batch is remembered, 0-dim bool, and the rest of its row; the host does not wait for them.

    Args:
        memory: ``[REMEMBERED, width]``, a row for each batch.
        key: ``[n]`` int64, what a row begins with.
    """
    same = (memory[:, : len(key)] == key).all(1)
    return same.any(), torch.where(same[:, None], memory[:, len(key) :], 0).sum(0)


def with_batch(memory: Tensor, row: Tensor, new: Tensor) -> Tensor:
    """The memory with another batch in the place of the oldest, where ``new`` (0-dim bool) is true."""
    return torch.where(new, torch.cat([memory[1:], row[None]]), memory)


class AdaptiveEntropy:
    """A coefficient of the entropy bonus that rises while the entropy is at or below a target (arXiv:2505.22312).

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
        self._window, self._counted = torch.zeros(2, dtype=torch.float32), no_batches(1)
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

    def observe(self, entropy_sum: Tensor, tokens: Tensor, batch: Tensor | None = None) -> None:
        """Add a batch to the window since the last step.

        ``batch`` is a number (0-dim int64) that identifies the batch. If activation checkpointing runs a batch again in
        backward, it is counted once.
        """
        values = torch.stack([entropy_sum.detach().float(), tokens.float()])
        self._window = self._window.to(values.device)
        if batch is None:
            self._window = self._window + values
            return
        counted, key = self._counted.to(values.device), batch.reshape(1)
        again, _ = find_batch(counted, key)
        self._window = self._window + torch.where(again, 0.0, values)
        self._counted = with_batch(counted, key, ~again)

    def step(self) -> None:
        """Update the coefficient from the window's mean entropy over all processes; call it after optimizer steps."""
        # All processes take part, including those without a batch.
        total, tokens = sum_over_processes(self._window).tolist()
        self._window, self._counted = torch.zeros_like(self._window), torch.full_like(self._counted, -1)
        if not tokens:
            return
        self.last_entropy = total / tokens
        change = self.delta if self.last_entropy <= self.target else -self.delta
        self.value = min(max(self.value + change, self.low), self.high)
        self._update_tensor()
