"""The loss head: the output embedding returns lazy logits, also if it is replaced or gets adapters later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.chunked import is_quantized
from liger_losses.patching.lazy import LazyLogits, TracedLogits, is_one_graph
from liger_losses.patching.lazy.gradients import make_empty
from liger_losses.patching.lazy.traced_logits import without_traced
from liger_losses.patching.lazy_layers import LazyLinear, LazyQuantized, LazyTokens, force_lazy_head, is_lazy_layer
from liger_losses.patching.linear_forward import check_forward, match_shared
from liger_losses.patching.probing import Mismatch, reason_of
from liger_losses.patching.report import LEFT_OUT, Entry
from liger_losses.patching.swap import HOOKS, hooks_of, original_class, replacement_of, restore, swap


def unsupported_reason(module: nn.Module) -> str | None:
    """Why a module cannot become lazy, or ``None``."""
    if make_empty is None:
        return "this version of torch has no Tensor._make_wrapper_subclass, which makes tensors without memory"
    if LazyTokens.is_candidate(module):
        return None
    if LazyQuantized.is_candidate(module):
        if "forward" in vars(module):
            return "it is quantized, and its forward was replaced on the instance"
        return _reason_of_hooks(module)
    if not (type(module) is nn.Linear or type(module) is LazyLinear):
        if isinstance(module, nn.Linear) and hasattr(module, "set_reshard_after_forward"):
            return "fully_shard has made it a unit and changed its class: shard it afterwards"
        return f"{type(module).__module__}.{type(module).__qualname__} is not torch.nn.Linear"
    sharded = hasattr(module.weight, "full_tensor")  # gathered by the time it is used
    if not (sharded or type(module.weight) is nn.Parameter) or not module.weight.is_floating_point():
        return f"its weight is a {type(module.weight).__name__} of {module.weight.dtype}"
    hooks = [hook for kind in HOOKS for hook in hooks_of(module, kind).values()]
    if sharded and any(getattr(hook, "__module__", "").startswith("torch.distributed.tensor.") for hook in hooks):
        return (
            "torch's parallelize_module has split its weight, and takes DTensors from it: load the model with "
            'transformers\' DistributedConfig(tp_plan="auto"), or take the loss from the last hidden states and a '
            "Head with group="
        )
    return _reason_of_hooks(module)


def _reason_of_hooks(module: nn.Module) -> str | None:
    if hooks_of(module, "backward_hooks") or hooks_of(module, "backward_pre_hooks"):
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


def _was_quantized(layer: Any) -> bool:
    """Whether a lazy layer has got a weight of another kind, as torchao's ``quantize_`` gives it in place."""
    if type(layer) is not LazyLinear or hasattr(layer.weight, "full_tensor"):
        return False
    return type(layer.weight) not in (nn.Parameter, Tensor)


def make_head_lazy(
    model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None, *, only_when_forced: bool = False
) -> list[Entry]:
    """Make the output embedding return lazy logits.

    Under an adapter (PEFT's ``lora.Linear``, for example), all linear layers as wide as the vocabulary become lazy: the
    sum of their outputs is again one product.

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
        without = "it has no output embedding; for token losses, pass the model with its lm_head (AutoModelForCausalLM)"
        return [Entry("", type(model).__name__, None, without)]
    entries = []
    for module in layers:
        forced = only_when_forced
        if _was_quantized(module):
            forced = forced and bool(module.only_when_forced)
            _restore_layer(module)
        if _is_lazy(module, forced):
            continue
        path = next((name for name, other in model.named_modules() if other is module), "")
        name, reason = _class_name(module), unsupported_reason(module)
        if reason is None and filter_fn is not None and not filter_fn(module, path):
            reason = LEFT_OUT
        if reason is None:
            reason = _make_lazy(module, forced)
        entries.append(Entry(path, name, None, reason) if reason else _entry(module, path))
    owner = owner_of_head(model)
    if owner is not None and _return_tensors not in hooks_of(owner, "forward_hooks").values():
        owner.register_forward_hook(_return_tensors)
    return entries


def owner_of_head(model: nn.Module) -> Any:
    """The model that has the head, inside wrappers such as an adapter's or DistributedDataParallel; or ``None``."""
    return next((module for module in model.modules() if hasattr(type(module), "get_output_embeddings")), None)


def _make_lazy(module: Any, only_when_forced: bool) -> str | None:
    """Make a layer lazy, or return the reason not to."""
    kind = next((kind for kind in (LazyTokens, LazyQuantized) if kind.is_candidate(module)), None)
    if kind is not None:
        restore(module)
        try:
            swap(module, kind.match(module))
        except Exception as error:
            return reason_of(error)
    else:
        own_forward, ranks = getattr(module, "own_forward", None), getattr(module, "ranks", None)
        if "forward" in vars(module):
            own_forward = module.forward
            try:
                check_forward(module)
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
                    ranks = match_shared(module)
                except Mismatch as reason:
                    return f"its weight is split over processes, and {reason}"
            del module.forward
        module.__class__ = LazyLinear
        vars(module)["own_forward"], vars(module)["ranks"] = own_forward, ranks
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
    owner = owner_of_head(model)
    if owner is not None and _make_lazy_again not in hooks_of(owner, "forward_pre_hooks").values():
        owner.register_forward_pre_hook(_make_lazy_again)


def _make_lazy_again(model: nn.Module, args: Any = ()) -> None:
    """The hook of :func:`keep_head_lazy`. If the head cannot be lazy any more, it says so and removes itself."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is LazyLinear and type(head.weight) is nn.Parameter and _is_lazy(head, only_when_forced=False):
        return  # as in most forwards; what else may be left to do takes a while to find out
    left = [f"{entry.path} ({entry.reason})" for entry in make_head_lazy(model) if entry.reason]
    if left:
        _forget_head(model)
        warn(
            f"the output embedding of {type(model).__name__} was changed after patch(), and cannot return lazy logits "
            f"any more: {'; '.join(left)}. Its logits, [tokens, vocab], are computed from now on. If you can undo "
            "that change, do so and call liger_losses.patch(model) again." + see("models-that-cannot-be-patched"),
            RuntimeWarning,
        )


def _return_tensors(model: nn.Module, args: Any, output: Any) -> Any:
    """A compiled model returns lazy logits as a tensor, which ends its graph, unless ``fullgraph=True`` forbids it."""
    if not torch.compiler.is_dynamo_compiling() or is_one_graph():
        return output
    if isinstance(output, (TracedLogits, tuple)):
        return without_traced(output)
    if isinstance(getattr(output, "logits", None), TracedLogits):
        output.logits = output.logits.lazy()
    return output


def _forget_head(model: nn.Module) -> None:
    """Undo :func:`keep_head_lazy`."""
    for module in model.modules():
        for kind in ("forward_pre_hooks", "forward_hooks"):
            hooks = hooks_of(module, kind)
            for number in [n for n, hook in hooks.items() if hook in (_make_lazy_again, _return_tensors)]:
                del hooks[number]


def unpatch_head(model: nn.Module) -> int:
    """Make every patched head what it was; returns how many layers there were."""
    _forget_head(model)
    patched: list[Any] = [module for module in model.modules() if is_patched_head(module)]
    for module in patched:
        _restore_layer(module)
    return len(patched)


def _restore_layer(layer: Any) -> None:
    """Make a lazy layer what it was."""
    del layer.only_when_forced
    restore(layer)
    own_forward = vars(layer).pop("own_forward", None)
    vars(layer).pop("ranks", None)
    if type(layer) is LazyLinear:
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    if own_forward is not None:
        vars(layer).setdefault("forward", own_forward)
