"""Distillation: a divergence from the teacher's softmax, mixed with cross-entropy, in one pass.

V columns that both vocabularies have, k columns of a sparse teacher. p is the student's softmax, q the teacher's, both
of logits divided by ``temperature``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine import (
    Head,
    Statistics,
    TeacherTopK,
    Tokens,
    TokenSupport,
    linear_divergence_loss,
    linear_token_loss,
)
from liger_losses.chunked.engine.checks import check_alike, check_names, check_range, checked_items
from liger_losses.chunked.engine.given import note
from liger_losses.chunked.engine.operators import loss_operator
from liger_losses.chunked.engine.ops import support_statistics
from liger_losses.chunked.engine.query import Comparison, Query
from liger_losses.chunked.engine.tokens import check_temperature
from liger_losses.chunked.losses.base import ChunkedLoss, LossOptions
from liger_losses.chunked.losses.call_forms import FORMS, AnyTeacher, read_distillation
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.divergence_forms import Divergence, finite_logs, terms
from liger_losses.kernels.logit_transform import LogitTransform

#: Both forms of the generalized JSD that are in use: the factors of KL(q || m) and KL(p || m).
JSD_CONVENTIONS = {"gkd": lambda beta: (beta, 1 - beta), "interpolated": lambda beta: (1 - beta, beta)}


def generalized_jsd(beta: float = 0.5, convention: str = "gkd") -> Divergence:
    """The :class:`liger_losses.Divergence` that :func:`jsd` computes."""
    check_range("beta", beta, 0.0, 1.0)
    check_names([convention], JSD_CONVENTIONS, "convention")
    if beta in (0, 1):
        return Divergence.reverse_kl() if beta == 1 else Divergence.forward_kl()
    return Divergence.mixture(beta, *JSD_CONVENTIONS[convention](beta))


def divergence(log_p: Tensor, log_q: Tensor, which: Divergence) -> Tensor:
    """Any :class:`liger_losses.Divergence` but the cosine, ``[...]``, from log-probabilities of C columns.

    Args:
        log_p: ``[..., C]``, the student's log-softmax, differentiable (once). The gradient leaves out what the
            log-softmax's backward removes anyway, and keeps its digits where p and q are close. A probability of 0
            (a logarithm of -inf, or below -1e30) counts as -10,000 nats, in both models.
        log_q: ``[..., C]``, the teacher's, a constant.
        which: ``Divergence.reverse_kl()``, for example.

    Returns:
        ``[...]``, in nats, in the dtype of ``log_p``.

    Raises:
        ValueError: the divergence is the cosine.
    """
    if not isinstance(which, Divergence):
        raise TypeError(f"which must be a Divergence, such as Divergence.forward_kl(), got {which!r}.")
    check_alike(log_p=log_p, log_q=log_q)
    if which.form == "cosine":
        raise ValueError(
            "the cosine needs logits, and here are log-probabilities: use LigerFusedLinearCosineSimilarityLoss."
        )
    return _SumOfTerms.apply(finite_logs(log_p), finite_logs(log_q), which)


class _SumOfTerms(torch.autograd.Function):
    """The sum of a divergence's terms, with the derivatives of :func:`terms`, which do not cancel."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, which: Divergence) -> Tensor:
        compute = _terms if torch.compiler.is_compiling() else terms
        f, h = compute(which, log_p, log_q)
        ctx.save_for_backward(h)
        return f.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (h,) = ctx.saved_tensors
        return h * g[..., None], None, None


