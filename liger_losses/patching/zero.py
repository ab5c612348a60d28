"""Weights partitioned by DeepSpeed's ZeRO-3, for code that uses them after their module's forward has returned.

DeepSpeed gathers a module's weights for that module's forward and again for its backward, but lazy logits use them in
between, and no backward of the module runs. DeepSpeed marks its parameters with ``ds_id`` and ``ds_status`` and gives
them the methods ``all_gather`` and ``partition``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def gathered(parameter: Tensor | None) -> Any:
    """A parameter's values that stay in memory as long as the returned tensor does.

    Args:
        parameter: of a module whose forward is running, so that it is gathered now. One that ZeRO-3 does not manage
            is returned as it is.
    """
    return _Gathered.apply(parameter) if hasattr(parameter, "ds_id") else parameter


class _Gathered(torch.autograd.Function):
    """The values as a tensor of their own. Backward gathers the parameter again: DeepSpeed's hooks expect it whole."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        absent = [p for p in (ctx.parameter,) if p.ds_status.name != "AVAILABLE"]
        if absent:
            absent[0].all_gather(param_list=absent)
            torch.autograd.Variable._execution_engine.queue_callback(partial(_repartition, absent))
        return gradient


def _repartition(parameters: Sequence[Any]) -> None:
    """Partition again after backward, except what DeepSpeed partitioned itself or a submodule (tied weights) uses."""
    whole = [p for p in parameters if p.ds_status.name == "AVAILABLE" and not p.ds_active_sub_modules]
    if whole:
        whole[0].partition(param_list=whole, has_been_updated=False)
