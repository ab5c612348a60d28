"""Numbers that the host reads from the device, which copies them when it reaches them in its queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_losses.kernels._triton import device_of, jit, tl


def start_reading(numbers: Tensor, what: str) -> Callable[[], Any]:
    """Copy numbers to the host beside what is queued next; the function that is returned waits for them alone.

    Raises:
        RuntimeError: a CUDA graph is being captured, which says ``what`` the host cannot read, and what to do.
    """
    if not numbers.is_cuda:
        return numbers.tolist
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"a CUDA graph is being captured, and the host cannot read {what}.")
    host = numbers.to("cpu", non_blocking=True)  # into pinned memory
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))

    def read() -> Any:
        copied.synchronize()
        return host.tolist()

    return read


def _assert_here(right: Tensor) -> None:
    if not right:
        raise RuntimeError("a label or selected column is outside of the vocabulary, or a temperature is not positive.")


#: Fails on the device where a flag is False, and nobody waits for it; torch has no public name for it.
assert_on_device: Callable[[Tensor], None] = getattr(torch, "_assert_async", _assert_here)


def label_facts(
    labels: Sequence[Tensor], ignore_index: int, trained: Sequence[Tensor | None], *, backend: str = "torch"
) -> Tensor:
    """What a host must know of labels before it can choose how to run, in one launch for each tensor of them.

    Args:
        labels: int64, contiguous; S tensors of any shape.
        ignore_index: the label of masked tokens.
        trained: bool, contiguous, of each tensor's size: which tokens may have a gradient; ``None`` for all.
        backend: ``torch`` or ``triton``.

    Returns:
        ``[S, 4]`` int64: of each tensor, how many labels are active; the smallest and the largest of these and 0; how
        many of the active ones may have a gradient.
    """
    if backend == "torch":
        rows = []
        for part, mask in zip(labels, trained, strict=True):
            active = part != ignore_index
            low, high = torch.aminmax(part * active) if part.numel() else part.new_zeros(2)
            counts = [active.sum() if which is None else (active & which).sum() for which in (None, mask)]
            rows.append(torch.stack([counts[0], low.clamp(max=0), high.clamp(min=0), counts[1]]))
        return torch.stack(rows)
    facts = labels[0].new_empty(len(labels), 4)
    with device_of(facts):  # the first launch of a call, before anything else has made it current
        for i, (part, mask) in enumerate(zip(labels, trained, strict=True)):
            _label_facts_kernel[(1,)](facts, i, part, mask, part.numel(), int(ignore_index), BLOCK=2048, num_warps=8)
    return facts


@jit(do_not_specialize=["row", "tokens", "ignore_index"], do_not_specialize_on_alignment=["labels", "trained"])
def _label_facts_kernel(out, row, labels, trained, tokens, ignore_index, BLOCK: tl.constexpr):
    """One program: a million labels take it 0.2 ms, and what comes after them seconds."""
    count = tl.zeros((BLOCK,), tl.int64)
    low = tl.zeros((BLOCK,), tl.int64)
    high = tl.zeros((BLOCK,), tl.int64)
    count_trained = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < tokens
        label = tl.load(labels + at, mask=inside, other=0)
        active = inside & (label != ignore_index)
        value = tl.where(active, label, 0)
        count += active.to(tl.int64)
        if trained is not None:
            active &= tl.load(trained + at, mask=inside, other=0) != 0
        count_trained += active.to(tl.int64)
        low = tl.minimum(low, value)
        high = tl.maximum(high, value)
    out += row * 4
    tl.store(out, tl.sum(count, 0))
    tl.store(out + 1, tl.min(low, 0))
    tl.store(out + 2, tl.max(high, 0))
    tl.store(out + 3, tl.sum(count_trained, 0))
