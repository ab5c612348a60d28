"""Modules over the kernels: parameters and outputs of transformers' modules."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from liger_losses.modules import GatedRMSNorm, GeGLUMLP, LayerNorm, RMSNorm, SwiGLUMLP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def hidden(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def randomised(module):
    """Parameters that a forgotten factor of one would not hide behind."""
    g = torch.Generator().manual_seed(1)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5 + 0.1)
    return module.to(DEVICE)


def transformers_modules():
    """Pairs of a module of transformers and ours."""
    from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    config = SimpleNamespace(hidden_size=24, intermediate_size=40, mlp_bias=True, hidden_act="silu")
    gelu = SimpleNamespace(hidden_size=24, intermediate_size=40, hidden_act="gelu_pytorch_tanh")
    return {
        "LlamaRMSNorm": (LlamaRMSNorm(24, eps=1e-5), RMSNorm(24, eps=1e-5)),
        "GemmaRMSNorm": (GemmaRMSNorm(24), RMSNorm(24, offset=1.0, multiply="fp32")),
        "Olmo2RMSNorm": (Olmo2RMSNorm(24), RMSNorm(24, multiply="fp32")),
        "LlamaMLP": (LlamaMLP(config), SwiGLUMLP(24, 40, bias=True)),
        "GemmaMLP": (GemmaMLP(gelu), GeGLUMLP(24, 40)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["LlamaRMSNorm", "GemmaRMSNorm", "Olmo2RMSNorm", "LlamaMLP", "GemmaMLP"])
def test_state_dicts_of_transformers_load_and_outputs_agree(name, dtype):
    pytest.importorskip("transformers")
    theirs, ours = transformers_modules()[name]
    theirs = randomised(theirs).to(dtype)
    ours = ours.to(DEVICE, dtype)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x, y = (hidden(2, 5, 24, dtype=dtype).requires_grad_() for _ in range(2))
    ours(x).float().square().sum().backward()
    theirs(y).float().square().sum().backward()
    tolerance = TOLERANCE if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(ours(x), theirs(y), **tolerance)
    torch.testing.assert_close(x.grad, y.grad, **tolerance)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=tolerance["rtol"], atol=10 * tolerance["atol"])


def test_gated_norms_equal_those_of_transformers():
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    x, gate = hidden(3, 24), hidden(3, 24, seed=1)
    for theirs, ours in (
        (Qwen3NextRMSNormGated(24), GatedRMSNorm(24)),
        (Zamba2RMSNormGated(24, 24), GatedRMSNorm(24, gate_first=True)),
    ):
        theirs, ours = randomised(theirs), ours.to(DEVICE)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x, gate), theirs(x, gate), **TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_layer_norm_equals_torch(options):
    theirs, ours = randomised(torch.nn.LayerNorm(24, **options)), LayerNorm(24, **options).to(DEVICE)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(hidden(3, 24)), theirs(hidden(3, 24)), **TOLERANCE)


def test_exact_gelu():
    mlp = GeGLUMLP(24, 40, approximate="none").to(DEVICE)
    x = hidden(3, 24)
    expected = mlp.down_proj(F.gelu(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), expected, **TOLERANCE)
    with pytest.raises(ValueError, match="approximate must be one of tanh, none, got 'erf'"):
        GeGLUMLP(24, 40, approximate="erf")


@pytest.mark.parametrize("make", [RMSNorm, LayerNorm, partial(SwiGLUMLP, intermediate_size=16)])
def test_on_the_meta_device(make):
    out = make(8, device="meta")(torch.randn(2, 8, device="meta"))
    assert out.shape == (2, 8)
    assert out.is_meta
