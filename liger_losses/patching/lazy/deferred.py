"""How to compute logits later, and whether they still can be computed. H hidden size, V vocabulary size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked import ALONE, Head, QuantizedWeight, Ranks, linear_statistics
from liger_losses.kernels.autograd import autocast_dtype, once_differentiable
from liger_losses.kernels.reading import version_of
from liger_losses.patching.lazy.warning import cannot_compute

#: Entries of a weight, in each of its dimensions, that are compared with their values in the forward.
_SAMPLED = (64, 32)

#: Integer dtypes by their size in bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Counts the forwards of lazy heads.
_FORWARDS = [0]


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Hidden states, the head that multiplies them, and what the model did to the logits since.

    Args:
        hidden_states: ``[..., H]``. Operations on the token dimensions of the logits are applied to these.
        head: slices of the vocabulary are applied to its weight ``[V, H]`` and bias ``[V]``; its transform is the
            scale and soft-cap of the logits so far, as the engine applies them.
        dtype: of the logits, as the model computes them.
        autocast: the autocast dtype under which the head ran, or ``None``.
        steps: the scale and soft-cap as the model wrote them, in order, and its casts, for values with the model's own
            rounding: the name of a tensor's method and its arguments.
        normalized: whether a log-softmax over the vocabulary follows.
        negated: whether the log-probabilities are multiplied by -1.
        weights: the head's weights in its forward; the head here may have slices of them.
        version: the in-place version of the hidden states, which must not change before the logits are computed.
        needs_grad: of logits without a graph: which of the tensors with one need a gradient.
        changed: not empty once values of the logits were changed in place.
    """

    hidden_states: Tensor
    head: Head
    dtype: torch.dtype
    autocast: torch.dtype | None = None
    steps: tuple[tuple[Any, ...], ...] = ()
    normalized: bool = False
    negated: bool = False
    weights: HeadWeights | None = None
    version: int | None = None
    needs_grad: tuple[bool, ...] = ()
    changed: list[bool] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias."""
        return self.hidden_states, self.head.weight, self.head.bias

    @property
    def shape(self) -> torch.Size:
        """``[..., V]``."""
        return torch.Size((*self.hidden_states.shape[:-1], self.head.vocab_size))

    @property
    def requires_grad(self) -> bool:
        """Whether one of the tensors requires a gradient."""
        return any(tensor is not None and tensor.requires_grad for tensor in self.tensors)

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self.hidden_states.device

    def check(self, values: bool = False) -> None:
        """Raise RuntimeError if the tensors have changed since the forward; with ``values``, the weights' are read."""
        if self.changed:
            raise cannot_compute(
                "logits that were changed in place were then used by code that does not check their class, so "
                "their gradient is not known; use the tensor that the in-place operation returned, or call "
                "logits.clone() before it."
            )
        if self.version is not None and self.version != version_of(self.hidden_states):
            raise cannot_compute(
                "the hidden states of lazy logits have changed in place since the forward, so these logits "
                "cannot be computed any more. Compute what you need from them before that, such as "
                "logits.argmax(-1)."
            )
        if self.weights is not None:
            self.weights.check(values)

    def with_tensors(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        """The same operations on other tensors, with the same values."""
        return replace(self, hidden_states=hidden_states, head=self.head.with_fields(weight=weight, bias=bias))

    def detach(self) -> DeferredLogits:
        """The same logits without gradients."""
        needs_grad = tuple([t is not None and t.requires_grad for t in self.tensors])
        needs_grad = needs_grad if any(needs_grad) else self.needs_grad
        return replace(self, hidden_states=self.hidden_states.detach(), head=self.head.detach(), needs_grad=needs_grad)

    def with_rows(self, hidden_states: Tensor) -> DeferredLogits:
        """The logits of other tokens: an operation on the token dimensions was applied to the hidden states."""
        return replace(self, hidden_states=hidden_states, version=None)

    def with_step(self, *step: Any, **transform: Any) -> DeferredLogits:
        """The logits after one more operation; ``transform`` holds the changed fields of the head's transform."""
        head = self.head.with_fields(transform=replace(self.head.transform, **transform)) if transform else self.head
        return replace(self, steps=(*self.steps, step), head=head)

    def under_forward_autocast(self) -> torch.autocast:
        """The autocast state of the head's forward, which may have ended by now."""
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def values(self) -> Tensor:
        """The logits as an ordinary, differentiable tensor ``[..., V]``, computed by the model's own operations."""
        self.check(values=True)
        with self.under_forward_autocast():
            logits = linear(*self.tensors, self.head.quantized, self.head.ranks, self.autocast)
            for name, *args in self.steps:
                logits = getattr(logits, name)(*args)
        logits = logits.log_softmax(-1) if self.normalized else logits
        return (-logits if self.negated else logits).to(self.dtype)

    def statistics(self, labels: Tensor | None, *names: str, selected: Tensor | None = None, **options: Any) -> Any:
        """:func:`linear_statistics` of these hidden states and this head; ``labels=None`` for those without labels."""
        self.check(values=True)
        hidden_states = self.hidden_states
        if labels is None:
            labels = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        one_token = hidden_states.dim() == 1  # the engine takes a batch
        if one_token:
            hidden_states, labels = hidden_states[None], labels[None]
            selected = None if selected is None else selected[None]
        with self.under_forward_autocast():
            found = linear_statistics(hidden_states, self.head, labels, names, selected=selected, **options)
        self.mark_read()
        return found._make(None if value is None else value[0] for value in found) if one_token else found

    def mark_read(self) -> None:
        """Record that the logits were read, after which training code may change the weights."""
        if self.weights is not None:
            self.weights.was_read = True


def autocast_of(hidden_states: Tensor) -> torch.dtype | None:
    """The dtype to which autocast would cast these; it leaves fp64 alone."""
    return None if hidden_states.dtype == torch.float64 else autocast_dtype(hidden_states.device)


class HeadWeights:
    """Weight and bias of one forward; shared by all lazy logits that were made of its logits.

    The weights are not copied, so logits can only be computed while they are the same. Changes are noticed: from the
    in-place version and, as torch's fused optimizers and writes to ``parameter.data`` do not count there, from some of
    the values. On a GPU the host would wait for these, so they are compared only after a loss or another forward, or if
    a parameter has a gradient, with which an optimizer may have changed it.

    ``parameters`` are those that count in-place operations, if weight and bias are parts of them (DTensors).
    ``samples`` are :func:`samples_of` the weights in a forward that was not just now, with which they are compared.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        parameters: Sequence[Tensor | None] = (),
        samples: Sequence[Tensor] | None = None,
    ) -> None:
        self.tensors = [t.detach() for t in (weight, bias) if t is not None]
        self.parameters = [t for t in parameters or (weight, bias) if t is not None]
        self.versions = self._versions()
        self.was_read = samples is not None or self._have_gradients()
        self.samples = samples_of(self.tensors) if samples is None else samples
        _FORWARDS[0] += 1
        self.forward = _FORWARDS[0]

    def check(self, values: bool = False) -> None:
        """Raise RuntimeError if the weights have changed; with ``values``, also if they were freed or written to."""
        freed = any(t.numel() and t.untyped_storage().size() == 0 for t in self.tensors)
        if freed and values:
            raise cannot_compute(
                "the head's weights were freed after its forward or backward (for example by fully_shard), so "
                "these lazy logits cannot be computed any more. Compute what you need from them, such as "
                "logits.argmax(-1), before loss.backward(); or keep the weights with "
                "model.set_reshard_after_backward(False)."
            )
        changed = self.versions != self._versions()
        if not freed and (changed or (values and self._may_be_written() and self._differ())):
            raise cannot_compute(
                "the weight or bias of lazy logits has changed since the forward, by an in-place operation such "
                "as an optimizer's step, so these logits and their gradients cannot be computed any more. Call "
                "loss.backward() before optimizer.step(). Compute other results from the logits before it too, "
                "such as logits.argmax(-1); liger_losses.patching.lazy.true_values(logits) computes all of them."
            )

    def _versions(self) -> list[int]:
        return [version_of(p) for p in self.parameters]

    def _have_gradients(self) -> bool:
        return any(p.is_leaf and p.grad is not None for p in self.parameters)

    def _may_be_written(self) -> bool:
        on_host = self.tensors[0].device.type == "cpu"
        return on_host or self.was_read or self.forward != _FORWARDS[0] or self._have_gradients()

    def _differ(self) -> bool:
        return not all(_sample(t).equal(sample) for t, sample in zip(self.tensors, self.samples, strict=True))


def samples_of(tensors: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Some entries of each weight, copied."""
    return tuple([_sample(tensor.detach()).clone() for tensor in tensors if tensor is not None])


def _sample(tensor: Tensor) -> Tensor:
    """The bits of some of a weight's entries, a view: NaN is not equal to itself."""
    steps = (max(1, size // sampled) for size, sampled in zip(tensor.shape, _SAMPLED, strict=False))
    return tensor[tuple(slice(None, None, step) for step in steps)].view(_BITS[tensor.element_size()])


def linear(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    quantized: QuantizedWeight | None = None,
    ranks: Ranks = ALONE,
    cast: torch.dtype | None = None,
) -> Tensor:
    """``hidden_states @ [quantized, weight].T + bias`` of all ranks' rows, ``[..., V]``, the same on each rank.

    Args:
        hidden_states: ``[..., H]``, or ``[..., H + r]``; the same on each rank.
        weight, bias: ``[V_r, H]``, ``[V_r]``; beside a quantized weight ``[V_r, r]``.
        quantized: ``[V_r, H]``, which gets no gradient.
        ranks: which rows these are.
        cast: autocast's dtype, or ``None``.
    """
    if quantized is None and ranks.size == 1:
        return F.linear(hidden_states, weight, bias)
    dtype = cast or hidden_states.dtype
    hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    if quantized is not None:
        weight = torch.cat([quantized.rows(0, len(weight)).to(dtype), weight], 1)
    with torch.autocast(hidden_states.device.type, enabled=False):
        tensors = hidden_states, weight, None if bias is None else bias.to(dtype)
        return F.linear(*tensors) if ranks.size == 1 else _OfAllRanks.apply(ranks, *tensors)


class _OfAllRanks(torch.autograd.Function):
    """The columns of all ranks; the gradient of the hidden states is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.ranks = ranks
        ctx.save_for_backward(hidden_states, weight)
        columns = ranks.whole(F.linear(hidden_states, weight, bias).flatten(0, -2).t())
        return columns.t().contiguous().view(*hidden_states.shape[:-1], len(columns))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_states, weight), (_, needs_hidden, needs_weight, needs_bias) = ctx.saved_tensors, ctx.needs_input_grad
        gradient = gradient[..., ctx.ranks.columns(gradient.shape[-1])]
        rows = gradient.flatten(0, -2)
        return (
            None,
            ctx.ranks.sum(gradient @ weight) if needs_hidden else None,
            rows.t() @ hidden_states.flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )
