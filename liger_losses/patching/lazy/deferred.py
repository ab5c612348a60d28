"""How to compute logits later. H hidden size, V vocabulary size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine import Head, linear_statistics


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
        versions: the tensors' in-place versions; they must not change before the logits are computed.
    """

    hidden_states: Tensor
    head: Head
    steps: tuple[tuple[Any, ...], ...] = ()
    autocast: torch.dtype | None = None
    normalized: bool = False
    versions: tuple[int, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias."""
        return self.hidden_states, self.head.weight, self.head.bias

    @property
    def shape(self) -> torch.Size:
        """``[..., V]``."""
        return torch.Size((*self.hidden_states.shape[:-1], self.head.vocab_size))

    def check(self) -> None:
        """Raise RuntimeError if a tensor was changed in place since its version was recorded."""
        if self.versions and self.versions != _versions(self.tensors):
            raise RuntimeError(
                "the hidden states, weight or bias of lazy logits have changed in place since the forward (by an "
                "optimizer's step, say), so these logits cannot be computed any more. Compute what you need of them "
                "before that, or keep logits.clone().softmax(-1) or the like instead of the logits."
            )

    def with_tensors(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        """The same operations on other tensors, whose versions are recorded."""
        head = self.head.with_fields(weight=weight, bias=bias)
        return replace(self, hidden_states=hidden_states, head=head).with_versions()

    def with_versions(self) -> DeferredLogits:
        """With the tensors' in-place versions as they are now."""
        return replace(self, versions=_versions(self.tensors))

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
        self.check()
        with self.under_forward_autocast():
            logits = F.linear(*self.tensors)
            for name, *args in self.steps:
                logits = getattr(logits, name)(*args)
        return logits.log_softmax(-1) if self.normalized else logits

    def statistics(
        self, labels: Tensor, names: Sequence[str], metrics: Sequence[str] = (), selected: Any = None, **options: Any
    ) -> Any:
        """:func:`linear_statistics` of these hidden states and this head, in the shape of ``labels``."""
        self.check()
        hidden_states = self.hidden_states
        one_token = hidden_states.dim() == 1  # the engine takes a batch
        if one_token:
            hidden_states, labels = hidden_states[None], labels[None]
            selected = None if selected is None else selected[None]
        with self.under_forward_autocast():
            statistics = linear_statistics(
                hidden_states, self.head, labels, names, metrics=metrics, selected=selected, **options
            )
        return statistics._make(None if v is None else v[0] for v in statistics) if one_token else statistics


def _versions(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    return tuple(0 if t is None or t.is_inference() else t._version for t in tensors)
