"""Refuses bad input before any work, saying what was given, what was expected and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.kernels.autograd import autocast_dtype

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise ValueError, with the list of known names, for one that is not among them."""
    known = tuple(known)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; it must be one of {', '.join(known)}.")


def check_tensor(name: str, value: Any) -> None:
    """Raise TypeError for what is not a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}.")


def check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise ValueError unless ``low <= value <= high`` (``low < value`` with ``open_low``), finite in any case."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value) or not (low <= value <= high) or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must lie in {bracket}{low}, {high}], got {value!r}.")


def check_device(weight: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor that is not where the weight is."""
    for name, tensor in tensors.items():
        if tensor.device != weight.device:
            raise ValueError(f"{name} is on {tensor.device}, the weight on {weight.device}; move it with .to(...).")


def check_weight(weight: Any, bias: Any = None) -> None:
    """Raise TypeError or ValueError unless these are a weight ``[V, H]`` and its bias ``[V]`` (or ``None``)."""
    check_tensor("weight", weight)
    if weight.dtype not in _FLOATS:
        raise TypeError(
            f"weight must be floating point, got {weight.dtype} of shape {tuple(weight.shape)}; dequantise it first."
        )
    if weight.dim() != 2:
        raise ValueError(f"weight must be [vocab_size, hidden_size], got shape {tuple(weight.shape)}.")
    if 0 in weight.shape:
        raise ValueError(f"weight must not be empty, got shape {tuple(weight.shape)}.")
    check_vector("bias", bias, weight)


def check_vector(name: str, vector: Any, weight: Tensor) -> None:
    """Raise TypeError or ValueError unless this is ``None`` or one value per row of the weight, beside it."""
    if vector is None:
        return
    check_tensor(name, vector)
    if vector.dtype not in _FLOATS:
        raise TypeError(f"{name} must be floating point, got {vector.dtype}.")
    if vector.shape != weight.shape[:1]:
        raise ValueError(
            f"{name} must be [{weight.shape[0]}], one value per row of the weight, got shape {tuple(vector.shape)}."
        )
    check_device(weight, **{name: vector})


def check_head(
    hidden_states: Sequence[Tensor],
    weight: Tensor,
    labels: Sequence[Tensor] | Tokens,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> torch.dtype:
    """Check that hidden states, labels, weight and bias fit together.

    Args:
        hidden_states: ``[..., H]`` each.
        weight: ``[V, H]``.
        labels: ``[...]`` each, one per tensor of hidden states.
        bias: ``[V]`` or ``None``.
        class_weight: ``[V]`` or ``None``.

    Returns:
        The dtype to compute in: the inputs' common one, or autocast's.

    Raises:
        TypeError: not tensors, integer hidden states, floating-point labels, mixed dtypes outside autocast.
        ValueError: shapes or devices that do not fit together.
    """
    check_weight(weight, bias)
    for part in hidden_states:
        check_tensor("hidden_states", part)
        if part.dtype not in _FLOATS:
            raise TypeError(
                f"hidden_states must be floating point, got {part.dtype} of shape {tuple(part.shape)}. They come from "
                "the model's last layer; token ids go into labels."
            )
    hidden_size = weight.shape[1]
    check_vector("class_weight", class_weight, weight)
    targets = [] if isinstance(labels, Tokens) else labels
    for target in targets:
        check_tensor("labels", target)
        if target.dtype != torch.int64:
            raise TypeError(f"labels must be int64 token ids, got {target.dtype}; convert them with .long().")
    shapes = labels.shapes if isinstance(labels, Tokens) else [target.shape for target in targets]
    if len(hidden_states) != len(shapes):
        raise ValueError(f"got {len(hidden_states)} tensors of hidden states and {len(shapes)} of labels.")
    for part, shape in zip(hidden_states, shapes, strict=True):
        _check_pair(part, shape, hidden_size, tuple(weight.shape))
    tensors = [weight, *hidden_states, *targets, *(v for v in (bias, class_weight) if v is not None)]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(
            f"all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}; move them with .to(...)."
        )
    return _compute_dtype([weight, *hidden_states, *([] if bias is None else [bias])])


def _check_pair(
    hidden_states: Tensor, labels_shape: torch.Size, hidden_size: int, weight_shape: tuple[int, ...]
) -> None:
    if hidden_states.dim() < 2 or hidden_states.shape[-1] != hidden_size:
        raise ValueError(
            f"hidden_states must be [..., {hidden_size}] to fit the weight {weight_shape}, "
            f"got shape {tuple(hidden_states.shape)}. The weight is [vocab_size, hidden_size], as in nn.Linear."
        )
    if labels_shape != hidden_states.shape[:-1]:
        raise ValueError(
            f"labels must have one entry per hidden state: hidden_states {tuple(hidden_states.shape)} need labels "
            f"of shape {tuple(hidden_states.shape[:-1])}, got {tuple(labels_shape)}. To predict the next token, "
            "pass both unshortened with shift=True."
        )


def _compute_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    dtypes, autocast = {tensor.dtype for tensor in tensors}, autocast_dtype(tensors[0].device)
    if autocast is not None and torch.float64 not in dtypes:
        return autocast
    if len(dtypes) > 1:
        given = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise TypeError(
            f"hidden_states, weight and bias must share a dtype outside autocast, got {given}. "
            "Cast one side, or run under torch.autocast."
        )
    return dtypes.pop()
