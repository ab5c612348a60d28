"""What is asked of the softmax of a token: names of :data:`STATISTICS`, or instances of :class:`Statistic`.

R rows (tokens), C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.online_softmax import STATISTICS as OF_KERNELS

#: Of log-probabilities ``[R, C]`` (at least -10,000) and the size of the whole vocabulary, terms ``[R, C]``.
Terms = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Statistic:
    """A number for each token: ``S = sum_v phi(log p_v)``.

    With ``psi = d phi / d log p``, ``d S / d z_v = psi_v - p_v sum_u psi_u``. Ranks, blocks, kept columns, two passes
    and zero rows know nothing of it. Without ``psi``, autograd computes it. Without both, it has a row of its own in
    kernels (their names are ``OF_KERNELS``, whose gradients are rows of ``SoftmaxGradient``), or reads single columns.
    A divergence compares with the target's teacher.
    """

    name: str
    phi: Terms | None = None
    psi: Terms | None = None
    divergence: Divergence | None = None
    differentiable: bool = True

    def derivative(self, log_p: Tensor, vocab_size: int) -> Tensor:
        """psi ``[R, C]``."""
        if self.psi is not None:
            return self.psi(log_p, vocab_size)
        assert self.phi is not None
        with torch.enable_grad():
            leaf = log_p.detach().requires_grad_()
            terms = self.phi(leaf, vocab_size)
            if not terms.requires_grad:
                return torch.zeros_like(log_p)
            (derivative,) = torch.autograd.grad(terms.sum(), leaf)
        return derivative


STATISTICS: dict[str, Statistic] = {
    s.name: s
    for s in (
        *(Statistic(name, differentiable=name != "argmax") for name in OF_KERNELS),
        #: Log-probabilities ``[R, k]`` of the target's selected columns, or of its k largest.
        Statistic("selected_logps"),
        #: The ids ``[R, k]`` of the k largest.
        Statistic("columns", differentiable=False),
        #: The log-probability of all columns that are not selected.
        Statistic("rest", differentiable=False),
        #: The entropy at the teacher's temperature, of the columns that both models have.
        Statistic("soft_entropy", differentiable=False),
    )
}
#: Logits ``[R, k]`` of the target's selected columns, on which no other column has an influence.
SELECTED_LOGITS = Statistic("selected_logits")


def registered(names: Iterable[Any]) -> list[str]:
    """Those that users have registered: the rows of the table that have terms."""
    return [name for name in names if isinstance(name, str) and name in STATISTICS and STATISTICS[name].phi is not None]


def asked_for(names: Sequence[str | Statistic], metrics: Sequence[str | Statistic] = ()) -> tuple[Statistic, ...]:
    """The statistics of these names, each once; metrics have no gradient."""
    asked = {s.name: s for s in (STATISTICS[name] if isinstance(name, str) else name for name in names)}
    for name in metrics:
        s = STATISTICS[name] if isinstance(name, str) else name
        asked.setdefault(s.name, replace(s, differentiable=False))
    return tuple(asked.values())
