"""Log-probabilities of completions under the policy and a reference model: shared by DPO-, KTO- and GRPO-like losses.

B completions, T tokens of the longest. A completion without tokens has log-probability 0, summed or averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine import EngineOptions, Head, Statistics, Tokens, linear_statistics
from liger_losses.chunked.engine.checks import check_device, check_tensor
from liger_losses.chunked.losses.base import ChunkedLoss


@dataclass(frozen=True)
class Completions:
    """A batch of completions: one side of pairs, for example.

    Args:
        hidden_states: ``[B, T, H]``, or ``[T, H]`` for a single completion.
        labels: ``[B, T]`` or ``[T]``; prompts and padding carry ``ignore_index``.
        ref_hidden_states: the reference model's hidden states, in the shape of ``hidden_states``.
        ref_logps: or the reference model's precomputed log-probabilities: per sequence ``[B]`` (summed, averaged or
            weighted as the loss does it), or per token in the shape of ``labels``, at the position of the label that
            is predicted (after any shift).
    """

    hidden_states: Tensor
    labels: Tensor
    ref_hidden_states: Tensor | None = None
    ref_logps: Tensor | None = None

    def batched(self) -> Completions:
        """The same with a batch dimension; a single completion becomes a batch of one."""
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


@dataclass(frozen=True)
class CompletionBatch:
    """All completions of one call, whichever form it had.

    Args:
        names: what error messages call each group: ``("chosen", "rejected")``, for example.
        head: the policy's.
        hidden_states, labels: one ``[B, T, H]`` and ``[B, T]`` per group; or a single tensor of each that holds two
            groups of ``B / 2`` rows. Such stacked rows are never copied, nor are their gradients.
        ref_hidden_states: the reference model's, one per tensor of labels, or ``None``.
        ref_logps: precomputed log-probabilities of the reference, ``[B]`` or ``[B, T]``, one or ``None`` per group.
        ref_head: the reference model's.
    """

    names: tuple[str, ...]
    head: Head
    hidden_states: list[Tensor]
    labels: list[Tensor]
    ref_hidden_states: list[Tensor] | None
    ref_logps: tuple[Tensor | None, ...]
    ref_head: Head | None = None

    def groups(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One tensor per group, from one per tensor of labels."""
        if len(tensors) == len(self.names):
            return list(tensors)
        half = tensors[0].shape[0] // 2
        return [tensors[0][:half], tensors[0][half:]]

    def group_statistics(self, found: Sequence[Statistics]) -> list[Statistics]:
        """The same for the engine's statistics."""
        names = [name for name in Statistics._fields if getattr(found[0], name) is not None]
        groups = {name: self.groups([getattr(part, name) for part in found]) for name in names}
        return [Statistics(**{name: groups[name][i] for name in names}) for i in range(len(self.names))]

    def select(self, options: EngineOptions, extra: Sequence[Tensor] = ()) -> Tokens:
        """The active tokens of all labels (and of ``extra`` ones), for policy and reference alike."""
        labels = [*self.labels, *extra]
        for part in labels:
            check_device(self.head.weight, labels=part)
        size = self.head.vocab_size if self.ref_head is None else min(self.head.vocab_size, self.ref_head.vocab_size)
        return Tokens.select(labels, vocab_size=size, ignore_index=options.ignore_index, compact=options.compact)

    @torch.no_grad()
    def reference_logps(self, tokens: Tokens, options: EngineOptions) -> list[Tensor | None]:
        """Each group's log-probabilities under the reference, ``[B]`` or ``[B, T]``; ``None`` without one."""
        if self.ref_hidden_states is None or self.ref_head is None:
            return [None if logps is None else logps.detach() for logps in self.ref_logps]
        with naming_the_reference():
            tokens = tokens.first(len(self.labels))
            found = linear_statistics(self.ref_hidden_states, self.ref_head, tokens, options=options)
        return list(self.groups([part.logp for part in found]))


@dataclass(frozen=True)
class Scored:
    """One group of completions with its log-probabilities.

    Args:
        statistics: the policy's, ``[B, T]``, 0 for tokens without loss.
        mask: ``[B, T]`` bool, true for tokens that carry loss.
        logps: ``[B]``, of each completion under the policy.
        ref_logps: ``[B]``, under the reference; 0 without one.
    """

    statistics: Statistics
    mask: Tensor
    logps: Tensor
    ref_logps: Tensor


