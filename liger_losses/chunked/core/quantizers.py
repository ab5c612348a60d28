"""How the codes of each library's quantized layers become rows."""

from __future__ import annotations

import torch
from torch import Tensor


class QuantizedWeight:
    """A frozen weight ``[V, H]`` in any format, which can return some of its rows in floating point.

    ``temporary_bytes`` is the most that :meth:`rows` allocates for each entry of its result, including the result.
    """

    temporary_bytes = 10

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str) -> None:
        self.shape, self.dtype, self.device = (int(shape[0]), int(shape[1])), dtype, torch.device(device)

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows ``start`` to ``stop``, dequantized: ``[stop - start, H]``, floating point, on the device."""
        raise NotImplementedError
