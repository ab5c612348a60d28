"""What gives a teacher's logits: another model's head (which is a target), or the logits themselves.

T tokens, R of them in a block, V columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Rows of a tensor: a slice of them, or their numbers.
Rows = slice | Tensor


def rows_of(tensor: Tensor, rows: Rows, trailing: int) -> Tensor:
    """Some rows of a tensor whose last ``trailing`` dimensions belong to each, in its memory where that can be."""
    shape = tensor.shape[: tensor.dim() - trailing]
    if len(shape) == 1:
        return tensor[rows]
    if tensor.is_contiguous():
        return tensor.view(-1, *tensor.shape[len(shape) :])[rows]
    if isinstance(rows, slice):
        rows = torch.arange(*rows.indices(shape.numel()), device=tensor.device)
    places: list[Tensor] = []
    for size in reversed(shape):  # torch.unravel_index copies the shape to the device, and waits for it
        places.insert(0, rows % size)
        rows = rows // size
    return tensor[tuple(places)]


@dataclass(frozen=True, eq=False)
class TeacherLogits:
    """A teacher's logits ``[..., V]``, or a function from positions ``[R]`` to their logits ``[R, V]``.

    ``temperature`` divides both models' logits in the divergence: a number, or ``[...]``.
    """

    logits: Tensor | Callable[[Tensor], Tensor]
    vocab_size: int
    temperature: float | Tensor = 1.0

    def take(self, rows: Rows) -> TeacherLogits:
        """Some of the tokens."""
        if isinstance(self.logits, Tensor):
            logits = rows_of(self.logits.detach(), rows, 1)
        else:
            assert isinstance(rows, Tensor)
            logits = self.logits(rows).detach()
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = rows_of(temperature, rows, 0)
        return replace(self, logits=logits, temperature=temperature)
