"""Several targets in one call: lists of hidden states, of heads, of labels; a single one serves all targets.

Targets of the same head are one stream, so that its gradient is accumulated in one buffer; different heads run one
after another, each within the workspace.

K targets, T tokens of one, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import LISTS, check_labels, check_shift, check_tensor, one_each, rows_of_all
from liger_losses.chunked.engine.call import Call, Tensors, make_call
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.input_checks import check_inputs
from liger_losses.chunked.engine.plan import EngineOptions, bound_of
from liger_losses.chunked.engine.query import Query, Statistics
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.chunked.engine.tokens import Tokens, shift_labels
from liger_losses.kernels.logit_transform import LogitTransform

#: What errors call the first argument.
HIDDEN = "hidden states"


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
    moved: list[Tensor] = []
    known: list[tuple[Tensor, int, Tensor]] = []  # torch.compile guards what is looked up by id()
    for part, positions in zip(one_each(labels, count), one_each(shift, count), strict=True):
        check_labels(part)
        same = [made for given, by, made in known if given is part and by == positions]
        made = same[0] if same else shift_labels(part, ignore_index, int(positions)) if positions else part
        known.append((part, positions, made))
        moved.append(made)
    return moved


def heads_of(layers: Sequence[Any], biases: Sequence[Any], transform: LogitTransform | None) -> list[Head]:
    """The head of each target, checked and made once for those that share it."""
    heads: list[Head] = []
    pairs = list(zip(layers, biases, strict=True))
    for i, (layer, bias) in enumerate(pairs):
        same = [k for k in range(i) if pairs[k][0] is layer and pairs[k][1] is bias]
        heads.append(heads[same[0]] if same else Head.of(layer, bias, transform))
    return heads


def _with_own_temperatures(heads: list[Head], shapes: list[torch.Size]) -> list[Head]:
    """The heads of targets whose labels have these shapes; temperatures ``[T]`` are split among them."""
    sizes = [shape.numel() for shape in shapes]
    found: list[Head] = []
    for i, (head, shape) in enumerate(zip(heads, shapes, strict=True)):
        each = head.transform.temperature
        if isinstance(each, Tensor) and each.shape != shape and each.shape == (sum(sizes),):
            transform = replace(head.transform, temperature=each.split(sizes)[i].view(shape))
            head = head.with_fields(transform=transform)
        found.append(head)
    return found


def _in_one_stream(one: Head, other: Head) -> bool:
    """Whether these have the same rows, which may come in several layers, or heads.

    A temperature per token is one target's alone.
    """
    names = ("weight", "bias", "quantized", "adapters")
    same = all(getattr(one, name) is getattr(other, name) for name in names)
    if not same or isinstance(one.transform.temperature, Tensor) or isinstance(other.transform.temperature, Tensor):
        return False
    return one.transform == other.transform and one.batch_invariant == other.batch_invariant


@dataclass(frozen=True)
class HeadGroup:
    """Targets of one head: one stream."""

    head: Head
    places: list[int]  # which of all targets these are
    hidden_states: list[Tensor]
    labels: list[Tensor] | Tokens

    def query(self, query: Query, inputs: Mapping[str, Sequence[Tensor]]) -> Query:
        """The query about these targets, from the token inputs of all targets."""
        labels = self.labels
        shapes = labels.shapes if isinstance(labels, Tokens) else [part.shape for part in labels]

        def ours(name: str, values: Sequence[Tensor]) -> Tensor:
            return rows_of_all(name, [values[i] for i in self.places], shapes, self.head.weight)

        selected = query.selected
        if selected is not None:
            selected = ours("selected", one_each(selected, 1 + max(self.places)))
        token_inputs = {name: ours(name, values) for name, values in inputs.items()}
        return replace(query, token_inputs=token_inputs, selected=selected)


@dataclass(frozen=True)
class Targets:
    """Checked targets, by their heads."""

    groups: list[HeadGroup]
    count: int
    options: EngineOptions

    @classmethod
    def of(
        cls,
        hidden_states: Any,
        weight: Any,
        labels: Any,
        options: EngineOptions,
        *,
        bias: Any = None,
        transform: LogitTransform | None = None,
        shift: Any = False,
        inputs: Mapping[str, Any] | None = None,
        selected: Any = None,
    ) -> Targets:
        """Targets from arguments; each is one for all heads, or a list of K.

        Args:
            hidden_states: ``[..., H]``.
            weight: the ``lm_head``; a list may repeat one.
            labels: ``[...]`` int64.
            options: see :class:`EngineOptions`.
            bias: ``[V]`` or ``None``.
            transform: of all heads.
            shift: how many positions labels are moved by.
            inputs, selected: token inputs and selected columns, whose number is checked.
        """
        given = {"hidden states": hidden_states, "heads": weight, "labels": labels, "bias": bias, "shift": shift}
        given["selected"] = selected
        given |= {f"token_inputs[{name!r}]": value for name, value in (inputs or {}).items()}
        count = count_targets(**given)
        groups: list[HeadGroup] = []
        moved = shift_each(labels, shift, count, options.ignore_index)
        hidden, layers, biases = (one_each(value, count) for value in (hidden_states, weight, bias))
        heads = heads_of(layers, biases, transform or LogitTransform())
        for i, head in enumerate(_with_own_temperatures(heads, [part.shape for part in moved])):
            group = next((group for group in groups if _in_one_stream(group.head, head)), None)
            if group is None:
                group = HeadGroup(head, [], [], [])
                groups.append(group)
            group.places.append(i)
            group.hidden_states.append(hidden[i])
            group.labels.append(moved[i])  # type: ignore[union-attr]
        devices = {str(group.head.weight.device) for group in groups}
        if len(devices) > 1:
            raise ValueError(
                f"the heads of one call must be on one device, got {', '.join(sorted(devices))}; move them with "
                ".to(...), or make a call for each device."
            )
        for i, group in enumerate(groups):
            if group.head.ranks is ALONE:  # else hidden states may be DTensors, of which the call takes its part
                check_inputs(group.hidden_states, group.head, group.labels)
            if group.head.adapters:
                expanded, head = group.head.expand(group.hidden_states)
                groups[i] = replace(group, head=head, hidden_states=expanded)
        return cls(list(_select(groups, options)), count, options)

    def calls(self, query: Query, inputs: Mapping[str, Sequence[Tensor]] | None = None) -> list[tuple[Tensors, Call]]:
        """The call of each group; all are made, and so checked, before the first one runs."""
        calls, kept = list[tuple[Tensors, Call]](), 0

        def make(group: HeadGroup, options: EngineOptions) -> tuple[Tensors, Call]:
            asked = group.query(query, inputs or {})
            return make_call(group.hidden_states, group.head, group.labels, asked, options)

        for group in self.groups:
            tensors, call = make(group, self.options)
            if call.strategy == "resident":  # what all heads keep until backward fits one workspace
                size = call.work.row_bytes * call.tokens.count
                if kept and kept + size > call.plan.kept:
                    tensors, call = make(group, replace(self.options, strategy="two_pass"))
                else:
                    kept += size
            several = len(group.places) > 1 and query.separable and bound_of(self.options.workspace) is None
            if several and call.strategy == "two_pass" and not call.plan.few_blocks:
                # One pass, as the targets' own calls would take, whose gradients would add up in half precision.
                # Where the memory is bounded, fp32 may not fit.
                wide = make(group, replace(self.options, accum_dtype=torch.float32))
                tensors, call = wide if wide[1].strategy == "one_pass" else (tensors, call)
            calls.append((tensors, call))
        return calls

    def in_order(self, found: Sequence[list[Statistics]]) -> list[Statistics]:
        """From what each group has for its targets to one list of all targets."""
        placed: dict[int, Statistics] = {}
        for group, values in zip(self.groups, found, strict=True):
            placed |= zip(group.places, values, strict=True)
        return [placed[i] for i in range(self.count)]


def _select(groups: list[HeadGroup], options: EngineOptions) -> Iterator[HeadGroup]:
    """The groups with their active tokens, where one vocabulary serves all: the host waits for the device once."""
    vocab_size = groups[0].head.vocab_size
    several = any(group.head.ranks is not ALONE or group.head.vocab_size != vocab_size for group in groups)
    if several or torch.compiler.is_dynamo_compiling():
        yield from groups
        return
    labels = [part for group in groups for part in group.labels]  # type: ignore[union-attr]
    tokens, start = Tokens.select(labels, vocab_size, options.ignore_index, options.compact, options.backend), 0
    for group in groups:
        stop = start + len(group.places)
        yield replace(group, labels=tokens.part(slice(start, stop)))
        start = stop
