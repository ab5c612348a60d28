"""Runs a module that computes each token by itself on tiles of the tokens, once more in backward.

Beyond its input and its output, the module then needs memory for one tile, in forward and in backward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from liger_losses.kernels._triton import warn_once
from liger_losses.kernels.autograd import autocast_dtype, once_differentiable
from liger_losses.kernels.tracing import outside_graphs
from liger_losses.patching.probing import call_with

#: Computes a module's output ``[1, tokens, ...]`` from its input ``[1, tokens, H]``.
Compute = Callable[[Any, Tensor], Tensor]

# Tiles of fewer tokens make matrix products, and the sums of the weights' gradients, slower per token; wider ones gain
# no time.
_SMALLEST, _WIDEST_TENSOR = 4096, 2**25


@dataclass(frozen=True)
class Tiles:
    """The tokens of a tile.

    Attributes:
        tokens: how many; by default at most 2^25 divided by the width of a tile's widest tensor (64 MiB in half
            precision), a multiple of 256 and at least 4096.
    """

    tokens: int | None = None

    def __str__(self) -> str:
        return "tiles" if self.tokens is None else f"tiles of {self.tokens} tokens"

    def size(self, module: nn.Module) -> int:
        """The tokens of a tile."""
        if self.tokens is not None:
            return self.tokens
        widths = [width for part in module.modules() if type(width := getattr(part, "out_features", None)) is int]
        return max(_SMALLEST, _WIDEST_TENSOR // max(widths, default=1) // 256 * 256)


def tiles_of(option: bool | int | None) -> Tiles | None:
    """What ``tile_mlps`` of :func:`~liger_losses.patching.patch.patch` asks for.

    Raises:
        ValueError: it is neither a bool, ``None``, nor a positive number.
    """
    if option is None or isinstance(option, bool):
        return Tiles() if option else None
    if not isinstance(option, int) or option < 1:
        raise ValueError(f"tile_mlps must be True, False or a positive number of tokens, got {option!r}.")
    return Tiles(option)


def compute_tiled(
    compute: Compute, module: nn.Module, x: Tensor, tiles: Tiles, gradients_only: Callable[[], Any] | None = None
) -> Tensor:
    """``compute(module, x)``, tile by tile; in backward too, which computes each tile again before its gradients.

    The gradients of the weights are summed over the tiles in fp32, or fp64 if they are, and returned to autograd once:
    what waits for a weight's gradient (DDP, FSDP2) sees one.

    Args:
        compute: computes each token's output from that token alone.
        module: has the weights that it uses.
        x: ``[..., H]``.
        tiles: how many tokens a tile has.
        gradients_only: a context in which the output that ``compute`` returns need not be right, only its gradients.

    Returns:
        ``[..., the width of the output]``.
    """
    step = tiles.size(module)
    if x.numel() // max(x.shape[-1], 1) <= step:
        return compute(module, x)
    return _compute_tiled(_Tiling(compute, module, step, gradients_only or contextlib.nullcontext), x)


def _compute_tiled(tiling: _Tiling, x: Tensor) -> Tensor:
    weights = tiling.weights()
    if not torch.is_grad_enabled() or not (x.requires_grad or weights):
        return tiling.forward(x)
    reason = _reason_not_to_tile(tiling.module)
    if reason is not None:
        warn_once(f"An MLP is not computed in tiles in training: {reason}.")
        return tiling.compute(tiling.module, x)
    x = _SavedFirst.apply(x, *weights.values())
    out: Tensor = _Tiled.apply(tiling, x.grad_fn, x, *weights.values())
    return out


outside_graphs(sys.modules[__name__], "_compute_tiled")  # torch.compile cannot trace the backward


@dataclass(frozen=True, eq=False)
class _Tiling:
    """How a module is computed; ``step`` is the number of tokens at a time."""

    compute: Compute
    module: nn.Module
    step: int
    gradients_only: Callable[[], Any]

    def weights(self) -> dict[str, Tensor]:
        """What needs a gradient beside the input."""
        return {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}

    def forward(self, x: Tensor) -> Tensor:
        """The output, of which each tile is written to its place."""
        rows = x.detach().reshape(1, -1, x.shape[-1])
        first = self.compute(self.module, rows[:, : self.step])
        out = first.new_empty(*x.shape[:-1], first.shape[-1])
        places = out.view(1, -1, first.shape[-1])
        places[:, : self.step] = first
        del first
        for start in range(self.step, rows.shape[1], self.step):
            tile = slice(start, start + self.step)
            places[:, tile] = self.compute(self.module, rows[:, tile])
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
    def forward(ctx: Any, tiling: _Tiling, saved_first: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.tiling, ctx.saved_first, ctx.names = tiling, saved_first, list(tiling.weights())
        ctx.cast = autocast_dtype(x.device)
        before = _random_states(x)
        out = tiling.forward(x)
        same = all(torch.equal(a, b) for a, b in zip(before, _random_states(x), strict=True))
        ctx.random_states = None if same else before
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        tiling, needs_x = ctx.tiling, ctx.saved_first.needs_input_grad[0]
        saved, *weights = ctx.saved_first.saved_tensors
        # Without the hooks of the parameters, which autograd calls with what is returned to it.
        leaves = [weight.detach().requires_grad_() for weight in weights]
        x, grad = (tensor.reshape(1, -1, tensor.shape[-1]) for tensor in (saved, grad))
        grad_x = torch.zeros_like(x) if needs_x else None
        sums: list[Tensor | None] = [None] * len(leaves)
        named = dict(zip(ctx.names, leaves, strict=True))
        with torch.enable_grad(), _autocast(x, ctx.cast), _random(x, ctx.random_states):
            for start in range(0, x.shape[1], tiling.step):
                tile = slice(start, start + tiling.step)
                part = x[:, tile].detach().requires_grad_(needs_x)
                with tiling.gradients_only():
                    # A module may be given no leaf, as it may change its input in place.
                    out = call_with(named, tiling.compute, tiling.module, part.view_as(part))
                inputs = [*([part] if needs_x else []), *leaves]
                found = list(torch.autograd.grad(out, inputs, grad[:, tile], allow_unused=True))
                del out
                if grad_x is not None and (of_part := found.pop(0)) is not None:
                    grad_x[:, tile] = of_part
                for i, of_weight in enumerate(found):
                    sums[i] = _sum(sums[i], of_weight)
        grads = [None if total is None else total.to(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True)]
        return None, None, None if grad_x is None else grad_x.view(saved.shape), *grads


def _sum(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The sum over the tiles, in fp32 or wider."""
    if grad is None:
        return total
    return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True) if total is None else total.add_(grad)


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


@contextlib.contextmanager
def _autocast(x: Tensor, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast as it was in the forward; weights are cast once for all tiles."""
    if not torch.amp.is_autocast_available(x.device.type):
        yield
        return
    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
        torch.clear_autocast_cache()
        yield
        torch.clear_autocast_cache()


def _random_states(x: Tensor) -> list[Tensor]:
    """The states of the random number generators of the CPU and of the tensor's device."""
    return [torch.get_rng_state(), *get_device_states(x)[1]]


@contextlib.contextmanager
def _random(x: Tensor, states: list[Tensor] | None) -> Iterator[None]:
    """The random states of the forward, if it drew numbers, for dropout; the present states are restored afterwards."""
    if states is None:
        yield
        return
    devices, _ = get_device_states(x)
    kind = "cuda" if x.device.type == "cpu" else x.device.type
    with torch.random.fork_rng(devices, device_type=kind):
        torch.set_rng_state(states[0])
        set_device_states(devices, states[1:], device_type=kind)
        yield
