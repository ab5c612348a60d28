"""Where gradients are added up: those of the head block by block, those of hidden states token by token.

N tokens that carry loss, H hidden size, V vocabulary size, R tokens of a block, C columns of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from liger_losses.kernels.label_rows import add_to_label_rows_
from liger_losses.kernels.matmul import matmul_into, side_by_side

if TYPE_CHECKING:
    from liger_losses.chunked.stream import Stream


class HeadGradients:
    """Gradients of weight and bias."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.job, self.projection = stream, stream.job, stream.projection
        weight, bias = stream.weight, stream.bias
        self.weight = self.bias = None
        self.at_label: Tensor | None = None
        if self.job.needs_weight:
            new = torch.empty if stream.count else torch.zeros  # the first block overwrites it
            self.weight = new(weight.shape, dtype=self.job.grad_weight_dtype, device=weight.device)
        if self.job.needs_bias and bias is not None:
            self.bias = torch.zeros(bias.shape, dtype=self.job.logits_dtype, device=bias.device)

    def add(
        self,
        grad: Tensor,
        hidden: Tensor,
        columns: slice,
        *,
        first: bool,
        out: Tensor | None = None,
        accumulate: bool = True,
        weight_hidden: Tensor | None = None,
    ) -> Tensor | None:
        """Take the two products with a block of ``d loss / d projection``, side by side: neither needs the other.

        Args:
            grad: ``[R, C]`` in the operand dtype.
            hidden: ``[R, H]`` of these tokens.
            columns: which of the vocabulary they are.
            first: whether these are the first tokens whose gradients reach these columns.
            out: ``[R, H]``, where the product with the head goes.
            accumulate: add it to what is there.
            weight_hidden: ``[R, H]``, what to multiply for the weight instead of ``hidden``.

        Returns:
            ``out``, ``grad @ weight[columns]`` or the sum, if any hidden state needs a gradient. One product over
            the whole vocabulary is rounded to half precision once; a sum of several is kept wide.
        """
        job, start, slab = self.job, columns.start, self.projection.slab
        accumulate = accumulate and out is not None
        if out is None and any(job.needs_hidden):
            whole = columns.stop - start == self.stream.vocab_size == slab
            out = hidden.new_empty(hidden.shape, dtype=job.operand_dtype if whole else job.logits_dtype)

        def of_hidden() -> None:
            if out is not None:
                for first_row, last_row, weight in self.projection.weight_slabs(start, columns.stop):
                    part = grad[:, first_row - start : last_row - start]
                    matmul_into(out, part, weight, accumulate=accumulate or first_row > start)

        def of_weight() -> None:
            if self.weight is not None:
                for first_row in range(start, columns.stop, slab):
                    last_row = min(first_row + slab, columns.stop)
                    matmul_into(
                        self.weight[first_row:last_row],
                        grad[:, first_row - start : last_row - start].t(),
                        hidden if weight_hidden is None else weight_hidden,
                        accumulate=not first,
                    )

        side_by_side(grad.device, of_hidden, of_weight)
        return out

    def add_at_labels(self, rows: slice, coef: Tensor) -> None:
        """Leave ``coef [R]``, of these tokens' own labels' terms, for :meth:`results` to add."""
        if self.weight is not None:
            if self.at_label is None:
                self.at_label = coef.new_empty(self.stream.count)
            self.at_label[rows] = coef

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """``(grad_weight, grad_bias)``."""
        stream = self.stream
        if self.weight is not None and self.at_label is not None:
            # All tokens of a label at once, in fp32: however many blocks there were, this is rounded once.
            for part, hidden, index in stream.job.tokens.sources(stream.flat, stream.job.plan.rows):
                add_to_label_rows_(
                    self.weight,
                    stream.job.tokens.labels[part],
                    self.at_label[part],
                    hidden,
                    index,
                    backend=self.job.backend,
                )
        return (
            None if self.weight is None else self.weight.to(stream.weight.dtype),
            None if self.bias is None or stream.bias is None else self.bias.to(stream.bias.dtype),
        )


class HiddenGradients:
    """Gradients of all hidden states, those without loss included (0)."""

    def __init__(self, stream: Stream) -> None:
        self.tokens = stream.job.tokens
        self.results = [
            torch.zeros(part.shape, dtype=part.dtype, device=part.device) if need else None
            for part, need in zip(stream.hidden, stream.job.needs_hidden, strict=True)
        ]
        self.flat = [None if part is None else part.view(-1, part.shape[-1]) for part in self.results]

    def write(self, rows: slice, values: Tensor | None) -> None:
        """Gradients ``[R, H]`` of some of the kept tokens."""
        if values is not None:
            self.tokens.scatter_(self.flat, rows.start, rows.stop, values)
