"""The tensor subclass behind lazy logits, and its place in the autograd graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from liger_losses.chunked.engine import Head
from liger_losses.chunked.engine.documentation import see
from liger_losses.chunked.engine.quantized_kinds import is_quantized
from liger_losses.chunked.engine.ranks import VocabularyRanks
from liger_losses.kernels.autograd import autocast_dtype, once_differentiable
from liger_losses.patching.lazy.deferred import DeferredLogits
from liger_losses.patching.lazy.gradients import Origin, gradients_of_logits, mark
from liger_losses.patching.lazy.warning import warn_materialized
from liger_losses.patching.lazy.weights import Gather, HeadWeights

#: By the name of an operation that needs no values: the function for it, and its signature.
_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], inspect.Signature]] = {}
#: Methods that ask about the tensor and not about its values.
_METADATA = frozenset(
    """size dim ndimension numel nelement stride storage_offset element_size get_device dim_order result_type can_cast
    is_floating_point is_complex is_contiguous is_same_size is_inference is_set_to is_sparse is_pinned is_tensor is_conj
    is_neg has_names requires_grad_ _is_view _has_symbolic_sizes_strides
    __len__ __set__ __hash__ __repr__ __format__""".split()  # noqa: SIM905
)
#: Properties that give values or views of them; all others are metadata.
_PROPERTIES_OF_VALUES = frozenset(("T", "mT", "H", "mH", "data", "real", "imag", "__cuda_array_interface__"))
#: Operations whose arguments may change places.
_COMMUTATIVE = frozenset(("add", "__add__", "__radd__", "mul", "multiply", "__mul__", "__rmul__"))
#: What gives the address of the values.
_ADDRESSES = frozenset(("data_ptr", "const_data_ptr", "__cuda_array_interface__"))
#: Methods that wait for the gradient of this very tensor.
_HOOKS = frozenset(("register_hook", "retain_grad"))
#: In-place operations whose names do not end in one underscore; and those that change the tensor's shape or storage.
_IN_PLACE = frozenset(
    ("__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow")))
)
_IN_PLACE_VIEWS = frozenset(("unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "set_"))
_ONE_OF_SEVERAL = "one of several views that an operation returned"
#: Names of DeepSpeed's autograd functions that gather a module's weights for its backward.
_GATHER_FUNCTIONS = ("PreBackwardFunctionForModule", "PreBackwardFunction")
#: Names of autograd functions, DeepSpeed's and DDP's, that return their inputs and pass the gradient back unchanged.
_IDENTITY_FUNCTIONS = (*_GATHER_FUNCTIONS, "_DDPSink")


def implements(*names: str) -> Callable[[Any], Any]:
    """Register a function for operations of these names: methods, functions and operators.

    It gets the operation's arguments, and returns ``NotImplemented`` where the values are needed after all.
    """

    def register(function: Any) -> Any:
        _IMPLEMENTATIONS.update(dict.fromkeys(names, (function, inspect.signature(function))))
        return function

    return register


def _call_implementation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``NotImplemented`` if there is no function for the operation, or none that takes these arguments."""
    if name not in _IMPLEMENTATIONS:
        return NotImplemented
    function, signature = _IMPLEMENTATIONS[name]
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return NotImplemented
    return function(*args, **kwargs)


@dataclass
class VersionCounter:
    """How many in-place operations there were."""

    count: int = 0


