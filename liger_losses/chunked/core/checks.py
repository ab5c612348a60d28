"""What is wrong with a call, said before any work: what was given, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from liger_losses.chunked.core.agreement import agree, checksum
from liger_losses.chunked.core.options import default_bound
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


def check_call(
    targets: Sequence[Target], asked: Sequence[Statistic], options: EngineOptions, sums_losses: bool
) -> None:
    """Raise RuntimeError within a transform of ``torch.func`` or forward mode, ValueError for no target; RankError on
    all ranks that share a vocabulary unless they are about to make the same call."""
    if within_transform():
        raise RuntimeError(NO_TRANSFORMS)
    if not targets:
        raise ValueError("got no target; give at least one.")
    if getattr(forward_ad, "_current_level", -1) >= 0:  # torch has no public name for it, and raises an error too
        for target in targets:
            tensors = [target.hidden, target.head.bias, *[tensor for tensor, _ in target.head.weights.trained]]
            if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
                raise RuntimeError(NO_TANGENTS)
    for target in targets:
        if target.head.ranks.group is not None:
            facts = common_facts(target, asked, options) | {"a loss per token": sums_losses}
            read = {"labels": target.labels} | ({} if target.kept is None else {"kept columns": target.kept})
            sums = {f"checksum of {name}": partial(checksum, value) for name, value in read.items()}
            agree(target.head.ranks.group, facts, sums)


def common_facts(target: Target, asked: Sequence[Statistic], options: EngineOptions) -> dict[str, Any]:
    """What all ranks that share a vocabulary must have in common."""
    head, hidden, teacher = target.head, target.hidden, target.teacher
    needs = [str(tuple(leaf.tensor.shape[1:])) for leaf in target.leaves()] if torch.is_grad_enabled() else []
    facts = {
        "labels' shapes": tuple(target.labels.shape),
        "hidden states": f"{hidden.shape[-1]} in {hidden.dtype}",
        "statistics": [s.name for s in asked],
        "logits": target.transform(target.temperature).said,
        "columns": head.vocab_size,
        "kept columns": None if target.kept is None else tuple(target.kept.shape),
        "gradients": f"of {needs}, summed: {head.ranks.sums_hidden}",
        **vars(replace(options, strategy=None, keep=None)),
        "workspace": options.workspace or f"default workspace {default_bound()}",
    }
    if teacher is not None:
        which = [str(s.divergence) for s in asked if s.divergence is not None]
        facts["teacher"] = f"{type(teacher).__name__}, {teacher.vocab_size} columns"
        facts["divergence"] = f"{', '.join(which)}, temperature {said(teacher.temperature)}"
    return facts
