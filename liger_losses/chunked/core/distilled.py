"""What a student is distilled from: hidden states and a head, logits, or log-probabilities of the most likely tokens.

Ht is the teacher's hidden size, Vt its vocabulary size, k the number of a sparse teacher's columns. Either vocabulary
may be padded: the columns that both models have are compared, and the others carry no probability on either side. The
labels are the student's, and may be columns that the teacher lacks. Whether a column is the same token in both models
cannot be seen here; only that two vocabularies of different sizes may not be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.checks import FLOATS, check_device, check_names, check_tensor, described
from liger_losses.chunked.core import target
from liger_losses.chunked.core.head import Head
from liger_losses.chunked.core.ranks import ALONE, check_teacher_ranks
from liger_losses.chunked.core.target import TeacherLogits, check_columns, check_fits, wrong_columns
from liger_losses.chunked.core.weights import ALL, Products
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform, said

#: What is done with the probability outside a sparse teacher's columns; see :class:`TeacherTopK`.
TAILS = ("bucket", "renormalize", "none")
#: Earlier names, and what they are called now.
EARLIER_TAILS = {"lump": "'bucket'"}


@dataclass(frozen=True, eq=False)
class Teacher:
    """Hidden states and a head: the teacher's logits are computed block by block and never materialized.

    Args:
        hidden_states: ``[..., Ht]``, one for each hidden state of the student.
        weight: ``[Vt, Ht]``, the teacher's ``lm_head``: a tensor, a linear layer, or a :class:`liger_losses.Head`.
        bias: ``[Vt]``, for a weight without a bias.
        logit_scale, softcap: of the teacher's logits; see :class:`liger_losses.LogitTransform`.
        columns_correspond: say that the vocabulary entries that both models have are the same tokens, although the
            sizes of the vocabularies differ. By default, a difference is a warning, and an error if it is more than
            1,024 entries, which padding does not explain.
    """

    hidden_states: Tensor
    weight: Tensor | nn.Module | Head
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    columns_correspond: bool = False

    #: Its head, and the hidden states of all tokens, on this rank.
    head: Head = field(init=False, repr=False)
    local_hidden_states: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.hidden_states, (Head, nn.Module)):
            raise TypeError(
                f"Teacher takes hidden states, and then the head, got {type(self.hidden_states).__name__} first: of "
                "head, states, labels = loss_inputs(teacher, ...), it takes Teacher(states, head)."
            )
        try:
            head = Head.of(self.weight, self.bias, LogitTransform(1.0, self.logit_scale, self.softcap))
        except (TypeError, ValueError) as error:
            raise type(error)(f"the teacher's head: {error}") from None
        object.__setattr__(self, "head", head)
        object.__setattr__(self, "local_hidden_states", head.ranks.states(self.hidden_states))

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    def compared(self, labels: Tensor, temperature: float | Tensor) -> target.Target:
        """The other side of a comparison, at its temperature."""
        with torch.no_grad():
            hidden, head = self.head.for_call(self.local_hidden_states)
        return target.Target(head, hidden.detach(), labels, temperature)

    def check(self, tokens: torch.Size, student: Head) -> None:
        """Raise TypeError or ValueError unless this fits the shape of the student's tokens, and the student's head."""
        head, hidden = self.head, self.local_hidden_states
        check_no_temperature("teacher", head.transform.temperature)
        check_fits("hidden_states", hidden, student, (*tokens, head.hidden_size), FLOATS)
        check_device("the student's", student.weight.device, **{"the teacher's weight": head.weight})
        check_columns(self, student)
        check_teacher_ranks(student.ranks, head.ranks)


@dataclass(frozen=True, eq=False)
class Teachers:
    """Several teachers, one for each token or sequence; their hidden sizes and heads may differ.

    Args:
        teachers: :class:`Teacher` or :class:`TeacherLogits`, each for all of the student's tokens. Their values at
            tokens of other teachers have no influence.
        which: ``[...]`` int64, the index of each token's teacher; or ``[B]``, of each sequence's.
    """

    teachers: Sequence[Teacher | TeacherLogits]
    which: Tensor

    def labels(self, labels: Tensor, ignore_index: int) -> list[Tensor]:
        """The labels of each teacher's tokens, with ``ignore_index`` for the others.

        Raises:
            TypeError, ValueError: objects that are not teachers, or numbers that do not match the labels.
        """
        teachers, which = list(self.teachers), self.which
        if not teachers or not all(isinstance(teacher, (Teacher, TeacherLogits)) for teacher in teachers):
            kinds = ", ".join(type(teacher).__name__ for teacher in teachers) or "none"
            raise TypeError(f"Teachers takes a list of Teacher(...) and TeacherLogits(...), got {kinds}.")
        check_tensor("which", which)
        if which.is_floating_point() or which.shape not in (labels.shape, labels.shape[:1]):
            raise ValueError(
                f"which must be integers {tuple(labels.shape)}, as the labels, or ({labels.shape[0]},), one for each "
                f"sequence, got {described(which)}."
            )
        check_device("the labels", labels.device, which=which)
        which = which.view(*which.shape, *[1] * (labels.dim() - which.dim()))
        active = labels != ignore_index
        if which.device.type == "cpu" and not torch.compiler.is_dynamo_compiling():
            outside = active & ((which < 0) | (which >= len(teachers)))
            if outside.any():
                wrong = int(which.expand(labels.shape)[outside][0])
                raise ValueError(f"which must be in [0, {len(teachers)}), the number of teachers, found {wrong}.")
        return [torch.where(active & (which == i), labels, ignore_index) for i in range(len(teachers))]


def projected_teacher(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    projection: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> TeacherLogits:
    """A teacher with another tokenizer: ``q = M softmax(z / temperature)`` on the student's vocabulary, block by block.

    Args:
        hidden_states: ``[..., Ht]``, one for each token of the student. The caller aligns the positions of both texts.
        weight, bias, logit_scale, softcap: the teacher's head, as in :class:`Teacher`.
        projection: ``[Vs, Vt]``, sparse (COO or CSR): the share of the probability of each teacher's token that goes to
            each student's token. If the shares of a token add up to less than 1, the result is divided by the remaining
            probability.
        temperature: the temperature of the loss.

    Returns:
        :class:`TeacherLogits`, for any divergence except the cosine. Tokens of the student without a share have
        probability 0.

    Raises:
        TypeError, ValueError: a projection that is not sparse, or that does not fit the head.
    """
    head = Head.of(weight, bias, LogitTransform(temperature, logit_scale, softcap)).detach()
    if not isinstance(projection, Tensor) or projection.layout not in (torch.sparse_coo, torch.sparse_csr):
        raise TypeError("projection must be a sparse tensor [Vs, Vt], COO or CSR; pass projection.to_sparse_csr().")
    if projection.shape[-1] != head.vocab_size or projection.dim() != 2:
        raise ValueError(f"projection must be [Vs, {head.vocab_size}], of this teacher, got {tuple(projection.shape)}.")
    if head.adapters or head.ranks is not ALONE:
        raise ValueError("a projected teacher's head must be whole, without adapters; gather it, or merge them.")
    rows = hidden_states.detach().flatten(0, -2)
    shares = projection.detach().to_sparse_csr()
    wide = torch.promote_types(torch.float32, rows.dtype)
    # A product in half precision is rounded on CPUs.
    operand = wide if rows.device.type == "cpu" else rows.dtype
    opened = head.open(Products(operand, head.vocab_size))

    def logits(positions: Tensor) -> Tensor:
        states = rows[positions].to(operand)
        projected = opened.weights.logits(states.new_empty(len(states), head.vocab_size, dtype=wide), states, ALL)
        q = head.transform(projected, head.local_bias(ALL)).softmax(-1)
        logps = (shares.to(wide) @ q.t()).t().log_()
        return logps if temperature == 1 else logps.mul_(temperature)

    return TeacherLogits(logits, columns=projection.shape[0])


@dataclass(frozen=True, eq=False)
class TeacherTopK:
    """Log-probabilities of the k most likely tokens at each position, as inference servers and files provide them.

    Args:
        logps: ``[..., k]``, log-probabilities over the whole vocabulary, at the temperature of the distillation.
        indices: ``[..., k]`` int64, the ids of these tokens. At an active position, no id may occur twice.
        tail: what happens to all other tokens. ``bucket`` treats them as one extra class with the remaining
            probability of student and teacher. ``renormalize`` normalizes both distributions over the k
            tokens. ``none`` leaves them out of the sum.
        tail_logps: ``[...]``, the logarithm of the teacher's remaining probability, for ``bucket``. By default, it is
            computed as 1 minus the sum of the k probabilities, which is inexact if this sum is close to 1.
    """

    logps: Tensor
    indices: Tensor
    tail: str = "bucket"
    tail_logps: Tensor | None = None

    def check(self, tokens: torch.Size, student: Head) -> None:
        """Raise TypeError or ValueError unless this fits the shape of the student's tokens, and the student's head."""
        check_names([self.tail], TAILS, "tail", EARLIER_TAILS)
        check_tensor("the teacher's logps", self.logps, FLOATS)
        check_tensor("the teacher's indices", self.indices, (torch.int64,), "; pass indices.long()")
        if self.logps.shape != self.indices.shape or not self.logps.dim() or not self.logps.shape[-1]:
            raise ValueError(
                f"the teacher's logps and indices must both be [..., k], got {tuple(self.logps.shape)} and "
                f"{tuple(self.indices.shape)}."
            )
        for name in ("logps", "indices"):
            check_fits(name, getattr(self, name), student, (*tokens, self.logps.shape[-1]))
        if self.tail_logps is not None:
            check_fits("tail_logps", self.tail_logps, student, tokens)

    def check_active(self, mask: Tensor, vocab_size: int) -> None:
        """Raise ValueError for values that are wrong for the tokens that ``mask`` names; synchronizes."""
        if torch.compiler.is_dynamo_compiling():
            return
        logps = self.logps.detach()[mask]
        indices = self.indices[mask]
        outside, twice = wrong_columns(indices, vocab_size)
        known = f"indices must be in [0, {vocab_size}), the student's vocabulary; drop columns that the student lacks"
        wrong = {
            known: outside,
            "indices name a column twice for a token; give each column once": twice,
            "logps must be at most 0; apply log_softmax over the whole vocabulary first": logps > 1e-3,
        }
        theirs = torch.stack([tokens.any() for tokens in wrong.values()]).tolist()
        if any(theirs):
            given = f"indices from {int(indices.min())} to {int(indices.max())}, logps to {float(logps.max()):.4g}"
            raise ValueError(f"the teacher's {list(wrong)[theirs.index(True)]}. Got {given}.")


def check_no_temperature(whose: str, temperature: float | Tensor) -> None:
    """Raise ValueError unless a head's temperature is 1."""
    if isinstance(temperature, Tensor) or temperature != 1.0:
        raise ValueError(
            f"the {whose}'s head has temperature {said(temperature)}, which must be 1; temperature= of the loss or the "
            "operation divides both models' logits."
        )


def check_comparison(teacher: Any, divergence: Any, head: Head, shape: torch.Size) -> None:
    """Raise TypeError or ValueError unless a student's head, of labels of this shape, can be compared so."""
    if not isinstance(teacher, (Teacher, TeacherLogits)):
        raise TypeError(
            f"teacher must be a Teacher(hidden_states, weight) or TeacherLogits(logits), got {type(teacher).__name__}."
        )
    if not isinstance(divergence, Divergence):
        raise TypeError(f"divergence must be a Divergence, such as Divergence.forward_kl(), got {divergence!r}.")
    teacher.check(shape, head)
