"""Operations whose result is lazy again: views of tokens, slices, casts, scales, soft-caps, sums and log-softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_losses.patching.lazy.tensor import LazyLogits, implements


def is_vocabulary(lazy: LazyLogits, dim: Any) -> bool:
    """Whether a dimension is the vocabulary's, the last one."""
    return isinstance(dim, int) and dim in (-1, lazy.dim() - 1)


def _on_rows(lazy: LazyLogits, operation: Callable[[Tensor], Tensor]) -> LazyLogits:
    return lazy.derive(lazy.deferred.on_rows(operation), is_view=True)


def _on_token_dims(name: str, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """A view whose last dimension is the vocabulary, as the strides of a tensor without memory say."""
    hidden = lazy.deferred.hidden_states
    try:
        views = getattr(torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"), name)(*args, **kwargs)
        parts = views if isinstance(views, tuple) else (views,)
        shaped = name in ("view", "reshape")
        found = (
            hidden.reshape(*views.shape[:-1], hidden.shape[-1]) if shaped else getattr(hidden, name)(*args, **kwargs)
        )
    except (TypeError, RuntimeError, IndexError):  # arguments that torch refuses
        return NotImplemented
    results = found if isinstance(found, tuple) else (found,)
    last = [(part.shape[-1:], part.stride()[-1:], part.dtype) == (lazy.shape[-1:], (1,), lazy.dtype) for part in parts]
    same = [part.shape[:-1] for part in parts] == [result.shape[:-1] for result in results]
    same = same and all(result.shape[-1:] == hidden.shape[-1:] for result in results)
    if not parts or not all(last) or not same or lazy.shape[-1] == 1:
        return NotImplemented
    if parts[0].dim() < 2 and (shaped or name == "unbind"):
        return NotImplemented
    made = tuple(_on_rows(lazy, lambda _, result=result: result) for result in results)  # type: ignore[misc]
    return made if isinstance(found, tuple) else made[0]


for _name in "view reshape flatten split chunk unbind transpose permute unsqueeze squeeze".split():  # noqa: SIM905
    implements(_name)(partial(_on_token_dims, _name))


@implements("index_select")
def _index_select(lazy: LazyLogits, dim: int, index: Tensor) -> Any:
    whole = index.dtype in (torch.int32, torch.int64) and index.dim() <= 1
    if is_vocabulary(lazy, dim) or not whole or not -lazy.dim() <= dim < lazy.dim():
        return NotImplemented
    return lazy.derive(lazy.deferred.on_rows(lambda hidden: hidden.index_select(dim % lazy.dim(), index)))


@implements("contiguous")
def _contiguous(lazy: LazyLogits, *, memory_format: Any = None) -> LazyLogits:
    return lazy.derive(lazy.deferred, is_view=lazy.deferred.hidden_states.is_contiguous())


@implements("clone")
def _clone(lazy: LazyLogits, *, memory_format: Any = None) -> LazyLogits:
    return lazy.derive(lazy.deferred) if torch.is_grad_enabled() else lazy.detached(is_view=False)


implements("detach", "data")(lambda lazy: lazy.detached())


@implements("view_as")
def _view_as(lazy: LazyLogits, other: Tensor) -> Any:
    """What autograd does to an argument that an autograd function returns, without gradients."""
    same = other.shape == lazy.shape and not torch.is_grad_enabled()
    return lazy.detached() if same else _on_token_dims("reshape", lazy, other.shape)


@implements("__getitem__")
def _getitem(lazy: LazyLogits, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is True or part is False for part in parts):
        return NotImplemented
    masks = [part for part in parts if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)]
    indexed_dims = sum(mask.dim() - 1 for mask in masks) + sum(part is not None and part is not ... for part in parts)
    if indexed_dims >= lazy.dim():  # an ellipsis stands for nothing
        parts = tuple(part for part in parts if part is not ...)
        leading, trailing = parts[:-1], parts[-1:]
    else:
        ellipsis_at = next((i for i, part in enumerate(parts) if part is ...), len(parts))
        leading, trailing = parts[:ellipsis_at], parts[ellipsis_at + 1 :]
    columns = trailing[-1] if trailing else slice(None)
    if not isinstance(columns, slice) or columns.step not in (None, 1) or any(part is None for part in trailing):
        return NotImplemented
    rows = (*leading, Ellipsis, *trailing[:-1], slice(None)) if trailing else (*leading, Ellipsis)
    deferred = lazy.deferred.on_rows(lambda hidden: hidden[rows])
    start, stop, _ = columns.indices(deferred.head.vocab_size)
    if (start, stop) != (0, deferred.head.vocab_size):
        if deferred.normalized or stop <= start or deferred.head.ranks.size > 1:
            return NotImplemented  # log-probabilities of some columns depend on all of the head, which ranks may share
        deferred = replace(deferred, head=deferred.head.columns(columns))
    # Indexing by tensors copies, by anything else it gives views.
    return lazy.derive(deferred, is_view=not any(isinstance(part, (Tensor, list)) for part in parts))


@implements("narrow")
def _narrow(lazy: LazyLogits, dim: int, start: int, length: int) -> Any:
    first = int(start) + (lazy.shape[dim] if int(start) < 0 else 0)
    if not 0 <= first <= first + int(length) <= lazy.shape[dim]:
        return NotImplemented  # torch raises
    index: list[Any] = [slice(None)] * lazy.dim()
    index[dim] = slice(first, first + int(length))
    return _getitem(lazy, tuple(index))


def _cast(lazy: LazyLogits, dtype: torch.dtype) -> Any:
    if not dtype.is_floating_point:
        return NotImplemented
    if dtype == lazy.dtype:
        return lazy
    if lazy.deferred.normalized and torch.promote_types(dtype, lazy.dtype) != dtype:
        return NotImplemented  # a step comes before the softmax, so it would round the logits instead
    return lazy.derive(lazy.deferred.with_step("to", dtype), dtype)


_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
for _name, _dtype in _CASTS.items():
    implements(_name)(partial(_cast, dtype=_dtype))


@implements("to")
def _to(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """What the arguments mean, an empty tensor shows."""
    try:
        moved = torch.empty(0, dtype=lazy.dtype, device=lazy.device).to(*args, **kwargs)
    except (TypeError, RuntimeError):  # arguments that torch refuses
        return NotImplemented
    if moved.device != lazy.device or kwargs.get("memory_format") is not None:
        return NotImplemented
    return _cast(lazy, moved.dtype)


def _scale(operation: str, lazy: LazyLogits, other: Any) -> Any:
    """Multiply or divide by a number: a scale of the head, and of its soft-cap if there is one."""
    number = isinstance(other, (int, float)) and not isinstance(other, bool)
    if not number or not math.isfinite(other) or other == 0 or lazy.deferred.normalized:
        return NotImplemented
    by = 1.0 / other if operation == "div" else float(other)
    transform = lazy.deferred.head.transform
    changes = {"logit_scale": transform.logit_scale * by}
    if transform.softcap is not None:
        changes["softcap"] = transform.softcap * by
    if not math.isfinite(changes["logit_scale"]) or not 0 < changes.get("softcap", 1) < math.inf:
        return NotImplemented
    return lazy.derive(lazy.deferred.with_step(operation, other, **changes))


implements("mul", "multiply", "__mul__", "__rmul__")(partial(_scale, "mul"))
implements("div", "divide", "true_divide", "__truediv__", "__div__")(partial(_scale, "div"))


@implements("tanh")
def _tanh(lazy: LazyLogits) -> Any:
    if lazy.deferred.normalized or lazy.deferred.head.transform.softcap is not None:
        return NotImplemented
    return lazy.derive(lazy.deferred.with_step("tanh", softcap=1.0))


@implements("neg", "negative", "__neg__")
def _neg(lazy: LazyLogits) -> Any:
    """Negate log-probabilities, as losses do; to negate other logits, their values are computed."""
    deferred = lazy.deferred
    return lazy.derive(replace(deferred, negated=not deferred.negated)) if deferred.normalized else NotImplemented


def _is_vector(lazy: LazyLogits, other: Any) -> bool:
    """Whether a tensor has one number per column, and the logits are the head's product and no more."""
    deferred = lazy.deferred
    if not isinstance(other, Tensor) or isinstance(other, LazyLogits) or deferred.normalized or deferred.steps:
        return False
    if deferred.head.ranks.size > 1 or deferred.head.quantized is not None:  # it has some columns, or no weight
        return False
    vector = other.shape[-1:] == lazy.shape[-1:] and other.numel() == lazy.shape[-1] and other.dim() <= lazy.dim()
    return vector and other.device == lazy.device and other.dtype == deferred.head.weight.dtype


def _with_head(lazy: LazyLogits, other: Tensor, **fields: Any) -> LazyLogits:
    """The logits of a head that ``other`` has changed."""
    deferred = replace(lazy.deferred, head=lazy.deferred.head.with_fields(**fields))
    return lazy.derive(deferred, torch.promote_types(lazy.dtype, other.dtype))


@implements("add", "__add__", "__radd__")
def _add(lazy: LazyLogits, other: Any) -> Any:
    """Add a bias ``[V]``, or other lazy logits."""
    if isinstance(other, LazyLogits):
        return _add_product(lazy, other)
    if not _is_vector(lazy, other):
        return NotImplemented
    head, bias = lazy.deferred.head, other.flatten()
    return _with_head(lazy, other, bias=bias if head.bias is None else head.bias + bias)


def _add_product(lazy: LazyLogits, other: LazyLogits) -> Any:
    """The sum of two products, such as a head's and its adapter's: one product of both heads side by side."""
    other.check()
    one, two = lazy.deferred, other.deferred
    if one.normalized or one.steps or one.autocast != two.autocast or lazy.shape != other.shape:
        return NotImplemented
    if one.head.ranks.size > 1 or two.head.ranks.size > 1 or two.head.quantized is not None:
        return NotImplemented
    if two.normalized or two.head.transform.softcap is not None or other.materialized is not None:
        return NotImplemented
    scale = two.head.transform.logit_scale
    parts = (one.hidden_states, one.head.weight), (two.hidden_states * scale, two.head.weight)
    mixed = any(a.dtype != b.dtype for a, b in zip(*parts, strict=True))
    if mixed and one.autocast is None and one.head.quantized is None:
        return NotImplemented
    biases = [part.bias * part.transform.logit_scale for part in (one.head, two.head) if part.bias is not None]
    bias = sum(biases[1:], biases[0]) if biases else None
    # A quantized weight takes the dtype of its hidden states, and so do its adapters, which PEFT keeps in fp32.
    dtype = one.autocast if one.head.quantized is None else one.autocast or one.hidden_states.dtype
    hidden, weight = (
        torch.cat([part if dtype is None else part.to(dtype) for part in pair], -1) for pair in zip(*parts, strict=True)
    )
    sums = replace(one, hidden_states=hidden, head=one.head.with_fields(weight=weight, bias=bias))
    return lazy.derive(sums, torch.promote_types(lazy.dtype, other.dtype))


@implements("log_softmax")
def _log_softmax(
    lazy: LazyLogits, dim: int | None = None, *args: Any, dtype: torch.dtype | None = None, **others: Any
) -> Any:
    if not is_vocabulary(lazy, dim) or lazy.deferred.normalized:
        return NotImplemented
    dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
    if dtype is None and lazy.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32  # autocast runs it in fp32 on a GPU
    cast = lazy if dtype is None else _cast(lazy, dtype)
    return cast if cast is NotImplemented else cast.derive(replace(cast.deferred, normalized=True))
