"""What is read of, and added to, the head's rows of labels: the labels' logits, and their terms of both gradients.

N tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.tiles import with_contiguous_rows
from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, transform_block


def label_logits(hidden: Tensor, weight: Tensor, labels: Tensor, epilogue: Epilogue = Epilogue()) -> Tensor:
    """``out_n = transform(hidden_n . weight[labels_n] + bias[labels_n])``, summed in fp32.

    Args:
        hidden: ``[N, H]``, rows contiguous.
        weight: ``[V, H]``, rows contiguous.
        labels: ``[N]`` int64 in ``[0, V)``.
        epilogue: from projections to logits.

    Returns:
        ``[N]`` fp32.
    """
    tokens = labels.shape[0]
    out = hidden.new_empty(tokens, dtype=torch.float32)
    if tokens:
        _label_logits_kernel[(tokens,)](
            out, hidden, weight, hidden.stride(0), weight.stride(0),
            epilogue.bias, labels, hidden.shape[1], epilogue.transform.for_kernel, BLOCK=1024,
        )  # fmt: skip
    return out


def scale_and_add_label_rows_(product: Tensor, scale: Tensor, coef: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """``product_n = scale_n product_n + coef_n weight[labels_n]``.

    Args:
        product: ``[N, H]`` fp32, contiguous.
        scale, coef: ``[N]`` fp32.
        weight, labels: as in :func:`label_logits`.

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
        labels: as in :func:`label_logits`.
        coef: ``[N]`` fp32.
        hidden: ``[N, H]``.

    Returns:
        ``grad_weight``.
    """
    if tokens := labels.shape[0]:
        hidden, past_end = with_contiguous_rows(hidden), grad_weight.shape[0]
        # Tokens that add nothing (masked ones, with label 0) would make a long sum of zeros: they have the label V.
        ordered, source = labels.masked_fill(coef == 0, past_end).sort(stable=True)
        block = min(1024, 1 << (hidden.shape[1] - 1).bit_length())
        _add_to_label_rows_kernel[(tokens, -(-hidden.shape[1] // block))](
            grad_weight, grad_weight.stride(0), ordered, source, coef, hidden, hidden.stride(0),
            tokens, past_end, hidden.shape[1], BLOCK=block, STEP=4,
        )  # fmt: skip
    return grad_weight


@jit(do_not_specialize_on_alignment=["labels"])
def _label_logits_kernel(
    out, hidden, weight, hidden_stride, weight_stride, bias, labels, hidden_size, transform, BLOCK: tl.constexpr
):
    """One program per token."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    hidden += row * hidden_stride
    weight += label * weight_stride
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        h = tl.load(hidden + at, mask=at < hidden_size, other=0.0).to(tl.float32)
        products += h * tl.load(weight + at, mask=at < hidden_size, other=0.0).to(tl.float32)
    logit = tl.sum(products, 0)
    if bias is not None or transform.factor is not None:
        inverse = inverse_temperature(transform, row, True, 0)
        logit = transform_block(logit, bias, label, True, transform, inverse)
    tl.store(out + row, logit)


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
        target = grad_weight + label * grad_stride + at
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
