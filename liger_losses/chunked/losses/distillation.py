"""Distillation: a divergence from the teacher's softmax, mixed with cross-entropy, in one pass.

N tokens that carry loss, V columns that both vocabularies have, k columns of a sparse teacher. p is the student's
softmax, q the teacher's, both of logits divided by ``temperature``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine import Statistics, linear_divergence_loss, linear_logps, linear_token_loss
from liger_losses.chunked.engine.checks import check_names, check_range, check_tensor
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits, TeacherTopK
from liger_losses.chunked.losses.base import ChunkedLoss
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.divergence_forms import Divergence, terms
from liger_losses.kernels.logit_transform import LogitTransform

AnyTeacher = Teacher | TeacherLogits | TeacherTopK


class DistillationMetrics(NamedTuple):
    """Detached, fp32, 0-dim: the mean divergence and the mean cross-entropy (``None`` where it has no weight)."""

    soft_loss: Tensor
    hard_loss: Tensor | None = None


class DistillationLoss(ChunkedLoss):
    """``(weight_hard_loss sum_t ce_t + weight_soft_loss sum_t D_t) / n``, over tokens whose label is not ignored.

    ``D`` is the divergence, ``ce`` the cross-entropy at temperature 1, ``n`` the number of tokens.

    Args:
        divergence: which; see :class:`liger_losses.Divergence`.
        weight_hard_loss, weight_soft_loss: at least 0.
        ignore_index: the label of tokens that carry no loss; they are dropped before the projections.
        temperature: what the logits of both are divided by in the divergence (> 0).
        compiled: accepted from code written for Liger; there is nothing to compile.
        chunk_size: at most so many tokens' gradients in a block, where more would fit the workspace.
        return_soft_hard_loss: in Liger's call form, return ``(loss, soft_loss, hard_loss)``.
        temperature_squared: multiply the divergence by ``temperature ** 2``, so that its gradients keep their size
            (Hinton et al. 2015, arXiv:1503.02531, section 2). Liger and TRL do not.
        options: as in :class:`liger_losses.ChunkedLoss`, ``logit_scale`` and ``softcap`` the student's.

    Raises:
        ValueError: a number out of its range.
    """

    def __init__(
        self,
        divergence: Divergence,
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
        super().__init__(ignore_index=ignore_index, chunk_size=chunk_size, **options)
        if self.transform.temperature != 1.0:  # a keyword of the base class that this one has for itself
            raise ValueError("give temperature= once.")
        check_range("temperature", temperature, 0.0, math.inf, open_low=True)
        check_range("weight_hard_loss", weight_hard_loss, 0.0, math.inf)
        check_range("weight_soft_loss", weight_soft_loss, 0.0, math.inf)
        self.divergence = divergence
        self.weight_hard_loss, self.weight_soft_loss = weight_hard_loss, weight_soft_loss
        self.temperature = temperature
        #: What the divergence is multiplied by.
        self.factor = temperature**2 if temperature_squared else 1.0
        self.compiled, self.return_soft_hard_loss = compiled, return_soft_hard_loss

    def forward(  # type: ignore[override]
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Any = None,
        true_labels: Tensor | None = None,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        teacher: AnyTeacher | None = None,
        bias: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss, in one of two forms.

        - ``loss(weight, hidden_states, labels, teacher)``: ``[V, H]``, ``[..., H]``, ``[...]`` and a
          :class:`Teacher`, :class:`TeacherLogits` or :class:`TeacherTopK`. Returns the loss and
          :class:`DistillationMetrics`.
        - ``loss(student_hidden_states, student_weight, teacher_hidden_states, teacher_weight, labels)``, Liger's.
          Returns the loss, or ``(loss, soft_loss, hard_loss)`` with ``return_soft_hard_loss``.

        Args:
            student_input: ``weight``, or the student's hidden states.
            student_weight: ``hidden_states``, or the student's weight.
            teacher_input: ``labels``, or the teacher's hidden states.
            teacher_weight: the teacher, or its weight ``[Vt, Ht]``.
            true_labels: ``[...]`` int64 (Liger's form).
            student_bias, teacher_bias: ``[V]``, ``[Vt]`` (Liger's form).
            teacher: the teacher, by keyword.
            bias: ``[V]``, the student's, by keyword.
            num_items_in_batch: what to divide by, instead of the number of tokens with loss: over all gradient
                accumulation steps, say.

        Raises:
            TypeError, ValueError: inputs that do not fit together.
        """
        if isinstance(teacher_weight, (Teacher, TeacherLogits, TeacherTopK)):
            if teacher is not None:
                raise ValueError("the teacher was given twice.")
            teacher, teacher_weight = teacher_weight, None
        bias = student_bias if bias is None else bias
        if teacher is not None:
            if teacher_weight is not None or true_labels is not None or teacher_bias is not None:
                raise ValueError("with a teacher, the call is loss(weight, hidden_states, labels, teacher, bias=...).")
            weight, hidden_states, labels = student_input, student_weight, teacher_input
        else:
            if teacher_weight is None or true_labels is None:
                raise ValueError(
                    "there is no teacher: call loss(weight, hidden_states, labels, Teacher(hidden_states, weight)), or "
                    "loss(student_hidden_states, student_weight, teacher_hidden_states, teacher_weight, labels)."
                )
            hidden_states, weight, labels = student_input, student_weight, true_labels
            teacher = Teacher(teacher_input, teacher_weight, teacher_bias)
        check_tensor("labels", labels)
        labels = self.labels(labels)
        loss, metrics = self._loss(weight, hidden_states, labels, teacher, bias, num_items_in_batch)
        if teacher_weight is None:
            return loss, metrics
        return (loss, metrics.soft_loss, metrics.hard_loss) if self.return_soft_hard_loss else loss

    def _loss(
        self,
        weight: Tensor,
        hidden_states: Tensor,
        labels: Tensor,
        teacher: AnyTeacher,
        bias: Tensor | None,
        num_items_in_batch: Tensor | int | None,
    ) -> tuple[Tensor, DistillationMetrics]:
        mask = labels != self.ignore_index
        dtype = torch.float64 if isinstance(weight, Tensor) and weight.dtype == torch.float64 else torch.float32
        if num_items_in_batch is None:
            number = mask.sum().clamp(min=1)
        else:
            number = torch.as_tensor(num_items_in_batch, device=labels.device)
            number = torch.where(number == 0, 1, number)
        per_token = mask.to(dtype) / number
        soft, hard = self.weight_soft_loss * self.factor * per_token, self.weight_hard_loss * per_token
        with_hard = self.weight_hard_loss != 0 or self.return_soft_hard_loss
        run: Any = self._sparse if isinstance(teacher, TeacherTopK) else self._dense
        loss, found = run(weight, hidden_states, labels, teacher, bias, soft, hard if with_hard else None)
        soft_loss = self.factor * (per_token * found.divergence).sum()
        hard_loss = -(per_token * found.logp).sum() if with_hard else None
        return loss, DistillationMetrics(soft_loss, hard_loss)

    def _dense(
        self,
        weight: Tensor,
        hidden_states: Tensor,
        labels: Tensor,
        teacher: Any,
        bias: Tensor | None,
        soft: Tensor,
        hard: Tensor | None,
    ) -> tuple[Tensor, Statistics]:
        return linear_divergence_loss(
            hidden_states,
            weight,
            labels,
            teacher,
            self.divergence,
            {"divergence": soft} if hard is None else {"divergence": soft, "logp": -hard},
            temperature=self.temperature,
            bias=bias,
            transform=self.transform,
            options=self.options,
        )

    def _sparse(
        self,
        weight: Tensor,
        hidden_states: Tensor,
        labels: Tensor,
        teacher: TeacherTopK,
        bias: Tensor | None,
        soft: Tensor,
        hard: Tensor | None,
    ) -> tuple[Tensor, Statistics]:
        check_tensor("weight", weight)
        teacher.check(labels, weight)
        if self.divergence.form == "cosine":
            raise ValueError("the cosine needs all logits of the teacher; a sparse teacher has log-probabilities.")
        kept = labels != self.ignore_index
        teacher.check_kept(teacher.logps[kept], teacher.indices[kept], weight.shape[0])

        def token_loss(statistics: Statistics, labels: Tensor, **inputs: Tensor) -> Tensor:
            found = sparse_divergence(statistics.selected_logps, inputs["teacher"], self.divergence, teacher.tail)
            loss = inputs["soft"] * found
            return loss - inputs["hard"] * statistics.logp if "hard" in inputs else loss

        common: dict[str, Any] = {"bias": bias, "options": self.options}
        with_hard = hard is not None and self.temperature == 1.0
        inputs = {"teacher": teacher.logps.to(soft.dtype), "soft": soft}
        loss, found = linear_token_loss(
            hidden_states,
            weight,
            labels,
            token_loss,
            ("selected_logps", "logp") if with_hard else ("selected_logps",),
            token_inputs={**inputs, "hard": hard} if with_hard and hard is not None else inputs,
            selected=teacher.indices,
            transform=LogitTransform(self.temperature, self.transform.logit_scale, self.transform.softcap),
            **common,
        )
        logp = found.logp
        if hard is not None and not with_hard:
            # The hard loss is of another temperature: another pass.
            extra, statistics = linear_token_loss(
                hidden_states,
                weight,
                labels,
                lambda statistics, labels, hard: -hard * statistics.logp,
                token_inputs={"hard": hard},
                transform=self.transform,
                **common,
            )
            loss, logp = loss + extra, statistics.logp
        with torch.no_grad():
            rows = found.selected_logps.flatten(0, -2), teacher.logps.to(soft.dtype).flatten(0, -2)
            flat = kept.flatten()[:, None]
            log_p, log_q = (torch.where(flat, part, -1.0) for part in rows)
            divergences = sparse_divergence(log_p, log_q, self.divergence, teacher.tail)
        return loss, Statistics(logp=logp, divergence=torch.where(kept, divergences.view(kept.shape), 0.0))


