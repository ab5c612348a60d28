"""Completions and their log-probabilities, of the policy and of a reference: what preference losses share.

B completions, T tokens of the longest. Sequence log-probabilities are sums over the completion's tokens; one without
tokens has log-probability 0 (an empty product), whether summed or averaged, in every loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine import Statistics, linear_statistics
from liger_losses.chunked.engine.checks import check_head, check_range, check_tensor
from liger_losses.chunked.losses.base import ChunkedLoss


@dataclass(frozen=True)
class Completions:
    """A batch of completions: one side of pairs, say.

    Args:
        hidden_states: ``[B, T, H]``, or ``[T, H]`` for a single completion.
        labels: ``[B, T]`` or ``[T]``; prompts and padding carry ``ignore_index``.
        ref_hidden_states: the reference model's hidden states, in the shape of ``hidden_states``.
        ref_logps: the reference model's log-probabilities instead, precomputed: per sequence ``[B]`` (summed,
            averaged or weighted as the loss does it), or per token in the shape of ``labels``, where its labels are
            after any shift.
    """

    hidden_states: Tensor
    labels: Tensor
    ref_hidden_states: Tensor | None = None
    ref_logps: Tensor | None = None

    def batched(self) -> Completions:
        """This, with a batch dimension."""
        ref_hidden, ref_logps = self.ref_hidden_states, self.ref_logps
        check_tensor("hidden_states", self.hidden_states)
        check_tensor("labels", self.labels)
        for name, value in (("ref_hidden_states", ref_hidden), ("ref_logps", ref_logps)):
            if value is not None:
                check_tensor(name, value)
        if self.labels.dim() != 1:
            return self
        return Completions(
            self.hidden_states[None],
            self.labels[None],
            None if ref_hidden is None else ref_hidden[None],
            ref_logps if ref_logps is None or ref_logps.shape == (1,) else ref_logps[None],
        )


def as_completions(value: Any, which: str) -> Completions:
    """``Completions``, or a ``(hidden_states, labels)`` tuple, with a batch dimension."""
    if isinstance(value, Completions):
        return value.batched()
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return Completions(*value).batched()
    raise TypeError(
        f"{which} must be Completions(hidden_states, labels, ...) or a (hidden_states, labels) tuple, "
        f"got {type(value).__name__}."
    )


def wide_dtype(device: torch.device) -> torch.dtype:
    """fp64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def sequence_logps(logps: Tensor, mask: Tensor, *, average: bool = False, weights: Tensor | None = None) -> Tensor:
    """``sum_t w_t logp_t``, or ``sum_t w_t logp_t / sum_t mask_t``; 0 for a sequence without tokens.

    Args:
        logps: ``[B, T]``.
        mask: ``[B, T]`` bool, true for tokens that count.
        average: divide by their number.
        weights: ``[B, T]``.

    Returns:
        ``[B]`` in fp64: a preference is a small difference of sums that grow with the length, and at 64k tokens fp32
        would leave it two digits. (Devices without fp64: fp32.)
    """
    # What stands at tokens that do not count may be anything, infinities too.
    logps = torch.where(mask, logps, 0.0)
    total = (logps if weights is None else logps * weights).sum(-1, dtype=wide_dtype(logps.device))
    return total / mask.sum(-1).clamp(min=1) if average else total


