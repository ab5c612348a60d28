"""Gradients of lazy logits, which are not known themselves, only as gradients of hidden states and head.

What is computed of lazy logits is computed of tensors that depend on them (:func:`inputs_of`): the hidden states,
weight and bias. Backward sends the gradients of these through the logits' node as one :class:`LazyGradient`, so that
what waits for the gradient of the logits (a hook of fully_shard or DeepSpeed, an autograd function of DDP) sees one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels.autograd import once_differentiable
from liger_losses.patching.lazy.deferred import DeferredLogits

_aten = torch.ops.aten
#: Operations that leave a gradient as it is, and linear ones, which change all of its parts alike.
_SAME = (_aten.detach.default, _aten.alias.default, _aten.clone.default)
_LINEAR = (_aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar, _aten.neg.default)

#: Makes a tensor without memory, of a subclass; ``None`` in a torch that cannot, where no logits are lazy.
make_empty: Any = getattr(Tensor, "_make_wrapper_subclass", None)


def empty(kind: type[Tensor], deferred: DeferredLogits) -> Any:
    """A tensor without memory that looks like the logits."""
    return make_empty(kind, deferred.shape, dtype=deferred.dtype, device=deferred.device)


def of_inputs(source: DeferredLogits, gradient: Tensor) -> list[Tensor | None]:
    """From the gradient of the logits to the gradients of hidden states, weight and bias."""
    *known, values = _parts(source, gradient)
    return known if values is None else _sums(known, _recomputed_gradients(source, values))


def _recomputed_gradients(source: DeferredLogits, gradient: Tensor) -> list[Tensor | None]:
    """The gradients of hidden states, weight and bias, by computing the logits once more."""
    pairs = zip(source.tensors, source.needs_grad, strict=True)
    leaves: list[Any] = [t if t is None else t.detach().requires_grad_(n) for t, n in pairs]
    with torch.enable_grad():
        logits = source.with_tensors(*leaves).values()
    needed = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(logits, needed, gradient.to(logits.dtype)))
    return [next(found) if needs else None for needs in source.needs_grad]


def without_subclasses(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch that is to see tensors and no subclasses of them."""
    return Tensor.__torch_function__(func, (), args, kwargs)


class LazyGradient(Tensor):
    """The gradient of lazy logits, as gradients of hidden states and head; its values are not known.

    It can be scaled, added to others and passed on, as hooks and autograd functions do that only wait for it.

    Attributes:
        source: what the node whose gradient it is computes its logits of.
        parts: gradients of hidden states, weight and bias, and of the logits, to be added; ``None`` is 0.
    """

    source: DeferredLogits
    parts: list[Tensor | None]

    @staticmethod
    def make(source: DeferredLogits, parts: list[Tensor | None]) -> LazyGradient:
        """The gradient of a node's logits."""
        gradient: LazyGradient = empty(LazyGradient, source)
        gradient.source, gradient.parts = source, parts
        return gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return without_subclasses(func, *args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        source = next(arg.source for arg in args if isinstance(arg, LazyGradient))
        numbers = all(not isinstance(arg, Tensor) or arg.dim() == 0 for arg in args[1:])
        if func in _SAME:
            return LazyGradient.make(source, args[0].parts)
        if func in _LINEAR and numbers:
            return LazyGradient.make(source, [p if p is None else func(p, *args[1:]) for p in args[0].parts])
        if func is _aten.add.Tensor and not kwargs:
            return LazyGradient.make(source, _sums(*(_parts(source, arg) for arg in args)))
        if func is _aten.isnan.default:  # torch.autograd.detect_anomaly asks
            none = torch.zeros((), dtype=torch.bool, device=args[0].device)
            found = [part.isnan().any() for part in args[0].parts if part is not None]
            return torch.stack([none, *found]).any().expand(args[0].shape)
        raise RuntimeError(
            f"{func} needs the values of a gradient with respect to lazy logits, which were not computed, because "
            "the loss was not computed from values of the logits. To get this gradient, compute the loss from "
            "liger_losses.patching.lazy.true_values(logits)."
        )


def _parts(source: DeferredLogits, gradient: Tensor) -> list[Tensor | None]:
    if not isinstance(gradient, LazyGradient):
        return [None, None, None, gradient]
    if gradient.source is not source:
        raise RuntimeError(
            "an autograd function has passed the gradient of lazy logits on to other lazy logits, where its "
            "values are not known; compute the loss from liger_losses.patching.lazy.true_values(logits)."
        )
    return gradient.parts


def _sums(one: list[Tensor | None], two: list[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(one, two, strict=True)]


class _Inputs(torch.autograd.Function):
    """Hidden states, weight and bias as functions of the lazy logits that were computed of them."""

    @staticmethod
    def forward(ctx: Any, source: DeferredLogits, logits: Tensor) -> tuple[Tensor | None, ...]:
        ctx.source = source
        ctx.set_materialize_grads(False)
        inputs = [t if t is None else t.detach() for t in source.tensors]
        frozen = [t for t, needs in zip(inputs, source.needs_grad, strict=True) if t is not None and not needs]
        ctx.mark_non_differentiable(*frozen)
        return tuple(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, LazyGradient.make(ctx.source, [*gradients, None])


def inputs_of(logits: Tensor, source: DeferredLogits) -> DeferredLogits:
    """The logits' hidden states and head as tensors whose gradients reach ``logits`` as a :class:`LazyGradient`."""
    if logits.grad_fn is None or not any(source.needs_grad):
        raise RuntimeError(
            "lazy logits were given a gradient that does not lead to their hidden states and head, by requires_grad_() "
            "or an autograd function; give liger_losses.patching.lazy.true_values(logits) a gradient instead."
        )
    with torch.inference_mode(False), torch.enable_grad():
        return source.with_tensors(*_Inputs.apply(source, logits))