@contextmanager
def naming_the_reference() -> Iterator[None]:
    """Errors raised inside say that they are about the reference model."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"of the reference model (its hidden states, weight and bias): {error}") from None


def wide_dtype(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def sequence_logps(logps: Tensor, mask: Tensor, *, average: bool = False, weights: Tensor | None = None) -> Tensor:
    """``sum_t w_t logp_t``, or ``sum_t w_t logp_t / sum_t mask_t``; 0 for a sequence without tokens.

    Args:
        logps: ``[B, T]``; values where the mask is false never matter.
        mask: ``[B, T]`` bool, true for tokens that count.
        average: divide by their number.
        weights: ``[B, T]``, the ``w_t``; 1 by default.

    Returns:
        ``[B]`` in fp64: a preference is a small difference of sums that grow with the length, and at 64k tokens fp32
        would leave it two digits. (Devices without fp64: fp32.)
    """
    logps = torch.where(mask, logps, 0.0)
    total = (logps if weights is None else logps * weights).sum(-1, dtype=wide_dtype(logps.device))
    return total / mask.sum(-1).clamp(min=1) if average else total


class CompletionLoss(ChunkedLoss):
    """Base of losses on completions that may be compared with a reference model. Subclasses assign these attributes.

    Args:
        ignore_index: label of tokens that carry no loss.
        beta: weight of the reference: temperature of the implicit reward, or weight of the KL divergence.
        average_log_prob: divide each completion's log-probability by its length.
        use_ref_model: whether the loss compares with a reference model.
        chunk_size, compiled: accepted for code written for liger-kernel, and without effect: ``workspace=`` bounds
            memory, and there is nothing to compile.
        options: as in :class:`liger_losses.ChunkedLoss`.
    """

    chunks_are_tokens = False
    beta: float
    average_log_prob: bool | None = False
    use_ref_model: bool
    compiled: bool

    def check_options(self) -> None:
        super().check_options()
        EngineOptions(chunk_size=self.chunk_size)

    @property
    def averages(self) -> bool:
        """Whether a completion's log-probability is divided by its length."""
        return bool(self.average_log_prob)

    @property
    def needs_reference(self) -> str | None:
        """Why a call needs a reference, for the error message; ``None`` if it does not."""
        return f"{type(self).__name__} compares with a reference model" if self.use_ref_model else None

    def prepare(
        self, batch: CompletionBatch, ref_weight: Tensor | nn.Module | Head | None, ref_bias: Tensor | None
    ) -> CompletionBatch:
        """The batch with the reference's head, and with labels as the engine takes them.

        Raises:
            TypeError, ValueError: a reference is missing, is given twice, is not used, or does not fit.
        """
        if batch.ref_hidden_states is not None and ref_weight is not None:
            with naming_the_reference():
                batch = replace(batch, ref_head=Head.of(ref_weight, ref_bias, self.transform))
        batch = replace(batch, labels=[self.labels(part) for part in batch.labels])
        check_reference(batch, type(self).__name__, self.use_ref_model, self.needs_reference)
        return batch

    def token_weights(self, masks: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Weights ``[B, T]`` of each group's tokens in the completion's log-probability; ``None`` for 1."""
        return [None] * len(masks)

    def score(
        self, batch: CompletionBatch, extra: Completions | None = None, *, metrics: Sequence[str] = ()
    ) -> tuple[list[Scored], Statistics | None]:
        """Log-probabilities of a prepared batch under policy and reference.

        The active tokens are selected once. The reference comes first, while no logits of the policy are held.

        Args:
            extra: further completions, of which only the policy's statistics are computed.
            metrics: the policy's statistics to return besides log-probabilities.

        Returns:
            Each group's log-probabilities, and the statistics of ``extra``.
        """
        others, options = [] if extra is None else [extra], self.options
        tokens = batch.select(options, [other.labels for other in others])
        reference = batch.reference_logps(tokens, options)
        hidden = [*batch.hidden_states, *(other.hidden_states for other in others)]
        found = linear_statistics(hidden, batch.head, tokens, metrics=metrics, options=options)
        masks = batch.groups([part != self.ignore_index for part in batch.labels])
        weights = self.token_weights(masks)
        groups = [
            Scored(part, mask, self._of_sequences(part.logp, mask, weight), self._of_sequences(ref_logps, mask, weight))
            for part, mask, weight, ref_logps in zip(
                batch.group_statistics(found[: len(batch.labels)]), masks, weights, reference, strict=True
            )
        ]
        return groups, found[-1] if others else None

    def _of_sequences(self, logps: Tensor | None, mask: Tensor, weights: Tensor | None) -> Tensor:
        if logps is None:
            return torch.zeros(mask.shape[0], dtype=wide_dtype(mask.device), device=mask.device)
        if logps.dim() != 2:
            return logps
        return sequence_logps(logps, mask, average=self.averages, weights=weights)


def check_reference(batch: CompletionBatch, name: str, used: bool, needed: str | None) -> None:
    """Raise ValueError unless there is one reference that fits where it is needed, and none where it is not used.

    Args:
        name: of the loss.
        used: whether the loss has a reference model.
        needed: why it needs one in this call, or ``None``.
    """
    has_hidden = batch.ref_hidden_states is not None
    for which, labels, logps in zip(batch.names, batch.groups(batch.labels), batch.ref_logps, strict=True):
        if needed and not has_hidden and logps is None:
            raise ValueError(
                f"{needed}, but the {which} completions have none. Give its log-probabilities (ref_logps, "
                "ref_per_token_logps), or its hidden states (ref_hidden_states, ref_input=) and ref_weight=, or build "
                "the loss with use_ref_model=False."
            )
        if has_hidden and logps is not None:
            raise ValueError(f"the {which} completions have both ref_hidden_states and ref_logps; give one.")
        if not used and (has_hidden or logps is not None):
            raise ValueError(f"a reference was given to {name}, which was built without one (use_ref_model=False).")
        if logps is None:
            continue
        check_tensor(f"ref_logps of the {which} completions", logps)
        if logps.shape not in (labels.shape[:1], labels.shape):
            raise ValueError(
                f"ref_logps of the {which} completions must be [{labels.shape[0]}] (one per sequence) or "
                f"{tuple(labels.shape)} (one per token), got {tuple(logps.shape)}."
            )
        if logps.device != labels.device:
            raise ValueError(
                f"ref_logps of the {which} completions are on {logps.device}, their labels on {labels.device}."
            )
    if batch.ref_hidden_states is None:
        return
    if batch.ref_head is None:
        raise ValueError(
            "there are hidden states of a reference, but no ref_weight= to project them; pass the policy's weight "
            "there if the reference model shares it."
        )
    for ref, part in zip(batch.ref_hidden_states, batch.labels, strict=True):
        check_tensor("the reference's hidden states", ref)
        if ref.shape[:-1] != part.shape:
            raise ValueError(
                f"the reference's hidden states must be [{part.shape[0]}, {part.shape[1]}, hidden_size], one "
                f"for each label, got {tuple(ref.shape)}."
            )
