"""What heads of other frameworks return, by the engine. H hidden size, V vocabulary size."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from liger_losses.chunked import EngineOptions, Head, Statistics, linear_statistics
from liger_losses.kernels.logit_transform import LogitTransform


def token_statistics(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    names: tuple[str, ...] = ("logp", "entropy"),
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    selected: Tensor | None = None,
) -> Statistics:
    """Per-token statistics, differentiable, without the logits.

    Args:
        hidden_states: ``[..., H]``.
        weight: ``[V, H]``, or this rank's rows of it, any number of them, with ``group``.
        labels: ``[...]``, of the whole vocabulary; tokens labelled -100 get 0.
        names, selected: as ``statistics`` and ``selected`` of :func:`liger_losses.linear_statistics`.
        temperature: what the logits are divided by: a number, or ``[...]``.
        group: the ranks that share the vocabulary. All have the same hidden states and labels, and get the same
            results. Each gets its columns' part of the hidden states' gradient, as from verl's own head: Megatron sums
            them where it gathers the sequence.

    Returns:
        Tensors ``[...]``, fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit together, labels outside the vocabulary.
    """
    group = None if group is None or dist.get_world_size(group) == 1 else group
    shape = hidden_states.shape[:-1]
    several = isinstance(temperature, Tensor) and temperature.numel() != 1
    given = temperature.reshape(shape) if several else float(temperature)  # type: ignore[union-attr]
    head = Head(weight, transform=LogitTransform(given), group=group).with_partial_gradients()
    labels = labels.long().reshape(shape)
    return linear_statistics(hidden_states, head, labels, names, selected=selected, options=EngineOptions())
