"""What kernels' autograd functions share."""

import pytest
import torch

from liger_losses.kernels.autograd import scale_
from tests.kernels.cases import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, -0.37])
@pytest.mark.parametrize("count", [0, 1, 4096, 10_001])
def test_scale(backend, count, factor, dtype):
    tensor = torch.linspace(-2, 2, count, device=DEVICE).to(dtype)
    expected, eps = tensor * factor, torch.finfo(dtype).eps * (factor != 1.0)
    other = torch.ones(5, device=DEVICE)
    scale_(torch.tensor(factor, device=DEVICE), [tensor, other, other[:0]], backend=backend)
    torch.testing.assert_close(tensor, expected, rtol=eps, atol=0.0)
    torch.testing.assert_close(other, torch.full_like(other, factor))
