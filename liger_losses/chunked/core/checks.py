"""What is wrong with a call, said before any work: what was given, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from liger_losses.chunked.core.agreement import agree, checksum
from liger_losses.chunked.core.workspace import default_bound
from liger_losses.kernels.autograd import NO_TRANSFORMS, within_transform
from liger_losses.kernels.logit_transform import said

if TYPE_CHECKING:
    from liger_losses.chunked.core.options import EngineOptions
    from liger_losses.chunked.core.statistics import Statistic
    from liger_losses.chunked.core.target import Target

NO_TANGENTS = (
    "forward-mode differentiation (torch.autograd.forward_ad, torch.func.jvp) is not supported here; "
    "torch.autograd.grad gives the same first derivatives."
)


def check_call(targets: Sequence[Target]) -> None:
    """Raise RuntimeError within a transform of ``torch.func`` or forward mode, ValueError for no target."""
    if within_transform():
        raise RuntimeError(NO_TRANSFORMS)
    if not targets:
        raise ValueError("got no target; give at least one.")
    if getattr(forward_ad, "_current_level", -1) >= 0:  # torch has no public name for it, and raises an error too
        for target in targets:
            tensors = [target.hidden, target.head.bias, *[tensor for tensor, _ in target.head.weights.trained]]
            if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
                raise RuntimeError(NO_TANGENTS)


def agree_on_call(
    targets: Sequence[Target], asked: Sequence[Statistic], options: EngineOptions, sums_losses: bool
) -> None:
    """Raise RankError on all ranks that share a vocabulary unless they are about to make the same call."""
    for target in targets:
        if target.head.ranks.group is not None:
            facts = common_facts(target, asked, options) | {"a loss per token": sums_losses}
            read = {"labels": target.labels, "kept columns": target.kept}
            sums = {f"checksum of {name}": partial(_checksum, t) for name, t in read.items() if t is not None}
            agree(target.head.ranks.group, facts, sums)


def _checksum(values: Tensor) -> int:
    return int(checksum(values))


def common_facts(target: Target, asked: Sequence[Statistic], options: EngineOptions) -> dict[str, Any]:
    """What all ranks that share a vocabulary must have in common."""
    head, hidden, records = target.head, target.hidden, torch.is_grad_enabled()
    needs = [str(tuple(leaf.tensor.shape[1:])) for leaf in target.leaves()] if records else []
    facts = {
        "labels' shapes": tuple(target.labels.shape),
        "hidden states": f"{hidden.shape[-1]} in {hidden.dtype}",
        "statistics": [s.name for s in asked],
        "logits": target.transform(target.temperature).said,
        "columns": head.vocab_size,
        "kept columns": None if target.kept is None else tuple(target.kept.shape),
        "gradients": f"of {needs}, summed: {head.ranks.sums_hidden}",
        "workspace": options.workspace or f"default workspace {default_bound()}",
        **{
            name: getattr(options, name) for name in ("ignore_index", "chunk_size", "compact", "accum_dtype", "backend")
        },
    }
    if target.teacher is not None:
        which = [s.divergence for s in asked if s.divergence is not None]
        facts["teacher"] = f"{type(target.teacher).__name__}, {target.teacher.vocab_size} columns"
        facts["divergence"] = f"{', '.join(map(str, which))}, temperature {said(target.teacher.temperature)}"
    return facts
