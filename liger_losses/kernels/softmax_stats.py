"""Statistics of every row of a block of logits.

R rows (tokens), V columns (vocabulary).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: What a loss may ask for. All but ``argmax`` can be differentiated.
STATISTICS = ("logp", "entropy", "lse", "mean_logp", "log_sum_sq_probs", "mean_logit", "argmax")


def softmax_statistics(
    logits: Tensor, labels: Tensor, names: frozenset[str], class_weight: Tensor | None = None
) -> dict[str, Tensor]:
    """Reduce each row of logits to the named statistics of its softmax ``p``.

    ==================  ===========================================================
    ``lse``             ``log sum_v exp(z_v)`` (always returned)
    ``logp``            ``z_label - lse``
    ``entropy``         ``- sum_v p_v log p_v``, in nats
    ``mean_logp``       ``1/V sum_v c_v log p_v`` with ``c = class_weight``, or 1
    ``log_sum_sq_probs``  ``log sum_v p_v^2``
    ``mean_logit``      ``1/V sum_v z_v``
    ``argmax``          the first index of the largest logit
    ==================  ===========================================================

    Args:
        logits: ``[R, V]``, fp32 or fp64.
        labels: ``[R]`` int64 in ``[0, V)``.
        names: which of :data:`STATISTICS` to compute.
        class_weight: ``[V]``, the ``c`` of ``mean_logp``.

    Returns:
        One tensor ``[R]`` per name, in the logits' dtype (``argmax``: int64).
    """
    values: dict[str, Tensor] = {}
    if "argmax" in names:
        top, values["argmax"] = logits.max(-1)
    else:
        top = logits.amax(-1)
    shifted = logits - top[:, None]
    label_shifted = shifted.gather(-1, labels[:, None]).squeeze(-1)
    if "mean_logit" in names or "mean_logp" in names:
        mean_shifted = shifted.mean(-1)
    if "mean_logit" in names:
        values["mean_logit"] = mean_shifted + top
    if "mean_logp" in names and class_weight is not None:
        weighted_shifted = (shifted @ class_weight) / logits.shape[-1]

    exp = shifted.exp_()
    total = exp.sum(-1)
    log_total = total.log()
    values["lse"] = top + log_total
    # Subtracting the row's maximum first keeps log-probs near 0 exact however large the logits are.
    values["logp"] = label_shifted - log_total
    if "mean_logp" in names:
        if class_weight is None:
            values["mean_logp"] = mean_shifted - log_total
        else:
            values["mean_logp"] = weighted_shifted - log_total * class_weight.mean()
    if "log_sum_sq_probs" in names:
        values["log_sum_sq_probs"] = (exp * exp).sum(-1).log() - 2 * log_total
    if "entropy" in names:
        values["entropy"] = torch.special.entr(exp.div_(total[:, None])).sum(-1)
    return {name: value for name, value in values.items() if name in names or name == "lse"}
