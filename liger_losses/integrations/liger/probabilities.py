"""liger-kernel's divergences of probabilities and log-probabilities. N tokens, V vocabulary size.

As in liger-kernel, the second distribution is a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.chunked.losses.softmax_divergences import jsd


def mean_jsd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    *_unused: Any,
) -> Tensor:
    """``liger_jsd``: the mean of the generalized JSD over the active tokens, as liger-kernel defines it.

    ``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q``, teacher p and student q; for beta 0
    and 1 ``KL(p || q)`` and ``KL(q || p)``, where the inputs need not sum to 1.

    Args:
        input, target: ``[N, V]``, log-softmax of student and teacher.
        shift_labels: ``[N]``; only which are ``ignore_index`` matters. Without them, all tokens are active.
    """
    log_q, log_p = (values.float().clamp(min=-10_000.0) for values in (input, target.detach()))  # a probability of 0
    if beta in (0.0, 1.0):
        log_a, log_b = (log_p, log_q) if beta == 0.0 else (log_q, log_p)
        values = (log_a.exp() * (log_a - log_b)).sum(-1)
    else:
        values = jsd(log_q, log_p, beta=beta)
    if shift_labels is None:
        return values.mean().to(input.dtype)
    active = shift_labels != ignore_index
    return (torch.where(active, values, 0.0).sum() / active.sum().clamp(min=1)).to(input.dtype)


class LigerJSD(nn.Module):
    """:func:`mean_jsd` as a module."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return mean_jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)


def kl_div(
    input: Tensor, target: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    """``LigerKLDivLossFunction.apply``: :func:`torch.nn.functional.kl_div`, which needs no ``eps``.

    Args:
        input: ``[N, V]``, log-probabilities.
        target: ``[N, V]``, probabilities, or their logarithms with ``log_target``.
    """
    return nn.functional.kl_div(input.float(), target.detach().float(), reduction=reduction, log_target=log_target)


def functional_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """``liger_kl_div``: :func:`kl_div` by torch's arguments; ``size_average`` and ``reduce`` have no effect."""
    return kl_div(input, target, reduction, log_target)


class LigerKLDIVLoss(nn.KLDivLoss):
    """:class:`torch.nn.KLDivLoss` with liger-kernel's ``eps`` first, which has no effect."""

    def __init__(self, eps: float = 1e-10, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return kl_div(y_pred, y_true, self.reduction, self.log_target)


def total_variation(
    p: Tensor,
    q: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
) -> Tensor:
    """``LigerTVDLossFunction.apply``: ``1/2 sum |p - q|``.

    Args:
        p, q: ``[N, V]``, probabilities.
        shift_labels: as in :func:`mean_jsd`.
        reduction: ``batchmean`` (over the active tokens), ``mean`` (over their entries), ``sum`` or ``none``, which
            returns ``[N, V]``.
    """
    terms, count = 0.5 * (p.float() - q.detach().float()).abs(), torch.tensor(len(p), device=p.device)
    if shift_labels is not None:
        active = shift_labels != ignore_index
        terms, count = terms * active[:, None], active.sum().clamp(min=1)
    if reduction == "none":
        return terms
    divisors: dict[str, Any] = {"batchmean": count, "mean": count * p.shape[1], "sum": 1}
    return terms.sum() / divisors[reduction]


def functional_tvd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """``liger_tvd``: :func:`total_variation`, with another reduction by default."""
    return total_variation(input, target, shift_labels, reduction, ignore_index)


class LigerTVDLoss(nn.Module):
    """:func:`total_variation` as a module."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return total_variation(p, q, shift_labels, self.reduction, self.ignore_index)
