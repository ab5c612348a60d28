"""Distillation: a divergence from the teacher's softmax, mixed with cross-entropy, in one pass.

V columns that both vocabularies have, k columns of a sparse teacher. p is the student's softmax, q the teacher's, both
of logits divided by ``temperature``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine import Statistics, TeacherTopK, Tokens, linear_divergence_loss, linear_token_loss
from liger_losses.chunked.engine.checks import check_names, check_range
from liger_losses.chunked.losses.base import ChunkedLoss
from liger_losses.chunked.losses.call_forms import AnyTeacher, DistillationCall, read_distillation
from liger_losses.chunked.losses.divergence_functions import JSD_CONVENTIONS, generalized_jsd, sparse_divergence
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform


class DistillationMetrics(NamedTuple):
    """Detached, 0-dim: the mean divergence and the mean cross-entropy (``None`` if that has no weight)."""

    soft_loss: Tensor
    hard_loss: Tensor | None = None


class DistillationLoss(ChunkedLoss):
    """``(weight_hard_loss sum_t ce_t + weight_soft_loss sum_t D_t) / n``, over tokens whose label is not ignored.

    ``D`` is the divergence, ``ce`` the cross-entropy at temperature 1, ``n`` the number of tokens.

    Args:
        divergence: which; see :class:`liger_losses.Divergence`. ``None`` in subclasses that have a property of this
            name.
        weight_hard_loss, weight_soft_loss: at least 0.
        ignore_index: label of tokens that carry no loss; they are dropped before the projections.
        temperature: what the logits of both models are divided by in the divergence (> 0).
        compiled: accepted for code written for liger-kernel; there is nothing to compile.
        chunk_size: upper bound for the tokens whose gradients are accumulated in a block.
        return_soft_hard_loss: in liger-kernel's call form, return ``(loss, soft_loss, hard_loss)``.
        temperature_squared: multiply the divergence by ``temperature ** 2``, so that its gradients keep their size
            (Hinton et al. 2015, arXiv:1503.02531, section 2). liger-kernel and TRL do not.
        options: as in :class:`liger_losses.ChunkedLoss`; ``logit_scale`` and ``softcap`` are the student's.

    Raises:
        TypeError, ValueError: an option of the wrong type or out of its range.
    """

    def __init__(
        self,
        divergence: Divergence | None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int | None = None,
        return_soft_hard_loss: bool = False,
        *,
        temperature_squared: bool = False,
        **options: Any,
    ) -> None:
        if divergence is not None:
            self.divergence = divergence
        self.weight_hard_loss, self.weight_soft_loss = weight_hard_loss, weight_soft_loss
        self.compiled, self.return_soft_hard_loss = compiled, return_soft_hard_loss
        self.temperature_squared = temperature_squared
        super().__init__(ignore_index=ignore_index, temperature=temperature, chunk_size=chunk_size, **options)

    def check_options(self) -> None:
        super().check_options()
        check_range("temperature", self.temperature, 0.0, math.inf, open_low=True)
        check_range("weight_hard_loss", self.weight_hard_loss, 0.0, math.inf)
        check_range("weight_soft_loss", self.weight_soft_loss, 0.0, math.inf)
        if not isinstance(self.divergence, Divergence):
            raise TypeError(f"divergence must be a liger_losses.Divergence, got {type(self.divergence).__name__}.")

    @property
    def transform(self) -> LogitTransform:
        """The student's, at temperature 1: the loss's own is for the divergence, and divides both models' logits."""
        return LogitTransform(1.0, self.logit_scale, self.softcap)

    @property
    def factor(self) -> float:
        """What the divergence is multiplied by."""
        return self.temperature**2 if self.temperature_squared else 1.0

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
    ) -> Any:
        """The loss, in one of two forms; a weight may be a tensor, a linear layer, or a :class:`liger_losses.Head`.

        - ``loss(weight, hidden_states, labels, teacher)``: ``[V, H]``, ``[..., H]``, ``[...]`` and a
          :class:`Teacher`, :class:`TeacherLogits` or :class:`TeacherTopK`. Returns the loss and
          :class:`DistillationMetrics`.
        - ``loss(student_hidden_states, student_weight, teacher_hidden_states, teacher_weight, labels)``,
          liger-kernel's. Returns the loss, or ``(loss, soft_loss, hard_loss)`` with ``return_soft_hard_loss``.

        Args:
            student_input: the student's weight; or its hidden states.
            student_weight: the student's hidden states; or its weight.
            teacher_input: labels; or the teacher's hidden states.
            teacher_weight: the teacher; or its weight ``[Vt, Ht]``.
            true_labels: ``[...]`` int64 (liger-kernel's form).
            student_bias, teacher_bias: ``[V]``, ``[Vt]`` (liger-kernel's form).
            teacher: the teacher, by keyword.
            bias: ``[V]``, the student's, by keyword.
            num_items_in_batch: what to divide by, instead of this call's number of tokens (gradient accumulation).

        Raises:
            TypeError, ValueError: inputs that do not fit together.
        """
        arguments = (student_input, student_weight, teacher_input, teacher_weight, true_labels)
        biases = (student_bias if bias is None else bias, teacher_bias)
        call = read_distillation(arguments, biases, teacher, self.transform)
        loss, metrics = self._loss(call, num_items_in_batch)
        if not call.like_liger:
            return loss, metrics
        return (loss, metrics.soft_loss, metrics.hard_loss) if self.return_soft_hard_loss else loss

    def _loss(
        self, call: DistillationCall, num_items_in_batch: Tensor | int | None
    ) -> tuple[Tensor, DistillationMetrics]:
        labels = self.labels(call.labels)
        mask = labels != self.ignore_index
        dtype = torch.float64 if call.head.weight.dtype == torch.float64 else torch.float32
        if num_items_in_batch is None:
            number = mask.sum().clamp(min=1)
        else:
            number = torch.as_tensor(num_items_in_batch, device=labels.device)
            number = torch.where(number == 0, 1, number)
        per_token = mask.to(dtype) / number
        weights = {"divergence": self.weight_soft_loss * self.factor * per_token}
        if self.weight_hard_loss != 0 or self.return_soft_hard_loss:
            weights["logp"] = -self.weight_hard_loss * per_token
        if isinstance(call.teacher, TeacherTopK):
            loss, found = self._sparse(call, call.teacher, labels, weights)
        else:
            loss, found = linear_divergence_loss(
                call.hidden_states,
                call.head,
                labels,
                call.teacher,
                self.divergence,
                weights,
                temperature=self.temperature,
                options=self.options,
            )
        hard_loss = -(per_token * found.logp).sum() if "logp" in weights else None
        return loss, DistillationMetrics(self.factor * (per_token * found.divergence).sum(), hard_loss)

    def _sparse(
        self, call: DistillationCall, teacher: TeacherTopK, labels: Tensor, weights: dict[str, Tensor]
    ) -> tuple[Tensor, Statistics]:
        """Loss and statistics for a teacher of which k columns are known."""
        teacher.check(labels.shape, call.head)
        divergence, mask = self.divergence, labels != self.ignore_index
        if divergence.form == "cosine":
            raise ValueError("the cosine needs all logits of the teacher; a sparse teacher has log-probabilities.")
        teacher.check_active(teacher.logps[mask], teacher.indices[mask], call.head.vocab_size)
        tokens = Tokens.select(
            [labels], vocab_size=call.head.vocab_size, ignore_index=self.ignore_index, compact=self.compact
        )

        def token_loss(
            s: Statistics, labels: Tensor, teacher_logps: Tensor, divergence_weight: Tensor, logp_weight: Any = None
        ) -> Tensor:
            loss = divergence_weight * sparse_divergence(s.selected_logps, teacher_logps, divergence, teacher.tail)
            return loss if logp_weight is None else loss + logp_weight * s.logp

        teacher_logps = teacher.logps.to(weights["divergence"].dtype)
        inputs = {"teacher_logps": teacher_logps, "divergence_weight": weights["divergence"]}
        # The hard loss is at temperature 1: if the divergence is not, it takes another pass.
        with_hard = "logp" in weights and self.temperature == 1.0
        loss, found = linear_token_loss(
            call.hidden_states,
            call.head.with_fields(transform=_at_temperature(call.head.transform, self.temperature)),
            tokens,
            token_loss,
            ("selected_logps", "logp") if with_hard else ("selected_logps",),
            token_inputs={**inputs, "logp_weight": weights["logp"]} if with_hard else inputs,
            selected=teacher.indices,
            options=self.options,
        )
        logp = found.logp
        if "logp" in weights and not with_hard:
            hard_loss, statistics = linear_token_loss(
                call.hidden_states,
                call.head,
                tokens,
                lambda s, labels, logp_weight: logp_weight * s.logp,
                token_inputs={"logp_weight": weights["logp"]},
                options=self.options,
            )
            loss, logp = loss + hard_loss, statistics.logp
        with torch.no_grad():
            log_p, log_q = (torch.where(mask[..., None], x, -1.0) for x in (found.selected_logps, teacher_logps))
            divergences = sparse_divergence(log_p, log_q, divergence, teacher.tail)
        return loss, Statistics(logp=logp, divergence=torch.where(mask, divergences, 0.0))


