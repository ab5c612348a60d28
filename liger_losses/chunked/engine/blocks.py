"""What a block of tokens holds over the whole vocabulary, and where its gradients are accumulated.

N active tokens, R tokens of a block, C columns of a slice, H hidden size, V vocabulary size, k selected columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import OpenCall
from liger_losses.chunked.engine.plan import blocks, padded
from liger_losses.chunked.engine.ranks import VocabularyRanks, merge_logps
from liger_losses.kernels._tiles import with_contiguous_rows
from liger_losses.kernels.label_rows import add_to_label_rows_, label_logits, scale_and_add_label_rows
from liger_losses.kernels.linear_exp import Exponentials, gradient_scales, linear_exponentials
from liger_losses.kernels.linear_stats import linear_softmax_statistics
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.matmul import matmul_into, start_beside
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics

#: Of a product with fewer multiplications, the host takes longer to start it on another stream than that gains.
MIN_BESIDE = 1.5e11


class HeadGradients:
    """Gradients of weight and bias."""

    def __init__(self, opened: OpenCall) -> None:
        self.opened, self.call, self.projection = opened, opened.call, opened.projection
        weight, bias = opened.trained, opened.bias
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.label_coefficients: Tensor | None = None
        if self.call.needs_weight:
            new = torch.empty if opened.count else torch.zeros  # the first block overwrites it
            shape = (opened.weight_rows, weight.shape[1])
            self.whole_weight = new(shape, dtype=self.call.grad_weight_dtype, device=weight.device)
            if opened.weight_rows > opened.vocab_size:
                self.whole_weight[opened.vocab_size :].zero_()
            self.weight = self.whole_weight[: opened.vocab_size]
        if self.call.needs_bias and bias is not None:
            self.whole_bias = torch.zeros(opened.weight_rows, dtype=self.call.work.logits_dtype, device=bias.device)
            self.bias = self.whole_bias[: opened.vocab_size]

    def add(
        self,
        grad: Tensor,
        hidden: Tensor,
        columns: slice,
        *,
        first: bool,
        out: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Tensor | None:
        """Add ``grad.T @ hidden`` to the weight's gradient and return ``out + grad @ weight[columns]``, side by side.

        ``into`` is memory that may take the result where there is no ``out``.

        ``grad`` is d loss / d projection ``[R, C]`` in the operand dtype; ``first`` says whether these are the first
        tokens whose gradients reach these columns. One product over the whole vocabulary is rounded to half precision
        once, a sum of several is accumulated in fp32. Returns ``None`` if no hidden state needs a gradient.
        """
        call, accumulate = self.call, out is not None
        if out is None and any(call.needs_hidden):
            whole = grad.shape[1] == self.opened.vocab_size <= self.projection.weight_chunk
            dtype = call.work.operand_dtype if whole else call.work.logits_dtype
            fits = into is not None and into.dtype == dtype and into.is_contiguous()
            out = into if fits else hidden.new_empty(hidden.shape, dtype=dtype)
        # The product with the head takes longer per tile: started first, it leaves its last wave to the other.
        wait = None
        if out is not None:
            product = partial(self.projection.back_into, out, grad, columns.start, accumulate=accumulate)
            if grad.numel() * hidden.shape[1] >= MIN_BESIDE:
                wait = start_beside(grad.device, product)
            else:
                product()
        try:
            self.add_weight(grad, self.trained(hidden), columns, first=first)
        finally:
            if wait is not None:
                wait()
        return out

    def add_weight(self, grad: Tensor, hidden: Tensor, columns: slice, *, first: bool) -> None:
        """Add ``grad.T @ hidden`` alone, of :meth:`trained` columns, if the weight needs a gradient."""
        if self.weight is not None:
            for part in blocks(grad.shape[1], self.projection.weight_chunk):
                target = self.weight[columns.start + part.start : columns.start + part.stop]
                matmul_into(target, grad[:, part].t(), hidden, accumulate=not first)

    def trained(self, hidden: Tensor) -> Tensor:
        """The columns of hidden states that the weight multiplies, and not what is quantized beside it."""
        return hidden[:, self.opened.frozen_columns :] if self.opened.frozen_columns else hidden

    def labels_out(self, rows: slice) -> Tensor | None:
        """Where a block writes the coefficients ``[R]`` of its labels' own terms, which :meth:`results` adds."""
        if self.weight is None:
            return None
        if self.label_coefficients is None:
            self.label_coefficients = torch.empty(self.opened.count, device=self.weight.device)
        return self.label_coefficients[rows]

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """``(grad_weight, grad_bias)``, in the dtypes of weight and bias."""
        opened, tokens = self.opened, self.call.tokens
        if self.weight is not None and self.label_coefficients is not None:
            # All tokens of a label at once, in fp32: however many blocks there were, this is rounded once.
            for part, hidden, index in tokens.sources(opened.flat, self.call.plan.rows):
                labels, coefficients = opened.labels[part], self.label_coefficients[part]
                hidden = self.trained(hidden)
                add_to_label_rows_(self.weight, labels, coefficients, hidden, index, backend=self.call.backend)
        return (
            None if self.weight is None else self.whole_weight.to(opened.trained.dtype),
            None if self.bias is None or opened.bias is None else self.whole_bias.to(opened.bias.dtype),
        )


