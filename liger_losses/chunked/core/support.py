"""Kept columns: softmaxes over the columns that a sampler kept for each token.

T tokens, N of them active, V vocabulary size, K kept columns of a token, P kept columns of all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.checks import check_tensor, check_vocabulary
from liger_losses.chunked.core.inputs import shift_labels, target_of
from liger_losses.chunked.core.options import EngineOptions
from liger_losses.chunked.core.output_layer import Head
from liger_losses.chunked.core.stream import statistics
from liger_losses.chunked.core.target import Target
from liger_losses.kernels.reading import start_reading

#: What the host reads.
_FACTS = "which tokens have kept columns; capture the model without its loss"
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class TokenSupport:
    """The vocabulary entries that a sampler kept for each token (by top-k, top-p, min-p ...).

    A token without kept entries is evaluated over the whole vocabulary. The entries of masked tokens have no influence.
    Only the kept rows of the ``lm_head`` are read, so time and memory grow with their number, not with the vocabulary.
    Tokens with very many kept entries are computed by products with the whole head, which is faster.

    Args:
        ids: int64 or int32 ids of the kept entries. ``[..., K]``, one row for each label (with ``shift`` too), padded
            with -1 at any place; or ``[P]`` with ``offsets``.
        offsets: ``[T + 1]`` int64 or int32: in the order of the flattened labels, token t has
            ``ids[offsets[t]:offsets[t + 1]]``.
        add_label: if a token's label is not among its kept entries, add it. By default, a missing label is an error.
        sparse_grad: make the gradient of the weight a sparse tensor of the rows that some token keeps, as for
            ``nn.Embedding(sparse=True)``, for optimizers that take one. The kept rows of all tokens are then read, for
            any number of kept entries. If some token has no kept entries, the gradient is dense.

    Raises:
        TypeError, ValueError: not integer tensors, or of other shapes.
    """

    ids: Tensor
    offsets: Tensor | None = None
    add_label: bool = False
    sparse_grad: bool = False

    def __post_init__(self) -> None:
        given = {"ids": self.ids} if self.offsets is None else {"ids": self.ids, "offsets": self.offsets}
        for name, value in given.items():
            check_tensor(f"TokenSupport's {name}", value)
            if value.dtype not in _INTEGERS:
                raise TypeError(f"TokenSupport's {name} must be int64 or int32, got {value.dtype}.")
        for name in ("add_label", "sparse_grad"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"TokenSupport's {name} must be True or False, got {getattr(self, name)!r}.")
        if self.offsets is not None and (self.ids.dim() != 1 or self.offsets.dim() != 1):
            raise ValueError(
                f"TokenSupport(ids, offsets) takes ids [P] and offsets [tokens + 1], got {list(self.ids.shape)} and "
                f"{list(self.offsets.shape)}; leave offsets out for padded ids [..., K]."
            )

    def check(self, labels: Tensor, weight: Tensor) -> None:
        """Raise ValueError unless there is a row for each label, on the weight's device, and the weight can have the
        requested kind of gradient."""
        for name, value in (("ids", self.ids), ("offsets", self.offsets)):
            if value is not None and value.device != weight.device:
                raise ValueError(
                    f"TokenSupport's {name} are on {value.device}, the weight is on {weight.device}; move them with "
                    ".to(...)."
                )
        if self.offsets is None and (self.ids.shape[:-1] != labels.shape or self.ids.dim() == 0):
            raise ValueError(
                f"TokenSupport's ids must be [..., K], one row for each label of {list(labels.shape)}, got "
                f"{list(self.ids.shape)}."
            )
        if self.offsets is not None and len(self.offsets) != labels.numel() + 1:
            raise ValueError(
                f"TokenSupport's offsets must be [{labels.numel() + 1}], one more than there are labels, got "
                f"{list(self.offsets.shape)}."
            )
        if self.ids.numel() and not labels.numel():
            raise ValueError(f"TokenSupport has {self.ids.numel()} ids, but there are no labels; pass no ids.")
        if self.sparse_grad and torch.is_grad_enabled() and weight.requires_grad and not weight.is_leaf:
            raise ValueError(
                "TokenSupport(sparse_grad=True) needs a weight that is a parameter, or detached, got the result of an "
                "operation, whose backward cannot read sparse gradients; leave sparse_grad out."
            )


class Kept(NamedTuple):
    """Tokens that keep about as many columns."""

    labels: Tensor  # [...], or [n] of some tokens; ignore_index for tokens of other parts
    ids: Tensor | None  # [..., K], padded with -1; None for tokens without a cut
    tokens: Tensor | None = None  # [n], their places among the flattened tokens; None for all


def kept_statistics(
    hidden_states: Tensor,
    head: Head,
    labels: Tensor,
    support: TokenSupport,
    names: tuple[str, ...],
    options: EngineOptions,
    *,
    shift: int = 0,
) -> dict[str, Tensor]:
    """Per-token statistics over the kept columns, differentiable, in the labels' shape.

    Args:
        hidden_states: ``[..., H]``.
        head: labels and kept columns count the whole vocabulary, where ranks share it.
        labels: ``[...]`` int64, not yet shifted.
        support: the kept columns.
        names: of ``logp``, ``entropy`` and ``lse``.
        options: see :class:`liger_losses.EngineOptions`.
        shift: position ``t`` predicts the label at ``t + shift``.

    Raises:
        TypeError, ValueError: inputs that do not fit together; columns out of range, twice, or without the label.
        RuntimeError: a CUDA graph is being captured.
    """
    if not isinstance(support, TokenSupport):
        raise TypeError(f"support must be a TokenSupport(ids), got {type(support).__name__}.")
    whole = target_of(hidden_states, head, labels, kept=None)
    support.check(labels, head.weight)
    moved = shift_labels(labels, options.ignore_index, shift) if shift else labels
    split = padded_parts if support.offsets is None else ragged_parts
    parts = split(support, moved, options.ignore_index, shift)
    check_kept(parts, head.vocab_size, support, options.ignore_index, shift, "logp" in names)
    if support.add_label:
        parts = [part._replace(ids=with_label(part)) for part in parts]
    uncut = [part.labels for part in parts if part.ids is None]
    if head.batch_invariant and head.adapters and any((y != options.ignore_index).any() for y in uncut):
        head.check_invariant()
    targets = [_of_part(whole, part, support.sparse_grad) for part in parts]
    found = [
        {name: _spread(value, part.tokens, labels.shape) for name, value in values.items()}
        for part, values in zip(parts, statistics(targets, names, options), strict=True)
    ]
    return {name: functools.reduce(torch.add, [values[name] for values in found]) for name in names}


def _of_part(whole: Target, part: Kept, sparse: bool) -> Target:
    divided = whole.temperature
    if part.tokens is not None and isinstance(divided, Tensor):
        divided = divided.flatten()[part.tokens]
    return replace(whole, labels=part.labels, temperature=divided, kept=part.ids, sparse_grad=sparse, rows=part.tokens)


def _spread(values: Tensor, tokens: Tensor | None, shape: torch.Size) -> Tensor:
    """Values of some tokens in the labels' shape, 0 for others."""
    if tokens is None:
        return values
    return values.new_zeros(shape.numel()).index_put((tokens,), values).view(shape)


