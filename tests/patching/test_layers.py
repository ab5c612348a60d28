"""Which norms and gated MLPs are recognised, and which near misses are left."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_losses.patching.mlps import GatedMLP
from liger_losses.patching.patch import patch
from liger_losses.patching.swap import replacement_of

transformers = pytest.importorskip("transformers")


class RMS(nn.Module):
    """Llama's, in parts that the near misses below replace."""

    def __init__(self, size=32, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def normalise(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x):
        return self.weight * self.normalise(x.float()).to(x.dtype)


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


def variant(base, **members):
    return type("Variant", (base,), members)()


def test_a_gate_that_is_named_or_left_out():
    """Without it, the original runs."""
    plain = transformers.models.bamba.modeling_bamba.BambaRMSNormGated(32, 32)
    ours, x, gate = copy.deepcopy(plain), torch.randn(3, 5, 32), torch.randn(3, 5, 32)
    assert patch(ours, loss_head=False).counts == {"gated_rms_norm (gate first)": 1}
    assert torch.equal(ours(x), plain(x))
    torch.testing.assert_close(replacement_of(ours).call(ours, x, gate=gate), plain(x, gate), rtol=1e-5, atol=1e-6)


def variant_with(name, value, **members):
    """A norm with one attribute more."""
    norm = variant(RMS, **members)
    setattr(norm, name, value)
    return norm


#: What a module may do around the forward of its base.
AROUND = {
    "scaled": lambda self, base, x: base(x) * 1.0001,
    "shifted": lambda self, base, x: base(x) + 1e-4,
    "dropped": lambda self, base, x: F.dropout(base(x), 0.1, self.training),
    "noisy": lambda self, base, x: base(x) + 0 * torch.randn(()),
    "for evaluation": lambda self, base, x: base(x) if self.training else x,
    "for training": lambda self, base, x: base(x) * (1 if self.training else 1.01),
    "for inference": lambda self, base, x: base(x) * (1 if torch.is_grad_enabled() else 1.01),
    "counting": lambda self, base, x: (setattr(self, "calls", getattr(self, "calls", 0) + 1), base(x))[1],
    "a pair": lambda self, base, x: (base(x), x),
    "detached": lambda self, base, x: base(x).detach(),
    "another gradient": lambda self, base, x: base(x) + 0.01 * (x - x.detach()),
    "residual": lambda self, base, x: base(x) + x,
}


def _unbiased(self, x):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + self.variance_epsilon)


def _called_twice(self, x):
    return self.down_proj(self.product(self.gate_proj(x), self.up_proj(x)) + 0 * self.gate_proj(x))