class HiddenGradients:
    """Gradients of all hidden states: 0 for tokens without loss, ``None`` for tensors that need none.

    ``sums_over`` names the ranks whose parts are summed, one part while the next is computed.
    """

    def __init__(self, opened: OpenCall, sums_over: VocabularyRanks | None) -> None:
        self.tokens, self.sums_over = opened.call.tokens, sums_over
        self.dtype = functools.reduce(torch.promote_types, [part.dtype for part in opened.hidden_states])
        self.summing: tuple[slice, Tensor, Any] | None = None
        #: Where all tokens are active, every row is written.
        new = torch.empty if opened.count and all(i is None for i in self.tokens.indices) else torch.zeros
        self.results = [
            new(part.shape, dtype=part.dtype, device=part.device) if need else None
            for part, need in zip(opened.hidden_states, opened.call.needs_hidden, strict=True)
        ]
        self.flat = [None if part is None else part.view(-1, part.shape[-1]) for part in self.results]

    def out_view(self, rows: slice) -> Tensor | None:
        """The slice ``[R, H]`` of the gradient for these active tokens, or ``None`` if they are scattered."""
        pieces = self.tokens.pieces(rows.start, rows.stop)
        if len(pieces) != 1:
            return None
        ((part, first, last),) = pieces
        target = self.flat[part]
        return None if target is None or self.tokens.indices[part] is not None else target[first:last]

    def write(self, rows: slice, values: Tensor | None) -> None:
        """Store the gradients ``[R, H]`` of some active tokens, unless they are in their :meth:`out_view` already."""
        if values is None:
            return
        out_view = self.out_view(rows)
        if out_view is not None and out_view.data_ptr() != values.data_ptr():
            out_view.copy_(values)
        if self.sums_over is not None:
            self.finish()
            part = values.to(self.dtype).contiguous() if out_view is None else out_view
            self.summing = rows, part, self.sums_over.start_sum_(part)
        elif out_view is None:
            self.tokens.scatter_(self.flat, rows.start, rows.stop, values)

    def finish(self) -> None:
        """Wait for the last sum over ranks, and store it."""
        if self.summing is None:
            return
        (rows, part, work), self.summing = self.summing, None
        work.wait()
        if self.out_view(rows) is None:
            self.tokens.scatter_(self.flat, rows.start, rows.stop, part)


class Gradients:
    """All gradients of a call."""

    def __init__(self, opened: OpenCall) -> None:
        self.head, self.hidden = HeadGradients(opened), HiddenGradients(opened, opened.sums_over)

    def results(self) -> tuple[Tensor | None, ...]:
        """``(grad_weight, grad_bias, *grad_hidden)``."""
        head = self.head.results()
        self.hidden.finish()
        return *head, *self.hidden.results


#: d loss / d statistic of some tokens, ``[R]`` each, by name.
Upstream = Mapping[str, Tensor]


class Part(NamedTuple):
    """Some of the active tokens."""

    rows: slice  # which of them
    hidden: Tensor  # [R, H], their hidden states in the operand dtype
    values: dict[str, Tensor]  # memory of their statistics, [R] each, by name
    epilogue: Epilogue  # from their projections to logits

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
    """The memory of one part at a time: it is filled, gives statistics, and gives gradients once the loss's are known.

    ``rows`` is the largest number of tokens of a part.
    """

    def __init__(self, opened: OpenCall, rows: int) -> None:
        self.opened, self.call, self.vocab_size = opened, opened.call, opened.vocab_size

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        """Compute the part's statistics into its ``values``.

        ``upstream`` is given where it is known before any statistic: a block may then take both at once.
        """
        raise NotImplementedError

    def refill(self, part: Part, upstream: Upstream) -> None:
        """Restore what :meth:`gradients` needs, the statistics being known from an earlier pass."""
        raise NotImplementedError

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        """Add the head's gradients to ``head_grads``; return the tokens' ``[R, H]``, if any token needs one.

        It can be called once per fill. ``out_view`` is memory that the result may be written to.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Make the caller's stream wait for the work that the block started on another; a no-op where there is none."""

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()  # the block's memory is about to be freed


