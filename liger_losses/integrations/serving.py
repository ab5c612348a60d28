"""What vLLM and SGLang return about each token, as this library's losses take it. Imports neither of them.

B completions of up to T tokens, K kept columns, k most likely columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from liger_losses.chunked import TeacherTopK, TokenSupport


def token_support(
    kept: Sequence[Sequence[Sequence[int] | None]],
    length: int | None = None,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> TokenSupport:
    """The columns that a sampler kept for each token, as a :class:`TokenSupport` for labels ``[B, T]``.

    Args:
        kept: for each completion, for each of its tokens, the ids of the kept entries; none, or ``None``, for a token
            without a cut. For vLLM (``return_sampling_mask=True``), pass ``output.sampling_mask.token_ids`` of each
            output. For SGLang (the same option in the request), pass
            ``output["meta_info"]["output_token_sampling_mask"]``.
        length: T; by default the length of the longest completion. Shorter ones are padded on the right.
        device: where the head is.
        options: ``add_label``, ``sparse_grad`` of :class:`TokenSupport`.

    Raises:
        TypeError, ValueError: one completion's lists instead of a list of them; a completion longer than ``length``.
    """
    length = _length(kept, length)
    rows = [[list(ids or ()) for ids in _completion(tokens)] for tokens in kept]
    widest = max((len(ids) for tokens in rows for ids in tokens), default=0)
    padded = torch.full((len(rows), length, widest), -1, dtype=torch.int64)
    for found, tokens in zip(padded, rows, strict=True):
        for row, ids in zip(found, tokens, strict=False):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return TokenSupport(padded.to(device), **options)


def teacher_topk(
    logprobs: Sequence[Sequence[Any]],
    k: int,
    length: int | None = None,
    *,
    device: torch.device | str | None = None,
    tail: str = "bucket",
) -> TeacherTopK:
    """The log-probabilities of each token's k most likely columns, as a :class:`TeacherTopK` for labels ``[B, T]``.

    Request at least k log-probabilities from the engine. Others, such as the sampled token, are left out. The
    log-probabilities must be over the whole vocabulary, and at the temperature of the distillation. vLLM's are at
    temperature 1. With ``logprobs_mode="processed_logprobs"``, they are at the sampler's temperature, but only over the
    tokens that top-k and top-p kept.

    Args:
        logprobs: for each completion, for each of its tokens, a mapping from ids to log-probabilities, or to objects
            with the attribute ``logprob`` (vLLM), or a list of ``(log-probability, id, text)`` (SGLang). ``None`` for a
            token that was not scored, such as the first of a prompt; label it -100, because the loss is NaN otherwise.
            For vLLM, pass ``output.logprobs`` of each output, or ``request.prompt_logprobs`` if the teacher scores the
            student's text. For SGLang, pass ``output["meta_info"]["output_top_logprobs"]``, or ``input_top_logprobs``.
        k: the number of tokens per position; positions with fewer raise an error.
        length, device: as in :func:`token_support`.
        tail: of :class:`TeacherTopK`.

    Raises:
        TypeError, ValueError: as in :func:`token_support`; fewer than k log-probabilities of a token.
    """
    length = _length(logprobs, length)
    if k < 1:
        raise ValueError(f"k must be positive, got {k}.")
    values = torch.full((len(logprobs), length, k), torch.nan, dtype=torch.float32)
    indices = torch.arange(k).repeat(len(logprobs), length, 1)
    for number, tokens in enumerate(logprobs):
        for position, entry in enumerate(_completion(tokens)):
            if entry is None:
                continue
            best = sorted(_pairs(entry), reverse=True)[:k]
            if len(best) < k:
                raise ValueError(
                    f"token {position} of completion {number} has {len(best)} log-probabilities, fewer than k={k}: "
                    "ask vLLM for logprobs=k or prompt_logprobs=k, SGLang for top_logprobs_num=k."
                )
            values[number, position] = torch.tensor([logp for logp, _ in best], dtype=torch.float32)
            indices[number, position] = torch.tensor([column for _, column in best])
    return TeacherTopK(values.to(device), indices.to(device), tail)


def _pairs(entry: Any) -> list[tuple[float, int]]:
    """(Log-probability, column) of a token's entry."""
    if not isinstance(entry, Mapping):
        return [(float(logp), int(column)) for logp, column, *_ in entry]
    values = {int(column): value["logprob"] if isinstance(value, Mapping) else value for column, value in entry.items()}
    return [(float(getattr(value, "logprob", value)), column) for column, value in values.items()]


def _completion(tokens: Any) -> Sequence[Any]:
    if isinstance(tokens, (str, Mapping)) or not hasattr(tokens, "__len__"):
        raise TypeError(f"expected a list for each completion, with an entry for each token, got {type(tokens)}.")
    if len(tokens) and isinstance(tokens[0], (int, float)):
        raise TypeError("expected a list of completions, got one completion: wrap it in a list.")
    return tokens


def _length(completions: Sequence[Sequence[Any]], length: int | None) -> int:
    longest = max((len(_completion(tokens)) for tokens in completions), default=0)
    if length is not None and longest > length:
        raise ValueError(f"a completion has {longest} tokens, more than length={length}.")
    return longest if length is None else length
