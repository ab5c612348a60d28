"""Score centering (arXiv:2609.20807) by the names of liger-kernel after 0.8.5.

B completions of T tokens, H hidden size, V vocabulary size, k columns of the sampler, n tokens of a block.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_losses.checks import check_names, check_shaped, check_tensor, checked_items
from liger_losses.chunked import Head, linear_token_loss
from liger_losses.chunked.losses.sums import sum_over_processes, world_size
from liger_losses.kernels.logit_transform import LogitTransform

#: The largest ratio of negative advantages with ``sign="ppo"`` (arXiv:1912.09729).
_DUAL_CLIP = math.log(3.0)


class ISCorrection(NamedTuple):
    """The weight of a ratio to the sampler: itself within ``[low, high]``, else the nearest bound or 0.

    Args:
        low, high: the band.
        outside: ``clamp`` for the nearest bound, ``drop`` for 0.
        sign: ``ppo`` for a band ``[0, high]`` of advantages of at least 0, and ``[low, 3]`` of others; or ``both``.
    """

    low: float = 0.0
    high: float = math.inf
    outside: str = "drop"
    sign: str = "both"


def _mass(c: Any, log_p: Tensor, log_q: Tensor, positive: Tensor) -> Tensor:
    """``q w(p / q)`` with the weights of a correction, or of none."""
    if c is None:
        return log_q.exp().expand_as(log_p)
    low, high = log_q + (math.log(c.low) if c.low > 0 else -math.inf), log_q + math.log(c.high)
    inside = (log_p >= low) & (log_p <= high)
    if c.sign == "ppo":
        inside = torch.where(positive, log_p <= high, (log_p >= low) & (log_p <= log_q + _DUAL_CLIP))
    outside = log_p.clamp(low, high).exp() if c.outside == "clamp" else 0.0
    return torch.where(inside, log_p.exp(), outside)


def _weight(c: Any, logps: Tensor, q: Tensor, positive: Tensor) -> Tensor:
    """The weight of the sampled tokens' ratios ``[...]``."""
    ratio = (logps - q).clamp(-20.0, 20.0)
    return _mass(c, ratio, torch.zeros_like(ratio), positive)


def _rest(top_p: Tensor, top_q: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sampler's probability of all other columns ``[...]``, and what the policy's is multiplied by in them."""
    rest = 1 - top_q.exp().sum(-1)
    return rest, rest.clamp(min=0.0) / (1 - top_p.exp().sum(-1)).clamp(min=eps)


def _token_loss(
    s: Any, labels: Tensor, a: Tensor, q: Tensor, top_q: Tensor, *, c: Any, eps: float, centers: bool
) -> Tensor:
    """The losses ``[n]``."""
    positive, top_p = a >= 0, s.selected_logps.detach()
    score = _weight(c, s.logp.detach(), q, positive) * s.logp
    if centers:  # all other columns are a multiple of the policy's: their sum has no gradient
        _, ratio = _rest(top_p, top_q, eps)
        share = _mass(c, torch.zeros_like(ratio), ratio.log(), positive)
        residual = _mass(c, top_p, top_q, positive[:, None]) - share[:, None] * top_p.exp()
        score = score - (residual * s.selected_logps).sum(-1) + share * s.entropy
    return -a * score


def fused_linear_score_centering(
    _input: Tensor,
    weight: Any,
    selected_token_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    sampler_token_logps: Tensor,
    sampler_topk_ids: Tensor,
    sampler_topk_logps: Tensor,
    bias: Tensor | None = None,
    score_center: bool = True,
    correction: Any = None,
    temperature: float = 1.0,
    eps: float = 1e-6,
    num_items_in_batch: Any = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of ``-A (w log p - sum_v q_v w_v log p_v)`` over the number of tokens, of which each process has an equal
    share; and means over its tokens. Outside of the k columns, the sampler q is a multiple of p.

    Args:
        _input, weight, bias: ``[B, T, H]``, ``[V, H]``, ``[V]``.
        selected_token_ids, attention_mask: ``[B, T]``, the tokens, and which of them count.
        advantages: ``[B]`` or ``[B, T]``.
        sampler_token_logps, sampler_topk_ids, sampler_topk_logps: ``[B, T]`` and ``[B, T, k]``.
        score_center: subtract the sum over v.
        correction: an :class:`ISCorrection` that has the weights w, constants; 1 by default.
        temperature: divides the logits.
        eps: the least probability of p outside of the columns.
        num_items_in_batch: the number of tokens over all processes and accumulated batches.
        chunk_size: no effect.
    """
    if correction is not None:
        check_names([correction.outside], ("clamp", "drop"), "outside")
        check_names([correction.sign], ("both", "ppo"), "sign")
    for name, ids in (("selected_token_ids", selected_token_ids), ("sampler_topk_ids", sampler_topk_ids)):
        check_tensor(name, ids, (torch.int64, torch.int32))
    tokens, top = selected_token_ids.shape, sampler_topk_ids.shape
    check_shaped("attention_mask", attention_mask, "token", _input.device, tokens)
    check_shaped("advantages", advantages, "sequence or token", _input.device, tokens[:1], tokens)
    check_shaped("sampler_token_logps", sampler_token_logps, "token", _input.device, tokens)
    check_shaped("sampler_topk_logps", sampler_topk_logps, "column of sampler_topk_ids", _input.device, top)
    mask = attention_mask.bool()
    a = torch.where(mask, advantages[:, None] if advantages.dim() == 1 else advantages, 0.0)
    q, top_q = torch.where(mask, sampler_token_logps, 0.0), torch.where(mask[..., None], sampler_topk_logps, -math.inf)
    loss, s = linear_token_loss(
        _input,
        Head.of(weight, bias, LogitTransform(temperature)),
        torch.where(mask, selected_token_ids.long(), -100),
        functools.partial(_token_loss, c=correction, eps=eps, centers=score_center),
        ("logp", "selected_logps"),
        metrics="entropy",
        token_inputs={"a": a, "q": q, "top_q": top_q},
        selected=torch.where(mask[..., None], sampler_topk_ids.long(), 0),
    )
    rest, ratio = _rest(s.selected_logps, top_q, eps)
    kl = torch.where(top_q > -math.inf, top_q.exp() * (top_q - s.selected_logps), 0.0).sum(-1)
    kl = kl + rest * ratio.clamp(1e-9).log()
    per_token = {"entropy": s.entropy, "kl_head": kl, "frac_masked": _weight(correction, s.logp, q, a >= 0) == 0}
    count, known = mask.sum().float(), num_items_in_batch is not None
    items = checked_items(num_items_in_batch, mask.device) if known else sum_over_processes(count)
    means = {name: torch.where(mask, x, 0).sum() / count.clamp(min=1) for name, x in per_token.items()}
    return loss / (items.clamp(min=1) / world_size()), means


class LigerFusedLinearScoreCenteringLoss(nn.Module):
    """:func:`fused_linear_score_centering`, whose options are the constructor's."""

    def __init__(
        self,
        score_center: bool = True,
        correction: Any = None,
        temperature: float = 1.0,
        eps: float = 1e-6,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self.options = {"score_center": score_center, "correction": correction, "temperature": temperature, "eps": eps}

    def forward(self, *tensors: Any, **named: Any) -> Any:
        """The function's tensors and ``num_items_in_batch``, by position or by name; the weight is ``lin_weight``."""
        named = {name.removeprefix("lin_"): value for name, value in named.items()}
        named |= dict(zip(["num_items_in_batch"], tensors[9:], strict=False))
        function: Any = fused_linear_score_centering
        return function(*tensors[:9], **named, **self.options)