def sparse_divergence(logps: Tensor, teacher_logps: Tensor, divergence: Divergence, tail: str = "bucket") -> Tensor:
    """Divergences over k columns and what becomes of the rest; see :class:`liger_losses.TeacherTopK`.

    Args:
        logps: ``[n, k]``, the student's, differentiable.
        teacher_logps: ``[n, k]``, the teacher's.

    Returns:
        ``[n]``.
    """
    log_p, log_q = distribution(logps, tail), distribution(teacher_logps, tail)
    return _Sum.apply(log_p.clamp(min=-1e4), log_q.clamp(min=-1e4), divergence)


def distribution(logps: Tensor, tail: str) -> Tensor:
    """Log-probabilities ``[n, k]`` of some columns, and of what becomes of the rest, that add up to 1."""
    return logps.log_softmax(-1) if tail == "renormalize" else torch.cat([logps, _log_rest(logps)], -1)


def _log_rest(logps: Tensor) -> Tensor:
    """``log(1 - sum exp(logps))`` ``[n, 1]``, no less than what rounding leaves of it."""
    least = torch.finfo(logps.dtype).eps
    total = logps.logsumexp(-1, keepdim=True).clamp(max=-least)
    near_one = total > -math.log(2)
    # Each branch gets arguments at which it and its derivative are finite.
    return torch.where(
        near_one,
        (-total.clamp(min=-math.log(2)).expm1()).log(),
        (-total.clamp(max=-math.log(2)).exp()).log1p(),
    )


