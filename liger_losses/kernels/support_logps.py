"""Log-probabilities over a few columns of the vocabulary per token: only these rows of the head are read.

N tokens, H hidden size, V vocabulary size, P pairs of a token and one of its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import with_contiguous_rows
from liger_losses.kernels._triton import device_of, jit, tl, triton
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.logit_transform import (
    LogitTransform,
    inverse_temperature,
    transform_block,
    transform_gradient,
)
from liger_losses.kernels.row_sums import RowSums, edges_of, slices, step_of, sum_rows, sum_values
from liger_losses.kernels.support_columns import TokenColumns
from liger_losses.kernels.support_products import Products, gradients_by_products, project_by_products

#: Pairs and hidden dimensions of one step, and warps, of projections. (On an H200, 8192 tokens with 20 or 64 columns of
#: H 4096: forward 1.11 and 1.85 ms, where (16, 256, 4) takes 1.26 and 2.19.)
_PROJECT_STEP = (32, 128, 4)
#: The log-sum-exp over no columns where other ranks have some: finite, so that it can be merged.
NO_COLUMNS = -1e30


class Exchange(NamedTuple):
    """What the ranks that share a vocabulary exchange.

    Args:
        merge_: replaces ``logp``, ``entropy`` and ``lse`` over this rank's columns by those over all ranks'.
        start_sum_: begins to replace a tensor by its sum over the ranks, and returns what to ``wait()`` for; ``None``
            where each rank's part of the gradient of the hidden states is wanted.
    """

    merge_: Callable[[Tensor, Tensor, Tensor], None]
    start_sum_: Callable[[Tensor], Any] | None


class SupportOptions(NamedTuple):
    """How to compute.

    Args:
        transform: what turns projections into logits.
        backend: ``torch`` or ``triton``.
        sparse_grad: the gradient of the weight is a sparse tensor of the rows that are some token's columns.
        exchange: of a vocabulary that ranks share.
        products: compute all logits of these tokens, block by block of the vocabulary, and take those of the columns
            from them: faster with very many columns.
    """

    transform: LogitTransform = LogitTransform()
    backend: str = "torch"
    sparse_grad: bool = False
    exchange: Exchange | None = None
    products: Products | None = None


def support_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: TokenColumns,
    options: SupportOptions = SupportOptions(),
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the softmax over each token's own columns, differentiable.

    ``logp_n = z_n[label_n] - lse_n``, ``lse_n = log sum_{v in S_n} exp z_n[v]`` and ``entropy_n = -sum p log p``, where
    ``z_n[v] = transform(hidden_n . weight_v + bias_v)`` and ``S_n`` are the columns of token n.

    Nothing of the size ``[P, H]`` or ``[N, V]`` is in memory. Sums are taken in fp32 (fp64 by ``torch`` for fp64
    inputs) in a fixed order, and gradients are rounded once.

    Args:
        hidden: ``[N, H]``. Those of tokens without columns are not read.
        weight: ``[V, H]``.
        bias: ``[V]`` or ``None``.
        columns: whose log-probabilities.
        options: how to compute; ``triton`` serves fp16, bf16 and fp32.

    Returns:
        ``logp``, ``entropy`` (in nats) and ``lse``, ``[N]`` each, fp32 or fp64; 0 for tokens without columns.
    """
    return _SupportStatistics.apply(hidden, weight, bias, columns, options)


