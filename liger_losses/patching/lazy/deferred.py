"""How to compute logits later. H hidden size, V vocabulary size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine import Head, linear_statistics
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
        steps: the same operations as the model wrote them, in order, for values with the model's own rounding: the
            name of a tensor's method and its arguments.
        autocast: the autocast dtype under which the head ran, or ``None``.
        normalized: whether a log-softmax over the vocabulary follows.
        negated: whether the log-probabilities are multiplied by -1.
        weights: the head's weights in its forward; the head here may have slices of them.
        version: the in-place version of the hidden states, which must not change before the logits are computed.
    """

    hidden_states: Tensor
    head: Head
    steps: tuple[tuple[Any, ...], ...] = ()
    autocast: torch.dtype | None = None
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

    def check(self, values: bool = False) -> None:
        """Raise RuntimeError if the tensors have changed since the forward.

        With ``values``, the weights' values are looked at as well.
        """
        if self.version not in (None, version_of(self.hidden_states)):
            raise cannot_compute(
                "the hidden states of lazy logits have changed in place since the forward, so these logits "
                "cannot be computed any more. Compute what you need from them before that, such as "
                "logits.argmax(-1)."
            )
        if self.weights is not None:
            self.weights.check(values)

    def current(self) -> DeferredLogits:
        """The same logits, if the weights have not changed since the forward; otherwise RuntimeError."""
        self.check(values=True)
        if self.weights is None or self.weights.are_there:
            return self
        weight, bias = (self.weights.gather_tensor(t) for t in (self.head.weight, self.head.bias))
        return replace(self, head=self.head.with_fields(weight=weight, bias=bias))

    def with_tensors(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        """The same operations on other tensors."""
        head = self.head.with_fields(weight=weight, bias=bias)
        return replace(self, hidden_states=hidden_states, head=head, weights=None, version=None)

    def with_version(self) -> DeferredLogits:
        """With the hidden states' in-place version as it is now."""
        return replace(self, version=version_of(self.hidden_states))

    def detach(self) -> DeferredLogits:
        """The same logits without gradients."""
        return replace(self, hidden_states=self.hidden_states.detach(), head=self.head.detach())

    def on_rows(self, operation: Callable[[Tensor], Tensor]) -> DeferredLogits:
        """An operation on the token dimensions, applied to the hidden states instead of the logits."""
        return replace(self, hidden_states=operation(self.hidden_states))

    def with_step(self, *step: Any, **transform: Any) -> DeferredLogits:
        """The logits after one more operation; ``transform`` holds the changed fields of the head's transform."""
        head = self.head.with_fields(transform=replace(self.head.transform, **transform))
        return replace(self, steps=(*self.steps, step), head=head)

    def under_forward_autocast(self) -> torch.autocast:
        """The autocast state of the head's forward, which may have ended by now."""
        return torch.autocast(self.hidden_states.device.type, self.autocast, enabled=self.autocast is not None)

    def values(self) -> Tensor:
        """The logits as an ordinary, differentiable tensor ``[..., V]``, computed by the model's own operations."""
        with self.under_forward_autocast():
            logits = linear(*self.current().tensors, self.head.quantized, self.head.ranks, self.autocast)
            for name, *args in self.steps:
                logits = getattr(logits, name)(*args)
        logits = logits.log_softmax(-1) if self.normalized else logits
        return -logits if self.negated else logits

    def statistics(
        self, labels: Tensor, names: Sequence[str], metrics: Sequence[str] = (), selected: Any = None, **options: Any
    ) -> Any:
        """:func:`linear_statistics` of these hidden states and this head, in the shape of ``labels``."""
        head, hidden_states = self.current().head, self.hidden_states
        one_token = hidden_states.dim() == 1  # the engine takes a batch
        if one_token:
            hidden_states, labels = hidden_states[None], labels[None]
            selected = None if selected is None else selected[None]
        with self.under_forward_autocast():
            statistics = linear_statistics(
                hidden_states, head, labels, names, metrics=metrics, selected=selected, **options
            )
        self.mark_read()
        return statistics._make(None if v is None else v[0] for v in statistics) if one_token else statistics

    def mark_read(self) -> None:
        """Record that the logits were read, after which training code may change the weights."""
        if self.weights is not None:
            self.weights.was_read = True
