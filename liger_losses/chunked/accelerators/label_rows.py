"""What is read of, and added to, some rows of the head: logits of labels or of other columns of each token, and the
labels' terms of both gradients.

N tokens, H hidden size, V vocabulary size, k columns of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.tiles import with_contiguous_rows
from liger_losses.kernels._triton import jit, power_of_two, tl
from liger_losses.kernels.logit_transform import Epilogue

#: Of projections, the most places of a program, and places times hidden dimensions of a step. (On an H200, 8192 tokens
#: of H 4096 with 20 or 64 columns, bf16: 1.11 and 1.85 ms, where 16 places take 1.26 and 2.19.)
_PLACES, _STEP = 32, 4096


def logits_of_columns(hidden: Tensor, weight: Tensor, columns: Tensor, epilogue: Epilogue = Epilogue()) -> Tensor:
    """``out_nk = transform(hidden_n . weight[columns_nk] + bias[columns_nk])``, summed in fp32.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        columns: ``[N, k]`` int64 in ``[0, V)``; or ``[N]``, one for each token, such as its label.
        epilogue: from projections to logits.

    Returns:
        fp32, in the shape of ``columns``.
    """
    out = project_columns(hidden.new_empty(columns.shape, dtype=torch.float32), hidden, weight, columns)
    return epilogue.transform(out, None if epilogue.bias is None else epilogue.bias[columns])


def project_columns(out: Tensor, hidden: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
    """The same without a transform, into ``out``, whose rows are contiguous. The rows of the weight are not copied."""
    hidden, weight = with_contiguous_rows(hidden), with_contiguous_rows(weight)
    places, width, size = columns.numel(), columns[:1].numel(), hidden.shape[1]
    if places:
        block = min(4 * power_of_two(width), _PLACES)
        _project_kernel[(-(-places // block),)](
            out, hidden, weight, out.stride(0), hidden.stride(0), weight.stride(0), columns.contiguous(), width, places,
            size, BLOCK_P=block, BLOCK_H=min(_STEP // block, power_of_two(size)),
        )  # fmt: skip
    return out


def scale_and_add_label_rows_(product: Tensor, scale: Tensor, coef: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """``product_n = scale_n product_n + coef_n weight[labels_n]``.

    Args:
        product: ``[N, H]`` fp32, contiguous.
        scale, coef: ``[N]`` fp32.
        weight, labels: ``[N]`` int64 in ``[0, V)``.

    Returns:
        ``product``.
    """
    if tokens := labels.numel():
        _add_label_rows_kernel[(tokens,)](
            product, scale, coef, weight, weight.stride(0), labels, product.shape[1], BLOCK=1024
        )
    return product


def add_to_label_rows_(grad_weight: Tensor, labels: Tensor, coef: Tensor, hidden: Tensor) -> Tensor:
    """``grad_weight[v] += sum_{n: labels_n = v} coef_n hidden_n``: summed in fp32, rounded once, in a fixed order.

    Args:
        grad_weight: ``[V, H]``, rows contiguous.
        labels: ``[N]`` int64 in ``[0, V)``.
        coef: ``[N]`` fp32.
        hidden: ``[N, H]``.

    Returns:
        ``grad_weight``.
    """
    if tokens := labels.shape[0]:
        hidden, past_end = with_contiguous_rows(hidden), grad_weight.shape[0]
        # Tokens that add nothing (masked ones, with label 0) would make a long sum of zeros: they have the label V.
        # A GPU sorts int32 in half the passes.
        ordered, source = labels.int().masked_fill_(coef == 0, past_end).sort(stable=True)
        block = min(1024, 1 << (hidden.shape[1] - 1).bit_length())
        _add_to_label_rows_kernel[(tokens, -(-hidden.shape[1] // block))](
            grad_weight, grad_weight.stride(0), ordered, source, coef, hidden, hidden.stride(0),
            tokens, past_end, hidden.shape[1], BLOCK=block, STEP=4,
        )  # fmt: skip
    return grad_weight


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


@jit(do_not_specialize_on_alignment=["scale", "coef", "labels"])
def _add_label_rows_kernel(product, scale, coef, weight, weight_stride, labels, hidden_size, BLOCK: tl.constexpr):
    """One program per token: ``scale product + coef weight[label]``."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    s = tl.load(scale + row)
    c = tl.load(coef + row)
    product += row * hidden_size
    weight += label * weight_stride
    for start in range(0, hidden_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(product + at, mask=at < hidden_size, other=0.0)
        w = tl.load(weight + at, mask=at < hidden_size, other=0.0).to(tl.float32)
        tl.store(product + at, s * value + c * w, mask=at < hidden_size)


@jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ordered", "source", "coef"])
def _add_to_label_rows_kernel(
    grad_weight, grad_stride, ordered, source, coef, hidden, hidden_stride, tokens, past_end, hidden_size,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per token in the labels' order; the first of each label sums all of that label's tokens."""
    first = tl.program_id(0)
    label = tl.load(ordered + first)
    before = tl.load(ordered + first - 1, mask=first > 0, other=-1)
    if (before != label) & (label < past_end):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < hidden_size
        target = grad_weight + label.to(tl.int64) * grad_stride + at
        total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        start = first
        next_label = label
        while next_label == label:
            members = start + tl.arange(0, STEP)
            same_label = (members < tokens) & (tl.load(ordered + members, mask=members < tokens, other=-1) == label)
            row = tl.load(source + members, mask=same_label, other=0)
            c = tl.load(coef + row, mask=same_label, other=0.0)
            h = tl.load(
                hidden + row[:, None] * hidden_stride + at[None, :],
                mask=same_label[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.sum(c[:, None] * h.to(tl.float32), 0)
            start += STEP
            next_label = tl.load(ordered + start, mask=start < tokens, other=-1)
        tl.store(target, total.to(grad_weight.dtype.element_ty), mask=inside)
