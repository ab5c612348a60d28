"""Divergences between student and teacher as pure functions of log-probabilities, over the last dimension.

p is the student's distribution, q the teacher's, C the number of columns. ``log_p`` must come from a log-softmax: the
gradient leaves out what its backward removes anyway. It keeps its digits where p and q are close.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.divergence_forms import Divergence, terms

#: Both forms of the generalized JSD that are in use: the factors of KL(q || m) and KL(p || m).
JSD_CONVENTIONS = {
    "gkd": lambda beta: (beta, 1 - beta),
    "interpolated": lambda beta: (1 - beta, beta),
}


def generalized_jsd(beta: float = 0.5, convention: str = "gkd") -> Divergence:
    """The :class:`liger_losses.Divergence` that :func:`jsd` computes."""
    if beta in (0, 1):
        return Divergence.reverse_kl() if beta == 1 else Divergence.forward_kl()
    return Divergence.mixture(beta, *JSD_CONVENTIONS[convention](beta))


def divergence(log_p: Tensor, log_q: Tensor, which: Divergence) -> Tensor:
    """Any :class:`liger_losses.Divergence` but the cosine, from log-probabilities.

    Args:
        log_p: ``[..., C]``, the student's log-softmax, differentiable (once).
        log_q: ``[..., C]``, the teacher's, a constant.
        which: ``Divergence.reverse_kl()``, for example.

    Returns:
        ``[...]``.
    """
    if which.form == "cosine":
        raise ValueError("the cosine needs all logits of the teacher; here are log-probabilities.")
    # -inf is clamped to a finite number whose exponential is 0.
    return _Sum.apply(log_p.clamp(min=-1e4), log_q.clamp(min=-1e4), which)


class _Sum(torch.autograd.Function):
    """The sum of a divergence's terms, with the derivatives of :func:`terms`, which do not cancel."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, which: Divergence) -> Tensor:
        f, h = terms(which, log_p, log_q)
        ctx.save_for_backward(h)
        return f.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (h,) = ctx.saved_tensors
        return h * g[..., None], None, None


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(q || p) = sum q (log q - log p)``; arguments as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.forward_kl())


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(p || q) = sum p (log p - log q)``; arguments as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.reverse_kl())


def jsd(log_p: Tensor, log_q: Tensor, *, beta: float = 0.5, convention: str = "gkd") -> Tensor:
    """``beta KL(q || m) + (1 - beta) KL(p || m)``, ``m = beta q + (1 - beta) p`` (GKD, arXiv:2306.13649, eq. 1).

    ``convention="interpolated"`` exchanges the factors of the two terms; ``beta`` 0 and 1 are ``KL(q || p)`` and
    ``KL(p || q)``. Arguments as in :func:`divergence`.
    """
    return divergence(log_p, log_q, generalized_jsd(beta, convention))


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``1/2 sum |p - q|`` (arXiv:2307.15190, eq. 5); arguments as in :func:`divergence`."""
    return divergence(log_p, log_q, Divergence.total_variation())


def alpha_beta_divergence(log_p: Tensor, log_q: Tensor, alpha: float, beta: float) -> Tensor:
    """``sum (a/s q^s + b/s p^s - q^a p^b) / (a b)``, ``s = a + b`` (ABKD, arXiv:2505.04560), and its limits.

    Arguments as in :func:`divergence`; ``a`` and ``b`` at least 0, and not both 0.
    """
    return divergence(log_p, log_q, Divergence.alpha_beta(alpha, beta))


def sparse_divergence(logps: Tensor, teacher_logps: Tensor, which: Divergence, tail: str = "bucket") -> Tensor:
    """A divergence over the k columns of a sparse teacher, and the probability outside them.

    Args:
        logps: ``[..., k]``, the student's log-probabilities of these columns, differentiable (once).
        teacher_logps: ``[..., k]``, the teacher's.
        which: see :func:`divergence`.
        tail: ``bucket`` or ``renormalize``; see :class:`liger_losses.TeacherTopK`.

    Returns:
        ``[...]``.
    """
    return divergence(distribution(logps, tail), distribution(teacher_logps, tail), which)


def distribution(logps: Tensor, tail: str) -> Tensor:
    """Log-probabilities that add up to 1, from those of some columns ``[..., k]``: ``[..., k + 1]`` or ``[..., k]``."""
    return logps.log_softmax(-1) if tail == "renormalize" else torch.cat([logps, _log_rest(logps)], -1)


def _log_rest(logps: Tensor) -> Tensor:
    """``log(1 - sum exp(logps))`` ``[..., 1]``, clamped where rounding leaves nothing of it."""
    least = torch.finfo(logps.dtype).eps
    total = logps.logsumexp(-1, keepdim=True).clamp(max=-least)
    near_one = total > -math.log(2)
    # Each branch gets arguments at which it and its derivative are finite.
    return torch.where(
        near_one, (-total.clamp(min=-math.log(2)).expm1()).log(), (-total.clamp(max=-math.log(2)).exp()).log1p()
    )
