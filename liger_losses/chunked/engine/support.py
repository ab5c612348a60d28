"""Kept columns: log-probabilities over the columns that a sampler's cut of the vocabulary has kept for each token.

T tokens, N of them active with kept columns, H hidden size, V vocabulary size, K kept columns of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import EngineOptions, Statistics
from liger_losses.chunked.engine.checks import check_inputs, check_tensor
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.tokens import Tokens, check_temperature, shift_labels
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels.support_logps import SupportOptions, TokenColumns, support_statistics
from liger_losses.kernels.tracing import record, state

#: What can be asked about kept columns.
SUPPORT_STATISTICS = ("logp", "entropy", "lse")
_INTEGERS = (torch.int32, torch.int64)


@record
@dataclass(frozen=True, eq=False)
class TokenSupport:
    """The columns of the vocabulary that a sampler kept for each token (by top-k, top-p, min-p ...), its support.

    Tokens without any have no cut, and are scored over the whole vocabulary. What tokens without loss have does not
    matter. Only the rows of the ``lm_head`` that are kept are read: time and memory grow with their number, not with
    the vocabulary. With very many of them, scoring the whole vocabulary takes less time.

    Args:
        ids: int64 or int32 columns, the ``S_t`` of token t: ``[..., K]``, one row for each label (with ``shift`` too),
            padded with -1 at any place; or ``[P]`` with ``offsets``.
        offsets: ``[T + 1]`` int64 or int32: in the order of the flattened labels, token t has
            ``ids[offsets[t]:offsets[t + 1]]``.
        add_label: add a token's label to its columns where they lack it; otherwise this is an error.

    Raises:
        TypeError, ValueError: not integer tensors, or of other shapes.
    """

    ids: Tensor
    offsets: Tensor | None = None
    add_label: bool = False

    def __post_init__(self) -> None:
        given = {"ids": self.ids} if self.offsets is None else {"ids": self.ids, "offsets": self.offsets}
        for name, value in given.items():
            check_tensor(f"TokenSupport's {name}", value)
            if value.dtype not in _INTEGERS:
                raise TypeError(f"TokenSupport's {name} must be int64 or int32, got {value.dtype}.")
        if self.offsets is not None and (self.ids.dim() != 1 or self.offsets.dim() != 1):
            raise ValueError(
                f"TokenSupport(ids, offsets) takes ids [P] and offsets [tokens + 1], got {list(self.ids.shape)} and "
                f"{list(self.offsets.shape)}; leave offsets out for padded ids [..., K]."
            )

    def check(self, labels: Tensor, weight: Tensor) -> None:
        """Raise ValueError unless there is a row for each label, on the weight's device."""
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


def linear_support_statistics(
    hidden_states: Tensor,
    head: Head,
    labels: Tensor,
    support: TokenSupport,
    names: tuple[str, ...],
    options: EngineOptions,
    *,
    whole: Callable[..., Statistics],
    shift: bool = False,
) -> Statistics:
    """Per-token statistics over the kept columns, differentiable.

    Args:
        hidden_states: ``[..., H]``.
        head: of the whole vocabulary.
        labels: ``[...]`` int64, not yet shifted.
        support: the kept columns.
        names: of :data:`SUPPORT_STATISTICS`.
        options: how to stream the tokens without a cut.
        whole: :func:`liger_losses.linear_statistics`, for these tokens.
        shift: position ``t`` predicts the label at ``t + 1``.

    Returns:
        :class:`Statistics` in the labels' shape, fp32 or fp64; 0 for tokens without loss.

    Raises:
        TypeError, ValueError: inputs that do not fit together; columns out of range, twice, or without the label; a
            head that ranks share; ``compact=False``.
    """
    if not isinstance(support, TokenSupport):
        raise TypeError(f"support must be a TokenSupport(ids), got {type(support).__name__}.")
    if head.shard is not None:
        raise ValueError(
            "support= takes a head that is whole, not one whose rows several ranks share; gather the weight, or leave "
            "support out."
        )
    if not options.compact:
        raise ValueError("support= finds on the host which tokens have kept columns; leave compact at True.")
    compute_dtype = check_inputs([hidden_states], head.weight, head.bias, [labels])
    support.check(labels, head.weight)
    if isinstance(head.transform.temperature, Tensor):
        check_temperature(head.transform.temperature, head.weight.device, [labels.shape])
    wide = torch.promote_types(torch.float32, compute_dtype)
    if state.shapes_only:
        return Statistics(**{name: hidden_states.new_empty(labels.shape, dtype=wide) for name in names})
    counts, ignored = _counts(support), options.ignore_index
    cut = (counts > 0).view(labels.shape)
    if shift:
        labels, cut = shift_labels(labels, ignored), shift_labels(cut, 0)
    tokens = Tokens.select([labels.masked_fill(~cut, ignored)], head.vocab_size, ignored)
    uncut = (labels != ignored) & ~cut
    columns, uncut_tokens = _columns(support, counts, tokens, shift, head.vocab_size, uncut.sum())
    others = None
    if uncut_tokens:
        # The backward of a compiled function repeats this call: it takes nothing from what other calls have recorded.
        before = state.recorded, state.known
        state.recorded = state.known = None
        try:
            others = whole(hidden_states, head, labels.masked_fill(cut, ignored), names, options=options)
        finally:
            state.recorded, state.known = before
        if not tokens.count:
            return others
    hidden, index = hidden_states.reshape(-1, hidden_states.shape[-1]), tokens.indices[0]
    if index is not None:
        hidden = hidden.index_select(0, index)
    transform = head.transform
    if isinstance(transform.temperature, Tensor):
        transform = replace(transform, temperature=tokens.temperatures(transform.temperature, wide))
    backend = choose_backend(options.backend, [(head.weight.device, wide)], dtypes=LOGIT_DTYPES)
    found = support_statistics(hidden, head.weight, head.bias, columns, SupportOptions(transform, backend))
    values = dict(zip(SUPPORT_STATISTICS, found, strict=True))
    if index is not None:
        values = {n: value.new_zeros(labels.numel()).index_copy(0, index, value) for n, value in values.items()}
    values = {name: values[name].view(labels.shape) for name in names}
    if others is not None:
        values = {name: value + getattr(others, name) for name, value in values.items()}
    return Statistics(**values)


