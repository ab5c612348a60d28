"""Numbers that the host reads from the device, which copies them when it reaches them in its queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import device_of, jit, tl

#: An odd number whose multiples modulo 2^64 are spread evenly: 2^63 over the golden ratio.
PLACE_FACTOR = 0x4F1BBCDCBFA53E0B
_PLACE_FACTOR = PLACE_FACTOR if tl is None else tl.constexpr(PLACE_FACTOR)


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


def place_weights(first: int, count: int, device: torch.device) -> Tensor:
    """A weight for each of the places ``first`` to ``first + count``, ``[count]`` int64, for checksums.

    ``w_t = x ^ (x >> 32)`` with ``x = (t + 1) c`` modulo 2^64. The weights do not repeat, and the shift makes them
    nonlinear in t, so that a checksum changes where entries change places. Two different tensors have the same checksum
    in about one of 2^32 cases.
    """
    x = torch.arange(first + 1, first + count + 1, device=device) * PLACE_FACTOR
    return x ^ (x >> 32)


def label_facts(
    labels: Sequence[Tensor], ignore_index: int, kept: Tensor | None = None, *, backend: str = "torch"
) -> Tensor:
    """What a host must know of labels before it can choose how to run, in one launch for each tensor of them.

    Args:
        labels: int64, contiguous; S tensors of any shape.
        ignore_index: the label of masked tokens.
        kept: ``[2, T]`` int64 of T labels in all, rounded up to an even number, contiguous: it gets the places of the
            active labels among all, and these labels, in order; with ``[3, T]``, also the place of each in its tensor.
            What follows them is any number.
        backend: ``torch`` or ``triton``.

    Returns:
        ``[S, 4]`` int64: of each tensor, how many labels are active; the smallest and the largest of these and 0; and a
        checksum, ``sum_t (label_t + 1) w_t`` modulo 2^64 with the :func:`place_weights` ``w``, where t is counted
        through all tensors.
    """
    if backend == "torch":
        first, rows, labels = 0, [], [part.flatten() for part in labels]
        for part in labels:
            active = part != ignore_index
            low, high = torch.aminmax(part * active) if len(part) else part.new_zeros(2)
            checksum = ((part + 1) * place_weights(first, len(part), part.device)).sum()
            rows.append(torch.stack([active.sum(), low.clamp(max=0), high.clamp(min=0), checksum]))
            first += len(part)
        if kept is not None:
            every = torch.cat(labels)
            own = torch.cat([torch.arange(len(part), device=part.device) for part in labels])
            order = (every == ignore_index).sort(stable=True).indices
            kept[:, : len(order)] = torch.stack([order, every[order], own[order]])[: len(kept)]
        return torch.stack(rows)
    facts, first, ignore_index = labels[0].new_empty(len(labels), 4), 0, int(ignore_index)
    depth, room = (0, 0) if kept is None else kept.shape
    with device_of(facts):  # the first launch of a call, before anything else has made it current
        for i, part in enumerate(labels):
            arguments = facts, part, part.numel(), first, ignore_index, kept, room, i
            _label_facts_kernel[(1,)](*arguments, BLOCK=2048, WITHIN=depth == 3, num_warps=8)
            first += part.numel()
    return facts


class LabelFacts(NamedTuple):
    """What :func:`label_facts` returns, what reads it on the host, and what it keeps if one launch finds that too."""

    numbers: Tensor
    read: Callable[[], Any]
    kept: Tensor | None = None


#: The most labels of which one program finds the active ones: of more, several kernels take less time.
_MOST_KEPT = 65536
_WHAT = "how many tokens carry loss; give compact=False, with which all of them are projected"


def facts_of_labels(labels: list[Tensor], ignore_index: int, backend: str) -> LabelFacts:
    """Ask which labels there are, contiguous tensors.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    count, kept = sum(map(Tensor.numel, labels)), None
    # Autograd keeps no tensor that was made in inference mode.
    if backend == "triton" and count <= _MOST_KEPT and not torch.is_inference_mode_enabled():
        kept = labels[0].new_empty(min(len(labels), 2) + 1, count + count % 2)
    numbers = label_facts(labels, ignore_index, kept, backend=backend)
    return LabelFacts(numbers, start_reading(numbers, _WHAT), kept)


def version_of(tensor: Tensor) -> int:
    """Counts the in-place operations on a tensor's memory; torch has no public name for it. -1 where it does not."""
    return -1 if tensor.is_inference() else getattr(tensor, "_version", -1)


@jit(
    do_not_specialize=["tokens", "first", "ignore_index", "room", "earlier"],
    do_not_specialize_on_alignment=["out", "labels"],
)
def _label_facts_kernel(
    out, labels, tokens, first, ignore_index, kept, room, earlier, BLOCK: tl.constexpr, WITHIN: tl.constexpr
):
    """One program: a million labels take it 0.2 ms, and what comes after them seconds. Launches before it have written
    the facts of ``earlier`` tensors."""
    before = tl.zeros((), tl.int32)
    out += 4 * earlier
    for tensor in range(earlier):
        before += tl.load(out - 4 * tensor - 4).to(tl.int32)
    count = tl.zeros((BLOCK,), tl.int64)
    low = tl.zeros((BLOCK,), tl.int64)
    high = tl.zeros((BLOCK,), tl.int64)
    checksum = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < tokens
        label = tl.load(labels + at, mask=inside, other=0)
        active = inside & (label != ignore_index)
        if kept is not None:
            place = before + tl.cumsum(active.to(tl.int32), 0) - 1
            tl.store(kept + place, (first + at).to(tl.int64), mask=active)
            tl.store(kept + room + place, label, mask=active)
            if WITHIN:
                tl.store(kept + 2 * room + place, at.to(tl.int64), mask=active)
            before += tl.sum(active.to(tl.int32), 0)
        value = tl.where(active, label, 0)
        count += active.to(tl.int64)
        low = tl.minimum(low, value)
        high = tl.maximum(high, value)
        place = (first + at + 1).to(tl.int64) * _PLACE_FACTOR
        checksum += tl.where(inside, (label + 1) * (place ^ (place >> 32)), 0)
    tl.store(out, tl.sum(count, 0))
    tl.store(out + 1, tl.min(low, 0))
    tl.store(out + 2, tl.max(high, 0))
    tl.store(out + 3, tl.sum(checksum, 0))
