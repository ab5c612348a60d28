"""Inputs of kernels and the formulas that they must equal."""

import pytest
import torch

from liger_losses.kernels._triton import INTERPRETED, triton
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(not INTERPRETED or triton is None, reason="needs Triton's interpreter")


def triton_or_skip():
    pytest.importorskip("triton", reason="triton is not installed")


def asserts_or_skip(wrong, backend):
    """Skip what would end the process's work on a GPU."""
    if wrong and backend == "triton" and DEVICE == "cuda":
        pytest.skip("the kernel asserts on the device that labels are right")


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


def doubled(epilogue):
    return Epilogue(epilogue.transform, *(None if vector is None else vector.double() for vector in epilogue[1:]))


#: Of several tiles, and a column more than whole ones: in the interpreter, with the fixture `small_tiles`.
SEVERAL_TILES, ONE_COLUMN_MORE = ((20, 40, 45), (5, 33, 33)) if INTERPRETED else ((130, 40, 300), (5, 33, 257))
SIZES = pytest.mark.parametrize(("tokens", "hidden_size", "columns"), [(3, 16, 70), SEVERAL_TILES, ONE_COLUMN_MORE])
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


TRANSFORMS_OF_HEAD = [LogitTransform(), LogitTransform(0.7, 1.2), LogitTransform(0.7, 1.2, 8.0)]
