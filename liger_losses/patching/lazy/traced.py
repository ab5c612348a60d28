"""Lazy logits while torch.compile traces a model: an ordinary object, so that head and loss become one operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine import Head
from liger_losses.chunked.engine.operators import call_in_graph, register
from liger_losses.chunked.losses.cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.patching.lazy.deferred import DeferredLogits
from liger_losses.patching.lazy.tensor import LazyLogits


def traced_linear(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None) -> TracedLogits:
    """:func:`lazy_linear` in a function that is being compiled."""
    autocast = None if hidden_states.dtype == torch.float64 else autocast_dtype(hidden_states.device)
    return TracedLogits(DeferredLogits(hidden_states, Head(weight, bias), autocast=autocast), autocast)


class TracedLogits:
    """Logits ``[..., V]`` of a model that is being compiled.

    It knows what models do between their head and their cross-entropy: casts, slices and views of tokens, scales and
    soft-caps. Anything else ends the graph, and goes on with :class:`LazyLogits`.
    """

    def __init__(self, deferred: DeferredLogits, dtype: torch.dtype | None = None) -> None:
        self.deferred, self.dtype = deferred, dtype or deferred.hidden_states.dtype

    @property
    def shape(self) -> torch.Size:
        """``[..., V]``."""
        return self.deferred.shape

    @property
    def device(self) -> torch.device:
        """The hidden states'."""
        return self.deferred.hidden_states.device

    @property
    def requires_grad(self) -> bool:
        """Whether hidden states or head require a gradient."""
        return any([tensor is not None and tensor.requires_grad for tensor in self.deferred.tensors])

    def dim(self) -> int:
        """The number of dimensions."""
        return self.deferred.hidden_states.dim()

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one of its entries."""
        return self.shape if dim is None else self.shape[dim]

    def lazy(self) -> LazyLogits:
        """The same logits as a tensor, outside of compiled graphs."""
        return _lazy(self.deferred, self.dtype)

    def float(self) -> TracedLogits:
        """In fp32."""
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """In another dtype, or on the device where they are."""
        if kwargs or len(args) != 1:
            return self.lazy().to(*args, **kwargs)
        (what,) = args
        if what == self.dtype or what == self.device:
            return self
        if not isinstance(what, torch.dtype) or not what.is_floating_point:
            return self.lazy().to(what)
        return TracedLogits(self.deferred.with_step("to", what), what)

    def contiguous(self) -> TracedLogits:
        """Themselves."""
        return self

    def reshape(self, *shape: Any) -> Any:
        """With other token dimensions."""
        sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
        vocab_size, width = self.shape[-1], self.deferred.hidden_states.shape[-1]
        if len(sizes) < 2 or sizes[-1] not in (-1, vocab_size) or (sizes[-1] == -1 and -1 in sizes[:-1]):
            return self.lazy().reshape(*shape)
        if sizes[-1] == -1 and torch.Size(sizes[:-1]).numel() * vocab_size != self.shape.numel():
            return self.lazy().reshape(*shape)
        return self._on_rows(self.deferred.hidden_states.reshape(*sizes[:-1], width))

    view = reshape

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        tokens = self.dim() - 1
        if len(parts) > tokens and parts[-1] == slice(None, None, None):
            parts = parts[:-1]  # the whole vocabulary
        ends_in_tokens = len(parts) <= tokens and not any([part is ... for part in parts])
        if len(parts) > 1 and parts[0] is ...:  # ``[..., :-1, :]``
            parts, ends_in_tokens = (*[slice(None)] * (tokens - len(parts) + 1), *parts[1:]), len(parts) - 1 <= tokens
        if not ends_in_tokens or not all([isinstance(part, (slice, int)) for part in parts]):
            return self.lazy()[index]
        return self._on_rows(self.deferred.hidden_states[parts])

    def __mul__(self, other: Any) -> Any:
        return self._scaled("mul", other, other)

    def __rmul__(self, other: Any) -> Any:
        return self._scaled("mul", other, other)

    def __truediv__(self, other: Any) -> Any:
        return self._scaled("div", other, 1 / other if isinstance(other, (int, float)) and other else 0)

    def tanh(self) -> Any:
        """The soft-cap's tanh."""
        if self.deferred.head.transform.softcap is not None:
            return self.lazy().tanh()
        return TracedLogits(self.deferred.with_step("tanh", softcap=1.0), self.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lazy(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func is torch.tanh:
            return args[0].tanh()
        args = [part.lazy() if isinstance(part, TracedLogits) else part for part in args]
        kwargs = {name: part.lazy() if isinstance(part, TracedLogits) else part for name, part in kwargs.items()}
        return func(*args, **kwargs)

    def _on_rows(self, hidden_states: Tensor) -> TracedLogits:
        return TracedLogits(replace(self.deferred, hidden_states=hidden_states), self.dtype)

    def _scaled(self, name: str, other: Any, by: Any) -> Any:
        transform = self.deferred.head.transform
        if isinstance(by, bool) or not isinstance(by, (int, float)) or by == 0:
            return getattr(self.lazy(), name)(other)
        changes = {"logit_scale": transform.logit_scale * by}
        if transform.softcap is not None:
            if by < 0:
                return getattr(self.lazy(), name)(other)
            changes["softcap"] = transform.softcap * by
        return TracedLogits(self.deferred.with_step(name, other, **changes), self.dtype)


@torch.compiler.disable
def _lazy(deferred: DeferredLogits, dtype: torch.dtype) -> LazyLogits:
    return LazyLogits.make(deferred, dtype)


def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy``."""
    traced = isinstance(logits, TracedLogits) and isinstance(target, Tensor)
    supported = traced and target.dtype == torch.int64 and target.dim() == 1 and logits.dim() == 2
    if not supported or size_average is not None or reduce is not None:
        logits, target = (part.lazy() if isinstance(part, TracedLogits) else part for part in (logits, target))
        return F.cross_entropy(logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    deferred = logits.deferred
    with deferred.under_forward_autocast():
        inputs = (deferred.head, deferred.hidden_states, target, weight, ignore_index, reduction, label_smoothing)
        return call_in_graph("cross_entropy_of_logits", inputs, {}).to(logits.dtype)


@register
def cross_entropy_of_logits(
    head: Head,
    hidden_states: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """``F.cross_entropy`` of the logits of hidden states ``[T, H]``."""
    loss_fn = LigerFusedLinearCrossEntropyLoss(
        weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss_fn(head, hidden_states, target)
