"""Statistics of every row of a block of logits, read once.

R rows (tokens), V columns (vocabulary).
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, jit, tl, triton
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform, transform_block

#: What a loss may ask for. All but ``argmax`` can be differentiated.
STATISTICS = ("logp", "entropy", "lse", "mean_logp", "log_sum_sq_probs", "mean_logit", "argmax")


def softmax_statistics(
    projected: Tensor,
    labels: Tensor,
    names: frozenset[str],
    epilogue: Epilogue = Epilogue(),
    *,
    scratch: int | None = None,
    backend: str | None = None,
) -> dict[str, Tensor]:
    """Reduce each row of logits ``z = epilogue(projected)`` to the named statistics of its softmax ``p``.

    ====================  =========================================================
    ``lse``               ``log sum_v exp(z_v)`` (always returned)
    ``logp``              ``z_label - lse``
    ``entropy``           ``- sum_v p_v log p_v``, in nats
    ``mean_logp``         ``1/V sum_v c_v log p_v`` with ``c`` the class weights, or 1
    ``log_sum_sq_probs``  ``log sum_v p_v^2``
    ``mean_logit``        ``1/V sum_v z_v``
    ``argmax``            the first index of the largest logit
    ====================  =========================================================

    Args:
        projected: ``[R, V]``, fp32 or fp64, rows contiguous.
        labels: ``[R]`` int64 in ``[0, V)``.
        names: which of :data:`STATISTICS` to compute.
        epilogue: from projections to logits.
        scratch: bytes for temporaries of the torch backend; unbounded by default.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.

    Returns:
        One tensor ``[R]`` per name, in the projections' dtype (``argmax``: int64).
    """
    if choose_backend(backend, [projected], dtypes=LOGIT_DTYPES) == "triton":
        return _statistics_triton(projected, labels, names, *epilogue)
    values = {name: projected.new_empty(len(labels)) for name in sorted({*names, "lse"} - {"argmax"})}
    if "argmax" in names:
        values["argmax"] = torch.empty_like(labels)
    for rows in row_slices(projected, scratch):
        found = _statistics_torch(projected[rows], labels[rows], names, *epilogue)
        for name, value in values.items():
            value[rows] = found[name]
    return values


def row_slices(block: Tensor, scratch: int | None) -> list[slice]:
    """Slices of rows whose temporaries (four of them) fit the scratch space, at least one row each."""
    rows, columns = block.shape
    size = max(rows, 1) if scratch is None else max(1, scratch // (4 * max(columns, 1) * block.dtype.itemsize))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _statistics_torch(
    projected: Tensor,
    labels: Tensor,
    names: frozenset[str],
    transform: LogitTransform,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> dict[str, Tensor]:
    """The reference: all statistics that share what the named ones need."""
    values: dict[str, Tensor] = {}
    logits = transform(projected, bias)
    if "argmax" in names:
        top, values["argmax"] = logits.max(-1)
    else:
        top = logits.amax(-1)
    shifted = logits - top[:, None]
    label_shifted = shifted.gather(-1, labels[:, None]).squeeze(-1)
    mean_shifted = shifted.mean(-1) if "mean_logit" in names or "mean_logp" in names else top
    values["mean_logit"] = mean_shifted + top
    if class_weight is not None:
        weighted_shifted = (shifted @ class_weight) / logits.shape[-1]

    exp = shifted.exp_()
    total = exp.sum(-1)
    log_total = total.log()
    values["lse"] = top + log_total
    # Subtracting the row's maximum first keeps log-probs near 0 exact however large the logits are.
    values["logp"] = label_shifted - log_total
    if class_weight is None:
        values["mean_logp"] = mean_shifted - log_total
    else:
        values["mean_logp"] = weighted_shifted - log_total * class_weight.mean()
    if "log_sum_sq_probs" in names:
        values["log_sum_sq_probs"] = (exp * exp).sum(-1).log() - 2 * log_total
    if "entropy" in names:
        values["entropy"] = torch.special.entr(exp.div_(total[:, None])).sum(-1)
    return values


def _statistics_triton(
    projected: Tensor,
    labels: Tensor,
    names: frozenset[str],
    transform: LogitTransform,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> dict[str, Tensor]:
    rows, columns = projected.shape
    values = projected.new_empty(len(_OUTPUTS), rows)
    argmax = torch.empty_like(labels)
    if rows:
        _statistics_kernel[(rows,)](
            projected,
            projected.stride(0),
            labels,
            bias,
            class_weight,
            values,
            argmax,
            rows,
            columns,
            **transform.kernel_arguments(),
            HAS_BIAS=bias is not None,
            HAS_CLASS_WEIGHT=class_weight is not None and "mean_logp" in names,
            HAS_ENTROPY="entropy" in names,
            HAS_SUM_SQ="log_sum_sq_probs" in names,
            HAS_MEAN="mean_logit" in names or "mean_logp" in names,
            HAS_ARGMAX="argmax" in names,
            BLOCK=min(4096, triton.next_power_of_2(columns)),
            num_warps=8,
        )
    found = {name: values[i] for i, name in enumerate(_OUTPUTS) if name in names or name == "lse"}
    if "argmax" in names:
        found["argmax"] = argmax
    return found


#: The rows of the kernel's output.
_OUTPUTS = ("lse", "logp", "entropy", "mean_logp", "log_sum_sq_probs", "mean_logit")


@jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["labels"])
def _statistics_kernel(
    projected,
    row_stride,
    labels,
    bias,
    class_weight,
    values,
    argmax,
    rows,
    columns,
    scale,
    softcap,
    inverse_temperature,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SUM_SQ: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: the softmax's sums relative to a running maximum, rescaled when it rises."""
    row = tl.program_id(0).to(tl.int64)
    start_of_row = projected + row * row_stride
    # Finite, so that the first rescaling is exp(-huge) = 0 and not exp(-inf + inf).
    top = tl.full((), -3.0e38, tl.float32)
    total = tl.zeros((), tl.float32)  # sum e,    e = exp(z - top)
    moment = tl.zeros((), tl.float32)  # sum e (z - top)
    squares = tl.zeros((), tl.float32)  # sum e^2
    logit_sum = tl.zeros((), tl.float32)
    weighted_sum = tl.zeros((), tl.float32)
    weight_sum = tl.zeros((), tl.float32)
    best = tl.zeros((), tl.int32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        z = tl.load(start_of_row + offsets, mask=inside, other=0.0)
        if HAS_BIAS:
            z += tl.load(bias + offsets, mask=inside, other=0.0).to(tl.float32)
        z = transform_block(z, scale, softcap, inverse_temperature, HAS_SCALE, HAS_SOFTCAP)
        if HAS_MEAN:
            logit_sum += tl.sum(tl.where(inside, z, 0.0), 0)
        if HAS_CLASS_WEIGHT:
            c = tl.load(class_weight + offsets, mask=inside, other=0.0)
            weighted_sum += tl.sum(tl.where(inside, c * z, 0.0), 0)
            weight_sum += tl.sum(c, 0)
        z = tl.where(inside, z, float("-inf"))
        block_top = tl.max(z, 0)
        if HAS_ARGMAX:
            best = tl.where(block_top > top, start + tl.argmax(z, 0), best)
        new_top = tl.maximum(top, block_top)
        rescale = tl.exp(top - new_top)
        shifted = z - new_top
        e = tl.exp(shifted)
        if HAS_ENTROPY:
            moment = rescale * (moment + total * (top - new_top)) + tl.sum(tl.where(e > 0, e * shifted, 0.0), 0)
        if HAS_SUM_SQ:
            squares = squares * rescale * rescale + tl.sum(e * e, 0)
        total = total * rescale + tl.sum(e, 0)
        top = new_top

    label = tl.load(labels + row)
    z_label = tl.load(start_of_row + label)
    if HAS_BIAS:
        z_label += tl.load(bias + label).to(tl.float32)
    z_label = transform_block(z_label, scale, softcap, inverse_temperature, HAS_SCALE, HAS_SOFTCAP)
    log_total = tl.log(total)
    lse = top + log_total
    tl.store(values + row, lse)
    tl.store(values + rows + row, (z_label - top) - log_total)
    if HAS_ENTROPY:
        tl.store(values + 2 * rows + row, log_total - moment / total)
    if HAS_CLASS_WEIGHT:
        tl.store(values + 3 * rows + row, (weighted_sum - lse * weight_sum) / columns)
    elif HAS_MEAN:
        tl.store(values + 3 * rows + row, logit_sum / columns - lse)
    if HAS_SUM_SQ:
        tl.store(values + 4 * rows + row, tl.log(squares) - 2 * log_total)
    if HAS_MEAN:
        tl.store(values + 5 * rows + row, logit_sum / columns)
    if HAS_ARGMAX:
        tl.store(argmax + row, best.to(tl.int64))
