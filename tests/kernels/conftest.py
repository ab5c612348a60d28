"""What tests of kernels run with: backends, dtypes, and ways to load tiles."""

import pytest
import torch

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
    monkeypatch.setattr("liger_losses.chunked.accelerators.tiles.has_tma", lambda device: request.param == "tma")


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request, backend):
    if request.param == "bfloat16" and backend == "triton" and INTERPRETED:
        pytest.skip("the interpreter truncates where a GPU rounds to bfloat16")
    return getattr(torch, request.param)
