"""Tells ordinary tensors and unmodified linear layers, which kernels may read and replace, from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_LINEAR_FORWARD = nn.Linear.forward
#: Whether all modules have a hook; torch has no public name for it.
_has_global_hook: Callable[[], bool] = getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: False)


#: Where modules keep their hooks. One that torch does not have counts as a hook.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: Tensors that kernels can read, and no subclasses of them.
PLAIN = frozenset((Tensor, nn.Parameter))


def is_plain(*tensors: Any) -> bool:
    """Whether all are tensors or parameters that kernels can read, and not DTensors or other subclasses."""
    return PLAIN.issuperset(map(type, tensors))


def plain_linear(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of an ``nn.Linear`` that is no subclass, has no hooks, and was not compiled or patched; else
    ``None``."""
    if type(module) is not nn.Linear or is_watched(module) or _has_global_hook():
        return None
    weight, bias = module.weight, module.bias
    ordinary = is_plain(weight) and (bias is None or is_plain(bias)) and nn.Linear.forward is _LINEAR_FORWARD
    return (weight, bias) if ordinary else None


def is_watched(module: nn.Module) -> bool:
    """Whether a call of a module runs more than the forward of its class: hooks, or what was put on the instance."""
    hooks = [getattr(module, name, True) for name in HOOKS]
    return any(hooks) or "forward" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None
