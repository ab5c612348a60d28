"""Which MLPs are recognised, and which near misses are left."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_losses.patching.mlps import GatedMLP
from liger_losses.patching.patch import patch
from liger_losses.patching.swap import replacement_of

pytest.importorskip("transformers")


# Gated MLPs


class MLP(nn.Module):
    def __init__(self, act=F.silu, size=32, inner=48):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner)
        self.down_proj = nn.Linear(inner, size)
        self.act, self.limit, self.alpha = act, 7.0, 1.702

    def product(self, gate, up):
        return self.act(gate) * up

    def forward(self, x):
        return self.down_proj(self.product(self.gate_proj(x), self.up_proj(x)))


class Fused(nn.Module):
    def __init__(self, size=32, inner=48):
        super().__init__()
        self.both, self.out = nn.Linear(size, 2 * inner), nn.Linear(inner, size)
        self.act = nn.GELU()

    def product(self, both):
        gate, up = both.chunk(2, -1)
        return self.act(gate) * up

    def forward(self, x):
        return self.out(self.product(self.both(x)))


def mlp(name, base=MLP, **members):
    return type(name, (base,), members)()


def _clamped(self, gate, up):
    gate = gate.clamp(max=self.limit)
    return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + 1)


MLPS = [
    (MLP(), "glu (silu)"),
    (MLP(nn.GELU()), "glu (gelu)"),
    (MLP(nn.GELU("tanh")), "glu (gelu_tanh)"),
    (
        mlp("UpFirst", forward=lambda self, x: self.down_proj(self.up_proj(x) * self.act(self.gate_proj(x)))),
        "glu (silu)",
    ),
    (mlp("Clamped", product=_clamped), "glu (silu, limit 7)"),
    (Fused(), "glu_fused (gelu)"),
    (
        mlp("SecondHalf", Fused, product=lambda self, both: both.chunk(2, -1)[0] * F.silu(both.chunk(2, -1)[1])),
        "glu_fused (silu)",
    ),
    (
        mlp("Interleaved", Fused, product=lambda self, both: F.silu(both[..., ::2]) * both[..., 1::2]),
        "glu_fused (silu)",
    ),
]


@pytest.mark.parametrize(
    ("module", "name"), MLPS, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_gated_mlps_are_recognised(module, name):
    module = copy.deepcopy(module)
    original, x = copy.deepcopy(module), torch.randn(2, 7, 32)
    report = patch(nn.ModuleList([module]), loss_head=False)
    assert [entry.replaced_by for entry in report.entries] == [name]
    torch.testing.assert_close(module(x), original(x), rtol=1e-5, atol=1e-6)
    module(x).sum().backward()
    original(x).sum().backward()
    for mine, theirs in zip(module.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


MLP_NEAR_MISSES = [
    mlp("Dropped", product=lambda self, gate, up: F.dropout(self.act(gate) * up, 0.1, self.training)),
    mlp("Relu", product=lambda self, gate, up: F.relu(gate) * up),
    mlp("QuickGelu", product=lambda self, gate, up: gate * torch.sigmoid(1.702 * gate) * up),
    mlp("Scaled", product=lambda self, gate, up: self.act(gate) * up * 1.0001),
    mlp("Detached", product=lambda self, gate, up: self.act(gate.detach()) * up),
    mlp("InFloat", product=lambda self, gate, up: (self.act(gate.float()) * up.float()).to(gate.dtype)),
    mlp("UpClamped", product=lambda self, gate, up: self.act(gate) * up.clamp(-100, 100)),
    mlp("GateClamped", product=lambda self, gate, up: self.act(gate.clamp(max=20)) * up),
    mlp("Added", product=lambda self, gate, up: self.act(gate) + up),
    mlp("Residual", forward=lambda self, x: MLP.forward(self, x) + x),
    mlp("OutputScaled", forward=lambda self, x: MLP.forward(self, x) * 1.0001),
    mlp("InputScaled", forward=lambda self, x: MLP.forward(self, 1.0001 * x)),
    mlp("OutputDetached", forward=lambda self, x: MLP.forward(self, x).detach()),
    mlp(
        "CalledTwice",
        forward=lambda self, x: self.down_proj(
            self.product(self.gate_proj(x), self.up_proj(x)) + 0 * self.gate_proj(x)
        ),
    ),
    mlp(
        "Counting",
        forward=lambda self, x: (setattr(self, "calls", getattr(self, "calls", 0) + 1), MLP.forward(self, x))[1],
    ),
    mlp(
        "ReadsWeights",
        forward=lambda self, x: self.down_proj(self.product(F.linear(x, self.gate_proj.weight), self.up_proj(x))),
    ),
    mlp("Pair", forward=lambda self, x: (MLP.forward(self, x), None)),
    mlp("ByHalves", Fused, product=lambda self, both: self.act(both[..., :48].flip(-1)) * both[..., 48:]),
]


@pytest.mark.parametrize("module", MLP_NEAR_MISSES, ids=lambda module: type(module).__name__)
def test_near_misses_of_gated_mlps_are_left(module):
    (entry,) = patch(nn.ModuleList([module]), loss_head=False).entries
    assert entry.replaced_by is None
    assert entry.reason


def test_mlps_keep_calling_their_layers():
    module = MLP()
    calls = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(module, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    patch(module, loss_head=False)
    assert isinstance(replacement_of(module), GatedMLP)
    module(torch.randn(2, 32))
    assert calls == ["gate_proj", "up_proj", "down_proj"]


def test_activations_that_are_watched_or_keep_state_are_left():
    class Counting(nn.SiLU):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    watched = MLP(nn.SiLU())
    watched.act.register_forward_hook(lambda *_: None)
    buffered = MLP(nn.SiLU())
    buffered.act.register_buffer("seen", torch.zeros(()))
    report = patch(nn.ModuleList([watched, MLP(Counting()), buffered]), loss_head=False)
    assert not report.replaced
    assert [entry.reason for entry in report.left] == ["its act has hooks", "float32: it changes its own attributes"]


def test_what_is_hung_on_parts_of_an_mlp_later_is_called():
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": MLP(nn.SiLU())})
    patch(model)
    x, calls = torch.randn(3, model["mlp"].gate_proj.in_features), []
    expected = model["mlp"](x)
    layer = model["mlp"].down_proj

    def watched(attach):
        handle = attach(lambda *given: calls.append(len(given)))
        torch.testing.assert_close(model["mlp"](x), expected)
        handle.remove()
        assert calls
        calls.clear()

    watched(layer.register_forward_hook)
    watched(layer.register_forward_pre_hook)
    watched(model["mlp"].act.register_forward_hook)
    watched(nn.modules.module.register_module_forward_hook)
    original = nn.Linear.forward
    layer.forward = lambda x: calls.append(x) or original(layer, x)
    torch.testing.assert_close(model["mlp"](x), expected)
    assert calls
