"""What a student is distilled from: hidden states and a head, logits, or the log-probabilities of the likeliest tokens.

T tokens given, Ht the teacher's hidden size, Vt its vocabulary size, k columns of a sparse teacher.

A vocabulary may be padded, the teacher's or the student's: the columns that both have are compared, and the others
carry no probability on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_losses.chunked.engine.checks import check_device, check_names, check_tensor
from liger_losses.chunked.engine.head import Head
from liger_losses.kernels.logit_transform import LogitTransform

#: What becomes of the probability outside a sparse teacher's columns; see :class:`TeacherTopK`.
TAILS = ("bucket", "renormalize")


@dataclass(frozen=True)
class Teacher:
    """Hidden states and head: the teacher's logits are computed block by block, and never all there.

    Args:
        hidden_states: ``[..., Ht]``, one for each of the student's.
        weight: ``[Vt, Ht]``, the teacher's ``lm_head``.
        bias: ``[Vt]``.
        logit_scale, softcap: the teacher's; see :class:`liger_losses.LogitTransform`.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def head(self) -> Head:
        return Head(self.weight, self.bias, LogitTransform(1.0, self.logit_scale, self.softcap))

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def check(self, labels: Tensor, student_weight: Tensor) -> None:
        """Raise TypeError or ValueError for what does not fit the student's labels ``[...]`` and weight."""
        check_tensor("the teacher's hidden_states", self.hidden_states)
        check_tensor("the teacher's weight", self.weight)
        if self.weight.dim() != 2 or self.hidden_states.dim() < 2 or 0 in self.weight.shape:
            raise ValueError(
                "a teacher has hidden_states [..., hidden_size] and a weight [vocab_size, hidden_size], got "
                f"{tuple(self.hidden_states.shape)} and {tuple(self.weight.shape)}."
            )
        if self.hidden_states.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"the teacher's hidden_states {tuple(self.hidden_states.shape)} do not fit its weight "
                f"{tuple(self.weight.shape)}; the weight is [vocab_size, hidden_size], as in nn.Linear."
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"the teacher's bias must be [{self.vocab_size}], one value per row of its weight, got "
                f"{tuple(self.bias.shape)}."
            )
        for name, tensor in (("hidden_states", self.hidden_states), ("weight", self.weight)):
            if not tensor.is_floating_point():
                raise TypeError(f"the teacher's {name} must be floating point, got {tensor.dtype}.")
        _check_tokens("hidden_states", self.hidden_states.shape[:-1], labels)
        check_device(student_weight, teacher_hidden_states=self.hidden_states, teacher_weight=self.weight)

    def transform(self, temperature: float) -> LogitTransform:
        return LogitTransform(temperature, self.logit_scale, self.softcap)


@dataclass(frozen=True)
class TeacherLogits:
    """Logits that are there, or that come when they are asked for.

    Args:
        logits: ``[..., Vt]``, one row for each of the student's hidden states; or a function from positions
            ``[n]`` (int64, of the flattened tokens, on the student's device) to their logits ``[n, Vt]``.
        columns: Vt, needed with a function.
    """

    logits: Tensor | Callable[[Tensor], Tensor]
    columns: int | None = None

    @property
    def vocab_size(self) -> int:
        if isinstance(self.logits, Tensor):
            return self.logits.shape[-1]
        if self.columns is None:
            raise ValueError("TeacherLogits from a function needs columns=, the width of what it returns.")
        return self.columns

    @property
    def bias(self) -> None:
        return None

    def check(self, labels: Tensor, student_weight: Tensor) -> None:
        """Raise TypeError or ValueError for what does not fit the student's labels ``[...]`` and weight."""
        if self.vocab_size < 1:
            raise ValueError("the teacher's logits have no columns.")
        if isinstance(self.logits, Tensor):
            if not self.logits.is_floating_point():
                raise TypeError(f"the teacher's logits must be floating point, got {self.logits.dtype}.")
            _check_tokens("logits", self.logits.shape[:-1], labels)
            check_device(student_weight, teacher_logits=self.logits)

    def rows(self, positions: Tensor) -> Tensor:
        """The logits ``[n, Vt]`` of some positions ``[n]``."""
        if isinstance(self.logits, Tensor):
            return self.logits[torch.unravel_index(positions, self.logits.shape[:-1])]
        found = self.logits(positions)
        if not isinstance(found, Tensor) or found.shape != (len(positions), self.vocab_size):
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"the teacher's function must return logits [{len(positions)}, {self.vocab_size}], got {given}."
            )
        return found.detach()

    def transform(self, temperature: float) -> LogitTransform:
        return LogitTransform(temperature)


@dataclass(frozen=True)
class TeacherTopK:
    """Log-probabilities of each token's k likeliest columns, as servers and files give them.

    Args:
        logps: ``[..., k]``, log-probabilities over the whole vocabulary, at the distillation's temperature.
        indices: ``[..., k]`` int64, which columns; no column twice in a row of tokens that carry loss.
        tail: what becomes of the rest. ``bucket``: all other columns are one more, with the probability that the
            student and the teacher leave to them. ``renormalize``: both softmaxes are taken over the k columns alone.
    """

    logps: Tensor
    indices: Tensor
    tail: str = "bucket"

    def check(self, labels: Tensor, student_weight: Tensor) -> None:
        """Raise TypeError or ValueError for what does not fit the student's labels ``[...]`` and weight.

        Columns outside the vocabulary or given twice cost a synchronisation to find.
        """
        check_tensor("the teacher's logps", self.logps)
        check_tensor("the teacher's indices", self.indices)
        check_names([self.tail], TAILS, "tail")
        if self.indices.dtype != torch.int64 or not self.logps.is_floating_point():
            raise TypeError(
                f"a sparse teacher has floating-point logps and int64 indices, got {self.logps.dtype} and "
                f"{self.indices.dtype}."
            )
        if self.logps.shape != self.indices.shape or self.logps.dim() < 1 or self.logps.shape[-1] < 1:
            raise ValueError(
                f"the teacher's logps and indices must both be [..., k], got {tuple(self.logps.shape)} and "
                f"{tuple(self.indices.shape)}."
            )
        _check_tokens("logps", self.logps.shape[:-1], labels)
        check_device(student_weight, teacher_logps=self.logps, teacher_indices=self.indices)

    def check_kept(self, logps: Tensor, indices: Tensor, vocab_size: int) -> None:
        """Raise ValueError for what is wrong in the rows ``[N, k]`` of tokens that carry loss."""
        ordered = indices.sort(-1).values
        outside = ((indices < 0) | (indices >= vocab_size)).any()
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any()
        positive = (logps > 1e-3).any()
        wrong = torch.stack([outside, repeated, positive]).tolist()
        if wrong[0]:
            raise ValueError(
                f"the teacher's indices must be in [0, {vocab_size}), the vocabulary that the student has, got "
                f"{int(indices.min())} to {int(indices.max())}. Drop columns that the student lacks."
            )
        if wrong[1]:
            raise ValueError("the teacher's indices name a column twice for a token; give each column once.")
        if wrong[2]:
            raise ValueError(
                f"the teacher's logps must be log-probabilities, at most 0, got {float(logps.max()):.4g}; apply "
                "log_softmax over the whole vocabulary first."
            )


def _check_tokens(name: str, shape: torch.Size, labels: Tensor) -> None:
    if shape != labels.shape:
        raise ValueError(
            f"the teacher's {name} are of {tuple(shape)} tokens, the student's of {tuple(labels.shape)}: give one row "
            "for each of the student's tokens, in the same order."
        )
