"""torch.compile sees a call of an autograd function that launches Triton kernels as one operator of its graph.

``liger_losses::forward`` and ``liger_losses::backward`` run the function's own forward and backward.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix, ops
from ..kernels.autograd import NO_TRANSFORMS, within_transform
from ..kernels.tracing import decode, encode, without_values

_functions: dict[str, type[torch.autograd.Function]] = {}


def operator(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` of its arguments and of ``on_triton``; one operator of a compiled graph."""
    name = function.__name__
    _functions[name] = function

    def apply(*arguments: Any, on_triton: bool) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            if within_transform():
                raise RuntimeError(NO_TRANSFORMS)
            return function.apply(*arguments, on_triton)
        tensors: list[Tensor] = []
        form = encode([*arguments, on_triton], tensors)
        key = f"{name}|{', '.join([str(tensor.dtype) for tensor in tensors])}|{form}"
        outputs = ops.forward(tensors, key)
        count = _output_count(key)
        return outputs[0] if count == 1 else tuple(outputs[:count])

    return apply


@torch.compiler.assume_constant_result
def _output_count(key: str) -> int:
    return _calls[key].outputs


class _Context:
    """What an autograd function's forward writes to and its backward reads from, in place of torch's own."""

    saved_tensors: tuple[Tensor | None, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


class _Call(NamedTuple):
    """What forward left: the number of outputs, where each saved tensor is, and the attributes of the context."""

    outputs: int
    #: Of each saved tensor, its index among the inputs (``"input"``), or among outputs and further tensors.
    saved: tuple[tuple[str, int] | None, ...]
    attributes: dict[str, Any]


_calls: dict[str, _Call] = {}
#: Which output of the backward operator is the gradient of each input that needs one, by its last three arguments.
_indices: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int | None, ...]] = {}


@functools.lru_cache(4096)
def _parsed(key: str) -> tuple[str, Any]:
    name, _, form = key.split("|", 2)
    return name, ast.literal_eval(form)


def _run_forward(tensors: Sequence[Tensor], key: str) -> list[Tensor]:
    name, form = _parsed(key)
    context = _Context()
    result = _functions[name].forward(context, *decode(form, tensors))
    found = list(result) if isinstance(result, tuple) else [result]
    outputs, saved = len(found), list[tuple[str, int] | None]()
    for tensor in context.saved_tensors:
        if tensor is None:
            saved.append(None)
            continue
        place = next((("input", i) for i, t in enumerate(tensors) if t is tensor), None)
        if place is None:
            at = next((i for i, t in enumerate(found) if t is tensor), len(found))
            if at == len(found):
                found.append(tensor)
            place = "output", at
        saved.append(place)
    attributes = {name: value for name, value in vars(context).items() if name != "saved_tensors"}
    _calls[key] = _Call(outputs, tuple(saved), attributes)
    return found


def _run_backward(
    saved: Sequence[Tensor], upstream: Sequence[Tensor], which: Sequence[int], needs: Sequence[int], key: str
) -> list[Tensor]:
    name, (_, forms) = _parsed(key)
    call, context, given = _calls[key], _Context(), iter(saved)
    vars(context).update(call.attributes)
    context.saved_tensors = tuple(None if place is None else next(given) for place in call.saved)
    places = [place for place, form in enumerate(forms) if form[0] == "tensor"]
    wanted = [places[i] for i in needs]
    context.needs_input_grad = tuple(place in wanted for place in range(len(forms)))
    gradients: list[Tensor | None] = [None] * call.outputs
    for i, gradient in zip(which, upstream, strict=True):
        gradients[i] = gradient
    with torch.no_grad():
        found = _functions[name].backward(context, *gradients)
    # Outputs of an operator share no memory: a gradient of two inputs is returned once.
    different: list[Tensor] = []
    indices: list[int | None] = []
    for gradient in (found[place] for place in wanted):
        if any(gradient is given for given in upstream):
            gradient = gradient.clone()
        index = next((i for i, other in enumerate(different) if other is gradient), len(different))
        indices.append(None if gradient is None else index)
        if gradient is not None and index == len(different):
            different.append(gradient)
    _indices[key, tuple(which), tuple(needs)] = tuple(indices)
    return different


@torch.library.custom_op(add_op_namespace_prefix("forward"), mutates_args=())
def _forward(tensors: Sequence[Tensor], key: str) -> list[Tensor]:
    """The function's outputs, and what else it saves."""
    return _run_forward(tensors, key)


@_forward.register_fake
def _(tensors: Sequence[Tensor], key: str) -> list[Tensor]:
    with without_values():
        return _run_forward(tensors, key)


@torch.library.custom_op(add_op_namespace_prefix("backward"), mutates_args=())
def _backward(
    saved: Sequence[Tensor], upstream: Sequence[Tensor], which: Sequence[int], needs: Sequence[int], key: str
) -> list[Tensor]:
    """The gradients of the tensors ``needs``, from those of the outputs ``which``."""
    return _run_backward(saved, upstream, which, needs, key)


@_backward.register_fake
def _(
    saved: Sequence[Tensor], upstream: Sequence[Tensor], which: Sequence[int], needs: Sequence[int], key: str
) -> list[Tensor]:
    with without_values():
        return _run_backward(saved, upstream, which, needs, key)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.key = inputs
    ctx.set_materialize_grads(False)
    ctx.count = len(tensors)
    ctx.needs = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    places = [place for place in _calls[ctx.key].saved if place is not None]
    ctx.save_for_backward(*((tensors if kind == "input" else output)[i] for kind, i in places))


def _differentiate(ctx: Any, upstream: Sequence[Tensor | None]) -> tuple[list[Tensor | None], None]:
    grads: list[Tensor | None] = [None] * ctx.count
    which = [i for i, g in enumerate(upstream[: _calls[ctx.key].outputs]) if g is not None]
    if which and ctx.needs:
        given = [upstream[i] for i in which]
        found = ops.backward(list(ctx.saved_tensors), given, which, ctx.needs, ctx.key)
        indices = _indices[ctx.key, tuple(which), tuple(ctx.needs)]
        for i, index in zip(ctx.needs, indices, strict=True):
            grads[i] = None if index is None else found[index]
    return grads, None


_forward.register_autograd(_differentiate, setup_context=_save)
