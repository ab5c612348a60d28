"""From prompts and completions, as trainers have them, to one packed row, in which every prompt stands once.

The row is ``[prompt 1 | its completions ... | prompt 2 | ...]``. Positions of a completion go on from its prompt's end.
P prompts of up to Tp tokens, N completions of up to C tokens, T tokens of the row, a multiple of :data:`BLOCK`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Tokens of a block of FlexAttention's masks.
BLOCK = 128
#: Compiled code for one block differs from that for several.
_LEAST_BLOCKS = 2
#: The label of tokens without loss, in transformers and TRL as in PyTorch.
IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class PackedCompletions:
    """A row of prompts and completions, which attend as if each completion stood alone behind its prompt.

    Token ``q`` sees the tokens from ``starts[q]`` to ``q``, and those from ``prompt_starts[q]`` to before
    ``prompt_ends[q]``. Padding at the row's end sees itself.

    Attributes:
        input_ids, position_ids: ``[1, T]`` int64.
        attention_mask: ``[1, T]`` bool, False for the padding at the row's end.
        starts: ``[T]`` int32, where the token's prompt or completion begins. It tells them apart.
        prompt_starts, prompt_ends: ``[T]`` int32, the place of the token's prompt; empty for a prompt's tokens.
        index: ``[N, C]`` int64, where in the row the hidden state is that predicts each completion's token. The first
            tokens of all completions are predicted at their prompt's last token. Arbitrary where there is no label.
        labels: ``[N, C]`` int64, the predicted tokens; -100 for padding, and for the first token behind no prompt.
        tokens: tokens of the row without its padding.
        separate_tokens: tokens of all completions with their prompts, as they are computed without sharing.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    starts: Tensor
    prompt_starts: Tensor
    prompt_ends: Tensor
    index: Tensor
    labels: Tensor
    tokens: int
    separate_tokens: int

    def completion_states(self, hidden_states: Tensor) -> Tensor:
        """The hidden states ``[N, C, H]`` that predict completions' tokens, of those of the row ``[1, T, H]``."""
        if hidden_states.shape[:-1] != self.input_ids.shape:
            raise ValueError(
                f"hidden_states must be those of the packed row, {[*self.input_ids.shape, 'H']}, got "
                f"{list(hidden_states.shape)}."
            )
        return hidden_states[0, self.index.to(hidden_states.device)]


