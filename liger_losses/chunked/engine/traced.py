"""What operations return where nothing is computed, and losses of statistics as part of a graph.

T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import CheckedInputs
from liger_losses.chunked.engine.checks import one_each
from liger_losses.chunked.engine.query import Query, Statistics, read_by, wrong_token_losses
from liger_losses.kernels.tracing import state


def empty_statistics(checked: CheckedInputs, query: Query) -> list[Statistics]:
    """The statistics' shapes and dtypes."""
    dtype, hidden = torch.promote_types(torch.float32, checked.compute_dtype), checked.hidden_states[0]
    width = () if query.selected is None else query.selected.shape[-1:]
    names = dict.fromkeys((*query.statistics, *query.metrics))

    def empty(name: str, shape: Sequence[int]) -> Tensor:
        sizes = (*shape, *width) if name == "selected_logps" else shape
        return hidden.new_empty(sizes, dtype=torch.int64 if name == "argmax" else dtype)

    if state.recorded is not None:
        tokens = sum([math.prod(shape) for shape in checked.shapes])  # Size.numel() would make it a constant
        state.recorded += [empty(name, (tokens,)) for name in dict.fromkeys(("lse", *names))]
    return [Statistics(**{name: empty(name, shape) for name in names}) for shape in checked.shapes]


def differentiable(result: Any, statistics: Any, count: int) -> Tensor:
    """What a token loss of so many tokens returned: where that is values and derivatives, a function that has both."""
    losses, derivatives = result if isinstance(result, tuple) else (result, None)
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        raise wrong_token_losses(losses, count)
    if derivatives is None:
        return losses
    values = {name: getattr(statistics, name) for name in derivatives}
    return losses.detach() + sum(g.detach() * (values[n] - values[n].detach()) for n, g in derivatives.items())


def traced_token_loss(
    found: Any, labels: Any, token_loss: Callable[..., Any], inputs: Mapping[str, Any], ignore_index: int
) -> tuple[Tensor, Any]:
    """The loss of statistics in the labels' shape, without a value that the host must know; and they, detached."""
    if isinstance(found, list):  # of several targets
        count = len(found)
        targets, losses = one_each(labels, count), []
        for i in range(count):
            given = {name: one_each(value, count)[i] for name, value in inputs.items()}
            loss, found[i] = traced_token_loss(found[i], targets[i], token_loss, given, ignore_index)
            losses.append(loss)
        return torch.stack(losses).sum(), found

    def flat(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.flatten(0, labels.dim() - 1)

    mask = labels != ignore_index
    named = read_by(token_loss, [flat(value) for value in found])
    active = labels.masked_fill(~mask, 0).flatten()
    result = token_loss(named, active, **{n: flat(value.detach()) for n, value in inputs.items()})
    loss = torch.where(mask.flatten(), differentiable(result, named, active.shape[0]), 0.0).sum()
    wide = [value.dtype for value in found if value is not None and value.is_floating_point()]
    loss = loss.to(wide[0]) if wide else loss
    return loss, Statistics(*[None if value is None else value.detach() for value in found])
