"""Shared by the autograd functions: backwards that cannot be differentiated again, registered operators, autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from liger_losses.kernels._triton import jit, tl

ONLY_FIRST_DERIVATIVES = (
    "second derivatives are not supported here: a gradient that was computed with create_graph=True was differentiated "
    "again, as torch.autograd.functional.jvp, hvp, vhp and hessian do, and gradient penalties. Compute these with "
    "plain PyTorch: from a model without patch(), and a loss of its logits."
)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``backward`` whose gradients raise when they are differentiated again, by any tensor that they depend on.

    These are the upstream gradients and the saved tensors, so that forward must save the inputs on which gradients
    depend, or their :func:`edges` (a constant upstream gradient of a linear function has a constant gradient). With
    torch's decorator of this name, gradients are constants as far as ``torch.autograd.grad`` can see.

    A backward may read the saved tensors of another node, ``ctx.saved_first``, in place of its own.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *upstream: Tensor | None) -> Any:
        if not torch.compiler.is_dynamo_compiling() and (within_transform() or any(map(_is_batched, upstream))):
            raise RuntimeError(NO_TRANSFORMS)
        if not torch.is_grad_enabled():
            return backward(ctx, *upstream)
        node = _Node(ctx)
        sources = [*upstream, *getattr(node, "saved_first", node).saved_tensors]
        sources = [tensor for tensor in sources if tensor is not None and tensor.requires_grad]
        with torch.no_grad():
            gradients = backward(node, *upstream)
        there = [gradient for gradient in gradients if gradient is not None]
        refusing = iter(_Refusing.apply(len(there), *there, *sources))
        return tuple([gradient if gradient is None else next(refusing) for gradient in gradients])

    return wrapped


class _Node:
    """A node of the graph, whose saved tensors are read once: activation checkpointing raises at a second time."""

    def __init__(self, ctx: Any) -> None:
        vars(self).update(ctx=ctx)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.ctx, name)
        if name == "saved_first":
            value = _Node(value)
        if name in ("saved_first", "saved_tensors"):
            vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


class _Refusing(torch.autograd.Function):
    """The first ``count`` tensors, as functions of all, whose derivatives raise."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        raise RuntimeError(ONLY_FIRST_DERIVATIVES)


def edges(*tensors: Tensor | None) -> list[Tensor]:
    """Tensors without elements that lead to ``tensors`` in the graph, for a forward that does not save these."""
    with torch.enable_grad():
        return [tensor[:0].clone() for tensor in tensors if tensor is not None and tensor.requires_grad]


def records_tangents() -> bool:
    """Whether forward-mode differentiation may be on; torch has no public name for that."""
    return getattr(forward_ad, "_current_level", 0) >= 0


#: Whether a transform of ``torch.func`` runs. None reaches into kernels that write to given memory.
within_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
#: Whether a gradient is one of many, of ``is_grads_batched``; torch has no public name for that.
_batched: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)
NO_TRANSFORMS = (
    "torch.func's transforms (grad, vmap, jvp, jacrev ...) and is_grads_batched=True (vectorize=True) are not "
    "supported here; torch.autograd.grad, called for one gradient at a time, gives the same first derivatives."
)


def _is_batched(gradient: Tensor | None) -> bool:
    return gradient is not None and _batched(gradient)


def records_nothing() -> bool:
    """Whether neither autograd, a transform nor torch.compile records what runs now."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return not (torch.is_grad_enabled() or within_transform() or records_tangents())


def operator(
    name: str,
    function: type[torch.autograd.Function],
    inputs: str,
    gradients: Callable[..., list[Tensor]],
    gradient_inputs: str,
    fake: Callable[..., Sequence[Tensor]] | None = None,
    gradient_fake: Callable[..., list[Tensor]] | None = None,
) -> Callable[..., Any]:
    """``function.apply``, which in a compiled graph is the operator ``name`` and, in backward, ``<name>_backward``.

    Args:
        name: with its namespace.
        function: with ``forward(*inputs)``, ``setup_context(ctx, inputs, outputs)`` and ``backward(ctx, *upstream,
            gradients=...)``. Outputs share no memory with inputs. The last input says whether Triton runs.
        gradients: what its ``backward`` calls, with tensors and numbers; its last argument says whether Triton runs.
        inputs, gradient_inputs: the schemas of both.
        fake, gradient_fake: return tensors of the same shapes, dtypes and strides; by default the torch reference,
            which runs on tensors without values.
    """
    backward = torch.library.custom_op(
        f"{name}_backward", gradients, mutates_args=(), schema=f"({gradient_inputs}) -> Tensor[]"
    )
    backward.register_fake(gradient_fake or (lambda *arguments: gradients(*arguments[:-1], False)))

    def run(*arguments: Any) -> list[Tensor]:
        return list(function.forward(*arguments))

    forward = torch.library.custom_op(name, run, mutates_args=(), schema=f"({inputs}) -> Tensor[]")
    forward.register_fake(fake or (lambda *arguments: run(*arguments[:-1], False)))
    once: Any = getattr(function.backward, "__wrapped__", function.backward)
    forward.register_autograd(
        lambda ctx, upstream: tuple(once(ctx, *upstream, gradients=backward)), setup_context=function.setup_context
    )

    # torch binds the arguments of a function with a setup_context to its signature at each call: as long as a launch.
    at_once: Any = type(
        function.__name__,
        (torch.autograd.Function,),
        {"forward": staticmethod(partial(_forward_at_once, function)), "backward": staticmethod(function.backward)},
    )

    def apply(*arguments: Any) -> Any:
        # On the meta device, the operator takes the memory that the kernel would, and the reference more.
        if torch.compiler.is_dynamo_compiling() or (arguments[0].is_meta and not arguments[-1]):
            return tuple(forward(*arguments))
        if within_transform():
            raise RuntimeError(NO_TRANSFORMS)
        return at_once.apply(*arguments) if torch.is_grad_enabled() else function.forward(*arguments)

    return apply


def _forward_at_once(function: type[torch.autograd.Function], ctx: Any, *arguments: Any) -> Any:
    outputs = function.forward(*arguments)
    function.setup_context(ctx, arguments, outputs)
    return outputs


def where_needed(gradients: Iterable[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients in their order, and ``None`` where none is needed."""
    found = iter(gradients)
    return [next(found) if need else None for need in needs]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on a device; ``None`` if it is off, or unavailable (as on the meta device)."""
    kind = device.type
    if kind in ("cuda", "cpu"):
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    # torch.compile cannot ask whether autocast is available before torch 2.12.
    available = kind != "meta" and (torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind))
    available = available and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if available else None


def scale_(factor: Tensor, tensors: Sequence[Tensor], *, backend: str = "torch") -> None:
    """``tensor *= factor``, of each tensor; on a GPU, where the factor is not 1.

    The upstream gradient of a loss is mostly 1, which the host cannot know.

    Args:
        factor: 0-dim, on the same device.
        tensors: any shape, contiguous, floating point.
        backend: ``torch`` or ``triton``.
    """
    for tensor in tensors:
        if backend == "torch":
            tensor.mul_(factor)
        elif count := tensor.numel():
            _scale_kernel[(min(-(-count // _BLOCK), 4096),)](tensor, factor, count, BLOCK=_BLOCK, num_warps=8)


_BLOCK = 4096


@jit(do_not_specialize_on_alignment=["factor"])
def _scale_kernel(tensor, factor, count, BLOCK: tl.constexpr):
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0).to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(tensor + at, mask=at < count)
            tl.store(tensor + at, (value.to(tl.float32) * f).to(tensor.dtype.element_ty), mask=at < count)
