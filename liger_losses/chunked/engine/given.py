"""What a call was given: ranks that share a vocabulary compare it in one exchange, and are told what differs.

Options, shapes and dtypes are compared as text, tensors by a checksum of their entries.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels.label_rows import place_weights

_BATCHES = " Where each rank has a batch of its own, give all ranks of the group the same one."


def checksum(values: Tensor) -> Tensor:
    """Of the bits of a tensor's entries and of their places, 0-dim int64; see :func:`place_weights`."""
    flat = values.detach().reshape(-1)
    if flat.is_floating_point():
        flat = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return ((flat.long() + 1) * place_weights(0, len(flat), flat.device)).sum()


class Given:
    """Named values of a call, and the checksums of its tensors.

    Args:
        values: what is compared as text.
        checksums: 0-dim int64 each.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, checksums: Mapping[str, Tensor] | None = None) -> None:
        self.values, self.checksums = dict(values or {}), dict(checksums or {})

    def add(self, name: str, value: Any) -> None:
        """Add a number, text or tensor, or a list of such."""
        if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
            for i, part in enumerate(value):
                self.add(f"{name}[{i}]", part)
        elif isinstance(value, Tensor):
            self.values[name] = f"{value.dtype} {list(value.shape)}"
            self.checksums[name] = checksum(value)
        else:
            self.values[name] = value

    @property
    def digest(self) -> int:
        """Of the values, at least 0."""
        return zlib.crc32(str(self.values).encode())

    @property
    def checksum(self) -> Tensor | None:
        """Of all tensors, 0-dim; ``None`` where there are none."""
        sums = list(self.checksums.values())
        return checksum(torch.stack(sums)) if len(sums) > 1 else next(iter(sums), None)

    def described(self) -> tuple[dict[str, str], dict[str, int]]:
        """Values and checksums as other ranks get them."""
        return {n: str(value) for n, value in self.values.items()}, {n: int(s) for n, s in self.checksums.items()}


def differences(described: Sequence[tuple[dict[str, str], dict[str, int]]]) -> str:
    """What differs between the ranks' :meth:`Given.described`: the names, then a line for each rank."""
    named = dict.fromkeys(name for values, _ in described for name in values)
    named |= dict.fromkeys(name for _, sums in described for name in sums)
    (first_values, first_sums), lines = described[0], [list[str]() for _ in described]
    differ = []
    for name in named:
        if any(values.get(name) != first_values.get(name) for values, _ in described):
            said = [f"{name}: {values.get(name, 'not given')}" for values, _ in described]
        elif any(sums.get(name) != first_sums.get(name) for _, sums in described):
            same = [sums.get(name) == first_sums.get(name) for _, sums in described]
            said = [f"{name}: {'as' if equal else 'not as'} rank 0's" for equal in same]
        else:
            continue
        differ.append(name)
        for line, text in zip(lines, said, strict=True):
            line.append(text)
    listed = "\n".join(f"  rank {rank}: {'; '.join(line)}" for rank, line in enumerate(lines))
    return f"{', '.join(differ)}.{_BATCHES if 'labels' in differ else ''}\n{listed}"


class _Running(threading.local):
    """The loss whose call runs, and what it was given that no exchange has compared yet."""

    loss: Any = None
    noted: tuple[tuple[Tensor | None, int, dict[str, Any]], ...] = ()


running = _Running()


def note(labels: Tensor | None = None, ignore_index: int = -100, **given: Any) -> None:
    """Within a loss's call: ranks that share the vocabulary compare these numbers and tensors when it next meets them.

    ``None`` is a value too. Of tensors in the shape of the labels, entries of tokens without loss do not matter.
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
            if labels is not None and isinstance(value, Tensor) and value.shape[: labels.dim()] == labels.shape:
                active = (labels != ignore_index).view(*labels.shape, *[1] * (value.dim() - labels.dim()))
                value = torch.where(active, value.detach(), 0)
            found.add(name, value)
    return found
