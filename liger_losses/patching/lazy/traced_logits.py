"""Lazy logits while torch.compile traces a model: an ordinary object, so that head and loss become one operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked import Head
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.patching.lazy.deferred import DeferredLogits, HeadWeights, samples_of
from liger_losses.patching.lazy.operations import OPERATIONS
from liger_losses.patching.lazy.tensor import LazyLogits, can_be_lazy, deferred_linear, replace_all


def traced_linear(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """:func:`lazy_linear` in a function that is being compiled."""
    if not can_be_lazy(hidden_states, weight, bias):
        return F.linear(hidden_states, weight, bias)
    head = Head(weight, bias, LogitTransform())  # a graph cannot return the head's default
    deferred = deferred_linear(hidden_states, head)
    return TracedLogits(deferred, (weight, bias), samples_of((weight, bias)))


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

    It knows what models do between their head and their cross-entropy, the operations ``in_graphs``. Anything else ends
    the graph, and goes on with :class:`LazyLogits`.

    Args:
        deferred: how to compute them.
        weights: weight and bias in the forward, and
        samples: some of their values. If the graph returns these logits, nothing else tells whether the head has
            changed by the time that they are read.
    """

    def __init__(self, deferred: DeferredLogits, weights: tuple[Tensor, Tensor | None], samples: Any) -> None:
        self.deferred, self.weights, self.samples = deferred, weights, samples

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.deferred.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one of its entries."""
        return self.deferred.shape if dim is None else self.deferred.shape[dim]

    @torch.compiler.disable
    def lazy(self) -> LazyLogits:
        """The same logits as a tensor, outside of compiled graphs."""
        return LazyLogits.make(replace(self.deferred, weights=HeadWeights(*self.weights, samples=self.samples)))

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "device", "requires_grad"):
            return getattr(self.deferred, name)
        operation = OPERATIONS.get(name)
        if operation is None or not operation.in_graphs:
            return getattr(self.lazy(), name)
        return lambda *args, **kwargs: _call(name, getattr(Tensor, name), (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func.__name__, func, args, kwargs or {})


def _call(name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation in the graph, or the same one on lazy logits."""
    operation, first = OPERATIONS.get(name), args[0] if args else None
    # After a graph that has ended, or returned these logits, nothing is traced any more.
    if operation is not None and operation.in_graphs and isinstance(first, TracedLogits) and _is_traced():
        others = [arg.deferred if isinstance(arg, TracedLogits) else arg for arg in args[1:]]
        found = operation(first.deferred, *others, **kwargs)
        if isinstance(found, DeferredLogits):
            return TracedLogits(found, first.weights, first.samples)
        if found is not NotImplemented:
            return found
    return func(*without_traced(args), **without_traced(kwargs))


def _is_traced() -> bool:
    return torch.compiler.is_dynamo_compiling()


def _operator(name: str) -> Any:
    def operator(self: TracedLogits, *others: Any) -> Any:
        return _call(name, getattr(Tensor, name), (self, *others), {})

    return operator


# Python looks for operators in the class alone, and does not call __getattr__.
for _name in """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos
    abs eq ne lt le gt ge and or xor invert bool float int len iter contains getitem setitem""".split():  # noqa: SIM905
    setattr(TracedLogits, f"__{_name}__", _operator(f"__{_name}__"))


def without_traced(value: Any) -> Any:
    """An argument in which :class:`LazyLogits` take the place of :class:`TracedLogits`."""
    return replace_all(value, TracedLogits, TracedLogits.lazy)
