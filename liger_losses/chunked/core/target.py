"""Tokens of one head, and what belongs to each of them: labels, temperatures, columns, a teacher's logits.

T tokens, R of them in a block, H hidden size, V columns, K kept and k selected columns of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from liger_losses.caller import warn
from liger_losses.checks import FLOATS, check_shaped, check_values, checked_temperatures, described, see
from liger_losses.chunked.core.buffers import Leaf
from liger_losses.chunked.core.head import Head
from liger_losses.chunked.core.weights import Concatenated, Products, WithAdapters
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.matmul import wide_dtype

#: By how many columns padding may make two models of one vocabulary differ.
MOST_PADDING = 1024
#: Rows of a tensor: a slice of them, or their numbers.
Rows = slice | Tensor
#: The fields of a target that may have an entry for each token: that entry's dimensions, and one without influence.
PER_TOKEN = {"hidden": (1, 0.0), "labels": (0, 0), "temperature": (0, 1.0), "kept": (1, 0), "selected": (1, 0)}


@dataclass(frozen=True, eq=False)
class Counted:
    """The tokens that have a label: their places among the flattened tokens (``None`` for all), those first that may
    have a gradient; how many they are, and how many of these; the smallest and largest label, and 0. Or all tokens, and
    which of them are ``active [T]``: have a label."""

    index: Tensor | None
    count: int
    trained: int
    extremes: tuple[int, int]
    active: Tensor | None = None

    @classmethod
    def of_all(cls, count: int) -> Counted:
        """Of so many tokens, all are computed."""
        return cls(None, count, count, (0, 0))


@dataclass(frozen=True, eq=False)
class Target:
    """T tokens of one head, in any shape ``[...]``. All that is per token is cut with it.

    Tokens of several tensors are several targets; what they train has one buffer.

    Args:
        head: what makes logits of hidden states.
        hidden: ``[..., H]``.
        labels: ``[...]`` int64, columns of the whole vocabulary.
        temperature: a number, or ``[...]``.
        kept: ``[..., K]``: the softmax is over these columns alone; -1 is padding.
        selected: ``[..., k]``: their log-probabilities are the statistic ``selected_logps``; or the number k, of the
            largest ones.
        class_weight: ``[V]``, the weights in ``mean_logp``.
        teacher: the same tokens of another model, whose labels are not read; its temperature is the divergence's, which
            divides both models' logits there.
        sparse_grad: make the gradient of the weight a sparse tensor of the kept rows.
        hidden_rows: ``[...]`` int64, the places of these tokens among the flattened hidden states, which may be of
            more; no place twice. By default, hidden states and labels are in one order.
        counted: which tokens have a label, if that is known.
    """

    head: Head
    hidden: Tensor
    labels: Tensor
    temperature: float | Tensor = 1.0
    kept: Tensor | None = None
    selected: Tensor | int | None = None
    class_weight: Tensor | None = None
    teacher: Target | TeacherLogits | None = None
    sparse_grad: bool = False
    hidden_rows: Tensor | None = None
    counted: Counted | None = None

    def places(self, rows: Rows) -> Rows:
        """Where tokens are among the flattened hidden states."""
        return rows if self.hidden_rows is None else self.hidden_rows.reshape(-1)[rows]

    def open(self, products: Products) -> Target:
        """The same with heads whose weights are cast or dequantized, where this is done for all rows together."""
        teacher = None if self.teacher is None else self.teacher.open(products)
        return replace(self, head=self.head.open(products), teacher=teacher)

    def take(
        self,
        rows: Rows,
        active: Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        compares: bool = True,
    ) -> Target:
        """Some of the tokens: ``hidden [R, H]``, ``labels [R]`` and so on.

        Those that are not ``active [R]`` get numbers without influence. With the operands' ``dtype``, hidden states
        have it, and temperatures that of logits. Without ``compares``, a teacher's logits, which nobody reads again,
        are not taken.
        """
        taken: dict[str, Any] = {"hidden_rows": None}
        for name, (trailing, neutral) in PER_TOKEN.items():
            if isinstance(value := getattr(self, name), Tensor):
                places = self.places(rows) if name == "hidden" else rows
                taken[name] = rows_of(value, places, trailing, active, neutral)
        if dtype is not None:
            taken["hidden"] = taken["hidden"].to(dtype)
            if "temperature" in taken:
                taken["temperature"] = wide_numbers(taken["temperature"], dtype)
        if self.teacher is not None:
            taken["teacher"] = self.teacher.take(rows, active, dtype, self.labels.device, compares)
        return replace(self, **taken)

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    def transform(self, temperature: float | Tensor) -> LogitTransform:
        """From projections to logits."""
        known = self.head.transform
        same = not isinstance(temperature, Tensor) and known.temperature == temperature
        return known if same else replace(known, temperature=temperature)

    def leaves(self) -> list[Leaf]:
        """All that is trained; what every rank has adds up in fp32: each part of the vocabulary adds to all of it."""
        leaves: list[Leaf] = []
        head, matrix = self.head, self.head.weights
        while isinstance(matrix, (WithAdapters, Concatenated)):
            matrix = matrix.base
        sparse = len(matrix.trained) if self.sparse_grad else 0  # adapters follow their base
        for i, (tensor, whole) in enumerate(head.weights.trained):
            if tensor.requires_grad:
                leaves.append(Leaf(tensor, head.ranks, whole, i < sparse, torch.float32 if whole else None))
        if head.bias is not None and head.bias.requires_grad:
            leaves.append(Leaf(head.bias, head.ranks, accumulate=torch.float32))
        if self.hidden.requires_grad:
            leaves.append(Leaf(self.hidden, head.ranks, summed=True, accumulate=self.hidden.dtype))
        return leaves


#: Of statistics ``[R]`` of some tokens by name, and what the loss reads, to their losses ``[R]``; or to these and their
#: derivatives by name (or ``None``), and further numbers of each token by name, if there are any.
TokenFunction = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """The losses of single tokens: a function, and what it reads.

    Args:
        function: from statistics by name, tensors and numbers to ``[R]``.
        tensors: in the labels' shape, or with one more dimension; or 0-dim, one for all tokens.
        numbers: constants.
        trained: in the labels' shape, bool: false for tokens whose losses are constant: no gradient product has them.
    """

    function: TokenFunction
    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    trained: Tensor | None = None

    def prepared(self) -> TokenLoss:
        """The same with its tensors as constants."""
        tensors = {name: t.detach() if t.requires_grad else t for name, t in self.tensors.items()}
        return replace(self, tensors=tensors)

    def __call__(self, values: Mapping[str, Tensor], rows: Rows, dims: int) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """The losses of these tokens, of labels that have so many dimensions; derivatives, and further numbers."""
        read = {name: rows_of(t, rows, t.dim() - dims) if t.dim() else t for name, t in self.tensors.items()}
        result = self.function(values, **read, **self.numbers)
        losses, derivatives, more = (*result, {}, {})[:3] if isinstance(result, tuple) else (result, None, {})
        return losses, derivatives, more


# --- Rows, and logits of a teacher ------------------------------------------------------------------------------------


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
        compares: bool = True,
    ) -> TeacherLogits:
        """Some of the tokens as of a target, whose positions a function gets, on this device."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = rows_of(temperature, rows, 0, active, 1.0)
            temperature = temperature if dtype is None else wide_numbers(temperature, dtype)
        if not compares:
            return replace(self, temperature=temperature)
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
