"""Gated linear units: SwiGLU, GeGLU and their clamped variants, without the intermediate tensors.

R rows (all leading dimensions), I intermediate size. Backward reads the inputs again and recomputes the activation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.kernels._triton import choose_backend
from liger_losses.kernels.autograd import autocast_dtype, edges, once_differentiable, operator, where_needed
from liger_losses.layers.activations import ACTIVATIONS
from liger_losses.layers.glu_kernels import Formula, product_of, write_gradients

#: Fewer rows make matrix products slower per row.
_FROZEN_ROWS = 2048

_How = tuple[Formula, bool]  # the bool: whether Triton runs

#: Weight ``[out, in]`` and bias ``[out]`` of a linear layer.
Linear = tuple[Tensor, Tensor | None]


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
    """``act(gate) * up``, rounded where eager PyTorch rounds: first the activation, then the product.

    ``silu`` is ``gate * sigmoid(alpha * gate)``. gpt-oss is ``limit=7.0, alpha=1.702, up_offset=1.0``: ``gate`` is
    clamped from above and ``up`` from both sides, then ``act(gate) * (up + up_offset)``.

    Args:
        gate, up: ``[..., I]``, of the same shape, floating point.
        activation: ``silu``, ``gelu`` (exact) or ``gelu_tanh``.
        limit: where gate and up are clamped, positive, or None for no clamps.
        alpha: multiplies the gate in silu's sigmoid.
        up_offset: added to ``up`` after the clamp.
        backend: ``torch`` or ``triton``; by default chosen from the tensors.

    Returns:
        ``[..., I]``, contiguous, in the dtype that the inputs promote to.

    Raises:
        ValueError: shapes do not fit, the activation is unknown, alpha is given without silu, the limit is not
            positive, or the backend does not support the tensors.

    Source: Shazeer, arXiv:2002.05202.
    """
    return _product(gate, up, Formula(False, activation, limit, alpha, up_offset), backend)


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
    """:func:`glu` of one tensor that holds gate and up.

    Args:
        gate_up: ``[..., 2 I]``: the gate in the first half and ``up`` in the second, or alternating.
        activation, limit, alpha, up_offset, backend: as in :func:`glu`.
        interleaved: whether gate and up alternate, as in gpt-oss.

    Returns:
        ``[..., I]``, contiguous, in the input's dtype.

    Raises:
        ValueError: as in :func:`glu`, or the last dimension is odd.
    """
    return _product(gate_up, None, Formula(interleaved, activation, limit, alpha, up_offset), backend)


def _checked(gate: Tensor, up: Tensor | None, backend: str | None, formula: Formula) -> _How:
    """Raise ValueError if the arguments do not fit. Here and below, ``gate`` holds both if ``up`` is None."""
    _, activation, limit, alpha, up_offset = formula
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"gate_up must hold gate and up, so an even number of columns, got {gate.shape[-1]}.")
    if up is not None and gate.shape != up.shape:
        raise ValueError(f"gate and up must have the same shape, got {tuple(gate.shape)} and {tuple(up.shape)}.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    if alpha != 1.0 and activation != "silu":
        raise ValueError(f"alpha belongs to silu, got alpha={alpha} with {activation!r}; leave it at 1.")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be positive, or None for no clamp, got {limit}.")
    limit = None if limit is None else float(limit)
    formula = Formula(formula.interleaved, activation, limit, float(alpha), float(up_offset))
    return formula, choose_backend(backend, (gate, up)) == "triton"


def _product(gate: Tensor, up: Tensor | None, formula: Formula, backend: str | None) -> Tensor:
    formula, on_triton = _checked(gate, up, backend, formula)
    product: Tensor = _gated(gate, up, *formula, on_triton)[0]
    return product


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(gate: Tensor, up: Tensor | None, *how: Any) -> tuple[Tensor]:
        return (product_of(gate, up, Formula(*how[:-1]), how[-1]),)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        gate, up, *ctx.how = inputs
        ctx.save_for_backward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, gradients: Any = None) -> Any:
        found = (gradients or _gradients)(grad, *ctx.saved_tensors, *ctx.how)
        return *where_needed(found, (True, len(found) > 1)), *[None] * 6


def _gradients(grad: Tensor, gate: Tensor, up: Tensor | None, *how: Any) -> list[Tensor]:
    """The gradients of gate and up; the one of the tensor that holds both if ``up`` is None."""
    grad_gate, grad_up = _empty(gate), None if up is None else _empty(up)
    write_gradients(grad, gate, up, grad_gate, grad_up, None, Formula(*how[:-1]), how[-1])
    return [grad_gate] if grad_up is None else [grad_gate, grad_up]


_HOW = "bool interleaved, str activation, float? limit, float alpha, float up_offset, bool on_triton"
_gated = operator(
    "liger_losses::glu",
    _GLU,
    f"Tensor gate, Tensor? up, {_HOW}",
    _gradients,
    f"Tensor grad, Tensor gate, Tensor? up, {_HOW}",
)


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


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
    """``(act(gate) * up) @ weight.T + bias``, which saves ``gate`` and ``up`` for backward, but not their product.

    Backward recomputes the product, as large as either, in the kernel that computes their gradients.

    Args:
        gate: ``[..., I]``; if ``up`` is None, ``[..., 2 I]`` that holds both, as in :func:`glu_fused`.
        up: ``[..., I]``, or None.
        weight: ``[H, I]``. If the dtypes differ and autocast is off, the product is saved, as by a linear layer
            after :func:`glu`.
        bias: ``[H]``.
        activation, interleaved, limit, alpha, up_offset, backend: as in :func:`glu_fused`.

    Returns:
        ``[..., H]``.

    Raises:
        ValueError: as in :func:`glu` and :func:`glu_fused`.
    """
    how = _checked(gate, up, backend, Formula(interleaved and up is None, activation, limit, alpha, up_offset))
    inner, down, cast = [gate] if up is None else [gate, up], (weight, bias), autocast_dtype(gate.device)
    if cast is not None and all(part.dtype == cast for part in inner):
        down = _cast(cast, down)
    elif cast is not None:  # the product is cast
        return F.linear(_gated(gate, up, *how[0], how[1])[0], *down)
    return _linear_of_product(inner, [], down, how)


def glu_mlp(
    x: Tensor,
    gate: Linear,
    up: Linear | None,
    down: Linear,
    activation: str = "silu",
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """A gated MLP, ``down(act(gate(x)) * up(x))``, of three linear layers, or of two if the first one is gate and up.

    Saves the outputs of the inner layers for backward, but not their product, and ``x`` if these layers are trained.
    Backward then writes gradients over these outputs, which are not visible outside, and computes them again from ``x``
    if it runs a second time.

    Args:
        x: ``[..., H]``.
        gate: weight and bias of the layer ``[I, H]``; if ``up`` is None, ``[2 I, H]``, whose output is that of
            :func:`glu_fused`.
        up: weight and bias of the layer ``[I, H]``, or None.
        down: weight and bias of the layer ``[H, I]``.
        activation, interleaved, limit, alpha, up_offset, backend: as in :func:`glu_fused`.

    Returns:
        ``[..., H]``, in the dtype of a linear layer's output.

    Raises:
        ValueError: as in :func:`glu` and :func:`glu_fused`.
    """
    layers = [gate] if up is None else [gate, up]
    cast = autocast_dtype(x.device)
    if cast is not None and x.is_floating_point():
        x, *layers, down = x.to(cast), *(_cast(cast, layer) for layer in (*layers, down))
    formula = Formula(interleaved and up is None, activation, limit, alpha, up_offset)
    # Their outputs are not there yet: the weights are as wide.
    how = _checked(gate[0].t(), None if up is None else up[0].t(), backend, formula)
    return _linear_of_product([x], layers, down, how)


def _cast(dtype: torch.dtype, layer: Linear) -> Linear:
    weight, bias = layer
    return weight.to(dtype), None if bias is None else bias.to(dtype)


class _Wanted(threading.local):
    output = True


_wanted = _Wanted()


@contextmanager
def gradients_only() -> Iterator[None]:
    """Within this context, :func:`glu_linear` and :func:`glu_mlp` may return outputs without values.

    They do where gradients can be computed without.
    """
    _wanted.output, before = False, _wanted.output
    try:
        yield
    finally:
        _wanted.output = before


def _linear_of_product(inputs: list[Tensor], layers: list[Linear], down: Linear, how: _How) -> Tensor:
    """``down`` of the product of gate and up, which are the ``inputs``, or what ``layers`` make of the only one."""
    flat = [tensor for layer in layers for tensor in layer]
    there = [tensor for tensor in (*inputs, *flat) if tensor is not None]
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in there)
    dtypes = {tensor.dtype for tensor in (*there, *down) if tensor is not None}
    if torch.compiler.is_compiling() or not needs_gradient or len(dtypes) > 1:
        # torch.compile decides by itself what is saved; and the gradient of the weight alone needs the product.
        inner = _outputs(layers, inputs[0]) or inputs
        return F.linear(_gated(*inner, *[None] * (2 - len(inner)), *how[0], how[1])[0], *down)
    given = _SavedFirst.apply(len(inputs), down[0], *inputs, *flat)
    saved_first = next(tensor.grad_fn for tensor in given if tensor.grad_fn is not None)
    inner, saved_first.inner = saved_first.inner, None
    out: Tensor = _GLULinear.apply(saved_first, inner, how, *down, *given, *flat)
    return out


class _SavedFirst(torch.autograd.Function):
    """Saves the tensors that the backward of :class:`_GLULinear` needs, before its forward computes anything.

    Activation checkpointing recomputes a layer only up to the last tensor that it saved. In an MLP, that is one of
    these, so the product and the linear layer after it are not recomputed.

    ``inner`` are gate and up, or the tensor that holds both. If they come from linear layers, they are allocated here
    and not returned to anybody. The layers' input is saved if their weights need it, and inner may be overwritten then.
    """

    @staticmethod
    def forward(ctx: Any, count: int, weight: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        inputs: Any = tensors[:count]
        layers = list(zip(tensors[count::2], tensors[count + 1 :: 2], strict=True))
        ctx.layers = len(layers)
        made = _outputs(layers, inputs[0])
        ctx.inner, ctx.overwritten = made or list(inputs), False
        ctx.trained = any(ctx.needs_input_grad[2 + count :])
        x = inputs if ctx.trained or not layers else (edges(*inputs) or (None,))
        ctx.save_for_backward(weight, *x, *tensors[count:], *made)
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *grads, *[None] * (2 * ctx.layers)


def _outputs(layers: Sequence[Any], x: Tensor) -> list[Tensor]:
    return [F.linear(x, weight, bias) for weight, bias in layers]


class _GLULinear(torch.autograd.Function):
    """``saved_first`` is the graph node of :class:`_SavedFirst`."""

    @staticmethod
    def forward(
        ctx: Any, saved_first: Any, inner: list[Tensor], how: _How, weight: Tensor, bias: Tensor | None, *tensors: Any
    ) -> Tensor:
        ctx.saved_first, ctx.how = saved_first, how
        gate, up = inner if len(inner) == 2 else (inner[0], None)
        if not _wanted.output:
            return gate.new_empty(*gate.shape[:-1], len(weight))
        return F.linear(product_of(gate, up, *how), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        node, needs = ctx.saved_first, ctx.needs_input_grad[3:]
        weight, *tensors = node.saved_tensors
        x: Any = None
        layers, inner = [], tensors
        if node.layers:
            x, flat, inner = tensors[0], tensors[1 : 1 + 2 * node.layers], tensors[1 + 2 * node.layers :]
            layers = list(zip(flat[::2], flat[1::2], strict=True))
        rows = grad.reshape(-1, grad.shape[-1])
        grad_bias = rows.sum(0) if needs[1] else None
        if layers and not node.trained and not needs[0]:
            grad_x = _input_gradient(rows, weight, layers, inner, ctx.how)
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[1])
            return None, None, None, None, grad_bias, grad_x, *[None] * (2 * node.layers)
        grad_product = grad @ weight
        product = grad_product if needs[0] else None  # nothing else uses grad_product
        if node.trained:
            if node.overwritten:
                inner = _outputs(layers, x)
            node.overwritten = True
            # Autograd must not count this as an operation on what was saved.
            inner = [tensor.data for tensor in inner]
        written = inner if node.trained else [_empty(tensor) for tensor in inner]
        (gate, up), (grad_gate, grad_up) = ([*parts, None][:2] for parts in (inner, written))
        write_gradients(grad_product, gate, up, grad_gate, grad_up, product, *ctx.how)
        grad_weight = None if product is None else rows.t() @ product.view(-1, product.shape[-1])
        del grad_product, product
        grads = _linear_gradients(x, layers, written, needs[2:]) if layers else written
        where = zip(grads, needs[2:], strict=True)
        return None, None, None, grad_weight, grad_bias, *[grad if need else None for grad, need in where]


def _input_gradient(rows: Tensor, weight: Tensor, layers: Any, inner: Sequence[Tensor], how: _How) -> Tensor:
    """The gradient ``[R, H]`` of the input of an MLP whose weights are frozen, for some rows of ``[R, H]`` at a time.

    So that nothing must be written over, and the gradients of gate and up are never there as a whole.
    """
    flat: list[Any] = [tensor.view(-1, tensor.shape[-1]) for tensor in inner]
    grad_x = rows.new_empty(len(rows), layers[0][0].shape[1])
    step = max(_FROZEN_ROWS, -(-len(rows) // 8))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        gate, up = [*(tensor[part] for tensor in flat), None][:2]
        of_inner = _gradients(rows[part] @ weight, gate, up, *how[0], how[1])
        _add_products(of_inner, layers, grad_x[part])
    return grad_x


def _add_products(grads: Sequence[Tensor], layers: Sequence[Linear], out: Tensor) -> None:
    """``sum_i grads[i] @ weights[i]``."""
    torch.mm(grads[0], layers[0][0], out=out)
    for grad, (weight, _) in zip(grads[1:], layers[1:], strict=True):
        torch.addmm(out, grad, weight, out=out)


def _linear_gradients(
    x: Tensor | None, layers: Sequence[Linear], grads: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the input of linear layers, and of the weight and bias of each, where they are needed."""
    rows = [grad.view(-1, grad.shape[-1]) for grad in grads]
    found: list[Tensor | None] = [None]
    if needs[0]:
        grad_x = rows[0].new_empty(len(rows[0]), layers[0][0].shape[1])
        _add_products(rows, layers, grad_x)
        found = [grad_x.view(*grads[0].shape[:-1], grad_x.shape[1])]
    flat = None if x is None else x.reshape(-1, x.shape[-1])
    for grad, need_weight, need_bias in zip(rows, needs[1::2], needs[2::2], strict=True):
        found.append(grad.t() @ flat if flat is not None and need_weight else None)
        found.append(grad.sum(0) if need_bias else None)
    return found
