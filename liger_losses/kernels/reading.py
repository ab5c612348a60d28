"""Numbers that the host reads from the device: asked for early, so that it need not wait when it wants them.

The device copies them when it reaches them in its queue. Whoever asks for them before a model's layers are queued has
them long before these have run.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import choose_backend
from liger_losses.kernels.label_rows import label_facts


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


class LabelFacts(NamedTuple):
    """What :func:`~liger_losses.kernels.label_rows.label_facts` returns, what reads it on the host, and what it keeps,
    where one launch finds that too."""

    numbers: Tensor
    read: Callable[[], Any]
    kept: Tensor | None = None


class _Asked(NamedTuple):
    """Labels that were asked about: forgotten with them, so that nothing else can be where they are in memory."""

    labels: weakref.ref[Tensor]
    version: int
    facts: LabelFacts


#: By where the labels are in memory; the oldest are forgotten.
_asked: OrderedDict[Any, _Asked] = OrderedDict()
_MOST_ASKED = 8
#: The most labels of which one program finds the active ones: of more, several kernels take less time.
_MOST_KEPT = 65536
_WHAT = "how many tokens carry loss; give compact=False, with which all of them are projected"


def ask_about_labels(labels: Tensor, ignore_index: int = -100) -> None:
    """Ask which labels there are, before the model runs whose loss will be given this tensor.

    The loss then does not wait for the number of tokens that carry loss. It may be given another view of the same
    memory, as long as that is all of it, in order.
    """
    if type(labels) is not Tensor or labels.dtype != torch.int64 or not labels.is_contiguous():
        return
    if labels.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    backend = choose_backend(None, [(labels.device, torch.float32)])
    facts = _ask([labels.view(-1)], ignore_index, backend)
    place = _place(labels, ignore_index)
    _asked[place] = _Asked(weakref.ref(labels, lambda gone: _forget(place, gone)), version_of(labels), facts)
    if len(_asked) > _MOST_ASKED:
        _asked.popitem(last=False)


def facts_of_labels(labels: list[Tensor], ignore_index: int, backend: str) -> LabelFacts:
    """What was asked of the labels, flat tensors, or what is asked now.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    asked = _asked.get(_place(labels[0], ignore_index)) if len(labels) == 1 and _asked else None
    if asked is not None and asked.version == version_of(labels[0]) >= 0:
        return asked.facts
    return _ask(labels, ignore_index, backend)


def _forget(place: Any, labels: weakref.ref[Tensor]) -> None:
    if place in _asked and _asked[place].labels is labels:
        del _asked[place]


def _ask(labels: list[Tensor], ignore_index: int, backend: str) -> LabelFacts:
    count, kept = sum([part.numel() for part in labels]), None
    # Autograd keeps no tensor that was made in inference mode.
    if backend == "triton" and count <= _MOST_KEPT and not torch.is_inference_mode_enabled():
        kept = labels[0].new_empty(min(len(labels), 2) + 1, count + count % 2)
    numbers = label_facts(labels, ignore_index, kept, backend=backend)
    return LabelFacts(numbers, start_reading(numbers, _WHAT), kept)


def _place(labels: Tensor, ignore_index: int) -> tuple[Any, ...]:
    return labels.device, labels.data_ptr(), labels.numel(), labels.dtype, int(ignore_index)


def version_of(tensor: Tensor) -> int:
    """Counts the in-place operations on a tensor's memory; torch has no public name for it. -1 where it does not."""
    return -1 if tensor.is_inference() else getattr(tensor, "_version", -1)
