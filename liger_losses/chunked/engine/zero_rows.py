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
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.kernels.reading import start_reading

#: The host waits for M only if both gradient products take at least so many floating-point operations, by the kind of
#: device: on an H200 10 ms, of which the wait is less than 1 %.
MIN_FLOPS = {"cuda": 8e12, "cpu": 1e7}
#: The largest share M / N with which the others' statistics are computed alone: that reads the whole head for them.
MOST_COUNTED = 0.98
#: On a GPU, M is rounded up to a multiple of so many rows, with which products are faster.
ROUNDED = {"cuda": 64}


class Pending:
    """Tokens that are being counted. The device puts those that count first, while the host waits for their number.

    ``moves`` says whether rows of a block move, so that as few as possible are to change their places.
    """

    def __init__(self, counts: Tensor, moves: bool) -> None:
        self.counts, self.total, self._moves = counts, counts.sum(), moves
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
        if not self._moves:
            return self.counts.argsort(descending=True, stable=True)
        (sources, targets), n = self.moves, len(self.counts)
        order = torch.arange(n + 1, device=self.counts.device)
        return order.index_copy_(0, targets, sources).index_copy_(0, sources, targets)[:n]

    def found(self) -> int | None:
        """M, or a few more; ``None`` where these are all N. The host waits."""
        rounded = ROUNDED.get(self.counts.device.type, 1)
        found = -(-max(self._read(), 1) // rounded) * rounded  # one row at least, which writes the gradients
        return None if found >= len(self.counts) else found

    def call(self, call: Call, losses: bool = False) -> Call:
        """The call of all tokens in this order; with what their ``losses`` read, unless these are known."""
        temperature, (work, plan, *_) = call.transform.temperature, call.decision.run(call.tokens.count, gathers=True)
        if isinstance(temperature, Tensor):
            temperature = temperature[self.order]
        return replace(
            call,
            work=work,
            plan=plan,
            tokens=call.tokens.subset(self.order),
            query=call.query.subset(self.order, losses),
            transform=replace(call.transform, temperature=temperature),
        )

    def rows(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tokens' values, of ``[N]`` or ``[N, k]`` each, in this order."""
        return {name: value[self.order] for name, value in values.items()}


def _is_large(call: Call) -> bool:
    """Whether to wait for the number of tokens that count, on this device, in this call."""
    tokens, work, device = call.tokens, call.work, call.work.device
    # Ranks that share a vocabulary would all have to find the same number; tensors of one head follow each other.
    if call.ranks is not ALONE or len(tokens.shapes) > 1:
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return 4.0 * tokens.count * work.hidden_size * work.vocab_size >= MIN_FLOPS.get(device.type, float("inf"))


def counted_tokens(call: Call, upstream: Mapping[str, Tensor], kept: Block | None) -> Pending | None:
    """Count the tokens some of whose upstream gradients ``[N]`` are not zero; ``None`` where all are to be multiplied.

    ``kept`` is the block that holds all tokens, if there is one.
    """
    if not upstream or not _is_large(call) or (kept is not None and not kept.movable):
        return None
    counts = torch.stack([(g != 0).flatten(1).any(1) if g.dim() > 1 else g != 0 for g in upstream.values()]).any(0)
    return Pending(counts, moves=kept is not None)


def tokens_that_count(call: Call) -> Pending | None:
    """As :func:`counted_tokens`, for a separable loss that knows it before any statistic: see :attr:`Query.counts`."""
    counts = call.query.counts
    return None if counts is None or not _is_large(call) else Pending(counts, moves=False)
