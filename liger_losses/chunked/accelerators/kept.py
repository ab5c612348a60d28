"""Softmaxes over columns that each token keeps: their rows of the head are read where they lie, and no copy is made.

The core's block, on products that gather nothing: the core copies ``[R, K, H]`` rows, and adds as many to the gradient.
On an H200, 8192 x 4096 x 128256 in bf16 (benchmarks/results/accelerators.txt), calls over 8, 64 and 256 kept columns
take 0.55, 0.16 and 0.09 of the time, and 4 to 74 MiB instead of 2 GiB.

R tokens, K kept columns of a token, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.label_rows import project_columns
from liger_losses.chunked.accelerators.row_sums import Sums, sum_rows
from liger_losses.chunked.core.block import Block
from liger_losses.chunked.core.buffers import Gradients, local_part
from liger_losses.chunked.core.plan import Plan, Signature, by_blocks, padded
from liger_losses.chunked.core.weights import ALL, Columns, Dense, WithAdapters


@dataclass(frozen=True, eq=False)
class RowsInPlace(Dense):
    """A matrix whose products with columns of each token are kernels'."""

    def logits(self, out: Tensor, hidden: Tensor, columns: Columns) -> Tensor:
        if isinstance(columns, slice):
            return super().logits(out, hidden, columns)
        return project_columns(out, hidden, local_part(self.weight.detach()), columns)

    def hidden_gradient(self, grad: Tensor, columns: Columns, out: Tensor | None = None) -> Tensor:
        if isinstance(columns, slice):
            return super().hidden_gradient(grad, columns, out)
        count, width = columns.shape
        starts = torch.arange(0, (count + 1) * width, width, device=columns.device)
        sums = Sums(columns.reshape(-1).int(), starts, width)
        weight = local_part(self.weight.detach())
        return sum_rows(grad.reshape(-1), sums, weight, weight.new_empty(count, self.hidden_size))

    def add_gradients(self, grads: Gradients, grad: Tensor, hidden: Tensor, columns: Columns) -> None:
        if isinstance(columns, slice):
            return super().add_gradients(grads, grad, hidden, columns)
        if (buffer := grads.of(self.weight)) is None:
            return None
        # By the places of each column, which are sorted; places of no column come first.
        ordered, order = columns.reshape(-1).int().sort(stable=True)
        tokens, values = (order // columns.shape[1]).int(), grad.reshape(-1)[order]
        if buffer.lists_rows:
            ids, numbers, lengths = ordered.unique_consecutive(return_inverse=True, return_counts=True)
            starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            rows = grad.new_empty(len(ids), self.hidden_size)
            sums = Sums(tokens, starts, len(grad), numbers.int())
            buffer.add_rows(ids.long(), sum_rows(values, sums, hidden, rows))
            return None
        total, holds = buffer.rows(ALL)
        every = torch.arange(len(total) + 1, dtype=torch.int32, device=columns.device)
        sums = Sums(tokens, torch.searchsorted(ordered, every), len(grad), ordered)
        sum_rows(values, sums, hidden, total, accumulate=holds)
        return None


@dataclass(eq=False)
class KeptBlock(Block):
    """The core's, with rows in place."""

    @property
    def weights(self) -> Any:
        return _in_place(self.part.head.weights)


def _in_place(weights: Any) -> Any:
    if isinstance(weights, WithAdapters):
        return replace(weights, base=_in_place(weights.base))
    return RowsInPlace(weights.weight, weights.products)


def row_bytes(call: Signature) -> int:
    """Of a token: logits, places and their order; its hidden state and the gradient of that."""
    return 4 * padded(call.columns + 1) + 64 * call.columns + call.hidden_size * (call.operand.itemsize + 8)


def planned(call: Signature) -> Plan | None:
    """Of calls whose rows of a matrix can be read as they are."""
    plain = call.weights[-1] is Dense and {*call.weights[:-1]} <= {WithAdapters} and not call.copied_bytes
    if not (call.kept and plain) or call.backend != "triton" or call.batch_invariant or call.teacher_columns:
        return None
    return by_blocks(call, "kept", KeptBlock.of, row_bytes(call))
