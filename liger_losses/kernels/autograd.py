"""Shared by the autograd functions: backwards that cannot be differentiated again; autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as _once_differentiable

from liger_losses.kernels._triton import jit, tl, triton


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``backward`` that raises when it is differentiated again.

    torch's decorator of this name raises only if the upstream gradient is part of a graph; otherwise the results would
    silently count as constants.
    """
    inner = _once_differentiable(backward)

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not any(g is not None and g.requires_grad for g in gradients):
            gradients = tuple(None if g is None else g.detach().requires_grad_() for g in gradients)
        return inner(ctx, *gradients)

    return wrapped


#: Whether a transform of ``torch.func`` runs. None reaches into kernels that write to given memory.
within_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
NO_TRANSFORMS = (
    "torch.func's transforms (grad, vmap, jvp, jacrev ...) are not supported here; torch.autograd.grad gives the same "
    "first derivatives."
)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on a device; ``None`` if it is off, or unavailable (as on the meta device)."""
    kind = device.type
    # torch.compile cannot ask whether autocast is available before torch 2.12.
    available = kind != "meta" and (torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind))
    available = available and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if available else None


def scale_(tensor: Tensor, factor: Tensor, *, backend: str = "torch") -> Tensor:
    """``tensor *= factor``. The upstream gradient of a loss is mostly 1, which the host cannot know.

    Args:
        tensor: any shape, contiguous, floating point.
        factor: 0-dim, on the same device.
        backend: ``torch`` or ``triton``.

    Returns:
        ``tensor``.
    """
    if backend == "torch":
        return tensor.mul_(factor)
    block, count = 4096, tensor.numel()
    if count:
        programs = min(triton.cdiv(count, block), 4096)
        _scale_kernel[(programs,)](tensor, factor, count, programs, BLOCK=block, num_warps=8)
    return tensor


@jit(do_not_specialize=["programs"])
def _scale_kernel(tensor, factor, count, programs, BLOCK: tl.constexpr):
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, programs.to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(tensor + at, mask=at < count)
            tl.store(tensor + at, (value.to(tl.float32) * f).to(tensor.dtype.element_ty), mask=at < count)
