"""Operations on labels and the rows of the head that they index.

Labels as if all were active, the labels' logits, and the labels' terms of both gradients. T tokens, N of them active, H
hidden size, V vocabulary size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.kernels._tiles import with_contiguous_rows
from liger_losses.kernels._triton import device_of, jit, tl
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, transform_block

#: Labels of so few tokens are put in order by comparing each with all others, in one launch.
MOST_COMPARED = 8192


def masked_labels(
    labels: Tensor, ignore_index: int, vocab_size: int, *, backend: str = "torch"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The labels of all tokens, as if all were active, for calls that drop none.

    Args:
        labels: ``[T]`` int64, contiguous.
        ignore_index: the label of masked tokens.
        vocab_size: V.
        backend: ``torch`` or ``triton``.

    Returns:
        The labels, with 0 for tokens without loss and for wrong labels; which tokens carry no loss, bool; each token's
        share of the N others, ``1 / N`` or 0, fp32; ``[T]`` each; and whether the labels of the N are in ``[0, V)``,
        0-dim.
    """
    if backend == "torch":
        ignored = labels == ignore_index
        inside = (labels >= 0) & (labels < vocab_size)
        return labels * (inside & ~ignored), ignored, equal_shares(ignored), (inside | ignored).all()
    safe, ignored = torch.empty_like(labels), torch.empty(len(labels), dtype=torch.bool, device=labels.device)
    right = torch.empty((), dtype=torch.bool, device=labels.device)
    shares = torch.empty(len(labels), dtype=torch.float32, device=labels.device)
    with device_of(labels):
        _masked_labels_kernel[(1,)](
            safe, ignored, shares, right, labels, len(labels), int(ignore_index), vocab_size, BLOCK=2048, num_warps=8
        )
    return safe, ignored, shares, right


