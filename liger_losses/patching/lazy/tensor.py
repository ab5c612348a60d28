"""The tensor subclass behind lazy logits, and its place in the autograd graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked import ALONE, Head, Ranks, is_quantized
from liger_losses.kernels.autograd import edges, once_differentiable
from liger_losses.kernels.reading import version_of
from liger_losses.patching.lazy.deferred import DeferredLogits, HeadWeights, autocast_of
from liger_losses.patching.lazy.gradients import empty, inputs_of, make_empty, of_inputs, without_subclasses
from liger_losses.patching.lazy.operations import OPERATIONS, Operation
from liger_losses.patching.lazy.warning import cannot_compute, warn_materialized

#: Methods that ask about the tensor or its gradient, and not about its values; and ``torch.autograd.grad``.
_METADATA = frozenset(
    """size dim ndimension numel nelement stride storage_offset element_size get_device dim_order result_type can_cast
    is_floating_point is_complex is_contiguous is_same_size is_inference is_set_to is_sparse is_pinned is_tensor is_conj
    is_neg has_names requires_grad_ register_hook retain_grad grad _is_view _has_symbolic_sizes_strides
    __len__ __set__ __hash__ __repr__ __format__""".split()  # noqa: SIM905
)
#: Properties that give values or views of them; all others are metadata.
_PROPERTIES_OF_VALUES = frozenset(("T", "mT", "H", "mH", "data", "real", "imag", "__cuda_array_interface__"))
#: Operators that change values in place; so do methods whose names end with an underscore.
_IN_PLACE = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__")
)
#: In-place operations that change a tensor's shape or memory.
_RESHAPING = frozenset(("unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "set_"))


class LazyLogits(Tensor):
    """Logits ``[..., V]`` that are computed when their values are needed; made by :func:`lazy_linear`.

    Attributes:
        deferred: how to compute them, without a graph.
        materialized: their values, an ordinary tensor, once an operation has needed them; it serves all later ones.
        memory: values of these logits and of views of them, with their in-place versions; views share the list.
        views: for a view, the logits that it is a view of, from the first to the one it was taken from, each with the
            function that takes the next one.
        origin: the first of ``views``, kept alive once these values are a view of its values.
        node: ``(requires_grad, grad_fn)`` of the view when it was taken; an autograd function that gives it another one
            is not in the graph of what it is a view of.
        inputs: how to compute them with a graph, after the node that this graph leads to.
    """

    deferred: DeferredLogits
    materialized: Tensor | None
    memory: list[tuple[Tensor, int]]
    views: tuple[tuple[weakref.ref[LazyLogits], Callable[[Tensor], Tensor]], ...]
    origin: LazyLogits | None
    node: tuple[bool, Any]
    inputs: tuple[Any, DeferredLogits] | None

    @staticmethod
    def make(deferred: DeferredLogits) -> LazyLogits:
        """The logits as a tensor."""
        # The autograd node gets the tensors as inputs; what it holds beside them must not keep their graph alive.
        source = replace(deferred.detach(), version=version_of(deferred.hidden_states), changed=[])
        lazy: LazyLogits = _LazyLinear.apply(source, *deferred.tensors)
        return lazy

    @staticmethod
    def of(source: DeferredLogits) -> LazyLogits:
        """The logits without gradients; an autograd function may give them some."""
        lazy: LazyLogits = empty(LazyLogits, source)
        lazy.deferred, lazy.materialized, lazy.memory, lazy.inputs = source, None, [], None
        lazy.views, lazy.origin, lazy.node = (), None, (False, None)
        return lazy

    def check(self) -> None:
        """Raise RuntimeError if the logits cannot be computed any more."""
        if self.materialized is not None and self.requires_grad and not self.materialized.requires_grad:
            self.materialized = None  # an autograd function has given the logits a gradient since
        origin = self._origin()[0] if self.memory else self
        for values, version in self.memory:
            changed = version_of(values) != version
            if not changed and (version >= 0 or values is not origin.materialized):
                continue  # the values of inference mode have no version
            if self.materialized is not None and _share_memory(values, self.materialized):
                self.deferred.changed[:] = [True] * self.requires_grad
            elif origin.materialized is values:
                self._take()
            elif changed:
                raise cannot_compute(
                    "these logits share their memory with logits that an in-place operation has changed, which lazy "
                    "logits do not follow; use the tensor that was changed, or call logits.clone() before it."
                )
        if self.materialized is None:
            self.deferred.check()

    def _origin(self) -> tuple[LazyLogits, list[Callable[[Tensor], Tensor]]]:
        """The first of the logits that these are a view of and that somebody still has, and how to take the view."""
        if not self.views:
            return self, []
        same = self.node == (self.requires_grad, self.grad_fn)
        for i, (reference, _) in enumerate(self.views):
            logits = reference()
            if logits is not None and same:
                return logits, [take for _, take in self.views[i:]]
        return self, []

    def _take(self) -> None:
        """Let the values be a view of the others', whose changes it sees, and which see its changes."""
        origin, takes = self._origin()
        values = origin.materialize()
        with torch.set_grad_enabled(self.requires_grad):
            for take in takes:
                values = take(values)
        self.materialized = values
        if origin.requires_grad == self.requires_grad:  # detached logits must not keep a graph
            self.origin = origin

    def _keep_to(self, result: Any) -> None:
        """Forget what these logits are a view of, if they have values of their own and somebody got a view of these."""
        values, others = self.materialized, self._origin()[0].materialized
        if values is None or (others is not None and _share_memory(values, others)):
            return
        parts = result if isinstance(result, (tuple, list)) else (result,)
        if any(isinstance(part, Tensor) and _share_memory(part, values) for part in parts):
            self.views = ()

    @torch.compiler.disable
    def connected(self) -> DeferredLogits:
        """How to compute the logits, with a graph: what is computed of it has the gradient of this tensor.

        All results are computed of the same tensors, so that autograd adds up their gradients, in place where it can.
        """
        self.check()
        if not self.requires_grad:
            return self.deferred
        if self.inputs is None or self.inputs[0] is not self.grad_fn:
            self.inputs = self.grad_fn, inputs_of(self, self.deferred)
        return self.inputs[1]

    def materialize(self) -> Tensor:
        """The values as an ordinary tensor, differentiable, computed once."""
        self.check()
        if self.materialized is not None:
            return self.materialized
        origin, _ = self._origin()
        whole = origin.numel() == self.numel() and origin.requires_grad == self.requires_grad
        if origin is not self and (whole or origin.materialized is not None):
            self._take()
        if self.materialized is None:
            # Also where the first that asks is a metric under no_grad: the loss may be the next.
            inference = torch.is_inference_mode_enabled() and not self.requires_grad
            with torch.inference_mode(inference), torch.set_grad_enabled(self.requires_grad):
                self.materialized = self.connected().values()
            self.deferred.mark_read()
            self.memory.append((self.materialized, version_of(self.materialized)))
        return self.materialized

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    @torch.compiler.disable  # it would be traced where a graph ends
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        first = args[0] if args else None
        if name == "__get__" or name in _METADATA:
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if name in _METADATA or attribute not in _PROPERTIES_OF_VALUES:
                return without_subclasses(func, *args, **kwargs)
            name = attribute
        if isinstance(first, LazyLogits):
            first.check()
            if first.materialized is None:
                # The last two are what autograd does to an argument that an autograd function returns.
                passed_on = name == "clone" or (name == "view_as" and args[1].shape == first.shape)
                if name in ("detach", "data") or (passed_on and not torch.is_grad_enabled()):
                    copy = _copy(first, is_view=name != "clone")
                    return copy if name == "clone" else _know_origin(copy, first, Tensor.detach)
                result = NotImplemented if name not in OPERATIONS else _compute(func, OPERATIONS[name], *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if name in _RESHAPING:
                raise cannot_compute(
                    f"{name} would change lazy logits themselves; use {name.removesuffix('_')} instead."
                )
            if (name in _IN_PLACE or (name[-1] == "_" != name[0])) and (origin := first._origin()[0]) is not first:
                if origin.materialized is None:  # all of these are computed
                    warn_materialized(name, origin)
                first._take()
        result = func(*_materialize_all(args, name), **_materialize_all(kwargs, name))
        if isinstance(first, LazyLogits) and first.views:
            first._keep_to(result)
        return result

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operations that do not come through :meth:`__torch_function__`; autograd, above, knows their gradients."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return _copy(args[0])
        with torch.no_grad():
            return func(*_materialize_all(args, str(func)), **_materialize_all(kwargs or {}, str(func)))


def _copy(lazy: LazyLogits, is_view: bool = True) -> LazyLogits:
    """The same logits without gradients; a view has the same memory."""
    copy = LazyLogits.of(lazy.deferred)
    if is_view:
        copy.memory = lazy.memory
        copy.materialized = None if lazy.materialized is None else lazy.materialized.detach()
    return copy


def _compute(func: Any, operation: Operation, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """The result of an operation on lazy logits, a function of torch; lazy where it is deferred."""
    deferred = lazy.connected()
    others = [deferred_logits(arg, True) if isinstance(arg, LazyLogits) else arg for arg in args]
    found = operation(deferred, *others, **kwargs)
    if found is deferred:
        return lazy
    several = isinstance(found, tuple)
    parts = found if several else (found,)
    if not parts or not isinstance(parts[0], DeferredLogits):
        return found
    made = [LazyLogits.make(part) for part in parts]
    for i, part in enumerate(made if operation.of_tokens else ()):
        if _memory_of(part) == _memory_of(lazy):
            part.memory = lazy.memory
            _know_origin(part, lazy, partial(_part, func, args, kwargs, i if several else None))
    return tuple(made) if several else made[0]


def _part(func: Any, args: Any, kwargs: Any, i: int | None, values: Tensor) -> Tensor:
    """The result of a function of torch, or one of its results."""
    found: Any = func(values, *args, **kwargs)
    return found if i is None else found[i]


def _know_origin(view: LazyLogits, lazy: LazyLogits, take: Callable[[Tensor], Tensor]) -> LazyLogits:
    """Record on a view the logits that it was taken from, and the function that takes it."""
    view.views, view.node = (*lazy.views, (weakref.ref(lazy), take)), (view.requires_grad, view.grad_fn)
    return view


def _share_memory(one: Tensor, two: Tensor) -> bool:
    try:
        return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors and the wrappers of torch.func have no storage
        return False


def _memory_of(lazy: LazyLogits) -> int:
    return lazy.deferred.hidden_states.untyped_storage().data_ptr()


def true_values(tensor: Tensor) -> Tensor:
    """The values of lazy logits as an ordinary tensor; any other tensor as it is."""
    return tensor.materialize() if isinstance(tensor, LazyLogits) else tensor


def deferred_logits(logits: Any, normalized: bool = False) -> DeferredLogits | None:
    """Hidden states and head of lazy logits; ``None`` for other tensors and for lazy logits that have values by now.

    Also for log-probabilities, unless ``normalized``.
    """
    if not isinstance(logits, LazyLogits):
        return None
    logits.check()
    known = logits.materialized is not None or (logits.deferred.normalized and not normalized)
    return None if known else logits.connected()


def replace_all(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function`` of every object of a kind, also inside of lists, tuples and dicts, in its place."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (list, tuple)):
        parts = [replace_all(part, kind, function) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: replace_all(part, kind, function) for key, part in value.items()}
    return value


def _materialize_all(arguments: Any, operation: str) -> Any:
    """A function's arguments with the values of every lazy tensor in its place."""

    def values(lazy: LazyLogits) -> Tensor:
        if lazy.materialized is None:
            warn_materialized(operation, lazy)
        return lazy.materialize()

    return replace_all(arguments, LazyLogits, values)


def lazy_linear(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    ranks: Ranks = ALONE,
    parameters: Sequence[Tensor | None] = (),
) -> Tensor:
    """``F.linear``, whose values are computed only if an operation needs them.

    Args:
        hidden_states: ``[..., H]``.
        weight, bias: ``[V, H]`` and ``[V]``, or this rank's rows of them.
        ranks: this rank's part of the vocabulary, where the ranks of a group share it.
        parameters: of which weight and bias are parts, if optimizers change these.

    Returns:
        :class:`LazyLogits` ``[..., V]``, in the dtype that ``F.linear`` would give. Inputs that ``F.linear`` would
        refuse, empty weights and quantized ones go to ``F.linear``.
    """
    if not can_be_lazy(hidden_states, weight, bias):
        return F.linear(hidden_states, weight, bias)
    weights = HeadWeights(weight, bias, parameters)
    deferred = deferred_linear(hidden_states, Head(weight, bias).with_fields(ranks=ranks))
    return LazyLogits.make(replace(deferred, weights=weights))


def deferred_linear(hidden_states: Tensor, head: Head) -> DeferredLogits:
    """The product with a head, under the autocast that is on."""
    autocast = autocast_of(hidden_states)
    return DeferredLogits(hidden_states, head, autocast or hidden_states.dtype, autocast)


def can_be_lazy(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether lazy logits can stand for ``F.linear`` of these tensors."""
    mixed = hidden_states.dtype != weight.dtype and autocast_of(hidden_states) is None
    fits = hidden_states.dim() >= 2 == weight.dim() and hidden_states.shape[-1] == weight.shape[-1]
    fits = fits and weight.numel() > 0 and hidden_states.is_floating_point() and weight.is_floating_point()
    fits = fits and not is_quantized(weight) and make_empty is not None
    return fits and not mixed and (bias is None or bias.shape == weight.shape[:1]) and not hidden_states.is_meta


class _LazyLinear(torch.autograd.Function):
    """Lazy logits as an output of hidden states, weight and bias, with the gradient that their values would have."""

    @staticmethod
    def forward(ctx: Any, source: DeferredLogits, *tensors: Tensor | None) -> Tensor:
        ctx.source = source
        ctx.save_for_backward(*edges(*tensors))
        return LazyLogits.of(source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *of_inputs(ctx.source, true_values(gradient))
