"""Which columns of the vocabulary each token has, from the ids that a user gives: checked, and in one pass.

T tokens, P pairs of a token and one of its columns, K columns of a token, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels._triton import device_of, jit, tl

#: Ids that a program compares with each other at a time.
_BLOCK = 32
#: In place of a label that is none of its token's columns here. (-1 is a column that does not count.)
NO_LABEL = -2


class KeptIds(NamedTuple):
    """Ids that were kept for each token, and what decides which of them become columns.

    Args:
        ids: ``[T, K]`` int32 or int64, padded with -1; or ``[P]`` with ``offsets``.
        offsets: ``[T + 1]`` int32 or int64, or ``None``: row r of the ids is ``ids[offsets[r]:offsets[r + 1]]``.
        labels: ``[T]`` int64, contiguous.
        ignore_index: the label of tokens without loss, which have no columns.
        vocab_size: V.
        first_column, last_column: only columns from the first up to the last are counted, and are numbered from 0.
        shift: token t has the row ``t + shift`` of the ids (the last ``shift`` tokens have no loss).
        add_label: add the label to a token's columns where they lack it.
        fewest, most: tokens with more than ``fewest`` and no more than ``most`` ids get columns, the others none.
    """

    ids: Tensor
    offsets: Tensor | None
    labels: Tensor
    ignore_index: int
    vocab_size: int
    first_column: int
    last_column: int
    shift: int
    add_label: bool
    fewest: int
    most: int


class Facts(NamedTuple):
    """What is found about the tokens: sums over all of them.

    ``pairs`` are their columns (of all ranks), ``uncut`` and ``wide`` tokens have loss and no ids, or more than
    ``most``. All others are errors: tokens ``lacking`` their label, ids that are no columns, ids twice (where
    ``fewest`` is 0, and not among those of wide tokens), labels that are no column, and offsets that do not rise from
    0 to P.
    """

    pairs: int
    uncut: int
    wide: int
    lacking: int
    no_columns: int
    twice: int
    no_labels: int
    no_offsets: int


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """The columns of T tokens, as P pairs, token after token. Pairs before those of the first token do not count.

    Args:
        columns: ``[P]`` int32; -1 for a pair that does not count.
        labels: ``[T]`` int32, one of each token's columns, or :data:`NO_LABEL`.
        vocab_size: V.
        width: token t has the pairs ``t width`` to ``(t + 1) width``; ``None`` with ``starts`` and ``owners``.
        starts: ``[T + 1]`` int64: token t has the pairs ``starts[t]`` to ``starts[t + 1]``, all columns different.
        owners: ``[P]`` int32, each pair's token.
    """

    columns: Tensor
    labels: Tensor
    vocab_size: int
    width: int | None = None
    starts: Tensor | None = None
    owners: Tensor | None = None

    @cached_property
    def edges(self) -> Tensor:
        """``[T + 1]`` int64: ``starts``, also where there is a width."""
        if self.starts is not None:
            return self.starts
        assert self.width is not None
        return torch.arange(len(self.labels) + 1, device=self.labels.device) * self.width

    @cached_property
    def tokens(self) -> Tensor:
        """``[P]`` int32: ``owners``, also where there is a width."""
        if self.owners is not None:
            return self.owners
        assert self.width is not None
        tokens = torch.arange(len(self.labels), dtype=torch.int32, device=self.labels.device)
        return tokens.repeat_interleave(self.width, output_size=len(self.columns))

    @cached_property
    def sorted(self) -> tuple[Tensor, Tensor]:
        """``[P]`` each: the columns in increasing order, those that do not count last as V, and the pairs they are
        of."""
        columns, order = self.columns.masked_fill(self.columns < 0, self.vocab_size).sort(stable=True)
        return columns, order

    def compacted(self, tokens: Tensor) -> TokenColumns:
        """The pairs that count, all of which are of the tokens ``[N]``, as those of the tokens 0 to N - 1."""
        number = torch.empty(len(self.labels), dtype=torch.int32, device=tokens.device)
        number[tokens] = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        at = (self.columns >= 0).nonzero().squeeze(1)
        owners = number[self.tokens[at]]
        starts = torch.searchsorted(owners, torch.arange(len(tokens) + 1, dtype=torch.int32, device=tokens.device))
        return TokenColumns(self.columns[at], self.labels[tokens], self.vocab_size, None, starts, owners)


def find_columns(kept: KeptIds, *, backend: str = "torch") -> tuple[TokenColumns, Tensor]:
    """The columns of all tokens, and ``[F, T]`` int32, what is found about each, in the order of :class:`Facts`.

    No pair has a column outside of the vocabulary, whatever the ids are: columns may be used before errors are known.
    """
    with device_of(kept.labels):
        return {"torch": _find_torch, "triton": _find_triton}[backend](kept)


def _starts(kept: KeptIds) -> Tensor | None:
    """The pairs' edges where ids are ragged. They stay in the order of the ids, one more per row with ``add_label``."""
    starts = kept.offsets
    if starts is None:
        return None
    starts = starts.long().clamp(0, kept.ids.numel())  # whatever they are, nothing beyond the pairs is read
    if kept.add_label:
        starts = starts + torch.arange(len(starts), device=starts.device)
    beyond = min(kept.shift, len(kept.labels))
    return torch.cat([starts[beyond:], starts[-1:].expand(beyond)]) if beyond else starts