class CompletionLoss(ChunkedLoss):
    """Base of losses on the log-probabilities of whole completions.

    Args:
        ignore_index: the label of tokens that carry no loss.
        beta: temperature of the implicit reward (dimensionless, > 0).
        average_log_prob: divide each completion's log-probability by its length.
        use_ref_model: whether the loss compares with a reference model.
        chunk_size: at most so many pairs' or completions' logits in a block of the forward pass, where more would fit.
        compiled: accepted from code written for Liger; there is nothing to compile.
        options: as in :class:`liger_losses.chunked.losses.base.ChunkedLoss`.

    Raises:
        TypeError, ValueError: an option of the wrong kind or out of its range.
    """

    def __init__(
        self,
        *,
        ignore_index: int,
        beta: float,
        average_log_prob: bool,
        use_ref_model: bool,
        chunk_size: int | None,
        compiled: bool,
        **options: Any,
    ) -> None:
        super().__init__(ignore_index=ignore_index, **options)
        check_range("beta", beta, 0.0, math.inf, open_low=True)
        if chunk_size is not None and (
            isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1
        ):
            raise ValueError(f"chunk_size must be a positive number of pairs or completions, got {chunk_size!r}.")
        self.beta = beta
        self.average_log_prob = average_log_prob
        self.use_ref_model = use_ref_model
        self.chunk_size = chunk_size
        self.compiled = compiled

    @property
    def rows_of_a_chunk(self) -> int:
        """How many completions :attr:`chunk_size` counts as one."""
        return 1

    def check_reference(
        self,
        sides: Sequence[tuple[str, Tensor, Tensor | None]],
        ref_hidden_states: Sequence[Tensor] | None,
        labels: Sequence[Tensor],
        ref_weight: Tensor | None,
        ref_bias: Tensor | None,
    ) -> None:
        """Raise ValueError unless there is one reference where the loss needs one, and none where it does not.

        Args:
            sides: what to call some completions, their labels ``[B, T]``, and their precomputed log-probabilities.
            ref_hidden_states: ``[B, T, H]``, one for each of ``labels``, or ``None``.
        """
        name = type(self).__name__
        has_hidden = ref_hidden_states is not None
        for which, side_labels, logps in sides:
            if self.use_ref_model and not has_hidden and logps is None:
                raise ValueError(
                    f"{name} compares with a reference model, but the {which} completions have none. Give ref_logps "
                    "(precomputed), or ref_hidden_states (ref_input= in the stacked form) and ref_weight=, or build "
                    "the loss with use_ref_model=False."
                )
            if has_hidden and logps is not None:
                raise ValueError(f"the {which} completions have both ref_hidden_states and ref_logps; give one.")
            if not self.use_ref_model and (has_hidden or logps is not None):
                raise ValueError(f"a reference was given to {name}, which was built without one (use_ref_model=False).")
            if logps is not None and logps.shape not in (side_labels.shape[:1], side_labels.shape):
                raise ValueError(
                    f"ref_logps of the {which} completions must be [{side_labels.shape[0]}] (one per sequence) or "
                    f"{tuple(side_labels.shape)} (one per token), got {tuple(logps.shape)}."
                )
            if logps is not None and logps.device != side_labels.device:
                raise ValueError(
                    f"ref_logps of the {which} completions are on {logps.device}, their labels on {side_labels.device}."
                )
        if ref_hidden_states is None:
            return
        if ref_weight is None:
            raise ValueError(
                "there are ref_hidden_states, but no ref_weight= to project them; pass the policy's weight there if "
                "the reference model shares it."
            )
        for ref, part in zip(ref_hidden_states, labels, strict=True):
            if ref.shape[:-1] != part.shape:
                raise ValueError(
                    f"the reference's hidden states must be [{part.shape[0]}, {part.shape[1]}, hidden_size], one "
                    f"for each label, got {tuple(ref.shape)}."
                )
        try:
            check_head(ref_hidden_states, ref_weight, labels, ref_bias)
        except (TypeError, ValueError) as error:
            raise type(error)(f"of the reference model (ref_hidden_states, ref_weight, ref_bias): {error}") from None

    def sequence_statistics(
        self,
        weight: Tensor,
        bias: Tensor | None,
        hidden: Sequence[Tensor],
        labels: Sequence[Tensor],
        metrics: Sequence[str] = (),
    ) -> list[Statistics]:
        """Per-token log-probabilities, differentiable, and metrics, of each tensor of completions."""
        options = self.options
        if self.chunk_size is not None:
            rows = self.rows_of_a_chunk if len(labels) == 1 else 1
            tokens = sum(part.shape[1] for part in labels) * rows
            options = replace(options, chunk_size=max(1, self.chunk_size * tokens))
        found: list[Statistics] = linear_statistics(
            hidden, weight, labels, ("logp",), metrics=metrics, bias=bias, transform=self.transform, options=options
        )
        return found