def equal_shares(ignored: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[T]``: 1 over the number of tokens that are not ignored, 0 for the others."""
    active = ~ignored
    return active / active.sum(dtype=dtype).clamp(min=1)


def label_logits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    epilogue: Epilogue = Epilogue(),
    *,
    backend: str = "torch",
) -> Tensor:
    """``out_n = transform(hidden_n . weight[labels_n] + bias[labels_n])``, summed in fp32.

    Args:
        hidden: ``[N, H]``, rows contiguous.
        weight: ``[V, H]``, rows contiguous.
        labels: ``[N]`` int64 in ``[0, V)``.
        epilogue: from projections to logits.
        backend: ``torch`` or ``triton``.

    Returns:
        ``[N]`` fp32.
    """
    bias = epilogue.bias
    if backend == "torch":
        projected = (hidden.float() * weight[labels].float()).sum(-1)[:, None]
        return epilogue.transform(projected, None if bias is None else bias[labels, None].float())[:, 0]
    tokens = labels.shape[0]
    out = hidden.new_empty(tokens, dtype=torch.float32)
    if tokens:
        _label_logits_kernel[(tokens,)](
            out, hidden, weight, hidden.stride(0), weight.stride(0),
            bias, labels, hidden.shape[1], epilogue.transform.for_kernel, BLOCK=1024,
        )  # fmt: skip
    return out


def scale_and_add_label_rows(
    out: Tensor, product: Tensor, scale: Tensor, coef: Tensor, weight: Tensor, labels: Tensor, *, backend: str = "torch"
) -> Tensor:
    """``out_n = scale_n product_n + coef_n weight[labels_n]``, rounded once.

    Args:
        out: ``[N, H]``, rows contiguous.
        product: ``[N, H]`` fp32, contiguous.
        scale, coef: ``[N]`` fp32.
        weight, labels, backend: as in :func:`label_logits`.

    Returns:
        ``out``.
    """
    if backend == "torch":
        return out.copy_(product * scale[:, None] + coef[:, None] * weight[labels].to(product.dtype))
    if tokens := labels.numel():
        _add_label_rows_kernel[(tokens,)](
            out, out.stride(0), product, scale, coef, weight, weight.stride(0), labels, product.shape[1],
            BLOCK=1024,
        )  # fmt: skip
    return out


def add_to_label_rows_(
    grad_weight: Tensor,
    labels: Tensor,
    coef: Tensor,
    hidden: Tensor,
    rows: Tensor | None = None,
    *,
    backend: str = "torch",
) -> Tensor:
    """``grad_weight[v] += sum_{n: labels_n = v} coef_n hidden_n``: summed in fp32, rounded once, in a fixed order.

    Args:
        grad_weight: ``[V, H]``, rows contiguous.
        labels, backend: as in :func:`label_logits`.
        coef: ``[N]`` fp32.
        hidden: ``[N, H]``, rows contiguous; ``[T, H]`` with ``rows``.
        rows: ``[N]`` int64, the row of each token in ``hidden``.

    Returns:
        ``grad_weight``.
    """
    if backend == "torch":
        hidden = hidden if rows is None else hidden[rows]
        present, inverse = labels.unique(return_inverse=True)
        wide = torch.promote_types(torch.float32, grad_weight.dtype)
        sums = grad_weight[present].to(wide).index_add_(0, inverse, coef.to(wide)[:, None] * hidden.to(wide))
        return grad_weight.index_copy_(0, present, sums.to(grad_weight.dtype))
    if tokens := labels.shape[0]:
        hidden, past_end = with_contiguous_rows(hidden), grad_weight.shape[0]
        ordered, source, coef = _in_order(labels, coef, rows, past_end)
        block = min(1024, 1 << (hidden.shape[1] - 1).bit_length())
        _add_to_label_rows_kernel[(tokens, -(-hidden.shape[1] // block))](
            grad_weight, grad_weight.stride(0), ordered, source, coef, hidden, hidden.stride(0),
            tokens, past_end, hidden.shape[1], BLOCK=block, AT_ONCE=4,
        )  # fmt: skip
    return grad_weight


def _in_order(labels: Tensor, coef: Tensor, rows: Tensor | None, past_end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the labels, stably: the sorted labels, and the row and the coefficient of each.

    Tokens that add nothing (masked ones, with label 0) would make a long sum of zeros: they have the label V.
    """
    tokens = labels.shape[0]
    if tokens > MOST_COMPARED:
        ordered, order = labels.masked_fill(coef == 0, past_end).sort(stable=True)
        return ordered, order if rows is None else rows[order], coef[order]
    ordered, source, ordered_coef = torch.empty_like(labels), torch.empty_like(labels), torch.empty_like(coef)
    _order_kernel[(-(-tokens // 4),)](
        ordered, source, ordered_coef, labels, coef, rows, tokens, past_end, BLOCK=4, AT_ONCE=1024, num_warps=8,
    )  # fmt: skip
    return ordered, source, ordered_coef


@jit(do_not_specialize=["count", "ignore_index", "vocab_size"], do_not_specialize_on_alignment=["labels"])
def _masked_labels_kernel(safe, ignored, shares, right, labels, count, ignore_index, vocab_size, BLOCK: tl.constexpr):
    """One program for all labels: whether they are right is then one number without a second launch."""
    wrong = tl.zeros((BLOCK,), tl.int32)
    actives = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        label = tl.load(labels + at, mask=inside, other=0)
        active = label != ignore_index
        actives += (inside & active).to(tl.int32)
        known = (label >= 0) & (label < vocab_size)
        tl.store(safe + at, tl.where(active & known, label, 0), mask=inside)
        tl.store(ignored + at, active == 0, mask=inside)
        wrong += (inside & active & (known == 0)).to(tl.int32)
    tl.store(right, tl.sum(wrong, 0) == 0)
    share = 1.0 / tl.maximum(tl.sum(actives, 0), 1).to(tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        label = tl.load(labels + at, mask=inside, other=0)
        tl.store(shares + at, tl.where(label != ignore_index, share, 0.0), mask=inside)


@jit
def dot_product(first, second, size, BLOCK: tl.constexpr):
    """The product of two rows, summed in fp32."""
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(first + at, mask=at < size, other=0.0).to(tl.float32)
        products += a * tl.load(second + at, mask=at < size, other=0.0).to(tl.float32)
    return tl.sum(products, 0)


@jit(do_not_specialize_on_alignment=["labels"])
def _label_logits_kernel(
    out, hidden, weight, hidden_stride, weight_stride, bias, labels, hidden_size, transform, BLOCK: tl.constexpr
):
    """One program per token."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    logit = dot_product(hidden + row * hidden_stride, weight + label * weight_stride, hidden_size, BLOCK)
    if bias is not None or transform.factor is not None:
        inverse = inverse_temperature(transform, row, True, 0)
        logit = transform_block(logit, bias, label, True, transform, inverse)
    tl.store(out + row, logit)


@jit(do_not_specialize_on_alignment=["scale", "coef", "labels"])
def _add_label_rows_kernel(
    out, out_stride, product, scale, coef, weight, weight_stride, labels, hidden_size, BLOCK: tl.constexpr
):
    """One program per token: ``scale product + coef weight[label]``, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    s = tl.load(scale + row)
    c = tl.load(coef + row)
    out += row * out_stride
    product += row * hidden_size
    weight += label * weight_stride
    for start in range(0, hidden_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(product + at, mask=at < hidden_size, other=0.0)
        w = tl.load(weight + at, mask=at < hidden_size, other=0.0).to(tl.float32)
        tl.store(out + at, (s * value + c * w).to(out.dtype.element_ty), mask=at < hidden_size)


@jit(
    do_not_specialize=["tokens", "past_end"],
    do_not_specialize_on_alignment=["ordered", "source", "ordered_coef", "labels", "coef", "rows"],
)
def _order_kernel(
    ordered, source, ordered_coef, labels, coef, rows, tokens, past_end, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):
    """One program for some tokens, whose labels it compares with all."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tokens
    c = tl.load(coef + at, mask=inside, other=0.0)
    label = tl.where(c == 0.0, past_end, tl.load(labels + at, mask=inside, other=0).to(tl.int32))
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tokens, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        exists = other < tokens
        adds = tl.load(coef + other, mask=exists, other=0.0) != 0.0
        others = tl.where(adds, tl.load(labels + other, mask=exists, other=0).to(tl.int32), past_end)[None, :]
        earlier = (others == label[:, None]) & (other[None, :] < at[:, None])
        before = ((others < label[:, None]) | earlier) & exists[None, :]
        place += tl.sum(before.to(tl.int32), 1)
    row = at.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + at, mask=inside, other=0)
    tl.store(ordered + place, label.to(tl.int64), mask=inside)
    tl.store(source + place, row, mask=inside)
    tl.store(ordered_coef + place, c, mask=inside)


@jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ordered", "source", "coef"])
def _add_to_label_rows_kernel(
    grad_weight, grad_stride, ordered, source, coef, hidden, hidden_stride, tokens, past_end, hidden_size,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
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
            members = start + tl.arange(0, AT_ONCE)
            same_label = (members < tokens) & (tl.load(ordered + members, mask=members < tokens, other=-1) == label)
            row = tl.load(source + members, mask=same_label, other=0)
            c = tl.load(coef + members, mask=same_label, other=0.0)
            h = tl.load(
                hidden + row[:, None] * hidden_stride + at[None, :],
                mask=same_label[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.sum(c[:, None] * h.to(tl.float32), 0)
            start += AT_ONCE
            next_label = tl.load(ordered + start, mask=start < tokens, other=-1)
        tl.store(target, total.to(grad_weight.dtype.element_ty), mask=inside)
