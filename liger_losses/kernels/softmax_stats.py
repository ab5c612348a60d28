"""Statistics of every row of a block of logits, read once.

R rows (tokens), V columns (vocabulary).
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, jit, tl, triton
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, load_logits
from liger_losses.kernels.online_softmax import (
    STATISTICS,
    Sums,
    empty_statistics,
    online_start,
    online_step,
    reference_statistics,
    store_statistics,
    stored,
)

__all__ = ["STATISTICS", "row_slices", "softmax_statistics"]


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
    ``mean_logp``         ``1/V sum_v c_v log p_v`` with class weights ``c``, or 1
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
        rows, columns = projected.shape
        values = empty_statistics(names, rows, projected.device)
        if rows:
            _row_statistics_kernel[(rows,)](
                projected, projected.stride(0), labels, epilogue.bias, epilogue.class_weight, stored(values), columns,
                epilogue.transform.for_kernel, Sums.needed(names, epilogue.class_weight), **step_of(columns),
            )  # fmt: skip
        return values
    values = {name: projected.new_empty(len(labels)) for name in sorted({*names, "lse"} - {"argmax"})}
    if "argmax" in names:
        values["argmax"] = torch.empty_like(labels)
    for part in row_slices(projected, scratch):
        z, at, transform = projected[part], labels[part], epilogue.rows(part)
        if len(z) == 1:  # the sum of a single row would be shared by threads, and taken in another order
            z, at = z.expand(2, -1), at.expand(2)
        statistics = reference_statistics(z, at, names, transform)
        for name, value in values.items():
            value[part] = statistics[name][: len(value[part])]
    return values


def step_of(columns: int) -> dict[str, int]:
    """Columns of a row that a program takes at a time, and its warps."""
    block = min(4096, triton.next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": min(8, max(1, block // 128))}


def row_slices(block: Tensor, scratch: int | None) -> list[slice]:
    """Slices of rows whose temporaries (four of them) fit the scratch space, at least one row each."""
    rows, columns = block.shape
    size = max(rows, 1) if scratch is None else max(1, scratch // (4 * max(columns, 1) * block.dtype.itemsize))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


@jit(do_not_specialize_on_alignment=["labels"])
def _row_statistics_kernel(
    projected, row_stride, labels, bias, class_weight,
    out, columns, transform, sums,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    projected += row * row_stride
    label = tl.load(labels + row)
    inverse = inverse_temperature(transform, row, True, 0)
    state = online_start(tl.zeros((), tl.float32))
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        z = load_logits(projected, bias, at, inside, transform, inverse)
        state = online_step(z, start, at, inside, class_weight, state, sums, 0)
    label_logit = load_logits(projected, bias, label, True, transform, inverse)
    store_statistics(out, row, True, label_logit, state, sums, columns)
