"""Losses and reductions over the vocabulary, which the engine computes from hidden states and head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine import EngineOptions
from liger_losses.chunked.engine.plan import default_workspace
from liger_losses.chunked.losses.cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.patching.lazy.tensor import LazyLogits, WithGradientOf, implements
from liger_losses.patching.lazy.views import is_vocabulary

#: No label has this value, so that as ``ignore_index`` it ignores no token.
_NO_LABEL = -(2**62)


def _any_labels(lazy: LazyLogits) -> Tensor:
    """Labels for statistics that do not depend on them."""
    return torch.zeros(lazy.shape[:-1], dtype=torch.int64, device=lazy.device)


def _single_dim(dim: Any) -> Any:
    """A dimension that may be given as a tuple of one."""
    return dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim


@implements("cross_entropy")
def _cross_entropy(
    lazy: LazyLogits, target: Tensor, weight: Tensor | None = None, size_average: Any = None, **options: Any
) -> Any:
    deferred = lazy.deferred.current()
    deprecated = size_average is not None or options.pop("reduce", None) is not None
    class_indices = isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1
    if deprecated or not class_indices or lazy.dim() != 2 or deferred.normalized:
        return NotImplemented
    loss_fn = LigerFusedLinearCrossEntropyLoss(weight, **options)
    with deferred.under_forward_autocast():
        loss = loss_fn(deferred.head, deferred.hidden_states, target)
    lazy.deferred.mark_read()
    # Autocast runs it in fp32.
    return loss if loss.dtype == lazy.dtype or autocast_dtype(lazy.device) is not None else loss.to(lazy.dtype)


@implements("nll_loss")
def _nll_loss(lazy: LazyLogits, target: Tensor, *args: Any, **options: Any) -> Any:
    if not lazy.deferred.normalized or lazy.deferred.negated:
        return NotImplemented
    return _cross_entropy(lazy.derive(replace(lazy.deferred, normalized=False)), target, *args, **options)


@implements("gather")
def _gather(lazy: LazyLogits, dim: int, index: Tensor) -> Any:
    """Logits or log-probabilities of some columns: ``logit = logp + lse``."""
    deferred = lazy.deferred
    if not is_vocabulary(lazy, dim) or index.shape[:-1] != lazy.shape[:-1]:
        return NotImplemented
    index, lse = index.long(), () if deferred.normalized else ("lse",)
    if index.shape[-1] == 1:
        # A column outside of the vocabulary is an error, the usual ignore_index too.
        found = deferred.statistics(index[..., 0], ("logp", *lse), options=EngineOptions(ignore_index=_NO_LABEL))
        logps = found.logp[..., None]
    else:
        found = deferred.statistics(_any_labels(lazy), ("selected_logps", *lse), selected=index)
        logps = found.selected_logps
    logps = -logps if deferred.negated else logps
    return (logps + found.lse[..., None] if lse else logps).to(lazy.dtype)


@implements("take_along_dim")
def _take_along_dim(lazy: LazyLogits, indices: Tensor, dim: int | None = None) -> Any:
    return NotImplemented if dim is None or indices.dim() != lazy.dim() else _gather(lazy, dim, indices)


def _by_rows(lazy: LazyLogits, reduce: Callable[[Tensor], Any], width: int) -> Any:
    """``reduce`` of the model's own logits, whose rounding decides ties: tensors ``[..., width]``.

    The logits exist for some tokens at a time. The first tensor, if there are two, has the gradient of the logits in
    the columns of the second.
    """
    deferred, vocab_size = lazy.deferred.current(), lazy.shape[-1]
    hidden_states = deferred.hidden_states.detach().reshape(-1, deferred.hidden_states.shape[-1])
    rows = max(1, default_workspace(vocab_size, 4, lazy.device) // (8 * vocab_size))
    with torch.no_grad():
        parts = (replace(deferred, hidden_states=part).with_version() for part in hidden_states.split(rows))
        blocks = [reduce(part.values().to(lazy.dtype)) for part in parts]
    found = tuple(torch.cat(part).view(*lazy.shape[:-1], width) for part in zip(*blocks, strict=True))
    if len(found) == 2 and torch.is_grad_enabled() and lazy.requires_grad:
        return WithGradientOf.apply(found[0], _gather(lazy, -1, found[1])), found[1]
    return found


@implements("topk")
def _topk(lazy: LazyLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest values, and their columns."""
    if not is_vocabulary(lazy, dim) or not 1 <= k <= lazy.shape[-1]:
        return NotImplemented
    return torch.return_types.topk(_by_rows(lazy, lambda logits: logits.topk(k, -1, largest, sorted), k))


def _extreme(name: str, lazy: LazyLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    """``max`` or ``min`` over the vocabulary, the values and the columns that torch finds first; or ``argmax``."""
    if not is_vocabulary(lazy, dim):
        return NotImplemented

    def reduce(logits: Tensor) -> Any:
        found = getattr(logits, name)(-1, keepdim=True)
        return found if name != "argmax" else (found,)

    found = _by_rows(lazy, reduce, 1)
    found = found if keepdim else tuple(part[..., 0] for part in found)
    return found[0] if name == "argmax" else getattr(torch.return_types, name)(found)


for _name in ("max", "min", "argmax"):
    implements(_name)(partial(_extreme, _name))


@implements("logsumexp")
def _logsumexp(lazy: LazyLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not is_vocabulary(lazy, _single_dim(dim)) or lazy.deferred.normalized:
        return NotImplemented
    lse = lazy.deferred.statistics(_any_labels(lazy), ("lse",)).lse.to(lazy.dtype)
    return lse[..., None] if keepdim else lse


def _average(
    name: str, lazy: LazyLogits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """``mean`` or ``sum`` over the vocabulary, or over everything."""
    supported = not keepdim if dim is None else is_vocabulary(lazy, _single_dim(dim))
    if not supported or not (dtype or lazy.dtype).is_floating_point:
        return NotImplemented
    statistic = "mean_logp" if lazy.deferred.normalized else "mean_logit"
    result = getattr(lazy.deferred.statistics(_any_labels(lazy), (statistic,)), statistic)
    result = -result if lazy.deferred.negated else result
    if name == "sum":
        result = result * lazy.shape[-1]  # in the engine's dtype, which holds sums that half precision would round
    if dim is None:
        result = getattr(result, name)()
    if name == "sum" and lazy.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = dtype or torch.float32
    return (result[..., None] if keepdim else result).to(dtype or lazy.dtype)


for _name in ("mean", "sum"):
    implements(_name)(partial(_average, _name))