class _Sum(torch.autograd.Function):
    """The sum of a divergence's terms, with the derivatives that keep their digits."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, divergence: Divergence) -> Tensor:
        f, h = terms(divergence, log_p, log_q)
        ctx.save_for_backward(h)
        return f.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (h,) = ctx.saved_tensors
        return h * g[..., None], None, None


# --- The losses -------------------------------------------------------------------------------------------------------

#: Both forms of the generalised JSD that are in use: what KL(q || m) and KL(p || m) are multiplied by.
JSD_CONVENTIONS = {
    "gkd": lambda beta: (beta, 1 - beta),
    "interpolated": lambda beta: (1 - beta, beta),
}


class LigerFusedLinearJSDLoss(DistillationLoss):
    """The generalised Jensen-Shannon divergence, with ``m = beta q + (1 - beta) p``.

    - ``convention="gkd"``: ``beta KL(q || m) + (1 - beta) KL(p || m)``: GKD (arXiv:2306.13649, eq. 1), Liger and TRL.
      It vanishes towards both ends, so that beta also sets its size.
    - ``convention="interpolated"``: ``(1 - beta) KL(q || m) + beta KL(p || m)``, which runs from ``KL(q || p)`` to
      ``KL(p || q)``. TRL's GKD had this one until March 2025, with ``1 - beta`` for beta.

    In both, ``beta=0`` is ``KL(q || p)`` and ``beta=1`` is ``KL(p || q)``, and at 1/2 they are the same.

    Args:
        weight_hard_loss, weight_soft_loss, ignore_index, temperature, compiled, chunk_size, return_soft_hard_loss,
            options: as in :class:`DistillationLoss`.
        beta: share of the teacher in the mixture, in [0, 1].
        convention: ``gkd`` or ``interpolated``.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int | None = None,
        return_soft_hard_loss: bool = False,
        *,
        convention: str = "gkd",
        **options: Any,
    ) -> None:
        check_range("beta", beta, 0.0, 1.0)
        check_names([convention], JSD_CONVENTIONS, "convention")
        super().__init__(
            generalized_jsd(beta, convention),
            weight_hard_loss,
            weight_soft_loss,
            ignore_index,
            temperature,
            compiled,
            chunk_size,
            return_soft_hard_loss,
            **options,
        )
        self.beta, self.convention = beta, convention


