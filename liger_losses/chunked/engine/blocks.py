"""What a block of tokens holds over the whole vocabulary, between its statistics and its gradients.

N active tokens, R tokens of a block, H hidden size, V vocabulary size, k selected columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import OpenCall
from liger_losses.chunked.engine.gradients import HeadGradients
from liger_losses.chunked.engine.plan import padded
from liger_losses.kernels.label_rows import scale_and_add_label_rows
from liger_losses.kernels.linear_exp import Exponentials, gradient_scales, linear_exponentials
from liger_losses.kernels.matmul import start_beside
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics

#: d loss / d statistic of some tokens, ``[R]`` each, by name.
Upstream = Mapping[str, Tensor]


class Part(NamedTuple):
    """Some of the active tokens.

    Args:
        rows: which of them.
        hidden: ``[R, H]``, their hidden states in the operand dtype.
        values: ``[R]`` each, memory of their statistics, by name.
    """

    rows: slice
    hidden: Tensor
    values: dict[str, Tensor]


class Block:
    """The memory of one part at a time: it is filled, gives statistics, and gives gradients once the loss's are known.

    Args:
        opened: the call and its tensors.
        rows: the largest number of tokens of a part.
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


class LogitBlock(Block):
    """Projections in fp32, whose memory their gradient overwrites: for any statistics, in any dtype."""

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        self.projections = opened.weight.new_empty(rows, padded(opened.vocab_size), dtype=self.call.work.logits_dtype)

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        call, projected = self.call, self._project(part.hidden)
        computed = softmax_statistics(
            projected,
            call.tokens.labels[part.rows],
            call.block_names - {"selected_logps"},
            self.opened.epilogue,
            scratch=call.plan.scratch,
            backend=call.backend,
        )
        if call.query.selected is not None:
            columns = call.query.selected[part.rows]
            bias = None if self.opened.bias is None else self.opened.bias[columns]
            logits = call.transform(projected.gather(1, columns), bias)
            computed["selected_logps"] = logits - computed["lse"][:, None]
        for name, value in computed.items():
            part.values[name].copy_(value)

    def refill(self, part: Part, upstream: Upstream) -> None:
        self._project(part.hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        projected = self.projections[: len(hidden), : self.vocab_size]
        return self.opened.projection.into(projected, hidden, 0, self.vocab_size)

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
        return head_grads.add(grad, part.hidden, columns, first=part.rows.start == 0)

    def _add_selected(
        self, grad: Tensor, part: Part, coefficients: SoftmaxGradient, upstream: Tensor, grad_bias: Tensor | None
    ) -> None:
        """Write the gradient at the selected columns anew, ``upstream [R, k]`` included: nothing is rounded twice."""
        call = self.call
        assert call.query.selected is not None
        assert coefficients.p_coef is not None
        columns, logps = call.query.selected[part.rows], part.values["selected_logps"]
        slope = call.transform.slope(logps + part.values["lse"][:, None]) * call.transform.factor
        total = _sum_repeated(columns, upstream) + logps.exp() * coefficients.p_coef[:, None]
        if coefficients.label_coef is not None:
            at_label = columns == call.tokens.labels[part.rows, None]
            total += torch.where(at_label, coefficients.label_coef[:, None], 0.0)
        grad.scatter_(1, columns, (total * slope).to(grad.dtype))
        if grad_bias is not None:
            # Unlike index_add_, this is the same from run to run.
            grad_bias.index_put_((columns.flatten(),), (upstream * slope).flatten(), accumulate=True)


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
        opened.epilogue.columns(columns),
        first_column=columns.start,
        vocab_size=opened.vocab_size,
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
        self.offsets: Exponentials | None = None
        self.product: Tensor | None = None
        self.wait_for_product: Callable[[], None] | None = None

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        call, opened = self.call, self.opened
        exponentials = self.exponentials[: len(part.hidden), : self.vocab_size]
        self.offsets = linear_exponentials(
            part.hidden,
            opened.weight,
            call.tokens.labels[part.rows],
            exponentials,
            opened.epilogue,
            found=Exponentials.into(part.values),
            backend=call.backend,
        )
        if any(call.needs_hidden) and call.strategy != "resident":
            self._start_product(exponentials, part.hidden)

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
        call, hidden, columns = self.call, part.hidden, slice(0, self.vocab_size)
        coefficients = SoftmaxGradient.of(upstream, part.values, call.query.class_weight)
        exponentials = self.exponentials[: len(hidden), columns]
        if any(call.needs_hidden) and self.product is None:
            self._start_product(exponentials, hidden)
        try:
            scale, at_label, scaled = gradient_scales(
                coefficients.p_coef,
                coefficients.label_coef,
                self.offsets,
                hidden if call.needs_weight else None,
                head_grads.labels_out(part.rows),
                transform=call.transform,
                backend=call.backend,
            )
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
            self.opened.weight,
            call.tokens.labels[part.rows],
            backend=call.backend,
        )
