"""What tests of kernels run with: backends, dtypes, and ways to load tiles."""

import pytest
import torch

from liger_losses.kernels import rows
from liger_losses.kernels._triton import INTERPRETED
from tests.kernels.cases import triton_or_skip


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    if request.param == "triton":
        triton_or_skip()
    return request.param


@pytest.fixture(params=["tma", "pointers"])
def loads(request, monkeypatch, small_tiles):
    """Through the tensor memory accelerator, as on Hopper, and through pointers, as elsewhere."""
    triton_or_skip()
    monkeypatch.setattr("liger_losses.kernels._tiles.has_tma", lambda device: request.param == "tma")


@pytest.fixture(autouse=True)
def wide_sums(monkeypatch):
    """In the interpreter, programs that add up 256 columns and not 16: rows of 4097 columns still need several."""
    if INTERPRETED:
        monkeypatch.setattr(rows, "_SUM_COLUMNS", 256)


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request, backend):
    if request.param == "bfloat16" and backend == "triton" and INTERPRETED:
        pytest.skip("the interpreter truncates where a GPU rounds to bfloat16")
    return getattr(torch, request.param)


@pytest.fixture(params=[True, False], ids=["with gradients", "without gradients"])
def with_gradients_or_without(request):
    with torch.set_grad_enabled(request.param):
        yield
