"""Where gradients are accumulated: those of the head block by block, those of hidden states token by token.

N active tokens, H hidden size, V vocabulary size, R tokens of a block, C columns of it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import OpenCall
from liger_losses.chunked.engine.plan import blocks
from liger_losses.kernels.label_rows import add_to_label_rows_
from liger_losses.kernels.matmul import matmul_into, start_beside


class HeadGradients:
    """Gradients of weight and bias."""

    def __init__(self, opened: OpenCall) -> None:
        self.opened, self.call, self.projection = opened, opened.call, opened.projection
        weight, bias = opened.weight, opened.bias
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.label_coefficients: Tensor | None = None
        if self.call.needs_weight:
            new = torch.empty if opened.count else torch.zeros  # the first block overwrites it
            shape = (opened.weight_rows, weight.shape[1])
            self.whole_weight = new(shape, dtype=self.call.grad_weight_dtype, device=weight.device)
            self.whole_weight[opened.vocab_size :].zero_()
            self.weight = self.whole_weight[: opened.vocab_size]
        if self.call.needs_bias and bias is not None:
            self.whole_bias = torch.zeros(opened.weight_rows, dtype=self.call.work.logits_dtype, device=bias.device)
            self.bias = self.whole_bias[: opened.vocab_size]

    def add(
        self, grad: Tensor, hidden: Tensor, columns: slice, *, first: bool, out: Tensor | None = None
    ) -> Tensor | None:
        """Take both products with a block of ``d loss / d projection``, side by side: neither needs the other.

        Args:
            grad: ``[R, C]`` in the operand dtype.
            hidden: ``[R, H]``, the same tokens' hidden states.
            columns: the C columns of the vocabulary.
            first: whether these are the first tokens whose gradients reach these columns.
            out: ``[R, H]``, to which the product with the head is added.

        Returns:
            ``out + grad @ weight[columns]`` if any hidden state needs a gradient. One product over the whole
            vocabulary is rounded to half precision once; a sum of several is accumulated in fp32.
        """
        call, accumulate = self.call, out is not None
        if out is None and any(call.needs_hidden):
            whole = grad.shape[1] == self.opened.vocab_size == self.projection.weight_chunk
            out = hidden.new_empty(hidden.shape, dtype=call.work.operand_dtype if whole else call.work.logits_dtype)
        # The product with the head takes longer per tile: started first, it leaves its last wave to the other.
        wait = None
        if out is not None:
            product = partial(self.projection.back_into, out, grad, columns.start, accumulate=accumulate)
            wait = start_beside(grad.device, product)
        try:
            self.add_weight(grad, hidden, columns, first=first)
        finally:
            if wait is not None:
                wait()
        return out

    def add_weight(self, grad: Tensor, hidden: Tensor, columns: slice, *, first: bool) -> None:
        """Add ``grad.T @ hidden`` alone, if the weight needs a gradient."""
        if self.weight is not None:
            for part in blocks(grad.shape[1], self.projection.weight_chunk):
                target = self.weight[columns.start + part.start : columns.start + part.stop]
                matmul_into(target, grad[:, part].t(), hidden, accumulate=not first)

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
                add_to_label_rows_(
                    self.weight,
                    tokens.labels[part],
                    self.label_coefficients[part],
                    hidden,
                    index,
                    backend=self.call.backend,
                )
        return (
            None if self.weight is None else self.whole_weight.to(opened.weight.dtype),
            None if self.bias is None or opened.bias is None else self.whole_bias.to(opened.bias.dtype),
        )


class HiddenGradients:
    """Gradients of all hidden states: 0 for tokens without loss, ``None`` for tensors that need none."""

    def __init__(self, opened: OpenCall) -> None:
        self.tokens = opened.call.tokens
        self.results = [
            torch.zeros(part.shape, dtype=part.dtype, device=part.device) if need else None
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
        out_view = self.out_view(rows)
        if values is not None and (out_view is None or out_view.data_ptr() != values.data_ptr()):
            self.tokens.scatter_(self.flat, rows.start, rows.stop, values)


class Gradients:
    """All gradients of a call."""

    def __init__(self, opened: OpenCall) -> None:
        self.head, self.hidden = HeadGradients(opened), HiddenGradients(opened)

    def results(self) -> tuple[Tensor | None, ...]:
        """``(grad_weight, grad_bias, *grad_hidden)``."""
        return *self.head.results(), *self.hidden.results
