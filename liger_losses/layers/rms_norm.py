"""Root-mean-square normalization: plain, after adding a residual, and gated; and centered, as layer normalization is.

R rows (all leading dimensions), H hidden size. Backward reads the inputs again and recomputes everything except one
number per row, ``rstd = (mean(x^2) + eps)^(-1/2)``, and the mean that was subtracted from x before, if it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.autograd import once_differentiable, operator, where_needed
from liger_losses.layers.rows import (
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

#: How the normalized row is multiplied by the weight.
MULTIPLY = ("cast_first", "fp32")
#: Entries of a tile that a thread takes in forward, without a mean and with one.
_PER_THREAD = 16, 32


class Options(NamedTuple):
    """``eps``, ``offset`` and ``gate_first`` as in the public functions, whether ``multiply`` is ``cast_first``, and
    whether the mean is subtracted first."""

    eps: float
    offset: float
    gate_first: bool
    cast_first: bool
    centered: bool


# x, residual, gate, weight and bias; in backward x (the sum, if there is a residual), gate, weight, rstd and mean.
_Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_Saved = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]


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
    ``multiply="fp32"`` is Gemma's (``offset=1``) and OLMo 2's (``offset=0``): ``xhat * (offset + weight.float())``,
    rounded once, to ``x.dtype``.

    Args:
        x: ``[..., H]``, floating point.
        weight: ``[H]``, of any floating-point dtype, or None.
        eps: added to the mean square.
        offset: added to the weight.
        multiply: ``cast_first`` or ``fp32``.
        backend: ``torch`` or ``triton``; by default chosen from the tensors.

    Returns:
        ``[..., H]``; for ``cast_first`` in the dtype that ``x`` and the weight promote to, else in ``x.dtype``.

    Raises:
        ValueError: shapes do not fit, ``multiply`` is unknown, or the backend does not support the tensors.

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    return normalize((x, None, None, weight, None), (eps, offset, False, multiply, False), backend)


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
    """``rms_norm(s)`` and ``s = x + residual``, which is rounded to its dtype before it is normalized.

    Args:
        x, residual: ``[..., H]``, of the same shape; ``s`` has the dtype they promote to.
        weight, eps, offset, multiply, backend: as in :func:`rms_norm`.

    Returns:
        ``(y, s)``, both differentiable.

    Raises:
        ValueError: as in :func:`rms_norm`.
    """
    return normalize((x, residual, None, weight, None), (eps, offset, False, multiply, False), backend)


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

    Results are rounded where transformers' modules round them. Norm first (Qwen3-Next): ``weight * xhat.to(x.dtype)``
    in the dtype they promote to, times ``silu(gate.float())`` in fp32, rounded to ``x.dtype``. Gate first (Mamba 2):
    ``u = x.float() * silu(gate.float())`` is normalized without being rounded, and then multiplied as in
    :func:`rms_norm`. With ``multiply="fp32"`` only the result is rounded.

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
    return normalize((x, None, gate, weight, None), (eps, 0.0, gate_first, multiply, False), backend)


def normalize(inputs: _Inputs, arguments: tuple[float, float, bool, str, bool], backend: str | None) -> Any:
    """The result, and the sum with the residual if there is one; of :class:`Options`, with ``multiply`` as a name."""
    eps, offset, gate_first, multiply, centered = arguments
    if multiply not in MULTIPLY:
        raise ValueError(f"multiply must be one of {', '.join(MULTIPLY)}, got {multiply!r}.")
    options = Options(float(eps), float(offset), gate_first, multiply == "cast_first", centered)
    x, residual, gate, weight, bias = inputs
    for name, other in (("residual", residual), ("gate", gate)):
        if other is not None and other.shape != x.shape:
            raise ValueError(f"{name} must have the shape of x, {tuple(x.shape)}, got {tuple(other.shape)}; expand it.")
    on_triton = choose_row_backend(backend, inputs[:3], weight=weight, bias=bias)
    y, _, *others = _norm(*inputs, *options, on_triton)
    return y if residual is None else (y, others[0])


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        """The result, rstd, ``x + residual`` where there is a residual, and the mean where it was subtracted."""
        tensors, options, on_triton = inputs[:5], Options(*inputs[5:-1]), inputs[-1]
        found = (_forward_triton if on_triton else _forward_torch)(tensors, options)
        return tuple([tensor for tensor in found if tensor is not None])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, residual, gate, weight, bias, *ctx.options), (_, rstd, *others) = inputs, output
        mean = others.pop() if Options(*ctx.options[:-1]).centered else None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rstd, *[] if mean is None else [mean])
        ctx.save_for_backward(x if residual is None else others[0], gate, weight, rstd, mean)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, residual, bias)]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_y: Tensor | None,
        grad_rstd: None = None,
        grad_summed: Tensor | None = None,
        *_: None,
        gradients: Any = None,
    ) -> Any:
        needs_x, needs_residual, needs_gate, needs_weight, needs_bias, *_options = ctx.needs_input_grad
        x_dtype, residual_dtype, bias_dtype = ctx.dtypes
        grad_x, grad_gate, grad_weight, grad_bias = grad_summed, None, None, None
        if grad_y is not None:
            saved = ctx.saved_tensors  # read once, or activation checkpointing raises
            needs = needs_weight, bias_dtype if needs_bias else None
            found = (gradients or _gradients)(grad_y, grad_summed, *saved, *needs, *ctx.options)
            there = True, saved[1] is not None, needs_weight, needs_bias
            grad_x, grad_gate, grad_weight, grad_bias = where_needed(found, there)
        grad_residual = grad_x.to(residual_dtype) if grad_x is not None and needs_residual else None
        grad_x = grad_x.to(x_dtype) if grad_x is not None and needs_x else None
        return grad_x, grad_residual, grad_gate if needs_gate else None, grad_weight, grad_bias, *[None] * 6


def _gradients(grad_y: Tensor, grad_summed: Tensor | None, *arguments: Any) -> list[Tensor]:
    """The gradients of x, and of the gate, the weight and the bias where there is one, or it is needed."""
    saved, (needs_weight, bias_dtype), options = cast(_Saved, arguments[:5]), arguments[5:7], Options(*arguments[7:-1])
    weight_dtype = saved[2].dtype if needs_weight and saved[2] is not None else None
    backward = _backward_triton if arguments[-1] else _backward_torch
    found = backward(grad_y, grad_summed, saved, options, (weight_dtype, bias_dtype))
    return [gradient for gradient in found if gradient is not None]


_OPTIONS = "float eps, float offset, bool gate_first, bool cast_first, bool centered, bool on_triton"
_norm = operator(
    "liger_losses::rms_norm",
    _Norm,
    f"Tensor x, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias, {_OPTIONS}",
    _gradients,
    f"Tensor grad_y, Tensor? grad_summed, Tensor x, Tensor? gate, Tensor? weight, Tensor rstd, Tensor? mean, "
    f"bool needs_weight, ScalarType? bias_dtype, {_OPTIONS}",
)


def _result_dtype(x: Tensor, gate: Tensor | None, weight: Tensor | None, options: Options) -> torch.dtype:
    if weight is None or not options.cast_first or (gate is not None and not options.gate_first):
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def _forward_torch(inputs: Any, options: Options) -> tuple[Tensor | None, ...]:
    """Reference implementation, transformers' formulas: the result, ``rstd [R]``, ``x + residual``, and the mean."""
    x, residual, gate, weight, bias = inputs
    summed = None if residual is None else x + residual
    x = x if summed is None else summed
    u, mean = wide(x), None
    if gate is not None and options.gate_first:
        u = u * F.silu(wide(gate))
    if options.centered:
        mean = u.mean(-1, keepdim=True)
        u = u - mean
    rstd = torch.rsqrt(u.square().mean(-1, keepdim=True) + options.eps)
    y = u * rstd
    if options.cast_first:
        y = y.to(x.dtype)
        if weight is not None:
            y = (weight + options.offset if options.offset else weight) * y
    elif weight is not None:
        y = y * (options.offset + wide(weight))
    if bias is not None:
        y = y + wide(bias)
    if gate is not None and not options.gate_first:
        y = y * F.silu(wide(gate))
    result = as_output(y, _result_dtype(x, gate, weight, options))
    return result, rstd.flatten(), summed, None if mean is None else mean.flatten()


