"""Logits of a few columns per token, and their gradients, by products with the whole head, block by block of its rows.

With very many columns this is faster than reading each one's row of the head.
N tokens, H hidden size, V vocabulary size, P pairs of a token and one of its columns, C columns of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.matmul import matmul_into
from ..kernels.support_columns import TokenColumns


class Products(NamedTuple):
    """How products are taken: the dtype of their operands, and the bytes of a block."""

    dtype: torch.dtype
    block_bytes: int


class _Block(NamedTuple):
    """A block of the vocabulary, and where the pairs' columns are in the flattened ``[N, C]`` of all tokens."""

    rows: slice
    size: int  # N C
    inside: Tensor  # [P] bool, the columns of the block
    at: Tensor  # [P] int64; N C for the others


def _blocks(columns: TokenColumns, block_bytes: int, itemsize: int) -> Iterator[_Block]:
    count, total, tokens = len(columns.labels), columns.vocab_size, columns.tokens.long()
    width = max(128, block_bytes // (max(count, 1) * itemsize) // 128 * 128)
    for first in range(0, total, width):
        last = min(first + width, total)
        size, inside = count * (last - first), (columns.columns >= first) & (columns.columns < last)
        at = torch.where(inside, tokens * (last - first) + (columns.columns - first), size)
        yield _Block(slice(first, last), size, inside, at)


def project_by_products(hidden: Tensor, weight: Tensor, columns: TokenColumns, products: Products) -> Tensor:
    """``hidden_n . weight_v`` of all pairs ``[P]``, in fp32 or fp64; 0 for pairs that do not count."""
    wide, operand = torch.promote_types(torch.float32, products.dtype), hidden.to(products.dtype)
    projected = torch.zeros(len(columns.columns), dtype=wide, device=hidden.device)
    buffer: Tensor | None = None
    for rows, size, inside, at in _blocks(columns, products.block_bytes, wide.itemsize):
        buffer = projected.new_empty(size + 1) if buffer is None else buffer  # the first block is the largest
        matmul_into(buffer[:size].view(len(hidden), -1), operand, weight[rows].to(products.dtype).t())
        projected = torch.where(inside, buffer[at], projected)
    return projected


def gradients_by_products(
    values: Tensor,
    columns: TokenColumns,
    hidden: Tensor | None,
    weight: Tensor | None,
    weight_dtype: torch.dtype,
    products: Products,
) -> tuple[Tensor | None, Tensor | None]:
    """From the gradients ``[P]`` of the projections: that of the hidden states ``[N, H]``, in their dtype, where the
    weight is given; and that of the weight ``[V, H]``, in ``weight_dtype``, where the hidden states are."""
    count, dtype = len(columns.labels), products.dtype
    grad_hidden = None if weight is None else values.new_zeros(count, weight.shape[1])
    grad_weight = None if hidden is None else hidden.new_empty(columns.vocab_size, hidden.shape[1], dtype=weight_dtype)
    for rows, size, _, at in _blocks(columns, products.block_bytes, values.itemsize):
        # Pairs of other blocks are all written to one place, behind the end.
        dense = values.new_zeros(size + 1, dtype=dtype).scatter_(0, at, values.to(dtype))[:size].view(count, -1)
        if weight is not None and grad_hidden is not None:
            matmul_into(grad_hidden, dense, weight[rows].to(dtype), accumulate=True)
        if hidden is not None and grad_weight is not None:
            matmul_into(grad_weight[rows], dense.t(), hidden.to(dtype))
    return grad_hidden, grad_weight