def generalized_jsd(beta: float = 0.5, convention: str = "gkd") -> Divergence:
    """See :class:`LigerFusedLinearJSDLoss`."""
    if beta in (0, 1):
        return Divergence.reverse_kl() if beta == 1 else Divergence.forward_kl()
    return Divergence.mixture(beta, *JSD_CONVENTIONS[convention](beta))


class LigerFusedLinearKLLoss(DistillationLoss):
    """``KL(q || p)``; with ``skew``, ``KL(q || skew q + (1 - skew) p)`` (DistiLLM, arXiv:2402.03898, eq. 4).

    Args:
        skew: share of the teacher that is mixed into the student, in [0, 1).
        arguments, options: as in :class:`DistillationLoss`.
    """

    def __init__(self, *arguments: Any, skew: float = 0.0, **options: Any) -> None:
        check_range("skew", skew, 0.0, 0.999999)
        divergence = Divergence.mixture(skew, 1.0, 0.0) if skew else Divergence.forward_kl()
        super().__init__(divergence, *arguments, **options)
        self.skew = skew


class LigerFusedLinearReverseKLLoss(DistillationLoss):
    """``KL(p || q)``; with ``skew``, ``KL(p || skew p + (1 - skew) q)`` (DistiLLM, arXiv:2402.03898, section 3.1).

    Args:
        skew: share of the student that is mixed into the teacher, in [0, 1).
        arguments, options: as in :class:`DistillationLoss`.
    """

    def __init__(self, *arguments: Any, skew: float = 0.0, **options: Any) -> None:
        check_range("skew", skew, 0.0, 0.999999)
        divergence = Divergence.mixture(1.0 - skew, 0.0, 1.0) if skew else Divergence.reverse_kl()
        super().__init__(divergence, *arguments, **options)
        self.skew = skew