def pack_completions(
    prompts: Tensor | Sequence[Any],
    completions: Tensor | Sequence[Any],
    *,
    prompt_mask: Tensor | None = None,
    completion_mask: Tensor | None = None,
    labels: Tensor | None = None,
    groups: Tensor | Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> PackedCompletions:
    """Pack prompts and their completions into one row without padding, in which each prompt stands once.

    ``loss_inputs(model, pack_completions(prompts, completions))`` are the arguments of a loss over completions.

    Args:
        prompts: ``[P, Tp]`` int64, or lists of token ids of any lengths. Without ``groups``, one for each completion,
            and equal ones are shared. An empty prompt predicts nothing: the completion's first token has no loss.
        completions: ``[N, C]`` int64, or lists of token ids; they may be empty.
        prompt_mask, completion_mask: nonzero for tokens, zero for padding on either side; by default all are tokens.
        labels: ``[N, C]`` int64, instead of the completions' tokens; -100 for tokens without loss.
        groups: ``[N]`` int64, the index of each completion's prompt. ``range(N)`` shares nothing: the call then only
            packs padding away.
        device: of the packed tensors; by default that of ``completions``.

    Returns:
        The packed row. Its ``labels`` and ``index`` have the shape of ``completions``; of lists, C is the longest.

    Raises:
        ValueError: shapes or groups that do not fit.

    The host waits for the device once, for the number of tokens.
    """
    prompts, prompt_mask = _padded("prompts", prompts, prompt_mask, device)
    completions, completion_mask = _padded("completions", completions, completion_mask, device or prompts.device)
    prompts, prompt_mask = prompts.to(completions.device), prompt_mask.to(completions.device)
    count = len(completions)
    if labels is not None and labels.shape != completions.shape:
        raise ValueError(f"labels must be {list(completions.shape)}, as the completions, got {list(labels.shape)}.")
    if groups is None:
        if len(prompts) != count:
            raise ValueError(
                f"there are {len(prompts)} prompts and {count} completions: give groups= [{count}], the index of each "
                "completion's prompt, or one prompt for each completion."
            )
        prompts, prompt_mask, of = _distinct(prompts, prompt_mask)
    else:
        of = torch.as_tensor(groups, dtype=torch.int64)
        if of.shape != (count,) or (count and not 0 <= int(of.min()) <= int(of.max()) < len(prompts)):
            raise ValueError(
                f"groups must be [{count}] indices of {len(prompts)} prompts, one for each completion, got "
                f"{of.tolist() if of.numel() < 20 else list(of.shape)}."
            )
        of = of.to(completions.device)
    return _pack(prompts, prompt_mask, completions, completion_mask, completions if labels is None else labels, of)


def pack_sequences(
    input_ids: Tensor, attention_mask: Tensor, labels: Tensor, *, share: bool = True
) -> PackedCompletions:
    """:func:`pack_completions` of whole sequences: the prompt is what stands before the first label.

    Args:
        input_ids: ``[N, T]`` int64, with padding on either side and between prompt and completion.
        attention_mask: ``[N, T]``, nonzero for tokens.
        labels: ``[N, T]`` int64, not shifted; -100 for prompts, padding and other tokens without loss.
        share: whether equal prompts stand once.

    Returns:
        The packed row, whose ``labels`` and ``index`` are ``[N, T]``: what predicts the token at the same place.
    """
    active, counts = attention_mask != 0, labels != IGNORE_INDEX
    prompt = counts.cumsum(1) == 0
    groups = None if share else range(len(input_ids))
    before, behind = active & prompt, active & ~prompt
    return pack_completions(
        input_ids, input_ids, prompt_mask=before, completion_mask=behind, labels=labels, groups=groups
    )


def _padded(name: str, given: Any, mask: Tensor | None, device: Any) -> tuple[Tensor, Tensor]:
    """Token ids ``[n, t]`` and their mask, of a tensor or of lists."""
    if isinstance(given, Tensor) and given.dim() == 2:
        if given.is_floating_point() or (mask is not None and mask.shape != given.shape):
            found = "floating-point numbers" if given.is_floating_point() else f"a mask {list(mask.shape)}"  # type: ignore[union-attr]
            raise ValueError(f"{name} must be token ids [n, t] with a mask of the same shape, got {found}.")
        given = given if device is None else given.to(device)
        mask = torch.ones_like(given, dtype=torch.bool) if mask is None else mask.to(given.device) != 0
        return given, mask
    if mask is not None or isinstance(given, Tensor):
        raise ValueError(f"{name} must be a tensor [n, t] with or without a mask, or lists of ids without a mask.")
    rows = [torch.as_tensor(row, dtype=torch.int64, device=device) for row in given]
    wrong = next((list(row.shape) for row in rows if row.dim() != 1), None)
    if wrong is not None:
        raise ValueError(f"{name} must be a list with a list of token ids for each, got one of shape {wrong}.")
    if not rows:
        empty = torch.zeros(0, 0, dtype=torch.int64, device=device)
        return empty, empty.bool()
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    return ids, torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def _distinct(prompts: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The prompts, with a mask of those that differ from all before them, and which of these is each completion's.

    Rows are compared by a random sum of their ids first, and by their ids where that is equal. Nothing waits.
    """
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)  # tokens first, wherever the padding is
    ids = prompts.gather(1, order).masked_fill(~mask.gather(1, order), -1)
    generator, numbers = torch.Generator(ids.device).manual_seed(0), torch.arange(len(ids), device=ids.device)
    factors = torch.randint(-(2**62), 2**62, ids.shape[1:], generator=generator, device=ids.device)
    sums = (ids * factors).sum(1)
    first = torch.where(sums[:, None] == sums, numbers, len(ids)).amin(1) if len(ids) else numbers
    of = first.where((ids[first] == ids).all(1), numbers)
    return prompts, mask & (of == numbers)[:, None], of


def _pack(
    prompts: Tensor, prompt_mask: Tensor, completions: Tensor, completion_mask: Tensor, labels: Tensor, of: Tensor
) -> PackedCompletions:
    device = completions.device
    prompt_lengths, lengths = prompt_mask.sum(1), completion_mask.sum(1)
    separate = lengths.sum() + prompt_lengths[of].sum()
    tokens, separate_tokens = torch.stack([lengths.sum() + prompt_lengths.sum(), separate]).tolist()
    size = max(-(-tokens // BLOCK), _LEAST_BLOCKS) * BLOCK
    # Each prompt stands before its completions, which stand in the batch's order.
    order = of.argsort(stable=True)
    before = torch.empty_like(lengths)
    before[order] = lengths[order].cumsum(0) - lengths[order]
    starts = before + prompt_lengths.cumsum(0)[of]
    sums = prompt_lengths + lengths.new_zeros(len(prompts)).index_add(0, of, lengths)
    prompt_starts = sums.cumsum(0) - sums
    within, prompt_within = (mask.cumsum(1) - 1 for mask in (completion_mask, prompt_mask))
    behind, first = prompt_lengths[of, None], starts[:, None]
    place = (first + within).where(completion_mask, size).flatten()  # padding goes to a place behind the row
    prompt_place = (prompt_starts[:, None] + prompt_within).where(prompt_mask, size).flatten()

    def row(empty: Tensor, of_prompts: Tensor, of_completions: Tensor) -> Tensor:
        out = torch.cat([empty, empty[:1]])
        out = out.scatter(0, prompt_place, of_prompts.expand(prompt_mask.shape).flatten().to(out.dtype))
        return out.scatter(0, place, of_completions.expand(completion_mask.shape).flatten().to(out.dtype))[:size]

    zeros, places = (make(size, dtype=torch.int32, device=device) for make in (torch.zeros, torch.arange))
    begins, stops = prompt_starts[of, None], (prompt_starts + prompt_lengths)[of, None]
    none = torch.zeros_like(prompt_starts[:, None])
    index = torch.where(within == 0, stops - 1, first + within - 1)
    counts = completion_mask & ((within > 0) | (behind > 0))
    # Backward adds the gradients of an index that occurs often one after another.
    anywhere = torch.arange(index.numel(), device=device).view_as(index) % size
    return PackedCompletions(
        input_ids=row(zeros.long(), prompts, completions)[None],
        position_ids=row(zeros.long(), prompt_within, behind + within)[None],
        attention_mask=(places < tokens)[None],
        starts=row(places, prompt_starts[:, None], first),
        prompt_starts=row(zeros, none, begins),
        prompt_ends=row(zeros, none, stops),
        index=index.where(counts, anywhere),
        labels=labels.to(device).where(counts, IGNORE_INDEX),
        tokens=tokens,
        separate_tokens=separate_tokens,
    )
