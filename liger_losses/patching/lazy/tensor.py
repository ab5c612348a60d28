"""Logits that are computed when their values are needed, and often never are.

``lm_head(hidden_states)`` returns a :class:`LazyLogits`: a tensor of the right shape, dtype and device that holds the
hidden states, the head and what was done to the logits since. Reshaping, slicing, casting, scaling and soft-capping
are noted down; losses and reductions over the vocabulary are answered by the engine; anything else gets the true
values, with one warning that names the operation and its caller.

It has a true ``grad_fn``: code that never looks at the Python class, custom autograd functions and DDP among it, gets
right gradients. V vocabulary size, H hidden size.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine import EngineOptions, linear_statistics
from liger_losses.chunked.engine.plan import default_workspace
from liger_losses.chunked.losses.cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_losses.kernels.autograd import autocast_dtype, once_differentiable
from liger_losses.kernels.logit_transform import LogitTransform


@dataclass(frozen=True)
class DeferredLogits:
    """How to get the values: ``hidden_states @ weight.T``, then what was done to it.

    ``outer * (tanh or identity)(inner * (hidden_states @ weight.T + bias))``

    Args:
        hidden_states: ``[..., H]``; what changes rows alone was done to these.
        weight: ``[V, H]``; slices of the vocabulary were taken of it.
        bias: ``[V]``.
        inner, outer, capped: as above.
        steps: the operations themselves, for the values that the model would have had, rounding included.
        autocast: dtype of the autocast that the head ran under, or ``None``.
        normalized: whether a log-softmax follows.
        versions: of the tensors when this was written; they must not change before the values are wanted.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None = None
    inner: float = 1.0
    outer: float = 1.0
    capped: bool = False
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    autocast: torch.dtype | None = None
    normalized: bool = False
    versions: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise RuntimeError if a tensor has changed, as autograd does of what it saved."""
        if self.versions and self.versions != _versions(self.tensors):
            raise RuntimeError(
                "the hidden states, weight or bias of lazy logits have changed in place since (by an optimizer's step, "
                "say), so these logits cannot be computed any more. Take what you need of them before, or keep "
                "logits.clone().softmax(-1) or the like instead of the logits."
            )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.hidden_states, self.weight, self.bias

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden_states.shape[:-1], self.weight.shape[0]))

    @contextlib.contextmanager
    def under_its_autocast(self) -> Iterator[None]:
        """Under the autocast of the head's forward: by now it may have ended."""
        device = self.hidden_states.device.type
        with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
            yield

    def values(self, *tensors: Tensor | None) -> Tensor:
        """The logits as an ordinary tensor ``[..., V]``, differentiable."""
        if not tensors:
            self.check()
        hidden_states, weight, bias = tensors or self.tensors
        assert hidden_states is not None
        assert weight is not None
        with self.under_its_autocast():
            logits = F.linear(hidden_states, weight, bias)
            for step in self.steps:
                logits = step(logits)
        return logits.log_softmax(-1) if self.normalized else logits

    def then(self, step: Callable[[Tensor], Tensor], **changes: Any) -> DeferredLogits:
        """With one more operation."""
        return replace(self, steps=(*self.steps, step), **changes)

    def rows(self, index: Any) -> DeferredLogits:
        """Of some positions of each sequence."""
        return replace(self, hidden_states=self.hidden_states[:, index])

    @property
    def transform(self) -> LogitTransform | None:
        """What the engine calls it; ``None`` for what it has no name for."""
        if not self.capped:
            return LogitTransform(logit_scale=self.inner * self.outer)
        return LogitTransform(logit_scale=self.inner * self.outer, softcap=self.outer) if self.outer > 0 else None

    def statistics(
        self,
        labels: Tensor,
        names: Sequence[str],
        metrics: Sequence[str] = (),
        selected: Tensor | None = None,
        options: EngineOptions = EngineOptions(),
    ) -> Any:
        """Per-token statistics of the softmax, in the shape of ``labels``; see the engine's function."""
        assert self.transform is not None
        self.check()
        one = self.hidden_states.dim() == 1  # a single token, which the engine takes as one of several
        hidden_states, labels = (t[None] if one else t for t in (self.hidden_states, labels))
        with self.under_its_autocast():
            found = linear_statistics(
                hidden_states,
                self.weight,
                labels,
                names,
                metrics=metrics,
                selected=selected[None] if one and selected is not None else selected,
                bias=self.bias,
                transform=self.transform,
                options=options,
            )
        return found._replace(**{n: v[0] for n, v in found._asdict().items() if v is not None}) if one else found


