"""Norms: as exact as eager PyTorch, by every backend, in every dtype it serves."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses.layers.layer_norm import layer_norm
from liger_losses.layers.rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from tests.kernels.cases import DEVICE
from tests.layers.eager import check, normal, wide


def plain_rms_norm(x, weight, eps=1e-6, offset=0.0, multiply="cast_first", gate=None, gate_first=False):
    u = wide(x) if gate is None or not gate_first else wide(x) * F.silu(wide(gate))
    y = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)
    if multiply == "cast_first":
        y = y.to(x.dtype)
        y = y if weight is None else (weight + offset if offset else weight) * y
    else:
        y = y if weight is None else y * (offset + wide(weight))
    if gate is not None and not gate_first:
        y = y * F.silu(wide(gate))
    return y if multiply == "cast_first" and (gate is None or gate_first) else y.to(x.dtype)


OPTIONS = [{}, {"multiply": "fp32"}, {"multiply": "fp32", "offset": 1.0}, {"offset": 1.0}]
KINDS = "none", "wide", "narrow"


@pytest.mark.parametrize(
    ("options", "columns", "kind"),
    [(o, c, "same") for o in OPTIONS for c in (1, 33, 128, 4097)] + [(o, 40, k) for o in OPTIONS[:2] for k in KINDS],
    ids=str,
)
def test_rms_norm(backend, dtype, options, columns, kind):
    """With a weight of the same, of a wider or of a narrower dtype, and without one."""
    of_x, of_weight = {"wide": (dtype, torch.float32), "narrow": (torch.float32, dtype)}.get(kind, (dtype, dtype))
    check(
        lambda x, w: rms_norm(x, w, 1e-5, backend=backend, **options),
        lambda x, w: plain_rms_norm(x, w, 1e-5, **options),
        (normal(2, 3, columns, dtype=of_x), None if kind == "none" else normal(columns, dtype=of_weight)),
        scale=1.0 if columns == 1 else 0.0,
    )


@pytest.mark.parametrize("columns", [33, 256])
@pytest.mark.parametrize("options", [{}, {"multiply": "fp32", "offset": 1.0}, {"wide residual": True}])
def test_add_rms_norm(backend, dtype, options, columns):
    options = dict(options)
    of_residual = torch.float32 if options.pop("wide residual", False) else dtype
    inputs = (normal(7, columns, dtype=dtype), normal(7, columns, dtype=of_residual, seed=1))
    inputs += (normal(columns, dtype=dtype),)
    check(
        lambda x, r, w: add_rms_norm(x, r, w, backend=backend, **options),
        lambda x, r, w: (plain_rms_norm(x + r, w, **options), x + r),
        inputs,
    )


def test_a_norm_that_is_not_used_has_no_gradient(backend):
    x, residual, weight = normal(3, 16), normal(3, 16, seed=1), normal(16)
    add_rms_norm(x, residual, weight, backend=backend)[1].square().sum().backward()
    assert weight.grad is None
    torch.testing.assert_close((x.grad, residual.grad), (2 * (x + residual).detach(),) * 2)


@pytest.mark.parametrize("multiply", ["cast_first", "fp32"])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weighted", [True, False])
def test_gated_rms_norm(backend, dtype, weighted, gate_first, multiply):
    x, gate = normal(2, 5, 33, dtype=dtype), normal(2, 5, 33, dtype=dtype, seed=1)
    options = {"gate_first": gate_first, "multiply": multiply}
    check(
        lambda x, z, w: gated_rms_norm(x, z, w, backend=backend, **options),
        lambda x, z, w: plain_rms_norm(x, w, gate=z, **options),
        (x, gate, normal(33, dtype=dtype) if weighted else None),
    )


def test_saved_memory_of_rms_norm_is_its_input_and_a_number_per_row(backend):
    sizes = []
    x, weight = normal(32, 64), normal(64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        rms_norm(x, weight, backend=backend)
    assert sorted(sizes) == [32, 64, 32 * 64]


def test_functional_transforms_are_refused():
    with pytest.raises(RuntimeError, match="torch.autograd.grad, called for one"):
        torch.func.grad(lambda x: rms_norm(x, None).sum())(torch.ones(3, 4))


# --- Layer norms ------------------------------------------------------------------------------------------------------


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
