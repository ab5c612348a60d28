"""Statistics of a user's own: sums over the vocabulary of a function of the log-probabilities.

R tokens, V columns, m statistics. With ``S = sum_v t(log p_v)``, the gradient with respect to the logits is
``dS / dz_v = t'(log p_v) - p_v sum_u t'(log p_u)``, where t' comes from autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_losses.chunked.engine.ranks import Ranks
from liger_losses.kernels.softmax_stats import STATISTICS

#: The terms t of what :func:`register_statistic` was given, by name.
REGISTERED: dict[str, Callable[[Tensor], Tensor]] = {}


def register_statistic(name: str, term: Callable[[Tensor], Tensor]) -> None:
    """Make ``sum_v term(log p_v)`` a statistic that losses may read, differentiable by hidden states, weight and bias.

    It is computed by PyTorch from blocks of fp32 logits, on every device.

    Args:
        name: a name that no other statistic has.
        term: ``log_p [R, V] -> [R, V]``, elementwise and differentiable; ``log_p`` is at least -10,000.

    Raises:
        TypeError, ValueError: a name that is taken; terms of another shape, that are not finite, whose derivative is
            not, or that are not elementwise.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"the name of a new statistic must be an identifier, got {name!r}.")
    if name in REGISTERED or name in (*STATISTICS, "selected_logps", "divergence", "columns", "rest", "registered"):
        raise ValueError(f"there is a statistic {name!r} already; take another name.")
    g = torch.Generator().manual_seed(0)
    log_p = torch.randn(3, 7, generator=g, dtype=torch.float64).log_softmax(-1)
    log_p[0, 0] = -1e4
    found, derivative = _term_and_derivative(term, log_p)
    if not isinstance(found, Tensor) or found.shape != log_p.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"the term of {name!r} must return one value per entry, {tuple(log_p.shape)}, got {got}.")
    if not (found.isfinite().all() and derivative.isfinite().all()):
        raise ValueError(f"the term of {name!r}, or its derivative, is not finite for log-probabilities down to -1e4.")
    if not torch.allclose(term(log_p[1:, 2:]), found[1:, 2:]):
        raise ValueError(f"the term of {name!r} must be elementwise: an entry's value depends on other entries.")
    REGISTERED[name] = term


def _term_and_derivative(term: Callable[[Tensor], Tensor], log_p: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = log_p.detach().requires_grad_()
        found = term(leaf)
        if not isinstance(found, Tensor) or not found.requires_grad:
            return found, torch.zeros_like(log_p)
        (derivative,) = torch.autograd.grad(found.sum(), leaf)
    return found.detach(), derivative


def registered_values(names: Sequence[str], log_p: Tensor, ranks: Ranks) -> Tensor:
    """The statistics ``[R, m]`` of log-probabilities ``[R, V]``."""
    return ranks.sum_(torch.stack([REGISTERED[name](log_p).sum(1) for name in names], 1))


def registered_gradient(names: Sequence[str], log_p: Tensor, upstream: Tensor, ranks: Ranks) -> Tensor:
    """d loss / d logits ``[R, V]`` from d loss / d statistics ``[R, m]``."""
    derivative = torch.zeros_like(log_p)
    for name, g in zip(names, upstream.unbind(1), strict=True):
        derivative += g[:, None] * _term_and_derivative(REGISTERED[name], log_p)[1]
    total = ranks.sum_(derivative.sum(1))
    return derivative.addcmul_(log_p.exp(), total[:, None], value=-1.0)