#: What is in the place of a part of a base.
PARTS = {
    (RMS, "forward"): {
        "frozen": lambda self, x: self.weight.detach() * self.normalise(x.float()).to(x.dtype),
        "input clamped": lambda self, x: RMS.forward(self, x.clamp(-60000, 60000)),
        "output clamped": lambda self, x: RMS.forward(self, x).clamp(-20, 20),
        "low precision": lambda self, x: self.weight * self.normalise(x),
        "output in fp32": lambda self, x: self.weight * self.normalise(x.float()),
        "weight clamped": lambda self, x: self.weight.clamp(-10, 10) * self.normalise(x.float()).to(x.dtype),
        "in place": lambda self, x: self.weight * x.copy_(self.normalise(x.float()).to(x.dtype)),
        "gate swapped": lambda self, gate, x: (RMS.forward(self, x) * F.silu(gate.float())).to(x.dtype),
        "gate of a sigmoid": lambda self, x, gate: (RMS.forward(self, x) * gate.float().sigmoid()).to(x.dtype),
    },
    (RMS, "normalise"): {
        "other eps": lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2e-5),
        "unbiased": _unbiased,
    },
    (MLP, "product"): {
        "dropped": lambda self, gate, up: F.dropout(self.act(gate) * up, 0.1, self.training),
        "relu": lambda self, gate, up: F.relu(gate) * up,
        "quick gelu": lambda self, gate, up: gate * torch.sigmoid(1.702 * gate) * up,
        "scaled": lambda self, gate, up: self.act(gate) * up * 1.0001,
        "detached": lambda self, gate, up: self.act(gate.detach()) * up,
        "in fp32": lambda self, gate, up: (self.act(gate.float()) * up.float()).to(gate.dtype),
        "up clamped": lambda self, gate, up: self.act(gate) * up.clamp(-100, 100),
        "gate clamped": lambda self, gate, up: self.act(gate.clamp(max=20)) * up,
        "added": lambda self, gate, up: self.act(gate) + up,
    },
    (MLP, "forward"): {
        "input scaled": lambda self, x: MLP.forward(self, 1.0001 * x),
        "called twice": _called_twice,
        "a weight": lambda self, x: self.down_proj(self.product(F.linear(x, self.gate_proj.weight), self.up_proj(x))),
    },
    (Fused, "product"): {"halves": lambda self, both: self.act(both[..., :48].flip(-1)) * both[..., 48:]},
}
NEAR_MISSES = {
    f"{base.__name__}, {name}": variant(
        base, forward=lambda self, x, base=base, around=around: around(self, functools.partial(base.forward, self), x)
    )
    for base in (RMS, MLP)
    for name, around in AROUND.items()
} | {
    f"{base.__name__}, {member}, {name}": variant(base, **{member: function})
    for (base, member), functions in PARTS.items()
    for name, function in functions.items()
}
_OTHERS = (nn.LayerNorm((4, 32)), nn.GroupNorm(1, 32), nn.BatchNorm1d(32), nn.PReLU(32), nn.Identity(), nn.Softmax(-1))
NEAR_MISSES |= {type(module).__name__: module for module in _OTHERS} | {
    "cached": variant_with("seen", [], forward=lambda self, x: self.seen.append(0) or RMS.forward(self, x)),
    "biased": variant_with("bias", nn.Parameter(torch.zeros(32)), forward=lambda s, x: RMS.forward(s, x) + s.bias),
    "buffered": variant_with("scale", nn.Buffer(torch.ones(()))),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left(name):
    module = NEAR_MISSES[name]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    attributes = copy.deepcopy({k: v for k, v in vars(module).items() if not k.startswith("_")})
    report = patch(nn.ModuleList([module]), loss_head=False)
    assert replacement_of(module) is None, replacement_of(module)
    assert all(entry.reason for entry in report.entries)
    assert len(report.entries) == 1 or not name.startswith(("MLP, product", "MLP, forward", "Fused"))
    assert attributes == {k: v for k, v in vars(module).items() if not k.startswith("_")}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


Special = type("Special", (nn.Parameter,), {})
#: What is done to a norm, and why it is left; what is parametrized is no candidate.
BY_HAND = [
    (lambda norm: norm.register_forward_hook(print), "hooks"),
    (lambda norm: norm.register_forward_pre_hook(print), "hooks"),
    (lambda norm: norm.register_full_backward_hook(print), "hooks"),
    (lambda norm: setattr(norm, "forward", print), "on the instance"),
    (lambda norm: setattr(norm, "weight", nn.Parameter(torch.ones(32, dtype=torch.int8), False)), "int8"),
    (lambda norm: setattr(norm, "weight", Special(torch.ones(32))), "Special"),
    (lambda norm: norm.compile(backend="eager"), "compiled"),
    (lambda norm: nn.utils.parametrizations.weight_norm(norm, dim=None), None),
]


@pytest.mark.parametrize(("change", "reason"), BY_HAND)
def test_what_was_changed_by_hand_is_left(change, reason):
    change(norm := RMS())
    report = patch(norm, loss_head=False)
    assert not report.replaced
    assert reason is None or reason in report.left[0].reason


def test_a_norm_whose_weight_is_elsewhere():
    module = RMS()
    module.weight = nn.Parameter(torch.empty(0))
    module.weight.ds_shape = torch.Size([32])  # as DeepSpeed leaves it between uses
    assert len(patch(module, loss_head=False).replaced) == 1
    module.weight = nn.Parameter(torch.randn(32))
    x = torch.randn(3, 32)
    torch.testing.assert_close(module(x), RMS.forward(module, x))


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
