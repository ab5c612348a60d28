"""Per-token statistics of logits that exist already, a differentiable operation. V vocabulary size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import check_temperature, check_tensor, checked_temperatures
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics

#: Entries of logits that are cast to fp32 at once.
_BLOCK = 2**26


def logit_statistics(
    logits: Tensor,
    labels: Tensor,
    statistics: tuple[str, ...] = ("logp",),
    *,
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),
) -> dict[str, Tensor]:
    """Per-token statistics of the softmax of given logits, differentiable (once), from fp32 sums.

    Args:
        logits: ``[..., V]``, floating point.
        labels: ``[...]`` int64; tokens whose label is ``ignore_index`` get 0.
        statistics: names from :data:`liger_losses.kernels.softmax_stats.STATISTICS`; ``argmax`` has no gradient.
        class_weight: ``[V]``, the weights in ``mean_logp``.
        transform: scale, soft-cap and temperature (a number, or ``[...]``) that are still to be applied.

    Returns:
        One tensor ``[...]`` per name, fp32 (fp64 for fp64 logits; ``argmax``: int64).

    Raises:
        TypeError, ValueError: no tensors; shapes that do not fit together; labels outside the vocabulary.
    """
    check_tensor("logits", logits)
    check_tensor("labels", labels)
    if logits.dim() < 1 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels must have one entry per row of logits: got {tuple(labels.shape)} for {tuple(logits.shape)}."
        )
    active = labels != ignore_index
    flat = labels.masked_fill(~active, 0).reshape(-1)
    low, high = torch.stack(flat.aminmax()).tolist() if flat.numel() else (0, -1)
    if not 0 <= low <= high + 1 <= logits.shape[-1]:
        raise ValueError(
            f"labels must be in [0, {logits.shape[-1]}) or ignore_index={ignore_index}: got {low} to {high}."
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(transform.temperature, Tensor):
        check_temperature(transform.temperature, logits.device, [labels.shape])
        own = transform.temperature.to(wide).where(active, 1.0).reshape(-1)
        transform = replace(transform, temperature=checked_temperatures(own))
    epilogue = Epilogue(transform, None, None if class_weight is None else class_weight.to(wide))
    values = _Statistics.apply(logits.reshape(-1, logits.shape[-1]), flat, statistics, epilogue)
    return {
        name: torch.where(active, value.view(labels.shape), 0) for name, value in zip(statistics, values, strict=True)
    }


class _Statistics(torch.autograd.Function):
    """Statistics of rows, block by block; backward computes the blocks' gradients from the logits, which are saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, names: tuple[str, ...], epilogue: Epilogue) -> Any:
        wanted = frozenset(names)
        parts = [
            softmax_statistics(_wide(logits[rows]), labels[rows], wanted, epilogue.rows(rows))
            for rows in _blocks(logits)
        ]
        values = {name: torch.cat([part[name] for part in parts]) for name in {*names, "lse"}}
        ctx.names, ctx.stored, ctx.epilogue = names, tuple(values), epilogue
        ctx.save_for_backward(logits, labels, *values.values())
        ctx.mark_non_differentiable(*[values[name] for name in names if name == "argmax"])
        ctx.set_materialize_grads(False)
        return tuple(values[name] for name in names)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        logits, labels, *stored = ctx.saved_tensors
        values = dict(zip(ctx.stored, stored, strict=True))
        upstream = {name: g for name, g in zip(ctx.names, gradients, strict=True) if g is not None and name != "argmax"}
        coefficients = SoftmaxGradient.of(upstream, values, ctx.epilogue.class_weight)
        grad = torch.empty_like(logits)
        for rows in _blocks(logits):
            part = coefficients.rows(rows.start, rows.stop)
            softmax_gradient_into(
                grad[rows], _wide(logits[rows]), values["lse"][rows], labels[rows], part, ctx.epilogue.rows(rows)
            )
        return grad, None, None, None


def _blocks(logits: Tensor) -> list[slice]:
    size = max(1, _BLOCK // max(1, logits.shape[1]))
    return [slice(start, min(start + size, len(logits))) for start in range(0, max(len(logits), 1), size)]


def _wide(block: Tensor) -> Tensor:
    """A block as the kernels take it: fp32 (or fp64), with contiguous rows; the block itself where it is."""
    return block.to(torch.promote_types(block.dtype, torch.float32)).contiguous()
