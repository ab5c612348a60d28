"""The two ways in, and the only two autograd functions: tokens go through their head in blocks.

- :func:`statistics`: numbers for each token, for losses that couple tokens. What lives until backward are blocks, if
  these fit, or the numbers alone, and backward computes logits again.
- :func:`loss_sum`: a sum of losses of single tokens. Each block's gradients are computed while its logits are there.

T tokens of a target, N of them with a label, R of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from liger_losses.caller import warn
from liger_losses.checks import check_right, check_vocabulary, see
from liger_losses.chunked.core.block import PLANNERS, statistics_by_columns
from liger_losses.chunked.core.buffers import Gradients, Leaf, key_of, local_part
from liger_losses.chunked.core.checks import check_call
from liger_losses.chunked.core.options import EngineOptions
from liger_losses.chunked.core.plan import Plan, computed_dtype, plans, scales_late, signature, slices
from liger_losses.chunked.core.saved import pack, unpack
from liger_losses.chunked.core.statistics import OF_KERNELS, Statistic, asked_for
from liger_losses.chunked.core.target import Counted, Rows, Target, TokenLoss
from liger_losses.chunked.core.weights import ALL
from liger_losses.kernels import choose_backend
from liger_losses.kernels._triton import device_of
from liger_losses.kernels.autograd import once_differentiable, scale_
from liger_losses.kernels.matmul import HALF_DTYPES, wide_dtype
from liger_losses.kernels.reading import label_facts, start_reading

#: Tokens that have a gradient are moved together before the gradient products if at least this share has none.
DROPPED = 0.1
#: Bytes of rows that exist twice while they are moved.
MOVED_BYTES = 2**25
#: The host waits for their number only if both gradient products take so many floating-point operations, by the kind of
#: device: on an H200 10 ms, of which the wait is less than 1 %.
MIN_FLOPS = {"cuda": 8e12, "cpu": 1e7}
_WHAT = "how many tokens carry loss; give compact=False, with which all of them are projected"

Values = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Stream:
    """The tokens of a target that have a label, and how they are computed.

    Where all tokens are computed, the numbers of those without a label are 0.
    """

    target: Target
    tokens: Counted
    asked: tuple[Statistic, ...]
    plan: Plan

    def open(self, plan: Plan) -> Stream:
        """The same for a pass of this plan: its heads are cast or dequantized once, where all rows fit."""
        return replace(self, target=self.target.open(plan.products), plan=plan)

    def places(self, rows: Rows) -> Rows:
        """Where some of the N tokens are among all T."""
        return rows if self.tokens.index is None else self.tokens.index[rows]

    def part(self, places: Rows, compares: bool = True) -> Target:
        """The tokens at these places, in the operands' dtype, with a teacher's logits unless these were read before."""
        active = self.tokens.active
        active = None if active is None else active[places]
        return self.target.take(places, active, self.plan.products.dtype, compares=compares)

    def add_hidden(self, grads: Gradients, places: Rows, values: Tensor | None) -> None:
        """Add gradients ``[R, H]`` of the hidden states of the tokens at these places."""
        if values is not None:
            grads.buffers[id(self.target.hidden)].add_states(self.target.places(places), values)

    def masked(self, values: Values, places: Rows = ALL) -> Values:
        """0 for tokens without a label, where these are among the tokens."""
        return values if self.tokens.active is None else only(self.tokens.active[places], values)

    def spread(self, values: Values) -> Values:
        """From ``[N, ...]`` to all tokens, in the labels' shape; 0 for those without a label."""
        return spread(values, self.tokens.index, self.target.labels.shape)

    def gathered(self, values: Values) -> Values:
        """The inverse of :meth:`spread`."""
        flat = {name: value.flatten(0, self.target.labels.dim() - 1) for name, value in values.items()}
        return flat if self.tokens.index is None else rows_in(flat, self.tokens.index)


def spread(values: Values, index: Tensor | None, shape: torch.Size) -> Values:
    """Values of the tokens at this index (``None`` for all) in the labels' shape, 0 for others."""
    of_all: Values = {}
    for name, value in values.items():
        if index is not None:
            value = value.new_zeros(shape.numel(), *value.shape[1:]).index_copy_(0, index, value)
        of_all[name] = value.view(*shape, *value.shape[1:])
    return of_all


