"""Distillation: a divergence from the teacher's softmax, mixed with cross-entropy, in one pass; and MiniLLM.

V columns that both vocabularies have, k columns of a sparse teacher. p is the student's softmax, q the teacher's, both
of logits divided by ``temperature``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_losses import checks
from liger_losses.checks import NonNegativeFloat, PositiveFloat, UnitFloat
from liger_losses.chunked import Head, Largest, Teacher, TeacherLogits, Teachers, TeacherTopK, linear_divergence_loss
from liger_losses.chunked.core.compiled import in_graphs, loss_sum, statistics
from liger_losses.chunked.core.distilled import EARLIER_TAILS, TAILS
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.core.inputs import compared_targets, target_of
from liger_losses.chunked.core.ops import added, weighted_sum
from liger_losses.chunked.core.statistics import Statistic
from liger_losses.chunked.core.target import TokenLoss
from liger_losses.chunked.losses.base import AnyHead, ChunkedLoss, LossOptions, constructor
from liger_losses.chunked.losses.completion_loss import MAX_EXPONENT
from liger_losses.chunked.losses.cross_entropy import TOKEN_SCALINGS, constant_weights, token_factors
from liger_losses.chunked.losses.policy_estimates import minillm_returns
from liger_losses.chunked.losses.softmax_divergences import loss_over_columns
from liger_losses.chunked.losses.sums import sum_over_group, wide
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform

AnyTeacher = Teacher | TeacherLogits | TeacherTopK | Teachers


class DistillationMetrics(NamedTuple):
    """Detached, 0-dim: the mean divergence and the mean cross-entropy (``None`` if that has no weight)."""

    soft_loss: Tensor
    hard_loss: Tensor | None = None


class CallInputs(TypedDict, total=False):
    """What calls of :class:`DistillationLoss` may have beside both models and the labels."""

    bias: Tensor | None
    num_items_in_batch: Tensor | int | None
    temperature: Tensor | None
    token_weights: Tensor | None


@in_graphs
def scaled_sum(values: Mapping[str, Tensor], scaling: str, **weights: Tensor) -> Any:
    """:func:`weighted_sum`, in which the label's log-probability has a factor of :data:`TOKEN_SCALINGS`."""
    for factor in token_factors(values, scaling):
        weights["logp"] = weights["logp"] * factor
    return weighted_sum(values, **weights)


#: Whose largest columns a divergence is over.
_MODELS = ("student", "teacher")
#: Options by position.
_WEIGHTS = "weight_hard_loss weight_soft_loss"
_OTHERS = "ignore_index temperature compiled chunk_size return_soft_hard_loss"


