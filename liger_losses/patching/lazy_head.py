"""The loss head: the output embedding returns lazy logits, also if it is replaced or gets adapters later."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from liger_losses.chunked.engine.documentation import see
from liger_losses.chunked.engine.quantized_kinds import disagreement, find_quantized, is_quantized
from liger_losses.chunked.engine.shard import VocabularyShard
from liger_losses.patching.lazy import (
    LazyLogits,
    TracedLogits,
    is_one_graph,
    lazy_linear,
    lazy_quantized_linear,
    traced_linear,
)
from liger_losses.patching.lazy.shared_linear import local_parameters, match_shared
from liger_losses.patching.linear_forward import LinearForward, match_forward
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.report import LEFT_OUT, Entry
from liger_losses.patching.swap import Replacement, original_class, replacement_of, restore, swap


class _Forced:
    """Whether a context of :func:`force_lazy_head` is open: in this thread, or in any."""

    here = contextvars.ContextVar("forced", default=False)
    #: For compiled graphs, as torch.compile cannot read a ContextVar.
    contexts: ClassVar[list[None]] = []


@contextlib.contextmanager
def force_lazy_head() -> Iterator[None]:
    """Within this context, lazy heads return :class:`~liger_losses.patching.lazy.LazyLogits` even under ``no_grad``."""
    token = _Forced.here.set(True)
    _Forced.contexts.append(None)
    try:
        yield
    finally:
        _Forced.contexts.pop()
        _Forced.here.reset(token)


class LazyLinear(nn.Linear):
    """``nn.Linear`` that returns lazy logits; for one token per sequence without gradients (generation), ordinary ones.

    Attributes:
        only_when_forced: return lazy logits within :func:`force_lazy_head` and nowhere else, for callers that reduce
            the logits before anybody else sees them.
        linear_forward: the forward that was found on the instance, if there was one.
        shard: this rank's part of the vocabulary, where the ranks of a mesh share the layer's rows.
    """

    only_when_forced = False
    linear_forward: LinearForward | None = None
    shard: VocabularyShard | None = None

    def forward(self, input: Tensor) -> Tensor:
        if _returns_lazy_logits(self, input):
            return _traced_forward(self, input) if torch.compiler.is_dynamo_compiling() else _lazy_forward(self, input)
        return super().forward(input) if self.linear_forward is None else self.linear_forward.original(input)


def _returns_lazy_logits(layer: Any, hidden_states: Tensor) -> bool:
    if torch.is_grad_enabled():
        lazy = layer.training or hidden_states.requires_grad
    else:
        # A graph of torch.export or torch.jit has no place for them, and fully_shard frees its units' weights.
        # (The flag itself: torch.compile of torch 2.11 takes is_exporting() for true.)
        recorded = torch.compiler._is_exporting_flag or torch.jit.is_tracing()
        several = not recorded and hidden_states.dim() > 1 and hidden_states.shape[-2] > 1
        lazy = several and not hasattr(layer, "set_reshard_after_forward")
    forced = bool(_Forced.contexts) if torch.compiler.is_dynamo_compiling() else _Forced.here.get()
    return forced or (lazy and not layer.only_when_forced)


def _traced_forward(layer: Any, hidden_states: Tensor) -> Any:
    """The lazy forward in a compiled graph; where weights come and go, the graph ends."""
    gathers = hasattr(layer, "set_reshard_after_forward")
    if gathers or any(hasattr(layer.weight, name) for name in ("full_tensor", "ds_id")):
        return _lazy_forward_outside(layer, hidden_states)
    forward = layer.linear_forward or LinearForward(F.linear)
    return forward.compute(traced_linear, hidden_states, layer.weight, layer.bias)


def _lazy_forward(layer: Any, hidden_states: Tensor) -> Tensor:
    forward = layer.linear_forward or LinearForward(F.linear)
    if layer.shard is None and hasattr(layer.weight, "full_tensor"):
        warnings.warn(
            "the head's weight became a DTensor after patch(), so all logits are computed. For tensor parallelism, "
            'load the model with DistributedConfig(tp_plan="auto") of transformers, and patch it then; '
            "torch's parallelize_module on the head is not supported." + see("models-that-cannot-be-patched"),
            RuntimeWarning,
            stacklevel=2,
        )
        return forward.compute(F.linear, hidden_states, layer.weight, layer.bias)
    if hasattr(layer, "set_reshard_after_forward"):  # a unit of fully_shard; its weights must stay until backward
        layer.set_reshard_after_forward(False, recurse=False)
    if layer.shard is not None:
        return forward.compute(partial(lazy_linear, shard=layer.shard), hidden_states, *local_parameters(layer))
    # DeepSpeed's parameters have a ds_id.
    weight, bias = (KeepGathered.apply(p) if hasattr(p, "ds_id") else p for p in (layer.weight, layer.bias))
    dtypes = [None if t is None else t.dtype for t in (weight, bias)]
    linear = partial(lazy_linear, gather=partial(_gather_again, weakref.ref(layer), dtypes))
    return forward.compute(linear, hidden_states, weight, bias)


_lazy_forward_outside = torch.compiler.disable(_lazy_forward)


def _gather_again(layer: weakref.ref[nn.Linear], dtypes: list[torch.dtype | None]) -> list[Tensor] | None:
    """Weight and bias of a layer that ``fully_shard`` has sharded since its forward, in all processes at once."""
    tensors: list[Any] = [getattr(layer(), name, None) for name in ("weight", "bias")]
    given = [(tensor, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True) if dtype is not None]
    if not all(hasattr(tensor, "full_tensor") for tensor, _ in given):
        return None
    warnings.warn(
        "lazy logits are read after fully_shard has freed the head's weights, which are gathered again: all processes "
        "must read them. Reading them before loss.backward() gathers nothing."
        + see("lazy-logits-that-cannot-be-computed-any-more"),
        RuntimeWarning,
        stacklevel=2,
    )
    return [tensor.detach().full_tensor().to(dtype) for tensor, dtype in given]


class KeepGathered(torch.autograd.Function):
    """A weight that DeepSpeed's ZeRO-3 has gathered for the running forward, as a tensor that stays in memory.

    DeepSpeed gathers a module's weights again for its backward, but lazy logits use them earlier, and no backward of
    the module runs. So backward gathers the weight again, and partitions it at its end unless DeepSpeed has done so or
    a submodule (tied weights) uses it.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parameter = ctx.parameter

        def partition() -> None:
            if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_active_sub_modules:
                parameter.partition(param_list=[parameter], has_been_updated=False)

        if parameter.ds_status.name != "AVAILABLE":
            parameter.all_gather(param_list=[parameter])
            torch.autograd.Variable._execution_engine.queue_callback(partition)
        return gradient