def only(active: Tensor, values: Values) -> Values:
    """0 for tokens that are not active ``[R]``."""
    return {n: torch.where(active if v.dim() == 1 else active[:, None], v, 0) for n, v in values.items()}


# --- From targets to streams ----------------------------------------------------------------------------------------


def open_streams(
    targets: Sequence[Target],
    asked: tuple[Statistic, ...],
    options: EngineOptions,
    trained: Sequence[Tensor | None] | None = None,
) -> tuple[list[Stream], list[Leaf]]:
    """Find the tokens with a label, for which the host waits once, and plan; what is trained, each tensor once.

    Of losses of single tokens, ``trained`` says which tokens may have a gradient.
    """
    targets = counted(targets, options, trained)
    leaves = [target.leaves() if torch.is_grad_enabled() else [] for target in targets]
    late, calls, heads, numbers = trained is None, [], [], dict[object, int]()
    for target, of_target in zip(targets, leaves, strict=True):
        late = late or (bool(of_target) and scales_late(target.hidden, of_target))
        halves = list[int]()
        for leaf in () if target.sparse_grad else of_target:
            if leaf.accumulate is None and leaf.tensor.dtype in HALF_DTYPES:
                halves.append(numbers.setdefault(key_of(leaf.tensor), len(numbers)))
        heads.append(tuple(halves))
    for target, of_target in zip(targets, leaves, strict=True):
        calls.append(signature(target, of_target, asked, options, gradients_in_backward=late))
    streams, of_all, beyond = list[Stream](), dict[int, Leaf](), False
    made = plans(tuple(calls), tuple(heads), tuple(PLANNERS))
    for target, of_target, plan in zip(targets, leaves, made, strict=True):
        assert target.counted is not None
        streams.append(Stream(target, target.counted, asked, plan))
        beyond = beyond or plan.beyond_workspace
        for leaf in of_target:  # the widest dtype that a plan asks for
            known = of_all.setdefault(id(leaf.tensor), leaf)
            dtype = leaf.accumulate or plan.accumulate
            if known.accumulate is None and dtype is not None:
                of_all[id(leaf.tensor)] = replace(known, accumulate=dtype)
    if beyond:
        warn(
            f"a workspace of {calls[0].workspace} bytes has no room for the tokens in few enough parts. To be exact, "
            "the gradient of the weight is accumulated in fp32, in a buffer beyond the workspace. Pass a larger "
            "workspace, or accum_dtype=torch.float32 to allow it." + see("workspace")
        )
    return streams, list(of_all.values())


def checked_labels(target: Target, ignore_index: int) -> Counted:
    """All tokens, and which of them have a label; an error on the device for a label outside of the vocabulary."""
    labels = target.labels.reshape(-1)
    active = labels != ignore_index
    right = ((labels >= 0) & (labels < target.vocab_size)) | ~active
    check_right(right.all(), labels, target.vocab_size, ignore_index)
    return replace(Counted.of_all(len(labels)), active=active)


def counted(
    targets: Sequence[Target], options: EngineOptions, trained: Sequence[Tensor | None] | None = None
) -> list[Target]:
    """The targets with which of their tokens have a label, for which the host waits once if it is not known.

    ``trained`` are masks in the labels' shape of tokens that may have a gradient.
    """
    ignored = options.ignore_index
    if not options.compact:
        return [replace(target, counted=checked_labels(target, ignored)) for target in targets]
    masks = [None] * len(targets) if trained is None else trained
    of_all = list(targets)
    if None in [target.counted for target in targets] or [mask for mask in masks if mask is not None]:
        of_all = _count(targets, ignored, options.backend, masks)
    for target in of_all:
        assert target.counted is not None
        check_vocabulary(target.counted.extremes, target.vocab_size, ignored)
    return of_all


def counted_once(targets: Sequence[Target], options: EngineOptions) -> list[Target]:
    """The same, before calls with several models of the same tokens, each of which would wait."""
    if not options.compact or is_dynamo_compiling() or any(target.head.ranks.size > 1 for target in targets):
        return list(targets)  # ranks first agree on a call; an operator counts when it runs
    return counted(targets, options)


