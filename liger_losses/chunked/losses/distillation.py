"""Distillation: a divergence from the teacher's softmax, mixed with cross-entropy, in one pass.

V columns that both vocabularies have, k columns of a sparse teacher. p is the student's softmax, q the teacher's, both
of logits divided by ``temperature``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_losses.checks import (
    NonNegativeFloat,
    PositiveFloat,
    check_names,
    check_range,
    check_temperature,
    checked_items,
)
from liger_losses.chunked import Head, Largest, Teacher, TeacherLogits, Teachers, TeacherTopK
from liger_losses.chunked.core.compiled import loss_sum
from liger_losses.chunked.core.distilled import TAILS
from liger_losses.chunked.core.entry import loss_operator
from liger_losses.chunked.core.ops import compared_targets, weighted_sum
from liger_losses.chunked.core.statistics import Statistic
from liger_losses.chunked.core.target import Target, TokenLoss
from liger_losses.chunked.losses.base import ChunkedLoss, LossOptions
from liger_losses.chunked.losses.columns import loss_over_columns
from liger_losses.chunked.losses.softmax_divergences import alpha_beta, generalized_jsd
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform

AnyTeacher = Teacher | TeacherLogits | TeacherTopK | Teachers


class DistillationMetrics(NamedTuple):
    """Detached, 0-dim: the mean divergence and the mean cross-entropy (``None`` if that has no weight)."""

    soft_loss: Tensor
    hard_loss: Tensor | None = None


#: What constructors take by position, as in liger-kernel: other arguments come between or before these.
_WEIGHTS = ("weight_hard_loss", "weight_soft_loss")
_OTHERS = ("ignore_index", "temperature", "compiled", "chunk_size", "return_soft_hard_loss")


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(LossOptions):
    """The options of distillation, but for the divergence; see :class:`DistillationLoss`."""

    temperature: PositiveFloat = 1.0
    weight_hard_loss: NonNegativeFloat = 0.5
    weight_soft_loss: NonNegativeFloat = 0.5
    compiled: bool = True
    return_soft_hard_loss: bool = False
    temperature_squared: bool = False
    top_k: int | None = None
    top_k_of: str = "student"
    tail: str = "bucket"
    entry_limit: PositiveFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names([self.top_k_of], ("student", "teacher"), "top_k_of")
        check_names([self.tail], TAILS, "tail")
        if self.top_k is not None:
            Largest(self.top_k)  # which checks it
            if self.group is not None:
                raise ValueError("top_k= does not work with slices of sequences (group=); leave one of them out.")
        # At temperature 1: the loss's own is for the divergence, and divides both models' logits.
        object.__setattr__(self, "transform", LogitTransform(1.0, self.logit_scale, self.softcap))
        made = self.of_options()
        object.__setattr__(self, "made", made)
        if self.entry_limit is not None:
            made.limited(self.entry_limit)  # raises for divergences without a limit

    def of_options(self) -> Divergence:
        """The divergence that the options name."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DivergenceOptions(DistillationOptions):
    """The options of :class:`DistillationLoss`."""

    divergence: Divergence

    def of_options(self) -> Divergence:
        if not isinstance(self.divergence, Divergence):
            raise TypeError(
                f"divergence must be a Divergence, such as Divergence.forward_kl(), got {self.divergence!r}."
            )
        return self.divergence


