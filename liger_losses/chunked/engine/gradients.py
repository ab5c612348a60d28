"""Where gradients are added up: those of the head block by block, those of hidden states token by token.

N tokens that carry loss, H hidden size, V vocabulary size, R tokens of a block, C columns of it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from liger_losses.chunked.engine.plan import blocks
from liger_losses.kernels.label_rows import add_to_label_rows_
from liger_losses.kernels.matmul import matmul_into, start_beside

if TYPE_CHECKING:
    from liger_losses.chunked.engine.stream import Stream


class HeadGradients:
    """Gradients of weight and bias."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.job, self.projection = stream, stream.job, stream.projection
        weight, bias = stream.weight, stream.bias
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.at_label: Tensor | None = None
        if self.job.needs_weight:
            new = torch.empty if stream.count else torch.zeros  # the first block overwrites it
            shape = (stream.head_size, weight.shape[1])
            self.whole_weight = new(shape, dtype=self.job.grad_weight_dtype, device=weight.device)
            self.whole_weight[stream.vocab_size :].zero_()
            self.weight = self.whole_weight[: stream.vocab_size]
        if self.job.needs_bias and bias is not None:
            self.whole_bias = torch.zeros(stream.head_size, dtype=self.job.logits_dtype, device=bias.device)
            self.bias = self.whole_bias[: stream.vocab_size]

    def add(
        self, grad: Tensor, hidden: Tensor, columns: slice, *, first: bool, out: Tensor | None = None
    ) -> Tensor | None:
        """Take both products with a block of ``d loss / d projection``, side by side: neither needs the other.

        Args:
            grad: ``[R, C]`` in the operand dtype.
            hidden: ``[R, H]`` of these tokens.
            columns: which of the vocabulary they are.
            first: whether these are the first tokens whose gradients reach these columns.
            out: ``[R, H]``, to which the product with the head is added.

        Returns:
            ``out + grad @ weight[columns]`` if any hidden state needs a gradient. One product over the whole
            vocabulary is rounded to half precision once; a sum of several is kept wide.
        """
        job, accumulate = self.job, out is not None
        if out is None and any(job.needs_hidden):
            whole = grad.shape[1] == self.stream.vocab_size == self.projection.slab
            out = hidden.new_empty(hidden.shape, dtype=job.operand_dtype if whole else job.logits_dtype)
        # Its tiles take longer, so that those of the other fill what its last wave leaves.
        hidden_is_done = None
        if out is not None:
            product = partial(self.projection.back_into, out, grad, columns.start, accumulate=accumulate)
            hidden_is_done = start_beside(grad.device, product)
        try:
            self.add_weight(grad, hidden, columns, first=first)
        finally:
            if hidden_is_done is not None:
                hidden_is_done()
        return out

    def add_weight(self, grad: Tensor, hidden: Tensor, columns: slice, *, first: bool) -> None:
        """``grad.T @ hidden`` alone, if the weight needs a gradient."""
        if self.weight is not None:
            for part in blocks(grad.shape[1], self.projection.slab):
                target = self.weight[columns.start + part.start : columns.start + part.stop]
                matmul_into(target, grad[:, part].t(), hidden, accumulate=not first)

    def at_labels(self, rows: slice) -> Tensor | None:
        """Where to leave the coefficients ``[R]`` of these tokens' own labels' terms, for :meth:`results` to add."""
        if self.weight is None:
            return None
        if self.at_label is None:
            self.at_label = torch.empty(self.stream.count, device=self.weight.device)
        return self.at_label[rows]

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
            None if self.weight is None else self.whole_weight.to(stream.weight.dtype),
            None if self.bias is None or stream.bias is None else self.whole_bias.to(stream.bias.dtype),
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

    def place(self, rows: slice) -> Tensor | None:
        """Where gradients ``[R, H]`` of these tokens belong, if that is one place: what was put there is written."""
        pieces = self.tokens.pieces(rows.start, rows.stop)
        if len(pieces) != 1:
            return None
        ((part, first, last),) = pieces
        target = self.flat[part]
        return None if target is None or self.tokens.indices[part] is not None else target[first:last]

    def write(self, rows: slice, values: Tensor | None) -> None:
        """Gradients ``[R, H]`` of some of the kept tokens; those that were put in their :meth:`place` are there."""
        place = self.place(rows)
        if values is not None and (place is None or place.data_ptr() != values.data_ptr()):
            self.tokens.scatter_(self.flat, rows.start, rows.stop, values)
