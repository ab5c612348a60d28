"""Tokens whose coefficients are exactly zero take no part in the gradient products.

Clipped tokens and those that a mask, a weight or an advantage of 0 removes have an upstream gradient of 0 by every
statistic. What remains is a call of fewer tokens.

N active tokens, of which M have a coefficient; H hidden size, V vocabulary size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from liger_losses.chunked.engine.blocks import Block
from liger_losses.chunked.engine.call import Call
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.kernels.move_rows import put_first
from liger_losses.kernels.reading import start_reading

#: The host waits for M only if both gradient products take at least so many floating-point operations, by the kind of
#: device: on an H200 10 ms, of which the wait is less than 1 %.
MIN_FLOPS = {"cuda": 8e12, "cpu": 1e7}
#: The largest share M / N with which the others' statistics are computed alone: that reads the whole head for them.
MOST_COUNTED = 0.98
#: On a GPU, M is rounded up to a multiple of so many rows, with which products are faster.
ROUNDED = {"cuda": 64}


class Pending:
    """Tokens that are being counted. The device puts those that count first, while the host waits for their number."""

    def __init__(self, counts: Tensor, backend: str) -> None:
        self.count, self.rounded = len(counts), ROUNDED.get(counts.device.type, 1)
        total, *self.moves, self.order = put_first(counts, self.rounded, backend=backend)
        self._read = start_reading(total, "how many tokens have a coefficient")

    def found(self) -> int | None:
        """M, or a few more; ``None`` where these are all N. The host waits."""
        found = -(-max(self._read(), 1) // self.rounded) * self.rounded  # one at least, which writes the gradients
        return None if found >= self.count else found

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
    each = [(g != 0).flatten(1).any(1) if g.dim() > 1 else g != 0 for g in upstream.values()]
    return Pending(functools.reduce(torch.logical_or, each), call.backend)


def tokens_that_count(call: Call) -> Pending | None:
    """As :func:`counted_tokens`, for a separable loss that knows it before any statistic: see :attr:`Query.counts`."""
    counts = call.query.counts
    return None if counts is None or not _is_large(call) else Pending(counts, call.backend)
