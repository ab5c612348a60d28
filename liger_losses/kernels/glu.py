"""Gated linear units: SwiGLU, GeGLU and their clamped forms, without the intermediate tensors.

R rows (all leading dimensions), I intermediate size. Backward reads the inputs again and recomputes the activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.kernels._triton import choose_backend, device_of, jit, tl
from liger_losses.kernels.autograd import autocast_dtype, once_differentiable
from liger_losses.kernels.rows import as_output, as_rows, wide

# Measured on an H200: elements of a block, and warps.
_FORWARD_BLOCK, _BACKWARD_BLOCK = (2048, 8), (1024, 4)


class Formula(NamedTuple):
    """``act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)``, ``alpha`` being silu's."""

    activation: str
    limit: float | None
    alpha: float
    up_offset: float


def glu(
    gate: Tensor,
    up: Tensor,
    activation: str = "silu",
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """``act(gate) * up``, rounded as in eager PyTorch: the activation to its dtype, then the product.

    ``silu`` is ``gate * sigmoid(alpha * gate)``. gpt-oss is ``limit=7.0, alpha=1.702, up_offset=1.0``: ``gate`` is
    clamped from above and ``up`` from both sides, then ``act(gate) * (up + up_offset)``.

    Args:
        gate, up: ``[..., I]``, of the same shape, floating point.
        activation: ``silu``, ``gelu`` (exact) or ``gelu_tanh``.
        limit: of the clamps, positive, or None for none.
        alpha: of silu.
        up_offset: added to ``up`` after the clamp.
        backend: ``torch`` or ``triton``; chosen from the tensors by default.

    Returns:
        ``[..., I]``, contiguous, in the dtype that the inputs promote to.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, an alpha without silu, a limit that is not positive,
            or a backend that cannot serve the tensors.

    Source: Shazeer, arXiv:2002.05202.
    """
    formula = _formula(activation, limit, alpha, up_offset)
    on_triton = _checked(gate, up, backend)
    return _GLU.apply(gate, up, False, formula, on_triton)


def glu_fused(
    gate_up: Tensor,
    activation: str = "silu",
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """:func:`glu` of the two halves of one tensor.

    Args:
        gate_up: ``[..., 2 I]``: first the gate and then ``up``, or gate and ``up`` in turn.
        activation, limit, alpha, up_offset, backend: as in :func:`glu`.
        interleaved: whether they take turns, as in gpt-oss.

    Returns:
        ``[..., I]``, contiguous, in the input's dtype.

    Raises:
        ValueError: as in :func:`glu`; a last dimension that is odd.
    """
    formula = _formula(activation, limit, alpha, up_offset)
    on_triton = _checked(gate_up, None, backend)
    return _GLU.apply(gate_up, None, interleaved, formula, on_triton)


def _checked(gate: Tensor, up: Tensor | None, backend: str | None) -> bool:
    """Whether Triton serves these tensors. Raise ValueError where they do not fit; ``up`` None is in ``gate``."""
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"gate_up must hold gate and up, so an even number of columns, got {gate.shape[-1]}.")
    if up is not None and gate.shape != up.shape:
        raise ValueError(f"gate and up must have the same shape, got {tuple(gate.shape)} and {tuple(up.shape)}.")
    return choose_backend(backend, (gate, up)) == "triton"


def _formula(activation: str, limit: float | None, alpha: float, up_offset: float) -> Formula:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    if alpha != 1.0 and activation != "silu":
        raise ValueError(f"alpha belongs to silu, got alpha={alpha} with {activation!r}; leave it at 1.")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be positive, or None for no clamp, got {limit}.")
    return Formula(activation, None if limit is None else float(limit), float(alpha), float(up_offset))


class _GLU(torch.autograd.Function):
    """``up`` is None where ``gate`` holds both."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, interleaved: bool, formula: Formula, on_triton: bool
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.interleaved, ctx.formula, ctx.on_triton = interleaved, formula, on_triton
        with device_of(gate):
            return (_forward_triton if on_triton else _forward_torch)(gate, up, interleaved, formula)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_gradients(ctx, grad, *ctx.saved_tensors), None, None, None


def _gradients(
    ctx: Any,
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    grad_gate: Tensor | None = None,
    product: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Of gate and up; into ``grad_gate`` if there is one, and the product itself into ``product``."""
    if grad_gate is None:
        grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    grad_up = None if up is None else torch.empty_like(up, memory_format=torch.contiguous_format)
    (_backward_triton if ctx.on_triton else _backward_torch)(
        grad, gate, up, grad_gate, grad_up, product, ctx.interleaved, ctx.formula
    )
    return grad_gate, grad_up


def glu_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """``(act(gate) * up) @ weight.T + bias``, of which backward keeps ``gate`` and ``up`` alone.

    The product, as large as either, is computed again where their gradients are, in the same pass over memory.

    Args:
        gate: ``[..., I]``; or ``[..., 2 I]`` that holds both, as in :func:`glu_fused`, with ``up`` None.
        up: ``[..., I]``.
        weight: ``[H, I]``. Where dtypes differ, autocast aside, the product is kept as by a linear layer behind
            :func:`glu`.
        bias: ``[H]``.
        activation, interleaved, limit, alpha, up_offset, backend: as in :func:`glu_fused`.

    Returns:
        ``[..., H]``.

    Raises:
        ValueError: as in :func:`glu` and :func:`glu_fused`.
    """
    formula = _formula(activation, limit, alpha, up_offset)
    on_triton = _checked(gate, up, backend)
    cast = autocast_dtype(gate.device)
    dtypes = {t.dtype for t in (gate, up, *((weight, bias) if cast is None else ())) if t is not None}
    needs_gradient = torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad))
    one_dtype = len(dtypes) == 1 and (cast is None or gate.dtype == cast)
    if torch.compiler.is_compiling() or not needs_gradient or not one_dtype:
        # Compilers decide by themselves what is kept; and a weight alone needs the product.
        return F.linear(_GLU.apply(gate, up, interleaved, formula, on_triton), weight, bias)
    if cast is not None:
        weight, bias = weight.to(cast), None if bias is None else bias.to(cast)
    gate, up = _SavedFirst.apply(gate, up, weight)
    return _GLULinear.apply(gate.grad_fn or up.grad_fn, gate, up, weight, bias, interleaved, formula, on_triton)


