"""An entropy bonus whose coefficient follows a target."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_losses.chunked.engine.checks import check_range
from liger_losses.chunked.engine.processes import sum_over_processes


class AdaptiveEntropy:
    """A coefficient of the entropy bonus that rises while entropy is at or below a target (arXiv:2505.22312).

    Args:
        coef: the initial coefficient.
        target: nats per token.
        low, high: bounds of the coefficient.
        delta: what it changes by at every :meth:`step`.
    """

    def __init__(
        self, coef: float = 0.0, *, target: float, low: float = 0.0, high: float = 1.0, delta: float = 0.005
    ) -> None:
        check_range("coef", coef, 0.0, math.inf)
        check_range("target", target, 0.0, math.inf)
        check_range("low", low, 0.0, math.inf)
        check_range("high", high, low, math.inf)
        check_range("delta", delta, 0.0, math.inf)
        self.value, self.target, self.low, self.high, self.delta = coef, target, low, high, delta
        self.last_entropy = math.inf
        self._window = torch.zeros(2)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint needs; the loss that holds this saves it with its own."""
        return {"value": self.value, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint."""
        self.value, self.last_entropy = state["value"], state["last_entropy"]

    @property
    def coef(self) -> float:
        """The coefficient for the next batches: 0 while entropy is above the target, or not known yet."""
        return self.value if self.last_entropy <= self.target else 0.0

    def observe(self, entropy_sum: Tensor, tokens: Tensor) -> None:
        """Add a batch to the window since the last step."""
        batch = torch.stack([entropy_sum.detach().float(), tokens.float()])
        self._window = self._window.to(batch.device) + batch

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
