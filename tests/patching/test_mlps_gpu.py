"""MLPs on a GPU: gradients written in place, and how much memory a step takes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_losses import patch, unpatch
from liger_losses.layers.glu import glu_linear, glu_mlp
from liger_losses.modules import SwiGLUMLP

pytestmark = pytest.mark.gpu


def made(*sizes, seed=0, dtype=torch.bfloat16):
    return torch.randn(*sizes, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["two", "halves", "interleaved"])
@pytest.mark.parametrize("sizes", [(2, 999, 1031), (1, 4096, 8192)], ids=str)
def test_gradients_in_place_are_those_in_new_memory(layout, sizes, dtype):
    """To the bit: no block reads what another has written."""
    *rows, width = sizes
    count = 2 if layout == "two" else 1
    weights = [made(2 * width // count, 64, seed=i, dtype=dtype).requires_grad_() for i in range(count)]
    x = made(*rows, 64, seed=2, dtype=dtype).requires_grad_()
    down = made(64, width, seed=3, dtype=dtype).requires_grad_()
    leaves, (gate, *up) = (x, *weights, down), [(weight, None) for weight in weights]
    interleaved = layout == "interleaved"
    out = glu_mlp(x, gate, up[0] if up else None, (down, None), interleaved=interleaved)
    inner = [F.linear(x, weight) for weight in weights]
    apart = glu_linear(*inner, *[None] * (2 - count), down, interleaved=interleaved)
    found = [torch.autograd.grad(o, leaves[1:], torch.ones_like(out)) for o in (out, apart)]
    assert torch.equal(out, apart)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def peak(module, x):
    """The most that forward and backward of a checkpointed MLP allocate, the gradients among it, in bytes."""
    for _ in range(2):
        module.zero_grad()
        x.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        checkpoint(lambda x: module(x) + x, x, use_reentrant=False).sum().backward()
    return torch.cuda.max_memory_allocated() - before


def test_memory_of_an_mlp():
    """Three tensors of the intermediate size at the peak; with tiles, three of a tile."""
    tokens, hidden, inner, tile = 32768, 512, 4096, 2048
    module = nn.ModuleDict({"mlp": SwiGLUMLP(hidden, inner, device="cuda", dtype=torch.bfloat16)})
    x = made(1, tokens, hidden).requires_grad_()
    weights = 3 * hidden * inner
    patch(module)
    whole = peak(module["mlp"], x)
    assert whole <= 2 * (3 * tokens * inner + 4 * tokens * hidden + 2 * weights)
    unpatch(module)
    patch(module, tile_mlps=tile)
    tiled = peak(module["mlp"], x)
    assert tiled <= 2 * (3 * tile * inner + 6 * tokens * hidden + 5 * weights)