class DistillationLoss(ChunkedLoss):
    """``(weight_hard_loss sum_t ce_t + weight_soft_loss sum_t D_t) / n``, over tokens whose label is not ignored.

    ``D`` is the divergence over the vocabulary entries that both models have, ``ce`` is the student's cross-entropy
    over its whole vocabulary at temperature 1, and ``n`` is the number of tokens.

    Args:
        divergence: the divergence between student and teacher, such as ``Divergence.reverse_kl()``.
        weight_hard_loss, weight_soft_loss: weights of the cross-entropy and of the divergence, at least 0.
        temperature: divides the logits of both models in the divergence (> 0).
        compiled: accepted for code written for liger-kernel, without effect.
        return_soft_hard_loss: with liger-kernel's call form, return ``(loss, soft_loss, hard_loss)``.
        temperature_squared: multiply the divergence by ``temperature ** 2``, so that the size of its gradients does not
            depend on the temperature (Hinton et al. 2015, arXiv:1503.02531, section 2). liger-kernel and TRL do not do
            this.
        top_k, top_k_of, tail: compute the divergence over only the ``top_k`` most likely tokens of the ``student`` or
            the ``teacher`` (``top_k_of``). ``tail`` says what happens to all other tokens, as in :class:`TeacherTopK`.
            The student's most likely tokens are chosen in each call; the choice has no gradient.
        entry_limit: the largest term of a vocabulary entry in a token's divergence, in nats; see
            :meth:`liger_losses.Divergence.limited`.
        ignore_index, chunk_size, options: as in :class:`liger_losses.ChunkedLoss`; ``logit_scale`` and ``softcap``
            apply to the student.
    """

    forms = (("head", "hidden_states", "labels", "teacher"),)

    options_type: ClassVar[type[LossOptions]] = DivergenceOptions
    settings: Any
    positions: ClassVar[tuple[str, ...]] = ("divergence", *_WEIGHTS, *_OTHERS)

    @property
    def divergence(self) -> Divergence:
        """The divergence between student and teacher."""
        return self.settings.made

    @property
    def common_options(self) -> dict[str, Any]:
        return {**super().common_options, "divergence": str(self.divergence)}

    @property
    def factor(self) -> float:
        """The factor of the divergence."""
        return self.temperature**2 if self.temperature_squared else 1.0

    @property
    def which(self) -> Divergence:
        """:attr:`divergence`, with its limit."""
        return self.divergence if self.entry_limit is None else self.divergence.limited(self.entry_limit)

    @loss_operator
    def forward(  # type: ignore[override]
        self,
        student_input: Any,
        student_weight: Any,
        teacher_input: Any,
        teacher_weight: Any = None,
        true_labels: Tensor | None = None,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        teacher: AnyTeacher | None = None,
        bias: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        temperature: Tensor | None = None,
    ) -> Any:
        """The loss, in one of two forms; a weight may be a tensor, a linear layer, or a :class:`liger_losses.Head`.

        - ``loss(weight, hidden_states, labels, teacher)``: ``[V, H]``, ``[..., H]``, ``[...]`` and a
          :class:`Teacher`, :class:`TeacherLogits` or :class:`TeacherTopK`. Returns the loss and
          :class:`DistillationMetrics`.
        - ``loss(student_hidden_states, student_weight, teacher_hidden_states, teacher_weight, labels)``,
          liger-kernel's. Returns the loss, or ``(loss, soft_loss, hard_loss)`` with ``return_soft_hard_loss``.

        Args:
            student_input, student_weight, teacher_input, teacher_weight, true_labels: as in these forms.
            student_bias, teacher_bias: ``[V]``, ``[Vt]`` (liger-kernel's form).
            teacher, bias: the teacher and the student's bias, by keyword.
            num_items_in_batch: the divisor, instead of this call's number of tokens (gradient accumulation).
            temperature: ``[...]``, one for each hidden state; the constructor's ``temperature`` must then be 1.
        """
        arguments = (student_input, student_weight, teacher_input, teacher_weight, true_labels)
        biases = (student_bias if bias is None else bias, teacher_bias)
        head, hidden, labels, taught, like_liger = _read_distillation(arguments, biases, teacher, self.transform)
        labels = self.labels(labels)
        mask = labels != self.ignore_index
        if self.top_k is not None and not isinstance(taught, (Teacher, TeacherLogits)):
            raise TypeError(f"top_k= needs a Teacher or TeacherLogits, got {type(taught).__name__}; leave top_k= out.")
        if isinstance(taught, Teachers) and self.group is not None:
            raise ValueError("Teachers does not work with slices of sequences (group=); leave group= out.")
        factor: float | Tensor = self.factor
        t: float | Tensor = self.temperature
        if temperature is not None:
            self.check_one_temperature(temperature)
            check_temperature(temperature, head.weight.device, [labels.shape])
            t = temperature
            if self.temperature_squared:
                wide = torch.promote_types(torch.promote_types(hidden.dtype, torch.float32), temperature.dtype)
                squares = temperature.to(wide).square()
                factor = factor * torch.where(mask, squares, 0.0)  # it may be anything without loss
        if self.top_k is not None and self.top_k_of == "teacher" and not isinstance(taught, Teacher):
            raise TypeError("top_k_of='teacher' needs a Teacher(...); or pass a TeacherTopK(...) without top_k=.")
        which, hard = self.which, self.weight_hard_loss != 0 or self.return_soft_hard_loss
        columns = self.top_k is not None or isinstance(taught, TeacherTopK)
        targets: list[Target] = []
        if not columns:
            targets = compared_targets(hidden, head, labels, taught, which, t, self.ignore_index)
        if self.group is not None:
            self.agree([num_items_in_batch], labels.device)
        if num_items_in_batch is None:
            number = self.total(mask).clamp(min=1)
        else:
            number = checked_items(num_items_in_batch, labels.device)
            number = torch.where(number == 0, 1, number)
        number = number.to(torch.promote_types(hidden.dtype, torch.float32))
        weights = {"divergence": self.weight_soft_loss * factor / number}
        if hard:
            weights["logp"] = -self.weight_hard_loss / number
        if columns:
            given = {"top_k": self.top_k, "top_k_of": self.top_k_of, "tail": self.tail}
            loss, found = loss_over_columns(hidden, head, labels, taught, which, weights, t, self.options, **given)
        else:
            names: list[Any] = [Statistic("divergence", divergence=which), *(["logp"] if hard else [])]
            loss, parts = loss_sum(targets, names, [TokenLoss(weighted_sum, weights)] * len(targets), self.options)
            found = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
        soft_loss = (factor * found["divergence"]).sum() / number
        hard_loss = -found["logp"].sum() / number if hard else None
        if self.group is not None:
            loss, soft_loss = self.total(loss), self.total(soft_loss)
            hard_loss = None if hard_loss is None else self.total(hard_loss)
        if not like_liger:
            return loss, DistillationMetrics(soft_loss, hard_loss)
        return (loss, soft_loss, hard_loss) if self.return_soft_hard_loss else loss