class _SupportStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: TokenColumns, options: SupportOptions
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        kernels, exchange = _BACKENDS[options.backend], options.exchange
        with device_of(hidden):
            if options.products is None:
                logits = kernels.project(hidden, weight, bias, columns, options.transform)
            else:
                projected = project_by_products(hidden, weight, columns, options.products)
                logits = _to_logits(projected, bias, columns, options.transform)
            logp, entropy, lse = kernels.summarize(logits, columns, 0.0 if exchange is None else NO_COLUMNS)
        if exchange is not None:
            exchange.merge_(logp, entropy, lse)
        ctx.columns, ctx.options, ctx.bias_dtype = columns, options, None if bias is None else bias.dtype
        # What backward needs must not change where users change an output in place.
        ctx.save_for_backward(hidden, weight, logits, entropy.clone(), lse.clone())
        return logp, entropy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, logits, entropy, lse = ctx.saved_tensors
        columns, options = ctx.columns, ctx.options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        g_logp, g_entropy, g_lse = (None if g is None else g.contiguous() for g in upstream)
        softmax = _Softmax(g_logp, g_entropy, g_lse, entropy, lse)
        start_sum_ = None if options.exchange is None else options.exchange.start_sum_
        # Parts of a sum over ranks are not rounded before they are summed.
        dtype = hidden.dtype if start_sum_ is None else logits.dtype
        grad_hidden = grad_weight = grad_bias = summing = None
        with device_of(hidden):
            values = _BACKENDS[options.backend].differentiate(logits, columns, options.transform, softmax)
            if options.products is not None:
                needed = hidden if needs_weight else None, weight if needs_hidden else None
                grad_hidden, grad_weight = gradients_by_products(
                    values, columns, *needed, weight.dtype, options.products
                )
            elif needs_hidden:  # the larger part of the other's preparation is the host's: it takes place beside this
                grad_hidden = sum_rows(values, _sums_of_tokens(columns), weight, dtype, backend=options.backend)
            if needs_hidden and start_sum_ is not None:
                summing = start_sum_(grad_hidden)
            if needs_weight and options.products is None:
                grad_weight = _grad_weight(values, columns, hidden, weight, options)
            if needs_bias:
                sums, order = _sums_of_columns(columns)
                grad_bias = sum_values(values[order], sums, ctx.bias_dtype, backend=options.backend)
        if summing is not None:
            summing.wait()
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _sums_of_tokens(columns: TokenColumns) -> RowSums:
    """Rows of the head, for each token."""
    longest = len(columns.columns) if columns.width is None else columns.width
    return RowSums(columns.columns, columns.starts, columns.owners, columns.width, len(columns.labels), longest)


def _sums_of_columns(columns: TokenColumns) -> tuple[RowSums, Tensor]:
    """Hidden states, in the order of the tokens, for each column of the vocabulary; and each term's pair."""
    ordered, order = columns.sorted
    every = torch.arange(columns.vocab_size + 1, dtype=torch.int32, device=ordered.device)
    starts, owners = torch.searchsorted(ordered, every), columns.tokens[order]
    return RowSums(owners, starts, ordered, None, columns.vocab_size, len(columns.labels)), order


def _grad_weight(
    values: Tensor, columns: TokenColumns, hidden: Tensor, weight: Tensor, options: SupportOptions
) -> Tensor:
    """Dense; or sparse, for which the host waits for the number of columns that some token has."""
    if not options.sparse_grad:
        sums, order = _sums_of_columns(columns)
        return sum_rows(values[order], sums, hidden, weight.dtype, backend=options.backend)
    ordered, order = columns.sorted
    present, numbers, lengths = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    count = int((present < columns.vocab_size).sum())
    starts = torch.cat([lengths.new_zeros(1), lengths[:count].cumsum(0)])
    sums = RowSums(columns.tokens[order], starts, numbers.int(), None, count, len(columns.labels))
    rows = sum_rows(values[order], sums, hidden, weight.dtype, backend=options.backend)
    return torch.sparse_coo_tensor(
        present[:count].long()[None], rows, weight.shape, is_coalesced=True, check_invariants=False
    )


class _Softmax(NamedTuple):
    """``[N]`` each: the gradients by the statistics (or ``None``), and what the softmax's gradient needs of these."""

    grad_logp: Tensor | None
    grad_entropy: Tensor | None
    grad_lse: Tensor | None
    entropy: Tensor
    lse: Tensor


# --- Reference --------------------------------------------------------------------------------------------------------


def _project_torch(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: TokenColumns, transform: LogitTransform
) -> Tensor:
    wide = torch.promote_types(torch.float32, torch.promote_types(hidden.dtype, weight.dtype))
    projected = torch.empty(len(columns.columns), dtype=wide, device=hidden.device)
    for at in slices(len(projected), hidden.shape[1], wide):
        rows = weight[columns.columns[at].clamp(min=0)].to(wide)
        projected[at] = (hidden[columns.tokens[at]].to(wide) * rows).sum(-1)
    return _to_logits(projected, bias, columns, transform)


