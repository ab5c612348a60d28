"""The ids that a user gives for each token, as columns of the vocabulary: checked and laid out in one pass.

T tokens, K places for a token's columns, of which some are empty, V vocabulary size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import device_of, jit, tl

#: In the place of a column: a place without one, and one whose logit is not computed here.
EMPTY, ELSEWHERE = -1, -2
#: Ids that a program compares with each other at a time.
_BLOCK = 32


class Facts(NamedTuple):
    """What is found about each token with loss, ``[T]`` int32 each; or of how many tokens it is true.

    It is ``cut``, or has no ids: ``uncut``. All others are errors: tokens ``lacking`` their label, ids that are no
    columns, ids twice, and labels that are no column.
    """

    cut: Any
    uncut: Any
    lacking: Any
    no_columns: Any
    twice: Any
    no_labels: Any


class GivenIds(NamedTuple):
    """The ids that a user gives for each token, and which of them count.

    Args:
        ids: ``[R, K]`` int32 or int64, padded with -1, contiguous; or ``[P]`` with ``offsets``.
        offsets: ``[R + 1]`` int32 or int64, which rise: row r is ``ids[offsets[r]:offsets[r + 1]]``. Or ``None``.
        labels: ``[R]`` int64, contiguous.
        ignore_index: the label of tokens without loss, which have no columns.
        vocab_size: V, of all ranks.
        computed: the columns that are computed here.
        shift: token t has the ids of row ``t + shift``; the last ``shift`` tokens have no loss.
        add_label: add the label to a token's columns where they lack it, in a place behind them.
        most: tokens with more ids have no columns, and nothing is found about them.
        tokens: ``[T]``, which they are; ``None`` for all.
        width: places of a token, K at least without offsets.
    """

    ids: Tensor
    offsets: Tensor | None
    labels: Tensor
    ignore_index: int
    vocab_size: int
    computed: range
    shift: int
    add_label: bool
    most: int
    tokens: Tensor | None
    width: int

    def row(self, number: int) -> Tensor:
        """The ids of a token, by its place among all tokens."""
        row = (number + self.shift) % len(self.labels)
        return self.ids[row] if self.offsets is None else self.ids[int(self.offsets[row]) : int(self.offsets[row + 1])]


class Found(NamedTuple):
    """What :func:`find` returns.

    Columns ``[T, K]`` int32 are counted from the first that is computed here; :data:`EMPTY` at places without one, and
    :data:`ELSEWHERE` at those of other ranks, and at the first of tokens without columns, whose statistics are then 0.
    Labels' places are ``[T]`` int64, :class:`Facts` ``[F, T]`` int32. Projections ``[T, K]`` are those before any
    product: -inf at empty places, and 0 at all others.
    """

    columns: Tensor
    projected: Tensor
    label_at: Tensor
    facts: Tensor


def find(given: GivenIds, dtype: torch.dtype, *, backend: str = "torch") -> Found:
    """Columns of the ids, which are right or wrong: none lies outside of the vocabulary. Projections get this dtype."""
    with device_of(given.ids):
        return (_find_torch if backend == "torch" else _find_triton)(given, dtype)


def _find_torch(given: GivenIds, dtype: torch.dtype) -> Found:
    ids, labels, count, device = given.ids, given.labels, len(given.labels), given.ids.device
    tokens = torch.arange(count, device=device) if given.tokens is None else given.tokens
    rows, labels = (tokens + given.shift) % max(count, 1), labels[tokens]
    if given.offsets is None:
        ids = torch.nn.functional.pad(ids[rows].long(), (0, given.width - ids.shape[1]), value=-1)
        lengths, inside = torch.full_like(rows, given.width), torch.ones_like(ids, dtype=torch.bool)
    else:
        starts, lengths = given.offsets[rows].long(), given.offsets.long().diff()[rows]
        at = torch.arange(given.width, device=device)
        inside = at < lengths[:, None]
        picked = (starts[:, None] + at).clamp(max=max(len(ids) - 1, 0))
        ids = torch.where(inside, ids[picked].long() if len(ids) else picked, -1)
    counts = (ids != -1).sum(1) if given.offsets is None else lengths
    active = (labels != given.ignore_index) & (counts <= given.most)
    cut, own = active & (counts > 0), ids == labels[:, None]
    lacking = cut & ~own.any(1)
    label_at = own.int().argmax(1) * cut
    ordered = ids.sort(1).values
    facts = Facts(
        cut,
        active & ~cut,
        lacking,
        active & (inside & ((ids < (-1 if given.offsets is None else 0)) | (ids >= given.vocab_size))).any(1),
        active & ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1),
        active & ((labels < 0) | (labels >= given.vocab_size)),
    )
    if given.add_label:
        ids = torch.cat([ids, torch.where(lacking, labels, -1)[:, None]], 1)
        label_at = torch.where(lacking, given.width, label_at)
    counts_here = cut[:, None] & (ids >= 0) & (ids < given.vocab_size)
    here = counts_here & (ids >= given.computed.start) & (ids < given.computed.stop)
    columns = torch.where(here, ids - given.computed.start, torch.where(counts_here, ELSEWHERE, EMPTY)).int()
    columns[:, 0].masked_fill_(~cut, ELSEWHERE)
    projected = torch.zeros_like(columns, dtype=dtype).masked_fill_(columns == EMPTY, float("-inf"))
    return Found(columns, projected, label_at, torch.stack(facts).int())


def _find_triton(given: GivenIds, dtype: torch.dtype) -> Found:
    ids, device, all_tokens = given.ids, given.ids.device, len(given.labels)
    count, width = all_tokens if given.tokens is None else len(given.tokens), given.width + given.add_label
    columns = torch.empty(count, width, dtype=torch.int32, device=device)
    projected = torch.empty(count, width, dtype=dtype, device=device)
    label_at = torch.empty(count, dtype=torch.int64, device=device)
    facts = torch.empty(len(Facts._fields), count, dtype=torch.int32, device=device)
    if count:
        _find_kernel[(count,)](
            columns, projected, label_at, facts, ids, given.offsets, given.labels, given.tokens, all_tokens, count,
            ids.shape[-1], given.width, given.shift, given.ignore_index, given.vocab_size, given.computed.start,
            given.computed.stop, given.most, empty=EMPTY, elsewhere=ELSEWHERE, ADDED=int(given.add_label),
            BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
    return Found(columns, projected, label_at, facts)


_OF_IDS = ["columns", "projected", "label_at", "facts", "ids", "offsets", "labels", "tokens"]
_NUMBERS = ["all_tokens", "count", "length", "width", "shift", "ignore_index", "vocab_size", "first_column"]
_NUMBERS += ["last_column", "most"]


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_OF_IDS)
def _find_kernel(
    columns, projected, label_at, facts, ids, offsets, labels, tokens, all_tokens, count, length, width, shift,
    ignore_index, vocab_size, first_column, last_column, most, empty: tl.constexpr, elsewhere: tl.constexpr,
    ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    place = tl.program_id(0).to(tl.int64)
    token = place
    if tokens is not None:
        token = tl.load(tokens + place)
    row = (token + shift) % all_tokens
    label = tl.load(labels + token)
    lowest = -1  # padding
    begin = row * length
    if offsets is not None:
        lowest = 0
        begin = tl.load(offsets + row).to(tl.int64)
        length = (tl.load(offsets + row + 1) - begin).to(tl.int32)
    ids += begin
    number = tl.zeros((BLOCK,), tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    hits = tl.zeros((BLOCK,), tl.int32)  # the label's place, counted from 1
    ends = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some = tl.load(ids + at, mask=at < length, other=-1).to(tl.int64)
        number += ((at < length) & ((some != -1) | (lowest == 0))).to(tl.int32)
        wrong += ((at < length) & ((some < lowest) | (some >= vocab_size))).to(tl.int32)
        hits = tl.maximum(hits, tl.where((at < length) & (some == label), at + 1, 0))
        ends = tl.maximum(ends, tl.where(some != -1, at + 1, 0))
    ids_of_token = tl.sum(number, 0)
    active = (label != ignore_index) & (ids_of_token <= most)
    cut = active & (ids_of_token > 0)
    hit = tl.max(hits, 0)
    lacking = cut & (hit == 0)
    end = tl.where(cut, tl.max(ends, 0), 0)  # padding behind all ids is not compared
    length = tl.where(cut, length, 0)
    twice = tl.zeros((BLOCK,), tl.int32)
    to = place * (width + ADDED)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some = tl.load(ids + at, mask=at < length, other=-1).to(tl.int64)
        counts = ((some >= 0) & (some < vocab_size)) | ((cut == 0) & (at == 0))
        here = (some >= first_column) & (some < last_column)
        column = tl.where(here, some - first_column, tl.where(counts, elsewhere, empty))
        tl.store(columns + to + at, column.to(tl.int32), mask=at < width)
        tl.store(projected + to + at, tl.where(counts, 0.0, float("-inf")), mask=at < width)
        if start < end:
            small = some.to(tl.int32)  # larger ones are errors
            first = tl.arange(0, BLOCK)
            for ahead in range(0, end - start, BLOCK):
                others = tl.load(ids + at + ahead, mask=at + ahead < length, other=-1).to(tl.int32)
                later = first[:, None] < ahead + first[None, :]
                same = (small[:, None] == others[None, :]) & (small >= 0)[:, None] & later
                twice += tl.sum(same.to(tl.int32), 1)
    if ADDED:
        counts = lacking & (label >= 0) & (label < vocab_size)
        here = counts & (label >= first_column) & (label < last_column)
        column = tl.where(here, label - first_column, tl.where(counts, elsewhere, empty))
        tl.store(columns + to + width, column.to(tl.int32))
        tl.store(projected + to + width, tl.where(counts, 0.0, float("-inf")))
        hit = tl.where(lacking, width + 1, hit)
    tl.store(label_at + place, tl.where(cut, tl.maximum(hit - 1, 0), 0).to(tl.int64))
    facts += place
    tl.store(facts, cut.to(tl.int32))
    tl.store(facts + count, (active & (cut == 0)).to(tl.int32))
    tl.store(facts + 2 * count, lacking.to(tl.int32))
    tl.store(facts + 3 * count, (active & (tl.sum(wrong, 0) > 0)).to(tl.int32))
    tl.store(facts + 4 * count, (tl.sum(twice, 0) > 0).to(tl.int32))
    tl.store(facts + 5 * count, (active & ((label < 0) | (label >= vocab_size))).to(tl.int32))
