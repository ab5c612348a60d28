"""Tokens of one head, and what belongs to each of them.

T tokens, R of them in a block, H hidden size, K kept and k selected columns of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import checked_temperatures
from liger_losses.chunked.core.buffers import Leaf
from liger_losses.chunked.core.projection import Projection
from liger_losses.chunked.core.teachers import Rows, TeacherLogits, rows_of
from liger_losses.chunked.core.weights import WithAdapters
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.matmul import wide_dtype

#: The fields of a target that have an entry for each token, and how many dimensions that entry has.
PER_TOKEN = {"hidden": 1, "labels": 0, "temperature": 0, "kept": 1, "selected": 1}


@dataclass(frozen=True, eq=False)
class Counted:
    """The tokens that have a label: their places among the flattened tokens (``None`` for all), those first that may
    have a gradient; how many they are, and how many of these; the smallest and largest label, and 0."""

    index: Tensor | None
    count: int
    live: int
    extremes: tuple[int, int]


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
        rows: ``[...]`` int64, the places of these tokens among the flattened hidden states, which may be of more; no
            place twice. By default, hidden states and labels are in one order.
        counted: which tokens have a label, if that is known.
    """

    head: Projection
    hidden: Tensor
    labels: Tensor
    temperature: float | Tensor = 1.0
    kept: Tensor | None = None
    selected: Tensor | int | None = None
    class_weight: Tensor | None = None
    teacher: Target | TeacherLogits | None = None
    sparse_grad: bool = False
    rows: Tensor | None = None
    counted: Counted | None = None

    def places(self, rows: Rows) -> Rows:
        """Where tokens are among the flattened hidden states."""
        return rows if self.rows is None else self.rows.reshape(-1)[rows]

    def take(self, rows: Rows) -> Target:
        """Some of the tokens: ``hidden [R, H]``, ``labels [R]`` and so on."""
        cut: dict[str, Any] = {}
        for name, trailing in PER_TOKEN.items():
            value = getattr(self, name)
            if isinstance(value, Tensor):
                cut[name] = rows_of(value.detach(), self.places(rows) if name == "hidden" else rows, trailing)
        return replace(self, **cut, rows=None, teacher=None if self.teacher is None else self.teacher.take(rows))

    def neutral(self, active: Tensor) -> Target:
        """A block's tokens, of which those that are not ``active [R]`` have numbers without influence."""
        columns, teacher = active[:, None], self.teacher
        if isinstance(teacher, Target):
            teacher = teacher.neutral(active)
        elif teacher is not None:
            assert isinstance(teacher.logits, Tensor)
            logits = torch.where(columns, teacher.logits, 0.0)
            teacher = replace(teacher, logits=logits, temperature=neutral_numbers(teacher.temperature, active))
        return replace(
            self,
            hidden=torch.where(columns, self.hidden, 0.0),
            labels=torch.where(active, self.labels, 0),
            temperature=neutral_numbers(self.temperature, active),
            kept=None if self.kept is None else torch.where(columns, self.kept, 0),
            selected=torch.where(columns, self.selected, 0) if isinstance(self.selected, Tensor) else self.selected,
            teacher=teacher,
        )

    def to(self, dtype: torch.dtype) -> Target:
        """A block's tokens with hidden states in the operands' dtype, and temperatures in that of logits."""
        if self.hidden.dtype == dtype and self.teacher is None and not isinstance(self.temperature, Tensor):
            return self
        temperature, teacher = wide_numbers(self.temperature, dtype), self.teacher
        if isinstance(teacher, Target):
            teacher = teacher.to(dtype)
        elif teacher is not None:
            teacher = replace(teacher, temperature=wide_numbers(teacher.temperature, dtype))
        return replace(self, hidden=self.hidden.to(dtype), temperature=temperature, teacher=teacher)

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    def transform(self, temperature: float | Tensor) -> LogitTransform:
        """From projections to logits."""
        known = self.head.transform
        same = not isinstance(temperature, Tensor) and known.temperature == temperature
        return known if same else replace(known, temperature=temperature)

    def leaves(self, accumulate: torch.dtype | None = None) -> list[Leaf]:
        """All that is trained; weights add up in ``accumulate``, and what every rank has in fp32: each part of the
        vocabulary adds to all of it."""
        matrix = self.head.weights
        while isinstance(matrix, WithAdapters):
            matrix = matrix.base
        read = [tensor for tensor, _ in matrix.trained if self.sparse_grad]
        leaves = [
            leaf._replace(
                sparse=any(leaf.tensor is tensor for tensor in read),
                accumulate=torch.float32 if leaf.summed else accumulate,
            )
            for leaf in self.head.leaves()
        ]
        if self.head.bias is not None and self.head.bias.requires_grad:
            leaves[-1] = leaves[-1]._replace(sparse=False, accumulate=torch.float32)
        if self.hidden.requires_grad:
            leaves.append(Leaf(self.hidden, self.head.ranks, True))
        return leaves


def neutral_numbers(numbers: float | Tensor, active: Tensor) -> float | Tensor:
    """Temperatures of tokens, 1 for those that are not active."""
    return torch.where(active, numbers, 1.0) if isinstance(numbers, Tensor) else numbers


def wide_numbers(numbers: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """Temperatures of tokens as kernels read them, in the dtype of logits; ValueError for wrong ones."""
    if not isinstance(numbers, Tensor):
        return numbers
    return checked_temperatures(numbers.to(wide_dtype(dtype)).contiguous())


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
        live: in the labels' shape, bool: false for tokens whose losses are constant: no gradient product has them.
    """

    function: TokenFunction
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    live: Tensor | None = None

    def __call__(self, values: Mapping[str, Tensor], rows: Rows, dims: int) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """The losses of these tokens, of labels that have so many dimensions; derivatives, and further numbers."""
        read = {
            name: rows_of(t.detach(), rows, t.dim() - dims) if t.dim() else t.detach()
            for name, t in self.tensors.items()
        }
        result = self.function(values, **read, **self.numbers)
        losses, derivatives, more = (*result, {}, {})[:3] if isinstance(result, tuple) else (result, None, {})
        return losses, derivatives, more
