"""Rotary position embedding of queries and keys, in one launch.

B sequences, T tokens, Hq and Hk heads, D head size, R <= D rotated dimensions. Backward is the inverse rotation of the
gradients: it needs cos and sin, but not q and k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import choose_backend, jit, power_of_two, tl, warn_once
from liger_losses.kernels.autograd import once_differentiable, operator
from liger_losses.layers.launches import launch

# Measured on an H200: elements of a tile (heads by half of the dimensions), and warps.
_TILE, _WARPS = 1024, 1


class Layout(NamedTuple):
    """How x is laid out, as in :func:`rope`."""

    interleaved: bool
    unsqueeze_dim: int


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    unsqueeze_dim: int = 1,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``x cos + rotate(x) sin`` for the first R dimensions of each head; the other dimensions pass through.

    ``rotate`` maps the halves ``(x1, x2)`` to ``(-x2, x1)``; with ``interleaved``, it does so with each pair
    ``(x[2i], x[2i+1])``. cos and sin have the full width R, in the order of x. Usually they hold each angle twice, once
    for each half or member of a pair, but nothing relies on it.

    Args:
        q: ``[B, Hq, T, D]``, or ``[B, T, Hq, D]`` with ``unsqueeze_dim=2``; any strides.
        k: likewise with Hk heads.
        cos, sin: ``[B, T, R]``, ``[1, T, R]`` or ``[T, R]``, R even.
        interleaved: pairs instead of halves, as in GPT-J and Cohere.
        unsqueeze_dim: the dimension of the heads, 1 or 2.
        backend: ``torch`` or ``triton``; by default chosen from the tensors.

    Returns:
        ``(q, k)`` rotated: new tensors, each in the dtype that it promotes to with cos and sin. Triton computes in fp32
        and rounds once.

    Raises:
        ValueError: shapes do not fit, or the backend does not support the tensors.

    Source: Su et al., arXiv:2104.09864.
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim must be the dimension of the heads, 1 or 2, got {unsqueeze_dim}.")
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must have 4 dimensions, got shapes {tuple(q.shape)} and {tuple(k.shape)}.")
    cos, sin = (angles[None] if angles.dim() == 2 else angles for angles in (cos, sin))
    tokens, rotated = q.shape[3 - unsqueeze_dim], cos.shape[-1]
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != tokens:
        raise ValueError(
            f"cos and sin must be [{q.shape[0]} or 1, {tokens}, R] or [{tokens}, R], "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}."
        )
    if rotated % 2 or rotated > q.shape[-1]:
        raise ValueError(f"cos must have an even width of at most {q.shape[-1]}, the head size, got {rotated}.")
    if k.shape[0] != q.shape[0] or k.shape[3 - unsqueeze_dim] != tokens or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"q and k may differ only in the number of heads, got shapes {tuple(q.shape)} and {tuple(k.shape)}."
        )
    on_triton = choose_backend(backend, (q, k, cos, sin)) == "triton"
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        if on_triton:
            warn_once("A slower torch kernel runs instead of a Triton kernel: cos or sin requires a gradient.")
        layout = Layout(interleaved, unsqueeze_dim)
        return _rotate_torch(q, cos, sin, layout), _rotate_torch(k, cos, sin, layout)
    q, k = _rotate(q, k, cos, sin, interleaved, unsqueeze_dim, on_triton)
    return q, k


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _rotated(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, cos, sin, *ctx.how = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = q.dtype, k.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None, gradients: Any = None) -> Any:
        present = next((grad for grad in upstream if grad is not None), None)
        if present is None:
            return (None,) * 7
        # If only one output was used, the other gradient stays None: an optimizer would decay a parameter for a 0.
        grad_q, grad_k = (present if grad is None else grad for grad in upstream)
        grads = (gradients or _gradients)(grad_q, grad_k, *ctx.saved_tensors, *ctx.dtypes, *ctx.how)
        needed = (None if old is None else grad for old, grad in zip(upstream, grads, strict=True))
        return *needed, *[None] * 5


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *how: Any) -> tuple[Tensor, ...]:
    layout = Layout(*how[:-1])
    if how[-1]:
        return tuple(_rotate_triton(q, k, cos, sin, _dtypes(q, k, cos, sin), layout))
    return _rotate_torch(q, cos, sin, layout), _rotate_torch(k, cos, sin, layout)


def _dtypes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[torch.dtype]:
    return [torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype)) for x in (q, k)]


def _gradients(grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, *how: Any) -> list[Tensor]:
    """The gradients of q and k, whose dtypes come first in ``how``."""
    *dtypes, interleaved, unsqueeze_dim, on_triton = how
    layout = Layout(interleaved, unsqueeze_dim)
    if on_triton:
        return _rotate_triton(grad_q, grad_k, cos, sin, dtypes, layout, inverse=True)
    rotated = [_rotate_torch(grad, cos, sin, layout, inverse=True) for grad in (grad_q, grad_k)]
    return [grad.to(dtype) for grad, dtype in zip(rotated, dtypes, strict=True)]


def _like(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Where Triton writes: dense inputs keep their layout, so that attention reads their strides."""
    return [torch.empty_like(_readable(x), dtype=dtype) for x, dtype in zip(tensors, dtypes, strict=True)]


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *how: Any) -> list[Tensor]:
    return _like((q, k), _dtypes(q, k, cos, sin)) if how[-1] else list(_rotated(q, k, cos, sin, *how))