def padded_parts(support: TokenSupport, labels: Tensor, ignore_index: int, shift: int) -> list[Kept]:
    """Tokens with kept columns, and tokens without."""
    ids = support.ids.long()
    if shift:
        ids = torch.cat([ids[..., shift:, :], torch.full_like(ids[..., :shift, :], -1)], -2)
    cut = (ids != -1).any(-1)
    parts = [Kept(torch.where(cut, ignore_index, labels), None)]
    return [*parts, Kept(torch.where(cut, labels, ignore_index), ids)] if ids.shape[-1] else parts


def ragged_parts(support: TokenSupport, labels: Tensor, ignore_index: int, shift: int) -> list[Kept]:
    """Active tokens by how many columns they keep, up to powers of two.

    Raises:
        ValueError: offsets that do not rise from 0 to the number of ids.
    """
    assert support.offsets is not None
    ids, offsets, flat = support.ids, support.offsets.long(), labels.flatten()
    _check_offsets(offsets, len(ids))
    tokens = (flat != ignore_index).nonzero()[:, 0]
    starts, counts = offsets[tokens + shift], offsets.diff()[tokens + shift]
    widths = torch.where(counts > 0, 2 ** counts.clamp(min=1).log2().ceil().long(), 0)
    sizes, numbers = torch.unique(widths, return_counts=True)
    parts = [Kept(flat[:0], None, tokens[:0])]
    for chosen, size in zip(widths.argsort(stable=True).split(numbers.tolist()), sizes.tolist(), strict=True):
        at = torch.arange(size, device=ids.device)
        inside = at < counts[chosen, None]
        kept = torch.where(inside, ids[torch.where(inside, starts[chosen, None] + at, 0)].long(), -1) if size else None
        parts.append(Kept(flat[tokens[chosen]], kept, tokens[chosen]))
    return parts


