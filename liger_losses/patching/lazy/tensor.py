"""The tensor subclass behind lazy logits, and its place in the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from liger_losses.chunked.engine import Head
from liger_losses.chunked.engine.quantized_kinds import is_quantized
from liger_losses.chunked.engine.ranks import ALONE, Ranks
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.reading import version_of
from liger_losses.patching.lazy.deferred import DeferredLogits, HeadWeights, autocast_of
from liger_losses.patching.lazy.gradients import (
    LazyGradient,
    WithGradientOf,
    empty,
    gradients_of_values,
    inputs_of,
    make_empty,
    sums,
    without_subclasses,
)
from liger_losses.patching.lazy.operations import OPERATIONS, Operation
from liger_losses.patching.lazy.warning import cannot_compute, warn_materialized

#: Methods that ask about the tensor and not about its values.
_METADATA = frozenset(
    """size dim ndimension numel nelement stride storage_offset element_size get_device dim_order result_type can_cast
    is_floating_point is_complex is_contiguous is_same_size is_inference is_set_to is_sparse is_pinned is_tensor is_conj
    is_neg has_names requires_grad_ _is_view _has_symbolic_sizes_strides
    __len__ __set__ __hash__ __repr__ __format__""".split()  # noqa: SIM905
)
#: Properties that give values or views of them; all others are metadata.
_PROPERTIES_OF_VALUES = frozenset(("T", "mT", "H", "mH", "data", "real", "imag", "__cuda_array_interface__"))
#: Sums, whose arguments may change places.
_SUMS = frozenset(("add", "__add__", "__radd__"))
#: In-place operations that change a tensor's shape or memory.
_RESHAPING = frozenset(("unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "set_"))


class LazyLogits(Tensor):
    """Logits ``[..., V]`` that are computed when their values are needed; made by :func:`lazy_linear`.

    Attributes:
        deferred: how to compute them.
        materialized: their values, an ordinary tensor, once an operation has needed them; it serves all later ones.
        memory: values of these logits and of views of them, with their in-place versions; views share the list.
        source: what their node in the graph computes them of, without a graph; copies that an autograd function
            returns have it too.
        connected: whether ``deferred`` and ``materialized`` have the gradient of this tensor. Not if an autograd
            function has returned it, or a hook waits for its gradient: :meth:`check` then connects them.
        changed: not empty once the values were changed in place; the node shares the list.
    """

    deferred: DeferredLogits
    materialized: Tensor | None
    memory: list[tuple[Tensor, int]]
    source: DeferredLogits | None
    connected: bool
    changed: list[bool]

    @staticmethod
    def _empty(source: DeferredLogits) -> LazyLogits:
        lazy: LazyLogits = empty(LazyLogits, source)
        lazy.deferred, lazy.source, lazy.materialized, lazy.connected = source, None, None, False
        lazy.memory, lazy.changed = [], []
        return lazy

    @classmethod
    def make(cls, deferred: DeferredLogits) -> LazyLogits:
        """The logits as a tensor."""
        deferred = replace(deferred, version=version_of(deferred.hidden_states))
        # The autograd node gets the tensors as inputs; what it holds beside them must not keep their graph alive.
        source = deferred.detach()
        lazy: LazyLogits = _LazyLinear.apply(source, *deferred.tensors)
        if lazy.requires_grad:  # what is made without gradients has none, whenever its values are computed
            lazy.deferred, lazy.source, lazy.connected = deferred, source, True
        return lazy

    def copy(self, is_view: bool) -> LazyLogits:
        """The same logits without gradients; an autograd function may give them some."""
        lazy = LazyLogits._empty(self.deferred.detach())
        lazy.source = self.source
        if is_view:
            lazy.materialized, lazy.memory = self.materialized, self.memory
        return lazy

    def check(self) -> None:
        """Connect the logits with the graph, and raise RuntimeError if they cannot be computed any more."""
        if not self.connected and self.grad_fn is not None:
            self._connect()
        if self.materialized is None:
            self.deferred.check()
        for values, version in self.memory:
            if version_of(values) != version and values is self.materialized:
                self.changed[:] = [True]
            elif version_of(values) != version:
                raise cannot_compute(
                    "these logits share their memory with logits that an in-place operation has changed, which lazy "
                    "logits do not follow; use the tensor that was changed, or call logits.clone() before it."
                )

    def _connect(self) -> None:
        """Let the gradient of what is computed from now on pass through this tensor."""
        self.connected = True
        if self.source is not None and self.materialized is None:
            deferred = self.source.with_tensors(*inputs_of(self, self.source))
            version = version_of(deferred.hidden_states)
            self.deferred = replace(deferred, weights=self.deferred.weights, version=version)
            return
        if self.materialized is None:
            warn_materialized("an autograd function", self)
        values = self.materialize().detach()
        with torch.inference_mode(False), torch.enable_grad():
            self._keep(WithGradientOf.apply(values, self))

    def _keep(self, values: Tensor) -> Tensor:
        """Take ``values`` for these logits from now on."""
        self.materialized = values
        self.memory.append((values, version_of(values)))
        return values

    def materialize(self) -> Tensor:
        """The values as an ordinary tensor, differentiable, computed once."""
        self.check()
        if self.materialized is not None:
            return self.materialized
        # Also where the first that asks is a metric under no_grad: the loss may be the next.
        inference = torch.is_inference_mode_enabled() and not self.requires_grad
        with torch.inference_mode(inference), torch.set_grad_enabled(self.requires_grad):
            values = self.deferred.values()
        self.deferred.mark_read()
        return self._keep(values)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    @torch.compiler.disable  # it would be traced where a graph ends
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        first = args[0] if args else None
        if func is torch.autograd.grad:
            _check_inputs_of_grad(*args, **kwargs)
        if name == "__get__" or name in _METADATA:
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if name in _METADATA or attribute not in _PROPERTIES_OF_VALUES:
                return _metadata(func, name, attribute, args, kwargs)
            name = attribute
        if name in _SUMS and not kwargs and type(first) in (Tensor, Parameter) and type(args[1]) is LazyLogits:
            args = first, _ = args[::-1]
        if isinstance(first, LazyLogits):
            first.check()
            if first.materialized is None:
                if name == "register_hook":
                    first.connected = False
                    return without_subclasses(func, *args, **kwargs)
                # The last two are what autograd does to an argument that an autograd function returns.
                passed_on = name == "clone" or (name == "view_as" and args[1].shape == first.shape)
                if name in ("detach", "data") or (passed_on and not torch.is_grad_enabled()):
                    return first.copy(is_view=name != "clone")
                result = NotImplemented if name not in OPERATIONS else _compute(OPERATIONS[name], *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if name in _RESHAPING:
                raise cannot_compute(
                    f"{name} would change lazy logits themselves; use {name.removesuffix('_')} instead."
                )
        return func(*_materialize_all(args, name), **_materialize_all(kwargs, name))

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operations that do not come through :meth:`__torch_function__`; autograd, above, knows their gradients."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].copy(is_view=True)
        with torch.no_grad():
            return func(*_materialize_all(args, str(func)), **_materialize_all(kwargs or {}, str(func)))


def _compute(operation: Operation, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """The result of an operation on lazy logits; lazy where it is deferred."""
    others = [deferred_logits(arg, True) if isinstance(arg, LazyLogits) else arg for arg in args]
    found = operation(lazy.deferred, *others, **kwargs)
    if found is lazy.deferred and operation is not OPERATIONS["clone"]:
        return lazy
    parts = found if isinstance(found, tuple) else (found,)
    if not parts or not isinstance(parts[0], DeferredLogits):
        return found
    made = [LazyLogits.make(part) for part in parts]
    for part in made if operation.of_tokens else ():
        if _memory_of(part) == _memory_of(lazy):
            part.memory = lazy.memory
    return tuple(made) if isinstance(found, tuple) else made[0]


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
    return None if known else logits.deferred


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


def _metadata(func: Callable[..., Any], name: str, attribute: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Metadata of the tensor, or ``requires_grad_``, which gives detached logits separate values."""
    lazy = args[0] if args else None
    if isinstance(lazy, LazyLogits):
        if attribute == "grad" and name == "__get__" and lazy.materialized is not None:
            return lazy.materialized.grad
        sets_grad = name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad")
        if sets_grad and not lazy.requires_grad and (args[1:] or (True,))[0]:
            warn_materialized("requires_grad_", lazy)
            lazy._keep(lazy.materialize().detach().requires_grad_())
    return without_subclasses(func, *args, **kwargs)


