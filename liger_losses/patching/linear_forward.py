"""What a linear layer's own forward makes of its products: one that was put on the instance, or its subclass's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_losses.checks import is_weight_and_bias
from liger_losses.chunked import Ranks, local_rows, share_mesh
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.patching.lazy import DeferredLogits, allow_materialization, lazy_linear
from liger_losses.patching.lazy.deferred import linear
from liger_losses.patching.lazy.tensor import deferred_logits
from liger_losses.patching.probing import Mismatch, call_with, check_close, isolated, observe, random, shape_of


class LazyProducts(TorchFunctionMode):
    """Within this context, ``product`` replaces ``F.linear``."""

    def __init__(self, product: Callable[..., Any]) -> None:
        super().__init__()
        self.product = product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.product if func is F.linear else func)(*args, **(kwargs or {}))


def _lazy_result(
    module: Any, forward: Callable[[Any, Tensor], Any], dtype: torch.dtype, weight_dtype: torch.dtype, device: Any
) -> tuple[DeferredLogits, list[Tensor]]:
    """What ``forward(module, hidden states)`` returns where its products are lazy, and the tensors it was given.

    These are small, also the parameters, which it must read at each call. Raises Mismatch if it fails, or returns
    anything but lazy logits.
    """

    def product(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if hasattr(hidden_states, "full_tensor"):
            raise Mismatch("it splits its hidden states over processes")
        return lazy_linear(hidden_states, weight, bias)

    width = shape_of(module.weight)[1]
    hidden_states = torch.zeros(1, 3, width, dtype=dtype, device=device)
    small = {"weight": torch.zeros(5, width, dtype=weight_dtype, device=device)}
    if getattr(module, "bias", None) is not None:
        small["bias"] = torch.zeros(5, dtype=weight_dtype, device=device)
    with allow_materialization(), LazyProducts(product):
        try:
            found = deferred_logits(call_with(small, forward, module, hidden_states))
        except Mismatch:
            raise
        except Exception as error:
            raise Mismatch(f"{type(error).__name__}: {str(error)[:160]}") from error
    if found is None or found.shape != (1, 3, 5):
        raise Mismatch("it does more than to call F.linear with its parameters, and to cast and scale the result")
    return found, [hidden_states, *small.values()]


def check_forward(module: Any) -> None:
    """Raise Mismatch unless the forward on a linear layer's instance returns lazy logits if its products are lazy."""
    if "_hf_hook" in vars(module):
        raise Mismatch("accelerate moves the layer's inputs or weights in it")
    with isolated():
        _lazy_result(module, lambda module, x: vars(module)["forward"](x), torch.float32, torch.float32, "cpu")


def local_parameters(module: Any) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of a linear layer's weight and bias, which are DTensors, differentiable."""
    weight, bias = module.weight, module.bias
    rows = local_rows("weight", weight, weight.device_mesh)
    return rows, None if bias is None else local_rows("bias", bias, weight.device_mesh)


def match_shared(module: Any) -> Ranks:
    """Who shares a linear layer's rows, if its forward returns the logits of all of them; else Mismatch.

    All ranks run it together, on the layer's own parameters.
    """
    try:
        weight, bias = local_parameters(module)
        # Its hidden states are plain tensors.
        ranks = dataclasses.replace(share_mesh(module.weight), mesh=None, sums_hidden=True)
    except (TypeError, ValueError) as error:
        both = module.weight.device_mesh.ndim > 1
        order = "fully_shard was called before patch: apply tensor parallelism, then patch(model), then fully_shard"
        raise Mismatch(order if both else str(error)) from None
    hidden = random((1, 3, weight.shape[1]), torch.Generator().manual_seed(0), weight.dtype).to(weight.device)
    with isolated():
        found, (gradient,) = observe(vars(module)["forward"], [hidden])
        if found.shape != (1, 3, sum(ranks.sizes)):
            raise Mismatch(f"it returns {tuple(found.shape)} and not all logits")
        expected, (other,) = observe(lambda x: linear(x, weight, bias, ranks=ranks), [hidden])
    check_close("its output", found, expected, 2e-2)
    check_close("its gradient", gradient, other, 2e-2)
    return ranks


def transform_of(layer: nn.Module, hidden_states: Tensor) -> LogitTransform:
    """What the forward of a linear layer's class does to the product of its input, weight and bias, or Mismatch.

    Args:
        layer: with a weight and, where it has one, a bias.
        hidden_states: what its forward takes; they are not read.
    """
    if is_weight_and_bias(layer):
        return LogitTransform()
    weight: Any = layer.weight
    found, given = _lazy_result(layer, type(layer).forward, hidden_states.dtype, weight.dtype, hidden_states.device)
    used = [tensor for tensor in found.tensors if tensor is not None]
    if [tensor.data_ptr() for tensor in used] != [tensor.data_ptr() for tensor in given]:
        raise Mismatch("its product is of another input, weight or bias than the layer's")
    return found.head.transform
