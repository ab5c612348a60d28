"""Completions, and the base of losses on them: their log-probabilities under policy and reference.

B completions, T tokens of the longest. A completion without tokens has log-probability 0, summed or averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_losses.checks import FLOATS, check_alike, check_shape_of, check_shaped, check_tensor, checked_mask
from liger_losses.chunked import EngineOptions, Head, Statistics, TokenSupport
from liger_losses.chunked.core.compiled import statistics
from liger_losses.chunked.core.inputs import kept_statistics, target_of
from liger_losses.chunked.core.stream import counted_once
from liger_losses.chunked.core.target import Target
from liger_losses.chunked.losses.base import AnyHead, ChunkedLoss, LossOptions, constructor
from liger_losses.chunked.losses.sums import sum_over_group
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

    def target(self, head: Head, policy: Target | None = None) -> Target:
        """A target of the policy's hidden states with a head; or of the reference's, of the ``policy``'s tokens."""
        states: Any = self.hidden_states if policy is None else self.ref_hidden_states
        fields: dict[str, Any] = {} if policy is None else {"counted": policy.counted}
        if self.temperature is not None:
            of_head, fields["temperature"] = head.transform.temperature, self.temperature
            if isinstance(of_head, Tensor) or of_head != 1.0:
                raise ValueError("temperature was given twice: with the completions, and by a head; leave one out.")
        return target_of(states, head, self.labels, **fields)


def as_completions(value: Any, which: str) -> Completions:
    """``Completions`` with a batch dimension, from such or from a ``(hidden_states, labels)`` tuple.

    A single completion becomes a batch of one."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        value = Completions(*value)
    if not isinstance(value, Completions):
        raise TypeError(
            f"{which} must be Completions(hidden_states, labels, ...) or a (hidden_states, labels) tuple, got "
            f"{type(value).__name__}{f' of {len(value)}' if isinstance(value, (tuple, list)) else ''}."
        )
    tensors = {name: getattr(value, name) for name in Completions.__match_args__}
    for name, tensor in tensors.items():
        if tensor is not None or name in ("hidden_states", "labels"):
            check_tensor(name, tensor, allow_dtensor=name in ("hidden_states", "ref_hidden_states"))
    if value.labels.dim() == 1:
        of_sequence = "ref_logps" if value.ref_logps is not None and value.ref_logps.shape == (1,) else None
        value = replace(value, **{n: x[None] for n, x in tensors.items() if x is not None and n != of_sequence})
    if value.labels.dim() != 2:
        raise ValueError(
            f"labels of the {which} completions must be [B, T], got {tuple(value.labels.shape)}; completions are "
            "(hidden_states, labels)."
        )
    return value


def _stacked(hidden: Tensor, labels: Any, ref_hidden: Tensor | None, temperature: Tensor | None) -> Completions:
    """All groups of completions in one, checked."""
    check_tensor("labels", labels)
    if labels.is_floating_point() and labels.dim() == 3:
        raise TypeError(
            "labels must be token ids, got hidden states: for chosen and rejected completions, call loss(head, "
            "Completions(hidden_states, labels), Completions(hidden_states, labels))."
        )
    if hidden.dim() != 3 or labels.dim() != 2:
        raise ValueError(
            "hidden states must be [batch, tokens, hidden_size] and labels [batch, tokens], got "
            f"{tuple(hidden.shape)} and {tuple(labels.shape)}."
        )
    return Completions(hidden, labels, ref_hidden, None, temperature)


def _groups(names: Sequence[str], values: Sequence[Any], apart: bool) -> list[Completions]:
    """Each group of completions; what else belongs to them must not be given ``apart``."""
    parts = [as_completions(value, name) for name, value in zip(names, values, strict=False)]
    if apart:
        raise ValueError(
            "with completions, give the reference in Completions(..., ref_hidden_states=, ref_logps=), and a "
            "temperature in Completions(..., temperature=)."
        )
    for name in ("ref_hidden_states", "temperature"):
        if len({getattr(part, name) is None for part in parts}) > 1:
            both = " and ".join([f"the {group}" for group in names])
            raise ValueError(f"give {name} for both {both} completions, or for neither.")
    return parts


def states_and_head(first: Any, second: Any) -> tuple[Any, Any]:
    """Hidden states ``[B, T, H]`` or :class:`Completions`, and a head, which are given in either order."""
    layers = (nn.Module, Head)
    matrix = isinstance(first, Tensor) and first.dim() == 2 and getattr(second, "ndim", 3) == 3
    of_head = isinstance(first, layers) or (matrix and not isinstance(second, layers))
    return (second, first) if of_head else (first, second)


@contextmanager
def naming_the_reference(whose: str = "the reference model (its hidden states, weight and bias)") -> Iterator[None]:
    """Errors raised inside say that they are about the reference model, or another one."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"of {whose}: {error}") from None


