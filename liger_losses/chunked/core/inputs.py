"""From what users give to targets: checks by shapes, dtypes and devices alone, before any work.

K targets, V vocabulary size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_losses import checks
from liger_losses.checks import FLOATS, LISTS, check_device, check_labels, check_shaped, check_tensor, one_each, see
from liger_losses.chunked.core.distilled import Teachers, check_comparison, check_no_temperature
from liger_losses.chunked.core.head import Head
from liger_losses.chunked.core.target import Target
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.logit_transform import LogitTransform

#: What errors call the first argument.
HIDDEN = "hidden states"


def target_of(hidden_states: Any, head: Head, labels: Any, **fields: Any) -> Target:
    """A target of hidden states ``[..., H]`` and labels ``[...]`` that fit its head; of a DTensor, this rank's.

    Args:
        hidden_states, head, labels: as in :func:`liger_losses.linear_logps`.
        fields: others of :class:`Target`.

    Raises:
        TypeError, ValueError: inputs that do not fit together.
        RuntimeError: the call is within a transform of ``torch.func``.
    """
    hidden, weight = head.ranks.states(hidden_states), head.weight
    check_inputs(hidden, head, labels)
    temperature = fields.setdefault("temperature", head.transform.temperature)
    if isinstance(temperature, Tensor):
        checks.check_temperature(temperature, weight.device, labels.shape)
        fields["temperature"] = temperature.detach().clone()  # which may be changed before backward
    if fields.get("class_weight") is not None:
        checks.check_vector("class_weight", fields["class_weight"], weight, head.vocab_size)
    selected = fields.get("selected")
    if isinstance(selected, int):
        if selected > head.vocab_size:
            raise ValueError(f"k must be at most the {head.vocab_size} columns of the head, got {selected}.")
    elif selected is not None:
        check_tensor("selected", selected, (torch.int64,))
        check_shaped("selected", selected, "label", weight.device, (*labels.shape, *selected.shape[-1:]))
    hidden, head = head.for_call(hidden, whole="kept" not in fields)
    return Target(head, hidden, labels, **fields)


def compared_targets(
    hidden_states: Any,
    head: Head,
    labels: Tensor,
    teacher: Any,
    divergence: Any,
    temperature: float | Tensor,
    ignore_index: int,
) -> list[Target]:
    """A target for each teacher: of several, each has its tokens."""
    pairs = [(teacher, labels)]
    if isinstance(teacher, Teachers):
        check_tensor("labels", labels)
        pairs = list(zip(teacher.teachers, teacher.labels(labels, ignore_index), strict=True))
    return [compared(target_of(hidden_states, head, y), its, divergence, temperature) for its, y in pairs]


def compared(target: Target, teacher: Any, divergence: Any, temperature: float | Tensor) -> Target:
    """A target with a teacher of its tokens."""
    LogitTransform(temperature)  # raises unless it can be a temperature
    check_comparison(teacher, divergence, target.head, target.labels.shape)
    check_no_temperature("student", target.temperature)
    if isinstance(temperature, Tensor):
        checks.check_temperature(temperature, target.head.weight.device, target.labels.shape)
    return replace(target, teacher=teacher.compared(target.labels, temperature))


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
    many, of_all = several(hidden_states, weight), {HIDDEN: hidden_states, "heads": weight, "labels": labels}
    of_all |= {"bias": bias, "shift": shift, "selected": selected}
    count = count_targets(**of_all, **inputs) if many else 1
    of_each = [one_each(value, count) if many else [value] for value in of_all.values()]
    states, layers, of_labels, biases, positions, columns = of_each
    heads, shifted = [Head.of(layer, its, transform) for layer, its in zip(layers, biases, strict=True)], []
    for k, head in enumerate(heads[1:], 1):
        check_device("the weight", heads[0].weight.device, **{f"the weight of head {k}": head.weight})
    for y, moved in zip(of_labels, positions, strict=True):
        if many or moved:
            check_labels(y)
        shifted.append(shift_labels(y, ignore_index, int(moved)) if moved else y)
    targets = []
    for i, head in enumerate(heads):
        fields = {"temperature": head.transform.temperature, "selected": columns[i]}
        if many:
            fields = {name: of_target(value, shifted, i) for name, value in fields.items()}
        targets.append(target_of(states[i], head, shifted[i], class_weight=class_weight, **fields))
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
    check_tensor("hidden_states", hidden, FLOATS, advice)
    check_labels(labels)
    size = head.weights.hidden_size
    if hidden.dim() < 2 or hidden.shape[-1] != size or labels.shape != hidden.shape[:-1]:
        problem = _problem(hidden.shape, labels.shape, (len(head.weight), size))
        raise ValueError(problem + see("shapes-dtypes-and-devices"))
    check_device("the weight", head.weight.device, hidden_states=hidden, labels=labels)
    checks.check_values(head.weight)
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


def _problem(hidden: torch.Size, labels: torch.Size, weight: tuple[int, int]) -> str:
    """Why these sizes do not fit together, and what the mistake may be."""
    (columns, size), expected = weight, hidden[:-1]
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
        return problem
    if labels == (columns,):
        return (
            f"weight {weight} and hidden states {tuple(hidden)} were swapped: labels {tuple(labels)} are one for "
            f"each row of the weight. {checks.ORDER}."
        )
    advice = "Give positions without a label ignore_index."
    if len(labels) == len(expected) and labels[:-1] == expected[:-1] and abs(labels[-1] - expected[-1]) == 1:
        advice = "Shorten neither: with shift=True, each position predicts the next one's label."
    if labels.numel() == expected.numel() and len(labels) != len(expected):
        advice = f"Give both flat, or both {list(labels if len(labels) > 1 else expected)}."
    return (
        f"labels must have one entry per hidden state: hidden_states {tuple(hidden)} need labels of shape "
        f"{tuple(expected)}, got {tuple(labels)}. {advice}"
    )
