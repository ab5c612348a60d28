"""Tokens whose coefficients are exactly zero take no part in the gradient products.

Clipped tokens and those that a mask, a weight or an advantage of 0 removes have an upstream gradient of 0 by every
statistic. What remains is a call of fewer tokens.

N active tokens, of which M have a coefficient; H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine.blocks import Block
from liger_losses.chunked.engine.call import Call
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.chunked.engine.tokens import Tokens

#: The host waits for M only if both gradient products take at least so many floating-point operations, by the kind of
#: device: on an H200 10 ms, of which the wait is less than 1 %.
MIN_FLOPS = {"cuda": 8e12, "cpu": 1e7}
#: The largest share M / N with which tokens are left out: to gather the others takes time, too.
MOST_COUNTED = 0.98


class Counted(NamedTuple):
    """The tokens that have a coefficient, in the order in which the fewest rows move: only those beyond M do."""

    order: Tensor  # [M] int64, which of the N tokens each of them is
    sources: Tensor  # the rows of M to N - 1 among them,
    targets: Tensor  # and the rows below M that these take

    def call(self, call: Call) -> Call:
        """The call of these tokens alone."""
        run = call.decision.run(len(self.order), True)
        temperature = call.transform.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[self.order]
        return replace(
            call,
            tokens=call.tokens.subset(self.order),
            query=call.query.subset(self.order),
            transform=replace(call.transform, temperature=temperature),
            work=run.work,
            plan=run.plan,
            grad_weight_dtype=torch.promote_types(call.grad_weight_dtype, run.grad_weight_dtype),
        )

    def rows(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their values, of ``[N]`` or ``[N, k]`` each."""
        return {name: value[self.order] for name, value in values.items()}


class Pending:
    """Tokens that are being counted: the device works on what needs no number, until the host asks for it."""

    def __init__(self, counts: Tensor) -> None:
        #: First the tokens that count, then the others, each in their order.
        self.ordered = (~counts).to(torch.uint8).argsort(stable=True)
        total = counts.sum()
        gaps = (~counts & (torch.arange(len(counts), device=counts.device) < total)).sum()
        self.numbers, self.copied = torch.stack([total, gaps]), None
        if counts.is_cuda:
            self.numbers, self.copied = self.numbers.to("cpu", non_blocking=True), torch.cuda.Event()  # pinned memory
            self.copied.record(torch.cuda.current_stream(counts.device))

    def found(self) -> tuple[int, int] | None:
        """M, and how many of the first M tokens do not count; ``None`` where nearly all do. The host waits."""
        if self.copied is not None:
            self.copied.synchronize()
        found, missing = self.numbers.tolist()
        return None if found > MOST_COUNTED * len(self.ordered) else (found, missing)

    def counted(self) -> Counted | None:
        """The tokens that count, unless these are nearly all."""
        numbers = self.found()
        if numbers is None:
            return None
        found, missing = numbers
        sources, targets = self.ordered[found - missing : found], self.ordered[found : found + missing]
        order = torch.arange(found, device=self.ordered.device).index_copy(0, targets, sources)
        return Counted(order, sources, targets)


def _is_large(tokens: int, hidden_size: int, vocab_size: int, device: torch.device) -> bool:
    return 4.0 * tokens * hidden_size * vocab_size >= MIN_FLOPS.get(device.type, float("inf"))


def counted_tokens(call: Call, upstream: Mapping[str, Tensor], kept: Block | None) -> Pending | None:
    """Count the tokens some of whose upstream gradients ``[N]`` are not zero; ``None`` where all are to be multiplied.

    ``kept`` is the block that holds all tokens, if there is one.
    """
    tokens, work = call.tokens, call.work
    if call.one_block or not upstream or not _is_large(tokens.count, work.hidden_size, work.vocab_size, work.device):
        return None
    # Of ranks that share a vocabulary, all would have to find the same number; tensors of one head follow each other.
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
    numbers, ordered = pending.found(), pending.ordered
    return None if numbers is None else (tokens.subset(ordered[: numbers[0]]), tokens.subset(ordered[numbers[0] :]))
