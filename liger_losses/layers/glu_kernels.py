"""The values and gradients of gated linear units, written to given memory: PyTorch's reference, and Triton's kernels.

R rows (all leading dimensions), I intermediate size. Backward reads the inputs again and recomputes the activation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from liger_losses.kernels._triton import jit, tl
from liger_losses.layers.activations import ACTIVATIONS, activate
from liger_losses.layers.launches import launch
from liger_losses.layers.rows import as_output, wide, with_strides

# Measured on an H200: elements of a block, and warps.
_FORWARD_BLOCK, _BACKWARD_BLOCK = (2048, 8), (1024, 4)

with fwAD.dual_level():
    _one = torch.ones((), dtype=torch.float32, device="cpu")
    # fwAD.make_dual compiles TorchScript for 0.3 s first.
    _make_dual: Any = getattr(getattr(torch, "_VF", None), "_make_dual", fwAD.make_dual)
    _tangent = fwAD.unpack_dual(_make_dual(_one, _one, level=0).clamp(max=1.0)).tangent
#: Whether ``torch.clamp`` passes a gradient at the limit itself: torch 2.13 does, torch 2.15 does not.
_PASSES_AT_LIMIT = bool(_tangent)


class Formula(NamedTuple):
    """``act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)``, and how one tensor holds gate and up.

    ``interleaved``: whether gate and up alternate in one tensor; else they are two tensors, or halves of one. The
    others are as in :func:`glu`.
    """

    interleaved: bool
    activation: str
    limit: float | None
    alpha: float
    up_offset: float


def product_of(gate: Tensor, up: Tensor | None, formula: Formula, on_triton: bool) -> Tensor:
    """The product; ``gate`` holds both if ``up`` is None."""
    inputs = _halves(gate, formula, on_triton) if up is None else (gate, up)
    if not on_triton:
        return _forward_torch(*inputs, formula)
    dtype = torch.promote_types(inputs[0].dtype, inputs[1].dtype)
    out = gate.new_empty(*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1), dtype=dtype)
    _launch(_forward_kernel, (out, *inputs), formula, *_FORWARD_BLOCK)
    return out


def write_gradients(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    grad_gate: Tensor,
    grad_up: Tensor | None,
    product: Tensor | None,
    formula: Formula,
    on_triton: bool,
) -> None:
    """Write the gradients, and the product if a tensor is given for it.

    They may take the places of gate, up and grad: each entry is read before one is written to its place.
    """
    if up is None or grad_up is None:
        inputs, outputs = _halves(gate, formula, on_triton), _halves(grad_gate, formula, on_triton)
    else:
        inputs, outputs = (gate, up), (grad_gate, grad_up)
    if on_triton:
        gate_end, up_end = (formula.limit and _gradient_end(formula.limit, part) for part in inputs)
        _launch(_backward_kernel, (grad, *inputs, *outputs, product), formula, *_BACKWARD_BLOCK, gate_end, up_end)
    else:
        _backward_torch(grad, *inputs, *outputs, product, formula)


def _gradient_end(limit: float, like: Tensor) -> float:
    """The largest number of a tensor's dtype at which clamping to a limit passes a gradient."""
    start = 2.0 ** (math.frexp(limit)[1] - 1)
    step = start * torch.finfo(like.dtype).eps
    rounded = round(limit / step) * step
    if _PASSES_AT_LIMIT:  # only on GPUs is the limit rounded before it is compared
        return rounded if like.is_cuda else limit
    # The number before the limit. Numbers of its binade are `step` apart.
    return rounded - (step / 2 if rounded == start else step)


def _halves(gate_up: Tensor, formula: Formula, on_triton: bool) -> tuple[Tensor, Tensor]:
    """Views of gate and up; the whole tensor twice if they are interleaved, which Triton's kernels read themselves."""
    if formula.interleaved:
        return (gate_up, gate_up) if on_triton else (gate_up[..., ::2], gate_up[..., 1::2])
    middle = gate_up.shape[-1] // 2
    return gate_up[..., :middle], gate_up[..., middle:]


# --- Torch ------------------------------------------------------------------------------------------------------------


def _forward_torch(gate: Tensor, up: Tensor, formula: Formula) -> Tensor:
    """Reference implementation: eager PyTorch in the inputs' dtype."""
    gate, up = _clamp(gate, up, formula.limit)
    if formula.up_offset:
        up = up + formula.up_offset
    return as_output(ACTIVATIONS[formula.activation].value(gate, formula.alpha) * up)