class _SavedFirst(torch.autograd.Function):
    """Saves what :class:`_GLULinear` needs before that computes anything.

    Checkpointing computes a layer again up to the last tensor that it saved: mostly these, and so without the product
    and the linear layer behind it.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(gate, up, weight)
        return gate.view_as(gate), None if up is None else up.view_as(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_gate: Tensor, grad_up: Tensor | None) -> Any:
        return grad_gate, grad_up, None


class _GLULinear(torch.autograd.Function):
    """``up`` is None where ``gate`` holds both. What backward needs, the node of :class:`_SavedFirst` has saved."""

    @staticmethod
    def forward(
        ctx: Any,
        saved: Any,
        gate: Tensor,
        up: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        interleaved: bool,
        formula: Formula,
        on_triton: bool,
    ) -> Tensor:
        ctx.saved, ctx.interleaved, ctx.formula, ctx.on_triton = saved, interleaved, formula, on_triton
        with device_of(gate):
            product = (_forward_triton if on_triton else _forward_torch)(gate, up, interleaved, formula)
        return F.linear(product, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up, weight = ctx.saved.saved_tensors
        _, needs_gate, needs_up, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_product = grad @ weight
        # Nobody else has this one: an entry is written where it has been read.
        reusable = up is not None and grad_product.shape == gate.shape and grad_product.dtype == gate.dtype
        product = torch.empty_like(grad_product) if needs_weight else None
        grad_gate, grad_up = _gradients(ctx, grad_product, gate, up, grad_product if reusable else None, product)
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            None,
            grad_gate if needs_gate else None,
            grad_up if needs_up else None,
            None if product is None else rows.t() @ product.view(-1, product.shape[-1]),
            rows.sum(0) if needs_bias else None,
            None,
            None,
            None,
        )


def _halves(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    middle = gate_up.shape[-1] // 2
    return gate_up[..., :middle], gate_up[..., middle:]


# --- The activations --------------------------------------------------------------------------------------------------


def _silu(gate: Tensor, alpha: float) -> Tensor:
    return F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(gate * alpha)


def _silu_slope(gate: Tensor, alpha: float) -> Tensor:
    sigmoid = torch.sigmoid(alpha * gate)
    return sigmoid * (1 + alpha * gate * (1 - sigmoid))


def _gelu(gate: Tensor, alpha: float) -> Tensor:
    return F.gelu(gate)


def _gelu_slope(gate: Tensor, alpha: float) -> Tensor:
    density = torch.exp(-gate.square() / 2) * (1 / math.sqrt(2 * math.pi))
    return torch.special.ndtr(gate) + gate * density


def _gelu_tanh(gate: Tensor, alpha: float) -> Tensor:
    return F.gelu(gate, approximate="tanh")


def _gelu_tanh_slope(gate: Tensor, alpha: float) -> Tensor:
    # (1 + tanh(z)) / 2 = sigmoid(2 z)
    scale, square = 2 * math.sqrt(2 / math.pi), gate.square()
    z = scale * gate * (1 + 0.044715 * square)
    return torch.sigmoid(z) * (1 + torch.sigmoid(-z) * scale * gate * (1 + 3 * 0.044715 * square))


class Activation(NamedTuple):
    """A function of the gate and alpha, and its derivative."""

    value: Callable[[Tensor, float], Tensor]
    slope: Callable[[Tensor, float], Tensor]


ACTIVATIONS = {
    "silu": Activation(_silu, _silu_slope),
    "gelu": Activation(_gelu, _gelu_slope),
    "gelu_tanh": Activation(_gelu_tanh, _gelu_tanh_slope),
}


@jit
def _activate(gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """The activation and its derivative, in fp32."""
    if ACTIVATION == "gelu":
        below = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        return gate * below, below + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    else:
        if ACTIVATION == "gelu_tanh":
            square = gate * gate
            z = 1.5957691216057308 * gate * (1 + 0.044715 * square)
            gate_slope = 1.5957691216057308 * gate * (1 + 0.134145 * square)
        else:
            z = ALPHA * gate
            gate_slope = z
        e = tl.exp(-z)
        sigmoid = 1 / (1 + e)
        # 1 - sigmoid without cancelling; inf * 0 is not a number.
        complement = tl.minimum(e, 3.0e38) * sigmoid
        return gate * sigmoid, sigmoid * (1 + complement * gate_slope)


# --- Torch ------------------------------------------------------------------------------------------------------------


def _forward_torch(gate: Tensor, up: Tensor | None, interleaved: bool, formula: Formula) -> Tensor:
    """The reference: eager PyTorch in the inputs' dtype."""
    if up is None:
        gate, up = _halves(gate, interleaved)
    gate, up = _clamp(gate, up, formula.limit)
    if formula.up_offset:
        up = up + formula.up_offset
    return as_output(ACTIVATIONS[formula.activation].value(gate, formula.alpha) * up)