def _at_temperature(transform: LogitTransform, temperature: float) -> LogitTransform:
    if transform.temperature != 1.0:
        raise ValueError(
            f"the head's temperature must be 1 in distillation, got {transform.temperature}; give the loss's "
            "temperature= instead, which divides both models' logits."
        )
    return LogitTransform(temperature, transform.logit_scale, transform.softcap)


# --- The losses -------------------------------------------------------------------------------------------------------


class LigerFusedLinearJSDLoss(DistillationLoss):
    """The generalized Jensen-Shannon divergence, with ``m = beta q + (1 - beta) p``.

    - ``convention="gkd"``: ``beta KL(q || m) + (1 - beta) KL(p || m)``: GKD (arXiv:2306.13649, eq. 1), liger-kernel
      and TRL. It vanishes towards both ends, so that beta also sets its size.
    - ``convention="interpolated"``: ``(1 - beta) KL(q || m) + beta KL(p || m)``, which runs from ``KL(q || p)`` to
      ``KL(p || q)``. TRL's GKD had this one until March 2025, with ``1 - beta`` for beta.

    In both, ``beta=0`` is ``KL(q || p)`` and ``beta=1`` is ``KL(p || q)``, and at 1/2 they are the same.

    Args:
        weight_hard_loss, weight_soft_loss: as in :class:`DistillationLoss`.
        beta: share of the teacher in the mixture, in [0, 1].
        convention: ``gkd`` or ``interpolated``.
        arguments, options: the others of :class:`DistillationLoss`, ``ignore_index`` first.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        *arguments: Any,
        convention: str = "gkd",
        **options: Any,
    ) -> None:
        self.beta, self.convention = beta, convention
        super().__init__(None, weight_hard_loss, weight_soft_loss, *arguments, **options)

    def check_options(self) -> None:
        check_range("beta", self.beta, 0.0, 1.0)
        check_names([self.convention], JSD_CONVENTIONS, "convention")
        super().check_options()

    @property
    def divergence(self) -> Divergence:  # type: ignore[override]
        return generalized_jsd(self.beta, self.convention)


class LigerFusedLinearKLLoss(DistillationLoss):
    """``KL(q || p)``; with ``skew``, ``KL(q || skew q + (1 - skew) p)`` (DistiLLM, arXiv:2402.03898, eq. 4).

    Args:
        skew: share of the teacher that is mixed into the student, in [0, 1).
        arguments, options: as in :class:`DistillationLoss`, without the divergence.
    """

    def __init__(self, *arguments: Any, skew: float = 0.0, **options: Any) -> None:
        self.skew = skew
        super().__init__(None, *arguments, **options)

    def check_options(self) -> None:
        check_range("skew", self.skew, 0.0, 0.999999)
        super().check_options()

    @property
    def divergence(self) -> Divergence:  # type: ignore[override]
        return Divergence.mixture(self.skew, 1.0, 0.0) if self.skew else Divergence.forward_kl()


class LigerFusedLinearReverseKLLoss(LigerFusedLinearKLLoss):
    """``KL(p || q)``; with ``skew``, ``KL(p || skew p + (1 - skew) q)`` (DistiLLM, arXiv:2402.03898, section 3.1).

    Args:
        skew: share of the student that is mixed into the teacher, in [0, 1).
        arguments, options: as in :class:`DistillationLoss`, without the divergence.
    """

    @property
    def divergence(self) -> Divergence:  # type: ignore[override]
        return Divergence.mixture(1.0 - self.skew, 0.0, 1.0) if self.skew else Divergence.reverse_kl()


class LigerFusedLinearTVDLoss(DistillationLoss):
    """Total variation, ``1/2 sum |p - q|`` (arXiv:2307.15190, eq. 5).

    Args:
        arguments, options: as in :class:`DistillationLoss`, without the divergence.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(Divergence.total_variation(), *arguments, **options)


