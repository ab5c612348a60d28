"""What policy losses compute without options: ratios, estimates of KL divergences, sums of later tokens, divisors.

B completions, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.losses.completion_loss import MAX_EXPONENT


def ratio_of(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, finite in fp32."""
    return log_ratio.clamp(max=MAX_EXPONENT).exp()


def discounted_sums(values: Tensor, discount: float) -> Tensor:
    """``sum_(u >= t) g^(u - t) v_u`` of values ``[B, T]`` with the discount ``g``, in their shape."""
    length = 1
    while length < values.shape[1]:  # sums of 1, 2, 4 ... terms, each of two of half the length
        later = torch.zeros_like(values)
        later[:, :-length] = values[:, length:]
        values, length = values + discount**length * later, 2 * length
    return values


def k3(log_ratio: Tensor) -> Tensor:
    """``exp(d) - d - 1`` of ``d = log p_ref - log p``, any shape: an estimate of KL(p || p_ref) from samples of p.

    It is unbiased and never negative (joschu.net/blog/kl-approx.html).
    """
    d = log_ratio.clamp(max=MAX_EXPONENT)
    return torch.expm1(d) - d


#: Estimates of KL(p || p_ref) from ``d = log p_ref - log p`` of samples of p (joschu.net/blog/kl-approx.html). A name
#: with ``+`` has the value of its estimate and the gradient of k2, whose mean is the gradient of the divergence.
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": k3,
    "abs": lambda d: d.abs(),
    "k1+": lambda d: d.square() / 2 - (d.square() / 2 + d).detach(),
    "k3+": lambda d: d.square() / 2 + (k3(d) - d.square() / 2).detach(),
}


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``p log(p / q) + (1 - p) log((1 - p) / (1 - q))``, of a token and all others together."""
    p = log_p.exp()
    rest_p, rest_q = (-torch.expm1(x.clamp(max=0.0)) for x in (log_p, log_q))
    others = rest_p * (rest_p / rest_q.clamp(min=torch.finfo(p.dtype).tiny)).log()
    return p * (log_p - log_q) + torch.where(rest_p > 0, others, 0.0)


class Sizes(NamedTuple):
    """What tokens may be divided by."""

    mask: Tensor  # [B, T] fp32
    lengths: Tensor  # [B, 1], at least 1
    limit: int | None  # of tokens in a completion
    items: Tensor  # tokens of all completions, over all processes for the losses that say so
    of_prompt: Tensor | None = None  # [B, 1], tokens of the completion's prompt
    prompts: Tensor | None = None  # their number


#: What tokens are divided by: :class:`Sizes` to weights ``[B, T]``.
NORMALIZERS: dict[str, Callable[[Sizes], Tensor]] = {
    "sequence_mean": lambda s: s.mask / s.lengths / max(len(s.mask), 1),
    "sequence_sum": lambda s: s.mask / max(len(s.mask), 1),
    "token_mean": lambda s: s.mask / s.items.clamp(min=1),
    "limit": lambda s: s.mask / (max(len(s.mask), 1) * (s.limit or 1)),
    "items": lambda s: s.mask / s.items,
    # the mean over a prompt's tokens, then over prompts: ScaleRL (arXiv:2510.13786)
    "prompt_mean": lambda s: s.mask / (s.of_prompt * s.prompts).clamp(min=1),  # type: ignore[operator]
}
