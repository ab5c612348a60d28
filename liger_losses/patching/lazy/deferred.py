"""How to compute logits later. H hidden size, V vocabulary size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine import Head, linear_statistics
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.reading import version_of
from liger_losses.patching.lazy.head_weights import HeadWeights
from liger_losses.patching.lazy.linear_products import linear
from liger_losses.patching.lazy.warning import cannot_compute


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
        if self.version is not None and self.version != version_of(self.hidden_states):
            raise cannot_compute(
                "the hidden states of lazy logits have changed in place since the forward, so these logits "
                "cannot be computed any more. Compute what you need from them before that, such as "
                "logits.argmax(-1)."
            )
        if self.weights is not None:
            self.weights.check(values)

    def with_tensors(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        """The same operations on other tensors."""
        head = self.head.with_fields(weight=weight, bias=bias)
        return replace(self, hidden_states=hidden_states, head=head, weights=None, version=None)

    def detach(self) -> DeferredLogits:
        """The same logits without gradients."""
        return replace(self, hidden_states=self.hidden_states.detach(), head=self.head.detach())

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
