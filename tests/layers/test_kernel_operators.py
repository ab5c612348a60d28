"""Kernels and modules in compiled functions: results and gradients as without torch.compile; what launches keep."""

import pytest
import torch

from liger_losses.layers import glu, layer_norm, rms_norm, rope
from liger_losses.layers.launches import Launches
from tests.reference import relative_error, tensors_of
from tests.results.compiled import DEVICE, HALF, assert_same, compiled, gradients

pytestmark = pytest.mark.usefixtures("nothing_compiled")

WIDTH = 24
g = torch.Generator().manual_seed(3)
W, BIAS, DOWN = (torch.randn(*s, generator=g).to(DEVICE).requires_grad_() for s in ((WIDTH,), (WIDTH,), (7, WIDTH)))


def angles(length, width):
    at = torch.arange(float(length * width), device=DEVICE).view(1, length, width)
    return at.cos(), at.sin()


def heads(x):
    return x.view(2, -1, 3, 8)


KERNELS = {
    "RMS norm": lambda x, y, b: rms_norm.rms_norm(x * 1.5, W, 1e-5, offset=1.0, multiply="fp32", backend=b),
    "RMS norm, no weight": lambda x, y, b: rms_norm.rms_norm(x[:, 1:], None, backend=b),
    "residual and norm": lambda x, y, b: rms_norm.add_rms_norm(x, y, W, backend=b),
    "one output": lambda x, y, b: rms_norm.add_rms_norm(x, y, W, backend=b)[0],
    "gated norm": lambda x, y, b: rms_norm.gated_rms_norm(x, y, W, gate_first=True, backend=b),
    "layer norm": lambda x, y, b: layer_norm.layer_norm(x, W, BIAS, backend=b),
    "gate": lambda x, y, b: glu.glu(x, y, "silu", limit=1.0, alpha=1.7, up_offset=1.0, backend=b),
    "fused gate": lambda x, y, b: glu.glu_fused(x, interleaved=True, backend=b),
    "gate and product": lambda x, y, b: glu.glu_linear(x, y, DOWN, None, "gelu_tanh", backend=b),
    "rotation": lambda x, y, b: rope.rope(
        heads(x).transpose(1, 2), heads(y).transpose(1, 2), *angles(x.shape[1], 6), backend=b
    ),
    "rotation, one output": lambda x, y, b: rope.rope(
        heads(x), heads(y), *angles(x.shape[1], 8), interleaved=True, unsqueeze_dim=2, backend=b
    )[0],
}


def test_kernels():
    """One graph for all lengths; outputs with the strides and gradients that they have eagerly.

    The backend is an argument of the operators, so that one of them is enough here and below.
    """

    def call_all(x, y):
        return [kernel(x, y, "triton") for kernel in KERNELS.values()]

    function, counter = compiled(call_all)
    for length in (5, 8):
        x, y = (torch.randn(2, length, WIDTH, generator=g).to(DEVICE).requires_grad_() for _ in range(2))
        if length == 5:
            torch._dynamo.mark_dynamic(x, 1), torch._dynamo.mark_dynamic(y, 1)
        found, expected = function(x, y), call_all(x, y)
        assert_same(found, expected, {"rtol": 1e-4, "atol": 1e-5})
        assert [t.stride() for t in tensors_of(found)] == [t.stride() for t in tensors_of(expected)]
        inputs = (x, y, W, BIAS, DOWN)
        torch.testing.assert_close(gradients(found, inputs), gradients(expected, inputs), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_kernels_of_two_dtypes_in_one_graph():
    names = "RMS norm", "residual and norm", "gated norm", "layer norm", "gate", "fused gate"

    def call_all(x, y):
        return [KERNELS[n](a, b, "torch") for n in names for a, b in ((x, y), (x.bfloat16(), y.bfloat16()), (x, y))]

    function, counter = compiled(call_all)
    x, y = (torch.randn(2, 6, WIDTH, generator=g).to(DEVICE).requires_grad_() for _ in range(2))
    found, expected, inputs = function(x, y), call_all(x, y), (x, y, W, BIAS)
    assert_same(found, expected, HALF)
    for a, b in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert relative_error(a, b) < 1e-2
    assert counter.frame_count == 1


def test_kernels_under_autocast_and_without_gradients():
    def call_all(x, y):
        return [KERNELS[name](x, y, "torch") for name in ("RMS norm", "residual and norm", "gate", "rotation")]

    function, counter = compiled(call_all, "eager")
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (torch.randn(2, 6, WIDTH, generator=g).to(DEVICE, dtype) for _ in range(2))
        with torch.autocast(DEVICE, dtype=torch.bfloat16), torch.no_grad():
            assert_same(function(x, y), call_all(x, y), HALF)
    assert counter.frame_count == 2


@pytest.mark.parametrize("kernel", KERNELS)
def test_calls_bind_no_signature_and_build_no_graph_without_gradients(kernel, monkeypatch):
    monkeypatch.setattr("inspect.signature", None)  # torch binds the arguments of functions with a setup_context
    x, y = (torch.randn(2, 5, WIDTH, generator=g).to(DEVICE).requires_grad_() for _ in range(2))
    found = KERNELS[kernel](x, y, "torch")
    with torch.no_grad():
        without = KERNELS[kernel](x, y, "torch")
    for a, b in zip(tensors_of(found), tensors_of(without), strict=True):
        assert (a.requires_grad, b.requires_grad) == (True, False)
        assert torch.equal(a, b)


# --- What is kept of launches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_triton_is_asked_once_for_the_compiled_kernel_of_a_kind(cuda, monkeypatch):
    """And at every launch on AMD's GPUs, for which it also compiles by how much memory a tensor has."""
    asked, launched = [], []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: (
                asked.append((grid, options)) or {(*grid, 1, 1): lambda *these: launched.append(these)}
            )

    monkeypatch.setattr(torch.version, "cuda", cuda)
    kernel, launch, x = Kernel(), Launches(most=6), torch.zeros(24)
    for tensor in (x, x.clone(), x[4:], x.view(4, 6)):  # of one kind, as strides are arguments
        launch(kernel, 3, tensor, 6, None, num_warps=4)
    assert len(launched) == (3 if cuda else 0)
    assert asked == [((3,), {"num_warps": 4})] * (1 if cuda else 4)
    asked.clear()
    others = [(3, x[1:], 6, None), (3, x.double(), 6, None), (3, x, 7, None), (3, x, 6, x), (4, x, 6, None)]
    for arguments in others * 2:
        launch(kernel, *arguments, num_warps=4)
    assert len(asked) == (5 if cuda else 10)
    launch(kernel, 5, x, 6, None, num_warps=4)
    assert len(launch.compiled) == bool(cuda)