def _read_distillation(
    arguments: tuple[Any, Any, Any, Any, Any],
    biases: tuple[Tensor | None, Tensor | None],
    teacher: AnyTeacher | None,
    transform: LogitTransform,
) -> tuple[Head, Tensor, Tensor, Any, bool]:
    """The student's head, hidden states ``[..., H]`` and labels ``[...]``, the teacher, and whether liger-kernel's form
    was used (whose return value is another).

    - ``(weight, hidden_states, labels, teacher)``, the teacher by position or by keyword;
    - liger-kernel's ``(student hidden_states, student weight, teacher hidden_states, teacher weight, labels)``.

    ``biases`` are the student's and the teacher's; ``teacher`` is the one given by keyword.
    """
    first, second, third, fourth, fifth = arguments
    if teacher is not None and not isinstance(teacher, AnyTeacher):
        fourth, fifth = teacher, None
    if fourth is not None and fifth is None and not isinstance(fourth, AnyTeacher):
        raise TypeError(
            "the teacher must be Teacher(hidden_states, weight), TeacherLogits(logits), TeacherTopK(logps, indices) or "
            f"Teachers([...], which), got {type(fourth).__name__}."
        )
    if isinstance(fourth, AnyTeacher):
        if teacher is not None:
            raise ValueError("the teacher was given twice: by position, and as teacher=; leave one out.")
        teacher, fourth = fourth, None
    if teacher is not None:
        if fourth is not None or fifth is not None or biases[1] is not None:
            raise ValueError("with a teacher, the call is loss(weight, hidden_states, labels, teacher, bias=...).")
        return Head.of(first, biases[0], transform), second, third, teacher, False
    if fourth is None or fifth is None:
        raise ValueError(
            "there is no teacher: call loss(weight, hidden_states, labels, Teacher(hidden_states, weight)), or "
            "loss(student_hidden_states, student_weight, teacher_hidden_states, teacher_weight, labels)."
        )
    return Head.of(second, biases[0], transform), first, fifth, Teacher(third, fourth, biases[1]), True