def _backward_torch(
    grad_y: Tensor, grad_summed: Tensor | None, saved: _Saved, options: Options, dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor | None, ...]:
    """Reference implementation: the gradients of x, gate, weight and bias."""
    (x, gate, weight, rstd, mean), (weight_dtype, bias_dtype) = saved, dtypes
    rstd = rstd.view(*x.shape[:-1], 1)
    g, u = wide(grad_y), wide(x)
    w = 1.0 if weight is None else options.offset + wide(weight)
    if gate is not None:
        z = wide(gate)
        sigmoid = z.sigmoid()
        silu, slope = z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
        if options.gate_first:
            u = u * silu
    xhat = (u if mean is None else u - mean.view_as(rstd)) * rstd
    grad_gate = None
    if gate is not None and not options.gate_first:
        grad_gate = (g * (w * xhat) * slope).to(gate.dtype)
        g = g * silu
    grad_weight = None if weight_dtype is None else (g * xhat).flatten(0, -2).sum(0).to(weight_dtype)
    grad_bias = None if bias_dtype is None else g.flatten(0, -2).sum(0).to(bias_dtype)
    g = g * w
    centered = g if mean is None else g - g.mean(-1, keepdim=True)
    grad_x = rstd * (centered - xhat * (g * xhat).mean(-1, keepdim=True))
    if gate is not None and options.gate_first:
        grad_gate = (grad_x * wide(x) * slope).to(gate.dtype)
        grad_x = grad_x * silu
    if grad_summed is not None:
        grad_x = grad_x + grad_summed
    return grad_x.to(x.dtype), grad_gate, grad_weight, grad_bias


