"""The engine's autograd functions: a stream of blocks in forward, and in backward what its strategy left to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import Call
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.stream import Stream
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.scale import scale_


def compute_statistics(call: Call, head: Head, hidden: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The statistics and metrics of every token, ``[T]`` each, by any strategy but ``one_pass``."""
    if call.strategy != "statistics":
        return dict(zip(call.outputs, LinearStatistics.apply(call, head.weight, head.bias, *hidden), strict=True))
    with torch.no_grad(), torch.autocast(head.weight.device.type, enabled=False):
        values, _ = Stream(call.open(head.weight, head.bias, hidden)).statistics()
    return {name: call.tokens.scatter(values[name]) for name in call.outputs}


class LinearStatistics(torch.autograd.Function):
    """Statistics in forward; in backward the gradient of any function of them."""

    @staticmethod
    def forward(ctx: Any, call: Call, weight: Tensor, bias: Tensor | None, *hidden: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.block, ctx.unit_gradient = call, None, None
        with torch.autocast(weight.device.type, enabled=False):
            stream = Stream(call.open(weight, bias, hidden))
            if call.strategy == "frozen_head":
                values, ctx.unit_gradient = stream.statistics_and_unit_gradient()
            else:
                values, ctx.block = stream.statistics(keep_block=call.strategy == "resident")
        needed = {name: values[name] for name in ("lse", *call.query.statistics)}
        ctx.saved_names = tuple(needed)
        # The labels are saved for their version alone: they may be the user's own, and must not have changed by then.
        ctx.save_for_backward(weight, bias, *hidden, *needed.values(), call.tokens.labels)
        outputs = [call.tokens.scatter(values[name]) for name in call.outputs]
        # Users may change an output in place; what backward needs must not change with it.
        outputs = [out.clone() if any(out is v for v in values.values()) else out for out in outputs]
        ctx.mark_non_differentiable(*outputs[len(call.query.statistics) :])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        weight, bias, *rest, _ = ctx.saved_tensors
        hidden, saved = rest[: len(call.needs_hidden)], rest[len(call.needs_hidden) :]
        values = dict(zip(ctx.saved_names, saved, strict=True))
        gradients = {
            name: call.tokens.gather_all(g)
            for name, g in zip(call.query.statistics, upstream, strict=False)
            if g is not None
        }
        with torch.autocast(weight.device.type, enabled=False):
            stream = Stream(call.open(weight, bias, hidden))
            if ctx.unit_gradient is not None:
                return None, None, None, *stream.scaled(ctx.unit_gradient, gradients)
            # Gradients overwrite the block, and its memory is wanted back: a second backward computes it again.
            block, ctx.block = ctx.block, None
            return None, *stream.gradients(values, gradients, block)


class LinearTokenLoss(torch.autograd.Function):
    """A separable loss and its gradients in forward; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, call: Call, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with torch.autocast(weight.device.type, enabled=False):
            loss, values, gradients = Stream(call.open(weight, bias, [hidden])).token_loss()
        ctx.call, ctx.gradients = call, gradients
        ctx.save_for_backward(weight, bias, hidden, call.tokens.labels)
        outputs = tuple(call.tokens.scatter(values[name]) for name in call.outputs)
        ctx.mark_non_differentiable(*outputs)
        return loss, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *statistics: None) -> tuple[Any, ...]:
        call: Call = ctx.call
        gradients, ctx.gradients = ctx.gradients, None
        if upstream is None:
            return None, None, None, None
        if gradients is None:
            # The first backward scaled them in place and returned them: a second one computes them again.
            weight, bias, hidden, _ = ctx.saved_tensors
            with torch.autocast(weight.device.type, enabled=False):
                gradients = Stream(call.open(weight, bias, [hidden])).token_loss()[-1]
        return None, *(None if grad is None else scale_(grad, upstream, backend=call.backend) for grad in gradients)