def _count(
    targets: Sequence[Target], ignored: int, backend: str | None, masks: Sequence[Tensor | None]
) -> list[Target]:
    labels = [target.labels.reshape(-1).contiguous() for target in targets]  # as kernels read them
    backend = choose_backend(backend, [(labels[0].device, torch.float32)])
    masks = [mask if mask is None else mask.reshape(-1).contiguous() for mask in masks]
    facts = label_facts(labels, ignored, masks, backend=backend)
    of_all = list[Target]()
    for target, y, mask, numbers in zip(targets, labels, masks, start_reading(facts, _WHAT)(), strict=True):
        (count, low, high, trained), index = numbers, None
        if mask is not None and trained < count:
            active = y != ignored
            parts = ((active & mask, trained), (active & ~mask, count - trained))
            index = torch.cat([torch.nonzero_static(part, size=size) for part, size in parts])[:, 0]
        elif count < len(y):
            index = torch.nonzero_static(y != ignored, size=count)[:, 0]
        of_all.append(replace(target, counted=Counted(index, count, trained, (low, high))))
    return of_all


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


# --- Statistics -----------------------------------------------------------------------------------------------------


class _Statistics(torch.autograd.Function):
    """Statistics of tokens; backward has their blocks still, or computes them again."""

    @staticmethod
    def forward(
        ctx: Any, streams: list[Stream], leaves: list[Leaf], known: list[Values], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, constants, blocks, fixed = list[Tensor](), list[Values](), list[Any](), list[Tensor]()
        with device_of(streams[0].target.hidden), _without_autocast(streams[0].target.hidden.device):
            for stream, values in zip(streams, known or [{}] * len(streams), strict=True):
                if values and (stream.plan.tile is None or {s.name for s in stream.asked} <= {*OF_KERNELS}):
                    of_rows = {} if stream.plan.tile is None else stream.gathered(values)
                    block = None
                else:
                    of_rows, block = _first_pass(stream)
                    values = stream.spread(stream.masked({s.name: of_rows[s.name] for s in stream.asked}))
                    if stream.tokens.index is None:  # otherwise, spreading has copied them
                        values = {name: value.clone() for name, value in values.items()}
                constants.append(of_rows)
                blocks.append(block)
                for s in stream.asked:
                    outputs.append(values[s.name])
                    if not (s.differentiable and stream.plan.trains):
                        fixed.append(values[s.name])
        if tensors:
            saved, ctx.used = dict[int, Tensor](), False
            ctx.packed = pack((streams, leaves, constants, blocks), saved)
            ctx.save_for_backward(*saved.values())
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        # Gradients take the memory of blocks: a second backward computes these again.
        again, ctx.used = ctx.used, True
        streams, leaves, constants, blocks = unpack(ctx.packed, ctx.saved_tensors)
        grads, upstreams, left = Gradients(leaves), list[Values](), iter(upstream)
        for stream in streams:
            wanted = {s.name: g for s in stream.asked if (g := next(left)) is not None and stream.plan.trains}
            upstreams.append(stream.masked(stream.gathered(wanted)))
        with device_of(streams[0].target.hidden), _without_autocast(streams[0].target.hidden.device):
            live = live_tokens(streams, upstreams)
            for stream, of_rows, block, values, rows in zip(streams, constants, blocks, upstreams, live, strict=True):
                if values and block is not None and not again:
                    _from_block(stream.open(stream.plan), block, of_rows, values, rows, grads)
                elif values:
                    _again(stream.open(stream.plan), of_rows, values, rows, grads)
            return None, None, None, *grads.results()


def _first_pass(stream: Stream) -> tuple[Values, Any]:
    """The numbers of all tokens, and their block if it lives until backward."""
    stream = stream.open(stream.plan.without_gradients or stream.plan)
    plan, parts, block = stream.plan, list[Values](), None
    for rows in slices(0, stream.tokens.count, plan.block_tokens if plan.tile is None else plan.tile.tokens):
        part = block = None  # their memory is free before that of the next ones is allocated
        part = stream.part(stream.places(rows))
        if plan.tile is None:
            block = plan.block(part, stream.asked, plan)
        parts.append(statistics_by_columns(part, stream.asked, plan) if block is None else block.constants)
    kept = replace(block, part=None, constants={}) if block is not None and plan.keeps else None
    return concatenated(parts), kept


def concatenated(parts: list[Values]) -> Values:
    """Values of consecutive tokens."""
    first = parts[0]
    return first if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in first}


