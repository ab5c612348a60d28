"""What a block of tokens holds over the whole vocabulary, between its statistics and its gradients.

R tokens of a block, H hidden size, V vocabulary size.

Both kinds are filled, give the statistics of their tokens, and give gradients once the loss's are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from liger_losses.chunked.engine.gradients import HeadGradients
from liger_losses.chunked.engine.plan import padded
from liger_losses.kernels.label_rows import scale_and_add_label_rows
from liger_losses.kernels.linear_exp import Exponentials, gradient_scales, linear_exponentials
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.matmul import start_beside
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics

if TYPE_CHECKING:
    from liger_losses.chunked.engine.stream import Stream


class LogitBlock:
    """Projections in fp32, and in their memory then their gradient: for any statistics, in any dtype."""

    def __init__(self, stream: Stream, rows: int) -> None:
        self.stream, self.job = stream, stream.job
        self.projections = stream.weight.new_empty(rows, padded(stream.vocab_size), dtype=self.job.logits_dtype)

    def fill(self, rows: slice, hidden: Tensor, values: Mapping[str, Tensor]) -> None:
        """From ``hidden [R, H]`` of these tokens to their statistics, into ``values``, ``[R]`` each."""
        projected = self.project(hidden)
        found = softmax_statistics(
            projected,
            self.job.tokens.labels[rows],
            self.job.names - {"selected_logps"},
            Epilogue(self.job.transform, self.stream.bias, self.job.class_weight),
            scratch=self.job.plan.scratch,
            backend=self.job.backend,
        )
        if self.job.selected is not None:
            columns = self.job.selected[rows]
            bias = None if self.stream.bias is None else self.stream.bias[columns]
            found["selected_logps"] = self.job.transform(projected.gather(1, columns), bias) - found["lse"][:, None]
        for name, value in values.items():
            value.copy_(found[name])

    def project(self, hidden: Tensor) -> Tensor:
        """The projections ``[R, V]`` of ``hidden [R, H]``: all that gradients need, statistics being known."""
        projected = self.projections[: len(hidden), : self.stream.vocab_size]
        self.stream.projection.into(projected, hidden, 0, self.stream.vocab_size)
        return projected

    def wait(self) -> None:
        """Nothing runs beside it."""

    def gradients(
        self,
        rows: slice,
        hidden: Tensor,
        values: Mapping[str, Tensor],
        upstream: Mapping[str, Tensor],
        head_grads: HeadGradients,
        place: Tensor | None = None,
    ) -> Tensor | None:
        """The tokens' gradient ``[R, H]``, if one is needed; the head's are added. It can be taken once.

        ``upstream`` is d loss / d statistic, ``[R]`` each; ``place`` is where the result would best be put.
        """
        columns = slice(0, self.stream.vocab_size)
        selected = upstream.get("selected_logps")
        if selected is not None:
            # Every log-probability adds -g p to the whole row; what it adds at its own column follows.
            others = {name: g for name, g in upstream.items() if name != "selected_logps"}
            upstream = {**others, "lse": others.get("lse", 0.0) - selected.sum(1)}
        coefficients = SoftmaxGradient.of(upstream, values, self.job.class_weight)
        grad = projection_gradient(self.stream, self.projections, rows, columns, values, coefficients, head_grads.bias)
        if selected is not None:
            self._add_selected(grad, rows, values, coefficients, selected, head_grads.bias)
        return head_grads.add(grad, hidden, columns, first=rows.start == 0)

    def _add_selected(
        self,
        grad: Tensor,
        rows: slice,
        values: Mapping[str, Tensor],
        coefficients: SoftmaxGradient,
        selected: Tensor,
        grad_bias: Tensor | None,
    ) -> None:
        """``selected [R, k]`` at the selected columns, which are written anew so that nothing is rounded twice."""
        job = self.job
        assert job.selected is not None
        assert coefficients.p_coef is not None
        columns, logps = job.selected[rows], values["selected_logps"]
        at_column = _added_up(columns, selected)
        slope = job.transform.slope(logps + values["lse"][:, None]) * job.transform.factor
        total = at_column + logps.exp() * coefficients.p_coef[:, None]
        if coefficients.label_coef is not None:
            at_label = columns == job.tokens.labels[rows, None]
            total += torch.where(at_label, coefficients.label_coef[:, None], 0.0)
        grad.scatter_(1, columns, (total * slope).to(grad.dtype))
        if grad_bias is not None:
            # Unlike index_add_, this is the same from run to run.
            grad_bias.index_put_((columns.flatten(),), (selected * slope).flatten(), accumulate=True)


def _added_up(columns: Tensor, values: Tensor) -> Tensor:
    """``values [R, k]``, where a row names a column of ``columns [R, k]`` several times the sum of them at each."""
    ordered, order = columns.sort(dim=-1, stable=True)
    first = torch.searchsorted(ordered, ordered)
    sums = torch.zeros_like(values).scatter_add_(1, first, values.gather(1, order))
    return torch.empty_like(values).scatter_(1, order, sums.gather(1, first))


def projection_gradient(
    stream: Stream,
    projections: Tensor,
    rows: slice,
    columns: slice,
    values: Mapping[str, Tensor],
    coefficients: SoftmaxGradient,
    grad_bias: Tensor | None,
) -> Tensor:
    """d loss / d projection ``[R, C]`` in the operand dtype, over the memory of the projections.

    A half-precision row takes the first half of its own fp32 row, so no second buffer is needed.
    """
    job, count, width = stream.job, rows.stop - rows.start, columns.stop - columns.start

    return softmax_gradient_into(
        projections.view(job.operand_dtype)[:count, :width],
        projections[:count, :width],
        values["lse"],
        job.tokens.labels[rows],
        coefficients,
        Epilogue(job.transform, stream.bias, job.class_weight).columns(columns),
        first_column=columns.start,
        vocab_size=stream.vocab_size,
        grad_bias=None if grad_bias is None else grad_bias[columns],
        scratch=job.plan.scratch,
        backend=job.backend,
    )


class ExponentialBlock:
    """``exp(logit - offset)`` in half precision, for losses of ``logp`` and ``lse``.

    The softmax is a multiple of it by row, so both products are taken with it as it is; see
    :mod:`liger_losses.kernels.linear_exp`. The labels' own terms are added apart, in fp32.
    """

    def __init__(self, stream: Stream, rows: int) -> None:
        self.stream, self.job = stream, stream.job
        self.exponentials = stream.weight.new_empty(rows, padded(stream.vocab_size))
        self.found: Exponentials | None = None
        self.product: Tensor | None = None
        self.product_is_done: Callable[[], None] | None = None

    def fill(self, rows: slice, hidden: Tensor, values: Mapping[str, Tensor]) -> None:
        """From ``hidden [R, H]`` of these tokens to their statistics, into ``values``, ``[R]`` each."""
        stream, job = self.stream, self.job
        exponentials = self.exponentials[: len(hidden), : stream.vocab_size]
        self.found = linear_exponentials(
            hidden,
            stream.weight,
            job.tokens.labels[rows],
            exponentials,
            Epilogue(job.transform, stream.bias),
            found=Exponentials.into(values),
            backend=job.backend,
        )
        if any(job.needs_hidden) and job.strategy != "resident":
            self._start_product(exponentials, hidden)

    def _start_product(self, exponentials: Tensor, hidden: Tensor) -> None:
        """With the head, beside the evaluation of the loss: it waits for no coefficient, as these scale its rows."""
        self.product = hidden.new_empty(hidden.shape, dtype=torch.float32)
        product = partial(self.stream.projection.back_into, self.product, exponentials, 0)
        self.product_is_done = start_beside(hidden.device, product)

    def wait(self) -> None:
        """Let what the caller queues next wait for what was started beside it."""
        if self.product_is_done is not None:
            self.product_is_done()
            self.product_is_done = None

    def gradients(
        self,
        rows: slice,
        hidden: Tensor,
        values: Mapping[str, Tensor],
        upstream: Mapping[str, Tensor],
        head_grads: HeadGradients,
        place: Tensor | None = None,
    ) -> Tensor | None:
        """The tokens' gradient ``[R, H]``, if one is needed; the head's are added.

        ``upstream`` is d loss / d statistic, ``[R]`` each; ``place`` is where the result would best be put.
        """
        assert self.found is not None
        coefficients = SoftmaxGradient.of(upstream, values, self.job.class_weight)
        job, columns = self.job, slice(0, self.stream.vocab_size)
        exponentials = self.exponentials[: len(hidden), columns]
        if any(job.needs_hidden) and self.product is None:
            self._start_product(exponentials, hidden)
        try:
            scale, at_label, scaled = gradient_scales(
                coefficients.p_coef,
                coefficients.label_coef,
                self.found,
                hidden if job.needs_weight else None,
                head_grads.at_labels(rows),
                transform=job.transform,
                backend=job.backend,
            )
            if scaled is not None:
                head_grads.add_weight(exponentials, scaled, columns, first=rows.start == 0)
        finally:
            self.wait()
        product, self.product = self.product, None
        if product is None:
            return None
        return scale_and_add_label_rows(
            torch.empty_like(hidden, memory_format=torch.contiguous_format) if place is None else place,
            product,
            scale,
            at_label,
            self.stream.weight,
            job.tokens.labels[rows],
            backend=job.backend,
        )