class LazyLogits(Tensor):
    """Logits ``[..., V]`` that are computed when their values are needed; made by :func:`lazy_linear`.

    Attributes:
        deferred: how to compute them.
        materialized: their values, after an in-place operation, with hooks on the gradient, or as a leaf.
        hooked: whether ``materialized`` was computed for hooks, so that its gradient arrives at this tensor.
        storage_version: counts in-place operations on this tensor and its views, which share the counter.
        seen_version: the count when this tensor was made or changed; another one now means that a view has changed it.
        own_version: counts in-place operations on this tensor alone; its autograd node holds the counter too.
        origin: the operation on other lazy logits that made this tensor.
        is_copy: whether this is a copy of other logits, or a view of one, and not a result that autograd may save.
        in_place_error: why torch would refuse in-place operations on such a view, or ``None``.
        made_without_grad: whether this was made under ``no_grad``, as in the forward of autograd functions. If it
            requires grad later, :meth:`check` finds its gradient.
    """

    deferred: DeferredLogits
    materialized: Tensor | None
    hooked: bool
    storage_version: VersionCounter
    seen_version: int
    own_version: VersionCounter
    in_place_error: str | None
    is_copy: bool
    origin: Origin
    made_without_grad: bool

    @staticmethod
    def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> LazyLogits:
        lazy = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=device)
        lazy.materialized, lazy.in_place_error, lazy.origin = None, None, Origin()
        lazy.hooked, lazy.made_without_grad, lazy.is_copy = False, False, False
        lazy.storage_version, lazy.seen_version, lazy.own_version = VersionCounter(), 0, VersionCounter()
        return lazy

    @classmethod
    def make(cls, deferred: DeferredLogits, dtype: torch.dtype, view_of: LazyLogits | None = None) -> LazyLogits:
        """Lazy logits of the dtype that the model's own would have; ``view_of`` would share its memory with them."""
        deferred = deferred.with_version()
        # The autograd node gets the tensors as inputs; the copy that it holds must not keep their graph alive.
        detached = deferred.detach()
        lazy = _LazyLinear.apply(detached, dtype, *deferred.tensors)
        # What is made of logits without gradients has none either, whenever it is made.
        lazy.made_without_grad = not torch.is_grad_enabled()
        lazy.deferred = detached if lazy.made_without_grad else deferred
        if view_of is not None:
            lazy.storage_version, lazy.seen_version = view_of.storage_version, view_of.storage_version.count
        return lazy

    def derive(self, deferred: DeferredLogits, dtype: torch.dtype | None = None, is_view: bool = False) -> LazyLogits:
        """The result of an operation on these logits, in their dtype by default."""
        return LazyLogits.make(deferred, dtype or self.dtype, self if is_view else None)

    def _tell(self, part: Any, origin: Origin) -> None:
        """Tell the result of an operation on these logits how it was made."""
        graph = torch.is_grad_enabled()
        if not isinstance(part, LazyLogits):
            mark(part, origin)
            return
        if graph and not any(isinstance(arg, LazyLogits) for arg in origin.args):
            part.origin = origin
        same = part.deferred.steps == self.deferred.steps and part.deferred.normalized == self.deferred.normalized
        is_view = part.storage_version is self.storage_version
        part.is_copy = self.is_copy if is_view else same
        detached = graph and self.requires_grad and not part.requires_grad
        if is_view and not detached:
            part.in_place_error = self.in_place_error
            if self.requires_grad and origin.index is not None:
                part.in_place_error = _ONE_OF_SEVERAL
            elif self.requires_grad and not graph:
                part.in_place_error = "a view that was made under no_grad"

    def check(self) -> None:
        """Raise RuntimeError if the logits cannot be computed any more: their tensors, or a view of them, changed."""
        if self.made_without_grad and self.requires_grad:
            self._find_gradient()
        if self.materialized is None:
            self.deferred.check()
        if self.storage_version.count != self.seen_version:
            raise RuntimeError(
                "these logits share their memory with logits that an in-place operation has changed, which lazy logits "
                "do not follow; use the tensor that the operation returned, or call logits.clone() before it."
                + see("lazy-logits-that-cannot-be-computed-any-more")
            )

    def _find_gradient(self) -> None:
        """Connect logits that an autograd function returned, and made without gradients, with the graph.

        If the function only passes gradients back, these are the logits of the tensors before it, and what DeepSpeed
        does in it is done when their gradients come; if it may do anything else, gradients have to pass through it: the
        values are computed from this tensor.
        """
        self.made_without_grad, gathers = False, []
        if self.grad_fn is not None and not self.own_version.count:
            self.materialized = None  # values that were kept have no gradient
        node, output = self.grad_fn, self.output_nr
        while node is not None and _passes_gradient_back(node):
            gathers += [node] if _forward_name(node) in _GATHER_FUNCTIONS else []
            node, output = node.next_functions[output]
        if getattr(node, "_forward_cls", None) is _LazyLinear:
            deferred: DeferredLogits = node.deferred  # type: ignore[union-attr]
            try:
                found = deferred.with_tensors(*node.saved_tensors)  # type: ignore[union-attr]
                self.deferred = replace(found.with_version(), weights=deferred.weights)
                if gathers:
                    self.deferred = self.deferred.with_gradient_hook(partial(_gather, gathers))
            except RuntimeError:  # a backward has freed them; the values remain
                self.deferred = deferred
        elif self.materialized is None:
            warn_materialized("an autograd function", self)
            self._materialize_for_hooks()

    def _materialize_for_hooks(self) -> None:
        """Compute the values as a function of this tensor, so that their gradient arrives here, whoever asks first."""
        with torch.inference_mode(False), torch.no_grad():
            values = self.materialize()
        with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            self.materialized, self.hooked = WithGradientOf.apply(values, self), True

    def materialize(self) -> Tensor:
        """The values as an ordinary tensor, differentiable."""
        self.check()
        if self.materialized is not None:
            return self.materialized
        values = self.deferred.values().to(self.dtype)
        self.deferred.mark_read()
        if self.requires_grad:
            mark(values, self.origin)
        else:
            self.materialized = values  # as in the plain model, whose logits are there for the next operation
        return values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    @torch.compiler.disable  # it would be traced where a graph ends
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        if func in (torch.autograd.backward, Tensor.backward):
            return _backward(func, *args, **kwargs)
        first = args[0] if args else None
        if name == "__get__" or name in _METADATA:
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if name in _METADATA or attribute not in _PROPERTIES_OF_VALUES:
                return _metadata(func, name, attribute, args, kwargs)
            name = attribute
        if name in _COMMUTATIVE and not kwargs and type(first) in (Tensor, Parameter) and type(args[1]) is LazyLogits:
            args = first, _ = args[::-1]
        if isinstance(kwargs.get("out"), LazyLogits):
            raise RuntimeError(f"{name} cannot write to lazy logits (out=); give it a tensor of its own.")
        if isinstance(first, LazyLogits):
            first.check()
            if name in _HOOKS:
                return _register_hook(first, func, name, args, kwargs)
            result = _call_implementation(name, args, kwargs) if first.materialized is None else NotImplemented
            if result is not NotImplemented:
                several = isinstance(result, tuple)
                for i, part in enumerate(result if several else (result,)):
                    if part is not first:
                        first._tell(part, Origin(first.origin, func, args[1:], kwargs, i if several else None))
                return result
            if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE:
                return _in_place(first, func, name, args, kwargs)
            if name in _ADDRESSES:
                first.materialized = _materialize_all(first, name)  # they must live as long as the logits
        return func(*_materialize_all(args, name), **_materialize_all(kwargs, name))

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operations that do not come through :meth:`__torch_function__`; autograd, above, knows their gradients."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (lazy,) = args
            alias = cls._empty(lazy.shape, lazy.dtype, lazy.device)
            alias.deferred, alias.materialized, alias.hooked = lazy.deferred, lazy.materialized, lazy.hooked
            alias.storage_version, alias.seen_version = lazy.storage_version, lazy.seen_version
            return alias
        with torch.no_grad():
            return func(*_materialize_all(args, str(func)), **_materialize_all(kwargs or {}, str(func)))


