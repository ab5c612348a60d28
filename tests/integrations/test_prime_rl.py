"""prime-rl's heads, called as its own code calls them."""

import importlib

import pytest
import torch

from liger_losses.integrations import prime_rl
from tests.reference import double, plain_statistics, problem, relative_error

PRIME = """
import torch

class {name}(torch.nn.Linear):
    def __init__(self, in_features, out_features, chunk_size{more}):
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size
        {keep}

    def forward(self, hidden_states, labels=None, temperature=None):
        return "prime-rl's"
"""


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_prime_rl(softcap, framework, installed):
    name, module = "FusedOutputLinear", "prime_rl.trainer.models.layers.lm_head"
    plain = PRIME.format(name=name, more="", keep="")
    gemma = PRIME.format(name=f"Gemma{name}", more=", softcap", keep="self.softcap = softcap")
    framework(**{module: plain, f"{module}_gemma": gemma})
    installed(prime_rl)
    hidden, weight, labels, _ = problem(shape=(2, 7), masked=0.0, dtype=torch.float32)
    if softcap is None:
        layer = importlib.import_module(module).FusedOutputLinear(24, 61, 512)
    else:
        layer = importlib.import_module(f"{module}_gemma").GemmaFusedOutputLinear(24, 61, 512, softcap)
    layer.weight = torch.nn.Parameter(weight.detach().clone())
    temperature = torch.linspace(0.5, 1.5, 14).view(2, 7)
    found = layer(hidden, labels, temperature=temperature)
    out = found["logprobs"], found["entropy"]
    exact = double(hidden, layer.weight)
    values = plain_statistics(*exact, labels, temperature=temperature.double()[..., None], softcap=softcap)
    expected = values["logp"], values["entropy"]
    upstream = torch.randn(2, 7, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, (hidden, layer.weight), (upstream, -upstream))
    exact_grads = torch.autograd.grad(expected, exact, (upstream.double(), -upstream.double()))
    for ours, value in zip((*out, *grads), (*expected, *exact_grads), strict=True):
        assert relative_error(ours, value) < 1e-5
    nothing = layer(hidden[:, :0], labels[:, :0], temperature=temperature[:, :0])
    assert nothing["logprobs"].shape == nothing["entropy"].shape == (2, 0)
    assert not torch.autograd.grad(nothing["logprobs"].sum(), layer.weight)[0].any()
    with pytest.raises(ValueError, match=r"FusedOutputLinear takes labels= and temperature="):
        layer(hidden, labels)
    prime_rl.uninstall()
    assert layer(hidden) == "prime-rl's"
