"""What tests of kernels run with: backends and dtypes."""

import pytest
import torch

from liger_losses.kernels._triton import INTERPRETED


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request, backend):
    if request.param == "bfloat16" and backend == "triton" and INTERPRETED:
        pytest.skip("the interpreter truncates where a GPU rounds to bfloat16")
    return getattr(torch, request.param)
