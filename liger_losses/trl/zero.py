"""Weights that DeepSpeed's ZeRO-3 has split among processes: whole while the head is computed, and in its backward.

DeepSpeed gathers the weights of a module for that module's own forward and backward; what is lazy comes after. Its
parameters say what they are: ``ds_id``, ``ds_status``, ``all_gather`` and ``partition`` are theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def gathered(tensors: Sequence[Tensor | None]) -> Iterator[list[Any]]:
    """Those of some tensors that ZeRO-3 has split, whole in this block; all processes must come by."""
    parameters: list[Any] = [t for t in tensors if hasattr(t, "ds_id")]
    absent = _gather(parameters)
    try:
        yield parameters
    finally:
        _partition(absent)


def gather_for_backward(parameters: Sequence[Any], outputs: Sequence[Tensor | None]) -> None:
    """Have the parameters whole from when the gradient of an output arrives until the end of that backward."""
    for output in outputs if parameters else ():
        if output is not None and output.requires_grad:
            output.register_hook(partial(_gather_until_the_end, parameters))


def _gather_until_the_end(parameters: Sequence[Any], gradient: Tensor) -> None:
    absent = _gather(parameters)
    if absent:  # the first of the outputs
        torch.autograd.Variable._execution_engine.queue_callback(partial(_partition, absent))


def _gather(parameters: Sequence[Any]) -> list[Any]:
    absent = [p for p in parameters if p.ds_status.name != "AVAILABLE"]
    if absent:
        absent[0].all_gather(param_list=absent)
    return absent


def _partition(parameters: Sequence[Any]) -> None:
    # Some DeepSpeed has split by itself, and some a module of its own still holds: the embedding, if it is the head.
    there = [p for p in parameters if p.ds_status.name == "AVAILABLE" and not p.ds_active_sub_modules]
    if there:
        there[0].partition(param_list=there, has_been_updated=False)
