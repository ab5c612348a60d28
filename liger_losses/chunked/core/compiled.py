"""The two ways in, as :mod:`stream <liger_losses.chunked.core.stream>` has them, which are operators of torch.compile.

A graph holds tensors, and no objects: a call is written down as a text, the expression that makes it again. Each tensor
in it is an entry of a list, and each number that may change is an entry of that list's last tensor.

- ``liger_losses::chunked`` has the statistics of all tokens; or the sum of their losses, and the gradients that its
  backward scales;
- ``liger_losses::chunked_gradients`` is its backward where there is no loss: it computes logits again and takes the
  statistics from forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from liger_losses.chunked.core import stream
from liger_losses.chunked.core.head import Head, LowRank
from liger_losses.chunked.core.options import EngineOptions
from liger_losses.chunked.core.ranks import ALONE
from liger_losses.chunked.core.statistics import Statistic, asked_for
from liger_losses.chunked.core.stream import Values
from liger_losses.chunked.core.target import Target, TeacherLogits, TokenLoss
from liger_losses.chunked.core.weights import Concatenated, Dense, WithAdapters
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.matmul import wide_dtype

N = TypeVar("N", bound=Callable[..., Any])

_OF_HEADS = (Concatenated, Dense, Head, LogitTransform, LowRank, WithAdapters)
_OF_CALLS = (Divergence, EngineOptions, Statistic, Target, TeacherLogits, TokenLoss, stream.loss_sum, stream.statistics)
#: What a text may name. Dataclasses and named tuples are written as calls of their constructors.
_NAMES: dict[str, Any] = {"torch": torch, "ALONE": ALONE, **{part.__name__: part for part in (*_OF_HEADS, *_OF_CALLS)}}


def in_graphs(thing: N) -> N:
    """Decorate what an operator calls: functions of single tokens' losses, and classes of what they read."""
    _NAMES[thing.__name__] = thing
    return thing


# --- Calls as texts: torch.compile traces this ------------------------------------------------------------------------


def _place_of(value: Tensor, tensors: list[Tensor]) -> int:
    """The number of a tensor in the list, to which it is added where it is not there yet."""
    for number, tensor in enumerate(tensors):
        if tensor is value:
            return number
    tensors.append(value)
    return len(tensors) - 1


def _written(value: Any, tensors: list[Tensor], numbers: list[float]) -> str:
    """An expression of this value, whose tensors and numbers are entries of the lists."""
    if isinstance(value, Tensor):
        return f"tensors[{_place_of(value, tensors)}]"
    if isinstance(value, float):
        numbers.append(value)
        return f"numbers[{len(numbers) - 1}]"
    if value is ALONE:
        return "ALONE"
    if isinstance(value, dict):
        return "{" + "".join([f"{k!r}: {_written(v, tensors, numbers)}, " for k, v in value.items()]) + "}"
    names = getattr(type(value), "_fields", None) or getattr(type(value), "__match_args__", None)
    if names is not None and type(value) is not Tensor:
        fields = [(name, getattr(value, name)) for name in names]
        written = [f"{name}={_written(part, tensors, numbers)}, " for name, part in fields if part is not None]
        return f"{type(value).__name__}({''.join(written)})"
    if isinstance(value, (list, tuple)):
        parts = "".join([f"{_written(part, tensors, numbers)}, " for part in value])
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    if callable(value):
        return value.__name__
    return f"{value}" if isinstance(value, torch.dtype) else f"{value!r}"


def _outputs(targets: Sequence[Target], asked: Sequence[Statistic], tensors: list[Tensor]) -> str:
    """Of each statistic, the place of a tensor of its shape, what follows that shape, and its dtype."""
    outputs = ""
    for target in targets:
        for s in asked:
            like, k, selected = target.labels, "", target.selected
            if s.name in ("selected_logps", "columns"):
                like, k = (selected, "") if isinstance(selected, Tensor) else (like, f"{selected},")
            dtype = torch.int64 if s.name in ("argmax", "columns") else wide_dtype(target.hidden.dtype)
            outputs += f"({_place_of(like, tensors)}, ({k}), {dtype}), "
    return outputs


