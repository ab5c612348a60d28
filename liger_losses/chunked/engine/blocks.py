"""What a block remembers of the logits of some tokens: nothing, or exponentials; see :mod:`.logit_block` for logits.

N active tokens, R tokens of a block, C columns of a slice, H hidden size, V vocabulary size, k selected columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine.accumulation import Gradients, HeadGradients
from liger_losses.chunked.engine.call import Call, OpenCall
from liger_losses.chunked.engine.plan import blocks, padded
from liger_losses.chunked.engine.ranks import on_device
from liger_losses.kernels.exponential_scales import gradient_scales
from liger_losses.kernels.label_rows import scale_and_add_label_rows
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.linear_grad import linear_softmax_gradient_into
from liger_losses.kernels.linear_stats import linear_softmax_statistics
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.online_softmax import merge
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics

#: Not statistics of the softmax over a row: blocks compute them from whole rows of logits.
OF_LOGITS = frozenset({"selected_logps", "columns", "rest", "registered"})
#: Tiles whose statistics are merged at once: each merge is dozens of small operations.
MOST_TILES = 128
#: Bytes of rows that exist twice while they are moved.
MOVED_BYTES = 2**25

#: d loss / d statistic of some tokens, ``[R]`` each, by name; to exponentials also a number for all of them.
Upstream = Mapping[str, Any]


class Part(NamedTuple):
    """Some of the active tokens."""

    rows: slice  # which of them
    hidden: Tensor  # [R, H], their hidden states in the operand dtype
    values: dict[str, Tensor]  # memory of their statistics, [R] each, by name
    epilogue: Epilogue  # from their projections to logits
    labels: Tensor  # [R], columns of the whole vocabulary
    here: Tensor  # [R], the same as numbers of this rank's columns; any of these for a label of another rank

    def at(self, at: slice) -> Part:
        """Some of these tokens."""
        if at == slice(0, len(self.hidden)):
            return self
        rows = slice(self.rows.start + at.start, self.rows.start + at.stop)
        values = {name: value[at] for name, value in self.values.items()}
        return Part(rows, self.hidden[at], values, self.epilogue.rows(at), self.labels[at], self.here[at])

    def columns(self, call: Call) -> Tensor:
        """The selected columns ``[R, k]``."""
        return self.values["columns"] if call.query.selected is None else call.query.selected[self.rows]

    def put(self, computed: Mapping[str, Tensor], whole: bool) -> None:
        """Store statistics: ``computed`` itself where the part is ``whole``, all active tokens."""
        for name in computed.keys() & self.values.keys():
            if whole:
                self.values[name] = computed[name]
            elif computed[name] is not self.values[name]:
                self.values[name].copy_(computed[name])


def corner(memory: Tensor, rows: int, columns: int) -> Tensor:
    """``memory[:rows, :columns]``; the memory itself if that is all of it, because making a view takes host time."""
    return memory if memory.shape == (rows, columns) else memory[:rows, :columns]


def move_up_(matrix: Tensor, index: Tensor) -> None:
    """Copy some rows of a matrix, in ascending order, to its beginning, a few at a time."""
    for rows in blocks(len(index), MOVED_BYTES // (matrix.stride(0) * matrix.itemsize)):
        matrix[rows] = matrix[index[rows]]  # which are behind all that was written


class Block:
    """The memory of one part at a time: filled, it has statistics; with the loss's derivatives, it computes gradients.

    ``rows`` is the largest number of tokens of a part.
    """

    def __init__(self, opened: OpenCall, rows: int) -> None:
        self.opened, self.call, self.vocab_size, self.rows = opened, opened.call, opened.vocab_size, rows

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        """Compute the part's statistics into its ``values``.

        ``upstream`` is given where it is known before any statistic: a block may then take both at once.
        """
        raise NotImplementedError

    def refill(self, part: Part, upstream: Upstream) -> None:
        """Restore what :meth:`gradients` needs, the statistics being known from an earlier pass."""

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        """Add the head's gradients to ``head_grads``; return the tokens' ``[R, H]``, if any token needs one.

        It can be called once per fill. ``out_view`` is memory that the result may be written to.
        """
        raise NotImplementedError

    def write(self, part: Part, upstream: Upstream, grads: Gradients, *, filled: bool = True) -> None:
        """Add the part's gradients to ``grads``; a block that is not ``filled`` is refilled first."""
        if not filled:
            self.refill(part, upstream)
        out_view = grads.hidden.out_view(part.rows)
        grads.hidden.write(part.rows, self.gradients(part, upstream, grads.head, out_view), out_view)

    def keep(self, index: Tensor, opened: OpenCall) -> None:
        """Go on with some of the tokens, which are those of ``opened``, once the block is filled with all."""
        self.opened, self.call = opened, opened.call


