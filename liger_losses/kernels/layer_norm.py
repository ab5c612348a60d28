"""Layer normalization.

R rows (all leading dimensions), H hidden size. Backward reads the inputs again, and two numbers per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels._triton import device_of, jit, tl
from liger_losses.kernels.autograd import autocast_dtype, once_differentiable
from liger_losses.kernels.kernel_operators import operator, where_needed
from liger_losses.kernels.rows import (
    as_output,
    choose_row_backend,
    launch_backward,
    launch_forward,
    load_tile,
    load_vector,
    store_partial_sum,
    tile_indices,
    wide,
)


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
        backend: ``torch`` or ``triton``; by default chosen from the tensors.

    Returns:
        ``[..., H]`` in ``x.dtype``.

    Raises:
        ValueError: shapes do not fit, or the backend does not support the tensors.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450.
    """
    if autocast_dtype(x.device) is not None and x.dtype != torch.float64:
        x = x.float()
    on_triton = choose_row_backend(backend, (x,), weight=weight, bias=bias)
    return _norm(x, weight, bias, eps, on_triton)[0]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, on_triton: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The result, and each row's mean and rstd, ``[R]``."""
        if not on_triton:
            return _forward_torch(x, weight, bias, eps)
        y = x.new_empty(x.shape)
        with device_of(x):
            mean, rstd = launch_forward(_forward_kernel, 32, (x,), (weight, bias), (y,), 2, eps)
        return y, mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, weight, bias, _, ctx.on_triton), (_, mean, rstd) = inputs, output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, *_: None, gradients: Any = None) -> Any:
        if grad_y is None:
            return (None,) * 5
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        bias_dtype = ctx.bias_dtype if needs_bias else None
        saved = *ctx.saved_tensors, needs_weight, bias_dtype, ctx.on_triton
        found = (gradients or _gradients)(grad_y, *saved)
        return *where_needed(found, (True, needs_weight, needs_bias)), None, None


def _gradients(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_weight: bool,
    bias_dtype: torch.dtype | None,
    on_triton: bool,
) -> list[Tensor]:
    """The gradients of x, and of the weight and the bias where they are needed."""
    dtypes = weight.dtype if needs_weight and weight is not None else None, bias_dtype
    if on_triton:
        grad_x = x.new_empty(x.shape)
        sums = launch_backward(_backward_kernel, (grad_y, x), (weight,), (mean, rstd, grad_x), dtypes)
        found = grad_x, *sums
    else:
        found = _backward_torch(grad_y, (x, weight, mean, rstd), *dtypes)
    return [gradient for gradient in found if gradient is not None]


_norm = operator(
    "liger_losses::layer_norm",
    _LayerNorm,
    "Tensor x, Tensor? weight, Tensor? bias, float eps, bool on_triton",
    _gradients,
    "Tensor grad_y, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool needs_weight, ScalarType? bias_dtype, "
    "bool on_triton",
)


def _forward_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Reference implementation: the result, and each row's mean and ``rstd = (var(x) + eps)^(-1/2)``, ``[R]``."""
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
    grad_y: Tensor, saved: Sequence[Any], weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> tuple[Tensor | None, ...]:
    """Reference implementation: the gradients of x, weight and bias; a dtype is None if its gradient is not needed."""
    x, weight, mean, rstd = saved
    mean, rstd = (value.view(*x.shape[:-1], 1) for value in (mean, rstd))
    g = wide(grad_y)
    xhat = (wide(x) - mean) * rstd
    grad_weight = None if weight_dtype is None else (g * xhat).flatten(0, -2).sum(0).to(weight_dtype)
    grad_bias = None if bias_dtype is None else g.flatten(0, -2).sum(0).to(bias_dtype)
    if weight is not None:
        g = g * wide(weight)
    grad_x = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_weight, grad_bias


@jit(do_not_specialize=["rows"])
def _forward_kernel(
    x, x_stride, weight, bias, y, mean, rstd, rows, columns, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program per tile of rows."""
    r, c, inside = tile_indices(tl.program_id(0).to(tl.int64) * ROWS, rows, columns, ROWS, COLUMNS)
    u = load_tile(x, x_stride, r, c, inside)
    average = tl.sum(u, 1)[:, None] / columns
    u = tl.where(c < columns, u - average, 0.0)
    scale = tl.math.rsqrt(tl.sum(u * u, 1)[:, None] / columns + eps)
    tl.store(mean + r, average, mask=r < rows)
    tl.store(rstd + r, scale, mask=r < rows)
    u *= scale
    if weight is not None:
        u *= load_vector(weight, c, columns)
    if bias is not None:
        u += load_vector(bias, c, columns)
    tl.store(y + r * columns + c, u.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows", "programs"])
def _backward_kernel(
    grad_y, grad_y_stride, x, x_stride, weight, mean, rstd, grad_x, weight_sums, bias_sums,
    rows, columns, programs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program loops over tiles of rows and keeps its share of the vectors' gradients in registers."""
    c = tl.arange(0, COLUMNS)[None, :]
    if weight is not None:
        w = load_vector(weight, c, columns)
    if weight_sums is not None:
        weight_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if bias_sums is not None:
        bias_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        r, _, inside = tile_indices(tile * ROWS, rows, columns, ROWS, COLUMNS)
        g = load_tile(grad_y, grad_y_stride, r, c, inside)
        u = load_tile(x, x_stride, r, c, inside)
        average = tl.load(mean + r, mask=r < rows, other=0.0)
        scale = tl.load(rstd + r, mask=r < rows, other=0.0)
        xhat = tl.where(c < columns, u - average, 0.0) * scale
        if weight_sums is not None:
            weight_total += g * xhat
        if bias_sums is not None:
            bias_total += g
        if weight is not None:
            g *= w
        along = tl.sum(g * xhat, 1)[:, None] / columns
        dx = scale * (g - tl.sum(g, 1)[:, None] / columns - xhat * along)
        tl.store(grad_x + r * columns + c, dx.to(grad_x.dtype.element_ty), mask=inside)
    if weight_sums is not None:
        store_partial_sum(weight_sums, weight_total, c, columns)
    if bias_sums is not None:
        store_partial_sum(bias_sums, bias_total, c, columns)
