"""Kept columns: softmaxes over the columns that a sampler kept for each token.

T tokens, N of them active, V vocabulary size, K kept columns of a token, P kept columns of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.checks import check_tensor
from liger_losses.chunked.core.inputs import shift_labels, target_of
from liger_losses.chunked.core.stream import statistics
from liger_losses.chunked.core.target import Target
from liger_losses.chunked.core.heads import Head
from liger_losses.chunked.core.options import EngineOptions
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

    tokens: Tensor  # [n], their places among the flattened tokens
    labels: Tensor  # [n]
    ids: Tensor | None  # [n, K], padded with -1; None for tokens without a cut


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
    whole = target_of(hidden_states, head, labels)
    support.check(labels, head.weight)
    moved = (shift_labels(labels, options.ignore_index, shift) if shift else labels).flatten()
    parts = groups_of(support, moved, options.ignore_index, shift)
    check_kept(parts, head.vocab_size, support, shift, lacks=not support.add_label and "logp" in names)
    if support.add_label:
        parts = [part._replace(ids=with_label(part)) for part in parts]
    hidden, divided = whole.hidden.flatten(0, -2), whole.temperature
    targets = []
    for part in parts:
        own = divided.flatten()[part.tokens] if isinstance(divided, Tensor) else divided
        fields = {"kept": part.ids, "sparse_grad": support.sparse_grad}
        targets.append(Target(whole.head, hidden[part.tokens], part.labels, own, **fields))
    found, tokens = statistics(targets, names, options), torch.cat([part.tokens for part in parts])
    values = {name: torch.cat([each[name] for each in found]) for name in names}
    return {n: v.new_zeros(labels.numel()).index_put((tokens,), v).view(labels.shape) for n, v in values.items()}


def groups_of(support: TokenSupport, labels: Tensor, ignore_index: int, shift: int) -> list[Kept]:
    """Active tokens by how many columns they keep: padded rows have one width, ragged ones powers of two.

    Raises:
        ValueError: offsets that do not rise from 0 to the number of ids.
    """
    tokens = (labels != ignore_index).nonzero()[:, 0]
    ids, rows = support.ids.flatten(), tokens + shift
    if support.offsets is None:
        width = support.ids.shape[-1]
        starts = rows * width
        cut = (support.ids.view(-1, width)[rows] != -1).any(1) if width else torch.zeros_like(rows, dtype=torch.bool)
        counts = widths = torch.where(cut, width, 0)
    else:
        offsets = support.offsets.long()
        _check_offsets(offsets, len(ids))
        starts, counts = offsets[rows], offsets.diff()[rows]
        widths = torch.where(counts > 0, 2 ** counts.clamp(min=1).log2().ceil().long(), 0)
    sizes, numbers = torch.unique(widths, return_counts=True)
    if not len(sizes):
        return [Kept(tokens, labels[tokens], None)]
    parts = []
    for chosen, size in zip(widths.argsort(stable=True).split(numbers.tolist()), sizes.tolist(), strict=True):
        own, at, kept = tokens[chosen], torch.arange(size, device=tokens.device), None
        if size:
            inside = at < counts[chosen, None]
            places = torch.where(inside, starts[chosen, None] + at, 0)
            kept = torch.where(inside, ids[places].long(), -1)
        parts.append(Kept(own, labels[own], kept))
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
    there = (part.ids == part.labels[:, None]).any(1)
    return torch.cat([part.ids, torch.where(there, -1, part.labels)[:, None]], 1)


def check_kept(parts: Sequence[Kept], size: int, support: TokenSupport, shift: int, lacks: bool) -> None:
    """Raise ValueError, which names the first token, for wrong columns, and with ``lacks`` for a label that is not
    among its token's."""
    wrong: list[list[Tensor]] = []
    for part in parts:
        if part.ids is not None:
            ordered = part.ids.sort(1).values
            outside = ((part.ids < -1) | (part.ids >= size)).any(1)
            twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
            wrong.append([outside, twice, ~(part.ids == part.labels[:, None]).any(1) & lacks])
    if not wrong:
        return
    cut = [part for part in parts if part.ids is not None]
    numbers = start_reading(torch.stack([torch.cat(each).sum() for each in zip(*wrong, strict=True)]), _FACTS)()
    for kind, number in enumerate(numbers):
        if number:
            tokens, labels = (torch.cat(each) for each in zip(*[(p.tokens, p.labels) for p in cut], strict=True))
            bad = torch.cat([each[kind] for each in wrong])
            token = int(tokens[bad].amin())
            part = next(part for part in cut if (part.tokens == token).any())
            assert part.ids is not None
            ids, label = part.ids[part.tokens == token][0], int(labels[tokens == token])
            raise ValueError(_said(kind, ids, label, f"token {token + shift} of the flattened labels", size, number, support))


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
