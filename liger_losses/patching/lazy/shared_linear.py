"""A linear layer whose rows the ranks of a process group share: its logits, and how such a layer is recognized.

V columns of the whole vocabulary, V_r of this rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine.ranks import VocabularyRanks, is_dtensor, local_rows, share_mesh
from liger_losses.patching.probing import Mismatch, isolated, random


def shared_linear(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyRanks) -> Tensor:
    """``F.linear`` of all ranks' rows: logits ``[..., V]``, the same on each rank.

    Args:
        hidden_states: ``[..., H]``, the same on each rank.
        weight, bias: ``[V_r, H]``, ``[V_r]``, this rank's rows.
        shard: which rows these are.
    """
    logits = F.linear(_Replicated.apply(hidden_states, shard), weight, bias)
    return _GatheredColumns.apply(logits, shard)


class _Replicated(torch.autograd.Function):
    """Hidden states that are the same on each rank; their gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, shard: VocabularyRanks) -> Tensor:
        ctx.shard = shard
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.sum_(gradient.clone(memory_format=torch.contiguous_format)), None


class _GatheredColumns(torch.autograd.Function):
    """``[..., V]`` of all ranks' ``[..., V_r]``; each rank has the same gradient of them, of which it takes its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabularyRanks) -> Tensor:
        ctx.shard = shard
        padded = F.pad(logits, (0, max(shard.sizes) - logits.shape[-1]))
        parts = zip(shard.gather(padded), shard.sizes, strict=True)
        return torch.cat([part[..., :size] for part, size in parts], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[..., ctx.shard.columns(ctx.shard.vocab_size())], None


def local_parameters(module: Any) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of a linear layer's weight and bias, which are DTensors, differentiable."""
    weight, bias = module.weight, module.bias
    rows = local_rows("weight", weight, weight.device_mesh)
    return rows, None if bias is None else local_rows("bias", bias, weight.device_mesh)


def match_shared(module: Any) -> VocabularyRanks:
    """Who shares a linear layer's rows, if its forward returns the logits of all of them; else Mismatch.

    All ranks run it together, on the layer's own parameters.
    """
    forward = vars(module)["forward"]
    try:
        weight, bias = local_parameters(module)
        shard = replace(
            share_mesh(module.weight), mesh=None, partial_gradients=False
        )  # its hidden states are plain tensors
    except (TypeError, ValueError) as error:
        both = module.weight.device_mesh.ndim > 1
        order = "fully_shard was called before patch: apply tensor parallelism, then patch(model), then fully_shard"
        reason = order if both else str(error)
        raise Mismatch(reason) from None
    g = torch.Generator().manual_seed(0)
    hidden, upstream = (
        random((1, 3, size), g, weight.dtype).to(weight.device) for size in (weight.shape[1], shard.vocab_size())
    )
    with isolated():
        found: list[Tensor] = []
        expected: list[Tensor] = []
        for results, function in (
            (found, forward),
            (expected, lambda hidden: shared_linear(hidden, weight, bias, shard)),
        ):
            leaf = hidden.clone().requires_grad_()
            try:
                with torch.enable_grad():
                    logits = function(leaf)
            except Exception as error:
                reason = f"it fails on hidden states {list(leaf.shape)} ({type(error).__name__}: {str(error)[:160]})"
                raise Mismatch(reason) from error
            if is_dtensor(logits) or logits.shape != upstream.shape:
                raise Mismatch(f"it returns {type(logits).__name__} {tuple(logits.shape)} and not all logits")
            results += [logits.detach(), *torch.autograd.grad(logits, [leaf], upstream)]
    for a, b in zip(found, expected, strict=True):
        if not torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-2 * float(b.abs().max())):
            raise Mismatch("it computes something else than all ranks' rows times the hidden states")
    return shard