class DistillationOptions(LossOptions):
    """The options of distillation, but for the divergence; see :class:`DistillationLoss`."""

    #: The factor of the divergence.
    factor: ClassVar[float] = 1.0
    names: ClassVar = {"token_scaling": (TOKEN_SCALINGS,), "tail": (TAILS, EARLIER_TAILS), "top_k_of": (_MODELS,)}

    weight_hard_loss: NonNegativeFloat = field(default=0.5, kw_only=False)
    weight_soft_loss: NonNegativeFloat = field(default=0.5, kw_only=False)
    temperature: PositiveFloat = 1.0
    compiled: bool = True
    return_soft_hard_loss: bool = False
    temperature_squared: bool = False
    top_k: int | None = None
    top_k_of: str = "student"
    tail: str = "bucket"
    entry_limit: PositiveFloat | None = None
    token_scaling: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_scaling != "none" and self.weight_hard_loss == 0:
            raise ValueError(
                f"token_scaling={self.token_scaling!r} is of the label's probability, which is read for the hard loss: "
                "give a weight_hard_loss above 0, or token_weights= in the call."
            )
        if TOKEN_SCALINGS[self.token_scaling].columns is not None:
            raise ValueError(
                f"token_scaling={self.token_scaling!r} reads the largest probabilities, which only cross-entropy has: "
                "use 'probability' or 'uncertainty'."
            )
        if self.top_k is not None:
            Largest(self.top_k)  # which checks it
            if self.group is not None:
                raise ValueError("top_k= does not work with slices of sequences (group=); leave one of them out.")
        # At temperature 1: the loss's own is for the divergence, and divides both models' logits.
        object.__setattr__(self, "transform", LogitTransform(1.0, self.logit_scale, self.softcap))
        which = self.of_options()
        object.__setattr__(self, "which", which if self.entry_limit is None else which.limited(self.entry_limit))

    def of_options(self) -> Divergence:
        """The divergence that the options name, without a limit."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Divergence:
    divergence: Divergence


# The fields of the last base come first, as in the constructor.
class DivergenceOptions(DistillationOptions, _Divergence):
    """The options of :class:`DistillationLoss`."""

    def of_options(self) -> Divergence:
        if not isinstance(self.divergence, Divergence):
            got = f"{self.divergence!r}"
            if callable(self.divergence):
                got = "a function; call it: register_divergence returns what makes the divergence of its parameters"
            raise TypeError(
                f"divergence must be a Divergence, as in DistillationLoss(Divergence.reverse_kl()), got {got}."
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
        token_scaling: what a token's cross-entropy is multiplied by, ``probability`` or ``uncertainty``, as in
            :class:`LigerFusedLinearCrossEntropyLoss`. With the forward KL divergence from the model before training, it
            is ASFT (arXiv:2509.23753). Not with a divergence over some columns.
        entry_limit: the largest term of a vocabulary entry in a token's divergence, in nats; see
            :meth:`liger_losses.Divergence.limited`.
        ignore_index, chunk_size, options: as in :class:`liger_losses.ChunkedLoss`; ``logit_scale`` and ``softcap``
            apply to the student.
    """

    forms = (("head", "hidden_states", "labels", "teacher"),)

    @constructor(DivergenceOptions)
    def __init__(self) -> None: ...

    positions = f"divergence {_WEIGHTS} {_OTHERS}"

    @property
    def divergence(self) -> Divergence:
        """The divergence between student and teacher, without a limit."""
        divergence: Divergence = self.settings.of_options()
        return divergence

    @property
    def common_options(self) -> dict[str, Any]:
        return {**super().common_options, "divergence": str(self.settings.which)}

    @overload  # type: ignore[override]
    def forward(
        self, head: AnyHead, hidden_states: Tensor, labels: Tensor, teacher: AnyTeacher, **inputs: Unpack[CallInputs]
    ) -> tuple[Tensor, DistillationMetrics]: ...
    @overload
    def forward(
        self,
        student_input: Any,
        student_weight: Any,
        teacher_input: Any,
        teacher_weight: Any,
        true_labels: Any,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        **inputs: Unpack[CallInputs],
    ) -> Any: ...
    @operator  # type: ignore[misc]
    def forward(
        self,
        student_input: Any,
        student_weight: Any,
        teacher_input: Any,
        teacher_weight: Any = None,
        true_labels: Any = None,
        student_bias: Any = None,
        teacher_bias: Any = None,
        *,
        teacher: Any = None,
        bias: Any = None,
        num_items_in_batch: Any = None,
        temperature: Any = None,
        token_weights: Any = None,
    ) -> Any:
        """The loss, in one of two forms; a weight may be a tensor, a linear layer, or a :class:`liger_losses.Head`.

        - ``loss(weight, hidden_states, labels, teacher)``: ``[V, H]``, ``[..., H]``, ``[...]`` and a
          :class:`Teacher`, :class:`TeacherLogits` or :class:`TeacherTopK`. Returns the loss and
          :class:`DistillationMetrics`.
        - ``loss(student_hidden_states, student_weight, teacher_hidden_states, teacher_weight, labels)``,
          liger-kernel's. Returns the loss alone, or ``(loss, soft_loss, hard_loss)`` with ``return_soft_hard_loss``.

        Args:
            student_input, student_weight, teacher_input, teacher_weight, true_labels: as in these forms.
            student_bias, teacher_bias: ``[V]``, ``[Vt]`` (liger-kernel's form).
            teacher, bias: the teacher and the student's bias, by keyword.
            num_items_in_batch: the divisor, instead of this call's number of tokens (gradient accumulation).
            temperature: ``[...]``, one for each hidden state; the constructor's ``temperature`` must then be 1.
            token_weights: ``[...]``, the weight of each label in the loss, without a gradient, such as a clipped
                importance ratio; ``shift`` moves both. The divisor and the metrics do not have it.
        """
        like_liger = teacher is None and not (true_labels is None or isinstance(teacher_weight, AnyTeacher | None))
        labels: Any = true_labels
        if like_liger:
            taught: Any = Teacher(teacher_input, teacher_weight, teacher_bias)
            weight, hidden = student_weight, student_input
        else:
            taught = _teacher_of(teacher_weight, teacher, true_labels, teacher_bias)
            weight, hidden, labels = student_input, student_weight, teacher_input
        o = self.settings
        head = Head.of(weight, student_bias if bias is None else bias, o.transform)
        labels, which = self.labels(labels), o.which
        mask, hard = labels != o.ignore_index, o.weight_hard_loss != 0 or o.return_soft_hard_loss
        checks.check_tensor("hidden_states", hidden, allow_dtensor=True)
        dtype, t = wide(hidden.dtype), o.temperature
        if temperature is not None:
            self.check_one_temperature(temperature)
            checks.check_temperature(temperature, head.weight.device, labels.shape)
            # Of tokens without loss, it may be anything.
            t = torch.where(mask, temperature, 1.0).to(torch.promote_types(dtype, temperature.dtype))
        over_columns = o.top_k is not None or isinstance(taught, TeacherTopK)
        if over_columns and o.token_scaling != "none":
            raise ValueError("token_scaling= needs a divergence over all columns: leave top_k= and TeacherTopK out.")
        if not over_columns:
            targets = compared_targets(hidden, head, labels, (taught, which, t), o.ignore_index)
        if o.group is not None:
            if isinstance(taught, Teachers):
                raise ValueError("Teachers does not work with slices of sequences (group=); leave group= out.")
            self.agree([num_items_in_batch])
        number = self.divisor(mask, num_items_in_batch).to(dtype)
        factor = o.factor * (t**2 if o.temperature_squared else 1.0)
        share = number.reciprocal()
        weights = {"divergence": o.weight_soft_loss * factor * share}
        if hard:
            weights["logp"] = -o.weight_hard_loss * share
        live = None
        if token_weights is not None:  # of masked tokens, they may be anything
            exact = constant_weights(token_weights, labels, int(o.shift))
            live, exact = exact != 0, exact.to(torch.promote_types(exact.dtype, dtype))
            weights = {name: torch.where(mask, exact * weight, 0.0) for name, weight in weights.items()}
        if over_columns:
            loss, *values = loss_over_columns(hidden, head, labels, taught, weights, t, o)
        else:
            names: list[Any] = [Statistic("divergence", divergence=which), *[*weights][1:]]
            token_loss = TokenLoss(scaled_sum, weights, {"scaling": o.token_scaling}, live)
            loss, values = loss_sum(targets, names, [token_loss] * len(targets), o.engine)
        (loss,), read = sum_over_group(o.group, loss), added(values)
        soft_loss = self.total(factor * read.divergence) / number
        hard_loss = -self.total(read.logp) / number if hard else None
        if not like_liger:
            return loss, DistillationMetrics(soft_loss, hard_loss)
        return (loss, soft_loss, hard_loss) if o.return_soft_hard_loss else loss