def _forward_triton(inputs: Any, options: Options) -> tuple[Tensor | None, ...]:
    x, residual, gate, weight, bias = inputs
    summed = None if residual is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    normalized = x if summed is None else summed
    y = x.new_empty(x.shape, dtype=_result_dtype(normalized, gate, weight, options))
    mean = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32) if options.centered else None
    tensors, outputs, per_thread = (x, residual, gate), (normalized, y, mean), _PER_THREAD[options.centered]
    (rstd,) = launch_forward(_forward_kernel, per_thread, tensors, (weight, bias), outputs, 1, *options)
    return y, rstd, summed, mean


def _backward_triton(
    grad_y: Tensor, grad_summed: Tensor | None, saved: _Saved, options: Options, dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor | None, ...]:
    x, gate, weight, rstd, mean = saved
    grad_x, grad_gate = x.new_empty(x.shape), None if gate is None else gate.new_empty(gate.shape)
    inputs, others = (grad_y, grad_summed, x, gate), (rstd, mean, grad_x, grad_gate)
    sums = launch_backward(_backward_kernel, inputs, (weight,), others, dtypes, options.offset, options.gate_first)
    return grad_x, grad_gate, *sums


@jit(do_not_specialize=["rows"])
def _forward_kernel(
    x, x_stride, residual, residual_stride, gate, gate_stride, weight, bias, normalized, y, mean, rstd,
    rows, columns, eps, offset,
    GATE_FIRST: tl.constexpr, CAST_FIRST: tl.constexpr, CENTERED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per tile of rows. ``normalized`` is what is normalized: the sum with the residual, or ``x``."""
    r, c, inside = tile_indices(tl.program_id(0).to(tl.int64) * ROWS, rows, columns, ROWS, COLUMNS)
    u = load_tile(x, x_stride, r, c, inside)
    if residual is not None:
        u += load_tile(residual, residual_stride, r, c, inside)
        rounded = u.to(normalized.dtype.element_ty)
        tl.store(normalized + r * columns + c, rounded, mask=inside)
        u = rounded.to(tl.float32)
    if gate is not None:
        z = load_tile(gate, gate_stride, r, c, inside)
        silu = z / (1 + tl.exp(-z))
        if GATE_FIRST:
            u *= silu
    if weight is not None and not CENTERED:  # otherwise, registers hold it later
        w = load_vector(weight, c, columns)
    if CENTERED:
        average = tl.sum(u, 1)[:, None] / columns
        u = tl.where(c < columns, u - average, 0.0)
        if mean is not None:
            tl.store(mean + r, average, mask=r < rows)
    scale = tl.math.rsqrt(tl.sum(u * u, 1) / columns + eps)[:, None]
    if rstd is not None:
        tl.store(rstd + r, scale, mask=r < rows)
    value = u * scale
    if weight is not None and CENTERED:
        w = load_vector(weight, c, columns)
    if CAST_FIRST:
        value = value.to(normalized.dtype.element_ty).to(tl.float32)
    if weight is not None:
        if CAST_FIRST:
            value *= (w + offset).to(weight.dtype.element_ty).to(tl.float32)
            # If the dtypes differ, they promote to fp32, in which the product is not rounded.
            if normalized.dtype.element_ty == weight.dtype.element_ty:
                value = value.to(weight.dtype.element_ty).to(tl.float32)
        else:
            value *= offset + w
    if bias is not None:
        value += load_vector(bias, c, columns)
    if gate is not None and not GATE_FIRST:
        value *= silu
    tl.store(y + r * columns + c, value.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows", "programs"])
def _backward_kernel(
    grad_y, grad_y_stride, grad_summed, grad_summed_stride, x, x_stride, gate, gate_stride,
    weight, rstd, mean, grad_x, grad_gate, weight_sums, bias_sums, rows, columns, programs, offset,
    GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program loops over tiles of rows and keeps its share of the vectors' gradients in registers."""
    c = tl.arange(0, COLUMNS)[None, :]
    if weight is not None:
        w = offset + load_vector(weight, c, columns)
    if weight_sums is not None:
        weight_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if bias_sums is not None:
        bias_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        r, _, inside = tile_indices(tile * ROWS, rows, columns, ROWS, COLUMNS)
        g = load_tile(grad_y, grad_y_stride, r, c, inside)
        u = load_tile(x, x_stride, r, c, inside)
        if mean is not None:
            average = tl.load(mean + r, mask=r < rows, other=0.0)
        scale = tl.load(rstd + r, mask=r < rows, other=0.0)
        if grad_summed is not None:
            added = load_tile(grad_summed, grad_summed_stride, r, c, inside)
        if gate is not None:
            z = load_tile(gate, gate_stride, r, c, inside)
            sigmoid = 1 / (1 + tl.exp(-z))
            silu = z * sigmoid
            slope = sigmoid * (1 + z * (1 - sigmoid))
            if GATE_FIRST:
                slope *= u
                u *= silu
        if mean is not None:
            u = tl.where(c < columns, u - average, 0.0)
        xhat = u * scale
        if gate is not None and not GATE_FIRST:
            dz = g * xhat * slope
            if weight is not None:
                dz *= w
            g *= silu
        if weight_sums is not None:
            weight_total += g * xhat
        if bias_sums is not None:
            bias_total += g
        if weight is not None:
            g *= w
        along = tl.sum(g * xhat, 1)[:, None] / columns
        if mean is not None:
            g -= tl.sum(g, 1)[:, None] / columns
        dx = scale * (g - xhat * along)
        if gate is not None and GATE_FIRST:
            dz = dx * slope
            dx *= silu
        if grad_summed is not None:
            dx += added
        tl.store(grad_x + r * columns + c, dx.to(grad_x.dtype.element_ty), mask=inside)
        if gate is not None:
            tl.store(grad_gate + r * columns + c, dz.to(grad_gate.dtype.element_ty), mask=inside)
    if weight_sums is not None:
        store_partial_sum(weight_sums, weight_total, c, columns)
    if bias_sums is not None:
        store_partial_sum(bias_sums, bias_total, c, columns)
