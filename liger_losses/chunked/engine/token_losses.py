"""Separable losses: the function of a token's statistics, and its derivatives.

N active tokens, n of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import Call
from liger_losses.chunked.engine.query import Statistics, read_by, wrong_token_losses

F = TypeVar("F", bound=Callable[..., Any])


def closed_form(token_loss: F) -> F:
    """Mark a ``token_loss`` that returns ``(values, derivatives)``: autograd records no graph for it."""
    token_loss.closed_form = True  # type: ignore[attr-defined]
    return token_loss


def token_losses(call: Call, values: Mapping[str, Tensor], rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
    """The tokens' losses ``[n]``, and their derivatives by each statistic: from autograd, unless the loss gives them.

    Args:
        call: whose query has the loss.
        values: ``[n]``, the statistics of these tokens.
        rows: which of the active tokens these are.
    """
    tokens, query, count = call.tokens, call.query, rows.stop - rows.start
    function, whole = query.token_loss, count == call.tokens.labels.shape[0]
    assert function is not None
    inputs, labels = query.token_inputs, tokens.labels
    if not whole:
        inputs, labels = {name: value[rows] for name, value in inputs.items()}, labels[rows]
    known = getattr(getattr(function, "func", function), "closed_form", False)  # of a partial, its function's
    with torch.set_grad_enabled(not known):
        leaves = values if known else {name: values[name].detach().requires_grad_() for name in query.statistics}
        named = {name: leaves[name] for name in query.statistics} | {name: values[name] for name in query.metrics}
        result = function(read_by(function, Statistics(**named), query.registered), labels, **inputs)
        losses, derivatives = result if isinstance(result, tuple) else (result, None)
        if not isinstance(losses, Tensor) or losses.shape != (count,):
            raise wrong_token_losses(losses, count)
        losses = tokens.masked(losses, rows)
        if derivatives is not None:
            dtype = call.work.logits_dtype  # autograd's dtype: of fp64 weights, derivatives are fp64
            masked = {name: tokens.masked(g.detach().to(dtype), rows) for name, g in derivatives.items()}
            return losses.detach(), masked
        if not losses.requires_grad:
            return losses, {}
        upstream = torch.autograd.grad(losses.sum(), [leaves[name] for name in query.statistics], allow_unused=True)
    # Masked again: where a loss is not finite, not even 0 times its derivative is.
    pairs = zip(query.statistics, upstream, strict=True)
    return losses.detach(), {name: tokens.masked(g, rows) for name, g in pairs if g is not None}


def weighted_sum(call: Call, weights: Mapping[str, Tensor], values: Mapping[str, Tensor], rows: slice) -> Tensor:
    """The tokens' losses ``[n]``, ``sum_s w_s s`` over their statistics; 0 for those without loss."""
    terms = [weight * values[name] for name, weight in weights.items()]
    return call.tokens.masked(sum(terms[1:], terms[0]), rows)
