"""What kernels' autograd functions share."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_losses import LigerFusedLinearCrossEntropyLoss, functional, linear_logps
from liger_losses.kernels.autograd import edges, scale_
from liger_losses.layers.glu import glu, glu_linear, glu_mlp
from liger_losses.layers.layer_norm import layer_norm
from liger_losses.layers.rms_norm import add_rms_norm, rms_norm
from liger_losses.layers.rope import rope
from liger_losses.patching.tiles import compute_tiled
from liger_losses.sequences import split_by_coefficient
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


LABELS = torch.tensor([3, 0, 9, 4, 1, 7], device=DEVICE)
ANGLES = tuple(f(torch.arange(192.0, device=DEVICE).view(1, 6, 32)) for f in (torch.cos, torch.sin))


def tiled(h, w):
    module = nn.Linear(32, 64, bias=False, device=DEVICE)
    module.weight = w
    return compute_tiled(lambda module, x: module(x).square(), module, h, 2)


def merged(h, w):
    coefficients = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], device=DEVICE)
    return (split_by_coefficient(lambda rows: h[rows] * w[0], coefficients) * coefficients[:, None]).square()


#: Autograd functions with a ``once_differentiable`` backward, and calls of them with ``h [6, 32]`` and ``w [64, 32]``.
USES = {
    "_Statistics": lambda h, w: linear_logps(h, w, LABELS),
    "_Losses": lambda h, w: LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)(w, h, LABELS),
    "_SumOfTerms": lambda h, w: functional.jsd(F.linear(h, w).log_softmax(-1), F.linear(h, w).detach().log_softmax(-1)),
    "_GLU": lambda h, w: glu(h, w[:6]),
    "_GLULinear": lambda h, w: glu_linear(h, h, w),
    "_GLULinear of layers": lambda h, w: glu_mlp(h, (w, None), (w, None), (w.t().contiguous(), None)),
    "_GLULinear of frozen layers": lambda h, w: glu_mlp(h, *[(w.detach(), None)] * 2, (w.t(), None)),
    "_Norm": lambda h, w: rms_norm(h, w[0]).square(),
    "_Norm of a sum": lambda h, w: add_rms_norm(h, w[:6], w[0])[0],
    "_Norm centered": lambda h, w: layer_norm(h, w[0]),
    "_Rope": lambda h, w: rope(h[None, None], w[None, None, :6], *ANGLES)[0].square(),
    "_Tiled": tiled,
    "_Merge": merged,
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("use", USES)
def test_second_derivatives_raise(use, checkpointed):
    """By each input, of which one is no leaf; first derivatives with a graph equal those without, also twice."""
    made = torch.Generator().manual_seed(3)
    leaf, w = (nn.Parameter(torch.randn(n, 32, generator=made).to(DEVICE)) for n in (6, 64))
    h = leaf * 1
    call = partial(checkpoint, USES[use], use_reentrant=False) if checkpointed else USES[use]
    out = call(h, w).sum()
    first = torch.autograd.grad(out, (h, w), retain_graph=True, allow_unused=True)
    for _ in range(2):
        gradients = torch.autograd.grad(out, (h, w), create_graph=True, allow_unused=True)
        for expected, gradient in zip(first, gradients, strict=True):
            torch.testing.assert_close(gradient, expected)
    gradient = gradients[0].square().sum()
    for inputs in (h, leaf, *([w] if gradients[1] is not None else [])):
        with pytest.raises(RuntimeError, match="second derivatives are not supported"):
            torch.autograd.grad(gradient, inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        gradient.backward()
    upstream = torch.ones(3, device=DEVICE, dtype=out.dtype)
    with pytest.raises(RuntimeError, match="is_grads_batched=True .* not supported"):
        torch.autograd.grad(USES[use](h, w).sum(), h, upstream, is_grads_batched=True)


def test_an_input_that_is_not_saved_is_freed():
    """The graph leads to it, and holds no values of it."""
    h = torch.ones(6, 8, device=DEVICE, requires_grad=True) * 1
    (edge,) = edges(h)
    assert edge.grad_fn is not None
    values = weakref.ref(h)
    del h
    assert values() is None
