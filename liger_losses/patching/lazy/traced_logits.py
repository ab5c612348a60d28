"""Lazy logits while torch.compile traces a model: an ordinary object, so that head and loss become one operator."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine import Head
from liger_losses.chunked.losses.cross_entropy import linear_cross_entropy
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.patching.lazy.deferred import DeferredLogits
from liger_losses.patching.lazy.head_weights import HeadWeights, samples_of
from liger_losses.patching.lazy.tensor import LazyLogits, autocast_of, can_be_lazy


def traced_linear(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """:func:`lazy_linear` in a function that is being compiled."""
    if not can_be_lazy(hidden_states, weight, bias):
        return F.linear(hidden_states, weight, bias)
    head, autocast = (weight, bias), autocast_of(hidden_states)
    dtype = autocast or hidden_states.dtype
    return TracedLogits(hidden_states, head, (1.0, None), (), autocast, dtype, samples_of(head))


@torch.compiler.assume_constant_result
def is_one_graph() -> bool:
    """Whether the function that is being compiled must be one graph (``fullgraph=True``), or torch cannot say."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        transaction = InstructionTranslator.current_tx()
        return bool(transaction.one_graph or transaction.error_on_graph_break)
    except (ImportError, AttributeError):  # torch has no public function; any graph can return traced logits
        return True


