"""What calls of one kind have in common is found once, and kept: the host takes most of the time of a short call.

A kind is all that can be told without the values of the tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from liger_losses.kernels._triton import BACKEND_VARIABLE
from liger_losses.kernels.autograd import records_nothing
from liger_losses.layers.plain import PLAIN

T = TypeVar("T")


class Prepared(Generic[T]):
    """What was prepared for each kind of calls, for at most ``most`` of them at a time."""

    def __init__(self, most: int = 1024) -> None:
        self.most = most
        self.found: dict[Any, T] = {}

    def of(self, settings: Hashable, tensors: Iterable[Tensor | None], prepare: Callable[[], T]) -> T:
        """What ``prepare()`` returned for the first call of the kind.

        Calls whose kind cannot be told are prepared each time: those of tensors without memory or strides, of
        subclasses, or of settings that cannot be hashed.

        Args:
            settings: all that the call depends on beside the tensors.
            tensors: of which shape, strides, dtype, device, alignment and ``requires_grad`` count.
        """
        try:
            key = settings, *map(_kind, tensors)
            found = self.found.get(key)
        except (RuntimeError, TypeError):
            return prepare()
        if found is None:
            if len(self.found) >= self.most:
                self.found.clear()
            found = self.found[key] = prepare()
        return found


def _kind(t: Tensor | None) -> Any:
    """All that is asked of a tensor; TypeError or RuntimeError if it cannot be told."""
    if t is None:
        return None
    if type(t) not in PLAIN:
        raise TypeError
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16, t.requires_grad


class Launcher:
    """Launches a kernel whose arguments always have the same shapes, strides, dtypes, device and alignment, as those of
    one kind of calls in :class:`Prepared`.

    At every launch, Triton looks for the compiled kernel by all arguments, which takes the host longer than the launch.
    A training step of a small model has hundreds of launches. Here, the first one finds the compiled kernel for all.
    """

    def __init__(self, kernel: Any, programs: int, **options: Any) -> None:
        self.kernel, self.options = kernel[(programs,)], options
        self.grid, self.binary = (programs, 1, 1), None

    def __call__(self, *arguments: Any) -> None:
        """Launch it; arguments are given by position, constants too."""
        if self.binary is not None:
            self.binary(*arguments)
            return
        compiled = self.kernel(*arguments, **self.options)
        if compiled is not None and torch.version.cuda:  # for AMD, Triton also compiles by sizes of tensors
            self.binary = compiled[self.grid]


class PreparedKernel:
    """A kernel whose launch is found once for tensors of one kind, where neither autograd nor anything else records it.

    Args:
        checked: from tensors, options and backend to the result; checks them, and is differentiable.
        launch: from the same, checked, to a function of such tensors that launches Triton's kernel and returns the
            result; or to ``None`` where Triton does not run.
    """

    def __init__(self, checked: Callable[..., Any], launch: Callable[..., Callable[..., Any] | None]) -> None:
        self.checked, self.launch = checked, launch
        self.prepared: Prepared[Callable[..., Any]] = Prepared()

    def __call__(self, tensors: tuple[Tensor | None, ...], options: Hashable, backend: str | None) -> Any:
        """The result."""
        if not records_nothing():
            return self.checked(tensors, options, backend)
        settings = options, backend, os.environ.get(BACKEND_VARIABLE)
        return self.prepared.of(settings, tensors, lambda: self._prepare(tensors, options, backend))(*tensors)

    def _prepare(self, tensors: tuple[Tensor | None, ...], options: Any, backend: str | None) -> Callable[..., Any]:
        launch = None
        if all(tensor is None or type(tensor) in PLAIN for tensor in tensors):
            self.checked(tensors, options, backend)  # raises for what is wrong
            launch = self.launch(tensors, options, backend)
        return launch or (lambda *tensors: self.checked(tensors, options, backend))