def traced(
    name: str, targets: Sequence[Target], asked: Sequence[Statistic], *arguments: Any, losses: bool = False
) -> tuple[list[Tensor], list[Values]]:
    """What the function of this name has of its arguments, as an operator: the sum of ``losses``, if it has any, and
    the statistics of each target."""
    tensors: list[Tensor] = []
    numbers: list[float] = []
    parts = "".join([f"{_written(part, tensors, numbers)}, " for part in arguments])
    hidden = targets[0].hidden
    total = f"({_place_of(hidden, tensors)}, None, {wide_dtype(hidden.dtype)}), " if losses else ""
    outputs = f"[{total}{_outputs(targets, asked, tensors)}]"
    text = f"{outputs}, {autocast_dtype(hidden.device)}, lambda known: {name}({parts}**known)"
    leaves = [leaf.tensor for target in targets for leaf in target.leaves()] if torch.is_grad_enabled() else []
    trained = [any(tensor is leaf for leaf in leaves) for tensor in tensors]
    tensors = [tensor if on else tensor.detach() for tensor, on in zip(tensors, trained, strict=True)]
    tensors.append(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
    left = iter(torch.ops.liger_losses.chunked(text, [*trained, False], tensors, losses))
    return [next(left) for _ in range(losses)], [{s.name: next(left) for s in asked} for _ in targets]


def statistics(
    targets: Sequence[Target],
    names: Sequence[str | Statistic],
    options: EngineOptions = EngineOptions(),
    metrics: Sequence[str | Statistic] = (),
) -> list[Values]:
    """:func:`liger_losses.chunked.core.stream.statistics`."""
    if not is_dynamo_compiling():
        return stream.statistics(targets, names, options, metrics)
    # Backward reads log-sum-exps.
    asked = asked_for(names, (*metrics, "lse"))
    wanted = asked_for(names, metrics)
    return [
        {s.name: values[s.name] if s.differentiable else values[s.name].detach() for s in wanted}
        for values in traced("statistics", targets, asked, list(targets), asked, options)[1]
    ]


def loss_sum(
    targets: Sequence[Target],
    names: Sequence[str | Statistic],
    token_losses: Sequence[TokenLoss],
    options: EngineOptions = EngineOptions(),
    metrics: Sequence[str | Statistic] = (),
) -> tuple[Tensor, list[Values]]:
    """:func:`liger_losses.chunked.core.stream.loss_sum`.

    In a graph, it is one pass if the losses are of functions that :func:`in_graphs` knows. Others are traced.
    """
    if not is_dynamo_compiling():
        return stream.loss_sum(targets, names, token_losses, options, metrics)
    known = all(_NAMES.get(getattr(loss.function, "__name__", "")) is loss.function for loss in token_losses)
    if known and not any(stream.scales_late(target.hidden, target.leaves()) for target in targets):
        asked = asked_for(names, metrics)
        arguments = (list(targets), asked, [loss.prepared() for loss in token_losses], options)
        (total,), of_targets = traced("loss_sum", targets, asked, *arguments, losses=True)
        return total, [{name: value.detach() for name, value in values.items()} for values in of_targets]
    of_targets = statistics(targets, names, options, metrics)
    return stream.losses_of(targets, of_targets, token_losses, options.ignore_index, [None] * len(targets))


# --- Operators --------------------------------------------------------------------------------------------------------


def _read(text: str, tensors: Sequence[Tensor], numbers: Sequence[float] = ()) -> Any:
    """The outputs, autocast's dtype, and the call."""
    return eval(text, {**_NAMES, "tensors": tensors, "numbers": numbers})


def _run(text: str, trained: Sequence[bool], tensors: Sequence[Tensor], **known: Any) -> tuple[list[Tensor], ...]:
    """The outputs of the call, and the leaves that are trained."""
    leaves = [tensor.detach().requires_grad_(on) for tensor, on in zip(tensors, trained, strict=True)]
    _, autocast, call = _read(text, leaves, tensors[-1].tolist())
    with torch.autocast(tensors[0].device.type, dtype=autocast, enabled=autocast is not None):
        *total, of_targets = result if isinstance(result := call(known), tuple) else (result,)
    outputs = [*total, *[value for values in of_targets for value in values.values()]]
    return outputs, [leaf for leaf in leaves if leaf.requires_grad]


def _gradients_of(outputs: Sequence[Tensor], leaves: Sequence[Tensor], upstream: Any = None) -> list[Tensor]:
    unused = [None] * len(leaves)
    grads = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True) if outputs and leaves else unused
    return [x.new_zeros(x.shape) if g is None else g.contiguous() for x, g in zip(leaves, grads, strict=True)]