class TracedLogits:
    """Logits ``[..., V]`` of a model that is being compiled.

    It knows what models do between their head and their cross-entropy: casts, slices and views of tokens, scales and
    soft-caps. Anything else ends the graph, and goes on with :class:`LazyLogits`.

    Attributes:
        hidden_states: ``[..., H]``.
        head: weight ``[V, H]`` and bias ``[V]`` or ``None``.
        transform: logit scale and soft-cap, and
        steps: the operations that they come from, as in :class:`DeferredLogits`. (All attributes are simple values, as
            a compiled graph returns them one by one.)
        autocast: the dtype of the head's autocast, or ``None``.
        dtype: the logits'.
        samples: some values of the head in its forward. If the graph returns these logits, nothing else tells whether
            the head has changed by the time that they are read.
    """

    def __init__(
        self,
        hidden_states: Tensor,
        head: tuple[Tensor, Tensor | None],
        transform: tuple[float, float | None],
        steps: tuple[tuple[Any, ...], ...],
        autocast: torch.dtype | None,
        dtype: torch.dtype,
        samples: tuple[Tensor, ...],
    ) -> None:
        self.hidden_states, self.head, self.transform = hidden_states, head, transform
        self.steps, self.autocast, self.dtype, self.samples = steps, autocast, dtype, samples

    @property
    def shape(self) -> torch.Size:
        """``[..., V]``."""
        return torch.Size((*self.hidden_states.shape[:-1], self.head[0].shape[0]))

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self.hidden_states.device

    @property
    def requires_grad(self) -> bool:
        """Whether hidden states or head require a gradient."""
        return any(tensor is not None and tensor.requires_grad for tensor in (self.hidden_states, *self.head))

    def dim(self) -> int:
        """The number of dimensions."""
        return self.hidden_states.dim()

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one of its entries."""
        return self.shape if dim is None else self.shape[dim]

    def lazy(self) -> LazyLogits:
        """The same logits as a tensor, outside of compiled graphs."""
        dtypes = self.autocast, self.dtype
        return _lazy(self.hidden_states, self.head, self.transform, self.steps, dtypes, self.samples)

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
        return self._after(("to", what), dtype=what)

    def contiguous(self) -> TracedLogits:
        """These logits: they have no memory that could be laid out otherwise."""
        return self

    def reshape(self, *shape: Any) -> Any:
        """With other token dimensions."""
        sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
        vocab_size, width = self.shape[-1], self.hidden_states.shape[-1]
        if len(sizes) < 2 or sizes[-1] not in (-1, vocab_size) or (sizes[-1] == -1 and -1 in sizes[:-1]):
            return self.lazy().reshape(*shape)
        if sizes[-1] == -1 and torch.Size(sizes[:-1]).numel() * vocab_size != self.shape.numel():
            return self.lazy().reshape(*shape)
        return self._on_rows(self.hidden_states.reshape(*sizes[:-1], width))

    view = reshape

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        tokens = self.dim() - 1
        if len(parts) > tokens and parts[-1] == slice(None, None, None):
            parts = parts[:-1]  # the whole vocabulary
        ends_in_tokens = len(parts) <= tokens and not any(part is ... for part in parts)
        if len(parts) > 1 and parts[0] is ...:  # ``[..., :-1, :]``
            parts, ends_in_tokens = (*[slice(None)] * (tokens - len(parts) + 1), *parts[1:]), len(parts) - 1 <= tokens
        if not ends_in_tokens or not all(isinstance(part, (slice, int)) for part in parts):
            return self.lazy()[index]
        return self._on_rows(self.hidden_states[parts])

    def __mul__(self, other: Any) -> Any:
        return self._scaled("mul", other, other)

    def __rmul__(self, other: Any) -> Any:
        return self._scaled("mul", other, other)

    def __truediv__(self, other: Any) -> Any:
        return self._scaled("div", other, 1 / other if isinstance(other, (int, float)) and other else 0)

    def __add__(self, other: Any) -> Any:
        """The sum of two products, such as a head's and its adapter's: one product of both heads side by side."""
        if not isinstance(other, TracedLogits) or not self._can_add(other):
            return self.lazy() + _without_traced(other)
        (weight, bias), (other_weight, other_bias), scale = self.head, other.head, other.transform[0]
        hidden_states = [self.hidden_states, other.hidden_states * scale]
        weights = [weight, other_weight]
        if self.autocast is not None:
            hidden_states, weights = ([t.to(self.autocast) for t in parts] for parts in (hidden_states, weights))
        if other_bias is not None:
            bias = other_bias * scale if bias is None else bias + other_bias * scale
        head, together = (torch.cat(weights, -1), bias), torch.cat(hidden_states, -1)
        return TracedLogits(together, head, self.transform, (), self.autocast, self.dtype, samples_of(head))

    def _can_add(self, other: TracedLogits) -> bool:
        same = (self.autocast, self.dtype, self.shape) == (other.autocast, other.dtype, other.shape)
        dtypes = [(logits.hidden_states.dtype, logits.head[0].dtype) for logits in (self, other)]
        simple = not self.steps and other.transform[1] is None
        return same and simple and (dtypes[0] == dtypes[1] or self.autocast is not None)

    def tanh(self) -> Any:
        """The soft-cap's tanh."""
        scale, softcap = self.transform
        return self.lazy().tanh() if softcap is not None else self._after(("tanh",), (scale, 1.0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lazy(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func is torch.tanh:
            return args[0].tanh()
        args = [_without_traced(part) for part in args]
        return func(*args, **{name: _without_traced(part) for name, part in kwargs.items()})

    def _on_rows(self, hidden_states: Tensor) -> TracedLogits:
        others = self.head, self.transform, self.steps, self.autocast, self.dtype, self.samples
        return TracedLogits(hidden_states, *others)

    def _after(self, step: tuple[Any, ...], transform: Any = None, dtype: torch.dtype | None = None) -> TracedLogits:
        """After one more operation."""
        changed = transform or self.transform, (*self.steps, step), self.autocast, dtype or self.dtype
        return TracedLogits(self.hidden_states, self.head, *changed, self.samples)

    def _scaled(self, name: str, other: Any, by: Any) -> Any:
        scale, softcap = self.transform
        if isinstance(by, bool) or not isinstance(by, (int, float)) or by == 0 or (softcap is not None and by < 0):
            return getattr(self.lazy(), name)(other)
        return self._after((name, other), (scale * by, None if softcap is None else softcap * by))


def _operator(name: str) -> Any:
    def operator(self: TracedLogits, *others: Any) -> Any:
        return getattr(self.lazy(), name)(*[_without_traced(other) for other in others])

    return operator


# Python looks for operators in the class alone, and does not call __getattr__.
for _name in """radd sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs eq ne lt le gt ge
    and or xor invert bool float int len iter contains setitem""".split():  # noqa: SIM905
    setattr(TracedLogits, f"__{_name}__", _operator(f"__{_name}__"))


def _without_traced(value: Any) -> Any:
    """An argument in which :class:`LazyLogits` take the place of :class:`TracedLogits`."""
    if isinstance(value, TracedLogits):
        return value.lazy()
    return type(value)([_without_traced(part) for part in value]) if type(value) in (list, tuple) else value


@torch.compiler.disable
def _lazy(hidden_states: Tensor, head: Any, transform: Any, steps: Any, dtypes: Any, samples: Any) -> LazyLogits:
    (weight, bias), (scale, softcap) = head, transform
    weights = HeadWeights(weight, bias, hidden_states.shape[:-1].numel(), samples=samples)
    made = Head(weight, bias, LogitTransform(1.0, scale, softcap))
    return LazyLogits.make(DeferredLogits(hidden_states, made, steps, dtypes[0], weights=weights), dtypes[1])


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
    # After a graph that has ended, or returned these logits, nothing is traced any more.
    traced = torch.compiler.is_dynamo_compiling() and isinstance(logits, TracedLogits) and isinstance(target, Tensor)
    supported = traced and target.dtype == torch.int64 and target.dim() == 1 and logits.dim() == 2
    if not supported or size_average is not None or reduce is not None:
        logits, target = _without_traced(logits), _without_traced(target)
        return F.cross_entropy(logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    (head_weight, bias), (scale, softcap) = logits.head, logits.transform
    head = Head(head_weight, bias, LogitTransform(1.0, scale, softcap))
    with torch.autocast(logits.device.type, logits.autocast, enabled=logits.autocast is not None):
        loss = linear_cross_entropy(
            logits.hidden_states,
            head,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    # Autocast runs it in fp32.
    return loss if autocast_dtype(logits.device) is not None else loss.to(logits.dtype)
