"""Which tokens are active: all others are dropped before the projection.

T tokens, N of them active, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_losses.kernels.tracing import state


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Move the label of position ``t + 1`` to position ``t``; the last position gets ``ignore_index``.

    The hidden states stay as they are: shortening them instead would copy them.
    """
    if not labels.shape[-1]:
        return labels
    return torch.cat([labels[..., 1:], labels.new_full((*labels.shape[:-1], 1), ignore_index)], -1)


def host_checks(device: torch.device) -> bool:
    """Whether labels can be read at no cost, so that a bad one is an ordinary error."""
    return device.type == "cpu"


def check_temperature(temperature: Tensor, device: torch.device, shapes: Sequence[torch.Size]) -> None:
    """Raise TypeError or ValueError unless this is one temperature for each label."""
    if len(shapes) != 1:
        raise TypeError(
            "a temperature per token goes with one tensor of hidden states, not with a sequence of them; give a number."
        )
    if temperature.shape != shapes[0]:
        raise ValueError(
            f"temperature must be a number, or a tensor with one for each hidden state, {list(shapes[0])}, got shape "
            f"{list(temperature.shape)}; one for each sequence [B] becomes one per token by "
            "temperature[:, None].expand_as(labels)."
        )
    if temperature.device != device:
        raise ValueError(f"temperature is on {temperature.device}, the weight on {device}; move it with .to(...).")