class LigerFusedLinearTVDLoss(DistillationLoss):
    """Total variation, ``1/2 sum |p - q|`` (arXiv:2307.15190, eq. 5).

    Args:
        arguments, options: as in :class:`DistillationLoss`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(Divergence.total_variation(), *arguments, **options)


class LigerFusedLinearAlphaBetaLoss(DistillationLoss):
    """The alpha-beta divergence, ``sum (a/s q^s + b/s p^s - q^a p^b) / (a b)``, ``s = a + b`` (ABKD, arXiv:2505.04560).

    With ``beta=None`` it is the alpha divergence: ``beta = 1 - alpha``. (1, 0) is ``KL(q || p)``, (0, 1) is
    ``KL(p || q)``.

    Args:
        alpha, beta: at least 0, and not both 0.
        arguments, options: as in :class:`DistillationLoss`.
    """

    def __init__(self, alpha: float, beta: float | None = None, *arguments: Any, **options: Any) -> None:
        check_range("alpha", alpha, 0.0, 1.0 if beta is None else math.inf)
        beta = 1.0 - alpha if beta is None else beta
        check_range("beta", beta, 0.0, math.inf)
        if alpha + beta == 0:
            raise ValueError("alpha and beta must not both be 0.")
        super().__init__(Divergence.alpha_beta(alpha, beta), *arguments, **options)
        self.alpha, self.beta = alpha, beta


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """``beta (1 - cos(student's logits, teacher's logits))``.

    Args:
        beta: what the distance is multiplied by, at least 0.
        weight_hard_loss, weight_soft_loss, ignore_index, temperature, compiled, chunk_size, return_soft_hard_loss,
            options: as in :class:`DistillationLoss`.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int | None = None,
        return_soft_hard_loss: bool = False,
        **options: Any,
    ) -> None:
        check_range("beta", beta, 0.0, math.inf)
        super().__init__(
            Divergence.cosine(),
            weight_hard_loss,
            weight_soft_loss,
            ignore_index,
            temperature,
            compiled,
            chunk_size,
            return_soft_hard_loss,
            **options,
        )
        self.beta = beta
        self.factor *= beta


