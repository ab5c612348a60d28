"""Completions, and the base of losses on them: their log-probabilities under policy and reference.

B completions, T tokens of the longest. A completion without tokens has log-probability 0, summed or averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_losses.checks import check_alike, check_device, check_shape_of, check_temperature, check_tensor, checked_mask
from liger_losses.chunked import EngineOptions, Head, Statistics
from liger_losses.chunked.core.agreement import agree
from liger_losses.chunked.core.compiled import statistics
from liger_losses.chunked.core.inputs import target_of
from liger_losses.chunked.core.stream import counted_once
from liger_losses.chunked.core.target import Target
from liger_losses.chunked.losses.base import AnyHead, ChunkedLoss, LossOptions, constructor
from liger_losses.chunked.losses.context_parallel import sum_over_group
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
        logps: ``[B, T]``; values where the mask is false have no influence.
        mask: ``[B, T]`` bool, true for the tokens to sum.
        average: divide by their number.
        weights: ``[B, T]``, the ``w_t``; 1 by default.
        group: the ranks that hold slices of these sequences; both sums are over all ranks. Every rank must then compute
            the same from the result.

    Returns:
        ``[B]`` in fp64. A preference is a small difference of sums that grow with the length; at 64k tokens, fp32 would
        leave two digits of it. (On devices without fp64: fp32.)
    """
    check_alike(logps=logps)
    mask = checked_mask("mask", mask, "logps", logps)
    if weights is not None:  # a mask may be one
        check_tensor("weights", weights)
        check_shape_of("weights", weights, "logps", logps)
    total, lengths = _sums_over_tokens(torch.where(mask, logps, 0.0), weights), mask.sum(-1)
    if group is not None:
        total, lengths = sum_over_group(group, total, lengths)
    return total / lengths.clamp(min=1) if average else total


def _sums_over_tokens(values: Tensor, weights: Tensor | None) -> Tensor:
    """``sum_t w_t v_t``, ``[B]``, in fp64."""
    return (values if weights is None else values * weights).sum(-1, dtype=wide_dtype(values.device))


@dataclass(frozen=True)
class Completions:
    """A batch of completions: one side of pairs, for example.

    Args:
        hidden_states: ``[B, T, H]``, or ``[T, H]`` for a single completion.
        labels: ``[B, T]`` or ``[T]``; prompts and padding have the label ``ignore_index``.
        ref_hidden_states: the reference model's hidden states, in the shape of ``hidden_states``.
        ref_logps: or the reference model's precomputed log-probabilities, without a gradient. Either per sequence
            ``[B]``, summed, averaged or weighted as the loss does; or per token in the shape of ``labels``, at the
            position of the predicted label (after any shift).
        temperature: in the shape of ``labels``, divides the logits of each token, for policy and reference. The loss's
            ``temperature`` must then be 1.
    """

    hidden_states: Tensor
    labels: Tensor
    ref_hidden_states: Tensor | None = None
    ref_logps: Tensor | None = None
    temperature: Tensor | None = None

    def batched(self) -> Completions:
        """The same with a batch dimension; a single completion becomes a batch of one."""
        # torch.compile cannot trace ``vars`` of a frozen dataclass in torch 2.11.
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name, value in given.items():
            if value is not None or name in ("hidden_states", "labels"):
                check_tensor(name, value, allow_dtensor=name in ("hidden_states", "ref_hidden_states"))
        if self.labels.dim() != 1:
            return self
        of_one = self.ref_logps is not None and self.ref_logps.shape == (1,)
        kept = [name for name, value in given.items() if value is None or (of_one and name == "ref_logps")]
        return Completions(**{name: value if name in kept else value[None] for name, value in given.items()})


def as_completions(value: Any, which: str) -> Completions:
    """``Completions`` with a batch dimension, from such or from a ``(hidden_states, labels)`` tuple."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        value = Completions(*value)
    if not isinstance(value, Completions):
        raise TypeError(
            f"{which} must be Completions(hidden_states, labels, ...) or a (hidden_states, labels) tuple, got "
            f"{type(value).__name__}{f' of {len(value)}' if isinstance(value, (tuple, list)) else ''}."
        )
    value = value.batched()
    if value.labels.dim() != 2:
        raise ValueError(
            f"labels of the {which} completions must be [B, T], got {tuple(value.labels.shape)}; completions are "
            "(hidden_states, labels)."
        )
    return value


def states_and_head(first: Any, second: Any) -> tuple[Any, Any]:
    """Hidden states ``[B, T, H]`` or :class:`Completions`, and a head, which are given in either order."""
    layers = (nn.Module, Head)
    matrix = isinstance(first, Tensor) and first.dim() == 2 and getattr(second, "ndim", 3) == 3
    of_head = isinstance(first, layers) or (matrix and not isinstance(second, layers))
    return (second, first) if of_head else (first, second)


@contextmanager
def naming_the_reference() -> Iterator[None]:
    """Errors raised inside say that they are about the reference model."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"of the reference model (its hidden states, weight and bias): {error}") from None


