"""Layer norms: as exact as eager PyTorch, by every backend, in every dtype it serves."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses.layers.layer_norm import layer_norm
from tests.kernels.cases import DEVICE
from tests.layers.eager import check, normal


@pytest.mark.parametrize("columns", [1, 33, 128, 4097])
@pytest.mark.parametrize("vectors", ["both", "weight", "bias", "neither"])
def test_layer_norm(backend, dtype, vectors, columns):
    weight = normal(columns, dtype=dtype) if vectors in ("both", "weight") else None
    bias = normal(columns, dtype=dtype, seed=1) if vectors in ("both", "bias") else None
    check(
        lambda x, w, b: layer_norm(x, w, b, backend=backend),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        (normal(2, 3, columns, dtype=dtype), weight, bias),
        scale=1000.0 if columns == 1 else 0.0,  # 1 / sqrt(eps), times terms that cancel
    )


def test_layer_norm_far_from_zero(backend):
    x = (normal(4, 300, grad=False) + 1000).requires_grad_()
    check(
        lambda x, w, b: layer_norm(x, w, b, backend=backend),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        (x, normal(300), normal(300, seed=1)),
    )


def test_layer_norm_under_autocast(backend):
    x, weight, bias = normal(3, 20, dtype=torch.bfloat16), normal(20), normal(20, seed=1)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = layer_norm(x, weight, bias, backend=backend)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, F.layer_norm(x.float(), (20,), weight, bias))
