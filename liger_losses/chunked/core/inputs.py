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
    LISTS,
    check_device,
    check_labels,
    check_like_labels,
    described,
    one_each,
    see,
)
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
    hidden, weight = head.ranks.states(hidden_states), head.weight
    check_inputs(hidden, head, labels)
    temperature = fields.setdefault("temperature", head.transform.temperature)
    if isinstance(temperature, Tensor):
        checks.check_temperature(temperature, weight.device, [labels.shape])
        fields["temperature"] = temperature.detach().clone()  # which may be changed before backward
    if fields.get("class_weight") is not None:
        checks.check_vector("class_weight", fields["class_weight"], weight, head.vocab_size)
    selected = fields.get("selected")
    if isinstance(selected, int):
        if selected > head.vocab_size:
            raise ValueError(f"k must be at most the {head.vocab_size} columns of the head, got {selected}.")
    elif selected is not None:
        check_like_labels("selected", selected, labels.shape, weight)
        if selected.dtype != torch.int64 or selected.dim() == labels.dim():
            raise ValueError(
                f"selected must be int64 [..., k], a row for each of the labels {tuple(labels.shape)}, got "
                f"{described(selected)}."
            )
    if comparison is not None:
        teacher, divergence, soft = comparison
        LogitTransform(soft)  # raises unless it can be a temperature
        check_comparison(teacher, divergence, head, labels.shape)
        if isinstance(soft, Tensor):
            checks.check_temperature(soft, weight.device, [labels.shape])
        fields["teacher"] = teacher.compared(labels, soft)
    if "kept" not in fields:
        head.check_invariant()
    hidden, head = head.for_call(hidden)
    return Target(head, hidden, labels, **fields)


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
    count = None
    if several(hidden_states, weight):
        inputs |= {HIDDEN: hidden_states, "heads": weight, "labels": labels, "bias": bias, "shift": shift}
        count = count_targets(**inputs, selected=selected)
    arguments = (hidden_states, weight, labels, bias, shift, selected)
    rows = [arguments] if count is None else list(zip(*[one_each(value, count) for value in arguments], strict=True))
    heads: list[Head] = []
    shifted: list[Tensor] = []
    for i, (_, layer, its_labels, its_bias, positions, _) in enumerate(rows):
        same = [heads[k] for k in range(i) if rows[k][1] is layer and rows[k][3] is its_bias]
        heads.append(same[0] if same else Head.of(layer, its_bias, transform))
        if count is not None or positions:
            check_labels(its_labels)
        shifted.append(shift_labels(its_labels, ignore_index, int(positions)) if positions else its_labels)
    for k, head in enumerate(heads[1:], 1):
        check_device(heads[0].weight, **{f"the weight of head {k}": head.weight})
    targets = []
    for i, (hidden, *_, columns) in enumerate(rows):
        temperature = heads[i].transform.temperature
        fields = {"temperature": temperature, "selected": columns}
        if count is not None:
            if isinstance(temperature, Tensor) and temperature.shape != shifted[i].shape:
                checks.check_temperature(temperature, heads[i].weight.device, [part.shape for part in shifted])
            fields = {name: of_target(value, shifted, i) for name, value in fields.items()}
        targets.append(target_of(hidden, heads[i], shifted[i], class_weight=class_weight, **fields))
    return targets


def of_target(values: Any, labels: Sequence[Tensor], i: int) -> Any:
    """One target's part of a tensor ``[T, ...]`` of the tokens of all targets; what is no such tensor as it is."""
    shape, sizes = labels[i].shape, [part.numel() for part in labels]
    if not isinstance(values, Tensor) or values.shape[:1] != (sum(sizes),) or values.shape[: len(shape)] == shape:
        return values
    return values.split(sizes)[i].view(*shape, *values.shape[1:])


