"""Lazy logits while torch.compile traces a model: an ordinary object, so that head and loss become one operator."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(eq=False)
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

    hidden_states: Tensor
    head: tuple[Tensor, Tensor | None]
    transform: tuple[float, float | None]
    steps: tuple[tuple[Any, ...], ...]
    autocast: torch.dtype | None
    dtype: torch.dtype
    samples: tuple[Tensor, ...]

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
        return _lazy(*self._fields())

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
        if sizes[-1] == -1 and -1 not in sizes[:-1]:
            sizes[-1] = self.shape.numel() // max(torch.Size(sizes[:-1]).numel(), 1)
        if len(sizes) < 2 or sizes[-1] != vocab_size:
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

    __rmul__ = __mul__

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
        return self.lazy().tanh() if softcap is not None else self._after(("tanh",), transform=(scale, 1.0))

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

    def _fields(self, **changes: Any) -> list[Any]:
        names = ("hidden_states", "head", "transform", "steps", "autocast", "dtype", "samples")
        return [changes.get(name, getattr(self, name)) for name in names]

    def _on_rows(self, hidden_states: Tensor) -> TracedLogits:
        return TracedLogits(*self._fields(hidden_states=hidden_states))

    def _after(self, step: tuple[Any, ...], **changes: Any) -> TracedLogits:
        """After one more operation."""
        return TracedLogits(*self._fields(steps=(*self.steps, step), **changes))

    def _scaled(self, name: str, other: Any, by: Any) -> Any:
        scale, softcap = self.transform
        if isinstance(by, bool) or not isinstance(by, (int, float)) or by == 0 or (softcap is not None and by < 0):
            return getattr(self.lazy(), name)(other)
        return self._after((name, other), transform=(scale * by, None if softcap is None else softcap * by))


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
def _lazy(
    hidden_states: Tensor, head: Any, transform: Any, steps: Any, autocast: Any, dtype: torch.dtype, samples: Any
) -> LazyLogits:
    weight, bias = head
    weights = HeadWeights(weight, bias, hidden_states.shape[:-1].numel(), samples=samples)
    deferred = DeferredLogits(hidden_states, _head(head, transform), steps, autocast, weights=weights)
    return LazyLogits.make(deferred, dtype)


def _head(head: Any, transform: Any) -> Head:
    (weight, bias), (scale, softcap) = head, transform
    return Head(weight, bias, LogitTransform(1.0, scale, softcap))


def _cross_entropy(logits: Any, target: Any, weight: Tensor | None = None, *others: Any, **options: Any) -> Any:
    """``F.cross_entropy``."""
    # After a graph that has ended, or returned these logits, nothing is traced any more.
    traced = torch.compiler.is_dynamo_compiling() and isinstance(logits, TracedLogits) and isinstance(target, Tensor)
    supported = traced and target.dtype == torch.int64 and target.dim() == 1 and logits.dim() == 2
    options = {name: value for name, value in options.items() if value is not None}
    known = all(name in ("ignore_index", "reduction", "label_smoothing") for name in options)
    if not supported or others or not known:
        return F.cross_entropy(_without_traced(logits), _without_traced(target), weight, *others, **options)
    with torch.autocast(logits.device.type, logits.autocast, enabled=logits.autocast is not None):
        head = _head(logits.head, logits.transform)
        loss = linear_cross_entropy(logits.hidden_states, head, target, weight, **options)
    # Autocast runs it in fp32.
    return loss if autocast_dtype(logits.device) is not None else loss.to(logits.dtype)
