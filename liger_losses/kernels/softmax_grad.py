"""The gradient of any mix of softmax statistics, in closed form.

R rows (tokens), C columns (a slice of the vocabulary, or all of it), V the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class SoftmaxGradient:
    """Coefficients of one row's gradient with respect to its logits, each ``[R]`` or ``None`` for 0.

    ``d loss / d z = p * (p_coef + p_logp_coef log p + p_squared_coef p) + label_coef onehot(label)
    + uniform_coef / V + class_coef c / V``

    Every statistic is a row of this table (g is the loss's gradient with respect to the statistic):

    ====================  =========  ============  ===============  ==========  ============  ==========
    statistic             p_coef     p_logp_coef   p_squared_coef   label_coef  uniform_coef  class_coef
    ====================  =========  ============  ===============  ==========  ============  ==========
    ``logp``              -g                                        g
    ``entropy``           -g H       -g
    ``lse``               g
    ``mean_logp``         -g                                                    g
    ``mean_logp`` with c  -g mean c                                                           g
    ``log_sum_sq_probs``  -2 g                     2 g / sum p^2
    ``mean_logit``                                                              g
    ====================  =========  ============  ===============  ==========  ============  ==========
    """

    p_coef: Tensor | None = None
    p_logp_coef: Tensor | None = None
    p_squared_coef: Tensor | None = None
    label_coef: Tensor | None = None
    uniform_coef: Tensor | None = None
    class_coef: Tensor | None = None

    @classmethod
    def of(
        cls, upstream: dict[str, Tensor], values: dict[str, Tensor], class_weight: Tensor | None = None
    ) -> SoftmaxGradient:
        """Add up the table's rows for ``upstream``: d loss / d statistic, each ``[R]``, by name."""
        total: dict[str, Tensor] = {}
        for statistic, g in upstream.items():
            for coefficient, value in _CLOSED_FORMS[statistic](g, values, class_weight).items():
                total[coefficient] = total[coefficient] + value if coefficient in total else value
        return cls(**total)

    def rows(self, start: int, stop: int) -> SoftmaxGradient:
        """The coefficients of rows ``start`` to ``stop``."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return SoftmaxGradient(**{k: v[start:stop] if v is not None else None for k, v in named.items()})


def _mean_logp_coefficients(g: Tensor, values: dict[str, Tensor], class_weight: Tensor | None) -> dict[str, Tensor]:
    if class_weight is None:
        return {"p_coef": -g, "uniform_coef": g}
    return {"p_coef": -g * class_weight.mean(), "class_coef": g}


_CLOSED_FORMS: dict[str, Callable[[Tensor, dict[str, Tensor], Tensor | None], dict[str, Tensor]]] = {
    "logp": lambda g, values, c: {"p_coef": -g, "label_coef": g},
    "entropy": lambda g, values, c: {"p_coef": -g * values["entropy"], "p_logp_coef": -g},
    "lse": lambda g, values, c: {"p_coef": g},
    "mean_logp": _mean_logp_coefficients,
    "log_sum_sq_probs": lambda g, values, c: {
        "p_coef": -2 * g,
        "p_squared_coef": 2 * g * torch.exp(-values["log_sum_sq_probs"]),
    },
    "mean_logit": lambda g, values, c: {"uniform_coef": g},
}


def softmax_gradient(
    logits: Tensor,
    lse: Tensor,
    labels: Tensor,
    coefficients: SoftmaxGradient,
    *,
    first_column: int = 0,
    vocab_size: int | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    """Gradient of the loss with respect to a slice of logits; see :class:`SoftmaxGradient`.

    Args:
        logits: ``[R, C]``, fp32 or fp64: columns ``first_column`` to ``first_column + C``.
        lse: ``[R]``, log-sum-exp over the whole vocabulary.
        labels: ``[R]`` int64, indices into the whole vocabulary.
        coefficients: the row's coefficients.
        first_column: where the slice starts in the vocabulary.
        vocab_size: V; ``C`` when the slice is the whole vocabulary.
        class_weight: ``[C]``, the slice's ``c`` of ``mean_logp``.

    Returns:
        ``[R, C]`` in the logits' dtype, a new tensor.
    """
    width = logits.shape[1]
    vocab_size = vocab_size or width
    c = coefficients
    log_p = logits - lse[:, None]
    if c.p_logp_coef is None and c.p_squared_coef is None:
        grad = log_p.exp_()
        grad = grad.zero_() if c.p_coef is None else grad.mul_(c.p_coef[:, None])
    else:
        p = log_p.exp()
        grad = torch.zeros_like(p)
        if c.p_coef is not None:
            grad.add_(c.p_coef[:, None])
        if c.p_logp_coef is not None:
            # A probability of 0 has log p = -inf, and 0 * -inf is not 0 in floating point.
            grad.add_(log_p.clamp_(min=-1e4).mul_(c.p_logp_coef[:, None]))
        if c.p_squared_coef is not None:
            grad.addcmul_(p, c.p_squared_coef[:, None])
        grad.mul_(p)
    if c.uniform_coef is not None:
        grad.add_(c.uniform_coef[:, None], alpha=1.0 / vocab_size)
    if c.class_coef is not None:
        assert class_weight is not None
        grad.addcmul_(c.class_coef[:, None], class_weight[None, :], value=1.0 / vocab_size)
    if c.label_coef is not None:
        column = labels - first_column
        inside = (column >= 0) & (column < width)
        column = column.clamp(0, width - 1)[:, None]
        # Gather, add, scatter: one write per row, so the result never depends on the order of threads.
        at_label = grad.gather(1, column) + torch.where(inside, c.label_coef, 0.0)[:, None]
        grad.scatter_(1, column, at_label)
    return grad