def fused_statistics(
    opened: OpenCall,
    part: Part,
    weight: Tensor,
    labels: Tensor,
    epilogue: Epilogue,
    values: dict[str, Tensor],
    out: Tensor | None = None,
) -> dict[str, Tensor]:
    """Statistics ``[R]`` of the softmax over the rows of ``weight``, some of them in ``values``; their logits never
    reach memory, but ``out [R, V]`` gets the projections, if given."""
    call = opened.call
    names, backend, invariant = call.block_names - OF_LOGITS, call.backend, call.batch_invariant
    if not names <= {"logp", "lse", "mean_logit", "entropy"}:
        return linear_softmax_statistics(
            part.hidden, weight, labels, names, epilogue, out, batch_invariant=invariant, backend=backend
        )
    linear_exponentials(
        part.hidden,
        weight,
        labels,
        out,
        epilogue,
        found=values,
        projections=out is not None,
        batch_invariant=invariant,
        backend=backend,
    )
    return values if len(names) == len(values) else {name: values[name] for name in names}


class Columns(Block):
    """Nothing: statistics come from kernels that keep no logits, gradients from logits that are computed again.

    Gradients, and statistics where the head's rows must be dequantized, walk the vocabulary in tiles of all of a part's
    tokens: grad_weight is written once for each part, and a row is dequantized once for each part and pass.
    """

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        self.memory: Tensor | None = None

    def _tile(self, tokens: int, columns: int) -> Tensor:
        """``[R, C]``: half-precision gradients, or fp32 projections, which their gradients overwrite."""
        if self.memory is None:
            work = self.call.work
            width = padded(min(self.call.plan.tile_columns, self.vocab_size))
            dtype = work.operand_dtype if work.fused else work.logits_dtype
            self.memory = torch.empty(self.rows, width, dtype=dtype, device=self.opened.device)
        return corner(self.memory, tokens, columns)

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        opened = self.opened
        if self.call.work.walks:
            computed = self._merged(part)
        else:
            computed = fused_statistics(opened, part, opened.weight, part.here, part.epilogue, part.values)
        if opened.others is not None:
            opened.merge_(part.rows, computed)
        if computed is not part.values:
            part.put(computed, whole=len(part.hidden) == self.opened.count)

    def _merged(self, part: Part) -> dict[str, Tensor]:
        """The statistics of all columns, merged from the statistics of each tile."""
        found, sizes = list[Mapping[str, Tensor]](), list[int]()
        for columns in blocks(self.vocab_size, self.call.plan.tile_columns):
            found.append(self._statistics(part, columns))
            sizes.append(columns.stop - columns.start)
            if len(found) == MOST_TILES:
                found, sizes = [self._merge(part, found, sizes)], [columns.stop]
        wide = self.call.work.logits_dtype
        merged = self._merge(part, found, sizes)
        return {name: value.to(torch.int64 if name == "argmax" else wide) for name, value in merged.items()}

    def _merge(self, part: Part, found: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> Mapping[str, Tensor]:
        """Statistics of the first columns, in fp64: there are many roundings, of few numbers."""
        columns, class_weight = sum(sizes), part.epilogue.class_weight
        parts = {name: torch.stack([tile[name].double() for tile in found]) for name in found[0]}
        labels = part.here.clamp(max=columns - 1)
        return merge(
            parts,
            on_device(tuple(sizes), labels.device),
            labels,
            None if class_weight is None else class_weight[:columns],
        )

    def _statistics(self, part: Part, columns: slice) -> Mapping[str, Tensor]:
        """Statistics of the softmax over a tile's columns; ``logp`` is any number for labels of other tiles."""
        opened, call, width = self.opened, self.call, columns.stop - columns.start
        projection, epilogue = opened.projection.columns(columns), part.epilogue.columns(columns)
        labels = (part.here - columns.start).clamp(0, width - 1)
        weight = projection.weights.matrix(call.work.operand_dtype)
        if call.work.fused and weight is not None:
            names, wide = call.block_names - {"argmax"}, torch.float32
            new = {name: torch.empty(len(labels), dtype=wide, device=opened.device) for name in names}
            return fused_statistics(opened, part, weight, labels, epilogue, new)
        projected = projection.into(self._tile(len(labels), width), part.hidden, 0, width)
        return softmax_statistics(
            projected, labels, call.block_names, epilogue, scratch=call.plan.scratch, backend=call.backend
        )

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        coefficients, out = SoftmaxGradient.of(upstream, part.values, self.call.query.class_weight), None
        width, fused = self.call.plan.tile_columns, self.call.work.fused and not self.call.work.walks
        starts = range(0, self.vocab_size, width)
        tiles: Any = self.opened.weight.split(width) if fused else [None] * len(starts)
        for start, rows in zip(starts, tiles, strict=True):
            columns = slice(start, min(start + width, self.vocab_size))
            out = self._add(part, coefficients, columns, rows, head_grads, out)
        return out

    def _add(
        self,
        part: Part,
        coefficients: SoftmaxGradient,
        columns: slice,
        rows: Tensor | None,
        head_grads: HeadGradients,
        out: Tensor | None,
    ) -> Tensor | None:
        """Add the gradients of a tile's columns.

        ``rows`` are the head's rows for these columns if no copy of them is needed. Otherwise they are copied here, and
        the copy is freed when this returns, before the next tile's is made.
        """
        opened, call = self.opened, self.call
        width = columns.stop - columns.start
        projection = None if rows is not None else opened.projection.columns(columns)
        weight: Any = rows if projection is None else projection.weights.matrix(call.work.operand_dtype)
        grad = self._tile(len(part.hidden), width)
        if projection is not None and (weight is None or not call.work.fused):
            projection.into(grad, part.hidden, 0, width)
            grad = projection_gradient(opened, grad, part, columns, coefficients, head_grads.bias)
        else:
            plain = opened.bias is None and call.query.class_weight is None
            linear_softmax_gradient_into(
                grad,
                part.hidden,
                weight,
                part.values["lse"],
                part.labels,
                coefficients,
                part.epilogue if plain else part.epilogue.columns(columns),
                first_column=opened.first_column + columns.start,
                vocab_size=call.vocab_size,
                backend=call.backend,
            )
        factor = weight if projection is None else projection
        return head_grads.add(grad, part.hidden, columns, first=part.rows.start == 0, out=out, rows=factor)


def projection_gradient(
    opened: OpenCall,
    projections: Tensor,
    part: Part,
    columns: slice,
    coefficients: SoftmaxGradient,
    grad_bias: Tensor | None,
) -> Tensor:
    """d loss / d projection ``[R, C]`` in the operand dtype, in the memory of the projections.

    A half-precision row overwrites the first half of the same fp32 row: no second buffer is needed.
    """
    call = opened.call
    return softmax_gradient_into(
        projections.view(call.work.operand_dtype)[:, : columns.stop - columns.start],
        projections,
        part.values["lse"],
        part.labels,
        coefficients,
        part.epilogue.columns(columns),
        first_column=opened.first_column + columns.start,
        vocab_size=call.vocab_size,
        grad_bias=None if grad_bias is None else grad_bias[columns],
        scratch=call.plan.scratch,
        backend=call.backend,
    )


class ExponentialBlock(Block):
    """``exp(logit - offset)`` in half precision, for losses of ``logp`` and ``lse``.

    The softmax is a multiple of it by row, so both products are taken with it as it is; see
    :mod:`liger_losses.kernels.linear_exp`. The labels' own terms are added separately, in fp32. For a label of another
    rank, any column of this one takes its place: as an offset, and as a term that is added separately.
    """

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        self.exponentials = torch.empty(
            rows, padded(opened.vocab_size), dtype=opened.call.work.operand_dtype, device=opened.device
        )
        self.offsets: Exponentials | None = None

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        call, opened, count = self.call, self.opened, part.rows.stop - part.rows.start
        self.offsets = linear_exponentials(
            part.hidden,
            opened.weight,
            part.here,
            corner(self.exponentials, count, self.vocab_size),
            part.epilogue,
            found=part.values,
            batch_invariant=call.batch_invariant,
            backend=call.backend,
        )
        if opened.others is not None:
            self.offsets = self._merged(self.offsets, part, opened.others[part.rows])

    def _merged(self, found: Exponentials, part: Part, others: Tensor) -> Exponentials:
        """The statistics of all ranks' columns; ``logp`` belongs to the column that stands here for the label."""
        _, lse, logp = found.stored
        logit_here = logp + lse
        named = {name: value for name, value in found._asdict().items() if value is not None and name != "offset"}
        self.opened.merge_(part.rows, named)
        return found._replace(logp=torch.where(others, logit_here - lse, logp))

    def keep(self, index: Tensor, opened: OpenCall) -> None:
        assert self.offsets is not None
        super().keep(index, opened)
        move_up_(self.exponentials, index)
        self.offsets = Exponentials(*(value[index] for value in self.offsets.stored))

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        assert self.offsets is not None
        call, opened, hidden, columns = self.call, self.opened, part.hidden, slice(0, self.vocab_size)
        count = part.rows.stop - part.rows.start
        scale, at_label, scaled = gradient_scales(
            upstream.get("logp"),
            upstream.get("lse"),
            self.offsets,
            head_grads.trained(hidden) if call.needs_weight else None,
            head_grads.labels_out(part.rows),
            None if opened.others is None else opened.others[part.rows],
            transform=part.epilogue.transform,
            backend=call.backend,
        )
        out, values = None, corner(self.exponentials, count, self.vocab_size)
        if any(call.needs_hidden):
            product = torch.empty(count, hidden.shape[1], dtype=torch.float32, device=opened.device)
            opened.projection.back_into(product, values, 0)
            out = torch.empty_like(hidden, memory_format=torch.contiguous_format) if out_view is None else out_view
            scale_and_add_label_rows(out, product, scale, at_label, opened.weight, part.here, backend=call.backend)
        if scaled is not None:
            head_grads.add_weight(values, scaled, columns, first=part.rows.start == 0)
        return out