def _gradient_fake(grad_q: Tensor, grad_k: Tensor, *arguments: Any) -> list[Tensor]:
    _, _, *dtypes, _, _, on_triton = arguments
    return _like((grad_q, grad_k), dtypes) if on_triton else _gradients(grad_q, grad_k, *arguments)


_rotate = operator(
    "liger_losses::rope",
    _Rope,
    "Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, int unsqueeze_dim, bool on_triton",
    _gradients,
    "Tensor grad_q, Tensor grad_k, Tensor cos, Tensor sin, ScalarType q_dtype, ScalarType k_dtype, bool interleaved, "
    "int unsqueeze_dim, bool on_triton",
    _fake,
    _gradient_fake,
)


def _turn(x: Tensor, interleaved: bool) -> Tensor:
    """Map ``(x1, x2)`` to ``(-x2, x1)``."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotate_torch(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, inverse: bool = False) -> Tensor:
    """Reference implementation: transformers' formula, or its transpose for ``inverse``."""
    interleaved = layout.interleaved
    cos, sin = cos.unsqueeze(layout.unsqueeze_dim), sin.unsqueeze(layout.unsqueeze_dim)
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = -_turn(rotated * sin, interleaved) if inverse else _turn(rotated, interleaved) * sin
    rotated = rotated * cos + turned
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def _rotate_triton(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtypes: Sequence[torch.dtype], layout: Layout, inverse: bool = False
) -> list[Tensor]:
    q, k, cos, sin = map(_readable, (q, k, cos, sin))
    outputs = [torch.empty_like(x, dtype=dtype) for x, dtype in zip((q, k), dtypes, strict=True)]
    heads, token = layout.unsqueeze_dim, 3 - layout.unsqueeze_dim
    (sequences, tokens, size), rotated = (q.shape[0], q.shape[token], q.shape[-1]), cos.shape[-1]
    half, arguments = power_of_two(rotated // 2), list[Any]()
    for x in (q, outputs[0], k, outputs[1]):
        arguments += [x, x.stride(0), x.stride(token), x.stride(heads)]
    for x in (cos, sin):
        arguments += [x, x.stride(0) if x.shape[0] > 1 else 0, x.stride(1)]
    arguments += [tokens, q.shape[heads], k.shape[heads], rotated, size - rotated, layout.interleaved, inverse]
    arguments += [min(power_of_two(x.shape[heads]), max(1, _TILE // half)) for x in (q, k)]
    if sequences * tokens * size:
        arguments += [half, power_of_two(size - rotated)]
        launch(_rotate_kernel, sequences * tokens, *arguments, num_warps=_WARPS)
    return outputs


@jit
def _rotate_heads(
    x, head_stride, out, out_head_stride, heads, angles, rotated, rest,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """All heads of one token: ``y_1 = x_1 cos_1 + x_2 sin_1`` and ``y_2 = x_2 cos_2 + x_1 sin_2``."""
    cos_1, cos_2, sin_1, sin_2 = angles
    middle = rotated // 2
    for first in range(0, heads, HEADS):
        h = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        if INTERLEAVED:
            d = tl.arange(0, 2 * HALF)[None, :]
            inside = (h < heads) & (d < rotated)
            both = tl.load(x + h * head_stride + d, mask=inside, other=0.0).to(tl.float32)
            x_1, x_2 = tl.split(tl.reshape(both, (HEADS, HALF, 2)))
        else:
            d = tl.arange(0, HALF)[None, :]
            inside = (h < heads) & (d < middle)
            x_1 = tl.load(x + h * head_stride + d, mask=inside, other=0.0).to(tl.float32)
            x_2 = tl.load(x + h * head_stride + middle + d, mask=inside, other=0.0).to(tl.float32)
        y_1 = x_1 * cos_1 + x_2 * sin_1
        y_2 = x_2 * cos_2 + x_1 * sin_2
        y_1 = y_1.to(out.dtype.element_ty)
        y_2 = y_2.to(out.dtype.element_ty)
        if INTERLEAVED:
            both_out = tl.reshape(tl.join(y_1, y_2), (HEADS, 2 * HALF))
            tl.store(out + h * out_head_stride + d, both_out, mask=inside)
        else:
            tl.store(out + h * out_head_stride + d, y_1, mask=inside)
            tl.store(out + h * out_head_stride + middle + d, y_2, mask=inside)
        if rest > 0:
            e = tl.arange(0, REST)[None, :]
            left = (h < heads) & (e < rest)
            passed = tl.load(x + h * head_stride + rotated + e, mask=left, other=0.0)
            tl.store(out + h * out_head_stride + rotated + e, passed.to(out.dtype.element_ty), mask=left)


@jit
def _rotate_kernel(
    q, q_sequence, q_token, q_head, q_out, q_out_sequence, q_out_token, q_out_head,
    k, k_sequence, k_token, k_head, k_out, k_out_sequence, k_out_token, k_out_head,
    cos, cos_sequence, cos_token, sin, sin_sequence, sin_token,
    tokens, q_heads, k_heads, rotated, rest,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One program per token, which reads the token's angles once for all heads of q and k.

    ``q_sequence``, ``q_token`` and ``q_head`` are the strides of q from one sequence, token or head to the next.
    """
    sequence = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    cos += sequence * cos_sequence + token * cos_token
    sin += sequence * sin_sequence + token * sin_token
    i = tl.arange(0, HALF)
    inside = i < rotated // 2
    if INTERLEAVED:
        at_1 = 2 * i
        at_2 = 2 * i + 1
    else:
        at_1 = i
        at_2 = i + rotated // 2
    cos_1 = tl.load(cos + at_1, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + at_2, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + at_1, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + at_2, mask=inside, other=0.0).to(tl.float32)[None, :]
    # The formula is y_1 = x_1 cos_1 - x_2 sin_1, y_2 = x_2 cos_2 + x_1 sin_2; its transpose swaps the two sines.
    if INVERSE:
        angles = cos_1, cos_2, sin_2, -sin_1
    else:
        angles = cos_1, cos_2, -sin_1, sin_2
    q += sequence * q_sequence + token * q_token
    k += sequence * k_sequence + token * k_token
    q_out += sequence * q_out_sequence + token * q_out_token
    k_out += sequence * k_out_sequence + token * k_out_token
    _rotate_heads(q, q_head, q_out, q_out_head, q_heads, angles, rotated, rest, INTERLEAVED, Q_HEADS, HALF, REST)
    _rotate_heads(k, k_head, k_out, k_out_head, k_heads, angles, rotated, rest, INTERLEAVED, K_HEADS, HALF, REST)