def _terms(which: Divergence, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`terms` as an operator: torch.compile cannot trace how a power series is found."""
    return _terms_operator(log_p, log_q, which.form, which.a, which.b, which.c)


@torch.library.custom_op("liger_losses::divergence_terms", mutates_args=())
def _terms_operator(log_p: Tensor, log_q: Tensor, form: str, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    return terms(Divergence(form, a, b, c), log_p, log_q)


@_terms_operator.register_fake
def _(log_p: Tensor, log_q: Tensor, form: str, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(log_p), torch.empty_like(log_p)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(q || p) = sum q (log q - log p)``; arguments and result as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.forward_kl())


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(p || q) = sum p (log p - log q)``; arguments and result as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.reverse_kl())


def jsd(log_p: Tensor, log_q: Tensor, *, beta: float = 0.5, convention: str = "gkd") -> Tensor:
    """The generalized Jensen-Shannon divergence with ``m = beta q + (1 - beta) p``.

    - ``convention="gkd"``: ``beta KL(q || m) + (1 - beta) KL(p || m)``: GKD (arXiv:2306.13649, eq. 1), liger-kernel
      and TRL. It vanishes towards both ends, so that beta also sets its size.
    - ``convention="interpolated"``: ``(1 - beta) KL(q || m) + beta KL(p || m)``, which runs from ``KL(q || p)`` to
      ``KL(p || q)``. TRL's GKD had this one until March 2025, with ``1 - beta`` for beta.

    In both, ``beta=0`` is ``KL(q || p)`` and ``beta=1`` is ``KL(p || q)``, and at 1/2 they are the same.

    Args:
        log_p, log_q: as in :func:`divergence`, as is the result.
        beta: share of the teacher in the mixture, in [0, 1].
        convention: ``gkd`` or ``interpolated``.

    Raises:
        TypeError, ValueError: a beta out of its range, or another convention.
    """
    return divergence(log_p, log_q, generalized_jsd(beta, convention))


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``1/2 sum |p - q|`` (arXiv:2307.15190, eq. 5); arguments and result as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.total_variation())


def alpha_beta_divergence(log_p: Tensor, log_q: Tensor, alpha: float, beta: float) -> Tensor:
    """``sum (a/s q^s + b/s p^s - q^a p^b) / (a b)``, ``s = a + b`` (ABKD, arXiv:2505.04560), and its limits.

    Args:
        log_p, log_q: as in :func:`divergence`, as is the result.
        alpha, beta: ``a`` and ``b``, at least 0, and not both 0: (1, 0) is ``KL(q || p)``, (0, 1) is ``KL(p || q)``.

    Raises:
        TypeError, ValueError: alpha or beta out of their range.
    """
    return divergence(log_p, log_q, _alpha_beta(alpha, beta))


def _alpha_beta(alpha: float, beta: float) -> Divergence:
    """The :class:`liger_losses.Divergence` that :func:`alpha_beta_divergence` computes."""
    check_range("alpha", alpha, 0.0, math.inf)
    check_range("beta", beta, 0.0, math.inf)
    if alpha + beta == 0:
        raise ValueError("alpha and beta must not both be 0: (1, 0) is KL(q || p), (0, 1) is KL(p || q).")
    return Divergence.alpha_beta(alpha, beta)


def sparse_divergence(logps: Tensor, teacher_logps: Tensor, which: Divergence, tail: str = "bucket") -> Tensor:
    """A divergence over the k columns of a sparse teacher, and the probability outside them, ``[...]``.

    Args:
        logps: ``[..., k]``, the student's log-probabilities of these columns, differentiable (once).
        teacher_logps: ``[..., k]``, the teacher's.
        which: see :func:`divergence`.
        tail: ``bucket`` or ``renormalize``; see :class:`liger_losses.TeacherTopK`.

    Returns:
        ``[...]``, in nats.
    """
    check_alike(logps=logps, teacher_logps=teacher_logps)
    check_names([tail], ("bucket", "renormalize"), "tail")
    return divergence(distribution(logps, tail), distribution(teacher_logps, tail), which)


def distribution(logps: Tensor, tail: str) -> Tensor:
    """Log-probabilities that add up to 1, from those of some columns ``[..., k]``: ``[..., k + 1]`` or ``[..., k]``."""
    if tail == "renormalize":
        return logps.log_softmax(-1)
    # The rest is log(1 - sum exp(logps)), clamped where rounding leaves nothing of it.
    total = logps.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(logps.dtype).eps)
    # Each branch gets arguments at which it and its derivative are finite.
    near_one = (-total.clamp(min=-math.log(2)).expm1()).log()
    rest = torch.where(total > -math.log(2), near_one, (-total.clamp(max=-math.log(2)).exp()).log1p())
    return torch.cat([logps, rest], -1)


class DistillationMetrics(NamedTuple):
    """Detached, 0-dim: the mean divergence and the mean cross-entropy (``None`` if that has no weight)."""

    soft_loss: Tensor
    hard_loss: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(LossOptions):
    """The options of distillation, but for the divergence; see :class:`DistillationLoss`."""

    weight_hard_loss: float = 0.5
    weight_soft_loss: float = 0.5
    compiled: bool = True
    return_soft_hard_loss: bool = False
    temperature_squared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("temperature", self.temperature, 0.0, math.inf, open_low=True)
        for name in ("weight_hard_loss", "weight_soft_loss"):
            check_range(name, getattr(self, name), 0.0, math.inf)


@dataclass(frozen=True, kw_only=True)
class DivergenceOptions(DistillationOptions):
    """The options of :class:`DistillationLoss`."""

    divergence: Divergence | None


#: What constructors take by position, as in liger-kernel: what is their own comes between or before these.
_WEIGHTS = ("weight_hard_loss", "weight_soft_loss")
_OTHERS = ("ignore_index", "temperature", "compiled", "chunk_size", "return_soft_hard_loss")


class DistillationLoss(ChunkedLoss):
    """``(weight_hard_loss sum_t ce_t + weight_soft_loss sum_t D_t) / n``, over tokens whose label is not ignored.

    ``D`` is the divergence over the columns that both vocabularies have, ``ce`` the student's own cross-entropy, over
    its whole vocabulary and at temperature 1, ``n`` the number of tokens.

    Args:
        divergence: ``None`` in subclasses that have a property of this name.
        weight_hard_loss, weight_soft_loss: at least 0.
        temperature: what the logits of both models are divided by in the divergence (> 0).
        compiled: accepted for code written for liger-kernel; there is nothing to compile.
        return_soft_hard_loss: in liger-kernel's call form, return ``(loss, soft_loss, hard_loss)``.
        temperature_squared: multiply the divergence by ``temperature ** 2``, so that its gradients keep their size
            (Hinton et al. 2015, arXiv:1503.02531, section 2). liger-kernel and TRL do not.
        ignore_index, chunk_size, options: as in :class:`liger_losses.ChunkedLoss`; ``logit_scale`` and ``softcap`` are
            the student's.
    """

    forms = FORMS["distillation"]
    call_forms = "loss(head, hidden_states, labels, Teacher(hidden_states, weight))"

    options_type: ClassVar[type[LossOptions]] = DivergenceOptions
    settings: DistillationOptions
    positions: ClassVar[tuple[str, ...]] = ("divergence", *_WEIGHTS, *_OTHERS)

    def check_options(self) -> None:
        super().check_options()
        if not isinstance(self.divergence, Divergence):
            raise TypeError(
                f"divergence must be a Divergence, such as Divergence.forward_kl(), got {self.divergence!r}."
            )

    @property
    def transform(self) -> LogitTransform:
        """The student's, at temperature 1: the loss's own is for the divergence, and divides both models' logits."""
        return LogitTransform(1.0, self.logit_scale, self.softcap)

    @property
    def common_options(self) -> dict[str, Any]:
        return {**super().common_options, "divergence": str(self.divergence)}

    @property
    def factor(self) -> float:
        """What the divergence is multiplied by."""
        return self.temperature**2 if self.temperature_squared else 1.0

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
            num_items_in_batch: what to divide by, instead of this call's number of tokens (gradient accumulation).
            temperature: ``[...]``, one for each hidden state, in place of the loss's own, which is then 1.
        """
        arguments = (student_input, student_weight, teacher_input, teacher_weight, true_labels)
        biases = (student_bias if bias is None else bias, teacher_bias)
        head, hidden, labels, teacher, like_liger = read_distillation(arguments, biases, teacher, self.transform)
        labels = self.labels(labels)
        mask = labels != self.ignore_index
        note(num_items_in_batch=num_items_in_batch)
        if isinstance(teacher, TeacherTopK):
            of_teacher = {"the teacher's columns": teacher.indices, "the teacher's logps": teacher.logps}
            note(labels, self.ignore_index, **of_teacher)
        factor: float | Tensor = self.factor
        t: float | Tensor = self.temperature
        if temperature is not None:
            self.check_one_temperature(temperature)
            check_temperature(temperature, head.weight.device, [labels.shape])
            t = temperature
            if self.temperature_squared:
                squares = temperature.to(torch.promote_types(torch.float32, temperature.dtype)).square()
                factor = factor * torch.where(mask, squares, 0.0)  # it may be anything without loss
        tokens: Tensor | Tokens = labels
        names = ("divergence", "logp") if self.weight_hard_loss != 0 or self.return_soft_hard_loss else ("divergence",)
        if self.group is not None:
            if isinstance(teacher, TeacherTopK):
                calls = self._sparse_calls(head, mask, teacher, names, t)
            else:
                calls = [(head, Query(names, comparison=Comparison(teacher, self.divergence, t)))]
            tokens = self.agreed_tokens(hidden, labels, num_items_in_batch, calls)
        if num_items_in_batch is None:
            number = (mask.sum() if self.group is None else self.total(mask)).clamp(min=1)
        else:
            number = checked_items(num_items_in_batch, labels.device)
            number = torch.where(number == 0, 1, number)
        per_token = mask.to(torch.float64 if head.weight.dtype == torch.float64 else torch.float32) / number
        weights = {"divergence": self.weight_soft_loss * factor * per_token}
        if "logp" in names:
            weights["logp"] = -self.weight_hard_loss * per_token
        if isinstance(teacher, TeacherTopK):
            loss, found = self._sparse(hidden, head, labels, teacher, weights, t)
        else:
            which = self.divergence
            loss, found = linear_divergence_loss(
                hidden, head, tokens, teacher, which, weights, temperature=t, options=self.options
            )
        hard_loss = -(per_token * found.logp).sum() if "logp" in weights else None
        soft_loss = (factor * per_token * found.divergence).sum()
        if self.group is not None:
            loss, soft_loss = self.total(loss), self.total(soft_loss)
            hard_loss = None if hard_loss is None else self.total(hard_loss)
        if not like_liger:
            return loss, DistillationMetrics(soft_loss, hard_loss)
        return (loss, soft_loss, hard_loss) if self.return_soft_hard_loss else loss

    def _sparse(
        self,
        hidden: Tensor,
        head: Head,
        labels: Tensor,
        teacher: TeacherTopK,
        weights: dict[str, Tensor],
        temperature: float | Tensor,
    ) -> tuple[Tensor, Statistics]:
        """Loss and statistics for a teacher of which k columns are known."""
        which, mask, options = self.divergence, labels != self.ignore_index, self.options
        (soft_head, query), *others = self._sparse_calls(head, mask, teacher, tuple(weights), temperature)
        tokens: Any = labels
        if not torch.compiler.is_dynamo_compiling():
            tokens = Tokens.select([labels], head.vocab_size, self.ignore_index, self.compact, self.backend)

        def soft_loss(s: Statistics, labels: Tensor, teacher_logps: Tensor, soft: Tensor, hard: Any = None) -> Tensor:
            loss = soft * sparse_divergence(s.selected_logps, teacher_logps, which, teacher.tail)
            return loss if hard is None else loss + hard * s.logp

        hard = {"hard": weights["logp"]} if "logp" in weights else {}
        together = bool(hard) and not others
        teacher_logps = teacher.logps.to(weights["divergence"].dtype)
        inputs = {"teacher_logps": teacher_logps, "soft": weights["divergence"]}
        if teacher.tail == "renormalize" and not together:  # a softmax over these columns alone: others are not read
            found = support_statistics(
                hidden,
                soft_head,
                labels,
                TokenSupport(teacher.indices),
                ("selected_logps",),
                options,
            )
            losses = soft_loss(found, labels, teacher_logps.masked_fill(~mask[..., None], -1.0), inputs["soft"])
            loss = torch.where(mask, losses, 0.0).sum()
        else:
            loss, found = linear_token_loss(
                hidden,
                soft_head,
                tokens,
                soft_loss,
                query.statistics,
                token_inputs=inputs | hard if together else inputs,
                selected=teacher.indices,
                options=options,
            )
        logp = found.logp
        if others:
            added, others = linear_token_loss(
                hidden, head, tokens, lambda s, labels, hard: hard * s.logp, token_inputs=hard, options=options
            )
            loss, logp = loss + added, others.logp
        with torch.no_grad():
            log_p, log_q = (torch.where(mask[..., None], x, -1.0) for x in (found.selected_logps, teacher_logps))
            divergences = sparse_divergence(log_p, log_q, which, teacher.tail)
        return loss, Statistics(logp=logp, divergence=torch.where(mask, divergences, 0.0))

    def _sparse_calls(
        self, head: Head, mask: Tensor, teacher: TeacherTopK, names: tuple[str, ...], temperature: float | Tensor
    ) -> list[tuple[Head, Query]]:
        """The calls that a sparse teacher takes, once it fits: that of the divergence first."""
        teacher.check(mask.shape, head)
        if self.divergence.form == "cosine":
            raise ValueError(
                "the cosine needs all logits of the teacher, and a TeacherTopK has log-probabilities: give "
                "Teacher(hidden_states, weight) or TeacherLogits(logits)."
            )
        transform = head.transform
        if isinstance(transform.temperature, Tensor) or transform.temperature != 1.0:
            raise ValueError(
                f"the student's head has temperature {transform.temperature}, which must be 1: give the loss's "
                "temperature= instead, which divides both models' logits."
            )
        teacher.check_active(mask, head.vocab_size)
        soft_head = head.with_fields(transform=replace(transform, temperature=temperature))
        # The hard loss is at temperature 1: if the divergence is not, it takes another pass.
        together = "logp" in names and not isinstance(temperature, Tensor) and temperature == 1.0
        statistics = ("selected_logps", "logp") if together else ("selected_logps",)
        soft = soft_head, Query(statistics, selected=teacher.indices)
        return [soft] if together or "logp" not in names else [soft, (head, Query(("logp",)))]


@dataclass(frozen=True, kw_only=True)
class JSDOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearJSDLoss`."""

    beta: float = 0.5
    convention: str = "gkd"


class LigerFusedLinearJSDLoss(DistillationLoss):
    """The generalized Jensen-Shannon divergence: :func:`jsd`. Other arguments as in :class:`DistillationLoss`.

    Args:
        beta: share of the teacher in the mixture, in [0, 1].
        convention: ``gkd`` or ``interpolated``.
        arguments: from ``ignore_index`` on.
    """

    options_type = JSDOptions
    positions = (*_WEIGHTS, "beta", *_OTHERS)

    @property
    def divergence(self) -> Divergence:
        return generalized_jsd(self.beta, self.convention)


@dataclass(frozen=True, kw_only=True)
class KLOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearKLLoss`."""

    skew: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("skew", self.skew, 0.0, 0.999999)


class LigerFusedLinearKLLoss(DistillationLoss):
    """``KL(q || p)``; with ``skew``, ``KL(q || skew q + (1 - skew) p)`` (DistiLLM, arXiv:2402.03898, eq. 4).

    Args:
        skew: share of the teacher in what it is compared with, at least 0 and below 1.
        arguments, options: as in :class:`DistillationLoss`, without the divergence.
    """

    options_type = KLOptions
    positions = (*_WEIGHTS, *_OTHERS)

    @property
    def divergence(self) -> Divergence:
        return Divergence.mixture(self.skew, 1.0, 0.0) if self.skew else Divergence.forward_kl()


class LigerFusedLinearReverseKLLoss(LigerFusedLinearKLLoss):
    """``KL(p || q)``; with ``skew``, ``KL(p || skew p + (1 - skew) q)`` (DistiLLM, arXiv:2402.03898, section 3.1).

    Arguments as in :class:`LigerFusedLinearKLLoss`; here ``skew`` is the student's share.
    """

    @property
    def divergence(self) -> Divergence:
        return Divergence.mixture(1.0 - self.skew, 0.0, 1.0) if self.skew else Divergence.reverse_kl()


class LigerFusedLinearTVDLoss(DistillationLoss):
    """Total variation: :func:`total_variation`. Arguments as in :class:`DistillationLoss`, without the divergence."""

    options_type = DistillationOptions
    positions = (*_WEIGHTS, *_OTHERS)

    @property
    def divergence(self) -> Divergence:
        return Divergence.total_variation()


@dataclass(frozen=True, kw_only=True)
class AlphaBetaOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearAlphaBetaLoss`."""

    alpha: float
    beta: float | None = None


class LigerFusedLinearAlphaBetaLoss(DistillationLoss):
    """:func:`alpha_beta_divergence`; with ``beta=None`` the alpha divergence, ``beta = 1 - alpha``.

    Args:
        alpha, beta: at least 0, and not both 0.
        arguments, options: as in :class:`DistillationLoss`, without the divergence.
    """

    options_type = AlphaBetaOptions
    positions = ("alpha", "beta", *_WEIGHTS, *_OTHERS)

    @property
    def divergence(self) -> Divergence:
        if self.beta is not None:
            return _alpha_beta(self.alpha, self.beta)
        check_range("alpha", self.alpha, 0.0, 1.0)
        return _alpha_beta(self.alpha, 1.0 - self.alpha)


@dataclass(frozen=True, kw_only=True)
class CosineSimilarityOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearCosineSimilarityLoss`."""

    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0.0, math.inf)


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """``beta (1 - cos(student's logits, teacher's logits))``. Other arguments as in :class:`DistillationLoss`.

    Args:
        beta: what the distance is multiplied by, at least 0.
        arguments: from ``ignore_index`` on.
    """

    options_type = CosineSimilarityOptions
    positions = (*_WEIGHTS, "beta", *_OTHERS)

    @property
    def divergence(self) -> Divergence:
        return Divergence.cosine()

    @property
    def factor(self) -> float:
        """What the divergence is multiplied by: ``beta`` too."""
        return self.beta * self.temperature**2 if self.temperature_squared else self.beta