@dataclass(frozen=True)
class LazyTokens(Replacement):
    """The forward of PEFT's trainable tokens on a head: a product with a copy of its weight that has other rows."""

    def call(self, module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, with lazy products."""
        if not _returns_lazy_logits(module, hidden_states):
            return NotImplemented
        with _LazyProducts():
            return original_class(module).forward(module, hidden_states, *args, **kwargs)

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Whether a module is PEFT's layer."""
        return hasattr(module, "trainable_tokens_delta")

    @classmethod
    def match(cls, module: nn.Module) -> LazyTokens:
        """There is one kind."""
        return cls()


@dataclass(frozen=True)
class LazyQuantized(Replacement):
    """The forward of a quantized head, whose rows are dequantized where the logits are read."""

    def call(self, module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The product with the layer's rows; ordinary logits come from the layer's own forward."""
        if args or kwargs or hidden_states.dim() < 2 or not _returns_lazy_logits(module, hidden_states):
            return NotImplemented
        return _lazy_quantized_forward(module, hidden_states)

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Whether a layer has a quantized weight, of whatever kind."""
        weight = getattr(module, "weight", None)
        ordinary = type(weight) is nn.Parameter and weight.is_floating_point()
        return is_quantized(module) and not ordinary and not hasattr(module, "base_layer")

    @classmethod
    def match(cls, module: nn.Module) -> LazyQuantized:
        """Rows that can be read, and whose products the layer computes; else Mismatch."""
        try:
            found = find_quantized(module)
        except TypeError as error:
            raise Mismatch(str(error)) from None
        if found is None:
            raise Mismatch("it has not been quantized yet: move the model to its device, then patch it")
        if found.device.type == "meta":
            raise Mismatch("its weight is on the meta device, and what it computes must be compared: load it first")
        before = dict(vars(module))  # a first forward may choose the dtype to compute in
        try:
            same = disagreement(module, found) <= _QUANTIZATION_ERROR
        except Exception as error:
            raise Mismatch(f"it fails on small hidden states ({type(error).__name__}: {str(error)[:160]})") from error
        finally:
            vars(module).update(before)
        if not same:
            raise Mismatch("it computes something else than the product with its dequantized rows")
        return cls()


#: Layers may round hidden states to 8 bits before their product, which this library does not.
_QUANTIZATION_ERROR = 0.05


@torch.compiler.disable
def _lazy_quantized_forward(module: Any, hidden_states: Tensor) -> Tensor:
    found = find_quantized(module)
    assert found is not None
    return lazy_quantized_linear(hidden_states, found, module.bias, getattr(module, "compute_dtype", None))


class _LazyProducts(TorchFunctionMode):
    """Within this context, ``F.linear`` returns lazy logits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            lazy = traced_linear if torch.compiler.is_dynamo_compiling() else lazy_linear
            return (F.linear if hasattr(weight, "full_tensor") else lazy)(input, weight, bias)

        return (linear if func is F.linear else func)(*args, **(kwargs or {}))


def unsupported_reason(module: nn.Module) -> str | None:
    """Why a module cannot become lazy, or ``None``."""
    if LazyTokens.is_candidate(module):
        return None
    if LazyQuantized.is_candidate(module):
        if "forward" in vars(module):
            return "it is quantized, and its forward was replaced on the instance"
        return _reason_of_hooks(module)
    if not (type(module) is nn.Linear or type(module) is LazyLinear):
        if isinstance(module, nn.Linear) and hasattr(module, "set_reshard_after_forward"):
            return "fully_shard has made it a unit, which has a class of its own: shard it afterwards"
        return f"{type(module).__module__}.{type(module).__qualname__} is not torch.nn.Linear"
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    sharded = hasattr(module.weight, "full_tensor")  # gathered by the time it is used
    if not (sharded or type(module.weight) is nn.Parameter) or not module.weight.is_floating_point():
        return f"its weight is a {type(module.weight).__name__} of {module.weight.dtype}"
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if sharded and any(getattr(hook, "__module__", "") == "torch.distributed.tensor._api" for hook in hooks):
        return (
            "torch's parallelize_module has split its weight, and takes DTensors from it: load the model with "
            'transformers\' DistributedConfig(tp_plan="auto"), or take the loss from the last hidden states and a '
            "Head with group="
        )
    return _reason_of_hooks(module)


def _reason_of_hooks(module: nn.Module) -> str | None:
    if module._backward_hooks or module._backward_pre_hooks:
        return "it has backward hooks, which a gradient that is taken elsewhere would pass by"
    return None


def _head_layers(model: nn.Module) -> list[nn.Module]:
    """The output embedding; under an adapter, the layers inside it whose outputs are as wide as the vocabulary."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Linear) or not isinstance(head, nn.Module):
        return [head] if isinstance(head, nn.Module) else []
    linears: list[Any] = [m for m in head.modules() if isinstance(m, nn.Linear) or LazyQuantized.is_candidate(m)]
    tokens = [module for module in head.modules() if LazyTokens.is_candidate(module)]
    if tokens:  # the head's weight is computed whenever it is asked for; a layer inside runs if the adapter is disabled
        return [*tokens, *linears]
    width = next((m.out_features for m in linears if is_quantized(m)), None)
    if width is None:
        weight = getattr(head, "weight", None)
        width = weight.shape[0] if isinstance(weight, Tensor) else None
    return [m for m in linears if m.out_features == (width or m.out_features)] or [head]


def is_lazy_layer(layer: nn.Module) -> bool:
    """Whether a layer can return lazy logits."""
    return isinstance(layer, LazyLinear) or isinstance(replacement_of(layer), (LazyTokens, LazyQuantized))


def _is_lazy(layer: Any, only_when_forced: bool) -> bool:
    """Whether a layer is lazy already: everywhere or, if that is enough, only when forced."""
    if not is_lazy_layer(layer) or (layer.only_when_forced and not only_when_forced):
        return False
    if "forward" not in vars(layer):
        return True
    try:  # a forward that was put on the instance since; it may call the lazy one
        with force_lazy_head():
            return isinstance(layer.forward(layer.weight.new_zeros(1, layer.in_features)), LazyLogits)
    except Exception:
        return False


def make_head_lazy(
    model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None, *, only_when_forced: bool = False
) -> list[Entry]:
    """Make the output embedding return lazy logits.

    Under an adapter (PEFT's ``lora.Linear``, say), all linear layers as wide as the vocabulary become lazy: the sum of
    their outputs is again one product.

    Args:
        model: with ``get_output_embeddings``, as transformers' models have it.
        filter_fn: ``(module, path) -> bool``; layers for which it returns False are left as they are.
        only_when_forced: logits are lazy within :func:`force_lazy_head` only. A head that is lazy already stays as it
            is; without this option, one that is lazy only when forced becomes lazy everywhere.

    Returns:
        An entry for each layer that was changed, or left with the reason; none for layers that were lazy already.
    """
    layers = _head_layers(model)
    if not layers:
        return [
            Entry("", type(model).__name__, None, "it has no output embedding (get_output_embeddings() gives none)")
        ]
    entries = []
    for module in layers:
        if _is_lazy(module, only_when_forced):
            continue
        path = next((name for name, other in model.named_modules() if other is module), "")
        name, reason = _class_name(module), unsupported_reason(module)
        if reason is None and filter_fn is not None and not filter_fn(module, path):
            reason = LEFT_OUT
        if reason is None:
            reason = _make_lazy(module, only_when_forced)
        entries.append(Entry(path, name, None, reason) if reason else _entry(module, path))
    owner = _owner(model)
    if owner is not None and _return_tensors not in owner._forward_hooks.values():
        owner.register_forward_hook(_return_tensors)
    return entries


def _owner(model: nn.Module) -> nn.Module | None:
    """The model that has the head; an adapter's model, say, is around it."""
    return next((module for module in model.modules() if hasattr(type(module), "get_output_embeddings")), None)


def _make_lazy(module: Any, only_when_forced: bool) -> str | None:
    """Make a layer lazy, or return the reason not to."""
    if LazyTokens.is_candidate(module):
        restore(module)
        swap(module, LazyTokens.match(module))
    elif LazyQuantized.is_candidate(module):
        restore(module)
        try:
            swap(module, LazyQuantized.match(module))
        except Mismatch as mismatch:
            return str(mismatch)
    else:
        linear_forward, shard = getattr(module, "linear_forward", None), getattr(module, "shard", None)
        if "forward" in vars(module):
            try:
                linear_forward = match_forward(module)
            except Mismatch as mismatch:
                if not hasattr(module.weight, "full_tensor"):
                    return f"its forward was replaced on the instance by one that is not a linear layer's: {mismatch}"
                if isinstance(module, LazyLinear):
                    vars(module)["only_when_forced"] = True  # the forward around it expects the layer's own
                    return (
                        "its weight was split over processes after patch(): load the model again, and patch it after "
                        "that"
                    )
                try:
                    shard, linear_forward = match_shared(module), LinearForward(vars(module)["forward"])
                except Mismatch as reason:
                    return f"its weight is split over processes, and {reason}"
            del module.forward
        module.__class__ = LazyLinear
        vars(module)["linear_forward"], vars(module)["shard"] = linear_forward, shard
    vars(module)["only_when_forced"] = only_when_forced
    return None


def _class_name(layer: nn.Module) -> str:
    """The name of a layer's class before it was made lazy."""
    return "Linear" if isinstance(layer, LazyLinear) else original_class(layer).__name__


def _entry(layer: nn.Module, path: str) -> Entry:
    """The report of a lazy layer."""
    by = "LazyLinear" if isinstance(layer, LazyLinear) else type(replacement_of(layer)).__name__
    return Entry(path, _class_name(layer), by)


def is_patched_head(module: Any) -> bool:
    """Whether a layer is lazy in all of training; one that is lazy only when forced belongs to its trainer."""
    lazy = type(module) is LazyLinear or isinstance(replacement_of(module), (LazyTokens, LazyQuantized))
    return lazy and not module.only_when_forced


def patched_heads(model: nn.Module) -> list[Entry]:
    """The report of all layers that are lazy in all of training."""
    return [_entry(module, path) for path, module in model.named_modules() if is_patched_head(module)]


def keep_head_lazy(model: nn.Module) -> None:
    """Make the head lazy before each forward, as it may have been replaced or have got adapters since the last one."""
    owner = _owner(model)
    if owner is not None and _make_lazy_again not in owner._forward_pre_hooks.values():
        owner.register_forward_pre_hook(_make_lazy_again)


def _make_lazy_again(model: nn.Module, args: Any = ()) -> None:
    """The hook of :func:`keep_head_lazy`. If the head cannot be lazy any more, it says so and removes itself."""
    left = [f"{entry.path} ({entry.reason})" for entry in make_head_lazy(model) if entry.reason]
    if left:
        _forget_head(model)
        warnings.warn(
            f"the output embedding of {type(model).__name__} was changed after patch(), and cannot return lazy logits "
            f"any more: {'; '.join(left)}. Its logits, [tokens, vocab], are computed from now on. If you can undo "
            "that change, do so and call liger_losses.patch(model) again." + see("models-that-cannot-be-patched"),
            RuntimeWarning,
            stacklevel=2,
        )


def _return_tensors(model: nn.Module, args: Any, output: Any) -> Any:
    """A compiled model returns lazy logits as a tensor, which ends its graph, unless ``fullgraph=True`` forbids it."""
    if not torch.compiler.is_dynamo_compiling() or is_one_graph():
        return output
    if isinstance(output, TracedLogits):
        return output.lazy()
    if isinstance(output, tuple):
        return tuple([part.lazy() if isinstance(part, TracedLogits) else part for part in output])
    if isinstance(getattr(output, "logits", None), TracedLogits):
        output.logits = output.logits.lazy()
    return output


def _forget_head(model: nn.Module) -> None:
    """Undo :func:`keep_head_lazy`."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [n for n, hook in hooks.items() if hook in (_make_lazy_again, _return_tensors)]:
                del hooks[number]


def unpatch_head(model: nn.Module) -> int:
    """Make every patched head what it was; returns how many layers there were."""
    _forget_head(model)
    patched: list[Any] = [module for module in model.modules() if is_patched_head(module)]
    for module in patched:
        del module.only_when_forced
        restore(module)
        linear_forward = vars(module).pop("linear_forward", None)
        vars(module).pop("shard", None)
        if type(module) is LazyLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
        if linear_forward is not None:
            vars(module).setdefault("forward", linear_forward.original)
    return len(patched)
