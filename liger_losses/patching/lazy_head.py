"""The loss head: the output embedding returns lazy logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from liger_losses.patching.lazy import lazy_linear
from liger_losses.patching.zero import kept_whole

_LAZILY = ContextVar("lazily", default=False)


@contextlib.contextmanager
def force_lazy_head() -> Iterator[None]:
    """Heads are lazy in this block, with or without gradients."""
    token = _LAZILY.set(True)
    try:
        yield
    finally:
        _LAZILY.reset(token)


class ReducedLinear(nn.Linear):
    """``nn.Linear`` whose output is lazy under :func:`lazily`, by those who reduce it before it is seen."""

    def forward(self, input: Tensor) -> Tensor:
        return _lazily(self, input) if _LAZILY.get() else super().forward(input)


class LazyLinear(nn.Linear):
    """``nn.Linear`` whose output is computed when its values are needed; at once in evaluation without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        if not (_LAZILY.get() or (torch.is_grad_enabled() and (self.training or input.requires_grad))):
            return super().forward(input)
        return _lazily(self, input)


@torch.compiler.disable
def _lazily(layer: nn.Linear, hidden_states: Tensor) -> Tensor:
    """Outside of compiled graphs, which end here: what follows is small."""
    if hasattr(layer.weight, "full_tensor"):  # not gathered by now: other processes have parts of the logits
        return F.linear(hidden_states, layer.weight, layer.bias)
    keep_gathered(layer)
    return lazy_linear(hidden_states, kept_whole(layer.weight), kept_whole(layer.bias))


def keep_gathered(module: nn.Module) -> None:
    """Of ``fully_shard``: a unit whose weights are used after its own forward keeps them until its backward."""
    keep: Any = getattr(module, "set_reshard_after_forward", None)
    if keep is not None:
        keep(False, recurse=False)


def unsupported_reason(module: nn.Module) -> str | None:
    """Why a module cannot become a :class:`LazyLinear`, or ``None``."""
    if not (type(module) is nn.Linear or type(module) is ReducedLinear):
        if isinstance(module, nn.Linear) and getattr(module, "set_reshard_after_forward", None) is not None:
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


class Change(NamedTuple):
    """What became of one module: its path in the model, and either what it is now or why it was left."""

    path: str
    module: nn.Module
    replaced_by: str | None
    reason: str = ""


def head_layers(model: nn.Module) -> list[nn.Module]:
    """The output embedding; under an adapter, the linear layers in it that are as wide as the vocabulary."""
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if not isinstance(head, nn.Module):
        return []
    if isinstance(head, nn.Linear):
        return [head]
    weight = getattr(head, "weight", None)
    width = weight.shape[0] if isinstance(weight, Tensor) else None
    inner = [m for m in head.modules() if isinstance(m, nn.Linear) and m.out_features == (width or m.out_features)]
    return [*inner] or [head]


def patch_head(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> list[Change]:
    """Make the output embedding return lazy logits.

    Under an adapter (PEFT's ``lora.Linear``, say), these are the linear layers as wide as the vocabulary in it: their
    sum is a product of its own.

    Args:
        model: with ``get_output_embeddings``, as transformers' models have it.
        filter_fn: ``(module, path) -> bool``; what it refuses is left.

    Returns:
        What was done, or why nothing was.
    """
    layers = head_layers(model)
    if not layers:
        return [Change("", model, None, "the model has no output embedding (get_output_embeddings() gives none)")]
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for module in layers:
        path = names.get(id(module), "")
        if type(module) is LazyLinear:
            continue
        reason = unsupported_reason(module)
        if reason is None and filter_fn is not None and not filter_fn(module, path):
            reason = "filter_fn"
        if reason is None:
            module.__class__ = LazyLinear
        found.append(Change(path, module, None if reason else "LazyLinear", reason or ""))
    return found


def unpatch_head(model: nn.Module) -> int:
    """Make every lazy head an ``nn.Linear`` again; how many there were."""
    lazy = [module for module in model.modules() if type(module) is LazyLinear]
    for module in lazy:
        module.__class__ = nn.Linear  # type: ignore[assignment]
    return len(lazy)
