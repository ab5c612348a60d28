"""Matrix products whose sums are not rounded to half precision before they are complete."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_DTYPES = (torch.float16, torch.bfloat16)
#: On a GPU, half-precision products are slow if a size is no multiple of the first. A size above the second is cut.
ALIGNED, MIN_CUT_SIZE = 8, 1024


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 of fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> Tensor:
    """Write ``a @ b`` into ``out``, or add it to ``out``, with the sum taken at least in fp32.

    ``out = a @ b`` or ``out = out + a @ b``

    Args:
        out: ``[M, N]``, any strides. Rounded once per call when it is narrower than fp32.
        a: ``[M, K]``.
        b: ``[K, N]``, of the dtype of ``a``; on a CPU, one of them may be fp32 if the other is half precision.
        accumulate: add to ``out`` instead of overwriting it.

    Returns:
        ``out``.
    """
    if a.is_cuda and a.dtype in HALF_DTYPES and out.dtype in (a.dtype, torch.float32):
        return _aligned(out, a, b, accumulate)
    # CPU libraries round a half-precision product before it can be added up: multiply in fp32 there.
    wide = wide_dtype(a.dtype)
    a, b = a.to(wide), b.to(wide)
    if out.dtype == wide:
        return torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    product = torch.mm(a, b)
    return out.add_(product) if accumulate else out.copy_(product)


def _aligned(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> Tensor:
    """:func:`matmul_into` on a GPU. If a size is not a multiple of :data:`ALIGNED`, the rest is a separate product."""
    (rows, terms), columns = a.shape, b.shape[1]
    if rows % ALIGNED and rows > MIN_CUT_SIZE:
        cut = rows // ALIGNED * ALIGNED
        _aligned(out[:cut], a[:cut], b, accumulate)
        _aligned(out[cut:], a[cut:], b, accumulate)
    elif columns % ALIGNED and columns > MIN_CUT_SIZE:
        cut = columns // ALIGNED * ALIGNED
        _aligned(out[:, :cut], a, b[:, :cut], accumulate)
        _aligned(out[:, cut:], a, b[:, cut:], accumulate)
    elif terms % ALIGNED and terms > MIN_CUT_SIZE:
        cut = terms // ALIGNED * ALIGNED
        # A half-precision `out` is rounded after each part; with the smaller one first, less of it is rounded twice.
        _aligned(out, a[:, cut:], b[cut:], accumulate)
        _aligned(out, a[:, :cut], b[:cut], True)
    # cuBLAS keeps half-precision products in fp32 until the one rounding into `out`.
    elif a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    return out
