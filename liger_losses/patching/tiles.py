"""Runs a module that computes each token by itself on tiles of the tokens, once more in backward.

Beyond its input and its output, the module then needs memory for one tile, in forward and in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from liger_losses.kernels._triton import warn_once
from liger_losses.kernels.autograd import (
    autocast_dtype,
    graph_is_kept,
    is_unshared,
    once_differentiable,
    saves_privately,
)

#: Computes a module's output ``[1, tokens, ...]`` from its input ``[1, tokens, H]``.
Compute = Callable[[Any, Tensor], Tensor]

# Tiles of fewer tokens make matrix products, and the sums of the weights' gradients, slower per token; wider ones gain
# no time.
_SMALLEST, _WIDEST_TENSOR = 4096, 2**25
_SECOND_BACKWARD = (
    "Trying to backward through the graph a second time, after the gradient of the input of an MLP that is computed in "
    "tiles was written over it. Specify retain_graph=True in the first backward if you need to backward through the "
    "graph again."
)


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
    count = x.numel() // max(x.shape[-1], 1)
    if count <= step:
        return compute(module, x)
    return _compute_tiled(compute, module, x, step, gradients_only or contextlib.nullcontext)


@torch.compiler.disable  # a graph ends here: torch.compile cannot trace the backward
def _compute_tiled(
    compute: Compute, module: nn.Module, x: Tensor, step: int, gradients_only: Callable[[], Any]
) -> Tensor:
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or weights):
        return _forward(compute, module, x, step)
    reason = _reason_not_to_tile(module)
    if reason is not None:
        warn_once(f"An MLP is not computed in tiles in training: {reason}.")
        return compute(module, x)
    x = _SavedFirst.apply(x)
    out: Tensor = _Tiled.apply(_Call(compute, module, step, weights, gradients_only), x.grad_fn, x, *weights)
    return out


@dataclass(frozen=True, eq=False)
class _Call:
    compute: Compute
    module: nn.Module
    step: int
    weights: list[nn.Parameter]
    gradients_only: Callable[[], Any]


class _SavedFirst(torch.autograd.Function):
    """Saves the input before anything is computed: activation checkpointing recomputes up to what was saved last.

    It is saved as a tensor of its own, so that backward sees whether anything else refers to its memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.may_be_overwritten = saves_privately() and not x.is_leaf
        ctx.save_for_backward(x.detach())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, saved_first: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.call, ctx.saved_first, ctx.overwritten = call, saved_first, False
        if saved_first is None:  # the input needs no gradient
            ctx.save_for_backward(x)
        ctx.versions = [weight._version for weight in weights]
        ctx.cast = autocast_dtype(x.device)
        before = _random_states(x)
        out = _forward(call.compute, call.module, x, call.step)
        after = _random_states(x)
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        ctx.random_states = None if same else before
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        call, needs_x = ctx.call, ctx.needs_input_grad[2]
        _check_weights(call, ctx.versions)
        if ctx.overwritten:
            raise RuntimeError(_SECOND_BACKWARD)
        (saved,) = (ctx.saved_first or ctx).saved_tensors
        ctx.overwritten = needs_x and ctx.saved_first.may_be_overwritten and not graph_is_kept() and is_unshared(saved)
        x, grad = (tensor.reshape(1, -1, tensor.shape[-1]) for tensor in (saved, grad))
        grad_x = None if not needs_x else x if ctx.overwritten else torch.empty_like(x)
        sums: list[Tensor | None] = [None] * len(call.weights)
        with torch.enable_grad(), _autocast(x, ctx.cast), _random(x, ctx.random_states), _unhooked(call.weights):
            for start in range(0, x.shape[1], call.step):
                tile = slice(start, start + call.step)
                part = x[:, tile].detach().requires_grad_(needs_x)
                with call.gradients_only():
                    out = call.compute(call.module, part.view_as(part))  # a module may be given no leaf
                inputs = [*([part] if needs_x else []), *call.weights]
                found = list(torch.autograd.grad(out, inputs, grad[:, tile], allow_unused=True))
                del out
                if grad_x is not None:
                    of_part = found.pop(0)
                    grad_x[:, tile] = 0.0 if of_part is None else of_part
                _add(sums, found)
        grads = [
            None if total is None else total.to(weight.dtype) for total, weight in zip(sums, call.weights, strict=True)
        ]
        return None, None, None if grad_x is None else grad_x.view(saved.shape), *grads


def _forward(compute: Compute, module: nn.Module, x: Tensor, step: int) -> Tensor:
    """The output, of which each tile is written to its place."""
    rows = x.detach().reshape(1, -1, x.shape[-1])
    first = compute(module, rows[:, :step])
    out = first.new_empty(*x.shape[:-1], first.shape[-1])
    places = out.view(1, -1, first.shape[-1])
    places[:, :step] = first
    del first
    for start in range(step, rows.shape[1], step):
        places[:, start : start + step] = compute(module, rows[:, start : start + step])
    if autocast_dtype(x.device) is not None:
        torch.clear_autocast_cache()  # older torch gives later layers weights that were cast without gradients
    return out


def _reason_not_to_tile(module: nn.Module) -> str | None:
    """Why a module cannot be computed again in backward, one tile at a time, or ``None``."""
    for path, part in module.named_modules():
        if path and hasattr(part, "set_requires_gradient_sync"):
            return f"fully_shard has made its {path} a unit of its own; make the whole MLP or its layer a unit instead"
        tensors = [*part._parameters.values(), *(value for value in vars(part).values() if isinstance(value, Tensor))]
        for tensor in tensors:
            if hasattr(tensor, "ds_id"):
                return "ZeRO-3 has partitioned its weights; use FSDP2 (fully_shard), or leave out tile_mlps"
            if tensor is not None and tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                return "its weights are no parameters while it runs (FSDP1, or torch.func.functional_call)"
    return None


def _check_weights(call: _Call, versions: Sequence[int]) -> None:
    """Raise RuntimeError unless the weights are those of the forward."""
    weights = [weight for weight in call.module.parameters() if weight.requires_grad]
    same = len(weights) == len(call.weights) and all(a is b for a, b in zip(weights, call.weights, strict=True))
    if not same or [weight._version for weight in weights] != list(versions):
        raise RuntimeError(
            "The weights of an MLP that is computed in tiles were replaced, frozen or modified in place after the "
            "forward, and backward computes it again. Call backward before that (before optimizer.step(), for example)."
        )


@contextlib.contextmanager
def _unhooked(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Without the weights' tensor hooks, which autograd calls with what is returned to it."""
    hooked = [(weight, hooks) for weight in weights if (hooks := weight._backward_hooks)]
    try:
        for weight, _ in hooked:
            weight._backward_hooks = None
        yield
    finally:
        for weight, hooks in hooked:
            weight._backward_hooks = hooks


def _add(sums: list[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Add the gradients of a tile to the sums."""
    for i, grad in enumerate(found):
        if grad is not None:
            total = sums[i]
            wide = torch.promote_types(grad.dtype, torch.float32)
            sums[i] = grad.to(wide, copy=True) if total is None else total.add_(grad)


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
    """The random states of the forward, if it drew numbers, for dropout; and those of before afterwards."""
    if states is None:
        yield
        return
    devices, _ = get_device_states(x)
    kind = "cuda" if x.device.type == "cpu" else x.device.type
    with torch.random.fork_rng(devices, device_type=kind):
        torch.set_rng_state(states[0])
        set_device_states(devices, states[1:], device_type=kind)
        yield
