"""A block that remembers the logits of some tokens: for any statistics, and the only one for selected columns.

R tokens of a block, V vocabulary size, k selected columns, m registered statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from liger_losses.chunked.engine.accumulation import HeadGradients
from liger_losses.chunked.engine.blocks import (
    OF_LOGITS,
    Block,
    Part,
    Upstream,
    fused_statistics,
    move_up_,
    projection_gradient,
)
from liger_losses.chunked.engine.call import OpenCall
from liger_losses.chunked.engine.plan import blocks, padded
from liger_losses.chunked.engine.query import REGISTERED, registered_gradient
from liger_losses.kernels.divergence import TEMPORARIES
from liger_losses.kernels.divergence_forms import finite_logs
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.row_lse import sum_of_probabilities
from liger_losses.kernels.softmax_grad import SoftmaxGradient
from liger_losses.kernels.softmax_stats import softmax_statistics

#: Of more logits than these, the largest are chosen among the largest of so many parts of the vocabulary: a part's
#: temporaries are small beside a block, and a GPU's cache holds a part of a row while it is read again and again.
_LOGITS, _PARTS = 2**21, 16


def largest(projected: Tensor, epilogue: Epilogue, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row of ``projected [R, V]``, in descending order, and their columns."""
    size = projected.shape[1] if projected.numel() <= _LOGITS else max(-(-projected.shape[1] // _PARTS), 4 * k)
    values, ids = list[Tensor](), list[Tensor]()
    for columns in blocks(projected.shape[1], size):
        logits = epilogue.columns(columns)(projected[:, columns])
        value, at = logits.topk(min(k, logits.shape[1]), -1)
        values.append(value)
        ids.append(at + columns.start)
    if len(values) == 1:
        return values[0], ids[0]
    value, at = torch.cat(values, -1).topk(k, -1)
    return value, torch.cat(ids, -1).gather(1, at)


class LogitBlock(Block):
    """Projections in fp32, whose memory their gradient overwrites: for any statistics, in any dtype."""

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        #: Whether one kernel computes projections and statistics.
        self._fuses = self.call.batch_invariant and self.call.work.fused_products

    @cached_property
    def projections(self) -> Tensor:
        """Memory of the projections ``[R, V]``."""
        opened = self.opened
        #: One column beside the vocabulary takes what belongs to columns of other ranks.
        width = padded(opened.vocab_size + (opened.others is not None))
        return torch.empty(self.rows, width, dtype=self.call.work.logits_dtype, device=opened.device)

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        call = self.call
        names, projected = call.block_names - OF_LOGITS, self._projected(part)
        if self._fuses:
            computed = fused_statistics(
                self.opened, part, self.opened.weight, part.here, part.epilogue, part.values, projected
            )
        else:
            self.opened.projection.into(projected, part.hidden, 0, self.vocab_size)
            computed = softmax_statistics(
                projected, part.here, names, part.epilogue, scratch=call.plan.scratch, backend=call.backend
            )
        if call.query.largest:
            self._add_largest(computed, projected, part)
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
                sums = [REGISTERED[name](log_p).sum(1) for name in call.query.registered]
                computed["registered"][at] = call.ranks.sum_(torch.stack(sums, 1))
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
        if epilogue.transform.softcap is not None:  # of which -inf, here a mark, is a finite logit
            projected.clamp_(min=torch.finfo(projected.dtype).min)
        kept = wide.gather(1, columns)
        wide.scatter_(1, columns, -torch.inf)
        scratch, backend = self.call.plan.scratch, self.call.backend
        sums = sum_of_probabilities(projected, lse, epilogue, scratch=scratch, backend=backend)
        wide.scatter_(1, columns, kept)
        return self.call.ranks.sum_(sums).log()

    def _add_largest(self, computed: dict[str, Tensor], projected: Tensor, part: Part) -> None:
        """Compute the columns ``[R, k]`` of the largest logits of the whole vocabulary, on all ranks that share it; and
        their log-probabilities, if one process has the whole vocabulary."""
        k = self.call.query.largest
        logits, columns = largest(projected, part.epilogue, min(k, self.vocab_size))
        if self.opened.others is not None:
            columns = self.call.ranks.largest(logits, columns + self.opened.first_column, k)
        else:
            computed["selected_logps"] = logits - computed["lse"][:, None]
        computed["columns"] = columns

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

    def keep(self, index: Tensor, opened: OpenCall) -> None:
        super().keep(index, opened)
        move_up_(self.projections, index)

    def refill(self, part: Part, upstream: Upstream) -> None:
        opened, projected = self.opened, self._projected(part)
        if self._fuses:
            lse = part.values["lse"]
            new = {name: torch.empty_like(lse) for name in self.call.block_names - OF_LOGITS}  # forward's are saved
            fused_statistics(opened, part, opened.weight, part.here, part.epilogue, new, projected)
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
        self, projected: Tensor, part: Part, upstream: Tensor, coefficients: SoftmaxGradient, grad_bias: Tensor | None
    ) -> None:
        """Write the gradient of all statistics in the memory of the projections, ``upstream [R, m]`` of registered ones
        included: nothing is rounded twice."""
        query, call, opened = self.call.query, self.call, self.opened
        columns = torch.arange(self.vocab_size, device=opened.device) + opened.first_column
        own_weight = None if query.class_weight is None else query.class_weight[columns]
        labels, lse = part.labels[:, None], part.values["lse"]
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
        columns, labels = part.columns(self.call), part.labels[:, None]
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
