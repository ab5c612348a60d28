"""Inputs of kernels and the formulas that they must equal."""

import pytest
import torch

from liger_losses.kernels._triton import INTERPRETED, triton
from liger_losses.kernels.logit_transform import LogitTransform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(not INTERPRETED or triton is None, reason="needs Triton's interpreter")


def triton_or_skip():
    pytest.importorskip("triton", reason="triton is not installed")


def inputs(rows, columns, seed=0, scale=2.0):
    g = torch.Generator().manual_seed(seed)
    projected = torch.randn(rows, columns, generator=g) * scale
    labels = torch.randint(columns, (rows,), generator=g)
    bias, c = torch.randn(columns, generator=g), torch.rand(columns, generator=g)
    return tuple(t.to(DEVICE) for t in (projected, labels, bias, c))


def head(tokens, hidden_size, columns, dtype=torch.float16, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, hidden_size, generator=g).to(dtype).to(DEVICE) for n in (tokens, columns))
    labels = torch.randint(columns, (tokens,), generator=g).to(DEVICE)
    bias, c = (torch.rand(columns, generator=g).to(DEVICE) for _ in range(2))
    return hidden, weight, labels, bias, c


TRANSFORMS_OF_HEAD = [LogitTransform(), LogitTransform(0.7, 1.2), LogitTransform(0.7, 1.2, 8.0)]
