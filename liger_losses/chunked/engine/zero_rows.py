"""Tokens whose coefficients are exactly zero take no part in the gradient products.

Clipped tokens and those that a mask, a weight or an advantage of 0 removes have an upstream gradient of 0 by every
statistic. What remains is a call of fewer tokens.

N active tokens, of which M have a coefficient; H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from liger_losses.chunked.engine.blocks import Block
from liger_losses.chunked.engine.call import Call
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.kernels.reading import start_reading

#: The host waits for M only if both gradient products take at least so many floating-point operations, by the kind of
#: device: on an H200 10 ms, of which the wait is less than 1 %.
MIN_FLOPS = {"cuda": 8e12, "cpu": 1e7}
#: The largest share M / N with which a call is split: each of the two takes time to start.
MOST_COUNTED = 0.98
#: On a GPU, M is rounded up to a multiple of so many rows, with which products are faster.
ROUNDED = {"cuda": 64}


class Pending:
    """Tokens that are being counted. The device puts those that count first, while the host waits for their number."""

    def __init__(self, counts: Tensor) -> None:
        self.counts, self.total = counts, counts.sum()
        self._read = start_reading(self.total, "how many tokens have a coefficient")

    @cached_property
    def moves(self) -> tuple[Tensor, Tensor]:
        """``[N // 2]`` rows that move, N for none, and where to: of the first M or a few more, those that do not count
        are taken, and what is not taken keeps its own row."""
        n, rounded = len(self.counts), ROUNDED.get(self.counts.device.type, 1)
        first = torch.arange(n, device=self.counts.device) < (self.total + rounded - 1) // rounded * rounded
        sources, targets = (
            torch.nonzero_static(found, size=n // 2, fill_value=n).squeeze(-1)
            for found in (self.counts & ~first, first & ~self.counts)
        )
        return sources, targets.masked_fill(sources == n, n)

    @cached_property
    def order(self) -> Tensor:
        """``[N]``, which of the N tokens is where."""
        (sources, targets), n = self.moves, len(self.counts)
        order = torch.arange(n + 1, device=self.counts.device)
        return order.index_copy_(0, targets, sources).index_copy_(0, sources, targets)[:n]

    def found(self) -> int | None:
        """M, or a few more; ``None`` where these are all N. The host waits."""
        rounded = ROUNDED.get(self.counts.device.type, 1)
        found = -(-max(self._read(), 1) // rounded) * rounded  # one row at least, which writes the gradients
        return None if found >= len(self.counts) else found

    def call(self, call: Call) -> Call:
        """The call of all tokens in this order."""
        temperature = call.transform.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[self.order]
        return replace(
            call,
            tokens=call.tokens.subset(self.order),
            query=call.query.subset(self.order),
            transform=replace(call.transform, temperature=temperature),
        )

    def rows(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tokens' values, of ``[N]`` or ``[N, k]`` each, in this order."""
        return {name: value[self.order] for name, value in values.items()}


def _is_large(tokens: int, hidden_size: int, vocab_size: int, device: torch.device) -> bool:
    return 4.0 * tokens * hidden_size * vocab_size >= MIN_FLOPS.get(device.type, float("inf"))


def counted_tokens(call: Call, upstream: Mapping[str, Tensor], kept: Block | None) -> Pending | None:
    """Count the tokens some of whose upstream gradients ``[N]`` are not zero; ``None`` where all are to be multiplied.

    ``kept`` is the block that holds all tokens, if there is one.
    """
    tokens, work = call.tokens, call.work
    if not upstream or not _is_large(tokens.count, work.hidden_size, work.vocab_size, work.device):
        return None
    # Ranks that share a vocabulary would all have to find the same number; tensors of one head follow each other.
    if call.ranks is not ALONE or len(tokens.shapes) > 1 or (kept is not None and not kept.movable):
        return None
    if work.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return Pending(
        torch.stack([(g != 0).flatten(1).any(1) if g.dim() > 1 else g != 0 for g in upstream.values()]).any(0)
    )


def split_tokens(tokens: Tokens, counts: Tensor, head: Head) -> tuple[Tokens, Tokens] | None:
    """The active tokens of one tensor of labels that count, and the others; ``None`` where all are to be multiplied.

    ``counts`` is bool, in the labels' shape. As :func:`counted_tokens`, for losses that know it before any statistic.
    """
    large = _is_large(tokens.count, head.hidden_size, head.vocab_size, tokens.labels.device)
    if not large or head.ranks is not ALONE or tokens.ignored is not None:
        return None
    pending = Pending(tokens.gather_like_labels(counts))
    found = pending.found()
    if found is None or found > MOST_COUNTED * tokens.count:
        return None
    return tokens.subset(pending.order[:found]), tokens.subset(pending.order[found:])
