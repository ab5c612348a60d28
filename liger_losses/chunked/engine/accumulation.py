"""Where the gradients of a call are accumulated.

N active tokens, R tokens of a block, C columns of a slice, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import OpenCall
from liger_losses.chunked.engine.plan import blocks
from liger_losses.chunked.engine.ranks import ALONE, Ranks
from liger_losses.chunked.engine.weights import Projection
from liger_losses.kernels.label_rows import add_to_label_rows_
from liger_losses.kernels.matmul import matmul_into


class HeadGradients:
    """Gradients of weight and bias."""

    def __init__(self, opened: OpenCall) -> None:
        self.opened, self.call, self.projection = opened, opened.call, opened.projection
        weight, bias = opened.trained, opened.bias
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.label_coefficients: Tensor | None = None
        #: Some columns' rows of the weight's gradient, by the first one and their number: all parts have the same.
        self.tiles: dict[tuple[int, int], Tensor] = {}
        if self.call.needs_weight:
            new = torch.empty if opened.count else torch.zeros  # the first block overwrites it
            shape = (opened.weight_rows, weight.shape[1])
            self.whole_weight = new(shape, dtype=self.call.grad_weight_dtype, device=weight.device)
            self.weight = self.whole_weight
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
        rows: Projection | Tensor | None = None,
    ) -> Tensor | None:
        """Add ``grad.T @ hidden`` to the weight's gradient and return ``out + grad @ weight[columns]``.

        ``into`` is memory that may take the result where there is no ``out``; ``rows`` are these columns' rows of the
        head, or the products with them, where they are at hand.

        ``grad`` is d loss / d projection ``[R, C]`` in the operand dtype; ``first`` says whether these are the first
        tokens whose gradients reach these columns. One product over the whole vocabulary is rounded to half precision
        once, a sum of several is accumulated in fp32. Returns ``None`` if no hidden state needs a gradient.
        """
        call, accumulate = self.call, out is not None
        if out is None and any(call.needs_hidden):
            whole = grad.shape[1] == self.opened.vocab_size <= self.projection.chunk
            dtype = call.work.operand_dtype if whole else call.work.logits_dtype
            fits = into is not None and into.dtype == dtype and into.is_contiguous()
            out = into if fits else hidden.new_empty(hidden.shape, dtype=dtype)
        grad = grad if grad.is_cuda else grad.to(call.work.logits_dtype)  # a CPU takes both products in that
        if out is not None:
            if isinstance(rows, Tensor):
                matmul_into(out, grad, rows, accumulate=accumulate)
            else:
                back, start = (self.projection, columns.start) if rows is None else (rows, 0)
                back.back_into(out, grad, start, accumulate=accumulate)
        if self.weight is not None:
            self.add_weight(grad, self.trained(hidden), columns, first=first)
        return out

    def add_weight(self, grad: Tensor, hidden: Tensor, columns: slice, *, first: bool) -> None:
        """Add ``grad.T @ hidden`` alone, of :meth:`trained` columns, if the weight needs a gradient."""
        if self.weight is None:
            return
        width, chunk = grad.shape[1], self.projection.chunk
        if width <= chunk:
            target = self.weight if width == self.weight.shape[0] else self.tiles.get((columns.start, width))
            if target is None:
                target = self.tiles[columns.start, width] = self.weight[columns]
            matmul_into(target, grad.t(), hidden, accumulate=not first)
            return
        for part in blocks(width, chunk):
            target = self.weight[columns.start + part.start : columns.start + part.stop]
            matmul_into(target, grad[:, part].t(), hidden, accumulate=not first)

    def trained(self, hidden: Tensor) -> Tensor:
        """The columns of hidden states that the weight multiplies, and not what is quantized beside it."""
        return hidden[:, self.opened.frozen_columns :] if self.opened.frozen_columns else hidden

    def labels_out(self, rows: slice) -> Tensor | None:
        """Where a block writes the coefficients ``[R]`` of its labels' own terms, which :meth:`results` adds."""
        if self.weight is None:
            return None
        whole = rows.stop - rows.start == self.opened.count
        if self.label_coefficients is None:
            self.label_coefficients = torch.empty(self.opened.count, dtype=torch.float32, device=self.weight.device)
            if not whole:
                self.label_coefficients.zero_()  # tokens that no block has add nothing
        return self.label_coefficients if whole else self.label_coefficients[rows]

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """``(grad_weight, grad_bias)``, in the dtypes of weight and bias."""
        opened, tokens = self.opened, self.call.tokens
        if self.weight is not None and self.label_coefficients is not None:
            # All tokens of a label at once, in fp32: however many blocks there were, this is rounded once.
            for part, hidden, index in tokens.sources(opened.flat, self.call.plan.rows):
                labels, coefficients = opened.labels, self.label_coefficients
                if part.stop - part.start < opened.count:
                    labels, coefficients = labels[part], coefficients[part]
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

    def __init__(self, opened: OpenCall, sums_over: Ranks) -> None:
        self.tokens, self.sums_over = opened.call.tokens, sums_over
        #: The types of its tensors' indices: one is ``NoneType`` where all tokens of a tensor are active.
        self.dropped = {*map(type, self.tokens.indices)}
        self.summing: tuple[slice, Tensor, Any] | None = None
        #: Where all tokens are active, every row is written.
        new = torch.empty if opened.count and self.dropped == {type(None)} else torch.zeros
        self.results = [
            new((*shape, part.shape[-1]), dtype=part.dtype, device=part.device) if need else None
            for part, shape, need in zip(opened.flat, self.tokens.shapes, opened.call.needs_hidden, strict=True)
        ]
        self.flat = [p if p is None or p.dim() == 2 else p.view(-1, p.shape[-1]) for p in self.results]

    def out_view(self, rows: slice) -> Tensor | None:
        """The slice ``[R, H]`` of the gradient for these active tokens, or ``None`` if they are scattered."""
        if type(None) not in self.dropped:  # the rows of every tensor are scattered
            return None
        pieces = self.tokens.pieces(rows.start, rows.stop)
        if len(pieces) != 1:
            return None
        ((part, first, last, _),) = pieces
        target = self.flat[part]
        if target is None or self.tokens.indices[part] is not None:
            return None
        return target if last - first == target.shape[0] else target[first:last]

    def write(self, rows: slice, values: Tensor | None, out_view: Tensor | None) -> None:
        """Store the gradients ``[R, H]`` of some active tokens, unless they are in their :meth:`out_view` already."""
        if values is None:
            return
        if out_view is not None and out_view.data_ptr() != values.data_ptr():
            out_view.copy_(values)
        if self.sums_over is not ALONE:
            self.finish()
            dtype = functools.reduce(torch.promote_types, [each.dtype for each in self.flat if each is not None])
            part = values.to(dtype).contiguous() if out_view is None else out_view
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
        self.head, self.hidden = HeadGradients(opened), HiddenGradients(opened, opened.call.ranks.of_gradients)

    def results(self) -> tuple[Tensor | None, ...]:
        """``(grad_weight, grad_bias, *grad_hidden)``."""
        head = self.head.results()
        self.hidden.finish()
        return *head, *self.hidden.results