class Reference(NamedTuple):
    """A reference model's hidden states and head, or its log-probabilities of each group of completions; and the
    transform of its logits, if it differs from the loss's."""

    hidden_states: Tensor | None = None
    weight: AnyHead | None = None
    bias: Tensor | None = None
    logps: tuple[Tensor | None, ...] = (None,)
    transform: LogitTransform | None = None


#: Completions, or their hidden states and labels.
Side = Completions | tuple[Tensor, Tensor]


class CompletionBatch(NamedTuple):
    """All completions of one call, whichever form it had.

    Args:
        head: the policy's.
        parts: one per group; or a single one that holds two groups of ``B / 2`` rows. Such stacked rows are never
            copied, nor are their gradients.
        ref_head: the reference model's.
        ref_logps: each group's log-probabilities under the reference, if they were given.
    """

    head: Head
    parts: list[Completions]
    ref_head: Head | None
    ref_logps: Sequence[Tensor | None]

    def of_groups(self, tensors: list[Tensor]) -> list[Any]:
        """Each group's rows of the parts' tensors."""
        return tensors if len(self.parts) == len(self.ref_logps) else list(tensors[0].chunk(2))

    def first_group(self) -> Completions:
        """The first group of completions, without a reference."""
        part = self.parts[0]
        tensors: Any = (part.hidden_states, part.labels, None, None, part.temperature)
        first: list[Any] = [x if x is None else self.of_groups([x])[0] for x in tensors]
        return Completions(*first)

    def reference_logps(
        self, options: EngineOptions, policy: Sequence[Target], support: TokenSupport | None = None
    ) -> list[Tensor]:
        """The parts' log-probabilities under the reference's head, ``[B, T]``.

        What is known of the labels of ``policy`` targets is that of the reference's. ``support`` are the columns that a
        sampler kept, of a single part."""
        head: Any = self.ref_head
        with torch.no_grad(), naming_the_reference():
            if support is not None:
                (part,) = self.parts
                states: Any = part.ref_hidden_states
                kept = kept_statistics(states, head, part.labels, support, ("logp",), options)
                return [kept["logp"]]
            targets = [part.target(head, known) for part, known in zip(self.parts, policy, strict=False)]
            return [values["logp"] for values in statistics(targets, ("logp",), options)]


class CompletionInputs(TypedDict, total=False):
    """What calls of losses on completions may have beside head and completions."""

    bias: Tensor | None
    ref_input: Tensor | None
    ref_weight: AnyHead | None
    ref_bias: Tensor | None
    temperature: Tensor | None


