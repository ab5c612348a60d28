"""Base of losses on completions: their log-probabilities under policy and reference.

B completions, T tokens of the longest. A completion without tokens has log-probability 0, summed or averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.chunked.engine import Head, Statistics, linear_statistics
from liger_losses.chunked.engine.agreement import agree
from liger_losses.chunked.engine.checks import check_alike, check_shape_of, check_tensor, checked_mask
from liger_losses.chunked.engine.given import note
from liger_losses.chunked.engine.query import Query
from liger_losses.chunked.engine.tokens import check_temperature
from liger_losses.chunked.losses.base import ChunkedLoss, LossOptions
from liger_losses.chunked.losses.call_forms import AnyHead, CompletionBatch, Completions, naming_the_reference
from liger_losses.chunked.losses.context_parallel import check_call, sum_over_group
from liger_losses.kernels.logit_transform import LogitTransform

#: exp() of more overflows fp32, and an overflow that a clip discards still makes gradients NaN.
MAX_EXPONENT = 80.0


def wide_dtype(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def sequence_logps(
    logps: Tensor,
    mask: Tensor,
    *,
    average: bool = False,
    weights: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``sum_t w_t logp_t``, or ``sum_t w_t logp_t / sum_t mask_t``; 0 for a sequence without tokens.

    Args:
        logps: ``[B, T]``; values where the mask is false never matter.
        mask: ``[B, T]`` bool, true for tokens that count.
        average: divide by their number.
        weights: ``[B, T]``, the ``w_t``; 1 by default.
        group: the ranks that hold the slices of these sequences, over which both sums go; every rank must compute the
            same from the result.

    Returns:
        ``[B]`` in fp64: a preference is a small difference of sums that grow with the length, and at 64k tokens fp32
        would leave it two digits. (Devices without fp64: fp32.)
    """
    check_alike(logps=logps)
    mask = checked_mask("mask", mask, "logps", logps)
    if weights is not None:  # a mask may be one
        check_tensor("weights", weights)
        check_shape_of("weights", weights, "logps", logps)
    return _sequence_logps(logps, mask, average, weights, group)


def _sequence_logps(
    logps: Tensor, mask: Tensor, average: bool, weights: Tensor | None, group: dist.ProcessGroup | None
) -> Tensor:
    """:func:`sequence_logps` of tensors that fit together."""
    logps = torch.where(mask, logps, 0.0)
    total = (logps if weights is None else logps * weights).sum(-1, dtype=wide_dtype(logps.device))
    if group is not None:
        total, lengths = sum_over_group(group, total, mask.sum(-1))
        return total / lengths.clamp(min=1) if average else total
    return total / mask.sum(-1).clamp(min=1) if average else total


class Scored(NamedTuple):
    """One group of completions: the policy's statistics ``[B, T]`` (0 for tokens without loss), the mask of tokens that
    carry loss, and the completions' log-probabilities ``[B]`` under policy and reference (0 without one)."""

    statistics: Statistics
    mask: Tensor
    logps: Tensor
    ref_logps: Tensor


#: Without ``chunk_size``, which counts completions in liger-kernel.
STREAMING_OF_COMPLETIONS = tuple(name for name in LossOptions.streaming if name != "chunk_size")


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(LossOptions):
    """The options of losses on completions; see :class:`CompletionLoss`."""

    streaming: ClassVar[tuple[str, ...]] = STREAMING_OF_COMPLETIONS

    beta: float = 0.1
    average_log_prob: bool | None = False
    use_ref_model: bool = False
    compiled: bool = False

    @property
    def averages(self) -> bool:
        """Whether a completion's log-probability is divided by its length."""
        return bool(self.average_log_prob)