#: Completions, or their hidden states and labels.
Side = Completions | tuple[Tensor, Tensor]


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
        temperatures: one for each token, in the shape of each tensor of labels; ``None`` for the head's temperature.
    """

    names: tuple[str, ...]
    head: Head
    hidden_states: list[Tensor]
    labels: list[Tensor]
    ref_hidden_states: list[Tensor] | None
    ref_logps: tuple[Tensor | None, ...]
    ref_head: Head | None = None
    temperatures: list[Tensor] | None = None

    @classmethod
    def of(cls, head: Head, **groups: Any) -> CompletionBatch:
        """A batch of named groups, each ``Completions`` or a ``(hidden_states, labels)`` tuple."""
        parts = [as_completions(value, name) for name, value in groups.items()]
        refs, temperatures = (
            [getattr(part, name) for part in parts if getattr(part, name) is not None]
            for name in ("ref_hidden_states", "temperature")
        )
        for name, found in (("ref_hidden_states", refs), ("temperature", temperatures)):
            if found and len(found) < len(groups):
                each = " and ".join(f"the {name}" for name in groups)
                raise ValueError(f"give {name} for both {each} completions, or for neither.")
        hidden, labels, logps = ([getattr(part, n) for part in parts] for n in ("hidden_states", "labels", "ref_logps"))
        return cls(tuple(groups), head, hidden, labels, refs or None, tuple(logps), temperatures=temperatures or None)

    @classmethod
    def read(
        cls,
        names: tuple[str, ...],
        head: Head,
        first: Any,
        second: Any,
        ref_hidden_states: Tensor | None = None,
        ref_logps: tuple[Tensor | None, ...] = (None,),
        temperature: Tensor | None = None,
    ) -> CompletionBatch:
        """A batch of named groups of :class:`Completions`; or of hidden states ``[B, T, H]`` and labels ``[B, T]``, in
        which the groups are stacked, with what else belongs to them."""
        if not isinstance(first, Tensor):
            if any(value is not None for value in (ref_hidden_states, *ref_logps, temperature)):
                raise ValueError(
                    "with completions, give the reference in Completions(..., ref_hidden_states=, ref_logps=), and a "
                    "temperature in Completions(..., temperature=)."
                )
            return cls.of(head, **dict(zip(names, (first, second), strict=False)))
        check_tensor("hidden states", first, allow_dtensor=True)
        check_tensor("labels", second)
        if ref_hidden_states is not None:
            check_tensor("the reference's hidden states", ref_hidden_states, allow_dtensor=True)
        if second.is_floating_point() and second.dim() == 3:
            raise TypeError(
                "labels must be token ids, got hidden states: for chosen and rejected completions, call loss(head, "
                "Completions(hidden_states, labels), Completions(hidden_states, labels))."
            )
        if first.dim() != 3 or second.dim() != 2:
            raise ValueError(
                "hidden states must be [batch, tokens, hidden_size] and labels [batch, tokens], got "
                f"{tuple(first.shape)} and {tuple(second.shape)}."
            )
        refs, temperatures = (None if value is None else [value] for value in (ref_hidden_states, temperature))
        return cls(names, head, [first], [second], refs, ref_logps, temperatures=temperatures)

    def targets(self, head: Head, hidden_states: Sequence[Tensor]) -> list[Target]:
        """A target of a model's hidden states for each tensor of labels."""
        divided: Sequence[Any] = self.temperatures or [head.transform.temperature] * len(self.labels)
        each = zip(hidden_states, self.labels, divided, strict=True)
        return [target_of(hidden, head, labels, temperature=t) for hidden, labels, t in each]

    def groups(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One tensor per group, from one per tensor of labels."""
        if len(tensors) == len(self.names):
            return list(tensors)
        return list(tensors[0].unflatten(0, (2, tensors[0].shape[0] // 2)).unbind())

    def group_statistics(self, found: Sequence[Mapping[str, Tensor]]) -> list[Statistics]:
        """The same for statistics."""
        groups = {name: self.groups([values[name] for values in found]) for name in found[0]}
        return [Statistics(**{name: each[i] for name, each in groups.items()}) for i in range(len(self.names))]

    def reference_logps(self, options: EngineOptions, policy: Sequence[Target]) -> list[Tensor | None]:
        """Each group's log-probabilities under the reference, ``[B]`` or ``[B, T]``; ``None`` without one.

        What is known of the labels of ``policy`` targets is that of the reference's."""
        if self.ref_hidden_states is None or self.ref_head is None:
            pairs = zip(self.groups(self.labels), self.ref_logps, strict=True)
            return [logps if logps is None else _constant(logps, y != options.ignore_index) for y, logps in pairs]
        with torch.no_grad(), naming_the_reference():
            targets = self.targets(self.ref_head, self.ref_hidden_states)
            targets = [replace(ref, counted=own.counted) for ref, own in zip(targets, policy, strict=False)]
            found = statistics(targets, ("logp",), options)
        return list(self.groups([part["logp"] for part in found]))

    def check_reference(self, needed: str | None, how: str) -> None:
        """Raise TypeError or ValueError unless each group has at most one reference, one if ``needed``, and it fits.

        ``how`` says how to give one, and how to do without.
        """
        hidden = self.ref_hidden_states
        for which, labels, logps in zip(self.names, self.groups(self.labels), self.ref_logps, strict=True):
            if needed and hidden is None and logps is None:
                raise ValueError(f"{needed}, but the {which} completions have none. {how}")
            if logps is None:
                continue
            if hidden is not None:
                raise ValueError(f"the {which} completions have both ref_hidden_states and ref_logps; give one.")
            name = f"ref_logps of the {which} completions"
            check_tensor(name, logps)
            if not logps.is_floating_point():
                raise TypeError(f"{name} must be floating point, got {logps.dtype}.")
            if logps.shape not in (labels.shape[:1], labels.shape):
                expected = f"[{labels.shape[0]}] (one per sequence) or {tuple(labels.shape)} (one per token)"
                raise ValueError(f"{name} must be {expected}, got {tuple(logps.shape)}.")
            check_device(self.head.weight, **{name: logps})
        if hidden is not None and self.ref_head is None:
            raise ValueError(
                "there are hidden states of a reference, but no ref_weight= to project them; pass the policy's weight "
                "there if the reference model shares it."
            )


def _constant(ref_logps: Tensor, mask: Tensor) -> Tensor:
    """A reference's log-probabilities as a constant, which may be anything at tokens without loss."""
    return torch.where(mask, ref_logps.detach(), 0.0) if ref_logps.dim() == 2 else ref_logps.detach()


class Scored(NamedTuple):
    """One group of completions.

    Args:
        statistics: the policy's, ``[B, T]``; 0 for tokens without loss.
        mask: ``[B, T]`` bool, true for tokens that carry loss.
        logps, ref_logps: ``[B]``, the completions' log-probabilities under policy and reference (0 without one).
        ref_token_logps: ``[B, T]``, the latter of tokens, 0 without a reference; ``None`` where only sums are known.
        lengths: ``[B]``, how many tokens carry loss.
        logits: ``[B]``, the sum of the tokens' mean logits; ``None`` if these were not asked for.
    """

    statistics: Statistics
    mask: Tensor
    logps: Tensor
    ref_logps: Tensor
    ref_token_logps: Tensor | None
    lengths: Tensor
    logits: Any


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(LossOptions):
    """The options of losses on completions; see :class:`CompletionLoss`."""

    streams_chunks = False

    beta: float = 0.1
    average_log_prob: bool | None = False
    use_ref_model: bool = False
    compiled: bool = False

    @property
    def averages(self) -> bool:
        """Whether a completion's log-probability is divided by its length."""
        return bool(self.average_log_prob)


class CompletionLoss(ChunkedLoss):
    """Base of losses on completions that may be compared with a reference model; options as in :class:`PreferenceLoss`.

    ``beta`` is the weight of the reference: the implicit reward's temperature, or the weight of the KL divergence.
    """

    #: How a reference is given, for the error message of a call without one.
    reference_forms: ClassVar[str] = (
        "Pass ref_logps= to Completions, or ref_hidden_states= to Completions and ref_weight= to the loss. Without "
        "Completions, pass the ref_ arguments of the loss itself. Or build the loss with use_ref_model=False."
    )

    @constructor(CompletionOptions)
    def __init__(self) -> None: ...

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

        ``transform`` applies to the reference's logits, if it differs from :attr:`transform`.
        """
        given, ref_head = batch.ref_hidden_states is not None or any(x is not None for x in batch.ref_logps), None
        if given and not self.use_ref_model:
            raise ValueError(
                f"a reference was given to {type(self).__name__}, which was built without one (use_ref_model=False): "
                "leave it out, or build the loss with use_ref_model=True."
            )
        if ref_weight is not None and not given and self.needs_reference:
            raise ValueError(
                "there is a ref_weight=, but no hidden states of the reference that it multiplies; give them to "
                "Completions as ref_hidden_states=, or to a call without Completions as ref_input=."
            )
        if batch.ref_hidden_states is not None and ref_weight is not None:
            with naming_the_reference():
                ref_head = Head.of(ref_weight, ref_bias, transform or self.transform)
        batch = replace(batch, ref_head=ref_head, labels=self.each_labels(batch.labels))
        batch.check_reference(self.needs_reference, self.reference_forms)
        for value, labels in zip(batch.temperatures or [], batch.labels, strict=False):
            self.check_one_temperature(value)
            check_temperature(value, labels.device, [labels.shape])
            known = [1.0 if head is None else head.transform.temperature for head in (batch.head, ref_head)]
            if any(isinstance(own, Tensor) or own != 1.0 for own in known):
                raise ValueError("temperature was given twice: with the completions, and by a head; leave one out.")
        return batch

    def token_weights(self, masks: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Weights ``[B, T]`` of each group's tokens in the completion's log-probability; ``None`` for 1."""
        return [None] * len(masks)

    def score(
        self,
        batch: CompletionBatch,
        extra: Completions | None = None,
        *,
        metrics: Sequence[str] = (),
    ) -> tuple[list[Scored], Tensor | None]:
        """Each group's log-probabilities under policy and reference; the policy's of ``extra`` completions.

        The reference comes first, while no logits of the policy are held.

        Args:
            metrics: the policy's statistics to return besides log-probabilities.
        """
        targets = batch.targets(batch.head, batch.hidden_states)
        if extra is not None:
            temperature: dict[str, Any] = {} if extra.temperature is None else {"temperature": extra.temperature}
            targets.append(target_of(extra.hidden_states, batch.head, extra.labels, **temperature))
        targets = counted_once(targets, self.options)
        reference = batch.reference_logps(self.options, targets)
        if self.group is not None:
            ref_dims = [None if logps is None else logps.dim() for logps in reference]
            facts = {"completions": batch.names, "sequences": [len(part) for part in batch.labels]}
            agree(self.group, {**self.common_options, **facts, "dimensions of ref_logps": ref_dims})
        found = statistics(targets, ("logp",), self.options, metrics)
        masks = batch.groups([part != self.ignore_index for part in batch.labels])
        parts = batch.group_statistics(found[: len(batch.labels)])
        each = zip(parts, masks, self.token_weights(masks), reference, strict=True)
        return [self._scored(*group) for group in each], None if extra is None else found[-1]["logp"]

    def _scored(self, found: Statistics, mask: Tensor, weights: Tensor | None, ref_logps: Tensor | None) -> Scored:
        """The sums over each completion's tokens, over the group's ranks too."""
        sums = [_sums_over_tokens(found.logp, weights), mask.sum(-1)]
        if found.mean_logit is not None:
            sums.append(found.mean_logit.sum(-1))
        if ref_logps is not None and ref_logps.dim() == 2:
            sums.append(_sums_over_tokens(ref_logps, weights))
        if self.group is not None:
            sums = [*sum_over_group(self.group, *sums)]
        lengths = sums[1]
        divisor = lengths.clamp(min=1) if self.settings.averages else 1
        logps, ref_token_logps = sums[0] / divisor, ref_logps
        if ref_logps is None:
            ref_logps, ref_token_logps = torch.zeros_like(logps), torch.zeros_like(found.logp)
        elif ref_logps.dim() == 2:
            ref_logps = sums[-1] / divisor
        else:
            ref_token_logps = None
        logits = sums[2] if found.mean_logit is not None else None
        return Scored(found, mask, logps, ref_logps, ref_token_logps, lengths, logits)
