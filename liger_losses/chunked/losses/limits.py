"""What dtypes can hold, where formulas must know it."""

from __future__ import annotations

import torch

#: exp() of more overflows fp32, and an overflow that a clip discards still makes gradients NaN.
MAX_EXPONENT = 80.0


def wide_dtype(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64
