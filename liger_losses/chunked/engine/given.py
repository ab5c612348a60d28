"""What a call was given that all ranks that compute it together must have in common.

Options, shapes and dtypes are compared as text, tensors by a checksum of their entries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels.label_rows import place_weights

_BATCHES = " Where each rank has a batch of its own, give all ranks of the group the same one."
_MOST_TENSORS = 28


def checksum(values: Tensor) -> Tensor:
    """A checksum of the bits of a tensor's entries and of their places, 0-dim int64; see :func:`place_weights`."""
    flat = values.detach().reshape(-1)
    if flat.is_floating_point():
        flat = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return ((flat.long() + 1) * place_weights(0, len(flat), flat.device)).sum()


def lines_of(values: Mapping[str, Any]) -> str:
    """A line for each value."""
    return "".join([f"{name}\t{value}\n" for name, value in values.items()])


class Given:
    """Named values of a call, which are compared as text, and its tensors, by checksums that are computed when needed.

    Attributes:
        values: by name.
        said: lines of text of more values, where they are known.
        tensors: what computes the checksum of each, 0-dim int64.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self.values: dict[str, Any] = dict(values or {})
        self.said = ""
        self.tensors: dict[str, Callable[[], Tensor]] = {}

    def add(self, name: str, value: Any, entries: Callable[[Tensor], Tensor] | None = None) -> None:
        """Add a number, text or tensor, or a list of such; of a tensor, ``entries(tensor)`` are compared."""
        if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
            for i, part in enumerate(value):
                self.add(f"{name}[{i}]", part, entries)
        elif isinstance(value, Tensor):
            self.values[name] = f"{value.dtype} {list(value.shape)}"
            self.tensors[name] = lambda: checksum(value if entries is None else entries(value))
        else:
            self.values[name] = value

    @property
    def text(self) -> str:
        return lines_of(self.values) + self.said

    def checksums(self) -> list[Tensor]:
        """One for each tensor; if there are many, one for the last ones together."""
        sums = [compute() for compute in self.tensors.values()]
        if len(sums) > _MOST_TENSORS:
            sums[_MOST_TENSORS - 1 :] = [checksum(torch.stack(sums[_MOST_TENSORS - 1 :]))]
        return sums


def differences(texts: Sequence[Sequence[str]], tensors: Sequence[str], sums: Sequence[Sequence[int]]) -> str:
    """What differs between ranks: the names, then a line for each rank.

    Args:
        texts: the lines of each rank's :attr:`Given.text`.
        tensors: the names of tensors that have checksums.
        sums: each rank's checksums.
    """
    values = [dict([line.split("\t", 1) for line in lines if "\t" in line]) for lines in texts]
    said: dict[str, list[str]] = {}
    for name in dict.fromkeys([name for named in values for name in named]):
        if len({named.get(name) for named in values}) > 1:
            said[name] = [named.get(name, "not given") for named in values]
    if len(tensors) > _MOST_TENSORS:
        tensors = [*tensors[: _MOST_TENSORS - 1], f"{tensors[_MOST_TENSORS - 1]} and later ones"]
    for name, of_ranks in zip(tensors, zip(*sums, strict=True), strict=False):
        if len(set(of_ranks)) > 1 and not said.get(name):
            said[name] = [f"{'as' if each == of_ranks[0] else 'not as'} rank 0's" for each in of_ranks]
    lines = [f"  rank {r}: {'; '.join([f'{name}: {said[name][r]}' for name in said])}" for r in range(len(texts))]
    return "\n".join([f"{', '.join(said)}.{_BATCHES if 'labels' in said else ''}", *lines])


class _Running(threading.local):
    """The loss whose call runs, what it was given that no exchange has compared yet, and how many exchanges of all
    threads there were."""

    loss: Any = None
    noted: tuple[tuple[Tensor | None, int, dict[str, Any]], ...] = ()
    exchanges: int = 0


running = _Running()


def note(labels: Tensor | None = None, ignore_index: int = -100, /, **given: Any) -> None:
    """Within a loss's call: ranks that share the vocabulary compare these numbers and tensors when it next meets them.

    ``None`` is a value too. In tensors of the labels' shape, entries of tokens without loss do not matter.
    """
    if not torch.compiler.is_dynamo_compiling() and running.loss is not None:
        running.noted = (*running.noted, (labels, ignore_index, given))


def given_to_loss() -> Given:
    """The options of the loss whose call runs, and what it has noted since the last exchange."""
    found, loss = Given(), running.loss
    if loss is None:
        return found
    found.values.update(loss.common_options)
    noted, running.noted = running.noted, ()
    for labels, ignore_index, given in noted:
        for name, value in given.items():
            if isinstance(value, (int, float)):  # of this call, unlike options: its value is no part of the signature
                value = torch.tensor(value, dtype=torch.float64, device="cpu")
            found.add(name, value, partial(_of_active_tokens, labels, ignore_index))
    return found


def _of_active_tokens(labels: Tensor | None, ignore_index: int, value: Tensor) -> Tensor:
    """A tensor's entries, 0 for tokens without loss where it has the shape of the labels."""
    if labels is None or value.shape[: labels.dim()] != labels.shape:
        return value
    active = (labels != ignore_index).view(*labels.shape, *[1] * (value.dim() - labels.dim()))
    return torch.where(active, value.detach(), 0)
