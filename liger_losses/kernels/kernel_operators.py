"""torch.compile sees a kernel and its backward as two registered operators, whose fakes run the torch reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels.autograd import NO_TRANSFORMS, records_tangents, within_transform


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
        if torch.compiler.is_dynamo_compiling():
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