def _check_inputs_of_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
    """Raise RuntimeError for gradients with respect to logits whose values no loss can have been computed of."""
    if any(isinstance(tensor, LazyLogits) and tensor.materialized is None for tensor in inputs):
        raise cannot_compute(
            "torch.autograd.grad cannot give the gradient with respect to lazy logits, because losses are "
            "computed from the hidden states. Call liger_losses.patching.lazy.true_values(logits) before you "
            "compute the loss; the logits are then an ordinary tensor."
        )


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
    weights = HeadWeights(weight, bias, hidden_states.shape[:-1].numel(), parameters)
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
        lazy = LazyLogits._empty(source)
        ctx.source, ctx.changed = source, lazy.changed
        ctx.save_for_backward(*tensors)
        return lazy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.changed:
            raise cannot_compute(
                "logits that were changed in place were then used by code that does not check their class, so "
                "their gradient is not known; use the tensor that the in-place operation returned, or call "
                "logits.clone() before it."
            )
        if not isinstance(gradient, LazyGradient):
            return None, *gradients_of_values(ctx.source, true_values(gradient), ctx.saved_tensors)
        if gradient.source is not ctx.source:
            raise RuntimeError(
                "an autograd function has passed the gradient of lazy logits on to other lazy logits, where its "
                "values are not known; compute the loss from liger_losses.patching.lazy.true_values(logits)."
            )
        *known, values = gradient.parts
        if values is not None:
            known = sums(known, gradients_of_values(ctx.source, values, ctx.saved_tensors))
        return None, *known