class Scored(NamedTuple):
    """The completions of a group.

    Args:
        statistics: the policy's, ``[B, T]``; 0 for tokens without loss.
        mask: ``[B, T]`` bool, true for tokens that carry loss.
        logps, ref_logps: ``[B]``, the completions' log-probabilities under policy and reference (0 without one).
        ref_token_logps: ``[B, T]``, the latter of tokens, 0 without a reference; ``None`` where only sums are known.
        lengths: ``[B]``, how many tokens carry loss.
        logits: ``[B]``, the sum of the tokens' mean logits; of pairs ``[]``, of all completions.
    """

    statistics: Statistics
    mask: Tensor
    logps: Tensor
    ref_logps: Tensor
    ref_token_logps: Tensor | None
    lengths: Tensor
    logits: Tensor


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

    #: Whether completions of two groups are pairs.
    paired: ClassVar[bool] = False

    @constructor(CompletionOptions)
    def __init__(self) -> None: ...

    @property
    def needs_reference(self) -> str | None:
        """Why a call needs a reference, for the error message; ``None`` if it does not."""
        return f"{type(self).__name__} compares with a reference model" if self.settings.use_ref_model else None

    def read(
        self,
        names: tuple[str, ...],
        head: Head,
        first: Any,
        second: Any = None,
        reference: Reference = Reference(),
        temperature: Tensor | None = None,
    ) -> CompletionBatch:
        """A call's groups of completions, each ``Completions`` or a ``(hidden_states, labels)`` tuple; or hidden states
        ``[B, T, H]`` and labels ``[B, T]``, in which the groups are stacked, with what else belongs to them.

        Labels are as the engine takes them; what does not fit raises TypeError or ValueError.
        """
        for value in (temperature, *[getattr(part, "temperature", None) for part in (first, second)]):
            if value is not None:
                self.check_one_temperature(value)
        if isinstance(first, Tensor):
            if not self.settings.use_ref_model:  # as in liger-kernel
                reference = Reference(logps=(None,) * len(names))
            parts = [_stacked(first, second, reference.hidden_states, temperature)]
        else:
            apart = any(value is not None for value in (reference.hidden_states, *reference.logps, temperature))
            parts = _groups(names, (first, second), apart)
            reference = reference._replace(logps=tuple([part.ref_logps for part in parts]))
        parts = [replace(part, labels=self.labels(part.labels)) for part in parts]
        rows = [len(part.labels) for part in parts]
        if self.paired and (rows[0] != rows[-1] or (len(rows) == 1 and rows[0] % 2)):
            stacked = ", which are an odd number, stacked" if len(rows) == 1 else ""
            raise ValueError(f"there must be as many chosen as rejected completions, got {rows} rows{stacked}.")
        return self.with_reference(names, head, parts, reference)

    def with_reference(
        self, names: Sequence[str], head: Head, parts: list[Completions], reference: Reference
    ) -> CompletionBatch:
        """Groups of completions and a reference; TypeError or ValueError unless each group has the one that the loss
        needs, and not more."""
        if reference.hidden_states is not None:
            check_tensor("ref_input", reference.hidden_states, allow_dtensor=True)
        logps, device = reference.logps, head.weight.device
        needed, of_states, ref_head = self.needs_reference, parts[0].ref_hidden_states is not None, None
        referenced = of_states or any(value is not None for value in logps)
        if referenced and not self.settings.use_ref_model:
            raise ValueError(
                f"a reference was given to {type(self).__name__}, which was built without one (use_ref_model=False): "
                "leave it out, or build the loss with use_ref_model=True."
            )
        if reference.weight is not None and not referenced and needed:
            raise ValueError(
                "there is a ref_weight=, but no hidden states of the reference that it multiplies; give them to "
                "Completions as ref_hidden_states=, or to a call without Completions as ref_input=."
            )
        if of_states and reference.weight is not None:
            with naming_the_reference():
                ref_head = Head.of(reference.weight, reference.bias, reference.transform or self.transform)
        for which, ref, part in zip(names, logps, parts * len(names), strict=False):
            if needed and not of_states and ref is None:
                raise ValueError(f"{needed}, but the {which} completions have none. {self.reference_forms}")
            if ref is not None and of_states:
                raise ValueError(f"the {which} completions have both ref_hidden_states and ref_logps; give one.")
            if ref is not None:
                count, tokens = part.labels.shape
                shape = (count * len(parts) // len(names), tokens)  # of a group, where these are stacked
                name = f"ref_logps of the {which} completions"
                check_shaped(name, ref, "sequence or token", device, shape[:1], shape, dtypes=FLOATS)
        if of_states and ref_head is None:
            raise ValueError(
                "there are hidden states of a reference, but no ref_weight= to project them; pass the policy's weight "
                "there if the reference model shares it."
            )
        return CompletionBatch(head, parts, ref_head, logps)

    def token_weights(self, masks: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Weights ``[B, T]`` of each group's tokens in the completion's log-probability; ``None`` for 1."""
        return [None] * len(masks)

    def score(self, batch: CompletionBatch, extra: Completions | None = None) -> tuple[list[Scored], Tensor | None]:
        """Each group's log-probabilities under policy and reference; the policy's of ``extra`` completions.

        The reference comes first, while no logits of the policy are held.
        """
        o, parts = self.settings, batch.parts if extra is None else [*batch.parts, extra]
        targets = counted_once([part.target(batch.head) for part in parts], o.engine)
        masks = batch.of_groups([part.labels != o.ignore_index for part in batch.parts])
        if batch.ref_head is not None:
            reference = batch.of_groups(batch.reference_logps(o.engine, targets))
        else:  # which may be anything at tokens without loss
            reference = [
                ref if ref is None else (ref if ref.dim() == 1 else ref.where(mask, 0.0)).detach()
                for ref, mask in zip(batch.ref_logps, masks, strict=True)
            ]
        if o.group is not None:
            ref_dims = [None if logps is None else logps.dim() for logps in reference]
            self.agree(sequences=[len(part.labels) for part in batch.parts], dimensions_of_ref_logps=ref_dims)
        values = statistics(targets, ("logp",), o.engine, ("mean_logit", *self.metrics))
        others = None if extra is None else values.pop()["logp"]
        of_groups = zip(*[batch.of_groups([part[name] for part in values]) for name in values[0]], strict=True)
        read = [Statistics(**dict(zip(values[0], group, strict=True))) for group in of_groups]
        return [*map(self._scored, read, masks, self.token_weights(masks), reference)], others

    def _scored(self, values: Statistics, mask: Tensor, weights: Tensor | None, ref_logps: Tensor | None) -> Scored:
        """The sums over each completion's tokens, over the group's ranks too."""
        ref_logps = torch.zeros_like(values.logp) if ref_logps is None else ref_logps
        ref_token_logps, logits = ref_logps if ref_logps.dim() == 2 else None, values.mean_logit
        of_tokens = [values.logp] if ref_token_logps is None else [values.logp, ref_token_logps]
        counts = (mask.sum(-1), logits.sum() if self.paired else logits.sum(-1))
        sums = [_sums_over_tokens(logps, weights) for logps in of_tokens]
        lengths, logits, *sums = sum_over_group(self.settings.group, *counts, *sums)
        if self.settings.averages:
            sums = [total / lengths.clamp(min=1) for total in sums]
        logps, ref_logps = [*sums, ref_logps][:2]
        return Scored(values, mask, logps, ref_logps, ref_token_logps, lengths, logits)
