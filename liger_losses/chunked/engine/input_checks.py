"""Checks that the inputs of a call fit together, by their shapes, dtypes and devices alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_losses import checks
from liger_losses.checks import FLOATS, LOSS_INPUTS, check_labels, check_tensor, see
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.query import Query, check_query
from liger_losses.chunked.engine.tokens import Tokens, listed
from liger_losses.kernels.autograd import NO_TRANSFORMS, autocast_dtype, within_transform


def check(hidden_states: Any, head: Head, labels: Any, query: Query) -> tuple[torch.dtype, int]:
    """Check the inputs of a call; return the dtype to compute in, and the number of vocabulary columns.

    Raises:
        TypeError, ValueError: inputs that do not fit together.
        RuntimeError: the call is within a transform of ``torch.func``.
    """
    hidden, labels = listed(hidden_states, labels)
    compute_dtype = check_inputs(hidden, head, labels)
    return compute_dtype, check_query(query, head, shapes_of(labels))


def check_inputs(hidden_states: Sequence[Tensor], head: Head, labels: Sequence[Tensor] | Tokens) -> torch.dtype:
    """Check hidden states ``[..., H]``, labels ``[...]`` and a head; return the dtype to compute in.

    This is the inputs' common dtype, or autocast's.

    Raises:
        TypeError, ValueError: inputs that do not fit together.
        RuntimeError: the call is within a transform of ``torch.func``.
    """
    if within_transform():
        raise RuntimeError(NO_TRANSFORMS)
    if not hidden_states:
        raise ValueError("got an empty sequence; pass at least one tensor of hidden states, and labels for each.")
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
    shapes = shapes_of(labels)
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
    checks.check_values(head.weight)
    return _compute_dtype(hidden_states, head)


def _check_shapes(hidden_states: torch.Size, labels: torch.Size, weight: torch.Size) -> None:
    if len(hidden_states) < 2 or hidden_states[-1] != weight[1]:
        advice = ""
        if hidden_states == weight[1:]:
            advice = f" For one token, pass hidden_states[None], of shape [1, {weight[1]}], and labels of shape [1]."
        elif len(hidden_states) > 1 and hidden_states[-1] == weight[0]:
            advice = (
                f" These look like logits: pass the last hidden states; {LOSS_INPUTS}. Of a patched model, take the "
                "model's own loss (labels=)."
            )
        raise ValueError(
            f"hidden_states must be [..., {weight[1]}] to fit the weight {tuple(weight)}, "
            f"got shape {tuple(hidden_states)}. The weight is [vocab_size, hidden_size], as in nn.Linear.{advice}"
            + see("shapes-dtypes-and-devices")
        )
    if labels != hidden_states[:-1]:
        if labels == weight[:1]:
            raise ValueError(
                f"weight {tuple(weight)} and hidden states {tuple(hidden_states)} were swapped: there are labels "
                f"{tuple(labels)}, one for each row of the weight. {checks.ORDER}." + see("shapes-dtypes-and-devices")
            )
        advice = "Give positions without a label ignore_index."
        if labels and labels[:-1] == hidden_states[:-2] and abs(labels[-1] - hidden_states[-2]) == 1:
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


def shapes_of(labels: Sequence[Tensor] | Tokens) -> tuple[torch.Size, ...]:
    return labels.shapes if isinstance(labels, Tokens) else tuple([part.shape for part in labels])
