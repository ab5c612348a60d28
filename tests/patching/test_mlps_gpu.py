"""MLPs on a GPU: gradients written in place, and how much memory a step takes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_losses.layers.glu import glu_linear, glu_mlp
from liger_losses.modules import SwiGLUMLP
from liger_losses.patching.patch import patch, unpatch

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
    x, down = (
        made(*rows, 64, seed=2, dtype=dtype).requires_grad_(),
        made(64, width, seed=3, dtype=dtype).requires_grad_(),
    )
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
    patch(module, tile_mlps=tile)
    tiled = peak(module["mlp"], x)
    assert tiled <= 2 * (3 * tile * inner + 6 * tokens * hidden + 5 * weights)


def test_tiles_in_bf16_are_as_exact_as_the_whole():
    module = nn.ModuleDict({"mlp": SwiGLUMLP(256, 1024, device="cuda", dtype=torch.bfloat16)})
    exact = SwiGLUMLP(256, 1024, device="cuda", dtype=torch.float64)
    exact.load_state_dict(module["mlp"].state_dict())
    x = made(2, 1000, 256).requires_grad_()

    def run(mlp, x):
        x = x.detach().requires_grad_()
        out = mlp(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *mlp.parameters()])]

    wanted, whole = run(exact, x.double()), run(module["mlp"], x)
    patch(module, tile_mlps=128)
    for tiled, plain, e in zip(run(module["mlp"], x), whole, wanted, strict=True):
        assert (tiled - e).norm() <= 2 * (plain - e).norm()


@pytest.mark.parametrize("options", [{}, {"tile_mlps": 100}], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_small_llama(checkpointing, options):
    """Loss and gradients as exact as the plain model's, with MLPs in place or in tiles."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    exact = transformers.LlamaForCausalLM(config).to("cuda", torch.float32).train()
    ids = torch.randint(512, (2, 300), device="cuda")

    def run(model):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(weight.grad for weight in model.parameters())]

    plain = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    plain.load_state_dict(exact.state_dict())
    exact.load_state_dict(plain.state_dict())  # the rounded weights
    wanted, expected = run(exact), run(plain)
    assert patch(plain, **options).counts
    found = run(plain)
    unpatch(plain)
    for a, p, e in zip(found, expected, wanted, strict=True):
        assert (a - e).norm() <= 2 * (p - e).norm() + 1e-4 * e.norm()