class _Rows(NamedTuple):
    """Flattened ids, and for each: its token, and its place among the pairs. For each token: the place of a label that
    is added, and whether its offsets are wrong."""

    ids: Tensor
    tokens: Tensor
    places: Tensor
    label_places: Tensor
    wrong_offsets: Tensor

    @classmethod
    def of(cls, kept: KeptIds) -> _Rows:
        ids, count = kept.ids, max(len(kept.labels), 1)
        numbers = torch.arange(len(kept.labels), device=ids.device)
        if kept.offsets is None:
            width = ids.shape[-1]
            tokens = numbers.repeat_interleave(width)
            places = torch.arange(ids.numel(), device=ids.device) + tokens * kept.add_label
            ids = ids.roll(-kept.shift, 0).flatten()
            return cls(ids, tokens, places, numbers * (width + 1) + width, torch.zeros_like(numbers))
        edges = kept.offsets.long()
        wrong = edges.diff() < 0
        wrong[:1] |= (edges[0] != 0) | (edges[-1] != len(ids))
        edges = edges.clamp(0, len(ids)).cummax(0).values
        at = torch.arange(len(ids), device=ids.device)
        rows = (torch.searchsorted(edges, at, right=True) - 1).clamp(0, count - 1)
        of_tokens = (numbers + kept.shift) % count
        return cls(
            ids, (rows - kept.shift) % count, at + rows * kept.add_label, edges[of_tokens + 1] + of_tokens, wrong
        )


def _find_torch(kept: KeptIds) -> tuple[TokenColumns, Tensor]:
    labels, count, size = kept.labels, len(kept.labels), kept.vocab_size
    ids, tokens, places, label_places, wrong_offsets = _Rows.of(kept)
    lowest = 0 if kept.offsets is not None else -1  # -1 is padding

    def number_of(mask: Tensor) -> Tensor:
        return tokens[mask].bincount(minlength=count)

    active = labels != kept.ignore_index
    counts = number_of((ids != -1) | (lowest == 0))
    cut = active & (counts > 0)
    narrow = cut & (counts <= kept.most)
    chosen = narrow & (counts > kept.fewest)
    lacking = cut & (number_of(ids == labels[tokens]) == 0)
    compared = (ids >= 0) & (ids < size) & narrow[tokens] & (kept.fewest == 0)
    keys, _ = torch.where(compared, tokens * size + ids, -1).sort()
    again = keys[1:][(keys[1:] == keys[:-1]) & (keys[1:] >= 0)] // size
    facts = [
        torch.where(chosen, counts + lacking * kept.add_label, 0),
        active & (counts == 0),
        cut & ~narrow,
        lacking,
        torch.where(active, number_of((ids < lowest) | (ids >= size)), 0),
        again.bincount(minlength=count),
        active & ((labels < 0) | (labels >= size)),
        wrong_offsets,
    ]

    def local(columns: Tensor, counts: Tensor, none: int) -> Tensor:
        inside = counts & (columns >= kept.first_column) & (columns < kept.last_column)
        return torch.where(inside, columns - kept.first_column, none).int()

    columns = torch.full((len(ids) + count * kept.add_label,), -1, dtype=torch.int32, device=ids.device)
    columns[places] = local(ids, chosen[tokens], -1)
    if kept.add_label:
        columns[label_places] = local(labels, chosen & lacking, -1)
    starts, width, owners = _starts(kept), None, None
    if starts is None:
        width = kept.ids.shape[-1] + kept.add_label
    else:
        at = torch.arange(len(columns), device=columns.device)
        owners = (torch.searchsorted(starts, at, right=True) - 1).clamp(0, max(count - 1, 0)).int()
    own_labels = local(labels, chosen, NO_LABEL)
    found = TokenColumns(columns, own_labels, kept.last_column - kept.first_column, width, starts, owners)
    return found, torch.stack([fact.int() for fact in facts])