def live_tokens(streams: Sequence[Stream], upstream: Sequence[Values]) -> list[Tensor | None]:
    """Of each stream the tokens that have a gradient, ``None`` for all: the host waits for all numbers at once."""
    live = list[Tensor | None]([None] * len(streams))
    masks = dict[int, Tensor]()
    capturing = streams[0].target.hidden.is_cuda and torch.cuda.is_current_stream_capturing()
    for i, (stream, values) in enumerate(zip(streams, upstream, strict=True)):
        # Ranks that share a vocabulary would all have to find the same number.
        target, count = stream.target, stream.tokens.count
        waits = target.head.ranks.size == 1 and stream.tokens.active is None and not capturing
        columns = target.head.weights.columns if target.kept is None else target.kept.shape[-1]
        flops = 4.0 * count * target.hidden.shape[-1] * columns
        if values and waits and count and flops >= MIN_FLOPS.get(target.hidden.device.type, float("inf")):
            trained = [(g != 0).flatten(1).any(1) if g.dim() > 1 else g != 0 for g in values.values()]
            masks[i] = torch.stack(trained).any(0)
    if masks:
        counts = torch.stack([mask.sum() for mask in masks.values()])
        for (i, mask), count in zip(masks.items(), start_reading(counts, _WHAT)(), strict=True):
            if count <= (1 - DROPPED) * len(mask):
                live[i] = torch.nonzero_static(mask, size=count)[:, 0]
    return live


