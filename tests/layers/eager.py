"""How tests compare a kernel of layers with eager PyTorch."""

import torch

from tests.kernels.cases import DEVICE
from tests.reference import assert_as_exact_as_plain


def normal(*shape, dtype=torch.float32, seed=0, scale=1.0, grad=True):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=g) * scale).to(DEVICE, dtype).requires_grad_(grad)


def run(function, inputs):
    """Outputs, and the gradients of all inputs that require one for fixed random upstream gradients."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [normal(*out.shape, seed=i + 7, grad=False).to(out.dtype) for i, out in enumerate(outputs)]
    needed = [x for x in inputs if x is not None and x.requires_grad]
    return outputs, torch.autograd.grad(outputs, needed, upstream)


def check(ours, plain, inputs, scale=0.0):
    """Dtypes and shapes equal the plain formula's, errors of outputs and gradients are at most twice its errors,
    inputs are left alone, and on a GPU a second run gives the same bits. ``scale`` is of terms that cancel."""
    before = [None if x is None else x.detach().clone() for x in inputs]
    exact_inputs = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    found, expected, exact = run(ours, inputs), run(plain, inputs), run(plain, exact_inputs)
    again = run(ours, inputs) if DEVICE == "cuda" else found  # the interpreter runs one program after another
    for kind, *values in zip(("output", "gradient"), found, again, expected, exact, strict=True):
        for i, (a, b, c, d) in enumerate(zip(*values, strict=True)):
            assert a.dtype == c.dtype
            assert a.shape == c.shape
            assert torch.equal(a, b)
            assert_as_exact_as_plain(a, c, d.detach(), f"{kind} {i}", scale=scale)
    assert all(x is None or torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def wide(x):
    return x if x.dtype == torch.float64 else x.float()
