"""What the autograd functions share: gradients that have none of their own, and what autocast casts to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as _once_differentiable


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``backward`` of which a second derivative is an error.

    torch's decorator of this name makes it one only where the upstream gradient has a graph: else, what it returns
    would count as constant.
    """
    inner = _once_differentiable(backward)

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not any(g is not None and g.requires_grad for g in gradients):
            gradients = tuple(None if g is None else g.detach().requires_grad_() for g in gradients)
        return inner(ctx, *gradients)

    return wrapped


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to on a device, or ``None`` where it is off, or there is none (as for the meta device)."""
    kind = device.type
    available = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if available else None