def _counts(support: TokenSupport) -> Tensor:
    """``[T]``: how many columns each token has."""
    if support.offsets is not None:
        return support.offsets.diff()
    return (support.ids != -1).sum(-1).flatten()


def _columns(
    support: TokenSupport,
    counts: Tensor,
    tokens: Tokens,
    shift: bool,
    vocab_size: int,
    uncut: Tensor,
) -> tuple[TokenColumns, int]:
    """The columns of the active tokens, checked, and the number ``uncut``, which the same synchronization reads."""
    (index,) = tokens.indices
    rows = torch.arange(tokens.count, device=counts.device) if index is None else index
    rows = rows + 1 if shift else rows  # a label's columns move with it
    labels = tokens.labels
    if support.offsets is None:
        width = support.ids.shape[-1]
        ids = support.ids.reshape(-1, width)[rows].flatten()
        offsets = torch.arange(tokens.count + 1, device=ids.device) * width
        longest = width
    else:
        edges, lengths = support.offsets, counts[rows]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).long()
        least = counts.amin() if len(counts) else edges[0]
        most = lengths.amax() if len(lengths) else edges[0]
        numbers = [offsets[-1], most.long(), least.long(), edges[0].long(), edges[-1].long()]
        total, longest, shortest, first, last = torch.stack(numbers).tolist()
        if first != 0 or last != len(support.ids) or shortest < 0:
            raise ValueError(
                f"TokenSupport's offsets must rise from 0 to {len(support.ids)}, the number of ids; they go from "
                f"{first} to {last}, by {shortest} or more."
            )
        starts = support.offsets[:-1][rows] - offsets[:-1]
        at = torch.arange(total, device=offsets.device)
        ids = support.ids[at + starts.repeat_interleave(lengths, output_size=total)]
    found = TokenColumns(ids.int(), offsets, labels, vocab_size, longest)
    if not tokens.count:
        return found, int(uncut)
    missing = _without_label(found)
    if support.add_label:
        found = _with_labels(found, missing)
    ordered, order = found.sorted
    owners = found.owners[order]
    twice = (ordered[1:] == ordered[:-1]) & (owners[1:] == owners[:-1]) & (ordered[1:] < vocab_size)
    lowest, highest = ids.aminmax()
    allowed = -1 if support.offsets is None else 0
    facts = torch.stack([uncut, missing.sum(), twice.sum(), lowest.long(), highest.long()])
    number, without, duplicates, low, high = facts.tolist()
    if low < allowed or high >= vocab_size:
        padding = ", or -1 for padding" if support.offsets is None else ""
        raise ValueError(
            f"TokenSupport's ids must be in [0, {vocab_size}), the rows of the weight{padding}; found ids from {low} "
            f"to {high}."
        )
    if duplicates:
        pair = int(twice.nonzero()[0])
        raise ValueError(
            f"TokenSupport has ids twice: token {int(rows[owners[pair]])} of the flattened labels has "
            f"{int(ordered[pair])} more than once ({duplicates} in all); give each once, and pad with -1."
        )
    if without and not support.add_label:
        token = int(missing.nonzero()[0])
        raise ValueError(
            f"the label of {without} tokens is not among their kept columns, so that its probability is 0 (the first: "
            f"label {int(labels[token])} of token {int(rows[token])} of the flattened labels). Check that ids and "
            "labels are those of the same tokens; or add labels to the kept columns: TokenSupport(..., add_label=True)."
        )
    return found, number


def _without_label(columns: TokenColumns) -> Tensor:
    """``[N]`` bool: tokens whose columns lack their label."""
    found, owners = columns.columns == columns.labels[columns.owners], columns.owners.long()
    present = torch.zeros(len(columns.labels) + 1, dtype=torch.bool, device=found.device)
    return ~present.scatter_(0, torch.where(found, owners, len(columns.labels)), True)[:-1]


def _with_labels(columns: TokenColumns, missing: Tensor) -> TokenColumns:
    """One more pair for each token: its label where it is missing."""
    tokens = torch.arange(len(missing) + 1, device=missing.device)
    pairs = torch.arange(len(columns.columns), device=missing.device)
    wider = columns.columns.new_empty(len(columns.columns) + len(missing))
    wider[pairs + columns.owners] = columns.columns
    wider[columns.offsets[1:] + tokens[:-1]] = torch.where(missing, columns.labels, -1).to(wider.dtype)
    # With dataclasses.replace, nothing that was derived from the old columns stays.
    return replace(columns, columns=wider, offsets=columns.offsets + tokens, longest=columns.longest + 1)
