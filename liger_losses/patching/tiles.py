"""Runs a module that computes each token by itself on tiles of the tokens, once more in backward.

Beyond its input and its output, the module then needs memory for one tile, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from liger_losses.kernels._triton import warn_once
from liger_losses.kernels.autograd import autocast_dtype, once_differentiable
from liger_losses.kernels.tracing import outside_graphs
from liger_losses.layers.glu import gradients_only
from liger_losses.patching.probing import call_with

#: Computes a module's output ``[1, tokens, ...]`` from its input ``[1, tokens, H]``.
Compute = Callable[[Any, Tensor], Tensor]

# Tiles of fewer tokens make matrix products, and the sums of the weights' gradients, slower per token; wider ones gain
# no time.
_SMALLEST, _WIDEST_TENSOR = 4096, 2**25


def tile_of(module: nn.Module) -> int:
    """The tokens of a tile: at most 2^25 divided by the width of the widest tensor (64 MiB in half precision)."""
    widths = [width for part in module.modules() if type(width := getattr(part, "out_features", None)) is int]
    return max(_SMALLEST, _WIDEST_TENSOR // max(widths, default=1) // 256 * 256)


def compute_tiled(compute: Compute, module: nn.Module, x: Tensor, tokens: int | None) -> Tensor:
    """``compute(module, x)``, tile by tile; in backward too, which computes each tile again before its gradients.

    The gradients of the weights are summed over the tiles in fp32, or fp64 if they are, and returned to autograd once:
    what waits for a weight's gradient (DDP, FSDP2) sees one.

    Args:
        compute: computes each token's output from that token alone.
        module: has the weights that it uses.
        x: ``[..., H]``.
        tokens: of a tile; 0 for :func:`tile_of`, ``None`` for all of them.

    Returns:
        ``[..., the width of the output]``.
    """
    tokens = tile_of(module) if tokens == 0 else tokens
    if tokens is None or x.numel() <= tokens * x.shape[-1]:
        return compute(module, x)
    return _compute_tiled(compute, module, x, tokens)


@outside_graphs  # torch.compile cannot trace the backward
def _compute_tiled(compute: Compute, module: nn.Module, x: Tensor, tokens: int) -> Tensor:
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    training = torch.is_grad_enabled() and (x.requires_grad or bool(weights))
    reason = _reason_not_to_tile(module) if training else None
    if reason is not None:
        warn_once(f"An MLP is not computed in tiles in training: {reason}.")
        return compute(module, x)
    x = _SavedFirst.apply(x, *weights.values())
    out: Tensor = _Tiled.apply([*weights], x.grad_fn, (compute, module, tokens), x, *weights.values())
    if autocast_dtype(x.device) is not None:
        torch.clear_autocast_cache()  # older torch gives later layers weights that were cast without gradients
    return out


class _SavedFirst(torch.autograd.Function):
    """Saves what backward needs before anything is computed.

    Activation checkpointing recomputes a layer only up to the last tensor that it saved.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, names: list[str], saved_first: Any, call: tuple[Any, ...], x: Tensor, *_: Any) -> Tensor:
        ctx.names, ctx.saved_first, ctx.call = names, saved_first, call
        # For dropout.
        ctx.cast, ctx.random_states = autocast_dtype(x.device), (torch.get_rng_state(), *get_device_states(x))
        (compute, module, tokens), out, places = call, x, x
        for number, tile in enumerate(x.detach().reshape(1, -1, x.shape[-1]).split(tokens, 1)):
            part = compute(module, tile)
            if number == 0:  # its width and dtype are the output's: layers may fail on no tokens
                out = part.new_empty(*x.shape[:-1], part.shape[-1])
                places = out.view(1, -1, part.shape[-1])
            places[:, number * tokens : (number + 1) * tokens] = part
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs_x, (compute, module, tokens) = ctx.saved_first.needs_input_grad[0], ctx.call
        saved, *weights = ctx.saved_first.saved_tensors
        # Without the hooks of the parameters, which autograd calls with what is returned to it.
        leaves = [weight.detach().requires_grad_() for weight in weights]
        named = dict(zip(ctx.names, leaves, strict=True))
        x, grad = (tensor.reshape(1, -1, tensor.shape[-1]) for tensor in (saved, grad))
        grad_x = torch.zeros_like(x) if needs_x else None
        sums: list[Any] = [None] * len(leaves)
        cpu_state, devices, states = ctx.random_states
        kind = "cuda" if x.device.type == "cpu" else x.device.type
        autocast = torch.autocast(x.device.type, ctx.cast, enabled=ctx.cast is not None)
        with torch.enable_grad(), autocast, torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(cpu_state)
            set_device_states(devices, states, device_type=kind)
            for start in range(0, x.shape[1], tokens):
                tile = slice(start, start + tokens)
                part = x[:, tile].detach().requires_grad_(needs_x)
                with gradients_only():
                    # A module may be given no leaf, as it may change its input in place.
                    out = call_with(named, compute, module, part.view_as(part))
                inputs = [*([part] if needs_x else []), *leaves]
                grads = list(torch.autograd.grad(out, inputs, grad[:, tile], allow_unused=True))
                del out
                if grad_x is not None and (of_part := grads.pop(0)) is not None:
                    grad_x[:, tile] = of_part
                for i, of_weight in enumerate(grads):
                    if of_weight is not None:  # the sum over the tiles, in fp32 or wider
                        wide = torch.promote_types(of_weight.dtype, torch.float32)
                        sums[i] = of_weight.to(wide, copy=True) if sums[i] is None else sums[i].add_(of_weight)
        totals = [None if total is None else total.to(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True)]
        return *[None] * 3, None if grad_x is None else grad_x.view(saved.shape), *totals


def _reason_not_to_tile(module: nn.Module) -> str | None:
    """Why a module cannot be computed again in backward, one tile at a time, or ``None``."""
    for path, part in module.named_modules():
        if path and hasattr(part, "set_reshard_after_forward"):
            return f"fully_shard has made its {path} a separate unit; make the whole MLP or its layer a unit instead"
        if any(hasattr(tensor, "ds_id") for tensor in part.parameters(recurse=False)):
            return "ZeRO-3 has partitioned its weights; use FSDP2 (fully_shard), or leave out tile_mlps"
        if any(isinstance(value, Tensor) and value.requires_grad for value in vars(part).values()):
            return "its weights are no parameters while it runs (FSDP1)"
    return None
