"""Score centering (arXiv:2609.20807) by the names of liger-kernel after 0.8.5.

B completions of T tokens, H hidden size, V vocabulary size, k columns of the sampler, n tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_losses.checks import check_names, check_shaped, checked_items
from liger_losses.chunked import EngineOptions, Head
from liger_losses.chunked.core.compiled import loss_sum
from liger_losses.chunked.core.inputs import target_of
from liger_losses.chunked.core.target import TokenLoss
from liger_losses.chunked.losses.batches import sum_over_processes, world_size
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


def _token_loss(
    values: Mapping[str, Tensor], a: Tensor, q: Tensor, top_q: Tensor, c: Any, eps: float, centers: bool
) -> tuple[Tensor, None, dict[str, Tensor]]:
    """The losses ``[n]``, the divergence of the columns, and where the weight is 0."""
    logp, top_logps, positive = values["logp"], values["selected_logps"], a >= 0
    top_p, ratio = top_logps.detach(), (logp.detach() - q).clamp(-20.0, 20.0)
    weight, q_rest = _mass(c, ratio, torch.zeros_like(ratio), positive), 1 - top_q.exp().sum(-1)
    rest = q_rest.clamp(min=0.0) / (1 - top_p.exp().sum(-1)).clamp(min=eps)
    score = weight * logp
    if centers:  # all other columns are a multiple of the policy's: their sum has no gradient
        share = _mass(c, torch.zeros_like(rest), rest.log(), positive)
        residual = _mass(c, top_p, top_q, positive[:, None]) - share[:, None] * top_p.exp()
        score = score - (residual * top_logps).sum(-1) + share * values["entropy"].detach()
    kl = torch.where(top_q > -math.inf, top_q.exp() * (top_q - top_p), 0.0).sum(-1) + q_rest * rest.clamp(1e-9).log()
    return -a * score, None, {"kl_head": kl, "frac_masked": (weight == 0).to(kl.dtype)}


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
    tokens, top = selected_token_ids.shape, sampler_topk_ids.shape
    check_shaped("attention_mask", attention_mask, "token", _input.device, tokens)
    check_shaped("advantages", advantages, "sequence or token", _input.device, tokens[:1], tokens)
    check_shaped("sampler_token_logps", sampler_token_logps, "token", _input.device, tokens)
    check_shaped("sampler_topk_logps", sampler_topk_logps, "column of sampler_topk_ids", _input.device, top)
    mask = attention_mask.bool()
    a = torch.where(mask, advantages[:, None] if advantages.dim() == 1 else advantages, 0.0)
    inputs = {"a": a, "q": sampler_token_logps, "top_q": sampler_topk_logps}
    labels = torch.where(mask, selected_token_ids.long(), -100)
    columns = torch.where(mask[..., None], sampler_topk_ids.long(), 0)
    target = target_of(_input, Head.of(weight, bias, LogitTransform(temperature)), labels, selected=columns)
    numbers = {"c": correction, "eps": eps, "centers": score_center}
    loss = TokenLoss(_token_loss, inputs, numbers)
    total, (values,) = loss_sum([target], ("logp", "selected_logps"), [loss], EngineOptions(), ("entropy",))
    own, known = mask.sum().float(), num_items_in_batch is not None
    items = checked_items(num_items_in_batch, mask.device) if known else sum_over_processes(own)
    means = {name: values[name].sum() / own.clamp(min=1) for name in ("entropy", "kl_head", "frac_masked")}
    return total / (items.clamp(min=1) / world_size()), means


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
        options = (score_center, correction, temperature, eps)
        self.options = dict(zip(("score_center", "correction", "temperature", "eps"), options, strict=True))

    def forward(self, *tensors: Any, **named: Any) -> Any:
        """The function's tensors and ``num_items_in_batch``, by position or by name; the weight is ``lin_weight``."""
        named = {name.removeprefix("lin_"): value for name, value in named.items()}
        named |= dict(zip(["num_items_in_batch"], tensors[9:], strict=False))
        function: Any = fused_linear_score_centering
        return function(*tensors[:9], **named, **self.options)