def true_values(tensor: Tensor) -> Tensor:
    """The values of lazy logits as an ordinary tensor; any other tensor as it is."""
    return tensor.materialize() if isinstance(tensor, LazyLogits) else tensor


def _materialize_all(arguments: Any, operation: str) -> Any:
    """A function's arguments with every lazy tensor, also inside of lists, tuples and dicts, replaced by its values."""
    if isinstance(arguments, LazyLogits):
        if arguments.materialized is None:
            warn_materialized(operation, arguments)
        return arguments.materialize()
    if isinstance(arguments, (list, tuple)):
        parts = [_materialize_all(part, operation) for part in arguments]
        return type(arguments)(*parts) if hasattr(arguments, "_fields") else type(arguments)(parts)
    if isinstance(arguments, dict):
        return {key: _materialize_all(value, operation) for key, value in arguments.items()}
    return arguments


def lazy_linear(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gather: Gather | None = None,
    shard: VocabularyRanks | None = None,
    parameters: Sequence[Tensor | None] = (),
) -> Tensor:
    """``F.linear``, whose values are computed only if an operation needs them.

    Args:
        hidden_states, weight, bias: ``[..., H]``, ``[V, H]``, ``[V]``.
        gather: returns weight and bias (where there is one) again, should their memory be freed.
        shard: where weight and bias are this rank's rows of a vocabulary that a process group shares. All ranks must
            read the logits together.
        parameters: where weight and bias are parts of other tensors (DTensors), these, which count in-place operations.

    Returns:
        :class:`LazyLogits` ``[..., V]``, in the dtype that ``F.linear`` would give. Inputs that ``F.linear`` would
        refuse, empty weights and quantized ones go to ``F.linear``.
    """
    autocast = autocast_of(hidden_states)
    if not can_be_lazy(hidden_states, weight, bias):
        return F.linear(hidden_states, weight, bias)
    weights = HeadWeights(weight, bias, hidden_states.shape[:-1].numel(), gather, parameters)
    head = Head(weight, bias) if shard is None else Head(weight, bias).with_fields(shard=shard)
    deferred = DeferredLogits(hidden_states, head, autocast=autocast, weights=weights)
    return LazyLogits.make(deferred, autocast or hidden_states.dtype)


