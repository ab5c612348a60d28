"""Modules over the kernels: parameters and outputs of transformers' modules."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from liger_losses.modules import GatedRMSNorm, GeGLUMLP, LayerNorm, RMSNorm, SwiGLUMLP
from tests.kernels.cases import DEVICE
from tests.layers.eager import normal
from tests.models import randomised

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


OF_TRANSFORMERS = ("Llama", "Gemma", "Olmo2", "Qwen3Next", "Zamba2", "LlamaMLP", "GemmaMLP")
LAYER_NORMS = {"LayerNorm": {}, "no bias": {"bias": False}, "no weight": {"elementwise_affine": False}}


def modules(name):
    """A module of transformers or torch, ours, and how many inputs they take."""
    from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    config = SimpleNamespace(hidden_size=24, intermediate_size=40, mlp_bias=True, hidden_act="silu")
    gelu = SimpleNamespace(hidden_size=24, intermediate_size=40, hidden_act="gelu_pytorch_tanh")
    return {
        "Llama": (LlamaRMSNorm(24, eps=1e-5), RMSNorm(24, eps=1e-5), 1),
        "Gemma": (GemmaRMSNorm(24), RMSNorm(24, offset=1.0, multiply="fp32"), 1),
        "Olmo2": (Olmo2RMSNorm(24), RMSNorm(24, multiply="fp32"), 1),
        "Qwen3Next": (Qwen3NextRMSNormGated(24), GatedRMSNorm(24), 2),
        "Zamba2": (Zamba2RMSNormGated(24, 24), GatedRMSNorm(24, gate_first=True), 2),
        "LlamaMLP": (LlamaMLP(config), SwiGLUMLP(24, 40, bias=True), 1),
        "GemmaMLP": (GemmaMLP(gelu), GeGLUMLP(24, 40), 1),
        **{key: (torch.nn.LayerNorm(24, **given), LayerNorm(24, **given), 1) for key, given in LAYER_NORMS.items()},
    }[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*OF_TRANSFORMERS, *LAYER_NORMS])
def test_state_dicts_load_and_outputs_agree(name, dtype):
    pytest.importorskip("transformers")
    theirs, ours, count = modules(name)
    theirs, ours = randomised(theirs).to(DEVICE, dtype), ours.to(DEVICE, dtype)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    tolerance = TOLERANCE if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    outputs, gradients = [], []
    for module in (ours, theirs):
        x = [normal(2, 5, 24, seed=i, dtype=dtype) for i in range(count)]
        outputs.append(module(*x))
        gradients.append(
            torch.autograd.grad(outputs[-1], [*x, *module.parameters()], normal(2, 5, 24, seed=9, dtype=dtype))
        )
    assert (outputs[0] != outputs[1]).float().mean() < 0.05 or dtype == torch.float32  # by another rule of rounding
    torch.testing.assert_close(*outputs, **tolerance)
    torch.testing.assert_close(*[found[0] for found in gradients], **tolerance)
    torch.testing.assert_close(*gradients, rtol=tolerance["rtol"], atol=10 * tolerance["atol"])


def test_exact_gelu():
    mlp = GeGLUMLP(24, 40, approximate="none").to(DEVICE)
    x = normal(3, 24)
    expected = mlp.down_proj(F.gelu(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), expected, **TOLERANCE)
    with pytest.raises(ValueError, match="approximate must be one of tanh, none, got 'erf'"):
        GeGLUMLP(24, 40, approximate="erf")


@pytest.mark.parametrize("make", [RMSNorm, LayerNorm, partial(SwiGLUMLP, intermediate_size=16)])
def test_on_the_meta_device(make):
    out = make(8, device="meta")(torch.randn(2, 8, device="meta"))
    assert out.shape == (2, 8)
    assert out.is_meta