def _to_logits(projected: Tensor, bias: Tensor | None, columns: TokenColumns, transform: LogitTransform) -> Tensor:
    counts = columns.columns >= 0
    own = transform.rows(columns.tokens)
    logits = own(projected, None if bias is None else bias[columns.columns.clamp(min=0)].to(projected.dtype))
    return torch.where(counts, logits, float("-inf"))


def _summarize_torch(logits: Tensor, columns: TokenColumns, no_columns: float) -> tuple[Tensor, Tensor, Tensor]:
    def total(values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", offsets=columns.edges)

    tokens, top = columns.tokens, torch.segment_reduce(logits, "max", offsets=columns.edges)
    top = torch.where(top > float("-inf"), top, 0.0)
    shifted = logits - top[tokens]
    exp = shifted.exp()
    sums, hits = total(exp), columns.columns == columns.labels[tokens]
    some = sums != 0  # also where they are NaN
    sums = torch.where(some, sums, 1.0)
    logp = total(torch.where(hits, shifted, 0.0)) - sums.log()
    entropy = sums.log() - total(torch.where(exp > 0, exp * shifted, 0.0)) / sums
    return logp, entropy, torch.where(some, top + sums.log(), no_columns)


def _differentiate_torch(logits: Tensor, columns: TokenColumns, transform: LogitTransform, softmax: _Softmax) -> Tensor:
    def of_pairs(values: Tensor | None) -> Any:
        return 0.0 if values is None else values[columns.tokens]

    g_logp, g_entropy, g_lse, entropy, lse = (of_pairs(values) for values in softmax)
    log_p = logits - lse
    p = log_p.exp()
    grad = torch.where(columns.columns == columns.labels[columns.tokens], g_logp, 0.0) + p * (g_lse - g_logp)
    grad = grad - torch.where(p > 0, g_entropy * p * (log_p + entropy), 0.0)
    counts = columns.columns >= 0
    own = transform.rows(columns.tokens)
    return own.chain_(torch.where(counts, grad, 0.0), torch.where(counts, logits, 0.0))


# --- Triton -----------------------------------------------------------------------------------------------------------


def _project_triton(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: TokenColumns, transform: LogitTransform
) -> Tensor:
    hidden, weight = with_contiguous_rows(hidden), with_contiguous_rows(weight)
    bias = None if bias is None else bias.contiguous()
    pairs = len(columns.columns)
    logits = torch.empty(pairs, device=hidden.device)
    if pairs:
        _project_kernel[(triton.cdiv(pairs, _PROJECT_STEP[0]),)](
            logits, hidden, weight, hidden.stride(0), weight.stride(0), bias, columns.columns, columns.owners,
            columns.width, pairs, hidden.shape[1], transform.for_kernel(),
            **step_of(_PROJECT_STEP, hidden.shape[1]),
        )  # fmt: skip
    return logits


def _summarize_triton(logits: Tensor, columns: TokenColumns, no_columns: float) -> tuple[Tensor, Tensor, Tensor]:
    logp, entropy, lse = (torch.empty(len(columns.labels), device=logits.device) for _ in range(3))
    if len(logp):
        _summarize_kernel[(len(logp),)](
            logp, entropy, lse, logits, columns.columns, columns.starts, columns.width, columns.labels, no_columns,
            BLOCK=128, num_warps=1,
        )  # fmt: skip
    return logp, entropy, lse


def _differentiate_triton(
    logits: Tensor, columns: TokenColumns, transform: LogitTransform, softmax: _Softmax
) -> Tensor:
    values = torch.empty_like(logits)
    if len(columns.labels):
        _differentiate_kernel[(len(columns.labels),)](
            values, logits, *softmax, columns.columns, columns.starts, columns.width, columns.labels,
            transform.for_kernel(),
            BLOCK=128, num_warps=1,
        )  # fmt: skip
    return values


@jit(do_not_specialize=["pairs", "width"], do_not_specialize_on_alignment=["logits", "hidden", "columns", "owners"])
def _project_kernel(
    logits, hidden, weight, hidden_stride, weight_stride, bias, columns, owners, width, pairs, hidden_size, transform,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per ``BLOCK_P`` pairs, of one token or several: a token may have any number of columns."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.load(columns + at, mask=at < pairs, other=-1).to(tl.int64)
    token = at // width if owners is None else tl.load(owners + at, mask=at < pairs, other=0).to(tl.int64)
    counts = column >= 0
    products = tl.zeros((BLOCK_P, BLOCK_H), tl.float32)
    # Nothing is to be read for tokens without loss.
    depth = tl.where(tl.max(column, 0) >= 0, hidden_size, 0)
    for k in range(0, depth, BLOCK_H):
        ks = k + tl.arange(0, BLOCK_H)
        inside = counts[:, None] & (ks < hidden_size)[None, :]
        h = tl.load(hidden + token[:, None] * hidden_stride + ks[None, :], mask=inside, other=0.0)
        w = tl.load(weight + column[:, None] * weight_stride + ks[None, :], mask=inside, other=0.0)
        products += w.to(tl.float32) * h.to(tl.float32)
    z = tl.sum(products, 1)
    if bias is not None or transform.factor is not None:
        inverse = 1.0
        if transform.temperature is not None:
            inverse = inverse_temperature(transform, token, counts, 0)
        z = transform_block(z, bias, column, counts, transform, inverse)
    tl.store(logits + at, tl.where(counts, z, float("-inf")), mask=at < pairs)


@jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["logp", "entropy", "lse", "logits", "columns", "starts", "labels"],
)
def _summarize_kernel(logp, entropy, lse, logits, columns, starts, width, labels, no_columns, BLOCK: tl.constexpr):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    first, last = edges_of(starts, width, token)
    label = tl.load(labels + token)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(logits + at, mask=at < last, other=float("-inf")))
    top = tl.max(largest, 0)
    top = tl.where(top > float("-inf"), top, 0.0)
    sums = tl.zeros((BLOCK,), tl.float32)
    moments = tl.zeros((BLOCK,), tl.float32)
    hits = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        shifted = tl.load(logits + at, mask=at < last, other=float("-inf")) - top
        e = tl.exp(shifted)
        sums += e
        moments += e * tl.where(e > 0, shifted, 0.0)
        hits += tl.where(tl.load(columns + at, mask=at < last, other=-1) == label, shifted, 0.0)
    total = tl.sum(sums, 0)
    some = total != 0.0  # also where it is NaN
    total = tl.where(some, total, 1.0)
    log_total = tl.log(total)
    tl.store(logp + token, tl.sum(hits, 0) - log_total)
    tl.store(entropy + token, log_total - tl.sum(moments, 0) / total)
    tl.store(lse + token, tl.where(some, top + log_total, no_columns))


@jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["values", "logits", "columns", "starts", "labels"],
)
def _differentiate_kernel(
    values, logits, grad_logp, grad_entropy, grad_lse, entropy, lse, columns, starts, width, labels, transform,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token: the gradients of its projections."""
    token = tl.program_id(0).to(tl.int64)
    first, last = edges_of(starts, width, token)
    label = tl.load(labels + token)
    of_logp = 0.0 if grad_logp is None else tl.load(grad_logp + token)
    of_lse = 0.0 if grad_lse is None else tl.load(grad_lse + token)
    log_sum = tl.load(lse + token)
    inverse = 1.0
    if transform.temperature is not None:
        inverse = inverse_temperature(transform, token, True, 0)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        column = tl.load(columns + at, mask=at < last, other=-1)
        z = tl.load(logits + at, mask=at < last, other=float("-inf"))
        log_p = z - log_sum
        p = tl.exp(log_p)
        grad = tl.where(column == label, of_logp, 0.0) + p * (of_lse - of_logp)
        if grad_entropy is not None:
            grad -= tl.load(grad_entropy + token) * p * tl.where(p > 0, log_p + tl.load(entropy + token), 0.0)
        if transform.factor is not None:
            grad = transform_gradient(grad, tl.where(column >= 0, z, 0.0), transform, inverse)
        tl.store(values + at, tl.where(column >= 0, grad, 0.0), mask=at < last)


class _Kernels(NamedTuple):
    """What one backend computes: logits of all pairs, each token's statistics, the gradients of the projections."""

    project: Callable[..., Tensor]
    summarize: Callable[..., tuple[Tensor, Tensor, Tensor]]
    differentiate: Callable[..., Tensor]


_BACKENDS = {
    "torch": _Kernels(_project_torch, _summarize_torch, _differentiate_torch),
    "triton": _Kernels(_project_triton, _summarize_triton, _differentiate_triton),
}
