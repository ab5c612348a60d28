"""Multiply in place by a number on the device; nothing is read or written if it is 1."""

from __future__ import annotations

from torch import Tensor

from liger_losses.kernels._triton import jit, tl, triton


def scale_(tensor: Tensor, factor: Tensor, *, backend: str = "torch") -> Tensor:
    """``tensor *= factor``. The upstream gradient of a loss is mostly 1, which the host cannot know.

    Args:
        tensor: any shape, contiguous, floating point.
        factor: 0-dim, on the same device.
        backend: ``torch`` or ``triton``.

    Returns:
        ``tensor``.
    """
    if backend == "torch":
        return tensor.mul_(factor)
    block, count = 4096, tensor.numel()
    if count:
        programs = min(triton.cdiv(count, block), 4096)
        _scale_kernel[(programs,)](tensor, factor, count, programs, BLOCK=block, num_warps=8)
    return tensor


@jit(do_not_specialize=["programs"])
def _scale_kernel(tensor, factor, count, programs, BLOCK: tl.constexpr):
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, programs.to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(tensor + at, mask=at < count)
            tl.store(tensor + at, (value.to(tl.float32) * f).to(tensor.dtype.element_ty), mask=at < count)