def _find_triton(kept: KeptIds) -> tuple[TokenColumns, Tensor]:
    ids, labels, offsets, count = kept.ids.contiguous(), kept.labels, kept.offsets, len(kept.labels)
    pairs, owners = ids.numel() + count * kept.add_label, None
    width = ids.shape[-1] if offsets is None else None
    if offsets is None:
        columns = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    else:
        offsets = offsets.contiguous()
        # Offsets that are wrong leave out some of them.
        columns = torch.full((pairs,), -1, dtype=torch.int32, device=ids.device)
        owners = torch.zeros_like(columns)
    own_labels = torch.empty(count, dtype=torch.int32, device=ids.device)
    facts = torch.empty(len(Facts._fields), count, dtype=torch.int32, device=ids.device)
    if count:
        _find_kernel[(count,)](
            columns, owners, own_labels, facts, ids, offsets, labels, count, ids.numel(), width, kept.ignore_index,
            kept.vocab_size, kept.first_column, kept.last_column, kept.fewest, kept.most,
            SHIFT=kept.shift, ADDED=int(kept.add_label), BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
    width = None if width is None else width + kept.add_label
    found = TokenColumns(columns, own_labels, kept.last_column - kept.first_column, width, _starts(kept), owners)
    return found, facts


_NUMBERS = ["tokens", "size", "width", "ignore_index", "vocab_size", "first_column", "last_column", "fewest", "most"]


@jit(
    do_not_specialize=_NUMBERS,
    do_not_specialize_on_alignment=["columns", "owners", "own_labels", "facts", "ids", "offsets", "labels"],
)
def _find_kernel(
    columns, owners, own_labels, facts, ids, offsets, labels, tokens, size, width, ignore_index, vocab_size,
    first_column, last_column, fewest, most,
    SHIFT: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    row = (token + SHIFT) % tokens
    label = tl.load(labels + token)
    active = label != ignore_index
    wrong_offsets = 0
    if width is not None:
        lowest = -1
        first = row * width
        last = first + width
        out = token * (width + ADDED)
    else:
        lowest = 0
        first = tl.load(offsets + row).to(tl.int64)
        last = tl.load(offsets + row + 1).to(tl.int64)
        wrong_offsets = (last < first).to(tl.int32)
        if row == 0:
            wrong_offsets += (first != 0).to(tl.int32)
            wrong_offsets += (tl.load(offsets + tokens) != size).to(tl.int32)
        first = tl.minimum(tl.maximum(first, 0), size)
        last = tl.minimum(tl.maximum(last, first), size)
        out = first + row * ADDED
    counts = tl.zeros((BLOCK,), tl.int32)
    hits = tl.zeros((BLOCK,), tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    ends = tl.zeros((BLOCK,), tl.int64)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some = tl.load(ids + at, mask=at < last, other=-1).to(tl.int64)
        counts += ((at < last) & ((some != -1) | (lowest == 0))).to(tl.int32)
        hits += ((at < last) & (some == label)).to(tl.int32)
        wrong += ((at < last) & ((some < lowest) | (some >= vocab_size))).to(tl.int32)
        ends = tl.maximum(ends, tl.where(some != -1, at + 1, 0))
    count = tl.sum(counts, 0)
    cut = active & (count > 0)
    narrow = cut & (count <= most)
    chosen = narrow & (count > fewest)
    lacking = cut & (tl.sum(hits, 0) == 0)
    label_here = chosen & (label >= first_column) & (label < last_column)
    twice = tl.zeros((BLOCK,), tl.int32)
    end = tl.max(ends, 0)  # padding behind all ids is not compared
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some = tl.load(ids + at, mask=at < last, other=-1).to(tl.int64)
        inside = chosen & (at < last) & (some >= first_column) & (some < last_column)
        to = out + (at - first)
        tl.store(columns + to, tl.where(inside, some - first_column, -1).to(tl.int32), mask=at < last)
        if owners is not None:
            tl.store(owners + to, token.to(tl.int32), mask=at < last)
        if narrow & (fewest == 0):
            small = some.to(tl.int32)  # larger ones are errors
            here = tl.arange(0, BLOCK)  # places in int32 take half the registers
            for ahead in range(0, (end - start).to(tl.int32), BLOCK):
                others_at = at + ahead
                others = tl.load(ids + others_at, mask=others_at < last, other=-1).to(tl.int32)
                later = here[:, None] < ahead + here[None, :]
                same = (small[:, None] == others[None, :]) & (small >= 0)[:, None] & later
                twice += tl.sum(same.to(tl.int32), 1)
    if ADDED:
        to = out + (last - first)
        tl.store(columns + to, tl.where(label_here & lacking, label - first_column, -1).to(tl.int32))
        if owners is not None:
            tl.store(owners + to, token.to(tl.int32))
    tl.store(own_labels + token, tl.where(label_here, label - first_column, -2).to(tl.int32))
    facts += token
    tl.store(facts, tl.where(chosen, count + (lacking.to(tl.int32) if ADDED else 0), 0))
    tl.store(facts + tokens, (active & (count == 0)).to(tl.int32))
    tl.store(facts + 2 * tokens, (cut & (count > most)).to(tl.int32))
    tl.store(facts + 3 * tokens, lacking.to(tl.int32))
    tl.store(facts + 4 * tokens, tl.where(active, tl.sum(wrong, 0), 0))
    tl.store(facts + 5 * tokens, tl.sum(twice, 0))
    tl.store(facts + 6 * tokens, (active & ((label < 0) | (label >= vocab_size))).to(tl.int32))
    tl.store(facts + 7 * tokens, wrong_offsets)
