"""What tests of layers run with: the backends and dtypes of tests of kernels."""

import pytest
import torch

from liger_losses.kernels._triton import INTERPRETED
from liger_losses.layers import rows
from tests.kernels.conftest import backend, dtype  # noqa: F401


@pytest.fixture(autouse=True)
def wide_sums(monkeypatch):
    """In the interpreter, programs that add up 256 columns and not 16: rows of 4097 columns still need several."""
    if INTERPRETED:
        monkeypatch.setattr(rows, "_SUM_COLUMNS", 256)


@pytest.fixture(params=[True, False], ids=["with gradients", "without gradients"])
def with_gradients_or_without(request):
    with torch.set_grad_enabled(request.param):
        yield