def _check_offsets(offsets: Tensor, number: int) -> None:
    rises = offsets.diff().amin() if len(offsets) > 1 else offsets.new_zeros(())
    least, first, last = start_reading(torch.stack([rises, offsets[0], offsets[-1]]), _FACTS)()
    if least < 0 or (first, last) != (0, number):
        raise ValueError(
            f"TokenSupport's offsets must rise from 0 to {number}, the number of ids; they go from {first} to {last}, "
            f"by {least} or more."
        )


def with_label(part: Kept) -> Tensor | None:
    """The columns of tokens, and their label's where it is not among them."""
    if part.ids is None:
        return None
    there = (part.ids == part.labels[..., None]).any(-1)
    return torch.cat([part.ids, torch.where(there, -1, part.labels)[..., None]], -1)


def check_kept(
    parts: Sequence[Kept], size: int, support: TokenSupport, ignore_index: int, shift: int, needs_label: bool
) -> None:
    """Raise ValueError, which names the first token, for wrong columns, or for a label that is not among its token's,
    if it must be."""
    cut = [part for part in parts if part.ids is not None]
    wrong: list[list[Tensor]] = [[], [], []]
    for part in cut:
        assert part.ids is not None
        ids, labels, ordered = part.ids, part.labels, part.ids.sort(-1).values
        active = labels != ignore_index
        lacks = ~(ids == labels[..., None]).any(-1) & (needs_label and not support.add_label)
        twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
        for found, each in zip(wrong, (((ids < -1) | (ids >= size)).any(-1), twice, lacks), strict=True):
            found.append((each & active).flatten())
    if not cut:
        return
    numbers = start_reading(torch.stack([torch.cat(each).sum() for each in wrong]), _FACTS)()
    kind = next((kind for kind, number in enumerate(numbers) if number), None)
    if kind is None:
        return
    places = [torch.arange(p.labels.numel(), device=p.labels.device) if p.tokens is None else p.tokens for p in cut]
    firsts = [int(place[bad].amin()) if bad.any() else None for place, bad in zip(places, wrong[kind], strict=True)]
    token, which = min((first, i) for i, first in enumerate(firsts) if first is not None)
    row, kept = places[which] == token, cut[which].ids
    assert kept is not None
    label, name = int(cut[which].labels.flatten()[row]), f"token {token + shift} of the flattened labels"
    if kind == 2:
        check_vocabulary([label], size, ignore_index)
    raise ValueError(_said(kind, kept.flatten(0, -2)[row][0], label, name, size, int(numbers[kind]), support))


def _said(kind: int, ids: Tensor, label: int, token: str, size: int, number: int, support: TokenSupport) -> str:
    if kind == 0:
        padding = ", or -1 for padding" if support.offsets is None else ""
        return (
            f"TokenSupport's ids must be in [0, {size}), the rows of the weight{padding}; {token} has ids from "
            f"{int(ids.amin())} to {int(ids.amax())}."
        )
    if kind == 1:
        again, counts = ids.unique(return_counts=True)
        return (
            f"TokenSupport has ids twice: {token} has {again[(counts > 1) & (again >= 0)].tolist()[0]} more than "
            "once; give each once, and pad with -1."
        )
    return (
        f"the label of {number} tokens is not among their kept columns, so its probability "
        f"is 0 (the first: label {label} of {token}). Check that ids and labels belong to "
        "the same tokens; or add labels to the kept columns: TokenSupport(..., add_label=True)."
    )
