"""The loss head: the output embedding returns lazy logits."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from liger_losses.patching.lazy import lazy_linear
from liger_losses.patching.report import Entry

_FORCED = ContextVar("force_lazy_head", default=False)


@contextlib.contextmanager
def force_lazy_head() -> Iterator[None]:
    """Within this context, lazy heads return :class:`~liger_losses.patching.lazy.LazyLogits` even under ``no_grad``."""
    token = _FORCED.set(True)
    try:
        yield
    finally:
        _FORCED.reset(token)


class LazyLinear(nn.Linear):
    """``nn.Linear`` that returns lazy logits; for one token per sequence without gradients (generation), ordinary ones.

    Attributes:
        only_when_forced: return lazy logits within :func:`force_lazy_head` and nowhere else, for callers that reduce
            the logits before anybody else sees them.
    """

    only_when_forced = False

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            lazy = self.training or input.requires_grad
        else:
            # A graph, of torch.compile or torch.jit, has no place for them, and fully_shard frees its units' weights.
            recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
            several = not recorded and input.dim() > 1 and input.shape[-2] > 1
            lazy = several and not hasattr(self, "set_reshard_after_forward")
        lazy = _FORCED.get() or (lazy and not self.only_when_forced)
        return _lazy_forward(self, input) if lazy else super().forward(input)


@torch.compiler.disable
def _lazy_forward(layer: Any, hidden_states: Tensor) -> Tensor:
    """The lazy forward, outside of compiled graphs, which end here: what follows is small."""
    if hasattr(layer.weight, "full_tensor"):  # still a DTensor: other processes hold the rest of the logits
        return F.linear(hidden_states, layer.weight, layer.bias)
    if hasattr(layer, "set_reshard_after_forward"):  # a unit of fully_shard; its weights must stay until backward
        layer.set_reshard_after_forward(False, recurse=False)
    # DeepSpeed's parameters have a ds_id.
    weight, bias = (_Gathered.apply(p) if hasattr(p, "ds_id") else p for p in (layer.weight, layer.bias))
    dtypes = [None if t is None else t.dtype for t in (weight, bias)]
    return lazy_linear(hidden_states, weight, bias, gather=partial(_gather_again, weakref.ref(layer), dtypes))


def _gather_again(layer: weakref.ref[nn.Linear], dtypes: list[torch.dtype | None]) -> list[Tensor] | None:
    """Weight and bias of a layer that ``fully_shard`` has sharded since its forward, in all processes at once."""
    tensors: list[Any] = [getattr(layer(), name, None) for name in ("weight", "bias")]
    given = [(tensor, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True) if dtype is not None]
    if not all(hasattr(tensor, "full_tensor") for tensor, _ in given):
        return None
    warnings.warn(
        "lazy logits are read after fully_shard has freed the head's weights, which are gathered again: all processes "
        "must read them. Reading them before loss.backward() gathers nothing.",
        RuntimeWarning,
        stacklevel=2,
    )
    return [tensor.detach().full_tensor().to(dtype) for tensor, dtype in given]


class _Gathered(torch.autograd.Function):
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


def unsupported_reason(module: nn.Module) -> str | None:
    """Why a module cannot become a :class:`LazyLinear`, or ``None``."""
    if not (type(module) is nn.Linear or type(module) is LazyLinear):
        if isinstance(module, nn.Linear) and hasattr(module, "set_reshard_after_forward"):
            return "fully_shard has made it a unit, which has a class of its own: shard it afterwards"
        return f"{type(module).__module__}.{type(module).__qualname__} is not torch.nn.Linear"
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    sharded = hasattr(module.weight, "full_tensor")  # gathered by the time it is used
    if not (sharded or type(module.weight) is nn.Parameter) or not module.weight.is_floating_point():
        return f"its weight is a {type(module.weight).__name__} of {module.weight.dtype}"
    if module._backward_hooks or module._backward_pre_hooks:
        return "it has backward hooks, which a gradient that is taken elsewhere would pass by"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    return None


def _head_layers(model: nn.Module) -> list[nn.Module]:
    """The output embedding; under an adapter, the linear layers inside it that are as wide as the vocabulary."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Linear) or not isinstance(head, nn.Module):
        return [head] if isinstance(head, nn.Module) else []
    weight = getattr(head, "weight", None)
    width = weight.shape[0] if isinstance(weight, Tensor) else None
    inner = [m for m in head.modules() if isinstance(m, nn.Linear) and m.out_features == (width or m.out_features)]
    return [*inner] or [head]


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
        if isinstance(module, LazyLinear) and (only_when_forced or not module.only_when_forced):
            continue
        path = next((name for name, other in model.named_modules() if other is module), "")
        reason = unsupported_reason(module)
        if reason is None and filter_fn is not None and not filter_fn(module, path):
            reason = "filter_fn"
        if reason is None:
            module.__class__ = LazyLinear
            vars(module)["only_when_forced"] = only_when_forced
        name, replaced_by = ("Linear", "LazyLinear") if reason is None else (type(module).__name__, None)
        entries.append(Entry(path, name, replaced_by, reason or ""))
    return entries


def is_patched_head(module: nn.Module) -> bool:
    """Whether a layer is lazy in all of training; one that is lazy only when forced belongs to its trainer."""
    return type(module) is LazyLinear and not module.only_when_forced


def unpatch_head(model: nn.Module) -> int:
    """Make every patched head an ``nn.Linear`` again; returns how many there were."""
    patched = [module for module in model.modules() if is_patched_head(module)]
    for module in patched:
        vars(module).pop("only_when_forced", None)
        module.__class__ = nn.Linear
    return len(patched)
