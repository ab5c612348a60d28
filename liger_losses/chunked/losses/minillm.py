"""MiniLLM: policy-gradient distillation of completions that the student wrote. B completions, T tokens."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from liger_losses.checks import UnitFloat, check_alike, check_range, check_shaped, checked_mask
from liger_losses.chunked import Head, Teacher, linear_divergence_loss
from liger_losses.chunked.core.compiled import statistics
from liger_losses.chunked.core.entry import operator
from liger_losses.chunked.core.inputs import target_of
from liger_losses.chunked.losses.base import AnyHead, ChunkedLoss, LossOptions, constructor
from liger_losses.chunked.losses.completion_loss import MAX_EXPONENT
from liger_losses.chunked.losses.distillation import DistillationLoss, DistillationMetrics
from liger_losses.chunked.losses.policy_estimates import discounted_sums
from liger_losses.kernels.divergence_forms import Divergence


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
            check_shaped("old_logps", old_logps, "label", labels.device, labels.shape)
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


def minillm_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0, length_normalization: bool = True) -> Tensor:
    """``R_t = sum_{u > t} gamma^(u - t - 1) r_u``, 0 for the last token (MiniLLM, arXiv:2306.08543, eq. 5).

    Args:
        rewards, mask: ``[B, T]``: ``log q - log p`` of each token, 0 where the mask (bool) is false.
        gamma: discount.
        length_normalization: whether to divide by the number of later tokens.

    Returns:
        ``[B, T]``, in the dtype of the rewards.
    """
    check_alike(rewards=rewards)
    mask = checked_mask("mask", mask, "rewards", rewards)
    check_range("gamma", gamma, 0.0, 1.0)
    compute = _returns_operator if torch.compiler.is_compiling() else _returns
    return compute(rewards, mask, gamma, length_normalization)


def _returns(rewards: Tensor, mask: Tensor, gamma: float, length_normalization: bool) -> Tensor:
    later = torch.cat([rewards[:, 1:], torch.zeros_like(rewards[:, :1])], 1)
    out = discounted_sums(later, gamma)
    if length_normalization:
        after = mask.flip(1).cumsum(1).flip(1) - mask.long()
        out = out / after.clamp(min=1)
    return out


#: In a graph of torch.compile, how often the loop runs would bind the graph to one number of tokens.
_returns_operator = torch.library.custom_op("liger_losses::minillm_returns", _returns, mutates_args=())


@_returns_operator.register_fake
def _(rewards: Tensor, mask: Tensor, gamma: float, length_normalization: bool) -> Tensor:
    return torch.empty_like(rewards)
