"""Gradients through a frozen quantized head that is dequantized one tile of the vocabulary at a time.

R tokens of a part, C columns of a tile, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_losses.chunked.engine.accumulation import HeadGradients
from liger_losses.chunked.engine.blocks import Block, Part, Upstream
from liger_losses.chunked.engine.call import OpenCall
from liger_losses.chunked.engine.plan import blocks
from liger_losses.kernels.exponential_scales import gradient_scales
from liger_losses.kernels.label_rows import label_logits, scale_and_add_label_rows
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.matmul import matmul_into
from liger_losses.kernels.move_rows import move_rows_, scale_rows_


class TiledExponentials(Block):
    """Sums ``exp(logit - offset) @ rows`` over the tiles, ``[R, H]``, for losses of ``logp`` and ``lse``.

    The gradient of each hidden state is a multiple of its row of this sum, as in :class:`~.blocks.ExponentialBlock`, so
    that the logits are computed once, and not again in backward. A first pass over the tiles copies the labels' rows of
    the head, whose logits are the offsets. A second pass computes the statistics and the sum. If a label's probability
    is so small that a tile's exponentials could overflow, the tile has another offset, and the sum is scaled to it.
    """

    fills_out = True

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        work, device = self.call.work, opened.device
        self.tiles = blocks(self.vocab_size, self.call.plan.tile_columns)
        self.product = torch.empty(rows, work.hidden_size, dtype=work.logits_dtype, device=device)
        self.exponentials = torch.empty(rows, self.tiles[0].stop, dtype=work.operand_dtype, device=device)
        self.label_rows: Tensor | None = None
        self.found: Exponentials | None = None

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        count, backend = len(part.hidden), self.call.backend
        labels, label_rows, places = part.here, part.out, torch.arange(count, device=part.here.device)
        if label_rows is None or label_rows.dtype != part.hidden.dtype:
            label_rows = torch.empty_like(part.hidden, memory_format=torch.contiguous_format)
        self.label_rows = label_rows  # their gradients take the same memory
        for columns in self.tiles:
            move_rows_(self._rows(columns), labels - columns.start, places, into=label_rows, backend=backend)
        bias = None if part.epilogue.bias is None else part.epilogue.bias[labels]
        epilogue = Epilogue(part.epilogue.transform, bias)
        label_logit = label_logits(part.hidden, label_rows, places, epilogue, backend=backend)
        offset, surprises = label_logit, label_logit.new_empty(len(self.tiles), count)
        mean_logit = torch.zeros_like(label_logit) if "mean_logit" in part.values else None
        for columns, surprise in zip(self.tiles, surprises, strict=True):
            found, offset = self._add(part, columns, labels, label_logit, offset)
            torch.neg(found.stored[2], out=surprise)  # in a softmax over the tile's columns and the label alone
            if mean_logit is not None and found.mean_logit is not None:
                mean_logit += found.mean_logit * ((columns.stop - columns.start) / self.vocab_size)
        wide = surprises.double()
        logp = -F.softplus((wide + (-(-wide).expm1()).log()).logsumexp(0)).to(offset.dtype)
        self.found = Exponentials(offset, label_logit - logp, logp, mean_logit)
        for name in part.values.keys() & {"lse", "logp", "mean_logit"}:
            part.values[name].copy_(getattr(self.found, name))

    def _rows(self, columns: slice) -> Tensor:
        rows: Tensor | None = self.opened.projection.columns(columns).weights.matrix(self.call.work.operand_dtype)
        assert rows is not None
        return rows

    def _add(
        self, part: Part, columns: slice, labels: Tensor, label_logit: Tensor, offset: Tensor
    ) -> tuple[Exponentials, Tensor]:
        """Add a tile to the sum. Return the tile's statistics, and the sum's offsets.

        The tile's rows are freed when this returns, before the next tile is dequantized.
        """
        weight, product, backend = self._rows(columns), self.product[: len(labels)], self.call.backend
        e = self.exponentials[: len(labels), : len(weight)]
        names = {"lse", *(part.values.keys() & {"mean_logit"})}
        found = linear_exponentials(
            part.hidden,
            weight,
            torch.where((labels >= columns.start) & (labels < columns.stop), labels - columns.start, -1),
            e,
            part.epilogue.columns(columns),
            found={name: torch.empty_like(label_logit) for name in names},
            label_logit=label_logit,
            backend=backend,
        )
        own, *_ = found.stored
        highest = torch.maximum(offset, own)
        scale_rows_(e, (own - highest).exp(), backend=backend)
        if columns.start:
            scale_rows_(product, (offset - highest).exp(), backend=backend)
        matmul_into(product, e, weight, accumulate=columns.start > 0)
        return found, highest

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        assert self.found is not None
        assert self.label_rows is not None
        count, backend = len(part.hidden), self.call.backend
        found = Exponentials(*(value[:count] for value in self.found.stored))
        scale, at_label, _ = gradient_scales(
            upstream.get("logp"), upstream.get("lse"), found, transform=part.epilogue.transform, backend=backend
        )
        return scale_and_add_label_rows(
            self.label_rows,
            self.product[:count],
            scale,
            at_label,
            self.label_rows,
            torch.arange(count, device=scale.device),
            backend=backend,
        )
