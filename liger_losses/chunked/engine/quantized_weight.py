"""A quantized ``lm_head``: dequantized for the time of a pass, as a whole or some rows at a time.

V vocabulary size, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class QuantizedWeight:
    """A frozen weight ``[V, H]`` in any form, of which some rows at a time exist in floating point.

    Derive from it for a format of your own, and define :meth:`rows`: :class:`liger_losses.Head` takes an instance in
    place of a weight. :func:`liger_losses.register_quantized_weight` makes every operation, ``patch`` and TRL's
    trainers find it in tensors or layers of a type.

    Args:
        shape: ``(V, H)``.
        dtype: the floating-point dtype that the weight stands for. Products are computed in the hidden states' dtype.
        device: where the rows are.

    Attributes:
        temporary_bytes: what :meth:`rows` allocates at most for each entry of its result, and the result itself.

    Raises:
        TypeError, ValueError: a dtype that is not floating point, or sizes that are not positive.
    """

    temporary_bytes = 10

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str) -> None:
        if not dtype.is_floating_point:
            raise TypeError(f"a QuantizedWeight stands for a weight of a floating-point dtype, got {dtype}.")
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"a QuantizedWeight has the shape (vocab_size, hidden_size), got {tuple(shape)}.")
        self.shape, self.dtype, self.device = (int(shape[0]), int(shape[1])), dtype, torch.device(device)

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows ``start`` to ``stop``, dequantized: ``[stop - start, H]``, floating point, on the device."""
        raise NotImplementedError

    def part(self, start: int, stop: int) -> QuantizedWeight:
        """The weight of these rows alone."""
        return self if (start, stop) == (0, self.shape[0]) else _Part(self, start, stop)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, device={self.device})"


class _Part(QuantizedWeight):
    """Some rows of a weight."""

    def __init__(self, whole: QuantizedWeight, start: int, stop: int) -> None:
        super().__init__((stop - start, whole.shape[1]), whole.dtype, whole.device)
        self.whole, self.start, self.temporary_bytes = whole, start, whole.temporary_bytes

    def rows(self, start: int, stop: int) -> Tensor:
        return self.whole.rows(self.start + start, self.start + stop)
