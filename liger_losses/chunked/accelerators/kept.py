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

from liger_losses.chunked.accelerators.row_sums import Sums, step_options, sum_rows
from liger_losses.chunked.accelerators.tiles import with_contiguous_rows
from liger_losses.chunked.core.block import Block
from liger_losses.chunked.core.buffers import Gradients, local_part
from liger_losses.chunked.core.plan import Plan, Signature, by_blocks, padded
from liger_losses.chunked.core.weights import ALL, Columns, Dense, WithAdapters
from liger_losses.kernels._triton import jit, tl, triton

#: Places and hidden dimensions of one step of projections, and warps. (On an H200, 8192 tokens of H 4096 with 20 or 64
#: columns, bf16: forward 1.11 and 1.85 ms, where (16, 256, 4) takes 1.26 and 2.19.)
_STEP = (32, 128, 4)


@dataclass(frozen=True, eq=False)
class RowsInPlace(Dense):
    """A matrix whose products with columns of each token are kernels'."""

    def logits(self, out: Tensor, hidden: Tensor, columns: Columns) -> Tensor:
        if isinstance(columns, slice):
            return super().logits(out, hidden, columns)
        hidden, weight = with_contiguous_rows(hidden), with_contiguous_rows(local_part(self.weight.detach()))
        places, width = columns.numel(), columns.shape[1]
        _project_kernel[(triton.cdiv(places, _STEP[0]),)](
            out, hidden, weight, out.stride(0), hidden.stride(0), weight.stride(0), columns.contiguous(), width, places,
            hidden.shape[1], **step_options(_STEP, hidden.shape[1]),
        )  # fmt: skip
        return out

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


@jit(do_not_specialize=["width", "places"], do_not_specialize_on_alignment=["out", "hidden", "columns"])
def _project_kernel(
    out, hidden, weight, out_stride, hidden_stride, stride, columns, width, places, hidden_size,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per ``BLOCK_P`` places, of one token or several."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.load(columns + at, mask=at < places, other=0).to(tl.int64)
    token = at // width
    products = tl.zeros((BLOCK_P, BLOCK_H), tl.float32)
    for k in range(0, hidden_size, BLOCK_H):
        ks = k + tl.arange(0, BLOCK_H)
        inside = (at < places)[:, None] & (ks < hidden_size)[None, :]
        h = tl.load(hidden + token[:, None] * hidden_stride + ks[None, :], mask=inside, other=0.0)
        w = tl.load(weight + column[:, None] * stride + ks[None, :], mask=inside, other=0.0)
        products += w.to(tl.float32) * h.to(tl.float32)
    tl.store(out + token * out_stride + at % width, tl.sum(products, 1), mask=at < places)
