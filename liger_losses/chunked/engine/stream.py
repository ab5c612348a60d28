"""Streams hidden states through ``lm_head`` in blocks.

Tokens whose coefficients are exactly zero take no part in the gradient products. Clipped tokens and those that a mask,
a weight or an advantage of 0 removes have an upstream gradient of 0 by every statistic. What remains is a call of fewer
tokens.

N active tokens, of which M have a coefficient; H hidden size, V vocabulary size, R rows and C columns of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.accumulation import Gradients, HeadGradients, HiddenGradients
from liger_losses.chunked.engine.blocks import Block, Columns, ExponentialBlock, Part, Upstream
from liger_losses.chunked.engine.call import Call, OpenCall
from liger_losses.chunked.engine.logit_block import LogitBlock
from liger_losses.chunked.engine.plan import blocks, even
from liger_losses.chunked.engine.query import changed
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.chunked.engine.two_models import TwoModels

#: The host waits for M only if both gradient products take at least so many floating-point operations, by the kind of
#: device: on an H200 10 ms, of which the wait is less than 1 %.
MIN_FLOPS = {"cuda": 8e12, "cpu": 1e7}
#: The largest share M / N with which the others are left out: their rows must be copied, or the whole head be read for
#: their statistics.
MOST_COUNTED = 0.98


def _in_parts(values: Mapping[str, Tensor], size: int, count: int) -> Sequence[dict[str, Tensor]]:
    """Split the values of ``count`` tokens into views of ``size`` tokens, by one operation a value."""
    found: list[dict[str, Tensor]] = [{} for _ in range(0, count, size)]
    for name, value in values.items():
        views = (value,) if len(found) == 1 else value.split(size)
        for of_part, view in zip(found, views, strict=False):  # of no tokens, there is an empty view
            of_part[name] = view
    return found


def _is_large(call: Call) -> bool:
    """Whether to wait for the number of tokens that count, on this device, in this call."""
    tokens, work, device = call.tokens, call.work, call.work.device
    # Ranks that share a vocabulary would all have to find the same number; tensors of one head follow each other.
    if call.ranks is not ALONE or len(tokens.shapes) > 1:
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return 4.0 * tokens.count * work.hidden_size * work.vocab_size >= MIN_FLOPS.get(device.type, float("inf"))


def counted_tokens(call: Call, upstream: Mapping[str, Tensor]) -> Tensor | None:
    """The tokens ``[M]`` some of whose upstream gradients ``[N]`` are not zero; ``None`` where all are multiplied."""
    if not upstream or not _is_large(call):
        return None
    each = [(g != 0).flatten(1).any(1) if g.dim() > 1 else g != 0 for g in upstream.values()]
    return _few(functools.reduce(torch.logical_or, each))


def _few(counts: Tensor) -> Tensor | None:
    """Which tokens count, in ascending order, unless these are nearly all. The host waits for their number."""
    index = counts.nonzero().squeeze(-1)
    return index if len(index) <= MOST_COUNTED * len(counts) else None


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

    def of_tokens(self, index: Tensor, losses: bool = False) -> Stream:
        """The passes over some of the tokens of one tensor of labels; with what their ``losses`` read, if asked for."""
        call, run = self.call, self.call.decision.run(self.count, gathers=True)
        known: dict[str, Any] = {name: run.known[name] for name in ("work", "plan", "grad_weight_dtype")}
        known |= {"tokens": call.tokens.subset(index), "query": call.query.subset(index, losses)}
        if isinstance(call.transform.temperature, Tensor):
            known["transform"] = replace(call.transform, temperature=call.transform.temperature[index])
        call = changed(call, **known)
        return changed(self, call=call, count=len(index), opened=self.opened.of_tokens(call))

    def gradients(
        self, values: dict[str, Tensor], upstream: Upstream, kept: Block | None, index: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """``(grad_weight, grad_bias, *grad_hidden)``: from the block of all tokens if it was kept, else recomputed.

        ``upstream`` is d loss / d statistic, ``[N]`` each; ``index [M]`` are the tokens where some are not 0, if others
        are left out.
        """
        if kept is not None:
            self.opened = kept.opened  # which has the head that was dequantized
        if index is not None:
            few = self.of_tokens(index)
            if kept is not None:
                kept.keep(index, few.opened)
            values, upstream = ({name: value[index] for name, value in each.items()} for each in (values, upstream))
            return few.gradients(values, upstream, kept)
        grads = Gradients(self.opened)
        block = self._block_of_gradients() if kept is None else kept
        known = _in_parts(upstream, max(block.rows, 1), self.count)
        for part, wanted in zip(self._parts(block.rows, values), known, strict=True):
            block.write(part, wanted, grads, filled=kept is not None)
        return grads.results()

    def statistics_and_unit_gradient(self) -> tuple[dict[str, Tensor], Tensor]:
        """Statistics, and the gradient ``[N, H]`` of the only one with respect to each token's hidden state."""
        (statistic,) = self.call.query.statistics
        values, head_grads = self._empty_statistics(), HeadGradients(self.opened)
        dtype = functools.reduce(torch.promote_types, [part.dtype for part in self.opened.hidden_states])
        shape = self.count, self.call.work.hidden_size
        unit_gradient = torch.empty(shape, dtype=dtype, device=self.opened.device)
        block = self._block(self.call.plan.rows)
        for part in self._parts(block.rows, values):
            block.fill(part)
            ones = {statistic: torch.ones_like(part.values["lse"])}
            out = unit_gradient[part.rows]
            gradient = block.gradients(part, ones, head_grads, out)
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
        counts = self.call.query.counts
        index = None if counts is None or not _is_large(self.call) else _few(counts)
        if counts is None or index is None:
            return self._token_loss()
        loss, few, gradients = self.of_tokens(index, losses=True)._token_loss()
        rest = (~counts).nonzero().squeeze(-1)
        others, _ = self.of_tokens(rest).statistics()
        values = self._empty_statistics()
        for name, value in values.items():
            value.index_copy_(0, index, few[name]).index_copy_(0, rest, others[name])
        return loss, values, gradients

    def _token_loss(self) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
        """The same, of a loss all of whose tokens are multiplied."""
        values, losses, grads = self._empty_statistics(), list[Tensor](), None
        block = self._block(even(self.count, self.call.plan.rows))
        steps = self._evaluated if self.call.query.token_weights is None else self._weighted
        for part, upstream in steps(block, values, losses):
            grads = grads or Gradients(self.opened)
            block.write(part, upstream, grads)
        every = losses[0] if len(losses) == 1 else torch.cat([values["lse"][:0], *losses])
        return every.sum(dtype=values["lse"].dtype), values, (grads or Gradients(self.opened)).results()

    # --- Their steps -----------------------------------------------------------------------------------------------

    # Both fill the block with one part after the other, and yield it with its upstream gradients. The tokens' losses
    # are appended to `losses`.

    def _evaluated(
        self, block: Block, values: dict[str, Tensor], losses: list[Tensor]
    ) -> Iterator[tuple[Part, Upstream]]:
        """Of a loss whose derivatives follow from the statistics."""
        for part in self._parts(block.rows, values):
            block.fill(part)
            each, upstream = self.call.token_losses(part.values, part.rows)
            losses.append(each)
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

    def _parts(self, size: int, values: dict[str, Tensor]) -> Iterator[Part]:
        """The active tokens, ``size`` or fewer at a time."""
        epilogue, per_token = self.opened.epilogue, isinstance(self.call.transform.temperature, Tensor)
        tokens = self.call.tokens  # those without loss, if they are among them, may hold anything
        count, operand, size = self.count, self.call.work.operand_dtype, max(size, 1)
        labels, here = tokens.labels, self.opened.labels
        each: Sequence[dict[str, Tensor]] = [values]  # a part of all tokens has the values themselves
        if size < count:
            of_labels = {"labels": labels} if here is labels else {"labels": labels, "here": here}
            each = _in_parts({**values, **of_labels}, size, count)
        for first, of_part in zip(range(0, count, size), each, strict=False):
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
