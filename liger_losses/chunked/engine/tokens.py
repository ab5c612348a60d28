"""Which tokens are active: all others are dropped before the projection.

T tokens, N of them active, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import check_right, check_temperature, check_vocabulary, checked_temperatures
from liger_losses.kernels._triton import choose_backend
from liger_losses.kernels.label_rows import equal_shares, masked_labels
from liger_losses.kernels.reading import facts_of_labels, label_facts


def shift_labels(labels: Tensor, ignore_index: int = -100, positions: int = 1) -> Tensor:
    """Move the label of position ``t + positions`` to position ``t``; the last positions get ``ignore_index``.

    The hidden states stay as they are: shortening them instead would copy them.
    """
    if not labels.shape[-1]:
        return labels
    beyond = min(positions, labels.shape[-1])
    return torch.cat([labels[..., beyond:], labels.new_full((*labels.shape[:-1], beyond), ignore_index)], -1)


def _unravelled(flat: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """``torch.unravel_index``, which copies the shape to the device and waits for it."""
    found = []
    for size in reversed(shape):
        found.append(flat % size)
        flat = flat // size
    return tuple(reversed(found))


@dataclass(frozen=True)
class Tokens:
    """The active tokens of one or several tensors of labels, in order.

    Several tensors (chosen and rejected completions of different lengths, for example) are one stream for the engine,
    without being concatenated.
    """

    labels: Tensor  # [N] int64, all inside the vocabulary
    shapes: tuple[torch.Size, ...]  # of each tensor of labels
    counts: tuple[int, ...]  # how many tokens of each tensor are active
    indices: tuple[Tensor | None, ...]  # for each tensor, the flat positions of its active tokens; None for all
    ignored: Tensor | None  # [N] bool, true for tokens without loss, if they are not dropped but among the active ones
    shares: Tensor | None = None  # [N] fp32, 1 / number of tokens with loss for each of them, 0 for the others
    positions: Tensor | None = None  # [N] of the active tokens among the tokens of all tensors; None for all
    count: int = field(init=False)  # N
    found: dict[tuple[int, int], Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # pieces

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", sum(self.counts))
        if len(self.indices) == 1:
            object.__setattr__(self, "positions", self.indices[0])

    @classmethod
    def select(
        cls,
        labels: Sequence[Tensor],
        vocab_size: int,
        ignore_index: int = -100,
        compact: bool = True,
        backend: str | None = None,
    ) -> Tokens:
        """Find the tokens whose label is not ``ignore_index``, in int64 tensors of any shape.

        With ``compact``, tokens without loss are dropped, at the cost of one host synchronization; without it they are
        projected and then masked out. A label outside the vocabulary is a ValueError, which the same synchronization
        finds; with ``compact=False`` on a GPU it is a device-side assertion.
        """
        backend = choose_backend(backend, [(part.device, torch.float32) for part in labels])
        return Counting(labels, vocab_size, ignore_index, compact, backend).tokens()

    @classmethod
    def every(cls, shape: torch.Size, device: torch.device) -> Tokens:
        """All tokens of a tensor of this shape, without labels that anybody reads: no number is asked of the device."""
        labels = torch.zeros(shape.numel(), dtype=torch.int64, device=device)
        return cls(labels, (shape,), (len(labels),), (None,), None)

    def part(self, parts: slice) -> Tokens:
        """The active tokens of some of the tensors of labels, which follow each other."""
        rows = slice(sum(self.counts[: parts.start]), sum(self.counts[: parts.stop]))
        positions, ignored = (None if each is None else each[rows] for each in (self.positions, self.ignored))
        before = sum([math.prod(shape) for shape in self.shapes[: parts.start]])
        positions = positions - before if positions is not None and before else positions
        of_parts = self.shapes[parts], self.counts[parts], self.indices[parts]
        return Tokens(self.labels[rows], *of_parts, ignored, positions=positions)

    def masked_values(self, values: Tensor) -> Tensor:
        """``[N]`` (or ``[N, k]``), from ``[..., k]`` in the labels' shape; 0 for tokens without loss."""
        return self.masked(self.gather_like_labels(values.detach()))

    def checksum(self, backend: str) -> Tensor:
        """A checksum of the active tokens' labels and places, 0-dim: see :func:`label_facts`."""
        which = self.indices if self.ignored is None else ((~self.ignored).long(),)
        facts = label_facts([self.labels, *(part for part in which if part is not None)], 0, backend=backend)
        return facts[:, 3].sum()

    def subset(self, index: Tensor) -> Tokens:
        """These of the active tokens of one tensor of labels."""
        (places,), ignored = self.indices, None if self.ignored is None else self.ignored[index]
        places = index if places is None else places.index_select(0, index)
        return Tokens(self.labels.index_select(0, index), self.shapes, (len(index),), (places,), ignored)

    @cached_property
    def sizes(self) -> list[int]:
        """How many tokens, active or not, each tensor of labels has."""
        return [math.prod(shape) for shape in self.shapes]

    def pieces(self, start: int, stop: int) -> list[tuple[int, int, int, Any]]:
        """``(which tensor, first, last, flat positions or None for all)`` of active tokens ``start`` to ``stop``."""
        known = self.found.get((start, stop))
        if known is not None:
            return known
        pieces, offset = [], 0
        for segment, count in enumerate(self.counts):
            first, last = max(start - offset, 0), min(stop - offset, count)
            if first < last:
                pieces.append((segment, first, last, _rows(self.indices[segment], first, last)))
            offset += count
        self.found[start, stop] = pieces  # backward asks for the same
        return pieces

    def gather(self, sources: Sequence[Tensor], start: int, stop: int) -> Tensor:
        """Rows of the active tokens ``start`` to ``stop``.

        Sources are ``[T]`` or ``[T, H]`` each; or ``[..., H]`` in the labels' shape, where flattening would copy it.
        """
        if len(sources) == 1 and self.indices[0] is None and sources[0].dim() <= 2:
            return sources[0] if stop - start == sources[0].shape[0] else sources[0][start:stop]
        rows = []
        for segment, first, last, index in self.pieces(start, stop):
            source = sources[segment]
            if source.dim() > 2:
                flat = torch.arange(first, last, device=source.device) if index is None else index
                rows.append(source[_unravelled(flat, self.shapes[segment])])
            else:
                rows.append(source[first:last] if index is None else source.index_select(0, index))
        if not rows:  # still part of the graph
            return sources[0][:0] if sources[0].dim() <= 2 else sources[0].new_empty(0, sources[0].shape[-1])
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def sources(self, tensors: Sequence[Tensor], size: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """``(slice of the active tokens, [T, H], their rows in it or None for all)``, tensor by tensor.

        Tensors ``[..., H]`` in the labels' shape whose rows are not contiguous are gathered, ``size`` rows at a time.
        """
        start = 0
        for tensor, index, count in zip(tensors, self.indices, self.counts, strict=True):
            if tensor.dim() <= 2 and tensor.stride(-1) == 1:
                yield slice(start, start + count), tensor, index
            else:
                for first in range(start, start + count, size):
                    last = min(first + size, start + count)
                    yield slice(first, last), self.gather(tensors, first, last), None
            start += count

    def scatter_(self, targets: Sequence[Tensor | None], start: int, stop: int, values: Tensor) -> None:
        """Write ``values`` to the rows of the active tokens ``start`` to ``stop`` in the flattened ``targets``.

        Rows whose target is ``None`` are skipped.
        """
        offset, cast = 0, values
        for segment, first, last, index in self.pieces(start, stop):
            target = targets[segment]
            if target is not None:
                cast = cast if cast.dtype == target.dtype else values.to(target.dtype)
                part = _rows(cast, offset, offset + last - first)
                if index is None:
                    target[first:last].copy_(part)
                else:
                    target.index_copy_(0, index, part)
            offset += last - first

    def gather_flat(self, values: Tensor) -> Tensor:
        """From one value (or row) per token ``[T]`` to one per active token ``[N]``."""
        return values if self.positions is None else values.index_select(0, self.positions)

    def gather_all(self, values: Tensor) -> Tensor:
        """From one value per token ``[T]`` to one per active token ``[N]``; 0 for masked ones."""
        return self.masked(self.gather_flat(values))

    def gather_like_labels(self, values: Tensor) -> Tensor:
        """From ``[..., k]`` in the labels' shape to one value (or row) per active token.

        Of several tensors of labels, the values are ``[T, k]``, those of all tokens.
        """
        if len(self.shapes) == 1:
            (shape,) = self.shapes
            values = values.reshape(shape.numel(), *values.shape[len(shape) :])
        return self.gather_flat(values)

    def temperatures(self, temperature: Tensor, dtype: torch.dtype) -> Tensor:
        """Each active token's temperature ``[N]``, a copy: see :func:`check_temperature`.

        Raises:
            ValueError: not one temperature for each label; on a CPU, one of an active token that is not
                positive and finite. On a GPU that is a device-side assertion.
        """
        check_temperature(temperature, self.labels.device, self.shapes)
        if len(self.shapes) > 1 and {*self.shapes} == {temperature.shape}:
            temperature = torch.cat([temperature.flatten()] * len(self.shapes))
        found = self.gather_like_labels(temperature.detach()).to(dtype, copy=True).contiguous()
        if self.ignored is not None:
            found.masked_fill_(self.ignored, 1.0)
        return checked_temperatures(found)

    def equal_weights(self, scale: float, total: Any, dtype: torch.dtype, numbers: bool = False) -> Any:
        """``[N]``: ``scale / total`` for each token that carries loss, 0 for the others.

        ``total`` is a number or a tensor ``[]``; ``None`` is the number of tokens that carry loss. With ``numbers``, a
        number where that is known and one for all tokens.
        """
        if total is None and self.ignored is not None:
            narrow = dtype == torch.float32
            shares = self.shares if narrow and self.shares is not None else equal_shares(self.ignored, dtype)
            return -shares if scale == -1.0 else shares * scale
        if isinstance(total, Tensor):
            return self.masked((scale / total.to(dtype)).expand(self.labels.shape))
        each = scale / (max(self.count, 1) if total is None else total)
        if numbers and self.ignored is None:
            return each
        weights = torch.full(self.labels.shape, each, dtype=dtype, device=self.labels.device)
        return weights if self.ignored is None else self.masked(weights)

    def masked(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Values of (some of) the active tokens, with 0 for those that carry no loss."""
        if self.ignored is None:
            return values
        ignored = self.ignored if len(values) == len(self.ignored) else self.ignored[rows]
        return values.masked_fill(ignored if values.dim() == 1 else ignored.view(-1, *[1] * (values.dim() - 1)), 0)

    def scatter(self, named: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
        """From values (or rows) per active token ``[N]`` to one per token ``[T]`` of each of these names; 0 for tokens
        without loss."""
        found: list[Tensor] = []
        for name in names:
            values = named[name]
            if self.ignored is not None:
                values = self.masked(values)
            elif self.positions is not None:
                whole = values.new_zeros(sum(self.sizes), *values.shape[1:])
                values = whole.index_copy_(0, self.positions, values)
            elif getattr(values, "_base", values) is not None:
                values = values.clone()  # kernels return rows of one tensor
            found.append(values)
        return found

    def split(self, named: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """From ``[T]`` (or ``[T, k]``) each to values of each tensor of labels, in its shape."""
        found: list[dict[str, Tensor]] = [{} for _ in self.shapes]
        alike = len(found) > 1 and len({*self.shapes}) == 1
        for name, values in named.items():
            if alike:
                parts = values.view(len(found), *self.shapes[0], *values.shape[1:]).unbind()
            else:
                parts = values.split(self.sizes) if len(found) > 1 else (values,)
            for of_one, part, shape in zip(found, parts, self.shapes, strict=True):
                of_one[name] = part if alike or len(shape) == len(found) == 1 else part.view(*shape, *values.shape[1:])
        return found


def listed(hidden_states: Any, labels: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | Tokens]:
    """One tensor or several as a tuple; active tokens stay as they are."""
    alone = not isinstance(hidden_states, (list, tuple))
    hidden = (hidden_states,) if alone else tuple(hidden_states)
    return hidden, labels if isinstance(labels, Tokens) else (labels,) if alone else tuple(labels)


def _rows(values: Any, first: int, last: int) -> Any:
    """Some rows of a tensor; no view is made of all, which takes the host time too."""
    return values if values is None or (first == 0 and last == len(values)) else values[first:last]


class Counting:
    """:meth:`Tokens.select` in two steps: a GPU counts the active tokens while the host does what needs no count."""

    def __init__(
        self, labels: Sequence[Tensor], vocab_size: int, ignore_index: int, compact: bool, backend: str
    ) -> None:
        self.vocab_size, self.ignore_index, self.backend = vocab_size, ignore_index, backend
        self.shapes: tuple[torch.Size, ...] = ()
        self.labels: list[Tensor] = []
        for part in labels:
            self.shapes += (part.shape,)
            part = part.clone() if part.is_inference() else part  # autograd keeps no tensor of inference mode
            self.labels.append(part.contiguous())
        #: ``None`` where all tokens are projected.
        self.facts = facts_of_labels(self.labels, ignore_index, backend) if compact else None

    def flat(self) -> Tensor:
        """All labels, ``[T]``."""
        parts = [*map(Tensor.flatten, self.labels)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def checksum(self, backend: str) -> Tensor:
        """A checksum of all labels, 0-dim: see :func:`label_facts`."""
        if self.facts is not None:
            return self.facts.numbers[:, 3].sum()
        return label_facts(self.labels, self.ignore_index, backend=backend)[:, 3].sum()

    def tokens(self) -> Tokens:
        """The active tokens, once their number is known."""
        if self.facts is None:
            return self._all_tokens()
        counts, lows, highs, _ = zip(*self.facts.read(), strict=True)
        check_vocabulary((*lows, *highs), self.vocab_size, self.ignore_index)
        kept, sizes = self.facts.kept, [*map(Tensor.numel, self.labels)]
        indices: list[Tensor | None] = []
        total, whole, before = sum(counts), sum(sizes), 0
        if kept is not None and total < whole:
            positions, active, *within = kept[:, :total].unbind()
            own = within[0].split(counts) if within else (positions,)
        else:
            merged = self.flat()
            if total == whole:
                return Tokens(merged, self.shapes, counts, (None,) * len(sizes), None)
            positions = torch.nonzero_static(merged != self.ignore_index, size=total).squeeze(-1)
            active, own = merged.index_select(0, positions), positions.split(counts)
        for size, index in zip(sizes, own, strict=True):
            offset = before if kept is None else 0
            indices.append(None if len(index) == size else index - offset if offset else index)
            before += size
        return Tokens(active, self.shapes, counts, tuple(indices), None, None, positions)

    def _all_tokens(self) -> Tokens:
        """All tokens as active ones, with a mask."""
        merged = self.flat()
        safe, ignored, shares, right = masked_labels(merged, self.ignore_index, self.vocab_size, backend=self.backend)
        check_right(right, merged, self.vocab_size, self.ignore_index)
        counts = tuple(map(Tensor.numel, self.labels))
        return Tokens(safe, self.shapes, counts, (None,) * len(counts), ignored, shares)