class LigerFusedLinearAlphaBetaLoss(DistillationLoss):
    """The alpha-beta divergence, ``sum (a/s q^s + b/s p^s - q^a p^b) / (a b)``, ``s = a + b`` (ABKD, arXiv:2505.04560).

    With ``beta=None`` it is the alpha divergence: ``beta = 1 - alpha``. (1, 0) is ``KL(q || p)``, (0, 1) is
    ``KL(p || q)``.

    Args:
        alpha, beta: at least 0, and not both 0.
        arguments, options: as in :class:`DistillationLoss`, without the divergence.
    """

    def __init__(self, alpha: float, beta: float | None = None, *arguments: Any, **options: Any) -> None:
        self.alpha, self.beta = alpha, beta
        super().__init__(None, *arguments, **options)

    def check_options(self) -> None:
        check_range("alpha", self.alpha, 0.0, 1.0 if self.beta is None else math.inf)
        if self.beta is not None:
            check_range("beta", self.beta, 0.0, math.inf)
            if self.alpha + self.beta == 0:
                raise ValueError("alpha and beta must not both be 0.")
        super().check_options()

    @property
    def divergence(self) -> Divergence:  # type: ignore[override]
        return Divergence.alpha_beta(self.alpha, 1.0 - self.alpha if self.beta is None else self.beta)


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """``beta (1 - cos(student's logits, teacher's logits))``.

    Args:
        weight_hard_loss, weight_soft_loss: as in :class:`DistillationLoss`.
        beta: what the distance is multiplied by, at least 0.
        arguments, options: the others of :class:`DistillationLoss`, ``ignore_index`` first.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        *arguments: Any,
        **options: Any,
    ) -> None:
        self.beta = beta
        super().__init__(Divergence.cosine(), weight_hard_loss, weight_soft_loss, *arguments, **options)

    def check_options(self) -> None:
        check_range("beta", self.beta, 0.0, math.inf)
        super().check_options()

    @property
    def factor(self) -> float:
        """What the divergence is multiplied by: ``beta`` too."""
        return super().factor * self.beta