def _empty_gradients(trained: Sequence[bool], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor, on in zip(tensors, trained, strict=True) if on]


def _operator(name: str, others: str) -> Any:
    schema = f"(str text, bool[] trained, Tensor[] tensors, {others}) -> Tensor[]"
    tags = (torch.Tag.cudagraph_unsafe,)  # the host counts tokens
    return torch.library.custom_op(name, mutates_args=(), schema=schema, tags=tags)


@_operator("liger_losses::chunked", "bool losses")
def _call(text: str, trained: Sequence[bool], tensors: Sequence[Tensor], losses: bool) -> list[Tensor]:
    """The outputs, none of which shares memory; of losses, also the gradients of what is trained."""
    with torch.inference_mode(False), torch.set_grad_enabled(losses and any(trained)):
        outputs, leaves = _run(text, trained, tensors)
        separate = [value.detach().clone(memory_format=torch.contiguous_format) for value in outputs]
        return [*separate, *(_gradients_of(outputs[:1], leaves) if losses else [])]


@_call.register_fake
def _(text: str, trained: Sequence[bool], tensors: Sequence[Tensor], losses: bool) -> list[Tensor]:
    outputs = []
    for place, k, dtype in _read(text, tensors)[0]:
        shape = () if k is None else (*tensors[place].shape, *k)
        outputs.append(tensors[place].new_empty(shape, dtype=dtype))
    return [*outputs, *(_empty_gradients(trained, tensors) if losses else [])]


@_operator("liger_losses::chunked_gradients", "Tensor[] values, Tensor?[] upstream")
def _call_gradients(
    text: str,
    trained: Sequence[bool],
    tensors: Sequence[Tensor],
    values: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
) -> list[Tensor]:
    with torch.inference_mode(False), torch.enable_grad():  # below autograd, nothing would be recorded
        outputs, leaves = _run(text, trained, tensors, known=values)
        pairs = [(v, g) for v, g in zip(outputs, upstream, strict=True) if g is not None and v.requires_grad]
        return _gradients_of([value for value, _ in pairs], leaves, [g for _, g in pairs])


_call_gradients.register_fake(lambda text, trained, tensors, *_: _empty_gradients(trained, tensors))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    ctx.text, ctx.trained, tensors, ctx.losses = inputs
    ctx.set_materialize_grads(False)
    gradients = output[len(output) - sum(ctx.trained) :]
    ctx.save_for_backward(*gradients if ctx.losses else (*tensors, *output))


def _backward(ctx: Any, upstream: Sequence[Tensor | None]) -> tuple[Any, ...]:
    saved, count, factor = list(ctx.saved_tensors), len(ctx.trained), upstream[0]
    if ctx.losses:
        gradients = [None if factor is None else factor * g for g in saved]
    else:
        call = ctx.text, ctx.trained, saved[:count], saved[count:]
        gradients = torch.ops.liger_losses.chunked_gradients(*call, list(upstream))
    left = iter(gradients)
    return None, None, [next(left) if on else None for on in ctx.trained], None


_call.register_autograd(_backward, setup_context=_save)
