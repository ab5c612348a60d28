"""Weights that DeepSpeed's ZeRO-3 splits among processes, for what needs them after their module's own forward.

DeepSpeed gathers the weights of a module for that module's forward, and again for its backward, which does not come by
where logits are lazy. Its parameters say what they are: ``ds_id``, ``ds_status``, ``all_gather`` and ``partition`` are
theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def kept_whole(tensor: Tensor | None) -> Any:
    """A parameter as it is; or, of ZeRO-3, its values, which stay in memory as long as this tensor does.

    Args:
        tensor: of a module whose forward runs, in which it is whole.
    """
    return _Whole.apply(tensor) if hasattr(tensor, "ds_id") else tensor


class _Whole(torch.autograd.Function):
    """The values as a tensor of their own; DeepSpeed gets its gradient while the parameter is whole, as it expects."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        absent = [p for p in (ctx.parameter,) if p.ds_status.name != "AVAILABLE"]
        if absent:
            absent[0].all_gather(param_list=absent)
            torch.autograd.Variable._execution_engine.queue_callback(partial(_split, absent))
        return gradient


def _split(parameters: Sequence[Any]) -> None:
    """Once backward has ended, unless DeepSpeed has, or a module holds them still: the embedding, if it is the head."""
    there = [p for p in parameters if p.ds_status.name == "AVAILABLE" and not p.ds_active_sub_modules]
    if there:
        there[0].partition(param_list=there, has_been_updated=False)
