"""Streams hidden states through ``lm_head`` in blocks.

Tokens whose coefficients are exactly zero take no part in the gradient products. Clipped tokens and those that a mask,
a weight or an advantage of 0 removes have an upstream gradient of 0 by every statistic. What remains is a call of fewer
tokens.

N active tokens, of which M have a coefficient; H hidden size, V vocabulary size, R rows and C columns of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from liger_losses.chunked.engine.accumulation import Gradients, HeadGradients, HiddenGradients
from liger_losses.chunked.engine.blocks import Block, Columns, ExponentialBlock, Part, Upstream
from liger_losses.chunked.engine.call import Call, OpenCall
from liger_losses.chunked.engine.logit_block import LogitBlock
from liger_losses.chunked.engine.plan import TILE, TILE_COLUMNS, blocks, padded
from liger_losses.chunked.engine.query import changed
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.chunked.engine.two_models import TwoModels
from liger_losses.kernels._tiles import processors
from liger_losses.kernels.move_rows import put_first
from liger_losses.kernels.reading import start_reading

#: The host waits for M only if both gradient products take at least so many floating-point operations, by the kind of
#: device: on an H200 10 ms, of which the wait is less than 1 %.
MIN_FLOPS = {"cuda": 8e12, "cpu": 1e7}
#: The largest share M / N with which the others' statistics are computed alone: that reads the whole head for them.
MOST_COUNTED = 0.98
#: On a GPU, M is rounded up to a multiple of so many rows, with which products are faster.
ROUNDED = {"cuda": 64}


def _in_parts(values: Mapping[str, Tensor], size: int, start: int, count: int) -> Sequence[dict[str, Tensor]]:
    """Split the values of the tokens ``start`` to ``count`` into views of ``size`` tokens, by one operation a value."""
    found: list[dict[str, Tensor]] = [{} for _ in range(start, count, size)]
    for name, value in values.items():
        each = value if start == 0 and count == len(value) else value[start:count]
        views = (each,) if len(found) == 1 else each.split(size)
        for of_part, view in zip(found, views, strict=False):  # of no tokens, there is an empty view
            of_part[name] = view
    return found


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

    def call(self, call: Call) -> Call:
        """The call of all tokens in this order, without what their losses read."""
        transform, run = call.transform, call.decision.run(call.tokens.count, gathers=True)
        if isinstance(transform.temperature, Tensor):
            transform = replace(transform, temperature=transform.temperature[self.order])
        tokens, query = call.tokens.subset(self.order), call.query.subset(self.order)
        known = {name: run.known[name] for name in ("work", "plan", "grad_weight_dtype")}
        return changed(call, **known, tokens=tokens, query=query, transform=transform)

    def rows(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tokens' values, of ``[N]`` or ``[N, k]`` each, in this order."""
        return {name: value[self.order] for name, value in values.items()}


