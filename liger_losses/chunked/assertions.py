"""Checks of a training step: that it makes no logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses.caller import calling_line
from liger_losses.chunked.core.head import Head
from liger_losses.chunked.core.options import bytes_of

#: What computes logits in blocks, within the workspace.
_ENGINE = "liger_losses.chunked.core."


@contextmanager
def assert_no_logits(vocabulary: int | Tensor | nn.Module | Head, limit: int | str = "64MiB") -> Iterator[None]:
    """Raise within where an operation makes a tensor ``[..., V]`` of more than ``limit``: logits, or what is computed
    of them, such as probabilities, gradients and masks.

    Put it around a training step, forward and backward, to learn whether something still computes all logits. Backward
    is checked on a GPU too, and so is what activation checkpointing computes again. Blocks of logits that losses and
    operations of this library compute within their :func:`workspace` do not count.

    Only what operations of PyTorch return is seen. Memory that an operation takes only while it runs, and tensors of
    kernels that are not called through PyTorch, are not. Functions of ``torch.compile`` run without compilation within
    this context, as under any ``TorchDispatchMode``; with ``fullgraph=True``, torch raises an error.

    Args:
        vocabulary: the vocabulary size V, as the logits have it; or what has it: a model of transformers, its
            ``lm_head``, the weight ``[V, H]`` of the head, or a :class:`Head`.
        limit: bytes, or text such as ``"300MiB"``. Use ``1`` for models and batches of tests.

    Raises:
        AssertionError: within, such a tensor. The message has the operation, the shape, the size and the innermost line
            of code outside of PyTorch and this library.
        TypeError, ValueError: no vocabulary size, a model without an output layer, or no positive number of bytes.
    """
    with _Watch(_vocab_size(vocabulary), bytes_of(limit, "limit")):
        yield


def _vocab_size(vocabulary: Any) -> int:
    if hasattr(vocabulary, "get_output_embeddings"):
        model, vocabulary = type(vocabulary).__name__, vocabulary.get_output_embeddings()
        if vocabulary is None:
            raise ValueError(f"{model} has no output layer, which would have the vocabulary size; pass this size.")
    if isinstance(vocabulary, (Tensor, nn.Module, Head)):
        return Head.of(vocabulary).vocab_size
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, Integral) or vocabulary < 1:
        raise TypeError(f"vocabulary must be the vocabulary size, a model, or its head, got {vocabulary!r}.")
    return int(vocabulary)


class _Watch(TorchDispatchMode):
    """Looks at the results of operations. Autograd's threads have the modes of the thread that calls backward."""

    def __init__(self, vocab_size: int, limit: int) -> None:
        super().__init__()
        self.vocab_size, self.limit = vocab_size, limit
        #: The code that makes this context, whose line is what it now runs.
        self.frame, _ = calling_line()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # What is a view, or was changed in place, is not new.
        given = [id(value) for value in _tensors([*args, *kwargs.values()])]
        for value in [] if func.is_view else _tensors([result]):
            if id(value) not in given and self._are_logits(value):
                raise AssertionError(self._message(func, value))
        return result

    def _are_logits(self, value: Tensor) -> bool:
        if value.shape[-1:] != (self.vocab_size,) or value.numel() * value.element_size() <= self.limit:
            return False
        frame = inspect.currentframe()
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(_ENGINE):
            frame = frame.f_back
        return frame is None

    def _message(self, operation: Any, value: Tensor) -> str:
        frame, line = calling_line()
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "liger_losses"):  # a thread of autograd
            frame, line = self.frame, self.frame.f_lineno
        size = value.numel() * value.element_size() / 2**20
        return (
            f"{operation} makes logits: {tuple(value.shape)}, {value.dtype}, {size:.1f} MiB, more than limit= "
            f"({self.limit} bytes), called from {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}. Compute "
            "the loss of hidden states and the head (loss_inputs), or patch the model and do not read its logits."
        )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among an operation's arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value