def _check_vocabulary(extremes: Sequence[int], vocab_size: int, ignore_index: int) -> None:
    if extremes and (min(extremes) < 0 or max(extremes) >= vocab_size):
        raise ValueError(
            f"labels must be in [0, {vocab_size}), the rows of the weight, or ignore_index={ignore_index}; "
            f"found labels from {min(extremes)} to {max(extremes)}. Mask padding with ignore_index, and check "
            "that the tokenizer and the weight have the same vocabulary."
        )


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
    mask: Tensor | None  # [N] bool, False for tokens without loss, which compact=False leaves among the active ones

    @classmethod
    def select(
        cls, labels: Sequence[Tensor], vocab_size: int, ignore_index: int = -100, compact: bool = True
    ) -> Tokens:
        """Find the tokens whose label is not ``ignore_index``, in int64 tensors of any shape.

        With ``compact``, tokens without loss are dropped, at the cost of one host synchronization; without it they are
        projected and then masked out. A label outside the vocabulary is a ValueError, which the same synchronization
        finds; with ``compact=False`` on a GPU it is a device-side assertion.
        """
        shapes = tuple(part.shape for part in labels)
        flat = [part.reshape(-1).contiguous() for part in labels]  # a flat view may still have a stride
        valid = [part != ignore_index for part in flat]
        if not compact or state.shapes_only:
            merged, mask = torch.cat(flat), torch.cat(valid)
            safe = merged.masked_fill(~mask, 0)
            if state.shapes_only:
                pass
            elif safe.numel() and host_checks(safe.device):
                _check_vocabulary([int(safe.amin()), int(safe.amax())], vocab_size, ignore_index)
            elif safe.numel():
                torch._assert_async(((safe >= 0) & (safe < vocab_size)).all())
            counts = tuple(part.numel() for part in flat)
            return cls(safe, shapes, counts, (None,) * len(flat), mask)

        if flat and flat[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, so that the host cannot read how many tokens carry loss; give "
                "compact=False, with which all of them are projected."
            )
        facts = [mask.sum() for mask in valid]
        for part, mask in zip(flat, valid, strict=True):
            if part.numel():
                facts += torch.aminmax(part * mask)  # few kernels: the device idles until they are done
        numbers = torch.stack(facts).tolist()
        counts, extremes = tuple(numbers[: len(flat)]), numbers[len(flat) :]
        _check_vocabulary(extremes, vocab_size, ignore_index)
        indices = tuple(
            None if count == part.numel() else torch.nonzero_static(mask, size=count).squeeze(-1)
            for part, mask, count in zip(flat, valid, counts, strict=True)
        )
        active = [
            part if index is None else part.index_select(0, index) for part, index in zip(flat, indices, strict=True)
        ]
        return cls(active[0] if len(active) == 1 else torch.cat(active), shapes, counts, indices, None)

    def first(self, parts: int) -> Tokens:
        """The active tokens of the first ``parts`` tensors of labels."""
        count = sum(self.counts[:parts])
        mask = None if self.mask is None else self.mask[:count]
        return Tokens(self.labels[:count], self.shapes[:parts], self.counts[:parts], self.indices[:parts], mask)

    @property
    def count(self) -> int:
        """N."""
        return sum(self.counts)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """``(which tensor, first, last)`` for the active tokens ``start`` to ``stop``."""
        pieces, offset = [], 0
        for segment, count in enumerate(self.counts):
            first, last = max(start - offset, 0), min(stop - offset, count)
            if first < last:
                pieces.append((segment, first, last))
            offset += count
        return pieces

    def gather(self, sources: Sequence[Tensor], start: int, stop: int) -> Tensor:
        """Rows of the active tokens ``start`` to ``stop``.

        Sources are ``[T]`` or ``[T, H]`` each; or ``[..., H]`` in the labels' shape, where flattening would copy it.
        """
        rows = []
        for segment, first, last in self.pieces(start, stop):
            index, source = self.indices[segment], sources[segment]
            if source.dim() > 2:
                flat = torch.arange(first, last, device=source.device) if index is None else index[first:last]
                rows.append(source[torch.unravel_index(flat, self.shapes[segment])])
            else:
                rows.append(source[first:last] if index is None else source.index_select(0, index[first:last]))
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
        offset = 0
        for segment, first, last in self.pieces(start, stop):
            index, target = self.indices[segment], targets[segment]
            if target is not None:
                part = values[offset : offset + last - first]
                if index is None:
                    target[first:last].copy_(part)
                else:
                    target.index_copy_(0, index[first:last], part.to(target.dtype))
            offset += last - first

    def gather_all(self, values: Tensor) -> Tensor:
        """From one value per token ``[T]`` to one per active token ``[N]``; 0 for masked ones."""
        active = self.gather(values.split([math.prod(shape) for shape in self.shapes]), 0, self.count)
        return self.masked(active)

    def gather_like_labels(self, values: Tensor) -> Tensor:
        """From ``[..., k]`` in the shape of the only tensor of labels to one value (or row) per active token."""
        (shape,) = self.shapes
        return self.gather([values.reshape(shape.numel(), *values.shape[len(shape) :])], 0, self.count)

    def temperatures(self, temperature: Tensor, dtype: torch.dtype) -> Tensor:
        """Each active token's temperature ``[N]``, a copy, from ``[...]`` in the shape of the only tensor of labels.

        Raises:
            TypeError, ValueError: not one temperature for each label; on a CPU, one of an active token that is not
                positive and finite. On a GPU that is a device-side assertion.
        """
        check_temperature(temperature, self.labels.device, self.shapes)
        found = self.gather_like_labels(temperature.detach()).to(dtype, copy=True).contiguous()
        if self.mask is not None:
            found.masked_fill_(~self.mask, 1.0)
        right = ((found > 0) & (found < math.inf)).all()
        if not host_checks(found.device):
            torch._assert_async(right)
        elif not right:
            wrong = found[~((found > 0) & (found < math.inf))]
            raise ValueError(
                f"temperature must be positive and finite for every token that carries loss, got {float(wrong[0])!r} "
                f"for {len(wrong)} of {len(found)} tokens."
            )
        return found

    def masked(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Values of (some of) the active tokens, with 0 for those that carry no loss."""
        if self.mask is None:
            return values
        mask = self.mask[rows].view(-1, *[1] * (values.dim() - 1))
        return torch.where(mask, values, 0)  # an integer keeps every dtype

    def scatter(self, values: Tensor) -> Tensor:
        """From one value (or row) per active token ``[N]`` to one per token ``[T]``; 0 for those without loss."""
        if self.mask is not None:
            return self.masked(values)
        if all(index is None for index in self.indices):
            return values
        sizes = [math.prod(shape) for shape in self.shapes]
        out = values.new_zeros(sum(sizes), *values.shape[1:])
        self.scatter_(out.split(sizes), 0, self.count, values)
        return out

    def split(self, values: Tensor) -> list[Tensor]:
        """From ``[T]`` (or ``[T, k]``) to one tensor per tensor of labels, in its shape."""
        if len(self.shapes) == 1:
            return [values.view(*self.shapes[0], *values.shape[1:])]
        parts = values.split([math.prod(shape) for shape in self.shapes])
        return [part.view(*shape, *values.shape[1:]) for part, shape in zip(parts, self.shapes, strict=True)]
