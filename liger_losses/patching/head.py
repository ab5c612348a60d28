"""The loss head: the output embedding returns lazy logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from liger_losses.patching.lazy_logits import lazy_linear


class LazyLinear(nn.Linear):
    """``nn.Linear`` whose output is computed when its values are needed; at once in evaluation without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and (self.training or input.requires_grad)):
            return super().forward(input)
        return _lazily(input, self.weight, self.bias)


@torch.compiler.disable
def _lazily(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outside of compiled graphs, which end here: what follows is small."""
    return lazy_linear(hidden_states, weight, bias)


def why_not(module: nn.Module) -> str | None:
    """Why a module cannot become a :class:`LazyLinear`, or ``None``."""
    if type(module) is not nn.Linear:
        return f"{type(module).__module__}.{type(module).__qualname__} is not torch.nn.Linear"
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    if type(module.weight) is not nn.Parameter or not module.weight.is_floating_point():
        return f"its weight is a {type(module.weight).__name__} of {module.weight.dtype}"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    return None


class Change(NamedTuple):
    """What became of one module: its path in the model, and either what it is now or why it was left."""

    path: str
    module: nn.Module
    replaced_by: str | None
    reason: str = ""


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
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if not isinstance(head, nn.Module):
        return [Change("", model, None, "the model has no output embedding (get_output_embeddings() gives none)")]
    names = {id(module): name for name, module in model.named_modules()}
    weight = getattr(head, "weight", None)
    inner = [head] if type(head) in (nn.Linear, LazyLinear) else [m for m in head.modules() if type(m) is nn.Linear]
    wide = [m for m in inner if not isinstance(weight, Tensor) or m.out_features == weight.shape[0]]
    found = []
    for module in wide or [head]:
        path = names.get(id(module), "")
        if type(module) is LazyLinear:
            continue
        reason = why_not(module)
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