def _clamp(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def _backward_torch(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, product: Tensor | None, formula: Formula
) -> None:
    """Reference implementation: writes both gradients and, if given, the product."""
    if grad.is_meta:  # the kernel has no temporaries either
        return
    value = None if product is None else _forward_torch(gate, up, formula)
    activation, limit, g = ACTIVATIONS[formula.activation], formula.limit, wide(grad)
    clamped_gate, clamped_up = _clamp(wide(gate), wide(up), limit)
    d_gate = activation.slope(clamped_gate, formula.alpha).mul_(g).mul_(clamped_up + formula.up_offset)
    d_up = activation.value(clamped_gate, formula.alpha).mul_(g)
    if limit is not None:
        d_gate.masked_fill_(gate > _gradient_end(limit, gate), 0.0)
        d_up.masked_fill_(up.abs() > _gradient_end(limit, up), 0.0)
    if product is not None and value is not None:
        product.copy_(value)
    grad_gate.copy_(d_gate)
    grad_up.copy_(d_up)


# --- Triton -----------------------------------------------------------------------------------------------------------


def _launch(
    kernel: Any, tensors: Sequence[Tensor | None], formula: Formula, block: int, warps: int, *ends: float | None
) -> None:
    """Launch one program per block of a row. The first tensor has as many columns as the product."""
    first: Any = tensors[0]
    (count, columns), arguments = (first.shape[:-1].numel(), first.shape[-1]), with_strides(tensors)
    if not formula.interleaved and all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        count, columns = 1, first.numel()  # as one long row, so that any width fills the blocks
    blocks = -(-columns // block)
    if first.numel():
        launch(kernel, count * blocks, *arguments, columns, blocks, *formula, *ends, block, num_warps=warps)


@jit
def _load(gate, up, row, gate_stride, up_stride, start, columns, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """A block of gate and up, in fp32."""
    gate += row * gate_stride
    if INTERLEAVED:
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate + at, mask=at < 2 * columns, other=0.0)
        g, u = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        up += row * up_stride
        at = start + tl.arange(0, BLOCK)
        g = tl.load(gate + at, mask=at < columns, other=0.0)
        u = tl.load(up + at, mask=at < columns, other=0.0)
    return g.to(tl.float32), u.to(tl.float32)


@jit
def _clamped(g, u, LIMIT: tl.constexpr):
    """NaN stays NaN, as in ``torch.clamp``."""
    if LIMIT is not None:
        g = tl.where(g > LIMIT, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
    return g, u


@jit
def _product(
    g, u, gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr
):
    """In fp32 from fp32 values, rounded where eager PyTorch rounds, to the dtypes of the pointers gate and up."""
    if LIMIT is not None:
        g, u = _clamped(g, u, LIMIT)
        # A limit that the dtype cannot represent is rounded to it, as by torch.clamp.
        g = g.to(gate.dtype.element_ty).to(tl.float32)
        u = u.to(up.dtype.element_ty).to(tl.float32)
    if UP_OFFSET != 0.0:
        u = (u + UP_OFFSET).to(up.dtype.element_ty).to(tl.float32)
    if ALPHA != 1.0:
        z = (g * ALPHA).to(gate.dtype.element_ty).to(tl.float32)
        value = g * (1 / (1 + tl.exp(-z))).to(gate.dtype.element_ty).to(tl.float32)
    else:
        value, _ = activate(g, ACTIVATION, ALPHA)
    return value.to(gate.dtype.element_ty).to(tl.float32) * u


@jit(do_not_specialize=["blocks"])
def _forward_kernel(
    out, out_stride, gate, gate_stride, up, up_stride, columns, blocks,
    INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of a row."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    g, u = _load(gate, up, row, gate_stride, up_stride, start, columns, INTERLEAVED, BLOCK)
    value = _product(g, u, gate, up, ACTIVATION, LIMIT, ALPHA, UP_OFFSET)
    at = start + tl.arange(0, BLOCK)
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=at < columns)


@jit(do_not_specialize=["blocks"])
def _backward_kernel(
    grad, grad_stride, gate, gate_stride, up, up_stride,
    grad_gate, grad_gate_stride, grad_up, grad_up_stride, product, product_stride, columns, blocks,
    INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_END: tl.constexpr, UP_END: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of a row. Gates above GATE_END and ups beyond UP_END were clamped: their gradient is 0."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    d = tl.load(grad + row * grad_stride + at, mask=at < columns, other=0.0).to(tl.float32)
    g, u = _load(gate, up, row, gate_stride, up_stride, start, columns, INTERLEAVED, BLOCK)
    if product is not None:
        value = _product(g, u, gate, up, ACTIVATION, LIMIT, ALPHA, UP_OFFSET)
        tl.store(product + row * product_stride + at, value.to(product.dtype.element_ty), mask=at < columns)
    clamped_g, clamped_u = _clamped(g, u, LIMIT)
    value, slope = activate(clamped_g, ACTIVATION, ALPHA)
    dg = d * (clamped_u + UP_OFFSET) * slope
    du = d * value
    if LIMIT is not None:
        dg = tl.where(g > GATE_END, 0.0, dg)
        du = tl.where(tl.abs(u) > UP_END, 0.0, du)
    dg = dg.to(grad_gate.dtype.element_ty)
    du = du.to(grad_up.dtype.element_ty)
    if INTERLEAVED:
        both = tl.reshape(tl.join(dg, du), (2 * BLOCK,))
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(grad_gate + row * grad_gate_stride + at, both, mask=at < 2 * columns)
    else:
        tl.store(grad_gate + row * grad_gate_stride + at, dg, mask=at < columns)
        tl.store(grad_up + row * grad_up_stride + at, du, mask=at < columns)
