"""What gives a teacher's logits: another model's head (which is a target), or the logits themselves.

T tokens, R of them in a block, V columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from liger_losses.caller import warn
from liger_losses.checks import FLOATS, check_shaped, check_values, checked_temperatures, described, see
from liger_losses.kernels.matmul import wide_dtype

#: By how many columns padding may make two models of one vocabulary differ.
MOST_PADDING = 1024
#: Rows of a tensor: a slice of them, or their numbers.
Rows = slice | Tensor


def rows_of(tensor: Tensor, rows: Rows, trailing: int, active: Tensor | None = None, neutral: float = 0.0) -> Tensor:
    """Some rows of a tensor whose last ``trailing`` dimensions (at most one) belong to each, in its memory where that
    can be; ``neutral`` for those that are not ``active [R]``."""
    shape = tensor.shape[: tensor.dim() - trailing]
    if len(shape) == 1:
        part = tensor[rows]
    elif tensor.is_contiguous():
        part = tensor.view(-1, *tensor.shape[len(shape) :])[rows]
    else:
        if isinstance(rows, slice):
            rows = torch.arange(shape.numel(), device=tensor.device)[rows]
        places: list[Tensor] = []
        for size in reversed(shape):  # torch.unravel_index copies the shape to the device, and waits for it
            places.insert(0, rows % size)
            rows = rows // size
        part = tensor[tuple(places)]
    if active is None:
        return part
    return torch.where(active[:, None] if trailing else active, part, neutral)


@dataclass(frozen=True, eq=False)
class TeacherLogits:
    """A teacher's logits: a tensor, or a function that returns them when they are needed.

    Args:
        logits: ``[..., Vt]``, one row for each hidden state of the student; or a function from positions ``[n]``
            (int64, of the flattened tokens, on the student's device) to their logits ``[n, Vt]``.
        columns: Vt, needed with a function.
        columns_correspond: as in :class:`Teacher`.
        temperature: divides both models' logits in the divergence: a number, or ``[...]``; losses set it to theirs.
    """

    logits: Tensor | Callable[[Tensor], Tensor]
    columns: int | None = None
    columns_correspond: bool = False
    temperature: float | Tensor = 1.0

    @property
    def vocab_size(self) -> int:
        if isinstance(self.logits, Tensor) and self.logits.dim():
            return self.logits.shape[-1]
        if not callable(self.logits):
            shape = " without dimensions" if isinstance(self.logits, Tensor) else ""
            kind = type(self.logits).__name__ + shape
            raise TypeError(f"TeacherLogits takes logits [..., Vt], or a function that returns them, got {kind}.")
        if not isinstance(self.columns, Integral):
            raise ValueError("TeacherLogits(function) needs columns=, the number of columns that the function returns.")
        return int(self.columns)

    def check(self, tokens: torch.Size, student: Any) -> None:
        """Raise TypeError or ValueError unless this fits the shape of the student's tokens, and the student's head."""
        if self.vocab_size < 1:
            raise ValueError("the teacher's logits must be [..., Vt] with Vt >= 1, got Vt = 0.")
        if isinstance(self.logits, Tensor):
            check_fits("logits", self.logits, student, (*tokens, self.vocab_size), FLOATS)
        check_columns(self, student)

    def compared(self, labels: Tensor, temperature: float | Tensor) -> TeacherLogits:
        """The other side of a comparison, at its temperature."""
        return replace(self, temperature=temperature)

    def open(self, products: Any) -> TeacherLogits:
        """There are no weights to be cast."""
        return self

    def take(
        self,
        rows: Rows,
        active: Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> TeacherLogits:
        """Some of the tokens as of a target, whose positions a function gets, on this device."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = rows_of(temperature, rows, 0, active, 1.0)
            temperature = temperature if dtype is None else wide_numbers(temperature, dtype)
        if isinstance(self.logits, Tensor):
            logits = rows_of(self.logits.detach(), rows, 1, active)
            return replace(self, logits=logits, temperature=temperature)
        places = torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows
        logits = self.logits(places)
        expected = (len(places), self.vocab_size)
        if not isinstance(logits, Tensor) or logits.shape != expected:
            raise ValueError(f"the teacher's function must return logits {list(expected)}, got {described(logits)}.")
        return replace(self, logits=rows_of(logits.detach(), slice(None), 1, active), temperature=temperature)


def wide_numbers(temperatures: Tensor, dtype: torch.dtype) -> Tensor:
    """Temperatures of tokens as kernels read them, in the dtype of logits; ValueError for wrong ones."""
    return checked_temperatures(temperatures.to(wide_dtype(dtype)).contiguous())


def check_fits(name: str, values: Any, student: Any, shape: Sequence[int], dtypes: Any = ()) -> None:
    """Raise TypeError or ValueError unless a teacher has one row for each of the student's tokens, on its device."""
    whose, device = "hidden state of the student", student.weight.device
    check_shaped(f"the teacher's {name}", values, whose, device, shape, dtypes=dtypes)
    check_values(student.weight)


def wrong_columns(ids: Tensor, vocab_size: int, least: int = 0) -> tuple[Tensor, Tensor]:
    """Which rows of ids ``[..., K]`` have one that is no column (nor ``least``, for padding), and which one twice."""
    ordered = ids.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    return ((ids < least) | (ids >= vocab_size)).any(-1), twice.any(-1)


def check_columns(teacher: Any, student: Any) -> None:
    """Warn of a vocabulary of another size, or raise ValueError, unless the caller has said that columns correspond."""
    if not isinstance(teacher.columns_correspond, bool):
        raise TypeError(f"columns_correspond must be True or False, got {teacher.columns_correspond!r}.")
    ours, theirs = student.vocab_size, teacher.vocab_size
    if ours == theirs or teacher.columns_correspond:
        return
    differ = f"the student has {ours} columns and the teacher {theirs}"
    kind = type(teacher).__name__
    advice = (
        f"if the first {min(ours, theirs)} columns of both are the same tokens, say so with {kind}(..., "
        "columns_correspond=True); if not, take a teacher with the student's vocabulary." + see("teachers")
    )
    if abs(ours - theirs) > MOST_PADDING:
        raise ValueError(f"{differ}: more than {MOST_PADDING} apart, which padding does not explain; {advice}")
    if not torch.compiler.is_compiling():
        warn(f"{differ}. Columns that only one of them has are treated as padding: {advice}")