def _versions(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    return tuple(0 if t is None or t.is_inference() else t._version for t in tensors)


class _Make(torch.autograd.Function):
    """The lazy tensor as an output of the tensors it comes from, with the gradient that its values would have."""

    @staticmethod
    def forward(
        ctx: Any,
        deferred: DeferredLogits,
        dtype: torch.dtype,
        overwritten: list[bool],
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.deferred, ctx.overwritten = deferred, overwritten
        ctx.save_for_backward(hidden_states, weight, bias)
        return LazyLogits._empty(deferred.shape, dtype, hidden_states.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.overwritten[0]:
            raise RuntimeError(
                "logits that were changed in place were then used by code that does not look at their class, so their "
                "gradient is not known; use what the in-place operation returned, or logits.clone() before it."
            )
        tensors = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            values = ctx.deferred.values(*tensors)
        given = [t for t in tensors if t is not None]
        found = iter(torch.autograd.grad(values, given, true_values(gradient).to(values.dtype)))
        return None, None, None, *(None if t is None else next(found) for t in tensors)


#: Names of autograd functions that pass on what they are given, and its gradient: of DeepSpeed, and of DDP.
_BYSTANDERS = ("PreBackwardFunctionForModule", "PreBackwardFunction", "_DDPSink")


def _is_bystander(node: Any) -> bool:
    """Whether backward may pass a node by. DDP's does work of its own where the graph is static."""
    function = getattr(type(node), "_forward_cls", None)
    if getattr(function, "__name__", "") not in _BYSTANDERS:
        return False
    if len(getattr(node, "_input_metadata", ())) != len(node.next_functions):
        return False  # it returned more than tensors, so that its outputs do not tell which of its inputs they are
    ddp = getattr(node, "ddp_weakref", None)
    return ddp is None or not ddp().static_graph


class _Through(torch.autograd.Function):
    """The values as an output of the lazy tensor itself, for hooks that wait for its gradient."""

    @staticmethod
    def forward(ctx: Any, lazy: Tensor) -> Tensor:
        return true_values(lazy).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _values_of(lazy: LazyLogits) -> Tensor:
    """The values, from which gradients go by way of this tensor, whoever asks first."""
    with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        return _Through.apply(lazy)


class LazyLogits(Tensor):
    """See the module. Make one with :func:`lazy_linear`."""

    deferred: DeferredLogits
    #: The values, once they are more than the deferred's: changed in place, watched by hooks, or a leaf.
    changed: Tensor | None
    #: Whether ``changed`` was computed for those who watch this tensor's gradient.
    watched: bool
    #: How often the memory that views share was changed in place, one cell for all of them; and when this was made.
    family: list[int]
    born: int
    #: One cell for this and for its node in the graph: whether an in-place operation has changed the values.
    overwritten: list[bool]
    #: Whether this was made without gradients of logits that have them, as inside of an autograd function.
    passed_on: bool

    @staticmethod
    def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> LazyLogits:
        made = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=device)
        made.overwritten = [False]
        made.changed, made.watched, made.family, made.born, made.passed_on = None, False, [0], 0, False
        return made

    @classmethod
    def make(cls, deferred: DeferredLogits, dtype: torch.dtype, view_of: LazyLogits | None = None) -> LazyLogits:
        """From a deferred; the dtype is what the model's own logits would have."""
        deferred = replace(deferred, versions=_versions(deferred.tensors))
        # The deferred that backward keeps must not hold the graph of the tensors it gets anyhow.
        alone = replace(deferred, **_detached(deferred))
        overwritten = [False]
        lazy = _Make.apply(alone, dtype, overwritten, *deferred.tensors)
        lazy.overwritten = overwritten
        # Without gradients, what is made of these logits has none either, whenever it is made.
        lazy.deferred = deferred if torch.is_grad_enabled() else alone
        lazy.changed, lazy.watched = None, False
        lazy.family = [0] if view_of is None else view_of.family
        lazy.born, lazy.passed_on = lazy.family[0], False
        return lazy

    def resolve(self) -> None:
        """Of logits that an autograd function passed on: find what their gradient is.

        Inside of the function they had none, and what is made of them would have none. Functions that only note that
        backward has come by (:data:`_BYSTANDERS`) are passed by; others see the gradient of the values.
        """
        if not self.passed_on or not self.requires_grad:
            return
        self.passed_on = False
        node: Any = self.grad_fn
        where = self.output_nr
        while node is not None and _is_bystander(node):
            node, where = node.next_functions[where]
        if node is not None and getattr(type(node), "_forward_cls", None) is _Make:
            names = ("hidden_states", "weight", "bias")
            try:
                tensors = node.saved_tensors
            except RuntimeError:  # a backward has been there: the values remain
                tensors = node.deferred.tensors
            self.deferred = replace(node.deferred, **dict(zip(names, tensors, strict=True)))
        elif self.changed is None:
            _warn("an autograd function")
            self.changed = _values_of(self)
            self.watched = True

    def check(self) -> None:
        """Raise RuntimeError where an in-place operation on a view has changed these values."""
        self.resolve()
        if self.changed is None:
            self.deferred.check()
        if self.family[0] != self.born:
            raise RuntimeError(
                "these logits share their memory with logits that an in-place operation has changed, which lazy logits "
                "do not follow; use what that operation returned, or logits.clone() before it."
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__get__" or name in _METADATA:
            owner = getattr(getattr(func, "__self__", None), "__name__", "")
            lazy = args[0]
            leaf = isinstance(lazy, LazyLogits) and lazy.changed is not None and not lazy.watched
            if leaf and name == "__get__" and owner == "grad":
                return lazy.changed.grad
            wants_grad = name == "requires_grad_" or (name == "__set__" and owner == "requires_grad")
            if wants_grad and isinstance(lazy, LazyLogits) and not lazy.requires_grad and (args[1:] or (True,))[0]:
                _become_leaf(lazy)
            if name in _METADATA or owner not in _VALUES_AND_VIEWS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            name = owner
        answer = ANSWERS.get(name)
        first = args[0] if args else None
        if isinstance(kwargs.get("out"), LazyLogits):
            raise RuntimeError(f"{name} cannot write to lazy logits (out=); give it a tensor of its own.")
        if isinstance(first, LazyLogits):
            first.check()
            if name in _WATCHING:
                return _watch(first, func, name, args, kwargs)
        known = answer is not None and isinstance(first, LazyLogits) and first.changed is None
        if known and _is_covered(answer, (first, *args[1:]), kwargs):
            assert answer is not None
            found = answer(first, *args[1:], **kwargs)
            if found is not NotImplemented:
                had = isinstance(first, LazyLogits) and (first.requires_grad or first.passed_on)
                if had and not torch.is_grad_enabled():
                    for made in found if isinstance(found, tuple) else (found,):
                        if isinstance(made, LazyLogits) and made is not first:
                            made.passed_on = True
                return found
        in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
        if in_place and isinstance(first, LazyLogits):
            return _in_place(first, func, name, args, kwargs)
        _warn(name)
        args, kwargs = _materialised(args), _materialised(kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What did not come by :meth:`__torch_function__`: below autograd, which knows this tensor's gradient."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (lazy,) = args
            made = cls._empty(lazy.shape, lazy.dtype, lazy.device)
            made.deferred, made.changed, made.watched = lazy.deferred, lazy.changed, lazy.watched
            made.family, made.born = lazy.family, lazy.born
            return made
        _warn(str(func))
        with torch.no_grad():
            return func(*_materialised(args), **_materialised(kwargs or {}))


def lazy_linear(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, lazily.

    Args:
        hidden_states: ``[..., H]``.
        weight: ``[V, H]``.
        bias: ``[V]``.

    Returns:
        :class:`LazyLogits` ``[..., V]``, in the dtype that ``F.linear`` would give.
    """
    # Autocast leaves fp64 alone.
    autocast = None if hidden_states.dtype == torch.float64 else autocast_dtype(hidden_states.device)
    dtype = autocast or hidden_states.dtype
    mixed = hidden_states.dtype != weight.dtype and autocast is None
    if mixed or hidden_states.dim() < 2 or hidden_states.shape[-1] != weight.shape[-1] or hidden_states.is_meta:
        return F.linear(hidden_states, weight, bias)  # with the errors that it has
    return LazyLogits.make(DeferredLogits(hidden_states, weight, bias, autocast=autocast), dtype)


def true_values(tensor: Tensor) -> Tensor:
    """An ordinary tensor: the values of a lazy one, and any other as it is."""
    if not isinstance(tensor, LazyLogits):
        return tensor
    tensor.check()
    return tensor.deferred.values().to(tensor.dtype) if tensor.changed is None else tensor.changed


# --- What leaves it lazy ---------------------------------------------------------------------------------------------


def _detached(deferred: DeferredLogits) -> dict[str, Any]:
    names = ("hidden_states", "weight", "bias")
    return {name: None if t is None else t.detach() for name, t in zip(names, deferred.tensors, strict=True)}


def _on_rows(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """An operation on all dimensions but the last, done to the hidden states instead."""

    def answer(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        hidden_states = function(lazy.deferred.hidden_states, *args, **kwargs)
        return LazyLogits.make(replace(lazy.deferred, hidden_states=hidden_states), lazy.dtype, lazy)

    return answer


def _is_last(lazy: LazyLogits, dim: int) -> bool:
    """Whether a dimension is the vocabulary's; one that is out of range is left to torch to refuse."""
    return dim in (-1, lazy.dim() - 1)


def _is_of_rows(lazy: LazyLogits, dim: int) -> bool:
    """Whether a dimension is there and another one."""
    return -lazy.dim() <= dim < lazy.dim() and not _is_last(lazy, dim)


def _reshape(lazy: LazyLogits, *shape: Any, **named: Any) -> Any:
    if named or (len(shape) == 1 and isinstance(shape[0], torch.dtype)):
        return NotImplemented
    sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    columns = lazy.shape[-1]
    if sizes[-1] == -1:
        known = 1
        for size in sizes[:-1]:
            known *= size
        sizes[-1] = lazy.numel() // known if known > 0 else -1
    if sizes[-1] != columns or len(sizes) < 2:
        return NotImplemented
    return _on_rows(lambda hidden: hidden.reshape(*sizes[:-1], hidden.shape[-1]))(lazy)


def _flatten(lazy: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if _is_last(lazy, end_dim):
        return lazy if _is_last(lazy, start_dim) else NotImplemented
    return _on_rows(lambda hidden: hidden.flatten(start_dim, end_dim % lazy.dim()))(lazy)


def _getitem(lazy: LazyLogits, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is True or part is False for part in parts):
        return NotImplemented
    taken = [
        part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1
        for part in parts
        if part is not None and part is not Ellipsis
    ]
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        where = next(i for i, part in enumerate(parts) if part is Ellipsis)
        before, after = parts[:where], parts[where + 1 :]
    else:
        before, after = parts, ()
        if sum(taken) >= lazy.dim():
            before, after = parts[:-1], parts[-1:]
    columns = after[-1] if after else slice(None)
    if not isinstance(columns, slice) or columns.step not in (None, 1) or any(part is None for part in after):
        return NotImplemented
    rows = (*before, Ellipsis, *after[:-1], slice(None)) if after else (*before, Ellipsis)
    deferred = replace(lazy.deferred, hidden_states=lazy.deferred.hidden_states[rows])
    # Indices that are tensors copy, the others give views.
    copies = any(isinstance(part, (Tensor, list)) for part in parts)
    return _columns(deferred, columns, lazy.dtype, None if copies else lazy)


def _columns(deferred: DeferredLogits, columns: slice, dtype: torch.dtype, view_of: LazyLogits | None) -> Any:
    """A slice of the vocabulary is a slice of the head; of log-probabilities it is one of the values."""
    size = deferred.weight.shape[0]
    start, stop, _ = columns.indices(size)
    if (start, stop) == (0, size):
        return LazyLogits.make(deferred, dtype, view_of)
    if deferred.normalized or stop <= start:
        return NotImplemented
    bias = None if deferred.bias is None else deferred.bias[columns]
    return LazyLogits.make(replace(deferred, weight=deferred.weight[columns], bias=bias), dtype, view_of)


def _narrow(lazy: LazyLogits, dim: int, start: int, length: int) -> Any:
    index: list[Any] = [slice(None)] * lazy.dim()
    first = int(start) + (lazy.shape[dim] if int(start) < 0 else 0)
    if not 0 <= first <= first + int(length) <= lazy.shape[dim]:
        return NotImplemented  # with torch's error
    index[dim] = slice(first, first + int(length))
    return _getitem(lazy, tuple(index))


def _pieces(name: str) -> Callable[..., Any]:
    def answer(lazy: LazyLogits, size: Any, dim: int = 0) -> Any:
        if not _is_of_rows(lazy, dim):
            return NotImplemented
        hidden = getattr(lazy.deferred.hidden_states, name)(size, dim % lazy.dim())
        return tuple(LazyLogits.make(replace(lazy.deferred, hidden_states=part), lazy.dtype, lazy) for part in hidden)

    return answer


def _unbind(lazy: LazyLogits, dim: int = 0) -> Any:
    if not _is_of_rows(lazy, dim) or lazy.dim() < 3:
        return NotImplemented
    parts = lazy.deferred.hidden_states.unbind(dim % lazy.dim())
    return tuple(LazyLogits.make(replace(lazy.deferred, hidden_states=part), lazy.dtype, lazy) for part in parts)


def _on_row_dims(name: str) -> Callable[..., Any]:
    """``transpose``, ``unsqueeze`` and their like, as long as the last dimension stays where it is."""

    def answer(lazy: LazyLogits, *dims: Any) -> Any:
        flat = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        if not all(isinstance(dim, int) for dim in flat):
            return NotImplemented
        count = lazy.dim() + (name == "unsqueeze")
        if not all(-count <= dim < count for dim in flat):
            return NotImplemented
        places = [dim % count for dim in flat]
        if name == "permute":
            if places[-1] != count - 1:
                return NotImplemented
        elif count - 1 in places or (name == "squeeze" and not places):
            return NotImplemented
        return _on_rows(lambda hidden: getattr(hidden, name)(*places))(lazy)

    return answer


def _index_select(lazy: LazyLogits, dim: int, index: Tensor) -> Any:
    if not _is_of_rows(lazy, dim):
        return NotImplemented
    return _on_rows(lambda hidden: hidden.index_select(dim % lazy.dim(), index))(lazy)


def _as_it_is(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or set(kwargs) - {"memory_format"} else LazyLogits.make(lazy.deferred, lazy.dtype)


def _detach(lazy: LazyLogits) -> Any:
    return LazyLogits.make(replace(lazy.deferred, **_detached(lazy.deferred)), lazy.dtype, lazy)


def _cast(lazy: LazyLogits, dtype: torch.dtype) -> Any:
    if not dtype.is_floating_point:
        return NotImplemented
    if dtype == lazy.dtype:
        return lazy
    if lazy.deferred.normalized and torch.promote_types(dtype, lazy.dtype) != dtype:
        return NotImplemented  # a step before the softmax would round the logits instead
    return LazyLogits.make(lazy.deferred.then(lambda logits: logits.to(dtype)), dtype)


def _to(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(
            *args, **{k: v for k, v in kwargs.items() if k != "copy"}
        )
    except (TypeError, RuntimeError):
        given = [arg for arg in args if isinstance(arg, torch.dtype)]
        others = [arg for arg in args if isinstance(arg, Tensor)]
        if others:
            device, dtype, memory_format = others[0].device, others[0].dtype, None
        elif given:
            device, dtype, memory_format = None, given[0], None
        else:
            return NotImplemented
    if memory_format is not None or (device is not None and device != lazy.device):
        return NotImplemented
    return lazy if dtype is None else _cast(lazy, dtype)


def _scaled(lazy: LazyLogits, factor: Any, divide: bool, operation: Callable[..., Tensor]) -> Any:
    number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and math.isfinite(factor)
    if not number or factor == 0 or lazy.deferred.normalized:
        return NotImplemented
    deferred, by = lazy.deferred, 1.0 / factor if divide else float(factor)
    changes = {"outer": deferred.outer * by} if deferred.capped else {"inner": deferred.inner * by}
    return LazyLogits.make(deferred.then(lambda logits: operation(logits, factor), **changes), lazy.dtype)


def _mul(lazy: LazyLogits, other: Any) -> Any:
    return _scaled(lazy, other, False, torch.mul)


def _div(lazy: LazyLogits, other: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _scaled(lazy, other, True, torch.div)


def _tanh(lazy: LazyLogits) -> Any:
    deferred = lazy.deferred
    if deferred.capped or deferred.normalized or deferred.outer != 1.0:
        return NotImplemented
    return LazyLogits.make(deferred.then(torch.tanh, capped=True), lazy.dtype)


def _add(lazy: LazyLogits, other: Any, **kwargs: Any) -> Any:
    """A bias; or the product of another pair of matrices, as of an adapter: one product of both side by side."""
    deferred = lazy.deferred
    if kwargs or not isinstance(other, Tensor) or deferred.capped or deferred.normalized or deferred.steps:
        return NotImplemented
    if isinstance(other, LazyLogits):
        other.check()
        mine, theirs = deferred, other.deferred
        plain = not (theirs.capped or theirs.normalized) and other.changed is None and mine.autocast == theirs.autocast
        if (
            not plain
            or lazy.shape != other.shape
            or lazy.dtype != other.dtype
            or mine.weight.dtype != theirs.weight.dtype
        ):
            return NotImplemented
        biases = [part.bias * part.inner for part in (mine, theirs) if part.bias is not None]
        hidden = [part.hidden_states * part.inner if part.inner != 1 else part.hidden_states for part in (mine, theirs)]
        if hidden[0].dtype != hidden[1].dtype:
            return NotImplemented
        joined = replace(
            mine,
            hidden_states=torch.cat(hidden, -1),
            weight=torch.cat([mine.weight, theirs.weight], 1),
            bias=sum(biases[1:], biases[0]) if biases else None,
            inner=1.0,
        )
        return LazyLogits.make(joined, lazy.dtype)
    same_dtype = other.dtype == lazy.dtype == deferred.weight.dtype
    if other.shape != lazy.shape[-1:] or deferred.inner != 1.0 or not same_dtype:
        return NotImplemented
    bias = other if deferred.bias is None else deferred.bias + other
    return LazyLogits.make(replace(deferred, bias=bias), torch.promote_types(lazy.dtype, other.dtype))


def _log_softmax(
    lazy: LazyLogits, dim: int | None = None, *args: Any, dtype: torch.dtype | None = None, **kw: Any
) -> Any:
    if dim is None or not _is_last(lazy, dim) or lazy.deferred.normalized or lazy.deferred.transform is None:
        return NotImplemented
    given = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
    if given is None and lazy.is_cuda and torch.is_autocast_enabled("cuda"):
        given = torch.float32  # as autocast has it there
    cast = lazy if given is None else _cast(lazy, given)
    if cast is NotImplemented:
        return NotImplemented
    return LazyLogits.make(replace(cast.deferred, normalized=True), cast.dtype)


# --- What the engine answers ----------------------------------------------------------------------------------------


def _cross_entropy(
    lazy: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    deferred = lazy.deferred
    given = (size_average, reduce) == (None, None) and isinstance(target, Tensor) and target.dtype == torch.int64
    if not given or lazy.dim() != 2 or target.dim() != 1 or deferred.transform is None or deferred.normalized:
        return NotImplemented
    loss = LigerFusedLinearCrossEntropyLoss(
        weight,
        ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=deferred.transform.softcap,
        logit_scale=deferred.transform.logit_scale,
    )
    with deferred.under_its_autocast():
        found = loss(deferred.weight, deferred.hidden_states, target, deferred.bias)
    return found.to(lazy.dtype) if lazy.dtype == torch.float64 else found


def _nll_loss(lazy: LazyLogits, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    if not lazy.deferred.normalized:
        return NotImplemented
    plain = LazyLogits.make(replace(lazy.deferred, normalized=False), lazy.dtype)
    return _cross_entropy(plain, target, weight, *args, **kwargs)


#: What no label is.
_NO_LABEL = -(2**62)


def _gather(lazy: LazyLogits, dim: int, index: Tensor, **kwargs: Any) -> Any:
    deferred = lazy.deferred
    last = _is_last(lazy, dim)
    if kwargs or not last or index.shape[:-1] != lazy.shape[:-1] or deferred.transform is None:
        return NotImplemented
    index = index.long()
    if index.shape[-1] == 1:
        # No column is left out: one outside of the vocabulary is an error.
        names = ("logp",) if deferred.normalized else ("logp", "lse")
        found = deferred.statistics(index[..., 0], names, options=EngineOptions(ignore_index=_NO_LABEL))
        logps = found.logp[..., None]
    else:
        names = ("selected_logps",) if deferred.normalized else ("selected_logps", "lse")
        found = deferred.statistics(_no_labels(lazy), names, selected=index)
        logps = found.selected_logps
    return (logps if deferred.normalized else logps + found.lse[..., None]).to(lazy.dtype)


def _topk(lazy: LazyLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    deferred, vocab_size = lazy.deferred, lazy.shape[-1]
    if not _is_last(lazy, dim) or deferred.transform is None or not 1 <= k <= vocab_size:
        return NotImplemented
    deferred.check()
    hidden_states = deferred.hidden_states.detach().reshape(-1, deferred.hidden_states.shape[-1])
    # The model's own logits, with their rounding and thus their ties, some rows at a time.
    rows = max(1, default_workspace(vocab_size, 4, lazy.device) // (8 * vocab_size))
    with torch.no_grad():
        found = [
            replace(deferred, hidden_states=part).values().topk(k, -1, largest, sorted)
            for part in hidden_states.split(rows)
        ]
    values, indices = (torch.cat(parts).view(*lazy.shape[:-1], k) for parts in zip(*found, strict=True))
    values = values.to(lazy.dtype)
    if torch.is_grad_enabled() and lazy.requires_grad:
        values = _WithGradientOf.apply(values, _gather(lazy, -1, indices))
    return torch.return_types.topk((values, indices))


class _WithGradientOf(torch.autograd.Function):
    """The first, with the gradient of the second, which is the same but for rounding."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gathered: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def _logsumexp(lazy: LazyLogits, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    (dim,) = dim if isinstance(dim, (tuple, list)) and len(dim) == 1 else (dim,)
    deferred = lazy.deferred
    answerable = isinstance(dim, int) and not kwargs and not deferred.normalized and deferred.transform is not None
    if not answerable or not _is_last(lazy, dim):
        return NotImplemented
    found = deferred.statistics(_no_labels(lazy), ("lse",)).lse.to(lazy.dtype)
    return found[..., None] if keepdim else found


def _argmax(lazy: LazyLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or not _is_last(lazy, dim) or lazy.deferred.transform is None:
        return NotImplemented
    with torch.no_grad():
        found = lazy.deferred.statistics(_no_labels(lazy), (), ("argmax",)).argmax
    return found[..., None] if keepdim else found


def _mean(lazy: LazyLogits, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Over the vocabulary, or over everything."""
    found = _means(lazy, dim, keepdim, kwargs)
    if found is NotImplemented:
        return found
    return (found.mean() if dim is None else found).to(lazy.dtype)


def _sum(lazy: LazyLogits, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    found = _means(lazy, dim, keepdim, kwargs)
    if found is NotImplemented:
        return found
    sums = found * lazy.shape[-1]  # before they are rounded
    return (sums.sum() if dim is None else sums).to(lazy.dtype)


def _means(lazy: LazyLogits, dim: Any, keepdim: bool, others: dict[str, Any]) -> Any:
    """The mean logit of each token in the engine's dtype."""
    (dim,) = dim if isinstance(dim, (tuple, list)) and len(dim) == 1 else (dim,)
    last = (dim is None and not keepdim) or (isinstance(dim, int) and _is_last(lazy, dim))
    if others or not last or lazy.deferred.normalized or lazy.deferred.transform is None:
        return NotImplemented
    found = lazy.deferred.statistics(_no_labels(lazy), ("mean_logit",)).mean_logit
    return found[..., None] if keepdim else found


def _take_along_dim(lazy: LazyLogits, indices: Tensor, dim: int | None = None, **kwargs: Any) -> Any:
    return NotImplemented if dim is None or indices.dim() != lazy.dim() else _gather(lazy, dim, indices, **kwargs)


def _no_labels(lazy: LazyLogits) -> Tensor:
    return torch.zeros(lazy.shape[:-1], dtype=torch.int64, device=lazy.device)


#: By name, as method, function and operator are called alike. What an answer does not cover it leaves to the values.
ANSWERS: dict[str, Callable[..., Any]] = {
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "__getitem__": _getitem,
    "narrow": _narrow,
    "split": _pieces("split"),
    "chunk": _pieces("chunk"),
    "unbind": _unbind,
    "index_select": _index_select,
    **{name: _on_row_dims(name) for name in ("transpose", "permute", "unsqueeze", "squeeze")},
    "contiguous": _as_it_is,
    "clone": _as_it_is,
    "detach": _detach,
    "float": partial(_cast, dtype=torch.float32),
    "double": partial(_cast, dtype=torch.float64),
    "half": partial(_cast, dtype=torch.float16),
    "bfloat16": partial(_cast, dtype=torch.bfloat16),
    "to": _to,
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _mul),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "__div__"), _div),
    "tanh": _tanh,
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    "log_softmax": _log_softmax,
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll_loss,
    "gather": _gather,
    "take_along_dim": _take_along_dim,
    "topk": _topk,
    "mean": _mean,
    "sum": _sum,
    "logsumexp": _logsumexp,
    "argmax": _argmax,
}

#: What asks about the tensor and not about its values.
_METADATA = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_same_size",
        "has_names",
        "requires_grad_",
        "__len__",
        "__set__",
        "__hash__",
        "storage_offset",
        "_is_view",
        "is_inference",
        "is_set_to",
        "__repr__",
        "__format__",
        "is_sparse",
        "is_pinned",
        "dim_order",
        "_has_symbolic_sizes_strides",
        "is_tensor",
        "is_conj",
        "is_neg",
        "resolve_conj",
        "resolve_neg",
        "__reduce_ex__",
        "result_type",
        "can_cast",
    ]
) - {"__reduce_ex__", "resolve_conj", "resolve_neg"}
#: Properties that are more than metadata.
_VALUES_AND_VIEWS = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))


#: What waits for the gradient of this very tensor.
_WATCHING = frozenset(("register_hook", "retain_grad"))
#: In-place operations whose names do not end in one underscore; and those that would change shape or place.
_IN_PLACE = frozenset(
    ("__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow")))
)
_RESHAPING = frozenset(("unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "set_"))


@cache
def _signature(answer: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(answer)


def _is_covered(answer: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an answer takes these arguments, as they are spelled."""
    if answer is None:
        return False
    try:
        _signature(answer).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _watch(lazy: LazyLogits, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Hooks, and ``retain_grad``.

    The engine's gradients go from the loss to the hidden states, and not by way of this tensor. FSDP's hooks, which
    only wait for backward to come, are put there as well; for all others, the values are computed from this tensor.
    """
    hook = args[1] if len(args) > 1 else kwargs.get("hook")
    hidden_states, function = lazy.deferred.hidden_states, hook
    while isinstance(function, partial):
        function = function.func
    if (getattr(function, "__module__", None) or "").startswith("torch.distributed"):
        if hidden_states.requires_grad:
            hidden_states.register_hook(hook)
    elif lazy.requires_grad and lazy.changed is None:
        _warn(name)
        lazy.changed = _values_of(lazy)
        lazy.watched = True
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _become_leaf(lazy: LazyLogits) -> None:
    """From now on these are values of their own, whose gradient ends here."""
    _warn("requires_grad_")
    lazy.changed = true_values(lazy).detach().requires_grad_()


def _in_place(lazy: LazyLogits, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Act on the values, which are the tensor's from now on."""
    if name in _RESHAPING:
        raise RuntimeError(f"{name} would change lazy logits themselves; use {name.removesuffix('_')} instead.")
    _warn(name)
    values = true_values(lazy)
    if lazy.changed is None:
        values = values.clone()  # so that autograd's saved values stay as they are
    func(values, *_materialised(args[1:]), **_materialised(kwargs))
    lazy.changed, lazy.watched, lazy.overwritten[0] = values, False, True
    lazy.family[0] += 1
    lazy.born = lazy.family[0]
    return values


def _materialised(given: Any) -> Any:
    if isinstance(given, LazyLogits):
        return true_values(given)
    if isinstance(given, (list, tuple)):
        parts = [_materialised(part) for part in given]
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    return {key: _materialised(value) for key, value in given.items()} if isinstance(given, dict) else given


_WARNED: set[tuple[str, str]] = set()
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def allow_materialization() -> Iterator[None]:
    """Values are computed without a warning in this block: of few tokens, knowingly."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def _warn(operation: str) -> None:
    """Once for an operation and its caller, who is the first outside of torch and this package."""
    if _QUIET.get():
        return
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "liger_losses.", "contextlib")) and module != "torch":
            break
        frame = frame.f_back
    where = f"{frame.f_globals.get('__name__', '?')}:{frame.f_lineno}"
    if (operation, where) not in _WARNED:
        _WARNED.add((operation, where))
        warnings.warn(
            f"{operation}, called in {where}, needs the values of logits that would not have been computed otherwise: "
            "they are now, [tokens, vocab] of them. Losses from liger_losses do without.",
            RuntimeWarning,
            stacklevel=2,
        )