class CompletionLoss(ChunkedLoss):
    """Base of losses on completions that may be compared with a reference model.

    Args:
        beta: weight of the reference: temperature of the implicit reward, or weight of the KL divergence.
        average_log_prob: divide each completion's log-probability by its length.
        use_ref_model: whether the loss compares with a reference model.
        chunk_size, compiled: accepted for code written for liger-kernel, and without effect: ``workspace=`` bounds
            memory, and there is nothing to compile.
        ignore_index, options: as in :class:`liger_losses.ChunkedLoss`.
    """

    #: How a reference is given, for the error message of a call without one.
    reference_forms: ClassVar[str] = (
        "Pass ref_logps= to Completions, or ref_hidden_states= to Completions and ref_weight= to the loss. Without "
        "Completions, pass the ref_ arguments of the loss itself. Or build the loss with use_ref_model=False."
    )
    options_type: ClassVar[type[LossOptions]] = CompletionOptions

    @property
    def needs_reference(self) -> str | None:
        """Why a call needs a reference, for the error message; ``None`` if it does not."""
        return f"{type(self).__name__} compares with a reference model" if self.use_ref_model else None

    def prepare(
        self,
        batch: CompletionBatch,
        ref_weight: AnyHead | None,
        ref_bias: Tensor | None,
        transform: LogitTransform | None = None,
    ) -> CompletionBatch:
        """The batch with the reference's head, which is checked, and with labels as the engine takes them.

        ``transform`` is that of the reference's logits, if it is not :attr:`transform`.
        """
        ref_head = None
        if batch.ref_hidden_states is not None and ref_weight is not None:
            with naming_the_reference():
                ref_head = Head.of(ref_weight, ref_bias, transform or self.transform)
        batch = replace(batch, ref_head=ref_head, labels=[self.labels(part) for part in batch.labels])
        if not self.use_ref_model and (batch.ref_hidden_states or any(logps is not None for logps in batch.ref_logps)):
            name = type(self).__name__
            raise ValueError(
                f"a reference was given to {name}, which was built without one (use_ref_model=False): leave it out, or "
                "build the loss with use_ref_model=True."
            )
        batch.check_reference(self.needs_reference, self.reference_forms)
        for head in (batch.head, ref_head) if batch.temperatures else ():
            own = 1.0 if head is None else head.transform.temperature
            if self.temperature == 1.0 and (isinstance(own, Tensor) or own != 1.0):
                raise ValueError("temperature was given twice: with the completions, and by a head; leave one out.")
        for value, labels in zip(batch.temperatures or [], batch.labels, strict=False):
            self.check_one_temperature(value)
            check_temperature(value, labels.device, [labels.shape])
        return batch

    def token_weights(self, masks: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Weights ``[B, T]`` of each group's tokens in the completion's log-probability; ``None`` for 1."""
        return [None] * len(masks)

    def score(
        self, batch: CompletionBatch, extra: Completions | None = None, *, metrics: Sequence[str] = ()
    ) -> tuple[list[Scored], Statistics | None]:
        """Each group's log-probabilities under policy and reference; the policy's statistics of ``extra`` completions.

        The active tokens are selected once. The reference comes first, while no logits of the policy are held.

        Args:
            metrics: the policy's statistics to return besides log-probabilities.
        """
        others, options = [] if extra is None else [extra], self.options
        tokens = batch.select(options, [other.labels for other in others])
        for name, labels, logps in zip(batch.names, batch.groups(batch.labels), batch.ref_logps, strict=True):
            note(labels, self.ignore_index, **{f"ref_logps of the {name} completions": logps})
        reference = batch.reference_logps(tokens, options)
        hidden = [*batch.hidden_states, *(other.hidden_states for other in others)]
        head = batch.at_temperatures(
            batch.head, [other.temperature for other in others if other.temperature is not None]
        )
        if self.group is not None:
            check_call(hidden, head, tokens, Query(("logp",), tuple(metrics)), options)
            ref_dims = [None if logps is None else logps.dim() for logps in reference]
            facts = {"completions": batch.names, "sequences": [len(part) for part in batch.labels]}
            agree(self.group, **self.common_options, **facts, dimensions_of_ref_logps=ref_dims)
        found = linear_statistics(hidden, head, tokens, metrics=metrics, options=options)
        masks = batch.groups([part != self.ignore_index for part in batch.labels])
        parts = batch.group_statistics(found[: len(batch.labels)])
        average, group = self.settings.averages, self.group
        groups: list[Scored] = []
        for part, mask, weights, ref_logps in zip(parts, masks, self.token_weights(masks), reference, strict=True):
            logps = _sequence_logps(part.logp, mask, average, weights, group)
            if ref_logps is None:
                ref_logps = torch.zeros_like(logps)
            elif ref_logps.dim() == 2:
                ref_logps = _sequence_logps(ref_logps, mask, average, weights, group)
            groups.append(Scored(part, mask, logps, ref_logps))
        return groups, found[-1] if others else None