def fused_statistics(opened: OpenCall, part: Part, out: Tensor | None = None) -> dict[str, Tensor]:
    """Statistics ``[R]`` whose logits never reach memory, by name; ``out [R, V]`` gets the projections, if given."""
    call, labels = opened.call, _of_part(opened.labels, part)
    names, backend, invariant = call.block_names - {"selected_logps"}, call.backend, call.batch_invariant
    if not names <= {"logp", "lse", "mean_logit", "entropy"}:
        return linear_softmax_statistics(
            part.hidden, opened.weight, labels, names, part.epilogue, out, batch_invariant=invariant, backend=backend
        )
    found = linear_exponentials(
        part.hidden,
        opened.weight,
        labels,
        out,
        part.epilogue,
        found=Exponentials.into(part.values),
        projections=out is not None,
        batch_invariant=invariant,
        backend=backend,
    )
    return {name: getattr(found, name) for name in {*names, "logp"}}


class LogitBlock(Block):
    """Projections in fp32, whose memory their gradient overwrites: for any statistics, in any dtype."""

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        #: One column beside the vocabulary takes what belongs to columns of other ranks.
        width = padded(opened.vocab_size + (opened.owned is not None))
        self.projections = opened.weight.new_empty(rows, width, dtype=self.call.work.logits_dtype)

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        call, projected = self.call, self.projections[: len(part.hidden), : self.vocab_size]
        if call.batch_invariant and call.work.fused_products:
            computed = fused_statistics(self.opened, part, projected)
        else:
            self._project(part.hidden, fixed=call.batch_invariant)
            computed = softmax_statistics(
                projected,
                self.opened.labels[part.rows],
                call.block_names - {"selected_logps"},
                part.epilogue,
                scratch=call.plan.scratch,
                backend=call.backend,
            )
        if call.query.selected is not None and "selected_logps" in part.values:
            columns, owned = self._selected(part.rows)
            bias = None if self.opened.bias is None else self.opened.bias[columns]
            logits = part.epilogue.transform(projected.gather(1, columns), bias)
            computed["selected_logps"] = (
                logits - computed["lse"][:, None] if owned is None else torch.where(owned, logits, 0.0)
            )
        if call.shard is not None:
            self.opened.merge_(part.rows, computed)
        part.put(computed, whole=len(part.hidden) == self.opened.count)

    def _selected(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The selected columns ``[R, k]`` among those computed here, and which are (0 stands for those of others)."""
        assert self.call.query.selected is not None
        columns = self.call.query.selected[rows]
        if self.opened.owned is None:
            return columns, None
        columns = columns - self.opened.first_column
        owned = (columns >= 0) & (columns < self.vocab_size)
        return torch.where(owned, columns, 0), owned

    def refill(self, part: Part, upstream: Upstream) -> None:
        self._project(part.hidden)

    def _project(self, hidden: Tensor, fixed: bool = False) -> None:
        projection = self.opened.projection
        project = projection.into_fixed if fixed else projection.into
        project(self.projections[: len(hidden), : self.vocab_size], hidden, 0, self.vocab_size)

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        columns = slice(0, self.vocab_size)
        selected = upstream.get("selected_logps")
        if selected is not None:
            # Every log-probability adds -g p to the whole row; what it adds at its own column follows.
            others = {name: g for name, g in upstream.items() if name != "selected_logps"}
            upstream = {**others, "lse": others.get("lse", 0.0) - selected.sum(1)}
        coefficients = SoftmaxGradient.of(upstream, part.values, self.call.query.class_weight)
        grad = projection_gradient(self.opened, self.projections, part, columns, coefficients, head_grads.bias)
        if selected is not None:
            self._add_selected(grad, part, coefficients, selected, head_grads.bias)
        return head_grads.add(grad, part.hidden, columns, first=part.rows.start == 0, into=out_view)

    def _add_selected(
        self, grad: Tensor, part: Part, coefficients: SoftmaxGradient, upstream: Tensor, grad_bias: Tensor | None
    ) -> None:
        """Write the gradient at the selected columns anew, ``upstream [R, k]`` included: nothing is rounded twice."""
        call = self.call
        assert call.query.selected is not None
        assert coefficients.p_coef is not None
        columns, logps = call.query.selected[part.rows], part.values["selected_logps"]
        local, owned = self._selected(part.rows)
        logits, transform = logps + part.values["lse"][:, None], part.epilogue.transform
        slope = transform.slope(logits) * transform.factor(logits)
        total = _sum_repeated(columns, upstream) + logps.exp() * coefficients.p_coef[:, None]
        if coefficients.label_coef is not None:
            at_label = columns == call.tokens.labels[part.rows, None]
            total += torch.where(at_label, coefficients.label_coef[:, None], 0.0)
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

    A half-precision row overwrites the first half of its own fp32 row, so that no second buffer is needed.
    """
    call, count, width = opened.call, len(part.hidden), columns.stop - columns.start
    return softmax_gradient_into(
        projections.view(call.work.operand_dtype)[:count, :width],
        projections[:count, :width],
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
    :mod:`liger_losses.kernels.linear_exp`. The labels' own terms are added separately, in fp32.
    """

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        self.exponentials = opened.weight.new_empty(rows, padded(opened.vocab_size))
        #: Where ranks share the vocabulary, the labels' logits ``[N]``, and -1 in place of labels of other ranks; else
        #: each block computes its own.
        self.label_logits: Tensor | None = None
        self.labels = opened.labels
        if opened.call.shard is not None and opened.owned is not None:
            self.label_logits = self._label_logits(opened.call.shard, opened.owned)
            self.labels = opened.labels.masked_fill(~opened.owned, -1)
        self.offsets: Exponentials | None = None
        self.product: Tensor | None = None
        self.wait_for_product: Callable[[], None] | None = None

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        call, opened, exponentials = self.call, self.opened, self.exponentials
        size = part.rows.stop - part.rows.start, self.vocab_size
        if exponentials.shape != size:  # a view of all takes the host time before the product too
            exponentials = exponentials[: size[0], : size[1]]
        label_logit = None if self.label_logits is None else self.label_logits[part.rows]
        self.offsets = linear_exponentials(
            part.hidden,
            opened.weight,
            _of_part(self.labels, part),
            exponentials,
            part.epilogue,
            found=Exponentials.into(part.values),
            label_logit=label_logit,
            batch_invariant=call.batch_invariant,
            backend=call.backend,
        )
        if any(call.needs_hidden) and call.strategy != "resident":
            self._start_product(exponentials, part.hidden)
        if call.shard is not None and label_logit is not None:
            self.offsets.logp.copy_(merge_logps(call.shard.gather(self.offsets.logp)))
            torch.sub(label_logit, self.offsets.logp, out=self.offsets.lse)
            if self.offsets.mean_logit is not None:
                call.shard.sum_(self.offsets.mean_logit.mul_(self.vocab_size / call.vocab_size))

    def _label_logits(self, shard: VocabularyRanks, owned: Tensor) -> Tensor:
        """All labels' logits, each from the rank that has its row: one exchange, and none between blocks."""
        opened, call, found = self.opened, self.call, []
        # At once where nothing is copied: no product can start before.
        for rows in blocks(opened.count, call.plan.rows if call.work.gathers else opened.count):
            hidden = call.tokens.masked(call.tokens.gather(opened.flat, rows.start, rows.stop), rows)
            hidden = hidden.to(call.work.operand_dtype)
            hidden, labels = with_contiguous_rows(hidden), opened.labels[rows]
            found.append(label_logits(hidden, opened.weight, labels, opened.epilogue.rows(rows), backend=call.backend))
        mine = found[0] if len(found) == 1 else torch.cat([torch.empty(0, device=opened.weight.device), *found])
        return shard.sum_(mine.masked_fill_(~owned, 0.0))

    def _start_product(self, exponentials: Tensor, hidden: Tensor) -> None:
        """Start the product with the head before the loss is evaluated: the upstream gradients only scale its rows."""
        self.product = hidden.new_empty(hidden.shape, dtype=torch.float32)
        product = partial(self.opened.projection.back_into, self.product, exponentials, 0)
        self.wait_for_product = start_beside(hidden.device, product)

    def wait(self) -> None:
        if self.wait_for_product is not None:
            self.wait_for_product()
            self.wait_for_product = None

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        assert self.offsets is not None
        call, opened, hidden, columns = self.call, self.opened, part.hidden, slice(0, self.vocab_size)
        coefficients = SoftmaxGradient.of(upstream, part.values, call.query.class_weight)
        exponentials = self.exponentials[: len(hidden), columns]
        if any(call.needs_hidden) and self.product is None:
            self._start_product(exponentials, hidden)
        try:
            scale, at_label, scaled = gradient_scales(
                coefficients.p_coef,
                coefficients.label_coef,
                self.offsets,
                head_grads.trained(hidden) if call.needs_weight else None,
                head_grads.labels_out(part.rows),
                transform=part.epilogue.transform,
                backend=call.backend,
            )
            if opened.owned is not None:
                at_label.masked_fill_(~opened.owned[part.rows], 0.0)
            if scaled is not None:
                head_grads.add_weight(exponentials, scaled, columns, first=part.rows.start == 0)
        finally:
            self.wait()
        product, self.product = self.product, None
        if product is None:
            return None
        return scale_and_add_label_rows(
            torch.empty_like(hidden, memory_format=torch.contiguous_format) if out_view is None else out_view,
            product,
            scale,
            at_label,
            opened.weight,
            opened.labels[part.rows],
            backend=call.backend,
        )
