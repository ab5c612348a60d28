"""Raises unless hidden states, a head and labels fit together; says in which dtype their logits are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine import checks
from liger_losses.chunked.engine.checks import (
    FLOATS,
    LOSS_INPUTS,
    check_device,
    check_labels,
    check_tensor,
)
from liger_losses.chunked.engine.documentation import see
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.kernels.autograd import NO_TRANSFORMS, autocast_dtype, within_transform


def check_inputs(hidden_states: Sequence[Tensor], head: Head, labels: Sequence[Tensor] | Tokens) -> torch.dtype:
    """Raise TypeError or ValueError unless hidden states ``[..., H]`` and labels ``[...]`` fit each other and a head.

    So it does within a transform of ``torch.func``. Returns the dtype to compute in: the inputs' common one, or
    autocast's.
    """
    if within_transform():
        raise RuntimeError(NO_TRANSFORMS)
    if not hidden_states:
        raise ValueError("got an empty sequence; give one tensor of hidden states or more, and labels for each.")
    for part in hidden_states:
        check_tensor("hidden_states", part)
        if part.dtype not in FLOATS:
            raise TypeError(
                f"hidden_states must be floating point, got {part.dtype} of shape {tuple(part.shape)}. They come from "
                "the model's last layer; token ids go into labels."
            )
    targets = [] if isinstance(labels, Tokens) else labels
    for target in targets:
        check_labels(target)
    shapes = labels.shapes if isinstance(labels, Tokens) else [target.shape for target in targets]
    if len(hidden_states) != len(shapes):
        raise ValueError(
            f"there must be as many tensors of labels as of hidden states, got {len(shapes)} and {len(hidden_states)}."
        )
    weight_shape = head.weight.shape
    if head.quantized is not None:
        weight_shape = torch.Size((len(head.weight), head.hidden_size))
    for part, shape in zip(hidden_states, shapes, strict=True):
        _check_shapes(part.shape, shape, weight_shape)
    devices = {tensor.device for tensor in (head.weight, *hidden_states, *targets)}
    if len(devices) > 1:
        raise ValueError(
            f"all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}; move them with .to(...)."
        )
    if head.weight.device.type in checks.WITHOUT_VALUES:
        raise ValueError(checks.NO_VALUES)
    return _compute_dtype(hidden_states, head)


def rows_of_all(name: str, values: Sequence[Any], shapes: Sequence[torch.Size], head: Head) -> Tensor:
    """``[T, k]`` of all tokens, from ``[..., k]`` in the shape of each tensor of labels, or of the only one.

    Raises:
        TypeError, ValueError: not one tensor for each tensor of labels, in its shape.
    """
    if len(values) != len(shapes):
        raise ValueError(f"{name} must be as many tensors as there are of labels, {len(shapes)}, got {len(values)}.")
    for value, shape in zip(values, shapes, strict=True):
        check_like_labels(name, value, shape, head)
    if len(values) == 1:
        return values[0]
    return torch.cat([value.flatten(0, len(shape) - 1) for value, shape in zip(values, shapes, strict=True)])


def check_like_labels(name: str, value: Any, labels_shape: torch.Size, head: Head) -> None:
    """Raise TypeError or ValueError unless this is a tensor of one value, or one row, for each label, beside a head."""
    check_tensor(name, value)
    check_device(head.weight, **{name: value})
    if value.shape[: len(labels_shape)] != labels_shape or value.dim() > len(labels_shape) + 1:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but there is one value for each label: {tuple(labels_shape)}."
        )


def _check_shapes(hidden_states: torch.Size, labels: torch.Size, weight: torch.Size) -> None:
    if len(hidden_states) < 2 or hidden_states[-1] != weight[1]:
        logits = ""
        if len(hidden_states) > 1 and hidden_states[-1] == weight[0]:
            logits = (
                f" These look like logits: pass the last hidden states; {LOSS_INPUTS}. Of a patched model, take the "
                "model's own loss (labels=)."
            )
        raise ValueError(
            f"hidden_states must be [..., {weight[1]}] to fit the weight {tuple(weight)}, "
            f"got shape {tuple(hidden_states)}. The weight is [vocab_size, hidden_size], as in nn.Linear.{logits}"
            + see("shapes-dtypes-and-devices")
        )
    if labels != hidden_states[:-1]:
        if labels == weight[:1]:
            raise ValueError(
                f"weight {tuple(weight)} and hidden states {tuple(hidden_states)} were swapped: there are labels "
                f"{tuple(labels)}, one for each row of the weight." + see("shapes-dtypes-and-devices")
            )
        advice = "Shorten neither: with shift=True, each position predicts the next one's label."
        if labels.numel() == hidden_states[:-1].numel() and len(labels) != len(hidden_states) - 1:
            advice = f"Give both flat, or both {list(labels if len(labels) > 1 else hidden_states[:-1])}."
        raise ValueError(
            f"labels must have one entry per hidden state: hidden_states {tuple(hidden_states)} need labels "
            f"of shape {tuple(hidden_states[:-1])}, got {tuple(labels)}. {advice}" + see("shapes-dtypes-and-devices")
        )


def _compute_dtype(hidden_states: Sequence[Tensor], head: Head) -> torch.dtype:
    # Rows that are dequantized take the dtype of the hidden states.
    weights = [head.weight] if head.weight.shape[1] else []
    tensors = [*hidden_states, *weights, *([] if head.bias is None else [head.bias])]
    dtypes, autocast = {tensor.dtype for tensor in tensors}, autocast_dtype(tensors[0].device)
    if autocast is not None and torch.float64 not in dtypes:
        return autocast
    if len(dtypes) > 1:
        names = [*["hidden_states"] * len(hidden_states), *["weight"] * len(weights), "bias"]
        given = dict.fromkeys(f"{name} {tensor.dtype}" for name, tensor in zip(names, tensors, strict=False))
        raise TypeError(
            f"hidden_states, weight and bias must share a dtype outside autocast, got {', '.join(given)}. "
            "Cast one side, or run under torch.autocast." + see("shapes-dtypes-and-devices")
        )
    return dtypes.pop()