def _teacher_of(fourth: Any, teacher: Any, fifth: Any, bias: Tensor | None) -> AnyTeacher:
    """The teacher of ``loss(weight, hidden_states, labels, teacher)``, by position or by keyword.

    Raises:
        TypeError, ValueError: it is none, there is none, there are two, or arguments of liger-kernel's form beside it.
    """
    taught = fourth if teacher is None else teacher
    if taught is None:
        raise ValueError(
            "there is no teacher: call loss(weight, hidden_states, labels, Teacher(hidden_states, weight)), or "
            "loss(student_hidden_states, student_weight, teacher_hidden_states, teacher_weight, labels)."
        )
    if not isinstance(taught, AnyTeacher):
        raise TypeError(
            "the teacher must be Teacher(hidden_states, weight), TeacherLogits(logits), TeacherTopK(logps, indices) or "
            f"Teachers([...], which), got {type(taught).__name__}."
        )
    if teacher is not None and isinstance(fourth, AnyTeacher):
        raise ValueError("the teacher was given twice: by position, and as teacher=; leave one out.")
    if (teacher is not None and fourth is not None) or fifth is not None or bias is not None:
        raise ValueError("with a teacher, the call is loss(weight, hidden_states, labels, teacher, bias=...).")
    return taught


class JSDOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearJSDLoss`."""

    beta: float = field(default=0.5, kw_only=False)
    convention: str = "gkd"

    def of_options(self) -> Divergence:
        return Divergence.jsd(self.beta, self.convention)


class LigerFusedLinearJSDLoss(DistillationLoss):
    """Distillation with the generalized Jensen-Shannon divergence, :meth:`liger_losses.Divergence.jsd`.

    Args:
        beta: share of the teacher in the mixture, in [0, 1].
        convention: ``gkd`` or ``interpolated``.
        weight_hard_loss, weight_soft_loss: weights of the cross-entropy and of the divergence, at least 0.
        temperature: divides the logits of both models in the divergence (> 0).
        top_k, top_k_of, tail, entry_limit, temperature_squared, return_soft_hard_loss, compiled, options: as in
            :class:`DistillationLoss`.
    """

    @constructor(JSDOptions)
    def __init__(self) -> None: ...

    positions = f"{_WEIGHTS} beta {_OTHERS}"


class KLOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearKLLoss`."""

    skew: float = 0.0

    def of_options(self) -> Divergence:
        checks.check_range("skew", self.skew, 0.0, 0.999999)
        return Divergence.mixture(self.skew, 1.0, 0.0) if self.skew else Divergence.forward_kl()


class LigerFusedLinearKLLoss(DistillationLoss):
    """Distillation with the forward KL divergence ``KL(q || p)`` of the teacher q and the student p.

    With ``skew``, it is ``KL(q || skew q + (1 - skew) p)`` (DistiLLM, arXiv:2402.03898, eq. 4).

    Args:
        skew: share of the teacher in the second distribution, at least 0 and below 1.
        weight_hard_loss, weight_soft_loss: weights of the cross-entropy and of the divergence, at least 0.
        temperature: divides the logits of both models in the divergence (> 0).
        top_k, top_k_of, tail, entry_limit, temperature_squared, return_soft_hard_loss, compiled, options: as in
            :class:`DistillationLoss`.
    """

    @constructor(KLOptions)
    def __init__(self) -> None: ...

    positions = f"{_WEIGHTS} {_OTHERS}"


class ReverseKLOptions(KLOptions):
    """The options of :class:`LigerFusedLinearReverseKLLoss`."""

    weight_hard_loss: NonNegativeFloat = field(default=0.0, kw_only=False)
    weight_soft_loss: NonNegativeFloat = field(default=1.0, kw_only=False)

    def of_options(self) -> Divergence:
        checks.check_range("skew", self.skew, 0.0, 0.999999)
        return Divergence.mixture(1.0 - self.skew, 0.0, 1.0) if self.skew else Divergence.reverse_kl()


class LigerFusedLinearReverseKLLoss(LigerFusedLinearKLLoss):
    """Distillation with the reverse KL divergence ``KL(p || q)`` of the student p and the teacher q.

    By default without a hard loss (``weight_hard_loss=0``, ``weight_soft_loss=1``): on tokens that the student samples,
    the cross-entropy would teach it what it says already.

    With ``skew``, it is ``KL(p || skew p + (1 - skew) q)`` (DistiLLM, arXiv:2402.03898, section 3.1).

    Other arguments as in :class:`LigerFusedLinearKLLoss`. Here ``skew`` is the share of the student.
    """

    @constructor(ReverseKLOptions)
    def __init__(self) -> None: ...


class TVDOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearTVDLoss`."""

    def of_options(self) -> Divergence:
        return Divergence.total_variation()