@dataclass(frozen=True, kw_only=True)
class JSDOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearJSDLoss`."""

    beta: float = 0.5
    convention: str = "gkd"

    def of_options(self) -> Divergence:
        return generalized_jsd(self.beta, self.convention)


class LigerFusedLinearJSDLoss(DistillationLoss):
    """Distillation with the generalized Jensen-Shannon divergence, :func:`jsd`.

    Args:
        beta: share of the teacher in the mixture, in [0, 1].
        convention: ``gkd`` or ``interpolated``.
        arguments: positional arguments from ``ignore_index`` on, as in :class:`DistillationLoss`.
    """

    options_type = JSDOptions
    positions = (*_WEIGHTS, "beta", *_OTHERS)


@dataclass(frozen=True, kw_only=True)
class KLOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearKLLoss`."""

    skew: float = 0.0

    def of_options(self) -> Divergence:
        check_range("skew", self.skew, 0.0, 0.999999)
        return Divergence.mixture(self.skew, 1.0, 0.0) if self.skew else Divergence.forward_kl()


@dataclass(frozen=True, kw_only=True)
class ReverseKLOptions(KLOptions):
    """The options of :class:`LigerFusedLinearReverseKLLoss`."""

    def of_options(self) -> Divergence:
        check_range("skew", self.skew, 0.0, 0.999999)
        return Divergence.mixture(1.0 - self.skew, 0.0, 1.0) if self.skew else Divergence.reverse_kl()


class LigerFusedLinearKLLoss(DistillationLoss):
    """Distillation with the forward KL divergence ``KL(q || p)`` of the teacher q and the student p.

    With ``skew``, it is ``KL(q || skew q + (1 - skew) p)`` (DistiLLM, arXiv:2402.03898, eq. 4).

    Args:
        skew: share of the teacher in the second distribution, at least 0 and below 1.
        arguments, options: as in :class:`DistillationLoss`, without the divergence.
    """

    options_type = KLOptions
    positions = (*_WEIGHTS, *_OTHERS)


class LigerFusedLinearReverseKLLoss(LigerFusedLinearKLLoss):
    """Distillation with the reverse KL divergence ``KL(p || q)`` of the student p and the teacher q.

    With ``skew``, it is ``KL(p || skew p + (1 - skew) q)`` (DistiLLM, arXiv:2402.03898, section 3.1).

    Arguments as in :class:`LigerFusedLinearKLLoss`. Here ``skew`` is the share of the student.
    """

    options_type = ReverseKLOptions


@dataclass(frozen=True, kw_only=True)
class TVDOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearTVDLoss`."""

    def of_options(self) -> Divergence:
        return Divergence.total_variation()


class LigerFusedLinearTVDLoss(DistillationLoss):
    """Distillation with the total variation, :func:`total_variation`. Arguments as in :class:`DistillationLoss`."""

    options_type = TVDOptions
    positions = (*_WEIGHTS, *_OTHERS)


@dataclass(frozen=True, kw_only=True)
class AlphaBetaOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearAlphaBetaLoss`."""

    alpha: float
    beta: float | None = None

    def of_options(self) -> Divergence:
        if self.beta is not None:
            return alpha_beta(self.alpha, self.beta)
        check_range("alpha", self.alpha, 0.0, 1.0)
        return alpha_beta(self.alpha, 1.0 - self.alpha)


class LigerFusedLinearAlphaBetaLoss(DistillationLoss):
    """Distillation with the alpha-beta divergence, :func:`alpha_beta_divergence`.

    With ``beta=None``, it is the alpha divergence, ``beta = 1 - alpha``.

    Args:
        alpha, beta: at least 0, and not both 0.
        arguments, options: as in :class:`DistillationLoss`, without the divergence.
    """

    options_type = AlphaBetaOptions
    positions = ("alpha", "beta", *_WEIGHTS, *_OTHERS)


@dataclass(frozen=True, kw_only=True)
class CosineSimilarityOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearCosineSimilarityLoss`."""

    beta: float = 0.5

    def of_options(self) -> Divergence:
        check_range("beta", self.beta, 0.0, math.inf)
        return Divergence.cosine()


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """Distillation with the cosine distance of the logits: ``beta (1 - cos(student's logits, teacher's logits))``.

    Args:
        beta: factor of the distance, at least 0.
        arguments: positional arguments from ``ignore_index`` on, as in :class:`DistillationLoss`.
    """

    options_type = CosineSimilarityOptions
    positions = (*_WEIGHTS, "beta", *_OTHERS)

    @property
    def factor(self) -> float:
        """The factor of the divergence, which includes ``beta``."""
        return self.beta * self.temperature**2 if self.temperature_squared else self.beta
