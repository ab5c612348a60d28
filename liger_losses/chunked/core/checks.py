"""What is wrong with a call, said before any work: what was given, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.autograd import forward_ad

from liger_losses.checks import check_right, check_vocabulary
from liger_losses.kernels.autograd import NO_TRANSFORMS, records_tangents, within_transform

__all__ = ["check_call", "check_right", "check_vocabulary"]

if TYPE_CHECKING:
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
    if records_tangents():
        for target in targets:
            tensors = [target.hidden, target.head.bias, *[tensor for tensor, _ in target.head.weights.trained]]
            if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
                raise RuntimeError(NO_TANGENTS)
