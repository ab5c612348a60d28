"""The two ways in, and the only two autograd functions: tokens go through their head in blocks.

- :func:`statistics`: numbers for each token, for losses that couple tokens. What lives until backward are blocks, if
  these fit, or the numbers alone, and backward computes logits again.
- :func:`loss_sum`: a sum of losses of single tokens. Each block's gradients are computed while its logits are there.

T tokens of a target, N of them with a label, R of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from liger_losses.caller import warn
from liger_losses.checks import check_right, check_vocabulary, see
from liger_losses.chunked.core.block import BLOCKS, Collected, Late, statistics_by_columns
from liger_losses.chunked.core.buffers import Gradients, Leaf, key_of, local_part
from liger_losses.chunked.core.checks import agree_on_call, check_call
from liger_losses.chunked.core.options import EngineOptions
from liger_losses.chunked.core.plan import (
    Plan,
    even,
    kept_together,
    padded,
    plan,
    scales_late,
    signature,
)
from liger_losses.chunked.core.saved import pack, unpack
from liger_losses.chunked.core.statistics import OF_KERNELS, Statistic, asked_for
from liger_losses.chunked.core.target import Counted, Target, TokenLoss
from liger_losses.chunked.core.teachers import Rows
from liger_losses.chunked.core.weights import Products
from liger_losses.kernels import choose_backend
from liger_losses.kernels.autograd import once_differentiable, scale_
from liger_losses.kernels.matmul import HALF_DTYPES, wide_dtype
from liger_losses.kernels.reading import label_facts, start_reading

#: Fewer rows are copied together before the gradient products if at least this share has no gradient.
DROPPED = 0.02
#: Bytes of rows that exist twice while they are moved.
MOVED_BYTES = 2**25
#: The host waits for their number only if both gradient products take so many floating-point operations, by the kind of
#: device: on an H200 10 ms, of which the wait is less than 1 %.
MIN_FLOPS = {"cuda": 8e12, "cpu": 1e7}
#: The same where the host waits anyway: what finds these rows is launched in the time of so many operations.
MIN_FLOPS_OF_LOSSES = {"cuda": 2e10, "cpu": 1e7}
_WHAT = "how many tokens carry loss; give compact=False, with which all of them are projected"

Values = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Stream:
    """The tokens of a target that are computed, block by block.

    ``index [N]`` are their places among the flattened tokens (``None`` for all), of which the first ``live`` may have
    a gradient. With ``active [T]``, tokens without a label are among them, and their numbers are 0.
    """

    target: Target
    asked: tuple[Statistic, ...]
    plan: Plan
    index: Tensor | None
    count: int
    live: int
    active: Tensor | None

    def open(self) -> Stream:
        """The same with heads that are cast or dequantized, where this is done for all columns together."""
        target, products = self.target, Products(self.plan.dtype, self.plan.copied_columns, self.plan.invariant)
        teacher = target.teacher
        if isinstance(teacher, Target):
            teacher = replace(teacher, head=teacher.head.open(products))
        return replace(self, target=replace(target, head=target.head.open(products), teacher=teacher))

    def places(self, chosen: Rows) -> Rows:
        """Where some of the N tokens are among all T."""
        if self.index is not None:
            return self.index[chosen]
        return chosen

    def part(self, chosen: Rows) -> Target:
        """The tokens of a block, in the operands' dtype."""
        rows = self.places(chosen)
        if callable(getattr(self.target.teacher, "logits", None)) and isinstance(rows, slice):
            rows = torch.arange(*rows.indices(self.target.labels.numel()), device=self.target.labels.device)
        part = self.target.take(rows)
        if self.active is not None:
            part = part.neutral(self.active[rows])
        return part.to(self.plan.dtype)

    def blocks(self, start: int, stop: int, *, trains: bool = True) -> Iterator[tuple[slice, Any]]:
        """Blocks of the tokens ``start`` to ``stop``, with statistics, and what gradients need where it ``trains``."""
        block = self.plan.block if trains else self.plan.first
        for rows in slices(start, stop, even(stop - start, self.plan.part_rows)):
            yield rows, block(self.part(rows), self.asked, self.plan)

    def collected(self, rows: slice) -> Collected | None:
        """Where the gradients of these tokens are collected, if there are logits of fewer at a time."""
        if self.plan.part_rows >= rows.stop - rows.start or self.plan.part_rows == self.plan.rows:
            return None
        count, weights = rows.stop - rows.start, self.target.head.weights
        memory = torch.empty(count, padded(weights.columns), dtype=self.plan.dtype, device=weights.device)
        return Collected(memory, slice(0, 0))

    def masked(self, values: Values, rows: Rows) -> Values:
        """0 for tokens without a label, where these are among the tokens."""
        return values if self.active is None else only(self.active[rows], values)

    def empty(self) -> Values:
        """Statistics of no tokens."""
        labels, wide = self.target.labels, wide_dtype(self.plan.dtype)
        selected = self.target.selected
        k = selected.shape[-1] if isinstance(selected, Tensor) else selected or 0
        return {
            s.name: torch.zeros(
                (0, k) if s.name in ("selected_logps", "selected_logits", "columns") else (0,),
                dtype=torch.int64 if s.name in ("columns", "argmax") else wide,
                device=labels.device,
            )
            for s in self.asked
        }

    def spread(self, values: Tensor) -> Tensor:
        """From ``[N, ...]`` to all tokens, in the labels' shape; 0 for those without a label."""
        shape = self.target.labels.shape
        if self.index is not None:
            values = values.new_zeros(shape.numel(), *values.shape[1:]).index_copy(0, self.index, values)
        return values.view(*shape, *values.shape[1:])

    def gathered(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`spread`."""
        values = values.flatten(0, self.target.labels.dim() - 1)
        return values if self.index is None else values[self.index]

    def add_hidden(self, grads: Gradients, chosen: Rows, values: Tensor | None) -> None:
        """Add gradients ``[R, H]`` of some of the N tokens."""
        total = grads.of(self.target.hidden)
        if total is None or values is None:
            return
        rows, total = self.target.places(self.places(chosen)), total.view(-1, total.shape[-1])
        if isinstance(rows, slice):
            total[rows].add_(values)
        else:
            total.index_add_(0, rows, values.to(total.dtype))


def only(active: Tensor, values: Values) -> Values:
    """0 for tokens that are not active ``[R]``."""
    return {n: torch.where(active if v.dim() == 1 else active[:, None], v, 0) for n, v in values.items()}


def slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size``."""
    for first in range(start, stop, max(size, 1)):
        yield slice(first, min(first + size, stop))


def cut(value: Any, live: Live, count: int) -> Any:
    """Some rows of all tensors in a block (or dictionary) that have ``count``; those of matrices are moved in their
    memory, some at a time."""
    if isinstance(value, Tensor):
        if not value.dim() or len(value) != count:
            return value
        if value.dim() == 1:
            return value[live.order]
        for at in slices(0, len(live.places), MOVED_BYTES // (value.stride(0) * value.itemsize)):
            value[live.places[at]] = value[live.from_end[at]]
        return value[: len(live.order)]
    if isinstance(value, dict):
        return {name: cut(item, live, count) for name, item in value.items()}
    if hasattr(value, "constants"):
        return replace(value, **{f.name: cut(getattr(value, f.name), live, count) for f in fields(value)})
    return value


# --- From targets to streams ----------------------------------------------------------------------------------------


def open_streams(
    targets: Sequence[Target],
    asked: tuple[Statistic, ...],
    options: EngineOptions,
    lives: Sequence[Tensor | None] | None = None,
) -> list[Stream]:
    """Find the tokens with a label, for which the host waits once, and plan; ``lives`` are those of losses of single
    tokens."""
    table, couples = tuple(BLOCKS), lives is None
    actives: list[Tensor | None] = [None] * len(targets)
    if options.compact:
        pays = [is_large(target, target.labels.numel(), MIN_FLOPS_OF_LOSSES) for target in targets]
        lives = lives and [live if large else None for live, large in zip(lives, pays, strict=True)]
        targets = counted(targets, options, lives)
    else:
        actives = [checked_labels(target, options.ignore_index) for target in targets]
    tokens = [target.counted or Counted(None, n := target.labels.numel(), n, (0, 0)) for target in targets]
    targets = [replace(target, counted=None) for target in targets]
    pairs = zip(targets, tokens, strict=True)
    calls = [signature(target, asked, options, of_target, couples=couples) for target, of_target in pairs]
    calls = kept_together(calls, table)
    streams = [
        Stream(target, asked, plan(call, table), of_target.index, of_target.count, of_target.live, active)
        for target, call, of_target, active in zip(targets, calls, tokens, actives, strict=True)
    ]
    parts: dict[object, list[tuple[int, int]]] = {}
    for stream in streams:
        for key in _half_sums(stream, options):
            parts.setdefault(key, []).append((-(-stream.live // stream.plan.rows), stream.plan.parts))
    many = {
        key: len(pairs) for key, pairs in parts.items() if sum(n for n, _ in pairs) > min(most for _, most in pairs)
    }
    for i, stream in enumerate(streams if many else ()):
        sharing = max([many.get(key, 0) for key in _half_sums(stream, options)], default=0)
        streams[i] = replace(stream, plan=plan(replace(calls[i], sharing=sharing), table))
        bound = options.workspace or calls[i].bound
        if bound is not None and streams[i].plan.accumulate is not None:
            warn(
                f"a workspace of {bound} bytes has no room for the tokens in few enough parts. To be exact, the "
                "gradient of the weight is accumulated in fp32, in a buffer beyond the workspace. Pass a larger "
                "workspace, or accum_dtype=torch.float32 to allow it." + see("workspace")
            )
    return streams


def _half_sums(stream: Stream, options: EngineOptions) -> list[object]:
    """The matrices whose gradients add up in half precision."""
    if options.accum_dtype is not None or not torch.is_grad_enabled() or stream.target.sparse_grad:
        return []
    trained = [tensor for tensor, _ in stream.target.head.weights.trained if tensor.requires_grad]
    return [key_of(tensor) for tensor in trained if tensor.dtype in HALF_DTYPES]


def is_large(target: Target, count: int, least: dict[str, float]) -> bool:
    """Whether the gradient products of so many tokens take more operations than what is written for their device."""
    hidden, kept = target.hidden, target.kept
    flops = 4.0 * count * hidden.shape[-1] * (target.head.weights.columns if kept is None else kept.shape[-1])
    return flops >= least.get(hidden.device.type, float("inf"))


def checked_labels(target: Target, ignore_index: int) -> Tensor:
    """Which tokens ``[T]`` have a label; an error on the device for a label outside of the vocabulary."""
    labels = target.labels.detach().reshape(-1)
    active = labels != ignore_index
    right = ((labels >= 0) & (labels < target.vocab_size)) | ~active
    check_right(right.all(), labels, target.vocab_size, ignore_index)
    return active


def counted(
    targets: Sequence[Target], options: EngineOptions, lives: Sequence[Tensor | None] | None = None
) -> list[Target]:
    """The targets with which of their tokens have a label, for which the host waits once if it is not known."""
    masks = lives or [None] * len(targets)
    if any(target.counted is None for target in targets) or any(mask is not None for mask in masks):
        targets = _count(targets, options.ignore_index, options.backend, masks)
    for target in targets:
        assert target.counted is not None
        check_vocabulary([*target.counted.extremes], target.vocab_size, options.ignore_index)
    return list(targets)


def counted_once(targets: Sequence[Target], options: EngineOptions) -> list[Target]:
    """The same, before calls with several models of the same tokens, each of which would wait."""
    if not options.compact or is_dynamo_compiling() or any(target.head.ranks.size > 1 for target in targets):
        return list(targets)  # ranks first agree on a call; an operator counts when it runs
    return counted(targets, options)


def _count(
    targets: Sequence[Target], ignore_index: int, backend: str | None, lives: Sequence[Tensor | None]
) -> list[Target]:
    labels = [target.labels.detach().reshape(-1).contiguous() for target in targets]  # as kernels read them
    backend = choose_backend(backend, [(labels[0].device, torch.float32)])
    facts = label_facts(labels, ignore_index, backend=backend)
    masks = [
        None if live is None else live.reshape(-1) & (y != ignore_index) for y, live in zip(labels, lives, strict=True)
    ]
    if any(mask is not None for mask in masks):
        counts = torch.stack([facts[i, 0] if mask is None else mask.sum() for i, mask in enumerate(masks)])
        facts = torch.cat([facts, counts[:, None]], 1)
    numbers = start_reading(facts, _WHAT)()
    found = list[Target]()
    for target, y, mask, (count, low, high, *more) in zip(targets, labels, masks, numbers, strict=True):
        live = more[0] if more else count
        index = None if count == len(y) else torch.nonzero_static(y != ignore_index, size=count)[:, 0]
        if mask is not None and live < count:
            dead = ~mask & (y != ignore_index)
            pair = (torch.nonzero_static(mask, size=live), torch.nonzero_static(dead, size=count - live))
            index = torch.cat(pair)[:, 0]
        found.append(replace(target, counted=Counted(index, count, live, (low, high))))
    return found


def leaves_of(streams: Sequence[Stream]) -> list[Leaf]:
    """All that is trained, each once: the dtype in which it adds up is the widest that a plan asks for."""
    leaves: dict[int, Leaf] = {}
    for stream in streams if torch.is_grad_enabled() else ():
        for leaf in stream.target.leaves(stream.plan.accumulate):
            known = leaves.get(id(leaf.tensor))
            if known is None or (known.accumulate is None and leaf.accumulate is not None):
                leaves[id(leaf.tensor)] = leaf
    return list(leaves.values())


class _Alone(ExitStack):
    """Autocast is off, the device of the call current, and nothing is recorded."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        kind = tensor.device.type
        self.enter_context(torch.no_grad())
        self.enter_context(torch.cuda.device_of(tensor))
        if torch.is_autocast_enabled(kind):
            self.enter_context(torch.autocast(kind, enabled=False))


# --- Statistics -----------------------------------------------------------------------------------------------------


class _Statistics(torch.autograd.Function):
    """Statistics of tokens; backward has their blocks still, or computes them again."""

    @staticmethod
    def forward(
        ctx: Any, streams: list[Stream], known: list[Values], leaves: list[Leaf], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, constants, kept = list[Tensor](), list[Values](), list[list[Any]]()
        with _Alone(streams[0].target.hidden):
            for stream, values in zip(streams, known or [{}] * len(streams), strict=True):
                tiles = stream.plan.tile is not None
                if values and (not tiles or {s.name for s in stream.asked} <= {*OF_KERNELS}):
                    constants.append(values if tiles else {})
                    kept.append([])
                    outputs += [values[s.name] for s in stream.asked]
                    continue
                blocks, parts, opened = list[Any](), list[Values](), stream.open()
                if stream.plan.walks:
                    for rows in slices(0, stream.count, stream.plan.rows):
                        parts.append(statistics_by_columns(opened.part(rows), stream.asked, stream.plan))
                for rows, block in (
                    () if stream.plan.walks else opened.blocks(0, stream.count, trains=stream.plan.keeps)
                ):
                    parts.append(block.constants)
                    if stream.plan.keeps:
                        blocks.append((rows, replace(block, part=None, constants={})))
                    del block  # its memory is free before the next one's is allocated
                constants.append(concatenated(parts or [stream.empty()]))
                kept.append(blocks)
                of_stream = stream.masked(constants[-1], slice(None))
                outputs += [of_stream[s.name].clone() for s in stream.asked]
                del opened  # what it has dequantized is free before the next target's is
        saved = [leaf.tensor for leaf in leaves]
        ctx.packed = pack((streams, constants, kept), saved)
        ctx.leaves, ctx.used = [leaf[1:] for leaf in leaves], False
        ctx.save_for_backward(*saved)
        trained = [s.differentiable and bool(stream.target.leaves()) for stream in streams for s in stream.asked]
        ctx.mark_non_differentiable(*[out for out, on in zip(outputs, trained, strict=True) if not on])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        leaves = [Leaf(tensor, *rest) for tensor, rest in zip(saved, ctx.leaves, strict=False)]
        # Gradients take the memory of blocks: a second backward computes these again. `data` shares memory, and not
        # the count of changes by which autograd would then refuse to give what else was saved.
        again, ctx.used = ctx.used, True
        streams, constants, kept = unpack(ctx.packed, saved)
        grads, upstreams, first = Gradients(leaves), list[Values](), 0
        for stream in streams:
            pairs = zip(stream.asked, upstream[first : first + len(stream.asked)], strict=True)
            wanted = {s.name: g for s, g in pairs if g is not None and stream.plan.trains}
            upstreams.append(stream.masked(wanted, slice(None)))
            first += len(stream.asked)
        with _Alone(streams[0].target.hidden):
            lives = live_rows(streams, upstreams)
            for stream, of_rows, values, blocks, live in zip(streams, constants, upstreams, kept, lives, strict=True):
                if values and blocks and not again:
                    _from_blocks(stream, blocks, of_rows, values, live, grads)
                elif values:
                    _again(stream, of_rows, values, live, grads)
            return None, None, None, *grads.results()


def concatenated(parts: list[Values]) -> Values:
    """Values of consecutive tokens."""
    first = parts[0]
    return first if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in first}


class Live(NamedTuple):
    """The tokens that have a gradient, of which most of the first stay in their places: those from the end take the
    places, among these, of tokens without one."""

    order: Tensor
    places: Tensor
    from_end: Tensor


def live_rows(streams: Sequence[Stream], upstream: Sequence[Values]) -> list[Live | None]:
    """Of each stream the tokens that have a gradient, ``None`` for all: the host waits for all numbers at once."""
    masks: dict[int, Tensor] = {}
    for i, (stream, values) in enumerate(zip(streams, upstream, strict=True)):
        capturing = stream.target.hidden.is_cuda and torch.cuda.is_current_stream_capturing()
        # Ranks that share a vocabulary would all have to find the same number.
        waits = stream.target.head.ranks.size == 1 and stream.active is None and not capturing
        if values and waits and stream.count and is_large(stream.target, stream.count, MIN_FLOPS):
            masks[i] = torch.stack(
                [(g != 0).flatten(1).any(1) if g.dim() > 1 else g != 0 for g in values.values()]
            ).any(0)
    if not masks:
        return [None] * len(streams)
    numbers = list[Tensor]()
    for mask in masks.values():
        total = mask.cumsum(0)
        first = total.index_select(0, (total[-1:] - 1).clamp(min=0))  # how many of as many first tokens are live
        numbers.append(torch.cat([total[-1:], total[-1:] - first]))
    lives: list[Live | None] = [None] * len(streams)
    for (i, mask), (count, moved) in zip(masks.items(), start_reading(torch.stack(numbers), _WHAT)(), strict=True):
        if count <= (1 - DROPPED) * streams[i].count:
            places = torch.nonzero_static(~mask[:count], size=moved)[:, 0]
            from_end = torch.nonzero_static(mask[count:], size=moved)[:, 0] + count
            index = torch.arange(count, device=mask.device).index_copy_(0, places, from_end)
            lives[i] = Live(index, places, from_end)
    return lives


def _from_blocks(
    stream: Stream, blocks: list[Any], constants: Values, upstream: Values, live: Live | None, grads: Gradients
) -> None:
    """Gradients of blocks that have lived until now, as one block each, or as that of the tokens that have any."""
    opened = stream.open()
    for rows, block in blocks:
        kept = data_of(block)
        chosen: Rows = rows
        if live is not None:  # blocks that are kept are one
            kept, chosen = cut(kept, live, rows.stop - rows.start), live.order
        of_rows = {name: value[chosen] for name, value in constants.items()}
        kept = replace(kept, part=opened.part(chosen), constants=of_rows)
        values = {name: g[chosen] for name, g in upstream.items()}
        opened.add_hidden(grads, chosen, kept.add_gradients(values, grads))
        if kept.late is not None:
            kept.late.add(kept.part, kept.late.values, grads)


def data_of(block: Any) -> Any:
    """A block whose tensors may be written to, although they are saved."""
    return replace(block, **{f.name: v.data for f in fields(block) if isinstance(v := getattr(block, f.name), Tensor)})


def _again(stream: Stream, constants: Values, upstream: Values, live: Live | None, grads: Gradients) -> None:
    """Gradients of tokens whose logits are gone: of those that have any, by blocks or by tiles.

    Without ``constants``, a block has its own.
    """
    count = stream.count if live is None else len(live.order)
    opened, tile = stream.open(), stream.plan.tile
    size = stream.plan.rows if tile is None else tile[0]
    for rows in slices(0, count, even(count, size)):
        chosen: Rows = rows if live is None else live.order[rows]
        part = opened.part(chosen)
        of_rows = {name: value[chosen] for name, value in constants.items()} or None
        values = {name: g[chosen] for name, g in upstream.items()}
        hidden: Tensor | None = None
        columns = part.head.weights.columns
        for here in slices(0, columns, columns if tile is None else tile[1]):
            block = stream.plan.block(part, stream.asked, stream.plan, of_rows, here)
            hidden = block.add_gradients(values, grads, *([] if hidden is None else [hidden]))
            if block.late is not None:
                block.late.add(part, block.late.values, grads)
            del block
        opened.add_hidden(grads, chosen, hidden)


# --- Losses of single tokens ----------------------------------------------------------------------------------------


class _Losses(torch.autograd.Function):
    """A sum of losses of single tokens: each block's gradients are computed while its logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        streams: list[Stream],
        losses: list[TokenLoss],
        names: list[list[str]],
        leaves: list[Leaf],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with _Alone(streams[0].target.hidden):
            total, outputs, ctx.gradients = _run(streams, losses, leaves)
        saved = [leaf.tensor for leaf in leaves]
        ctx.packed, ctx.leaves = pack((streams, losses), saved), [leaf[1:] for leaf in leaves]
        ctx.save_for_backward(*saved)
        names += [list(values) for values in outputs]
        flat = [value for values in outputs for value in values.values()]
        ctx.mark_non_differentiable(*flat)
        return total, *flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        with _Alone(upstream):
            if gradients is None:  # the first backward scaled them, and gave them away
                saved = list(ctx.saved_tensors)
                leaves = [Leaf(tensor, *rest) for tensor, rest in zip(saved, ctx.leaves, strict=False)]
                streams, losses = unpack(ctx.packed, saved)
                gradients = _run(streams, losses, leaves)[2]
            return None, None, None, None, *[scaled(g, upstream) for g in gradients]


def scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """A gradient times a factor, in its memory."""
    if gradient is None or gradient.layout != torch.strided:
        return gradient if gradient is None else gradient * factor
    local = local_part(gradient)
    scale_(factor, [local], backend=choose_backend(None, [local]))
    return gradient


def _run(
    streams: Sequence[Stream], losses: Sequence[TokenLoss], leaves: Sequence[Leaf]
) -> tuple[Tensor, list[Values], list[Tensor | None]]:
    """The sum of losses, the numbers of each stream's tokens, and the gradient of each leaf."""
    grads, outputs = Gradients(leaves), list[Values]()
    totals = [torch.zeros((), dtype=wide_dtype(streams[0].plan.dtype), device=streams[0].target.hidden.device)]
    for stream, loss in zip(streams, losses, strict=True):
        parts, opened, lates = list[Values](), stream.open(), list[tuple[slice, Late]]()
        for start, stop in ((0, stream.live), (stream.live, stream.count)):
            for together in slices(start, stop, even(stop - start, stream.plan.rows)):
                trains = stream.plan.trains and start < stream.live
                collected = opened.collected(together) if trains else None
                for rows, block in opened.blocks(together.start, together.stop, trains=trains):
                    values = stream.masked(block.statistics(), rows)
                    total, upstream, more = token_losses(stream, loss, values, rows, trains)
                    totals.append(total)
                    parts.append(values | more)
                    if collected is not None:
                        at = slice(rows.start - together.start, rows.stop - together.start)
                        collected.take(block, upstream, grads, at)
                    elif upstream:
                        opened.add_hidden(grads, rows, block.add_gradients(upstream, grads))
                        lates += [] if block.late is None else [(rows, block.late)]
                    del block
                if collected is not None:
                    hidden = collected.add_gradients(opened.part(together), stream.plan, grads)
                    opened.add_hidden(grads, together, hidden)
                    del collected
        if not stream.count:
            values = stream.empty()
            parts = [values | token_losses(stream, loss, values, slice(0, 0), False)[2]]
        outputs.append(concatenated(parts))
        if lates:
            _add_late(stream, lates, grads)
        del opened  # what it has dequantized is free before the next target's is
    return torch.stack(totals).sum(), outputs, grads.results()


def _add_late(stream: Stream, lates: list[tuple[slice, Late]], grads: Gradients) -> None:
    """Of the first tokens, as many at a time as have hidden states that fit the memory of a block."""
    weights, add = stream.target.head.weights, lates[0][1].add
    values = lates[0][1].values.new_zeros(stream.live)  # blocks whose losses have no derivative have none
    for rows, late in lates:
        values[rows] = late.values
    for rows in slices(0, stream.live, stream.plan.rows * weights.columns // weights.hidden_size):
        add(stream.part(rows), values[rows], grads)


def token_losses(
    stream: Stream, loss: TokenLoss, values: Values, rows: slice, differentiates: bool
) -> tuple[Tensor, Values, Values]:
    """The sum of the losses of some tokens, their derivatives by each statistic, and further numbers."""
    named = {s.name for s in stream.asked if s.differentiable}
    leaves = {n: v.detach().requires_grad_(differentiates and n in named) for n, v in values.items()}
    with torch.set_grad_enabled(differentiates):
        losses, derivatives, more = loss(leaves, stream.places(rows), stream.target.labels.dim())
        losses = losses if stream.active is None else torch.where(stream.active[rows], losses, 0.0)
        total = losses.sum(dtype=wide_dtype(losses.dtype))
    if differentiates and derivatives is None:
        wanted = [n for n in leaves if n in named] if total.requires_grad else []
        grads = torch.autograd.grad(total, [leaves[n] for n in wanted], allow_unused=True) if wanted else ()
        derivatives = {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}
    upstream = (
        {n: g.detach().to(wide_dtype(stream.plan.dtype)) for n, g in (derivatives or {}).items()}
        if differentiates
        else {}
    )
    more = stream.masked({n: v.detach() for n, v in more.items()}, rows)
    # Masked again: where a loss is not finite, not even 0 times its derivative is.
    return total.detach().to(wide_dtype(stream.plan.dtype)), stream.masked(upstream, rows), more


def of_values(loss: TokenLoss, values: Values, rows: Rows, dims: int, active: Tensor | None) -> tuple[Tensor, Values]:
    """The sum of the losses of all tokens, differentiable by their statistics, and their numbers.

    The tokens are these ``rows`` of labels that have so many dimensions.
    """
    losses, derivatives, more = loss(values, rows, dims)
    losses = losses if derivatives is None else losses.detach()
    for name, g in (derivatives or {}).items():
        terms = g.detach() * (values[name] - values[name].detach())
        losses = losses + (terms.sum(-1) if terms.dim() > 1 else terms)
    if active is not None:
        losses, more = torch.where(active, losses, 0.0), only(active, more)
    return losses.sum(dtype=wide_dtype(losses.dtype)), {n: v.detach() for n, v in (values | more).items()}


# --- The two ways in ------------------------------------------------------------------------------------------------


def _in_order(streams: Sequence[Stream], outputs: Sequence[Tensor]) -> list[Values]:
    ordered, left = list[Values](), list(outputs)
    for stream in streams:
        ordered.append(dict(zip([s.name for s in stream.asked], left, strict=False)))
        del left[: len(stream.asked)]
    return ordered


def statistics(
    targets: Sequence[Target],
    names: Sequence[str | Statistic],
    options: EngineOptions = EngineOptions(),
    metrics: Sequence[str | Statistic] = (),
    known: Sequence[Tensor] = (),
) -> list[Values]:
    """Statistics of the tokens of each target by name, in the labels' shape, differentiable; 0 without a label.

    Args:
        targets: one or several, whose heads may share tensors: each has one gradient.
        names: of :data:`STATISTICS`, or instances of :class:`Statistic`.
        options: see :class:`EngineOptions`.
        metrics: further names, without a gradient.
        known: all of these, of the same call before: then they are computed again only where their gradients are.

    Raises:
        ValueError: labels outside the vocabulary; a workspace that cannot hold one row.
        RuntimeError: within a transform of ``torch.func``, or forward-mode differentiation.
    """
    check_call(targets)
    asked = asked_for(names, metrics)
    agree_on_call(targets, asked, options, sums_losses=False)
    streams = open_streams(targets, asked, replace(options, keep=0) if known else options)
    leaves, left = leaves_of(streams), iter(known)
    before = [{s.name: stream.gathered(next(left)) for s in asked} for stream in streams] if known else []
    outputs = _Statistics.apply(streams, before, leaves, *(leaf.tensor for leaf in leaves))
    return [
        {name: stream.spread(value) for name, value in values.items()}
        for stream, values in zip(streams, _in_order(streams, outputs), strict=True)
    ]


def loss_sum(
    targets: Sequence[Target],
    names: Sequence[str | Statistic],
    token_losses: Sequence[TokenLoss],
    options: EngineOptions = EngineOptions(),
    metrics: Sequence[str | Statistic] = (),
) -> tuple[Tensor, list[Values]]:
    """The sum of the losses of all tokens, 0-dim, and detached statistics of each target as :func:`statistics`.

    Gradients are computed together with the loss, but where these would be inexact: fp16 needs the loss's scale, which
    is known in backward, and of more parts in half precision than a plan allows, a second pass writes each entry once.
    """
    check_call(targets)
    asked = asked_for(names, metrics)
    agree_on_call(targets, asked, options, sums_losses=True)
    streams = open_streams(targets, asked, options, [loss.live for loss in token_losses])
    leaves, order = leaves_of(streams), list[list[str]]()
    pairs = list(zip(streams, token_losses, strict=True))
    late = leaves and any(stream.plan.tile is not None or scales_late(stream.target) for stream in streams)
    if late or any(stream.plan.walks for stream in streams):
        outputs = _Statistics.apply(streams, [], leaves, *(leaf.tensor for leaf in leaves))
        named = _in_order(streams, outputs)
        sums = [
            of_values(loss, values, stream.places(slice(0, stream.count)), stream.target.labels.dim(), stream.active)
            for (stream, loss), values in zip(pairs, named, strict=True)
        ]
        total = torch.stack([loss for loss, _ in sums]).sum().to(wide_dtype(streams[0].plan.dtype))
        numbers = [values for _, values in sums]
    else:
        total, *outputs = _Losses.apply(streams, list(token_losses), order, leaves, *(leaf.tensor for leaf in leaves))
        left = iter(outputs)
        numbers = [{name: next(left) for name in of_target} for of_target in order]
    return total, [
        {name: stream.spread(value) for name, value in values.items()}
        for stream, values in zip(streams, numbers, strict=True)
    ]
