"""The mean logit, a metric, without the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import OpenCall
from liger_losses.chunked.engine.plan import blocks
from liger_losses.kernels.matmul import HALF_DTYPES, matmul_into

#: Entries of the weight that are cast at once.
_CAST_AT_ONCE = 2**22


class MeanLogit:
    """``1/V sum_v z_v = factor (h . 1/V sum_v W_v + 1/V sum_v b_v)``, exact where there is no soft-cap.

    A half-precision product is taken with the mean row as a sum of three half-precision rows, which hold its digits.
    """

    def __init__(self, opened: OpenCall) -> None:
        call = opened.call
        mean = _mean_row(opened.weight, call.logits_dtype)
        self.factor, self.bias = call.transform.factor, None if opened.bias is None else opened.bias.mean()
        # fp16 holds the digits of numbers up to 1 only.
        self.unit = mean.abs().amax().clamp(min=torch.finfo(mean.dtype).tiny)
        rest, parts = mean / self.unit, []
        for _ in range(3 if call.operand_dtype in HALF_DTYPES else 1):
            parts.append(rest.to(call.operand_dtype))
            rest = rest - parts[-1]
        self.rows = torch.stack(parts, 1)

    def into(self, out: Tensor, hidden: Tensor) -> None:
        """Write the mean logits ``[R]`` of ``hidden [R, H]``, in the operand dtype, into ``out``."""
        product = out.new_empty(len(hidden), self.rows.shape[1])
        mean = matmul_into(product, hidden, self.rows).sum(1) * self.unit
        out.copy_((mean if self.bias is None else mean + self.bias) * self.factor)


def _mean_row(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight.mean(0)`` in ``dtype``, without a copy of the weight in it."""
    if weight.dtype == dtype or weight.device.type != "cpu":
        return weight.mean(0, dtype=dtype)
    total = weight.new_zeros(weight.shape[1], dtype=dtype)
    for rows in blocks(len(weight), max(1, _CAST_AT_ONCE // weight.shape[1])):
        total += weight[rows].sum(0, dtype=dtype)
    return total / len(weight)
