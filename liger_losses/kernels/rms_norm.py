"""Root-mean-square normalisation: plain, after adding a residual, and gated.

R rows (all leading dimensions), H hidden size. Backward reads the inputs again and recomputes everything but one number
per row, ``rstd = (mean(x^2) + eps)^(-1/2)``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.kernels._triton import choose_backend, device_of, jit, tl
from liger_losses.kernels.autograd import once_differentiable
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

#: How the normalised row is multiplied by the weight.
MULTIPLY = ("cast_first", "fp32")

# Measured on an H200: elements of a tile and per thread, and programs per multiprocessor.
_FORWARD_TILE, _BACKWARD_TILE, _BACKWARD_PROGRAMS = (2048, 16), (4096, 32), 2


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    multiply: str = "cast_first",
    backend: str | None = None,
) -> Tensor:
    """``y = xhat (offset + weight)`` with ``xhat = x / sqrt(mean(x^2) + eps)``, the mean over the last dimension.

    ``multiply="cast_first"`` is Llama's: ``weight * xhat.to(x.dtype)``, with the offset added in the weight's dtype.
    ``multiply="fp32"`` is Gemma's (``offset=1``) and OLMo 2's (``offset=0``): ``(xhat * (offset + weight.float()))``,
    rounded once, to ``x.dtype``.

    Args:
        x: ``[..., H]``, floating point.
        weight: ``[H]``, of any floating-point dtype, or None.
        eps: added to the mean square.
        offset: added to the weight.
        multiply: ``cast_first`` or ``fp32``.
        backend: ``torch`` or ``triton``; chosen from the tensors by default.

    Returns:
        ``[..., H]``; for ``cast_first`` in the dtype that ``x`` and the weight promote to, else in ``x.dtype``.

    Raises:
        ValueError: shapes that do not fit, an unknown ``multiply``, or a backend that cannot serve the tensors.

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    return _apply(x, None, None, weight, eps, offset, multiply, False, backend)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    multiply: str = "cast_first",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``rms_norm(s)`` and ``s = x + residual``, which is rounded to its dtype before it is normalised.

    Args:
        x, residual: ``[..., H]``, of the same shape; ``s`` has the dtype they promote to.
        weight, eps, offset, multiply, backend: as in :func:`rms_norm`.

    Returns:
        ``(y, s)``, both differentiable.

    Raises:
        ValueError: as in :func:`rms_norm`.
    """
    _check_same_shape(x, residual, "residual")
    return _apply(x, residual, None, weight, eps, offset, multiply, False, backend)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    gate_first: bool = False,
    multiply: str = "cast_first",
    backend: str | None = None,
) -> Tensor:
    """``rms_norm(x) silu(gate)``, or ``rms_norm(x silu(gate))`` with ``gate_first``.

    The order of roundings is that of transformers' modules. Norm first (Qwen3-Next): ``weight * xhat.to(x.dtype)`` in
    the dtype they promote to, times ``silu(gate.float())`` in fp32, rounded to ``x.dtype``. Gate first (Mamba 2):
    ``u = x.float() * silu(gate.float())`` is normalised without being rounded, and then multiplied as in
    :func:`rms_norm`. With ``multiply="fp32"`` nothing is rounded but the result.

    Args:
        x, gate: ``[..., H]``, of the same shape.
        weight, eps, multiply, backend: as in :func:`rms_norm`.
        gate_first: whether the gate is applied before the norm.

    Returns:
        ``[..., H]``; with ``gate_first`` and ``cast_first`` in the dtype that ``x`` and the weight promote to, else in
        ``x.dtype``.

    Raises:
        ValueError: as in :func:`rms_norm`.
    """
    _check_same_shape(x, gate, "gate")
    return _apply(x, None, gate, weight, eps, 0.0, multiply, gate_first, backend)


def _check_same_shape(x: Tensor, other: Tensor, name: str) -> None:
    if other.shape != x.shape:
        raise ValueError(f"{name} must have the shape of x, {tuple(x.shape)}, got {tuple(other.shape)}; expand it.")


def _apply(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    multiply: str,
    gate_first: bool,
    backend: str | None,
) -> Any:
    if multiply not in MULTIPLY:
        raise ValueError(f"multiply must be one of {', '.join(MULTIPLY)}, got {multiply!r}.")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must have one entry for each of the {x.shape[-1]} of x's last dimension, "
            f"got {tuple(weight.shape)}."
        )
    backend = choose_backend(backend, (x, residual, gate, weight), unsupported_reason=obstacle_of_row(x.shape[-1]))
    return _RMSNorm.apply(
        x, residual, gate, weight, eps, float(offset), multiply == "cast_first", gate_first, backend == "triton"
    )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        gate: Tensor | None,
        weight: Tensor | None,
        eps: float,
        offset: float,
        cast_first: bool,
        gate_first: bool,
        on_triton: bool,
    ) -> Any:
        forward = _forward_triton if on_triton else _forward_torch
        with device_of(x):
            y, summed, rstd = forward(x, residual, gate, weight, eps, offset, cast_first, gate_first)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if residual is None else summed, gate, weight, rstd)
        ctx.options = offset, gate_first
        ctx.on_triton = on_triton
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return y if residual is None else (y, summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_summed: Tensor | None = None) -> Any:
        x, gate, weight, rstd = ctx.saved_tensors
        needs_x, needs_residual, needs_gate, needs_weight = ctx.needs_input_grad[:4]
        if grad_y is None:
            grad_x, grad_gate, grad_weight = grad_summed, None, None
        else:
            backward = _backward_triton if ctx.on_triton else _backward_torch
            offset, gate_first = ctx.options
            grad_x, grad_gate, grad_weight = backward(
                grad_y, grad_summed, x, gate, weight, rstd, offset, gate_first, needs_weight
            )
        x_dtype, residual_dtype = ctx.dtypes
        grad_residual = None
        if grad_x is not None:
            if needs_residual:
                grad_residual = grad_x.to(residual_dtype)
            grad_x = grad_x.to(x_dtype) if needs_x else None
        return grad_x, grad_residual, grad_gate if needs_gate else None, grad_weight, None, None, None, None, None


def _result_dtype(x: Tensor, gate: Tensor | None, weight: Tensor | None, cast_first: bool, gate_first: bool) -> Any:
    if weight is None or not cast_first or (gate is not None and not gate_first):
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def _forward_torch(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    cast_first: bool,
    gate_first: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The reference: transformers' formulas, operation by operation."""
    summed = None if residual is None else x + residual
    x = x if summed is None else summed
    u = wide(x)
    if gate is not None and gate_first:
        u = u * F.silu(wide(gate))
    rstd = torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    y = u * rstd
    if cast_first:
        y = y.to(x.dtype)
        if weight is not None:
            y = (weight + offset if offset else weight) * y
    elif weight is not None:
        y = y * (offset + wide(weight))
    if gate is not None and not gate_first:
        y = y * F.silu(wide(gate))
    return as_output(y, _result_dtype(x, gate, weight, cast_first, gate_first)), summed, rstd.flatten()


