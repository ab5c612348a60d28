"""The two ways in, and the only two autograd functions: tokens go through their head in blocks.

- :func:`statistics`: numbers for each token, for losses that couple tokens. What lives until backward are blocks, if
  these fit, or the numbers alone, and backward computes logits again.
- :func:`loss_sum`: a sum of losses of single tokens. Each block's gradients are computed while its logits are there.

T tokens of a target, N of them with a label, R of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from liger_losses.caller import warn
from liger_losses.checks import check_right, check_vocabulary, see
from liger_losses.chunked.core.block import PLANNERS, statistics_by_columns
from liger_losses.chunked.core.buffers import Gradients, Leaf, key_of, local_part
from liger_losses.chunked.core.checks import check_call
from liger_losses.chunked.core.options import EngineOptions
from liger_losses.chunked.core.plan import Plan, Signature, may_keep, may_sum, plan, scales_late, signature, slices
from liger_losses.chunked.core.saved import pack, unpack
from liger_losses.chunked.core.statistics import OF_KERNELS, Statistic, asked_for
from liger_losses.chunked.core.target import Counted, Target, TokenLoss
from liger_losses.chunked.core.teachers import Rows
from liger_losses.chunked.core.weights import Products
from liger_losses.kernels import choose_backend
from liger_losses.kernels._triton import device_of
from liger_losses.kernels.autograd import once_differentiable, scale_
from liger_losses.kernels.matmul import HALF_DTYPES, wide_dtype
from liger_losses.kernels.reading import label_facts, start_reading

#: Fewer rows are moved together before the gradient products if at least this share has no gradient.
DROPPED = 0.02
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

    Tokens that get no gradient, and a first pass before the one with gradients, take ``plan_without_gradients``. Where
    all tokens are computed, the numbers of those without a label are 0.
    """

    target: Target
    tokens: Counted
    asked: tuple[Statistic, ...]
    plan: Plan
    plan_without_gradients: Plan

    def open(self, made: Plan) -> Stream:
        """The same for a pass of this plan: its heads are cast or dequantized once, where all rows fit."""
        products = Products(made.dtype, made.copied_rows, made.invariant)
        return replace(self, target=self.target.open(products), plan=made)

    def places(self, rows: Rows) -> Rows:
        """Where some of the N tokens are among all T."""
        return rows if self.tokens.index is None else self.tokens.index[rows]

    def part(self, rows: Rows) -> Target:
        """Some of the N tokens, in the operands' dtype."""
        places, active = self.places(rows), self.tokens.active
        part = self.target.take(places)
        return (part if active is None else part.neutral(active[places])).to(self.plan.dtype)

    def block(self, rows: slice) -> Any:
        """A block of these tokens, with statistics, and what gradients need where anything is trained."""
        return self.plan.block(self.part(rows), self.asked, self.plan)

    def add_hidden(self, grads: Gradients, rows: Rows, values: Tensor | None) -> None:
        """Add gradients ``[R, H]`` of the hidden states of some of the N tokens."""
        if values is not None:
            grads.buffers[id(self.target.hidden)].add_states(self.target.places(self.places(rows)), values)

    def masked(self, values: Values, rows: Rows) -> Values:
        """0 for tokens without a label, where these are among the tokens."""
        return values if self.tokens.active is None else only(self.tokens.active[rows], values)

    def empty(self) -> Values:
        """Statistics of no tokens."""
        device, wide, values = self.target.labels.device, wide_dtype(self.plan.dtype), Values()
        selected = self.target.selected
        k = selected.shape[-1] if isinstance(selected, Tensor) else selected or 0
        for s in self.asked:
            shape = (0, k) if s.name in ("selected_logps", "selected_logits", "columns") else (0,)
            dtype = torch.int64 if s.name in ("columns", "argmax") else wide
            values[s.name] = torch.zeros(shape, dtype=dtype, device=device)
        return values

    def spread(self, values: Values) -> Values:
        """From ``[N, ...]`` to all tokens, in the labels' shape; 0 for those without a label."""
        shape, index, of_all = self.target.labels.shape, self.tokens.index, Values()
        for name, value in values.items():
            if index is not None:
                value = value.new_zeros(shape.numel(), *value.shape[1:]).index_copy(0, index, value)
            of_all[name] = value.view(*shape, *value.shape[1:])
        return of_all

    def gathered(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`spread`, of one statistic."""
        values = values.flatten(0, self.target.labels.dim() - 1)
        return values if self.tokens.index is None else values[self.tokens.index]


def only(active: Tensor, values: Values) -> Values:
    """0 for tokens that are not active ``[R]``."""
    return {n: torch.where(active if v.dim() == 1 else active[:, None], v, 0) for n, v in values.items()}


# --- From targets to streams ----------------------------------------------------------------------------------------


def open_streams(
    targets: Sequence[Target],
    asked: tuple[Statistic, ...],
    options: EngineOptions,
    trained: Sequence[Tensor | None] | None = None,
) -> tuple[list[Stream], list[Leaf], bool]:
    """Find the tokens with a label, for which the host waits once, and plan; what is trained; whether gradients wait
    until all statistics are known. Of losses of single tokens, ``trained`` says which tokens may have a gradient."""
    targets = counted(targets, options, trained)
    leaves = [target.leaves() if torch.is_grad_enabled() else [] for target in targets]
    pairs, late = list(zip(targets, leaves, strict=True)), trained is None
    late = late or any(bool(of_target) and scales_late(target.hidden, of_target) for target, of_target in pairs)
    calls = [signature(target, of_target, asked, options, couples=late) for target, of_target in pairs]
    calls, plans = _plans(calls, leaves)
    streams = list[Stream]()
    for target, call, made in zip(targets, calls, plans, strict=True):
        one_pass = made.keeps or not made.trains or (not call.couples and call.trained == call.tokens)
        first = made if one_pass else plan(call.without_gradients(), tuple(PLANNERS))
        assert target.counted is not None
        streams.append(Stream(replace(target, counted=None), target.counted, asked, made, first))
    return streams, _leaves_of(streams, leaves), calls[0].couples


def _plans(calls: list[Signature], leaves: Sequence[Sequence[Leaf]]) -> tuple[list[Signature], list[Plan]]:
    """The plans of all targets, each of which knows what it must of the others; and the calls that they are of."""
    table = tuple(PLANNERS)
    plans = [plan(call, table) for call in calls]
    if len(calls) > 1:
        sizes = [call.tokens * made.row_bytes if may_keep(call) else 0 for call, made in zip(calls, plans, strict=True)]
        calls = [replace(call, others_bytes=sum(sizes) - size) for call, size in zip(calls, sizes, strict=True)]
        plans = [plan(call, table) for call in calls]
    if not may_sum(sum([made.parts for made in plans])) and calls[0].options.accum_dtype is None:
        calls = [replace(call, sharing=n) for call, n in zip(calls, _sharing(plans, leaves), strict=True)]
        plans = [plan(call, table) for call in calls]
    if any(made.tile is not None and not call.couples for call, made in zip(calls, plans, strict=True)):
        calls = [replace(call, couples=True, options=replace(call.options, keep=0)) for call in calls]
        plans = [plan(call, table) for call in calls]
    bound = calls[0].workspace
    if bound is not None and any(call.sharing and made.accumulate for call, made in zip(calls, plans, strict=True)):
        warn(
            f"a workspace of {bound} bytes has no room for the tokens in few enough parts. To be exact, the gradient "
            "of the weight is accumulated in fp32, in a buffer beyond the workspace. Pass a larger workspace, or "
            "accum_dtype=torch.float32 to allow it." + see("workspace")
        )
    return calls, plans


def _sharing(plans: Sequence[Plan], leaves: Sequence[Sequence[Leaf]]) -> list[int]:
    """Of each target, how many share a half-precision gradient that would be a sum of too many parts; 0 if none is."""
    keys = list[set[object]]()
    for of_target in leaves:
        half = [leaf.tensor for leaf in of_target if leaf.accumulate is None and leaf.tensor.dtype in HALF_DTYPES]
        keys.append({key_of(tensor) for tensor in half if not any(leaf.sparse for leaf in of_target)})
    parts = {key: [made.parts for of, made in zip(keys, plans, strict=True) if key in of] for key in set().union(*keys)}
    return [max([0, *[len(parts[key]) for key in of_target if not may_sum(sum(parts[key]))]]) for of_target in keys]


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
    if not options.compact:
        return [replace(target, counted=checked_labels(target, options.ignore_index)) for target in targets]
    masks = [None] * len(targets) if trained is None else trained
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
    targets: Sequence[Target], ignore_index: int, backend: str | None, masks: Sequence[Tensor | None]
) -> list[Target]:
    labels = [target.labels.reshape(-1).contiguous() for target in targets]  # as kernels read them
    backend = choose_backend(backend, [(labels[0].device, torch.float32)])
    numbers = label_facts(labels, ignore_index, backend=backend)
    masks = [m if m is None else m.reshape(-1) & (y != ignore_index) for y, m in zip(labels, masks, strict=True)]
    if any(mask is not None for mask in masks):
        counts = [numbers[i, 0] if mask is None else mask.sum() for i, mask in enumerate(masks)]
        numbers = torch.cat([numbers, torch.stack(counts)[:, None]], 1)
    with_counts = list[Target]()
    for target, y, mask, facts in zip(targets, labels, masks, start_reading(numbers, _WHAT)(), strict=True):
        count, low, high, trained = facts if len(facts) > 3 else (*facts, facts[0])
        index = None
        if mask is not None and trained < count:
            others = ~mask & (y != ignore_index)
            pair = (torch.nonzero_static(mask, size=trained), torch.nonzero_static(others, size=count - trained))
            index = torch.cat(pair)[:, 0]
        elif count < len(y):
            index = torch.nonzero_static(y != ignore_index, size=count)[:, 0]
        with_counts.append(replace(target, counted=Counted(index, count, trained, (low, high))))
    return with_counts


def _leaves_of(streams: Sequence[Stream], leaves: Sequence[Sequence[Leaf]]) -> list[Leaf]:
    """The leaves of all targets, each once: the dtype in which one adds up is the widest that a plan asks for."""
    of_all = dict[int, Leaf]()
    for stream, of_target in zip(streams, leaves, strict=True):
        for leaf in of_target:
            known, dtype = of_all.setdefault(id(leaf.tensor), leaf), leaf.accumulate or stream.plan.accumulate
            if known.accumulate is None and dtype is not None:
                of_all[id(leaf.tensor)] = replace(known, accumulate=dtype)
    return list(of_all.values())


@contextmanager
def _alone(tensor: Tensor) -> Iterator[None]:
    """Autocast is off, and the device of the call current."""
    kind = tensor.device.type
    with device_of(tensor), torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        yield


# --- Statistics -----------------------------------------------------------------------------------------------------


class _Statistics(torch.autograd.Function):
    """Statistics of tokens; backward has their blocks still, or computes them again."""

    @staticmethod
    def forward(
        ctx: Any, streams: list[Stream], leaves: list[Leaf], known: list[Values], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, constants, blocks, fixed = list[Tensor](), list[Values](), list[Any](), list[Tensor]()
        with _alone(streams[0].target.hidden):
            for stream, values in zip(streams, known or [{}] * len(streams), strict=True):
                if values and (stream.plan.tile is None or {s.name for s in stream.asked} <= {*OF_KERNELS}):
                    of_rows, block = ({} if stream.plan.tile is None else values), None
                else:
                    of_rows, block = _first_pass(stream)
                    values = stream.masked({s.name: of_rows[s.name].clone() for s in stream.asked}, slice(None))
                constants.append(of_rows)
                blocks.append(block)
                for s in stream.asked:
                    outputs.append(values[s.name])
                    if not (s.differentiable and stream.plan.trains):
                        fixed.append(values[s.name])
        if tensors:
            ctx.packed, saved = pack((streams, leaves, constants, blocks))
            ctx.used = False
            ctx.save_for_backward(*saved)
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
            upstreams.append(stream.masked(wanted, slice(None)))
        with _alone(streams[0].target.hidden):
            moves = moved_rows(streams, upstreams)
            for stream, of_rows, block, values, moved in zip(streams, constants, blocks, upstreams, moves, strict=True):
                if values and block is not None and not again:
                    _from_block(stream.open(stream.plan), block, of_rows, values, moved, grads)
                elif values:
                    _again(stream.open(stream.plan), of_rows, values, moved, grads)
            return None, None, None, *grads.results()


def _first_pass(stream: Stream) -> tuple[Values, Any]:
    """The numbers of all tokens, and their block if it lives until backward."""
    made, parts, block = stream.plan_without_gradients, list[Values](), None
    opened, count = stream.open(made), stream.tokens.count
    for rows in slices(0, count, made.block_rows if made.tile is None else made.tile.rows):
        block = None  # its memory is free before the next one's is allocated
        if made.tile is None:
            block = opened.block(rows)
        parts.append(statistics_by_columns(opened.part(rows), stream.asked, made) if block is None else block.constants)
    kept = replace(block, part=None, constants={}) if block is not None and made.keeps else None
    return concatenated(parts or [stream.empty()]), kept


def concatenated(parts: list[Values]) -> Values:
    """Values of consecutive tokens."""
    first = parts[0]
    return first if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in first}


class Moved(NamedTuple):
    """The tokens that have a gradient, ``order [n]``: most of the first n stay in their places, and the others take the
    places among these of tokens without one, the ``gaps``."""

    order: Tensor
    gaps: Tensor
    others: Tensor

    def rows(self, matrix: Tensor) -> Tensor:
        """These rows of a matrix, moved in its memory, some at a time."""
        for at in slices(0, len(self.gaps), max(MOVED_BYTES // (matrix.stride(0) * matrix.itemsize), 1)):
            matrix[self.gaps[at]] = matrix[self.others[at]]
        return matrix[: len(self.order)]


def moved_rows(streams: Sequence[Stream], upstream: Sequence[Values]) -> list[Moved | None]:
    """Of each stream the tokens that have a gradient, ``None`` for all: the host waits for all numbers at once."""
    moves, masks, numbers = list[Moved | None]([None] * len(streams)), dict[int, Tensor](), list[Tensor]()
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
            total = masks[i].cumsum(0)
            first = total.index_select(0, (total[-1:] - 1).clamp(min=0))  # how many of as many first tokens have one
            numbers.append(torch.cat([total[-1:], total[-1:] - first]))
    if not masks:
        return moves
    for (i, mask), (count, moved) in zip(masks.items(), start_reading(torch.stack(numbers), _WHAT)(), strict=True):
        if count <= (1 - DROPPED) * streams[i].tokens.count:
            gaps = torch.nonzero_static(~mask[:count], size=moved)[:, 0]
            others = torch.nonzero_static(mask[count:], size=moved)[:, 0] + count
            order = torch.arange(count, device=mask.device).index_copy_(0, gaps, others)
            moves[i] = Moved(order, gaps, others)
    return moves


def _from_block(
    stream: Stream, block: Any, constants: Values, upstream: Values, moved: Moved | None, grads: Gradients
) -> None:
    """Gradients of a block that has lived until now, or of its tokens that have any."""
    rows: Rows = slice(0, stream.tokens.count) if moved is None else moved.order
    changes: dict[str, Any] = {"part": stream.part(rows), "constants": rows_in(constants, rows)}
    for name in block.__match_args__:
        if isinstance(memory := getattr(block, name), Tensor):
            # `data` shares memory, and not the count of changes by which autograd would refuse to give what is saved.
            changes[name] = memory.data if moved is None else moved.rows(memory.data)
    stream.add_hidden(grads, rows, replace(block, **changes).add_gradients(rows_in(upstream, rows), grads))


def rows_in(values: Values, rows: Rows) -> Values:
    """Some rows of all values."""
    return {name: value[rows] for name, value in values.items()}


def _again(stream: Stream, constants: Values, upstream: Values, moved: Moved | None, grads: Gradients) -> None:
    """Gradients of tokens whose logits are gone: of those that have any, by blocks or by tiles.

    Without ``constants``, a block has its own.
    """
    made, count = stream.plan, stream.tokens.count if moved is None else len(moved.order)
    columns = stream.target.head.weights.columns
    for rows in slices(0, count, made.block_rows if made.tile is None else made.tile.rows):
        chosen: Rows = rows if moved is None else moved.order[rows]
        part, of_rows, values = stream.part(chosen), rows_in(constants, chosen), rows_in(upstream, chosen)
        hidden: Tensor | None = None
        if made.tile is None:
            block = made.block(part, stream.asked, made, of_rows or None)
            hidden = block.add_gradients(values, grads)
            del block  # its memory is free before its gradient is added
        for tile in () if made.tile is None else slices(0, columns, made.tile.columns):
            block = made.block(part, stream.asked, made, of_rows, tile)
            hidden = block.add_gradients(values, grads, hidden)
            del block
        stream.add_hidden(grads, chosen, hidden)


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
        with _alone(streams[0].target.hidden):
            total, outputs, ctx.gradients = _run(streams, losses, leaves)
        if tensors:
            ctx.packed, saved = pack((streams, losses, leaves))
            ctx.save_for_backward(*saved)
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
        with _alone(upstream):
            if gradients is None:  # the first backward scaled them, and gave them away
                gradients = _run(*unpack(ctx.packed, ctx.saved_tensors))[2]
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
        parts, tokens, opened = list[Values](), stream.tokens, stream
        for made, start, stop in (
            (stream.plan, 0, tokens.trained),
            (stream.plan_without_gradients, tokens.trained, tokens.count),
        ):
            if start < stop:
                opened = opened.open(made)
                _run_part(opened, loss, slice(start, stop), grads, totals, parts)
        if not tokens.count:
            values = stream.empty()
            total, _, more = token_losses(stream, loss, values, slice(0, 0), False)
            totals.append(total)
            parts.append(values | more)
        outputs.append(concatenated(parts))
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum(), outputs, grads.results()


def _run_part(
    stream: Stream, loss: TokenLoss, tokens: slice, grads: Gradients, totals: list[Tensor], parts: list[Values]
) -> None:
    """Of some tokens of an open stream."""
    made = stream.plan
    for together in slices(tokens.start, tokens.stop, made.rows):
        start, shared = together.start, None
        if made.trains and made.shared is not None:
            shared = made.shared(stream.target, made, together.stop - start)
        for rows in slices(start, together.stop, made.block_rows):
            block = stream.block(rows)
            values = stream.masked({s.name: block.constants[s.name] for s in stream.asked}, rows)
            total, upstream, more = token_losses(stream, loss, values, rows, made.trains)
            totals.append(total)
            parts.append(values | more)
            hidden: Tensor | None = None
            if shared is not None:
                hidden = shared.take(block, upstream, grads, slice(rows.start - start, rows.stop - start))
            elif upstream:
                hidden = block.add_gradients(upstream, grads)
            del block  # its memory is free before its gradient is added
            stream.add_hidden(grads, rows, hidden)
        if shared is not None:
            stream.add_hidden(grads, together, shared.add_gradients(stream.part, together, grads))


def token_losses(
    stream: Stream, loss: TokenLoss, values: Values, rows: slice, differentiates: bool
) -> tuple[Tensor, Values, Values]:
    """The sum of the losses of some tokens, their derivatives by each statistic, and further numbers."""
    wide, leaves, wanted = wide_dtype(stream.plan.dtype), Values(), list[str]()
    for s in stream.asked:
        leaves[s.name] = values[s.name].detach()
        if differentiates and s.differentiable:
            leaves[s.name].requires_grad_()
            wanted.append(s.name)
    with torch.set_grad_enabled(differentiates):
        losses, derivatives, more = loss(leaves, stream.places(rows), stream.target.labels.dim())
        losses = losses if stream.tokens.active is None else torch.where(stream.tokens.active[rows], losses, 0.0)
        total = losses.sum(dtype=wide_dtype(losses.dtype))
    if derivatives is None and total.requires_grad:
        grads = torch.autograd.grad(total, [leaves[n] for n in wanted], allow_unused=True)
        derivatives = {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}
    upstream = {n: g.detach().to(wide) for n, g in derivatives.items()} if differentiates and derivatives else {}
    more = stream.masked({n: v.detach() for n, v in more.items()}, rows)
    # Masked again: where a loss is not finite, not even 0 times its derivative is.
    return total.detach().to(wide), stream.masked(upstream, rows), more


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


def _statistics_of(streams: list[Stream], leaves: list[Leaf], known: list[Values]) -> list[Values]:
    """Of each stream, with gradients."""
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
    streams, leaves, _ = open_streams(targets, asked, replace(options, keep=0) if known else options)
    left = iter(known)
    before = [{s.name: stream.gathered(next(left)) for s in asked} for stream in streams] if known else []
    pairs = zip(streams, _statistics_of(streams, leaves, before), strict=True)
    return [stream.spread(values) for stream, values in pairs]


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
    streams, leaves, couples = open_streams(targets, asked, options, [loss.trained for loss in token_losses])
    numbers, totals = list[Values](), list[Tensor]()
    if couples:
        for stream, loss, values in zip(streams, token_losses, _statistics_of(streams, leaves, []), strict=True):
            rows, dims = stream.places(slice(0, stream.tokens.count)), stream.target.labels.dim()
            of_stream, named = of_values(loss, values, rows, dims, stream.tokens.active)
            totals.append(of_stream)
            numbers.append(named)
        total = torch.stack(totals).sum().to(wide_dtype(streams[0].plan.dtype))
    else:
        order, tensors = list[list[str]](), [leaf.tensor for leaf in leaves]
        total, *outputs = _Losses.apply(streams, list(token_losses), leaves, order, *tensors)
        left = iter(outputs)
        numbers = [{name: next(left) for name in of_stream} for of_stream in order]
    return total, [stream.spread(values) for stream, values in zip(streams, numbers, strict=True)]
