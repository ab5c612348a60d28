"""Errors of one rank alone, of which those that compute with it must know: else they would wait for it.

Every call with a shared head begins with an :class:`Agreement` of its ranks, and every loss of slices of sequences with
a comparison of what the ranks compute. A rank that raises before it gets there, because there is no such argument or
inputs do not fit, takes part in that exchange with its error, and all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from liger_losses.chunked.engine.arguments import wrong_arguments
from liger_losses.chunked.engine.given import given_to_loss
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.plan import device_memory
from liger_losses.chunked.engine.shard import Agreement


def meet(head: Head, error: Exception | None = None) -> None:
    """Raise on all ranks that share a head if one has an error, or if their loss was given different things.

    It comes before other collectives.
    """
    assert head.shard is not None
    device = head.weight.device
    head.shard.least_memory(device_memory(device), device)
    with Agreement(head.shard.group, device) as agreement:
        if error is not None:
            raise error
        agreement.given = given_to_loss()
    agreement.wait()


@torch.compiler.disable
def raise_on_all_ranks(
    error: Exception, agreements: int, function: Callable[..., Any], arguments: Any, keywords: Any, loss: Any = None
) -> None:
    """Make all ranks raise that compute this call together, unless they know of its error, which is to be raised next.

    Args:
        error: that of a call with these arguments. Where a loss or an operation takes no such arguments, this function
            raises a TypeError that says how it is called.
        agreements: :attr:`Agreement.count` as it was before the call. If it is another now, the ranks know of the
            error, or have gone on, and cannot be told.
        function: what was called: an operation, or the ``forward`` of the ``loss``.
    """
    wrong = wrong_arguments(function, len(arguments), keywords, loss) if type(error) is TypeError else None
    error = error if wrong is None else TypeError(wrong)
    head = _shared_head((*arguments, *keywords.values()))
    if head is not None and Agreement.count == agreements:
        with suppress(type(error)):
            meet(head, error)
    if loss is not None and loss.spans_ranks:
        tell_slices(loss.group, error)
    if wrong is not None:
        raise error from None


def tell_slices(group: dist.ProcessGroup, error: Exception) -> None:
    """Make all ranks raise that hold other slices of the sequences, unless they know of this error.

    They learn it when they next compare what they compute.
    """
    if getattr(error, "ranks_know", False):
        return
    error.ranks_know = True  # type: ignore[attr-defined]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, f"{type(error).__name__}: {error}", group=group)


def _shared_head(given: Iterable[Any]) -> Head | None:
    for value in given:
        found = _shared_head(value) if isinstance(value, (list, tuple)) else value
        # Ranks of a mesh may gather the hidden states before they agree.
        if isinstance(found, Head) and found.shard is not None and found.shard.mesh is None:
            return found
    return None