def _rows_of_wave(call: Call) -> int:
    """How many rows of the hidden states' gradient give each multiprocessor one tile; fewer rows take as long."""
    tiles = -(-call.work.hidden_size // TILE_COLUMNS)
    return max(1, processors(call.work.device) // tiles) * TILE


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


class Stream:
    """The passes over all active tokens of a call."""

    def __init__(
        self, call: Call, weight: Tensor, bias: Tensor | None, hidden_states: Sequence[Tensor], multiplies: bool = True
    ) -> None:
        self.opened = OpenCall(call, weight, bias, hidden_states, multiplies)
        self.call, self.count = call, self.opened.count

    # --- Whole passes ------------------------------------------------------------------------------------------

    def statistics(self, keep_block: bool = False) -> tuple[dict[str, Tensor], Block | None]:
        """The statistics ``[N]`` of every active token, and with ``keep_block`` one block that holds all of them."""
        values = self._empty_statistics()
        block = self._block(self.count) if keep_block else self._block_of_statistics()
        for part in self._parts(block.rows, values):
            block.fill(part)
        return values, block if keep_block else None

    def gradients(
        self, values: dict[str, Tensor], upstream: Upstream, kept: Block | None, pending: Pending | None = None
    ) -> tuple[Tensor | None, ...]:
        """``(grad_weight, grad_bias, *grad_hidden)``: from the block of all tokens if it was kept, else recomputed.

        ``upstream`` is d loss / d statistic, ``[N]`` each; where some are 0, ``pending`` are the tokens that count.
        """
        # A kept block has the head that was dequantized.
        opened = self.opened if kept is None else kept.opened
        counted = self.count
        if pending is not None:
            if kept is not None:
                kept.move(pending.order, *pending.moves)
                kept.begin(min(_rows_of_wave(self.call), self.count // 2))  # while the host waits
            found = pending.found()
            if found is not None:
                opened, counted = opened.of_tokens(pending.call(self.call)), found
                values, upstream = pending.rows(values), pending.rows(upstream)
                self.opened, self.call = opened, opened.call
        grads = Gradients(opened)
        with self._block_of_gradients() if kept is None else kept as block:
            if kept is not None and pending is not None:
                kept.keep(opened, counted)
            known = _in_parts(upstream, max(block.rows, 1), 0, counted)
            for part, wanted in zip(self._parts(block.rows, values, counted), known, strict=True):
                block.write(part, wanted, grads, filled=kept is not None)
        return grads.results()

    def statistics_and_unit_gradient(self) -> tuple[dict[str, Tensor], Tensor]:
        """Statistics, and the gradient ``[N, H]`` of the only one with respect to each token's hidden state."""
        (statistic,) = self.call.query.statistics
        values, head_grads = self._empty_statistics(), HeadGradients(self.opened)
        dtype = functools.reduce(torch.promote_types, [part.dtype for part in self.opened.hidden_states])
        shape = self.count, self.call.work.hidden_size
        unit_gradient = torch.empty(shape, dtype=dtype, device=self.opened.device)
        with self._block(self.call.plan.rows) as block:
            for part in self._parts(block.rows, values):
                block.fill(part)
                ones = {statistic: torch.ones_like(part.values["lse"])}
                out = unit_gradient[part.rows]
                gradient = block.gradients(part, ones, head_grads, out)
                block.wait()
                if gradient is not None and gradient is not out:
                    out.copy_(gradient)
        self.call.ranks.of_gradients.sum_(unit_gradient)
        return values, unit_gradient

    def scaled(self, unit_gradient: Tensor, upstream: Upstream) -> list[Tensor | None]:
        """Gradients of the hidden states: each token's unit gradient, times its upstream gradient."""
        hidden_grads = HiddenGradients(self.opened, ALONE)  # the unit gradient is summed over ranks already
        g = next(iter(upstream.values()), torch.zeros_like(unit_gradient[:, 0]))
        for rows in blocks(self.count, self.call.plan.rows):
            hidden_grads.write(rows, unit_gradient[rows] * g[rows, None], hidden_grads.out_view(rows))
        return hidden_grads.results

    def token_loss(self) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
        """A separable loss (0-dim), the statistics, and ``(grad_weight, grad_bias, grad_hidden)`` of the loss."""
        pending, given = tokens_that_count(self.call), self.opened
        if pending is not None:
            self.opened = self.opened.of_tokens(pending.call(self.call))
            self.call = self.opened.call
        values, losses = self._empty_statistics(), list[Tensor]()
        with self._block(self.call.plan.rows) as block:
            grads: Gradients | None = None
            if pending is not None:
                parts = self._counted(block, values, losses, pending, given)
            elif self.call.query.token_weights is None:
                parts = self._evaluated(block, losses, self._parts(block.rows, values))
            else:
                parts = self._weighted(block, values, losses)
            for part, upstream in parts:
                grads = grads or Gradients(self.opened)
                block.write(part, upstream, grads)
        every = losses[0] if len(losses) == 1 else torch.cat([values["lse"][:0], *losses])
        return every.sum(dtype=values["lse"].dtype), values, (grads or Gradients(self.opened)).results()

    # --- Their steps -----------------------------------------------------------------------------------------------

    # Each of the next three fills the block with one part after the other, and yields it with its upstream gradients.
    # The tokens' losses are appended to `losses`.

    def _evaluated(self, block: Block, losses: list[Tensor], parts: Iterable[Part]) -> Iterator[tuple[Part, Upstream]]:
        """Of a loss whose derivatives follow from the statistics."""
        for part in parts:
            block.fill(part)
            if block.waits:  # for the number of tokens that count, which is known by now
                block.keep(self.opened, len(part.hidden))
            found, upstream = self.call.token_losses(part.values, part.rows)
            losses.append(found)
            yield part, upstream

    def _weighted(
        self, block: Block, values: dict[str, Tensor], losses: list[Tensor]
    ) -> Iterator[tuple[Part, Upstream]]:
        """Of a weighted sum of statistics, whose derivatives are the weights."""
        query = self.call.query
        weights = query.token_weights or {}
        for part in self._parts(block.rows, values):
            known = weights
            if part.hidden.shape[0] < self.count:  # a number is one of all tokens
                known = {name: w[part.rows] if isinstance(w, Tensor) else w for name, w in weights.items()}
            block.fill(part, known)
            yield part, known
            # The last statistic may be found together with the gradients.
            losses.append(self.call.tokens.masked(query.losses(part.values, part.labels, known), part.rows))

    def _counted(
        self, block: Block, values: dict[str, Tensor], losses: list[Tensor], pending: Pending, given: OpenCall
    ) -> Iterator[tuple[Part, Upstream]]:
        """Of the tokens that count; then the statistics of all others are computed.

        The first part is filled, and its loss evaluated, before the host knows how many tokens count: only launches
        of products follow the wait. If all tokens count, they are where they were ``given``.
        """
        block.waits, every = True, given.call.query
        (first,) = self._parts(block.rows, values, min(block.rows, self.count))
        block.fill(first)
        done = len(first.hidden)
        self.call = changed(self.call, query=every.subset(pending.order[:done], losses=True))
        each, upstream = self.call.token_losses(first.values, first.rows)
        found = pending.found()
        if found is None:
            self.opened, self.call = given, given.call
        total = self.count if found is None or found > MOST_COUNTED * self.count else found
        first = first.at(slice(0, min(total, done)))
        if total < done:
            each, upstream = each[:total], {name: g[:total] for name, g in upstream.items()}
        losses.append(each)
        block.keep(self.opened, len(first.hidden))
        yield first, upstream
        if total > done:
            if found is not None:
                self.call = changed(self.call, query=every.subset(pending.order, losses=True))
            even = -(-(total - done) // -(-(total - done) // block.rows))
            more = self._parts(min(padded(even), block.rows), values, total, done)
            yield from self._evaluated(block, losses, more)
        done = max(total, done)
        if done < self.count:
            with self._block_of_statistics() as others:
                for part in self._parts(others.rows, values, start=done):
                    others.fill(part)

    def _parts(self, size: int, values: dict[str, Tensor], count: int | None = None, start: int = 0) -> Iterator[Part]:
        """The active tokens, or those from ``start`` to ``count``, ``size`` or fewer at a time."""
        epilogue, per_token = self.opened.epilogue, isinstance(self.call.transform.temperature, Tensor)
        tokens = self.call.tokens  # those without loss, if they are among them, may hold anything
        count, operand, size = self.count if count is None else count, self.call.work.operand_dtype, max(size, 1)
        labels, here = tokens.labels, self.opened.labels
        each: Sequence[dict[str, Tensor]] = [values]  # a part of all tokens has the values themselves
        if start or count < self.count or size < count:
            of_labels = {"labels": labels} if here is labels else {"labels": labels, "here": here}
            each = _in_parts({**values, **of_labels}, size, start, count)
        for first, of_part in zip(range(start, count, size), each, strict=False):
            rows = slice(first, min(first + size, count))
            if of_part is not values:
                labels = of_part.pop("labels")
                here = of_part.pop("here", labels)
            hidden = tokens.gather(self.opened.flat, rows.start, rows.stop)
            hidden = hidden if tokens.ignored is None else tokens.masked(hidden, rows)
            own = epilogue.rows(rows) if per_token else epilogue
            hidden = hidden if hidden.dtype == operand else hidden.to(operand)
            yield Part(rows, hidden, of_part, own, labels, here)

    def _block(self, rows: int) -> Block:
        """A block of whole rows, which remembers what gradients are taken of."""
        kind: type[Block]
        if self.call.query.comparison is not None:
            kind = TwoModels
        else:
            kind = ExponentialBlock if self.call.work.exponentials else LogitBlock
        return kind(self.opened, min(rows, self.count))

    def _block_of_statistics(self) -> Block:
        """The block of a pass that takes no gradients."""
        work, plan = self.call.work, self.call.plan
        if not work.fused and not work.walks:
            return self._block(plan.rows)
        # The tokens whose hidden states are gathered at once: all where that copies nothing, else even parts that fit.
        # A pass of gradients that follows takes more memory for each token, gathered or not.
        most = plan.tile_rows * (2 if self.call.strategy == "two_pass" and not work.walks else 1)
        parts = -(-self.count // most) if work.gathers or work.walks else 1
        return Columns(self.opened, -(-self.count // max(parts, 1)))

    def _block_of_gradients(self) -> Block:
        """The block of a pass that computes logits again for their gradients."""
        if self.call.query.needs_logits:
            return self._block(self.call.plan.rows)
        return Columns(self.opened, min(self.call.plan.tile_rows, self.count))

    def _empty_statistics(self) -> dict[str, Tensor]:
        """Memory for the statistics ``[N]`` (``selected_logps``: ``[N, k]``) of every active token."""
        call, count, device = self.call, self.count, self.opened.device
        query, wide, names = call.query, call.work.logits_dtype, ("lse", *call.outputs)
        widths: dict[str, Sequence[int]] = {}
        integers = {"argmax": torch.int64, "columns": torch.int64}
        if query.selected is not None or query.largest or query.registered:
            widths = {"registered": (len(query.registered),), "columns": (query.largest,)}
            widths["selected_logps"] = (query.largest,) if query.selected is None else query.selected.shape[1:]
            # Gradients are taken of the columns of the largest, whoever asked for them.
            names += ("columns",) if query.largest else ()
        return {
            name: torch.empty(count, *widths.get(name, ()), dtype=integers.get(name, wide), device=device)
            for name in dict.fromkeys(names)
        }