class LigerFusedLinearTVDLoss(DistillationLoss):
    """Distillation with the total variation, :func:`total_variation`.

    Args:
        weight_hard_loss, weight_soft_loss: weights of the cross-entropy and of the divergence, at least 0.
        temperature: divides the logits of both models in the divergence (> 0).
        top_k, top_k_of, tail, entry_limit, temperature_squared, return_soft_hard_loss, compiled, options: as in
            :class:`DistillationLoss`.
    """

    @constructor(TVDOptions)
    def __init__(self) -> None: ...

    positions = f"{_WEIGHTS} {_OTHERS}"


@dataclass(frozen=True)
class _AlphaBeta:
    alpha: float
    beta: float | None = None


class AlphaBetaOptions(DistillationOptions, _AlphaBeta):
    """The options of :class:`LigerFusedLinearAlphaBetaLoss`."""

    def of_options(self) -> Divergence:
        if self.beta is not None:
            return Divergence.alpha_beta(self.alpha, self.beta)
        checks.check_range("alpha", self.alpha, 0.0, 1.0)
        return Divergence.alpha_beta(self.alpha, 1.0 - self.alpha)


class LigerFusedLinearAlphaBetaLoss(DistillationLoss):
    """Distillation with the alpha-beta divergence, :func:`alpha_beta_divergence`.

    With ``beta=None``, it is the alpha divergence, ``beta = 1 - alpha``.

    Args:
        alpha, beta: at least 0, and not both 0.
        weight_hard_loss, weight_soft_loss: weights of the cross-entropy and of the divergence, at least 0.
        temperature: divides the logits of both models in the divergence (> 0).
        top_k, top_k_of, tail, entry_limit, temperature_squared, return_soft_hard_loss, compiled, options: as in
            :class:`DistillationLoss`.
    """

    @constructor(AlphaBetaOptions)
    def __init__(self) -> None: ...

    positions = f"alpha beta {_WEIGHTS} {_OTHERS}"