def count_targets(**arguments: Any) -> int:
    """How many targets these arguments are for; ValueError unless all lists among them have the same length.

    A TypeError for a tuple of hidden states alone: transformers has one of all layers.
    """
    lengths = {name: len(value) for name, value in arguments.items() if isinstance(value, LISTS)}
    if lengths.get(HIDDEN) == 0:
        raise ValueError("got an empty sequence; pass at least one tensor of hidden states, and labels for each.")
    if list(lengths) == [HIDDEN] and isinstance(arguments[HIDDEN], tuple):
        raise TypeError(
            f"got a tuple of {lengths[HIDDEN]} hidden states; for the last layer, pass outputs.hidden_states[-1]; for "
            "several heads, pass a list."
        )
    if 0 in lengths.values() or len(set(lengths.values())) > 1:
        numbers = ", ".join([f"{length} of {name}" for name, length in lengths.items()])
        raise ValueError(f"got {numbers}: pass each argument as one value for all, or as a list of one for each.")
    return next(iter(lengths.values()))


def check_inputs(hidden: Any, head: Head, labels: Any) -> None:
    """Raise TypeError or ValueError unless hidden states ``[..., H]``, a head and labels ``[...]`` fit together."""
    advice = "; they come from the model's last layer, and token ids go into labels"
    checks.check_floating("hidden_states", hidden, advice)
    check_labels(labels)
    _check_shapes(hidden.shape, labels.shape, (len(head.weight), head.hidden_size))
    check_device(head.weight, hidden_states=hidden, labels=labels)
    dtypes = {"hidden_states": hidden.dtype}
    if head.quantized is None:  # whose rows take the dtype of the hidden states
        dtypes["weight"] = head.weight.dtype
    if head.bias is not None:
        dtypes["bias"] = head.bias.dtype
    kinds = {*dtypes.values()}
    if len(kinds) > 1 and (torch.float64 in kinds or autocast_dtype(hidden.device) is None):
        raise TypeError(
            "hidden_states, weight and bias must share a dtype outside autocast, got "
            f"{', '.join([f'{name} {dtype}' for name, dtype in dtypes.items()])}. Cast one side, or run under "
            "torch.autocast." + see("shapes-dtypes-and-devices")
        )


def _check_shapes(hidden: torch.Size, labels: torch.Size, weight: tuple[int, int]) -> None:
    """Raise ValueError unless sizes fit together, which says what the mistake may be."""
    (columns, size), expected, problem = weight, hidden[:-1], ""
    if len(hidden) < 2 or hidden[-1] != size:
        problem = (
            f"hidden_states must be [..., {size}] to fit the weight {weight}, got shape {tuple(hidden)}. The weight is "
            "[vocab_size, hidden_size], as in nn.Linear."
        )
        if hidden == (size,):
            problem += f" For one token, pass hidden_states[None], of shape [1, {size}], and labels of shape [1]."
        elif hidden[-1:] == (columns,):
            problem += (
                f" These look like logits: pass the last hidden states; {checks.LOSS_INPUTS}. Of a patched model, take "
                "the model's own loss (labels=)."
            )
    elif labels == (columns,) != expected:
        problem = (
            f"weight {weight} and hidden states {tuple(hidden)} were swapped: labels {tuple(labels)} are one for "
            f"each row of the weight. {checks.ORDER}."
        )
    elif labels != expected:
        advice = "Give positions without a label ignore_index."
        if len(labels) == len(expected) and labels[:-1] == expected[:-1] and abs(labels[-1] - expected[-1]) == 1:
            advice = "Shorten neither: with shift=True, each position predicts the next one's label."
        if labels.numel() == expected.numel() and len(labels) != len(expected):
            advice = f"Give both flat, or both {list(labels if len(labels) > 1 else expected)}."
        problem = (
            f"labels must have one entry per hidden state: hidden_states {tuple(hidden)} need labels of shape "
            f"{tuple(expected)}, got {tuple(labels)}. {advice}"
        )
    if problem:
        raise ValueError(problem + see("shapes-dtypes-and-devices"))
