"""Layer normalisation.

R rows (all leading dimensions), H hidden size. Backward reads the inputs again and two numbers per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels._triton import choose_backend, device_of, jit, tl
from liger_losses.kernels.autograd import autocast_dtype, once_differentiable
from liger_losses.kernels.rows import (
    as_output,
    as_rows,
    column_sums,
    obstacle_of_row,
    persistent_programs,
    stages_of,
    tile_of,
    wide,
)

# Measured on an H200: elements of a tile and per thread, and programs per multiprocessor.
_FORWARD_TILE, _BACKWARD_TILE, _BACKWARD_PROGRAMS = (2048, 32), (4096, 32), 2


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """``y = (x - mean(x)) / sqrt(var(x) + eps) weight + bias``, over the last dimension, in fp32, rounded once.

    Under autocast the inputs are cast to fp32 first, as by ``torch.nn.functional.layer_norm``.

    Args:
        x: ``[..., H]``, floating point.
        weight, bias: ``[H]``, of any floating-point dtype, or None.
        eps: added to the variance, which divides by H.
        backend: ``torch`` or ``triton``; chosen from the tensors by default.

    Returns:
        ``[..., H]`` in ``x.dtype``.

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot serve the tensors.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450.
    """
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} must have one entry for each of the {x.shape[-1]} of x's last dimension, "
                f"got {tuple(vector.shape)}."
            )
    if autocast_dtype(x.device) is not None and x.dtype != torch.float64:
        x = x.float()
    backend = choose_backend(backend, (x, weight, bias), unsupported_reason=obstacle_of_row(x.shape[-1]))
    return _LayerNorm.apply(x, weight, bias, eps, backend == "triton")


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, on_triton: bool) -> Tensor:
        with device_of(x):
            y, mean, rstd = (_forward_triton if on_triton else _forward_torch)(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.on_triton = on_triton
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        backward = _backward_triton if ctx.on_triton else _backward_torch
        x, weight, mean, rstd = ctx.saved_tensors
        bias_dtype = ctx.bias_dtype if needs_bias else None
        return *backward(grad_y, x, weight, mean, rstd, needs_weight, bias_dtype), None, None


def _forward_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The reference."""
    u = wide(x)
    mean = u.mean(-1, keepdim=True)
    y = u - mean
    rstd = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y * rstd
    if weight is not None:
        y = y * wide(weight)
    if bias is not None:
        y = y + wide(bias)
    return as_output(y, x.dtype), mean.flatten(), rstd.flatten()