def _backward_torch(
    grad_y: Tensor,
    grad_summed: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    gate_first: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    g, u, rstd = wide(grad_y), wide(x), rstd.view(*x.shape[:-1], 1)
    w = 1.0 if weight is None else offset + wide(weight)
    if gate is not None:
        z = wide(gate)
        sigmoid = z.sigmoid()
        silu, slope = z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
    if gate is not None and gate_first:
        u = u * silu
    xhat = u * rstd
    grad_gate = None
    if gate is not None and not gate_first:
        grad_gate = g * (w * xhat) * slope
        g = g * silu
    grad_weight = None
    if needs_weight and weight is not None:
        grad_weight = (g * xhat).flatten(0, -2).sum(0).to(weight.dtype)
    g = g * w
    grad_x = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if gate is not None and gate_first:
        grad_gate = grad_x * wide(x) * slope
        grad_x = grad_x * silu
    if grad_summed is not None:
        grad_x = grad_x + grad_summed
    return grad_x.to(x.dtype), None if gate is None or grad_gate is None else grad_gate.to(gate.dtype), grad_weight


def _forward_triton(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    cast_first: bool,
    gate_first: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    x_rows = as_rows(x)
    residual_rows = x_rows if residual is None else as_rows(residual)
    gate_rows = x_rows if gate is None else as_rows(gate)
    rows, columns = x_rows.shape
    if residual is None:
        summed, normed = None, x
    else:
        summed = normed = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y = x.new_empty(x.shape, dtype=_result_dtype(normed, gate, weight, cast_first, gate_first))
    rstd = x.new_empty(rows, dtype=torch.float32)
    if rows:
        tile = tile_of(columns, *_FORWARD_TILE)
        _forward_kernel[(-(-rows // tile.rows),)](
            x_rows,
            x_rows.stride(0),
            residual_rows,
            residual_rows.stride(0),
            gate_rows,
            gate_rows.stride(0),
            x_rows if weight is None else weight.contiguous(),
            normed if summed is None else summed,
            y,
            rstd,
            rows,
            columns,
            eps,
            offset,
            residual is not None,
            gate is not None,
            gate_first,
            weight is not None,
            cast_first,
            tile.rows,
            tile.columns,
            num_warps=tile.warps,
        )
    return y, summed, rstd


def _backward_triton(
    grad_y: Tensor,
    grad_summed: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    gate_first: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x_rows, grad_y_rows = as_rows(x), as_rows(grad_y)
    grad_summed_rows = grad_y_rows if grad_summed is None else as_rows(grad_summed)
    gate_rows = x_rows if gate is None else as_rows(gate)
    rows, columns = x_rows.shape
    grad_x = x.new_empty(x.shape)
    grad_gate = grad_x if gate is None else gate.new_empty(gate.shape)
    needs_weight = needs_weight and weight is not None
    if rows == 0:
        grad_weight = torch.zeros_like(weight) if needs_weight and weight is not None else None
        return grad_x, None if gate is None else grad_gate, grad_weight
    tile = tile_of(columns, *_BACKWARD_TILE)
    programs = persistent_programs(-(-rows // tile.rows), x.device, _BACKWARD_PROGRAMS)
    partial = rstd.new_empty(programs, columns) if needs_weight else rstd
    _backward_kernel[(programs,)](
        grad_y_rows,
        grad_y_rows.stride(0),
        grad_summed_rows,
        grad_summed_rows.stride(0),
        x_rows,
        x_rows.stride(0),
        gate_rows,
        gate_rows.stride(0),
        x_rows if weight is None else weight.contiguous(),
        rstd,
        grad_x,
        grad_gate,
        partial,
        rows,
        columns,
        programs,
        offset,
        grad_summed is not None,
        gate is not None,
        gate_first,
        weight is not None,
        needs_weight,
        tile.rows,
        tile.columns,
        stages_of(tile, (grad_y, grad_summed, x, gate)),
        num_warps=tile.warps,
    )
    grad_weight = column_sums(partial, weight.dtype) if needs_weight and weight is not None else None
    return grad_x, None if gate is None else grad_gate, grad_weight


@jit(do_not_specialize=["rows"])
def _forward_kernel(
    x,
    x_stride,
    residual,
    residual_stride,
    gate,
    gate_stride,
    weight,
    summed,
    y,
    rstd,
    rows,
    columns,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GATE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per tile of rows. The dtype of ``summed`` is that of what is normalised."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    inside = (r < rows) & (c < columns)
    u = tl.load(x + r * x_stride + c, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        u += tl.load(residual + r * residual_stride + c, mask=inside, other=0.0).to(tl.float32)
        rounded = u.to(summed.dtype.element_ty)
        tl.store(summed + r * columns + c, rounded, mask=inside)
        u = rounded.to(tl.float32)
    if HAS_GATE:
        z = tl.load(gate + r * gate_stride + c, mask=inside, other=0.0).to(tl.float32)
        silu = z / (1 + tl.exp(-z))
        if GATE_FIRST:
            u *= silu
    if HAS_WEIGHT:
        w = tl.load(weight + c, mask=c < columns, other=0.0)
    scale = tl.math.rsqrt(tl.sum(u * u, 1) / columns + eps)[:, None]
    tl.store(rstd + r, scale, mask=r < rows)
    value = u * scale
    if CAST_FIRST:
        value = value.to(summed.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        if CAST_FIRST:
            value *= (w.to(tl.float32) + offset).to(weight.dtype.element_ty).to(tl.float32)
            # Two dtypes that differ promote to fp32, where the product is not rounded.
            if summed.dtype.element_ty == weight.dtype.element_ty:
                value = value.to(weight.dtype.element_ty).to(tl.float32)
        else:
            value *= offset + w.to(tl.float32)
    if HAS_GATE and not GATE_FIRST:
        value *= silu
    tl.store(y + r * columns + c, value.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows", "programs"])
def _backward_kernel(
    grad_y,
    grad_y_stride,
    grad_summed,
    grad_summed_stride,
    x,
    x_stride,
    gate,
    gate_stride,
    weight,
    rstd,
    grad_x,
    grad_gate,
    partial,
    rows,
    columns,
    programs,
    offset,
    HAS_GRAD_SUMMED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program walks over tiles of rows and keeps its share of the weight's gradient in registers."""
    c = tl.arange(0, COLUMNS)[None, :]
    if HAS_WEIGHT:
        w = offset + tl.load(weight + c, mask=c < columns, other=0.0).to(tl.float32)
    if NEEDS_WEIGHT:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        r = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (r < rows) & (c < columns)
        g = tl.load(grad_y + r * grad_y_stride + c, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(x + r * x_stride + c, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + r, mask=r < rows, other=0.0)
        if HAS_GRAD_SUMMED:
            added = tl.load(grad_summed + r * grad_summed_stride + c, mask=inside, other=0.0)
        if HAS_GATE:
            z = tl.load(gate + r * gate_stride + c, mask=inside, other=0.0).to(tl.float32)
            sigmoid = 1 / (1 + tl.exp(-z))
            silu = z * sigmoid
            slope = sigmoid * (1 + z * (1 - sigmoid))
            if GATE_FIRST:
                slope *= u
                u *= silu
        xhat = u * scale
        if HAS_GATE and not GATE_FIRST:
            dz = g * xhat * slope
            if HAS_WEIGHT:
                dz *= w
            g *= silu
        if NEEDS_WEIGHT:
            total += g * xhat
        if HAS_WEIGHT:
            g *= w
        dx = scale * (g - xhat * (tl.sum(g * xhat, 1)[:, None] / columns))
        if HAS_GATE and GATE_FIRST:
            dz = dx * slope
            dx *= silu
        if HAS_GRAD_SUMMED:
            dx += added.to(tl.float32)
        tl.store(grad_x + r * columns + c, dx.to(grad_x.dtype.element_ty), mask=inside)
        if HAS_GATE:
            tl.store(grad_gate + r * columns + c, dz.to(grad_gate.dtype.element_ty), mask=inside)
    if NEEDS_WEIGHT:
        tl.store(partial + tl.program_id(0).to(tl.int64) * columns + c, tl.sum(total, 0)[None, :], mask=c < columns)
