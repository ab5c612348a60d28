"""What a block remembers of the logits of some tokens: nothing, exponentials or logits.

N active tokens, R tokens of a block, C columns of a slice, H hidden size, V vocabulary size, k selected columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine.accumulation import Gradients, HeadGradients
from liger_losses.chunked.engine.call import Call, OpenCall
from liger_losses.chunked.engine.plan import blocks, padded
from liger_losses.chunked.engine.query import registered_gradient, registered_values
from liger_losses.chunked.engine.ranks import on_device
from liger_losses.kernels.divergence import TEMPORARIES
from liger_losses.kernels.divergence_forms import finite_logs
from liger_losses.kernels.label_rows import scale_and_add_label_rows
from liger_losses.kernels.largest import largest, sum_of_probabilities
from liger_losses.kernels.linear_exp import Exponentials, gradient_scales, linear_exponentials
from liger_losses.kernels.linear_grad import linear_softmax_gradient_into
from liger_losses.kernels.linear_lse import Kept, few_rows, log_sum_exps_into, most_kept_rows
from liger_losses.kernels.linear_stats import linear_softmax_statistics
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.matmul import on_side_stream, start_beside
from liger_losses.kernels.move_rows import move_rows_
from liger_losses.kernels.online_softmax import merge
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics

#: Not statistics of the softmax over a row: blocks compute them from whole rows of logits.
OF_LOGITS = frozenset({"selected_logps", "columns", "rest", "registered"})
#: Columns are selected without logits in memory if they are at most one in so many: 64 projections are kept for each.
KEPT_COLUMNS = 256
#: Tiles whose statistics are merged at once: each merge is dozens of small operations.
MOST_TILES = 128

#: d loss / d statistic of some tokens, ``[R]`` each, by name.
Upstream = Mapping[str, Tensor]


class Part(NamedTuple):
    """Some of the active tokens."""

    rows: slice  # which of them
    hidden: Tensor  # [R, H], their hidden states in the operand dtype
    values: dict[str, Tensor]  # memory of their statistics, [R] each, by name
    epilogue: Epilogue  # from their projections to logits

    def first(self, count: int) -> Part:
        """The first ``count`` of these tokens."""
        if count == len(self.hidden):
            return self
        rows, at = slice(self.rows.start, self.rows.start + count), slice(0, count)
        values = {name: value[at] for name, value in self.values.items()}
        return Part(rows, self.hidden[at], values, self.epilogue.rows(at))

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


def _of_part(labels: Tensor, part: Part) -> Tensor:
    """The labels of the part's tokens; no view is made where the part has all active tokens."""
    return labels if part.rows.stop - part.rows.start == labels.shape[0] else labels[part.rows]


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

        It can be called once per fill. ``out_view`` is memory that the result may be written to. The result is there
        :meth:`beside` the caller's stream, and after :meth:`wait` for it.
        """
        raise NotImplementedError

    def write(self, part: Part, upstream: Upstream, grads: Gradients, *, filled: bool = True) -> None:
        """Add the part's gradients to ``grads``; a block that is not ``filled`` is refilled first."""
        if not filled:
            self.refill(part, upstream)
        out_view = grads.hidden.out_view(part.rows)
        gradient = self.gradients(part, upstream, grads.head, out_view)
        with self.beside():
            grads.hidden.write(part.rows, gradient, out_view)
        self.wait()

    def beside(self) -> AbstractContextManager[Any]:
        """The stream on which the gradients of hidden states are computed."""
        return nullcontext()

    #: Whether :meth:`move` and :meth:`keep` work.
    movable = False
    #: Whether :meth:`keep` is called once the block is filled, so that nothing is queued that depends on the number.
    waits = False

    def move(self, order: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Put tokens, once the block is filled, in the order of a :class:`~.zero_rows.Pending`. Only the first of them
        have their rows."""
        raise NotImplementedError

    def begin(self, count: int) -> None:
        """Queue what the first ``count`` tokens need before it is known how many are kept: so many at least, or all but
        these in vain."""

    def keep(self, opened: OpenCall, count: int) -> None:
        """Go on with the first ``count`` tokens of ``opened``, and queue what needs nothing but this number."""
        self.opened, self.call = opened, opened.call

    def wait(self) -> None:
        """Make the caller's stream wait for the work that the block started on another; a no-op where there is none."""

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()  # the block's memory is about to be freed


def fused_statistics(
    opened: OpenCall,
    part: Part,
    weight: Tensor,
    labels: Tensor,
    epilogue: Epilogue,
    values: dict[str, Tensor],
    out: Tensor | None = None,
) -> dict[str, Tensor]:
    """Statistics ``[R]`` of the softmax over the rows of ``weight``, into ``values`` where they are there; their logits
    never reach memory, but ``out [R, V]`` gets the projections, if given."""
    call = opened.call
    names, backend, invariant = call.block_names - OF_LOGITS, call.backend, call.batch_invariant
    if not names <= {"logp", "lse", "mean_logit", "entropy"}:
        return linear_softmax_statistics(
            part.hidden, weight, labels, names, epilogue, out, batch_invariant=invariant, backend=backend
        )
    found = linear_exponentials(
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
    if "logp" in names and len(names) == len(values):
        return values
    return {name: getattr(found, name) for name in {*names, "logp"}}


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
        whole = self.memory.shape == (tokens, columns)  # a view of all takes the host time too
        return self.memory if whole else self.memory[:tokens, :columns]

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        opened = self.opened
        if self.call.work.walks:
            computed = self._merged(part)
        else:
            labels = _of_part(opened.labels, part)
            computed = fused_statistics(opened, part, opened.weight, labels, part.epilogue, part.values)
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
        labels = self.opened.labels[part.rows].clamp(max=columns - 1)
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
        labels = (opened.labels[part.rows] - columns.start).clamp(0, width - 1)
        weight = projection.weights.matrix(call.work.operand_dtype)
        if call.work.fused and weight is not None:
            new = {name: torch.empty(len(labels), device=opened.device) for name in call.block_names - {"argmax"}}
            return fused_statistics(opened, part, weight, labels, epilogue, new)
        projected = projection.into(self._tile(len(labels), width), part.hidden, 0, width)
        return softmax_statistics(
            projected, labels, call.block_names, epilogue, scratch=call.plan.scratch, backend=call.backend
        )

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        opened, call = self.opened, self.call
        coefficients, out = SoftmaxGradient.of(upstream, part.values, call.query.class_weight), None
        labels, first = _of_part(call.tokens.labels, part), part.rows.start == 0
        plain = opened.bias is None and call.query.class_weight is None
        whole: Any = opened.weight if call.work.fused else None
        for start in range(0, self.vocab_size, call.plan.tile_columns):
            columns = slice(start, min(start + call.plan.tile_columns, self.vocab_size))
            width = columns.stop - start
            projection = opened.projection.columns(columns) if whole is None else None
            weight: Any = whole[columns] if projection is None else projection.weights.matrix(call.work.operand_dtype)
            grad = self._tile(len(part.hidden), width)
            if projection is not None and (weight is None or not call.work.fused):
                projection.into(grad, part.hidden, 0, width)
                grad = projection_gradient(opened, grad, part, columns, coefficients, head_grads.bias)
            else:
                linear_softmax_gradient_into(
                    grad,
                    part.hidden,
                    weight,
                    part.values["lse"],
                    labels,
                    coefficients,
                    part.epilogue if plain else part.epilogue.columns(columns),
                    first_column=opened.first_column + start,
                    vocab_size=call.vocab_size,
                    backend=call.backend,
                )
            rows = weight if projection is None else projection
            out = head_grads.add(grad, part.hidden, columns, first=first, out=out, rows=rows)
        return out


class LogitBlock(Block):
    """Projections in fp32, whose memory their gradient overwrites: for any statistics, in any dtype."""

    movable = True

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        #: Whether one kernel computes projections and statistics.
        wanted = self.call.batch_invariant or self.call.query.largest > 0
        self._fuses = wanted and self.call.work.fused_products
        #: Whether one kernel computes projections, and log-sum-exps where nothing else is asked for.
        selects = self.call.query.selects and not self.call.batch_invariant
        self._takes_tiles = selects and self.call.work.fused_products

    @cached_property
    def projections(self) -> Tensor:
        """Memory of the projections ``[R, V]``."""
        opened = self.opened
        #: One column beside the vocabulary takes what belongs to columns of other ranks.
        width = padded(opened.vocab_size + (opened.others is not None))
        return torch.empty(self.rows, width, dtype=self.call.work.logits_dtype, device=opened.device)

    def _without_logits(self, part: Part) -> bool:
        """Compute the log-probabilities of selected columns alone, from projections that do not reach memory, where a
        kernel does so and no gradient is to follow."""
        call, opened, k = self.call, self.opened, self.call.query.selected
        if call.strategy != "statistics" or opened.others is not None or k is None:
            return False
        if part.values.keys() != {"lse", "selected_logps"} or k.shape[1] * KEPT_COLUMNS > self.vocab_size:
            return False
        every = part.columns(call)
        for at in blocks(len(every), most_kept_rows(opened.device)):
            columns, lse, epilogue = every[at], part.values["lse"][at], part.epilogue.rows(at)
            given, kept = (lse, part.hidden[at], opened.weight, None, epilogue), Kept.of(columns, self.vocab_size)
            if log_sum_exps_into(*given, kept=kept, backend=call.backend) is None:
                return False
            bias = None if opened.bias is None else opened.bias[columns]
            part.values["selected_logps"][at] = epilogue.transform(kept.at(columns), bias) - lse[:, None]
        return True

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        call, labels = self.call, self.opened.labels[part.rows]
        names, weight, lse, tiles = call.block_names - OF_LOGITS, self.opened.weight, part.values["lse"], None
        alone = names == {"lse"} and not call.batch_invariant
        few = alone and few_rows(len(part.hidden))
        if self._takes_tiles and alone and not few and self._without_logits(part):
            return
        projected = self._projected(part)
        if self._takes_tiles and alone and not few:
            tiles = log_sum_exps_into(lse, part.hidden, weight, projected, part.epilogue, backend=call.backend)
        if tiles is not None:
            computed = {"lse": lse}
        elif self._fuses and not few:
            computed = fused_statistics(self.opened, part, weight, labels, part.epilogue, part.values, projected)
        else:
            self.opened.projection.into(projected, part.hidden, 0, self.vocab_size)
            computed = softmax_statistics(
                projected,
                labels,
                names,
                part.epilogue,
                scratch=call.plan.scratch,
                backend=call.backend,
            )
        if call.query.largest:
            self._add_largest(computed, projected, part, tiles)
        if call.query.selects and "selected_logps" in part.values.keys() - computed.keys():
            columns, owned = self._selected(computed["columns"] if call.query.largest else part.columns(call))
            bias = None if self.opened.bias is None else self.opened.bias[columns]
            logits = part.epilogue.transform(projected.gather(1, columns), bias)
            computed["selected_logps"] = (
                logits - computed["lse"][:, None] if owned is None else torch.where(owned, logits, 0.0)
            )
        if self.opened.others is not None:
            # All ranks have the columns of the largest.
            self.opened.merge_(part.rows, {name: value for name, value in computed.items() if name != "columns"})
        if "rest" in part.values.keys() - computed.keys():
            columns = part.columns(call) if call.query.selected is not None else computed["columns"]
            computed["rest"] = self._rest(projected, columns, computed["lse"], part.epilogue)
        if call.query.registered:
            computed["registered"] = projected.new_empty(len(projected), len(call.query.registered))
            for at, log_p, _ in self._log_probs(projected, computed["lse"], part.epilogue):
                computed["registered"][at] = registered_values(call.query.registered, log_p, call.ranks)
        part.put(computed, whole=len(part.hidden) == self.opened.count)

    def _rest(self, projected: Tensor, columns: Tensor, lse: Tensor, epilogue: Epilogue) -> Tensor:
        """The log-probability of all columns but ``[R, k]``, from the sum of their probabilities.

        The projections of the k columns are -inf while the sum is taken.
        """
        columns, owned = self._selected(columns)
        wide = projected
        if owned is not None:  # one column beside the vocabulary stands for all columns of other ranks
            wide = projected.as_strided((len(projected), self.vocab_size + 1), projected.stride())
            columns = torch.where(owned, columns, self.vocab_size)
        kept = wide.gather(1, columns)
        wide.scatter_(1, columns, -torch.inf)
        scratch, backend = self.call.plan.scratch, self.call.backend
        sums = sum_of_probabilities(projected, lse, epilogue, scratch=scratch, backend=backend)
        wide.scatter_(1, columns, kept)
        return self.call.ranks.sum_(sums).log()

    def _add_largest(self, computed: dict[str, Tensor], projected: Tensor, part: Part, tiles: Tensor | None) -> None:
        """Compute the columns ``[R, k]`` of the largest logits of the whole vocabulary, on all ranks that share it.

        If one process has the whole vocabulary, also compute their log-probabilities; and, if the query asks for it and
        the kernel has it anyway, the log-probability of all other columns.
        """
        k, backend, ranks = min(self.call.query.largest, self.vocab_size), self.call.backend, self.call.ranks
        if self.opened.others is not None:
            logits, columns, _ = largest(projected, part.epilogue, k, backend, tiles=tiles)
            computed["columns"] = ranks.largest(logits, columns + self.opened.first_column, self.call.query.largest)
            return
        names, lse = ("selected_logps", "columns"), computed["lse"]
        out = (part.values[names[0]], part.values[names[1]]) if part.values.keys() >= {*names} else None
        rest = "rest" in part.values
        found = largest(projected, part.epilogue, k, backend, tiles=tiles, lse=lse, out=out, rest=rest)
        computed.update(zip(names, found[:2], strict=True))
        if found.rest is not None:
            computed["rest"] = found.rest

    def _log_probs(
        self, projected: Tensor, lse: Tensor, epilogue: Epilogue
    ) -> Iterator[tuple[slice, Tensor, Epilogue]]:
        """Some rows at a time: which, their log-probabilities ``[r, V]``, and their epilogue."""
        row_bytes = TEMPORARIES * self.call.work.vocab_size * projected.dtype.itemsize  # as the largest rank has
        for at in blocks(len(projected), self.call.plan.scratch // max(row_bytes, 1)):
            own = epilogue.rows(at)
            yield at, finite_logs(own(projected[at]) - lse[at, None]), own

    def _selected(self, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """The selected columns ``[R, k]`` that this rank computes, and which they are (0 for others)."""
        if self.opened.others is None:
            return columns, None
        columns = columns - self.opened.first_column
        owned = (columns >= 0) & (columns < self.vocab_size)
        return torch.where(owned, columns, 0), owned

    def move(self, order: Tensor, sources: Tensor, targets: Tensor) -> None:
        move_rows_(self.projections, sources, targets, backend=self.call.backend)

    def refill(self, part: Part, upstream: Upstream) -> None:
        opened, projected = self.opened, self._projected(part)
        if self._fuses and self.call.batch_invariant:
            labels, lse = opened.labels[part.rows], part.values["lse"]
            new = {name: torch.empty_like(lse) for name in self.call.block_names - OF_LOGITS}  # forward's are saved
            fused_statistics(opened, part, opened.weight, labels, part.epilogue, new, projected)
        else:
            opened.projection.into(projected, part.hidden, 0, self.vocab_size)

    def _projected(self, part: Part) -> Tensor:
        """The memory of the part's projections, ``[R, V]``."""
        return self.projections[: len(part.hidden), : self.vocab_size]

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        columns = slice(0, self.vocab_size)
        selected = upstream.get("selected_logps")
        if selected is not None:
            # Every log-probability adds -g p to the whole row; what it adds at its label's column follows.
            others = {name: g for name, g in upstream.items() if name != "selected_logps"}
            upstream = {**others, "lse": others.get("lse", 0.0) - selected.sum(1)}
        registered = upstream.get("registered")
        upstream = {name: g for name, g in upstream.items() if name != "registered"}
        coefficients = SoftmaxGradient.of(upstream, part.values, self.call.query.class_weight)
        projected = self._projected(part)
        if registered is not None:
            self._write_registered(projected, part, registered, coefficients, head_grads.bias)
            grad = projected.view(self.call.work.operand_dtype)[:, columns]
        else:
            grad = projection_gradient(self.opened, projected, part, columns, coefficients, head_grads.bias)
        if selected is not None:
            self._add_selected(grad, part, coefficients, selected, head_grads.bias)
        return head_grads.add(grad, part.hidden, columns, first=part.rows.start == 0, into=out_view)

    def _write_registered(
        self,
        projected: Tensor,
        part: Part,
        upstream: Tensor,
        coefficients: SoftmaxGradient,
        grad_bias: Tensor | None,
    ) -> None:
        """Write the gradient of all statistics in the memory of the projections, ``upstream [R, m]`` of registered ones
        included: nothing is rounded twice."""
        query, call, opened = self.call.query, self.call, self.opened
        columns = torch.arange(self.vocab_size, device=opened.device) + opened.first_column
        own_weight = None if query.class_weight is None else query.class_weight[columns]
        labels, lse = call.tokens.labels[part.rows, None], part.values["lse"]
        for at, log_p, epilogue in self._log_probs(projected, lse, part.epilogue):
            logits, own = epilogue(projected[at]), coefficients.rows(at.start, at.stop)
            grad = own.at(logits, lse[at], columns == labels[at], own_weight, call.vocab_size)
            grad += registered_gradient(query.registered, log_p, upstream[at], call.ranks)
            grad = epilogue.transform.chain_(grad, logits)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            projected.view(call.work.operand_dtype)[at, : self.vocab_size].copy_(grad)

    def _add_selected(
        self, grad: Tensor, part: Part, coefficients: SoftmaxGradient, upstream: Tensor, grad_bias: Tensor | None
    ) -> None:
        """Write the gradient at the selected columns again, with ``upstream [R, k]``: nothing is rounded twice."""
        query, lse, transform = self.call.query, part.values["lse"], part.epilogue.transform
        columns, labels = part.columns(self.call), self.call.tokens.labels[part.rows, None]
        local, owned = self._selected(columns)
        logits = part.values["selected_logps"] + lse[:, None]
        slope = transform.slope(logits) * transform.factor(logits)
        class_weight = None if query.class_weight is None else query.class_weight[columns]
        total = coefficients.at(logits, lse, columns == labels, class_weight, self.call.vocab_size)
        total += upstream if query.largest else _sum_repeated(columns, upstream)
        if grad_bias is not None:
            added = upstream * slope if owned is None else torch.where(owned, upstream * slope, 0.0)
            # Unlike index_add_, this is the same from run to run.
            grad_bias.index_put_((local.flatten(),), added.flatten(), accumulate=True)
        if owned is not None:
            grad = grad.as_strided((len(grad), self.vocab_size + 1), grad.stride())
            local = torch.where(owned, local, self.vocab_size)
        grad.scatter_(1, local, (total * slope).to(grad.dtype))


def _sum_repeated(columns: Tensor, values: Tensor) -> Tensor:
    """``values [R, k]``; where a row of ``columns [R, k]`` repeats a column, the sum of its values at each place."""
    ordered, order = columns.sort(dim=-1, stable=True)
    first = torch.searchsorted(ordered, ordered)
    sums = torch.zeros_like(values).scatter_add_(1, first, values.gather(1, order))
    return torch.empty_like(values).scatter_(1, order, sums.gather(1, first))


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
        call.tokens.labels[part.rows],
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

    movable = True

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        self.exponentials = torch.empty(
            rows, padded(opened.vocab_size), dtype=opened.call.work.operand_dtype, device=opened.device
        )
        self.waits = opened.call.strategy == "resident"
        self.offsets: Exponentials | None = None
        self.product: Tensor | None = None
        self.begun = 0  # rows of it that are queued
        self.wait_for_product: Callable[[], None] | None = None

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        call, opened, count = self.call, self.opened, part.rows.stop - part.rows.start
        self.offsets = linear_exponentials(
            part.hidden,
            opened.weight,
            _of_part(opened.labels, part),
            self._values(count),
            part.epilogue,
            found=part.values,
            batch_invariant=call.batch_invariant,
            backend=call.backend,
        )
        if not self.waits:
            self._start_product(count)
        if opened.others is not None:
            self.offsets = self._merged(self.offsets, part, opened.others[part.rows])

    def _values(self, count: int) -> Tensor:
        """The exponentials ``[count, V]``; a view of all takes the host time too."""
        whole = self.exponentials.shape == (count, self.vocab_size)
        return self.exponentials if whole else self.exponentials[:count, : self.vocab_size]

    def _merged(self, found: Exponentials, part: Part, others: Tensor) -> Exponentials:
        """The statistics of all ranks' columns; ``logp`` belongs to the column that stands here for the label."""
        logit_here = found.logp + found.lse
        named = {name: value for name, value in found._asdict().items() if value is not None and name != "offset"}
        self.opened.merge_(part.rows, named)
        return found._replace(logp=torch.where(others, logit_here - found.lse, found.logp))

    def move(self, order: Tensor, sources: Tensor, targets: Tensor) -> None:
        assert self.offsets is not None
        move_rows_(self.exponentials, sources, targets, backend=self.call.backend)
        offset, lse, logp, *_ = self.offsets
        self.offsets = Exponentials(offset[order], lse[order], logp[order])

    def begin(self, count: int) -> None:
        self._start_product(count, len(self.exponentials))

    def keep(self, opened: OpenCall, count: int) -> None:
        assert self.offsets is not None
        super().keep(opened, count)
        self._start_product(count)
        self.offsets = Exponentials(*(value[:count] for value in self.offsets[:3] if value is not None))

    def _start_product(self, count: int, room: int = 0) -> None:
        """Start the product with the head before the loss is evaluated: the upstream gradients only scale its rows.

        Rows of the first ``count`` tokens that were not started before are started now. The buffer has room for
        ``room`` tokens, if these are more.
        """
        if not any(self.call.needs_hidden):
            return
        device, begun, size = self.opened.device, self.begun, max(count, room)
        if self.product is None:
            self.product = torch.empty(size, self.call.work.hidden_size, dtype=torch.float32, device=device)
        product, whole = self.product, self._values(count)
        if begun or size > count:
            product, whole = product[begun:count], whole[begun:]
        self.product, self.begun = self.product if len(self.product) == size else self.product[:size], max(begun, count)
        if count > begun:
            back = partial(self.opened.projection.back_into, product, whole, 0)
            self.wait_for_product = start_beside(device, back)

    def beside(self) -> AbstractContextManager[Any]:
        return on_side_stream(self.opened.device)

    def wait(self) -> None:
        if self.wait_for_product is not None:
            self.wait_for_product()
        self.wait_for_product, self.product, self.begun = None, None, 0

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        assert self.offsets is not None
        call, opened, hidden, columns = self.call, self.opened, part.hidden, slice(0, self.vocab_size)
        coefficients = SoftmaxGradient.of(upstream, part.values, call.query.class_weight)
        count, label_coef = part.rows.stop - part.rows.start, coefficients.label_coef
        if opened.others is not None and label_coef is not None:
            label_coef = label_coef.masked_fill(opened.others[part.rows], 0.0)
        if self.product is None:
            self._start_product(count)
        scale, at_label, scaled = gradient_scales(
            coefficients.p_coef,
            label_coef,
            self.offsets,
            head_grads.trained(hidden) if call.needs_weight else None,
            head_grads.labels_out(part.rows),
            transform=part.epilogue.transform,
            backend=call.backend,
        )
        product, out = self.product, None
        if product is not None:
            out = torch.empty_like(hidden, memory_format=torch.contiguous_format) if out_view is None else out_view
            labels, backend = _of_part(opened.labels, part), call.backend
            # Before the weight's product is queued: what follows of hidden states, as a sum over ranks, runs beside it.
            add = partial(scale_and_add_label_rows, out, product, scale, at_label, opened.weight, labels)
            self.wait_for_product = start_beside(hidden.device, partial(add, backend=backend))
        if scaled is not None:
            head_grads.add_weight(self._values(count), scaled, columns, first=part.rows.start == 0)
        return out