class CosineSimilarityOptions(DistillationOptions):
    """The options of :class:`LigerFusedLinearCosineSimilarityLoss`."""

    beta: NonNegativeFloat = field(default=0.5, kw_only=False)

    @property
    def factor(self) -> float:  # type: ignore[override]
        return self.beta

    def of_options(self) -> Divergence:
        return Divergence.cosine()


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """Distillation with the cosine distance of the logits: ``beta (1 - cos(student's logits, teacher's logits))``.

    Args:
        beta: factor of the distance, at least 0.
        weight_hard_loss, weight_soft_loss: weights of the cross-entropy and of the divergence, at least 0.
        temperature: divides the logits of both models in the divergence (> 0).
        top_k, top_k_of, tail, entry_limit, temperature_squared, return_soft_hard_loss, compiled, options: as in
            :class:`DistillationLoss`.
    """

    @constructor(CosineSimilarityOptions)
    def __init__(self) -> None: ...

    positions = f"{_WEIGHTS} beta {_OTHERS}"


# --- MiniLLM: policy gradients of completions that the student wrote. B completions, T tokens -------------------------


class MiniLLMOptions(LossOptions):
    """The options of :class:`LigerFusedLinearMiniLLMLoss`."""

    reads_order = "MiniLLM's sum of later tokens' rewards"

    gamma: UnitFloat = field(default=1.0, kw_only=False)
    length_normalization: bool = field(default=True, kw_only=False)
    single_step: bool = field(default=True, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != 1.0:
            raise ValueError(
                "MiniLLM computes rewards under the distribution that generated the completions: temperature "
                f"must be 1, got {self.temperature!r}."
            )


class LigerFusedLinearMiniLLMLoss(ChunkedLoss):
    """MiniLLM: the gradient of the reverse KL over whole completions that the student generated, token by token.

    With ``r_t = log q(y_t) - log p(y_t)``, per token and averaged over all of them::

        KL(p_t || q_t) - w_t R_t log p(y_t),    R_t = sum_{u > t} gamma^(u - t - 1) r_u  (/ number of those tokens)

    The first term is exact over the vocabulary (the paper's single-step part, eq. 4). The second term is a policy
    gradient, whose advantage is the return of later tokens (eq. 3 and 5). ``w`` is the importance ratio of completions
    that an older policy, or a mixture with the teacher, generated. Gu et al. 2024, arXiv:2306.08543, section 2.2.

    Args:
        gamma: discount of later tokens, in [0, 1].
        length_normalization: divide by the number of later tokens; otherwise short completions are preferred.
        single_step: whether to include the first term.
        options: as in :class:`liger_losses.ChunkedLoss`; the temperature must be 1.
    """

    forms = DistillationLoss.forms

    @constructor(MiniLLMOptions)
    def __init__(self) -> None: ...

    positions = "gamma length_normalization single_step"

    @operator
    def forward(  # type: ignore[override]
        self,
        head: AnyHead,
        hidden_states: Tensor,
        labels: Tensor,
        teacher: Teacher,
        bias: Tensor | None = None,
        *,
        old_logps: Tensor | None = None,
    ) -> tuple[Tensor, DistillationMetrics]:
        """The loss of completions ``[B, T]``; arguments as in :meth:`DistillationLoss.forward`'s first form.

        Args:
            old_logps: ``[B, T]``, log-probabilities under the policy that generated the completions, at the position of
                the hidden state (after any shift); by default the student.

        Returns:
            The loss, and metrics: the mean exact divergence and the mean negative log-probability.

        Raises:
            TypeError, ValueError: inputs that do not fit together, or an object that is not a teacher.
        """
        labels = self.labels(labels)
        if labels.dim() != 2:
            raise ValueError(
                f"MiniLLM sums rewards over each completion: labels must be [B, T], got {tuple(labels.shape)}."
            )
        if not isinstance(teacher, Teacher):
            raise TypeError(f"MiniLLM takes a Teacher(hidden_states, weight), got {type(teacher).__name__}.")
        student = Head.of(head, bias, self.transform)
        teacher.check(labels.shape, student)
        if old_logps is not None:
            checks.check_shaped("old_logps", old_logps, "label", labels.device, labels.shape)
        mask = labels != self.ignore_index
        with torch.no_grad():
            models = ((hidden_states, student), (teacher.hidden_states, teacher.head))
            targets = [target_of(states, model, labels) for states, model in models]
            logps, taught = [values["logp"] for values in statistics(targets, ("logp",), self.options)]
            rewards = torch.where(mask, taught - logps, 0.0)
            later = minillm_returns(rewards, mask, self.gamma, self.length_normalization)
            if old_logps is not None:
                later = later * torch.where(mask, logps - old_logps, 0.0).clamp(max=MAX_EXPONENT).exp()
            per_token = mask.to(logps.dtype) / mask.sum().clamp(min=1)
        weights = {"divergence": per_token * float(self.single_step), "logp": -per_token * later}
        loss, values = linear_divergence_loss(
            hidden_states, student, labels, teacher, Divergence.reverse_kl(), weights, options=self.options
        )
        means = ((per_token * values.divergence).sum(), -(per_token * values.logp).sum())
        return loss, DistillationMetrics(*means)