def _clamp(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def _backward_torch(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    grad_gate: Tensor,
    grad_up: Tensor | None,
    product: Tensor | None,
    interleaved: bool,
    formula: Formula,
) -> None:
    if product is not None:
        product.copy_(_forward_torch(gate, up, interleaved, formula))
    if up is None or grad_up is None:
        gate, up = _halves(gate, interleaved)
        grad_gate, grad_up = _halves(grad_gate, interleaved)
    activation, limit, g = ACTIVATIONS[formula.activation], formula.limit, wide(grad)
    clamped_gate, clamped_up = _clamp(wide(gate), wide(up), limit)
    d_gate = activation.slope(clamped_gate, formula.alpha).mul_(g).mul_(clamped_up + formula.up_offset)
    d_up = activation.value(clamped_gate, formula.alpha).mul_(g)
    if limit is not None:
        d_gate.masked_fill_(gate > limit, 0.0)
        d_up.masked_fill_(up.abs() > limit, 0.0)
    grad_gate.copy_(d_gate)
    grad_up.copy_(d_up)


# --- Triton -----------------------------------------------------------------------------------------------------------


def _as_planes(inputs: tuple[Tensor, ...], interleaved: bool) -> tuple[Tensor, ...]:
    """Each as rows; as one long row where all are contiguous, so that any width fills the blocks."""
    rows = tuple(as_rows(tensor) for tensor in inputs)
    if not interleaved and all(tensor.is_contiguous() for tensor in rows):
        return tuple(tensor.view(1, -1) for tensor in rows)
    return rows


def _forward_triton(gate: Tensor, up: Tensor | None, interleaved: bool, formula: Formula) -> Tensor:
    if up is None:
        out = gate.new_empty(*gate.shape[:-1], gate.shape[-1] // 2)
        gate, up = (gate, gate) if interleaved else _halves(gate, False)
    else:
        out = gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    if not out.numel():
        return out
    gate, up, flat = _as_planes((gate, up, out), interleaved)
    block, warps = _FORWARD_BLOCK
    rows, columns = flat.shape
    blocks = -(-columns // block)
    _forward_kernel[(rows * blocks,)](
        gate,
        gate.stride(0),
        up,
        up.stride(0),
        flat,
        columns,
        blocks,
        interleaved,
        *formula,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def _backward_triton(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    grad_gate: Tensor,
    grad_up: Tensor | None,
    product: Tensor | None,
    interleaved: bool,
    formula: Formula,
) -> None:
    if not grad.numel():
        return
    if up is None or grad_up is None:
        gate, up = (gate, gate) if interleaved else _halves(gate, False)
        grad_gate, grad_up = (grad_gate, grad_gate) if interleaved else _halves(grad_gate, False)
    outputs = (grad_gate, grad_up) if product is None else (grad_gate, grad_up, product)
    grad, gate, up, grad_gate, grad_up, *rest = _as_planes((grad, gate, up, *outputs), interleaved)
    block, warps = _BACKWARD_BLOCK
    rows, columns = grad.shape
    blocks = -(-columns // block)
    _backward_kernel[(rows * blocks,)](
        grad,
        grad.stride(0),
        gate,
        gate.stride(0),
        up,
        up.stride(0),
        grad_gate,
        grad_gate.stride(0),
        grad_up,
        grad_up.stride(0),
        rest[0] if rest else None,
        columns,
        blocks,
        interleaved,
        *formula,
        BLOCK=block,
        num_warps=warps,
    )


@jit
def _load(gate, up, start, columns, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """A block of gate and up, as they are stored."""
    if INTERLEAVED:
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate + at, mask=at < 2 * columns, other=0.0)
        return tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        at = start + tl.arange(0, BLOCK)
        return tl.load(gate + at, mask=at < columns, other=0.0), tl.load(up + at, mask=at < columns, other=0.0)


@jit
def _product(
    g, u, gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr
):
    """In fp32 from fp32 values; each rounding of eager PyTorch is made where it makes it, to the pointers' dtypes."""
    if LIMIT is not None:
        g = tl.where(g > LIMIT, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
        # A limit that the dtype does not hold is rounded to it, as by clamp.
        g = g.to(gate.dtype.element_ty).to(tl.float32)
        u = u.to(up.dtype.element_ty).to(tl.float32)
    if UP_OFFSET != 0.0:
        u = (u + UP_OFFSET).to(up.dtype.element_ty).to(tl.float32)
    if ALPHA != 1.0:
        z = (g * ALPHA).to(gate.dtype.element_ty).to(tl.float32)
        value = g * (1 / (1 + tl.exp(-z))).to(gate.dtype.element_ty).to(tl.float32)
    else:
        value, _ = _activate(g, ACTIVATION, ALPHA)
    return value.to(gate.dtype.element_ty).to(tl.float32) * u


@jit(do_not_specialize=["blocks"])
def _forward_kernel(
    gate,
    gate_stride,
    up,
    up_stride,
    out,
    columns,
    blocks,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a row."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    g, u = _load(gate + row * gate_stride, up + row * up_stride, start, columns, INTERLEAVED, BLOCK)
    value = _product(g.to(tl.float32), u.to(tl.float32), gate, up, ACTIVATION, LIMIT, ALPHA, UP_OFFSET)
    at = start + tl.arange(0, BLOCK)
    tl.store(out + row * columns + at, value.to(out.dtype.element_ty), mask=at < columns)


@jit(do_not_specialize=["blocks"])
def _backward_kernel(
    grad,
    grad_stride,
    gate,
    gate_stride,
    up,
    up_stride,
    grad_gate,
    grad_gate_stride,
    grad_up,
    grad_up_stride,
    product,
    columns,
    blocks,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    d = tl.load(grad + row * grad_stride + at, mask=at < columns, other=0.0).to(tl.float32)
    g, u = _load(gate + row * gate_stride, up + row * up_stride, start, columns, INTERLEAVED, BLOCK)
    g = g.to(tl.float32)
    u = u.to(tl.float32)
    if product is not None:
        found = _product(g, u, gate, up, ACTIVATION, LIMIT, ALPHA, UP_OFFSET)
        tl.store(product + row * columns + at, found.to(product.dtype.element_ty), mask=at < columns)
    if LIMIT is not None:
        gate_outside = g > LIMIT
        up_outside = tl.abs(u) > LIMIT
        g = tl.where(gate_outside, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
    value, slope = _activate(g, ACTIVATION, ALPHA)
    dg = d * (u + UP_OFFSET) * slope
    du = d * value
    if LIMIT is not None:
        dg = tl.where(gate_outside, 0.0, dg)
        du = tl.where(up_outside, 0.0, du)
    dg = dg.to(grad_gate.dtype.element_ty)
    du = du.to(grad_up.dtype.element_ty)
    if INTERLEAVED:
        both = tl.reshape(tl.join(dg, du), (2 * BLOCK,))
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(grad_gate + row * grad_gate_stride + at, both, mask=at < 2 * columns)
    else:
        tl.store(grad_gate + row * grad_gate_stride + at, dg, mask=at < columns)
        tl.store(grad_up + row * grad_up_stride + at, du, mask=at < columns)
