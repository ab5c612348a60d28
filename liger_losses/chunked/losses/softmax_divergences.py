"""Divergences between two softmaxes as pure functions of log-probabilities.

V columns that both vocabularies have, k columns of a sparse teacher. p is the student's softmax, q the teacher's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import check_alike, check_names
from liger_losses.chunked.core.distilled import EARLIER_TAILS, TAILS
from liger_losses.kernels.autograd import edges, once_differentiable
from liger_losses.kernels.divergence_forms import FORMS, Divergence, finite_logs
from liger_losses.kernels.divergence_terms import summed_terms


def divergence(log_p: Tensor, log_q: Tensor, which: Divergence) -> Tensor:
    """Any :class:`liger_losses.Divergence` except the cosine, ``[...]``, from the log-probabilities of C classes.

    Args:
        log_p: ``[..., C]``, the student's log-softmax, differentiable (once). The gradient is accurate even if p and q
            are close. A probability of 0 (a logarithm of -inf, or below -1e30) is treated as -10,000 nats, in both
            models. The gradient omits a term that the backward of the log-softmax would remove.
        log_q: ``[..., C]``, the teacher's log-softmax, a constant.
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
            "cosine similarity needs logits, got log-probabilities; use LigerFusedLinearCosineSimilarityLoss."
        )
    log_p, log_q = finite_logs(log_p), finite_logs(log_q)
    parameter = which.row_parameter(-(log_q.exp() * log_q).sum(-1)) if which.by_entropy else None
    return _SumOfTerms.apply(log_p, log_q, which, parameter)


class _SumOfTerms(torch.autograd.Function):
    """The sum of a divergence's terms, with the derivatives of :func:`terms`, which do not cancel."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, which: Divergence, parameter: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():  # which cannot trace how a power series is found
            total, h = _summed_operator(log_p, log_q, parameter, which.form, which.a, which.b, which.c)
        else:
            total, h = summed_terms(which, log_p, log_q, parameter)
        ctx.save_for_backward(h, *edges(log_p))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        h, *_ = ctx.saved_tensors
        return h * g[..., None], None, None, None


@torch.library.custom_op("liger_losses::divergence_terms", mutates_args=())
def _summed_operator(
    log_p: Tensor, log_q: Tensor, parameter: Tensor | None, form: str, a: float, b: float, c: float
) -> tuple[Tensor, Tensor]:
    return summed_terms(Divergence(form, a, b, c), log_p, log_q, parameter)


@_summed_operator.register_fake
def _(log_p: Tensor, log_q: Tensor, parameter: Any, form: str, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
    return log_p.new_empty(log_p.shape[:-1]), torch.empty_like(log_p)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(q || p) = sum q (log q - log p)``; arguments and result as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.forward_kl())


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(p || q) = sum p (log p - log q)``; arguments and result as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.reverse_kl())


def jsd(log_p: Tensor, log_q: Tensor, *, beta: float = 0.5, convention: str = "gkd") -> Tensor:
    """The generalized Jensen-Shannon divergence, :meth:`liger_losses.Divergence.jsd`; arguments and result as in
    :func:`divergence`.

    Args:
        beta: share of the teacher in the mixture, in [0, 1].
        convention: ``gkd`` or ``interpolated``.

    Raises:
        TypeError, ValueError: a beta out of its range, or another convention.
    """
    return divergence(log_p, log_q, Divergence.jsd(beta, convention))


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``1/2 sum |p - q|`` (arXiv:2307.15190, eq. 5); arguments and result as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.total_variation())


def alpha_beta_divergence(log_p: Tensor, log_q: Tensor, alpha: float, beta: float) -> Tensor:
    """``sum (a/s q^s + b/s p^s - q^a p^b) / (a b)``, ``s = a + b`` (ABKD, arXiv:2505.04560), and its limits.

    Args:
        log_p, log_q: as in :func:`divergence`, which also describes the result.
        alpha, beta: ``a`` and ``b``, at least 0, and not both 0: (1, 0) is ``KL(q || p)``, (0, 1) is ``KL(p || q)``.

    Raises:
        TypeError, ValueError: alpha or beta out of their range.
    """
    return divergence(log_p, log_q, Divergence.alpha_beta(alpha, beta))


def sparse_divergence(
    logps: Tensor,
    teacher_logps: Tensor,
    which: Divergence,
    tail: str = "bucket",
    teacher_tail_logps: Tensor | None = None,
) -> Tensor:
    """A divergence over k vocabulary entries, the largest of the teacher or the student, and the remaining probability.

    Args:
        logps: ``[..., k]``, the student's log-probabilities of these entries, differentiable (once).
        teacher_logps: ``[..., k]``, the teacher's log-probabilities of these entries.
        which: see :func:`divergence`.
        tail: ``bucket``, ``renormalize`` or ``none``; see :class:`liger_losses.TeacherTopK`. With
            ``none``, each entry adds the term of the formula, such as ``q (log q - log p)``; the sum may be negative.
        teacher_tail_logps: ``[...]``, the teacher's log-probability of all other entries together, for ``bucket``.

    Returns:
        ``[...]``, in nats.
    """
    check_alike(logps=logps, teacher_logps=teacher_logps)
    check_names([tail], TAILS, "tail", EARLIER_TAILS)
    if which.by_entropy and tail == "none":
        raise ValueError("Divergence.kl_by_entropy needs the probability of all columns: leave tail='none' out.")
    terms = divergence(distribution(logps, tail), distribution(teacher_logps, tail, teacher_tail_logps), which)
    added = FORMS[which.form].added(which.a, which.b, which.c) if tail == "none" else 0.0
    return terms if not added else terms - added * (logps.exp() - teacher_logps.exp()).sum(-1)


def distribution(logps: Tensor, tail: str, tail_logps: Tensor | None = None) -> Tensor:
    """Log-probabilities that add up to 1, from the log-probabilities of some columns ``[..., k]``: ``[..., k + 1]`` or
    ``[..., k]``; unchanged with the tail ``none``."""
    if tail == "renormalize":
        return logps.log_softmax(-1)
    if tail == "none":
        return logps
    rest = log_rest(logps) if tail_logps is None else tail_logps[..., None].to(logps.dtype)
    return torch.cat([logps, rest], -1)


def log_rest(logps: Tensor) -> Tensor:
    """``log(1 - sum exp(logps))``, ``[..., 1]``: of all other columns, clamped where rounding leaves nothing."""
    return (1 - logps.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logps.dtype).eps).log()
