"""Shared by the autograd functions: backwards that cannot be differentiated again, and the autocast dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as _once_differentiable


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


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on a device; ``None`` if it is off, or unavailable (as on the meta device)."""
    kind = device.type
    available = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if available else None
