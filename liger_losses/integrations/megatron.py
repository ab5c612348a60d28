"""Losses in the place of the output layer of Megatron-core's ``GPTModel`` (0.18 and newer: ``output_processor=``).

Sequence and tensor parallelism are the model's own. S tokens, B sequences, H hidden size; labels are ``[B, S]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.chunked import EngineOptions, Head, linear_statistics
from liger_losses.integrations.replacements import announce
from liger_losses.kernels.logit_transform import LogitTransform

IGNORE_INDEX = -100


@dataclass(frozen=True)
class OutputOptions:
    """Options of :func:`output_processor`, for ``output_processor_context=``.

    Args:
        temperature: divides the logits: a number, or ``[B, S]``.
        entropy: return log-probabilities and entropies instead of the loss.
        ignore_index: the label of masked tokens.
    """

    temperature: float | Tensor = 1.0
    entropy: bool = False
    ignore_index: int = IGNORE_INDEX


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor | None,
    loss_mask: Tensor | None = None,
    context: OutputOptions | None = None,
    scale_logits: Any = None,
    config: Any = None,
    **_others: Any,
) -> Any:
    """Each token's loss, as ``GPTModel`` returns it for labels, without the logits.

    Pass it to the model's forward: ``model(..., labels=labels, output_processor=output_processor)``.

    Args:
        hidden_states: ``[S, B, H]``, or this rank's part of S with sequence parallelism.
        output_layer, output_weight: the model's; the weight is set for tied embeddings.
        labels: ``[B, S]`` int64.
        loss_mask: ``[B, S]``; tokens where it is 0 have loss 0 and cost nothing.
        context: an :class:`OutputOptions`.
        scale_logits: the model's scale of its logits (MuP).
        config: the model's, which says whether its output layer multiplies in MXFP8.

    Returns:
        The losses ``[B, S]``, fp32; with ``OutputOptions(entropy=True)`` the log-probabilities and the entropies, both
        ``[B, S]`` and differentiable.

    Raises:
        ValueError: without labels there is no loss; leave ``output_processor=`` out to get logits.
        TypeError: an output layer with layers inside of it, such as adapters, or that multiplies in MXFP8.
    """
    announce("Megatron-core", "0.19", "the losses of output layers")
    if labels is None:
        raise ValueError("output_processor computes losses of labels: give labels=, or leave output_processor= out.")
    if getattr(config, "fp8_output_proj", False):
        raise TypeError(
            "the output layer multiplies in MXFP8 (fp8_output_proj=True), but output_processor would multiply in the "
            "weight's dtype: set fp8_output_proj=False, or leave output_processor= out."
        )
    options = context or OutputOptions()
    if loss_mask is not None and loss_mask.shape == labels.shape:
        labels = labels.masked_fill(loss_mask == 0, options.ignore_index)
    temperature = options.temperature.t() if isinstance(options.temperature, Tensor) else options.temperature
    head = _head(output_layer, output_weight, temperature, scale_logits)
    if getattr(output_layer, "sequence_parallel", False):
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        # Backward of the gather sums the ranks' parts of the gradient.
        hidden_states, head = gather_from_sequence_parallel_region(hidden_states), head.with_partial_gradients()
    names = ("logp", "entropy") if options.entropy else ("logp",)
    engine = EngineOptions(options.ignore_index)
    found = linear_statistics(hidden_states, head, labels.t().contiguous(), names, options=engine)
    logps = found.logp.t().contiguous()
    return (logps, found.entropy.t().contiguous()) if options.entropy else -logps


def _head(layer: Any, weight: Tensor | None, temperature: float | Tensor, scale_logits: Any) -> Head:
    scale = 1.0 if scale_logits is None else float(scale_logits(torch.ones((), dtype=torch.float32, device="cpu")))
    inside = [name for name, _ in layer.named_children()] if isinstance(layer, nn.Module) else []
    if inside:
        raise TypeError(
            f"the output layer is a {type(layer).__name__} that contains other layers ({', '.join(inside)}), which its "
            "weight alone leaves out; merge adapters into the weight, or leave output_processor= out."
        )
    weight = layer.weight if weight is None else weight
    # With skip_bias_add, it returns the bias beside the logits, and the model drops it.
    bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
    return Head(weight, bias, LogitTransform(temperature, scale), layer.tp_group if layer.tp_group.size() > 1 else None)
