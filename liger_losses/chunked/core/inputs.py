"""From what users give to targets: checks by shapes, dtypes and devices alone, before any work.

K targets, V vocabulary size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_losses import checks
from liger_losses.checks import (
    FLOATS,
    LISTS,
    LOSS_INPUTS,
    check_labels,
    check_like_labels,
    check_shift,
    check_temperature,
    check_tensor,
    check_vector,
    one_each,
    see,
)
from liger_losses.chunked.core.adapters import check_adapters
from liger_losses.chunked.core.distilled import check_comparison
from liger_losses.chunked.core.head import Head
from liger_losses.chunked.core.target import Target
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.logit_transform import LogitTransform

#: What errors call the first argument.
HIDDEN = "hidden states"


def target_of(
    hidden_states: Any, head: Head, labels: Any, *, comparison: tuple[Any, Any, Any] | None = None, **fields: Any
) -> Target:
    """A target of hidden states ``[..., H]`` and labels ``[...]`` that fit its head; of a DTensor, this rank's.

    Args:
        hidden_states, head, labels: as in :func:`liger_losses.linear_logps`.
        comparison: a teacher, the divergence from it, and the temperature of both softmaxes in it.
        fields: others of :class:`Target`.

    Raises:
        TypeError, ValueError: inputs that do not fit together.
        RuntimeError: the call is within a transform of ``torch.func``.
    """
    check_tensor("hidden_states", hidden_states, allow_dtensor=True)
    hidden = head.ranks.states(hidden_states)
    check_inputs(hidden, head, labels)
    temperature = fields.setdefault("temperature", head.transform.temperature)
    if isinstance(temperature, Tensor):
        check_temperature(temperature, head.weight.device, [labels.shape])
        fields["temperature"] = temperature.detach().clone()  # which may be changed before backward
    check_vector("class_weight", fields.get("class_weight"), head.weight, head.vocab_size)
    selected = fields.get("selected")
    if isinstance(selected, int):
        if selected > head.vocab_size:
            raise ValueError(f"k must be at most the {head.vocab_size} columns of the head, got {selected}.")
    elif selected is not None:
        check_like_labels("selected", selected, labels.shape, head.weight)
        if selected.dtype != torch.int64 or selected.shape[:-1] != labels.shape:
            raise ValueError(
                f"selected must be int64 [..., k], k columns for each of the labels {tuple(labels.shape)}, got "
                f"{selected.dtype} of shape {tuple(selected.shape)}."
            )
    if comparison is not None:
        teacher, divergence, soft = comparison
        LogitTransform(soft)  # raises unless it can be a temperature
        check_comparison(teacher, divergence, head, labels.shape)
        if isinstance(soft, Tensor):
            check_temperature(soft, head.weight.device, [labels.shape])
        fields["teacher"] = teacher.compared(labels, soft)
    if "kept" not in fields:
        head.check_invariant()
    hidden, head = head.with_dropout(hidden)
    return Target(head.projection(), hidden, labels, **fields)


def shift_labels(labels: Tensor, ignore_index: int = -100, positions: int = 1) -> Tensor:
    """Move the label of position ``t + positions`` to position ``t``; the last positions get ``ignore_index``.

    The hidden states stay as they are: shortening them instead would copy them.
    """
    if not labels.shape[-1]:
        return labels
    beyond = min(positions, labels.shape[-1])
    return torch.cat([labels[..., beyond:], labels.new_full((*labels.shape[:-1], beyond), ignore_index)], -1)


def several(hidden_states: Any, weight: Any) -> bool:
    """Whether a call has lists of targets."""
    return isinstance(hidden_states, LISTS) or isinstance(weight, LISTS)


def targets_of(
    hidden_states: Any,
    weight: Any,
    labels: Any,
    ignore_index: int,
    *,
    bias: Any = None,
    transform: LogitTransform | None = None,
    shift: Any = False,
    selected: Any = None,
    class_weight: Tensor | None = None,
    **inputs: Any,
) -> list[Target]:
    """The target of a call; or K, if hidden states or heads are lists, as any other argument may be then.

    Args:
        hidden_states, weight, labels, bias: as in :func:`liger_losses.linear_logps`.
        ignore_index: the label of masked tokens.
        transform: of all heads.
        shift: how many positions labels are moved by.
        selected: columns of each target, or one value for all.
        class_weight: of all targets.
        inputs: other arguments of the call, which may be lists too.
    """
    parts = [[value] for value in (hidden_states, weight, labels, bias, selected)]
    if isinstance(hidden_states, LISTS) and not len(hidden_states):
        raise ValueError("got an empty sequence; pass at least one tensor of hidden states, and labels for each.")
    if several(hidden_states, weight):
        arguments = {HIDDEN: hidden_states, "heads": weight, "labels": labels, "bias": bias, "shift": shift}
        count = count_targets(**arguments, selected=selected, **inputs)
        moved = shift_each(labels, shift, count, ignore_index)
        parts = [one_each(value, count) for value in (hidden_states, weight, moved, bias, selected)]
    elif shift:
        parts[2] = shift_each(labels, shift, 1, ignore_index)
    hidden, layers, moved, biases, columns = parts
    heads = heads_of(layers, biases, transform)
    devices = sorted({str(head.weight.device) for head in heads})
    if len(devices) > 1:
        raise ValueError(
            f"the heads of one call must be on one device, got {', '.join(devices)}; move them with .to(...), or make "
            "a call for each device."
        )
    targets = []
    for i, head in enumerate(heads):
        fields = {"temperature": temperature_of(head, moved, i), "selected": columns[i], "class_weight": class_weight}
        targets.append(target_of(hidden[i], head, moved[i], **fields))
    return targets


def temperature_of(head: Head, labels: Sequence[Any], i: int) -> float | Tensor:
    """A target's temperature; ``[T]`` of all targets' tokens is split among them."""
    temperature = head.transform.temperature
    if isinstance(temperature, Tensor) and len(labels) > 1 and temperature.shape != labels[i].shape:
        check_temperature(temperature, head.weight.device, [part.shape for part in labels])
        return temperature.split([part.numel() for part in labels])[i].view(labels[i].shape)
    return temperature


def count_targets(**given: Any) -> int:
    """How many targets these arguments are for; ValueError unless all lists among them have the same length.

    A TypeError for a tuple of hidden states alone: transformers has one of all layers.
    """
    lengths = {name: len(value) for name, value in given.items() if isinstance(value, LISTS)}
    if list(lengths) == [HIDDEN] and isinstance(given[HIDDEN], tuple):
        raise TypeError(
            f"got a tuple of {lengths[HIDDEN]} tensors of hidden states beside one head and one tensor of labels: for "
            "the last layer, pass outputs.hidden_states[-1]; for several heads, pass a list."
        )
    if not lengths or 0 in lengths.values() or len(set(lengths.values())) > 1:
        found = ", ".join(f"{length} of {name}" for name, length in lengths.items()) or "no list"
        raise ValueError(
            f"got {found}: pass each argument as one value for all heads, or as a list with one value for each head."
        )
    return next(iter(lengths.values()))


def shift_each(labels: Any, shift: Any, count: int, ignore_index: int) -> list[Tensor]:
    """The labels of each target, checked and moved by its number of positions."""
    check_shift(shift)
    if isinstance(labels, LISTS) and not any(isinstance(part, Tensor) for part in labels):  # a list of ids
        check_tensor("labels", labels)
    parts = one_each(labels, count)
    check_labels(*parts)
    pairs = zip(parts, one_each(shift, count), strict=True)
    return [shift_labels(part, ignore_index, int(positions)) if positions else part for part, positions in pairs]


def heads_of(layers: Sequence[Any], biases: Sequence[Any], transform: LogitTransform | None) -> list[Head]:
    """The head of each target, checked and made once for those that share it."""
    heads: list[Head] = []
    for layer, bias in zip(layers, biases, strict=True):
        same = [head for k, head in enumerate(heads) if layers[k] is layer and biases[k] is bias]
        heads.append(same[0] if same else Head.of(layer, bias, transform))
    return heads


def check_inputs(hidden: Any, head: Head, labels: Any) -> None:
    """Raise TypeError or ValueError unless hidden states ``[..., H]``, a head and labels ``[...]`` fit together."""
    check_tensor("hidden_states", hidden)
    if hidden.dtype not in FLOATS:
        raise TypeError(
            f"hidden_states must be floating point, got {hidden.dtype} of shape {tuple(hidden.shape)}. They come from "
            "the model's last layer; token ids go into labels."
        )
    check_labels(labels)
    check_adapters(hidden, len(head.weight), head.adapters)
    _check_shapes(hidden.shape, labels.shape, torch.Size((len(head.weight), head.hidden_size)))
    devices = {tensor.device for tensor in (head.weight, hidden, labels)}
    if len(devices) > 1:
        raise ValueError(
            f"all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}; move them with .to(...)."
        )
    checks.check_values(head.weight)
    _check_dtypes(hidden, head)


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


def _check_dtypes(hidden: Tensor, head: Head) -> None:
    # Rows that are dequantized take the dtype of the hidden states.
    tensors = {"hidden_states": hidden}
    tensors |= {} if head.quantized is not None else {"weight": head.weight}
    tensors |= {} if head.bias is None else {"bias": head.bias}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 and (autocast_dtype(hidden.device) is None or torch.float64 in dtypes):
        given = [f"{name} {tensor.dtype}" for name, tensor in tensors.items()]
        raise TypeError(
            f"hidden_states, weight and bias must share a dtype outside autocast, got {', '.join(given)}. "
            "Cast one side, or run under torch.autocast." + see("shapes-dtypes-and-devices")
        )