def _backward_torch(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_weight: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    per_row = (*x.shape[:-1], 1)
    g, rstd = wide(grad_y), rstd.view(per_row)
    xhat = (wide(x) - mean.view(per_row)) * rstd
    grad_weight = grad_bias = None
    if needs_weight and weight is not None:
        grad_weight = (g * xhat).flatten(0, -2).sum(0).to(weight.dtype)
    if bias_dtype is not None:
        grad_bias = g.flatten(0, -2).sum(0).to(bias_dtype)
    if weight is not None:
        g = g * wide(weight)
    grad_x = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_weight, grad_bias


def _forward_triton(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x_rows = as_rows(x)
    rows, columns = x_rows.shape
    y = x.new_empty(x.shape)
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    if rows:
        tile = tile_of(columns, *_FORWARD_TILE)
        _forward_kernel[(-(-rows // tile.rows),)](
            x_rows,
            x_rows.stride(0),
            x_rows if weight is None else weight.contiguous(),
            x_rows if bias is None else bias.contiguous(),
            y,
            mean,
            rstd,
            rows,
            columns,
            eps,
            weight is not None,
            bias is not None,
            tile.rows,
            tile.columns,
            num_warps=tile.warps,
        )
    return y, mean, rstd


def _backward_triton(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_weight: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x_rows, grad_y_rows = as_rows(x), as_rows(grad_y)
    rows, columns = x_rows.shape
    grad_x = x.new_empty(x.shape)
    weight_dtype = weight.dtype if needs_weight and weight is not None else None
    programs = 0
    if rows:
        tile = tile_of(columns, *_BACKWARD_TILE)
        programs = persistent_programs(-(-rows // tile.rows), x.device, _BACKWARD_PROGRAMS)
    weight_sums = rstd if weight_dtype is None else rstd.new_empty(programs, columns)
    bias_sums = rstd if bias_dtype is None else rstd.new_empty(programs, columns)
    if rows:
        _backward_kernel[(programs,)](
            grad_y_rows,
            grad_y_rows.stride(0),
            x_rows,
            x_rows.stride(0),
            x_rows if weight is None else weight.contiguous(),
            mean,
            rstd,
            grad_x,
            weight_sums,
            bias_sums,
            rows,
            columns,
            programs,
            weight is not None,
            weight_dtype is not None,
            bias_dtype is not None,
            tile.rows,
            tile.columns,
            stages_of(tile, (grad_y, x)),
            num_warps=tile.warps,
        )
    return (
        grad_x,
        None if weight_dtype is None else column_sums(weight_sums, weight_dtype),
        None if bias_dtype is None else column_sums(bias_sums, bias_dtype),
    )


@jit(do_not_specialize=["rows"])
def _forward_kernel(
    x,
    x_stride,
    weight,
    bias,
    y,
    mean,
    rstd,
    rows,
    columns,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per tile of rows."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    inside = (r < rows) & (c < columns)
    u = tl.load(x + r * x_stride + c, mask=inside, other=0.0).to(tl.float32)
    average = tl.sum(u, 1)[:, None] / columns
    u = tl.where(c < columns, u - average, 0.0)
    scale = tl.math.rsqrt(tl.sum(u * u, 1)[:, None] / columns + eps)
    tl.store(mean + r, average, mask=r < rows)
    tl.store(rstd + r, scale, mask=r < rows)
    u *= scale
    if HAS_WEIGHT:
        u *= tl.load(weight + c, mask=c < columns, other=0.0).to(tl.float32)
    if HAS_BIAS:
        u += tl.load(bias + c, mask=c < columns, other=0.0).to(tl.float32)
    tl.store(y + r * columns + c, u.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows", "programs"])
def _backward_kernel(
    grad_y,
    grad_y_stride,
    x,
    x_stride,
    weight,
    mean,
    rstd,
    grad_x,
    weight_sums,
    bias_sums,
    rows,
    columns,
    programs,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program walks over tiles of rows and keeps its share of the vectors' gradients in registers."""
    c = tl.arange(0, COLUMNS)[None, :]
    if HAS_WEIGHT:
        w = tl.load(weight + c, mask=c < columns, other=0.0).to(tl.float32)
    if NEEDS_WEIGHT:
        weight_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if NEEDS_BIAS:
        bias_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        r = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (r < rows) & (c < columns)
        g = tl.load(grad_y + r * grad_y_stride + c, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(x + r * x_stride + c, mask=inside, other=0.0).to(tl.float32)
        average = tl.load(mean + r, mask=r < rows, other=0.0)
        scale = tl.load(rstd + r, mask=r < rows, other=0.0)
        xhat = tl.where(c < columns, u - average, 0.0) * scale
        if NEEDS_WEIGHT:
            weight_total += g * xhat
        if NEEDS_BIAS:
            bias_total += g
        if HAS_WEIGHT:
            g *= w
        along = tl.sum(g * xhat, 1)[:, None] / columns
        dx = scale * (g - tl.sum(g, 1)[:, None] / columns - xhat * along)
        tl.store(grad_x + r * columns + c, dx.to(grad_x.dtype.element_ty), mask=inside)
    at = tl.program_id(0).to(tl.int64) * columns + c
    if NEEDS_WEIGHT:
        tl.store(weight_sums + at, tl.sum(weight_total, 0)[None, :], mask=c < columns)
    if NEEDS_BIAS:
        tl.store(bias_sums + at, tl.sum(bias_total, 0)[None, :], mask=c < columns)
