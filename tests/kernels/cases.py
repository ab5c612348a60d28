"""Where kernels run in tests."""

import pytest
import torch

from liger_losses.kernels._triton import INTERPRETED, triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(not INTERPRETED or triton is None, reason="needs Triton's interpreter")