class LigerFusedLinearMiniLLMLoss(DistillationLoss):
    """MiniLLM's gradient of the reverse KL over whole completions that the student wrote, token by token.

    With ``r_t = log q(y_t) - log p(y_t)``, per token and averaged over all of them::

        KL(p_t || q_t) - w_t R_t log p(y_t),    R_t = sum_{u > t} gamma^(u - t - 1) r_u  (/ number of those tokens)

    the first term exact over the vocabulary (the paper's single-step part, eq. 4), the second a policy gradient whose
    advantage is what comes after (eq. 3 and 5); ``w`` is the importance ratio of completions that an older policy, or a
    mixture with the teacher, wrote. Gu et al. 2024, arXiv:2306.08543, section 2.2.

    Args:
        gamma: discount of later tokens, in [0, 1].
        length_normalization: divide by the number of later tokens, so that short completions are not preferred.
        single_step: whether the first term is there.
        options: as in :class:`DistillationLoss`, without the weights.
    """

    def __init__(
        self, gamma: float = 1.0, length_normalization: bool = True, single_step: bool = True, **options: Any
    ) -> None:
        check_range("gamma", gamma, 0.0, 1.0)
        super().__init__(Divergence.reverse_kl(), 0.0, 1.0, **options)
        if self.temperature != 1.0:
            raise ValueError("MiniLLM's rewards are of the distribution that wrote the completions: temperature 1.")
        self.gamma, self.length_normalization, self.single_step = gamma, length_normalization, single_step

    def forward(  # type: ignore[override]
        self,
        weight: Tensor,
        hidden_states: Tensor,
        labels: Tensor,
        teacher: Teacher,
        bias: Tensor | None = None,
        *,
        old_logps: Tensor | None = None,
    ) -> tuple[Tensor, DistillationMetrics]:
        """The loss of completions ``[B, T]``.

        Args:
            weight: ``[V, H]``.
            hidden_states: ``[B, T, H]``.
            labels: ``[B, T]`` int64, the completions' tokens.
            teacher: a :class:`Teacher`.
            bias: ``[V]``.
            old_logps: ``[B, T]``, log-probabilities under what wrote the completions; the student itself by default.

        Returns:
            The loss, and metrics whose ``soft_loss`` is the mean exact divergence and ``hard_loss`` the mean negative
            log-probability.

        Raises:
            TypeError, ValueError: inputs that do not fit together.
        """
        check_tensor("labels", labels)
        if labels.dim() != 2:
            raise ValueError(
                f"MiniLLM's rewards run along completions: labels must be [batch, length], got {tuple(labels.shape)}."
            )
        if not isinstance(teacher, Teacher):
            raise TypeError(f"MiniLLM takes a Teacher(hidden_states, weight), got {type(teacher).__name__}.")
        teacher.check(labels, weight)
        if old_logps is not None and old_logps.shape != labels.shape:
            raise ValueError(f"old_logps must be {tuple(labels.shape)}, as the labels, got {tuple(old_logps.shape)}.")
        labels = self.labels(labels)
        mask = labels != self.ignore_index
        common: dict[str, Any] = {"ignore_index": self.ignore_index}
        engine: dict[str, Any] = {
            name: getattr(self.options, name) for name in ("compact", "workspace", "chunk_size", "backend")
        }
        with torch.no_grad():
            head: dict[str, Any] = {"logit_scale": self.transform.logit_scale, "softcap": self.transform.softcap}
            logps = linear_logps(hidden_states, weight, labels, bias=bias, **head, **common, **engine)
            theirs: dict[str, Any] = {"logit_scale": teacher.logit_scale, "softcap": teacher.softcap}
            states, rows = teacher.hidden_states, teacher.weight
            reward = linear_logps(states, rows, labels, bias=teacher.bias, **theirs, **common, **engine) - logps
            later = minillm_returns(torch.where(mask, reward, 0.0), mask, self.gamma, self.length_normalization)
            if old_logps is not None:
                later = later * torch.where(mask, logps - old_logps, 0.0).clamp(max=80.0).exp()
            per_token = mask.to(logps.dtype) / mask.sum().clamp(min=1)
        loss, found = linear_divergence_loss(
            hidden_states,
            weight,
            labels,
            teacher,
            self.divergence,
            {"divergence": per_token * float(self.single_step), "logp": -per_token * later},
            bias=bias,
            transform=self.transform,
            options=self.options,
        )
        return loss, DistillationMetrics((per_token * found.divergence).sum(), -(per_token * found.logp).sum())


def minillm_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0, length_normalization: bool = True) -> Tensor:
    """``R_t = sum_{u > t} gamma^(u - t - 1) r_u``, divided by the number of those tokens if asked for.

    Args:
        rewards: ``[B, T]``, 0 where the mask is false.
        mask: ``[B, T]`` bool.

    Returns:
        ``[B, T]``, 0 for the last token.
    """
    # Sums of 1, 2, 4 ... rewards from u = t + 1 on, each from two of half the length.
    out, length = torch.cat([rewards[:, 1:], torch.zeros_like(rewards[:, :1])], 1), 1
    while length < rewards.shape[1]:
        shifted = torch.zeros_like(out)
        shifted[:, :-length] = out[:, length:]
        out, length = out + gamma**length * shifted, 2 * length
    if length_normalization:
        after = mask.flip(1).cumsum(1).flip(1) - mask.long()
        out = out / after.clamp(min=1)
    return out