def autocast_of(hidden_states: Tensor) -> torch.dtype | None:
    """The dtype to which autocast would cast these; it leaves fp64 alone."""
    return None if hidden_states.dtype == torch.float64 else autocast_dtype(hidden_states.device)


def can_be_lazy(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether lazy logits can stand for ``F.linear`` of these tensors."""
    mixed = hidden_states.dtype != weight.dtype and autocast_of(hidden_states) is None
    fits = hidden_states.dim() >= 2 == weight.dim() and hidden_states.shape[-1] == weight.shape[-1]
    fits = fits and weight.numel() > 0 and hidden_states.is_floating_point() and weight.is_floating_point()
    fits = fits and not is_quantized(weight)
    return fits and not mixed and (bias is None or bias.shape == weight.shape[:1]) and not hidden_states.is_meta


class _LazyLinear(torch.autograd.Function):
    """Lazy logits as an output of hidden states, weight and bias, with the gradient that their values would have."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredLogits, dtype: torch.dtype, *tensors: Tensor | None) -> Tensor:
        lazy = LazyLogits._empty(deferred.shape, dtype, deferred.hidden_states.device)
        ctx.deferred, ctx.own_version = deferred, lazy.own_version
        ctx.save_for_backward(*tensors)
        return lazy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.own_version.count:
            raise RuntimeError(
                "logits that were changed in place were then used by code that does not look at their class, so their "
                "gradient is not known; use the tensor that the in-place operation returned, or call logits.clone() "
                "before it." + see("lazy-logits-that-cannot-be-computed-any-more")
            )
        leaves = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            values = ctx.deferred.with_tensors(*leaves).values()
        upstream = true_values(gradient).to(values.dtype)
        gradients = torch.autograd.grad(values, [leaf for leaf in leaves if leaf is not None], upstream)
        return None, None, *gradients, *[None] * (len(leaves) - len(gradients))  # there may be no bias


class WithGradientOf(torch.autograd.Function):
    """The first tensor's values, with the gradient of the second, which differs from it by rounding at most."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, differentiable: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def _forward_name(node: Any) -> str:
    """The name of the autograd function whose backward a node is."""
    return getattr(getattr(node, "_forward_cls", None), "__name__", "")


def _gather(nodes: list[Any], gradients: list[Tensor]) -> list[Tensor]:
    """Do what DeepSpeed's functions do when the gradient comes, which they pass back."""
    for node in nodes:
        node._forward_cls.backward(node, *gradients)
    return gradients


def _passes_gradient_back(node: Any) -> bool:
    """Whether an autograd node gives its inputs the gradients of its outputs and does nothing else."""
    if _forward_name(node) not in _IDENTITY_FUNCTIONS:
        return False
    if len(getattr(node, "_input_metadata", ())) != len(node.next_functions):
        return False  # it returned more than tensors, so that outputs cannot be matched with inputs by number
    ddp = getattr(node, "ddp_weakref", None)
    return ddp is None or not ddp().static_graph  # with a static graph, DDP's function does work of its own


def _metadata(func: Callable[..., Any], name: str, attribute: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A question about the tensor, or ``requires_grad_``, which makes values of their own of detached logits."""
    lazy = args[0] if args else None
    if isinstance(lazy, LazyLogits):
        if attribute == "grad" and name == "__get__" and lazy.materialized is not None and not lazy.hooked:
            return lazy.materialized.grad
        sets_grad = name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad")
        if sets_grad and not lazy.requires_grad and (args[1:] or (True,))[0]:
            warn_materialized("requires_grad_", lazy)
            lazy.materialized = lazy.materialize().detach().requires_grad_()
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _register_hook(lazy: LazyLogits, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    """``register_hook`` and ``retain_grad``.

    The engine's gradients go from the loss to the hidden states, past this tensor. FSDP's hooks only wait for backward
    to arrive, so they are registered on the hidden states as well. DeepSpeed's must run before any parameter gets its
    gradient, and may divide the gradient by a number, so it gets those of hidden states, weight and bias instead. All
    others get values computed from this tensor.
    """
    hook = args[1] if len(args) > 1 else kwargs.get("hook")
    hidden_states, function = lazy.deferred.hidden_states, hook
    while isinstance(function, partial):
        function = function.func
    module, place = (getattr(function, key, None) or "" for key in ("__module__", "__qualname__"))
    if module.startswith("torch.distributed"):
        if hidden_states.requires_grad:
            hidden_states.register_hook(hook)
    elif lazy.requires_grad and lazy.materialized is None:
        if module.startswith("deepspeed.") and place.startswith("OutputBackwardHookManager."):
            lazy.deferred = lazy.deferred.with_gradient_hook(lambda gradients: [hook(g) for g in gradients])
        else:
            warn_materialized(name, lazy)
            lazy._materialize_for_hooks()
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _values_in_graph(tensor: Any) -> Any:
    """What stands for lazy logits in the graph: their values if they were changed in place or are a leaf."""
    if not isinstance(tensor, LazyLogits):
        return tensor
    tensor.check()
    return tensor if tensor.materialized is None or tensor.hooked else tensor.materialized


def _backward(func: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> None:
    """``torch.autograd.backward`` from lazy logits, which needs their node in the graph, and not their values."""
    alone = isinstance(tensors, Tensor)
    tensors = _values_in_graph(tensors) if alone else [_values_in_graph(tensor) for tensor in tensors]
    args, kwargs = _materialize_all(args, "backward"), _materialize_all(kwargs, "backward")
    with torch._C.DisableTorchFunctionSubclass():
        func(tensors, *args, **kwargs)


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, of lazy logits or with respect to them."""
    inputs = [_values_in_graph(tensor) for tensor in inputs]
    starts = {i: z.origin for i, z in enumerate(inputs) if isinstance(z, LazyLogits)}
    name = "torch.autograd.grad"
    options["grad_outputs"] = _materialize_all(grad_outputs, name)
    outputs = _materialize_all(list(outputs), name)
    return gradients_of_logits(outputs, inputs, starts, lambda i: _materialize_all(inputs[i], name), options)


def _in_place(lazy: LazyLogits, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """An in-place operation on the values, which the tensor holds from now on."""
    if name in _IN_PLACE_VIEWS:
        raise RuntimeError(
            f"{name} would change lazy logits themselves; use {name.removesuffix('_')} instead."
            + see("lazy-logits-that-cannot-be-computed-any-more")
        )
    if lazy.in_place_error is not None and (torch.is_grad_enabled() or lazy.in_place_error is _ONE_OF_SEVERAL):
        raise RuntimeError(
            f"{name}: torch does not change {lazy.in_place_error} in place; use an operation that returns a new tensor."
        )
    if lazy.materialized is None:
        warn_materialized(name, lazy)
    with torch.set_grad_enabled(torch.is_grad_enabled() or lazy.requires_grad):  # under no_grad, the graph stays
        computed, values = lazy.materialized is None, lazy.materialize()
        if computed and lazy.is_copy:
            values = values.clone()  # autograd may have saved what this is a copy of
    func(values, *_materialize_all(args[1:], name), **_materialize_all(kwargs, name))
    lazy.materialized, lazy.hooked = values, False
    lazy.own_version.count += 1
    lazy.storage_version.count += 1
    lazy.seen_version = lazy.storage_version.count
    return values


def deferred_logits(logits: Any) -> DeferredLogits | None:
    """Hidden states and head of lazy logits; ``None`` for other tensors and for lazy logits that have values by now."""
    if not isinstance(logits, LazyLogits):
        return None
    logits.check()
    return logits.deferred if logits.materialized is None else None