def _from_block(
    stream: Stream, block: Any, constants: Values, upstream: Values, live: Tensor | None, grads: Gradients
) -> None:
    """Gradients of a block that has lived until now, or of its tokens that have any."""
    rows: Rows = slice(0, stream.tokens.count) if live is None else live
    places = stream.places(rows)
    changes: dict[str, Any] = {"part": stream.part(places, compares=False), "constants": rows_in(constants, rows)}
    for name in block.__match_args__:
        if isinstance(memory := getattr(block, name), Tensor):
            # `data` shares memory, and not the count of changes by which autograd would refuse to give what is saved.
            memory = memory.data
            if live is not None:  # rows only move up, in ascending order: none is overwritten before it has moved
                for at in slices(0, len(live), max(MOVED_BYTES // (memory.stride(0) * memory.itemsize), 1)):
                    memory[at] = memory[live[at]]
                memory = memory[: len(live)]
            changes[name] = memory
    stream.add_hidden(grads, places, replace(block, **changes).add_gradients(rows_in(upstream, rows), grads))


def rows_in(values: Values, rows: Rows) -> Values:
    """Some rows of all values."""
    return {name: value[rows] for name, value in values.items()}


def _again(stream: Stream, constants: Values, upstream: Values, live: Tensor | None, grads: Gradients) -> None:
    """Gradients of tokens whose logits are gone: of those that have any, by blocks or by tiles.

    Without ``constants``, a block has its own.
    """
    plan = stream.plan
    count = stream.tokens.count if live is None else len(live)
    columns = [ALL] if plan.tile is None else slices(0, stream.target.head.weights.columns, plan.tile.columns)
    for at in slices(0, count, plan.block_tokens if plan.tile is None else plan.tile.tokens):
        rows: Rows = at if live is None else live[at]
        places = stream.places(rows)
        part, of_rows, values = stream.part(places), rows_in(constants, rows), rows_in(upstream, rows)
        hidden: Tensor | None = None
        for of_columns in columns:
            block = plan.block(part, stream.asked, plan, of_rows or None, of_columns)
            hidden = block.add_gradients(values, grads, hidden)
            del block  # its memory is free before its gradient is added
        stream.add_hidden(grads, places, hidden)


# --- Losses of single tokens ----------------------------------------------------------------------------------------


class _Losses(torch.autograd.Function):
    """A sum of losses of single tokens: each block's gradients are computed while its logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        streams: list[Stream],
        losses: list[TokenLoss],
        leaves: list[Leaf],
        names: list[list[str]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        losses = [loss.prepared() for loss in losses]
        with device_of(streams[0].target.hidden), _without_autocast(streams[0].target.hidden.device):
            total, outputs, ctx.gradients = _run(streams, losses, leaves)
        if tensors:
            saved = dict[int, Tensor]()
            ctx.packed = pack((streams, losses, leaves), saved)
            ctx.save_for_backward(*saved.values())
        flat = list[Tensor]()
        for values in outputs:
            names.append(list(values))
            flat += values.values()
        ctx.mark_non_differentiable(*flat)
        return total, *flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        with device_of(upstream), _without_autocast(upstream.device):
            if gradients is None:  # the first backward scaled them, and gave them away
                streams, losses, leaves = unpack(ctx.packed, ctx.saved_tensors)
                gradients = _run(streams, losses, leaves)[2]
            return None, None, None, None, *scaled(gradients, upstream)


def scaled(gradients: Sequence[Tensor | None], factor: Tensor) -> list[Tensor | None]:
    """Gradients times a factor, in their memory."""
    dense = [local_part(g) for g in gradients if g is not None and g.layout == torch.strided]
    if dense:
        scale_(factor, dense, backend=choose_backend(None, dense))
    return [g if g is None or g.layout == torch.strided else g * factor for g in gradients]


def _run(
    streams: Sequence[Stream], losses: Sequence[TokenLoss], leaves: Sequence[Leaf]
) -> tuple[Tensor, list[Values], list[Tensor | None]]:
    """The sum of losses, the numbers of each stream's tokens, and the gradient of each leaf."""
    grads, outputs, totals = Gradients(leaves), list[Values](), list[Tensor]()
    for stream, loss in zip(streams, losses, strict=True):
        parts, tokens, opened = list[Values](), stream.tokens, None
        for plan, rows in (
            (stream.plan, slice(0, tokens.trained)),
            (stream.plan.without_gradients or stream.plan, slice(tokens.trained, tokens.count)),
        ):
            if rows.start < rows.stop or (rows.stop == tokens.count and not parts):  # or there are no tokens
                if opened is not None and opened.plan.products == plan.products:
                    opened = replace(opened, plan=plan)
                else:
                    opened = None  # its copies of heads are gone before there are others
                    opened = stream.open(plan)
                _run_part(opened, loss, rows, grads, totals, parts)
        outputs.append(concatenated(parts))
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum(), outputs, grads.results()


def _run_part(
    stream: Stream,
    loss: TokenLoss,
    tokens: slice,
    grads: Gradients,
    totals: list[Tensor],
    parts: list[Values],
) -> None:
    """Of some tokens of an open stream."""
    plan = stream.plan
    for together in slices(tokens.start, tokens.stop, plan.tokens):
        start, collected = together.start, None
        if plan.trains and plan.collected is not None:
            collected = plan.collected(stream.target, plan, together.stop - start)
        for rows in slices(start, together.stop, plan.block_tokens):
            places = stream.places(rows)
            block = plan.block(stream.part(places), stream.asked, plan)
            values = stream.masked({s.name: block.constants[s.name] for s in stream.asked}, places)
            total, upstream, more = token_losses(stream, loss, values, places, plan.trains)
            totals.append(total)
            parts.append(values | more)
            hidden: Tensor | None = None
            if collected is not None:
                hidden = collected.take(block, upstream, grads, slice(rows.start - start, rows.stop - start))
            elif upstream:
                hidden = block.add_gradients(upstream, grads)
            del block  # its memory is free before its gradient is added
            stream.add_hidden(grads, places, hidden)
        if collected is not None:
            hidden = collected.add_gradients(
                lambda rows: stream.part(stream.places(rows), compares=False), together, grads
            )
            stream.add_hidden(grads, stream.places(together), hidden)


def token_losses(
    stream: Stream, loss: TokenLoss, values: Values, places: Rows, differentiates: bool
) -> tuple[Tensor, Values, Values]:
    """The sum of the losses of tokens at these places, their derivatives by each statistic, and further numbers."""
    wide, leaves, wanted = wide_dtype(stream.plan.products.dtype), Values(), list[str]()
    for s in stream.asked:
        leaves[s.name] = values[s.name].detach()
        if differentiates and s.differentiable:
            leaves[s.name].requires_grad_()
            wanted.append(s.name)
    with torch.set_grad_enabled(differentiates):
        losses, derivatives, more = loss(leaves, places, stream.target.labels.dim())
        losses = losses if stream.tokens.active is None else torch.where(stream.tokens.active[places], losses, 0.0)
        total = losses.sum(dtype=wide_dtype(losses.dtype))
    if derivatives is None and total.requires_grad:
        with torch.autograd.set_multithreading_enabled(False):  # waking a thread takes longer than these operations
            grads = torch.autograd.grad(total, [leaves[n] for n in wanted], allow_unused=True)
        derivatives = {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}
    upstream = {n: g.detach().to(wide) for n, g in derivatives.items()} if differentiates and derivatives else {}
    more = stream.masked({n: v.detach() for n, v in more.items()}, places)
    # Masked again: where a loss is not finite, not even 0 times its derivative is.
    return total.detach().to(wide), stream.masked(upstream, places), more


def losses_of(
    targets: Sequence[Target],
    of_targets: Sequence[Values],
    token_losses: Sequence[TokenLoss],
    ignore_index: int,
    indices: Sequence[Tensor | None],
) -> tuple[Tensor, list[Values]]:
    """The sum of the losses of the tokens at these ``indices`` (``None`` for all) of each target, differentiable by
    their statistics ``of_targets``; and detached numbers of all tokens."""
    totals: list[Tensor] = []
    numbers: list[Values] = []
    for target, values, loss, index in zip(targets, of_targets, token_losses, indices, strict=True):
        shape, rows = target.labels.shape, ALL if index is None else index
        flat = {name: value.flatten(0, len(shape) - 1)[rows] for name, value in values.items()}
        losses, derivatives, more = loss.prepared()(flat, rows, len(shape))
        losses = losses if derivatives is None else losses.detach()
        for name, g in (derivatives or {}).items():
            terms = g.detach() * (flat[name] - flat[name].detach())
            losses = losses + (terms.sum(-1) if terms.dim() > 1 else terms)
        active = target.labels.flatten()[rows] != ignore_index
        totals.append(torch.where(active, losses, 0.0).sum(dtype=wide_dtype(losses.dtype)))
        more = spread({name: value.detach() for name, value in only(active, more).items()}, index, shape)
        numbers.append({name: value.detach() for name, value in values.items()} | more)
    return torch.stack(totals).sum().to(wide_dtype(computed_dtype(targets[0].hidden))), numbers


# --- The two ways in ------------------------------------------------------------------------------------------------


def _statistics_of(streams: list[Stream], leaves: list[Leaf], known: list[Values]) -> list[Values]:
    """Of each stream, as :func:`statistics` returns them."""
    left = iter(_Statistics.apply(streams, leaves, known, *[leaf.tensor for leaf in leaves]))
    return [{s.name: next(left) for s in stream.asked} for stream in streams]


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
    asked = asked_for(names, metrics)
    check_call(targets, asked, options, sums_losses=False)
    streams, leaves = open_streams(targets, asked, replace(options, keep=0) if known else options)
    left = iter(known)
    before = [{s.name: next(left) for s in asked} for _ in streams] if known else []
    return _statistics_of(streams, leaves, before)


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
    asked = asked_for(names, metrics)
    check_call(targets, asked, options, sums_losses=True)
    streams, leaves = open_streams(targets, asked, options, [loss.trained for loss in token_losses])
    if streams[0].plan.gradients_in_backward:
        indices = [stream.tokens.index for stream in streams]
        return losses_of(targets, _statistics_of(streams, leaves, []), token_losses, options.ignore_index, indices)
    order = list[list[str]]()
    total, *outputs = _Losses.apply(streams, list(token_losses), leaves, order, *[leaf.tensor for leaf in leaves])
    left = iter(outputs)
    numbers = [{name: next(left) for name in of_stream} for of_stream in order]
    return total, [stream.spread(values) for stream, values in zip(streams, numbers, strict=True)]
