"""Which norms are recognised, and which near misses are left."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_losses.patching.patch import patch
from liger_losses.patching.swap import replacement_of

pytest.importorskip("transformers")


# Norms


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


class Gemma(RMS):
    def forward(self, x):
        return (self.normalise(x.float()) * (1.0 + self.weight.float())).type_as(x)


class Wide(RMS):
    def forward(self, x):
        return (self.weight * self.normalise(x.float())).to(x.dtype)


class Weightless(nn.Module):
    eps = 1e-6

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class Centred(RMS):
    def forward(self, x):
        u = x.float()
        u = u - u.mean(-1, keepdim=True)
        return (self.weight.float() * self.normalise(u)).to(x.dtype)


class GatedAfter(RMS):
    def forward(self, x, gate):
        y = self.weight * self.normalise(x.float()).to(x.dtype)
        return (y * F.silu(gate.float())).to(x.dtype)


class GatedBefore(RMS):
    def forward(self, x, gate=None):
        u = x.float()
        if gate is not None:
            u = u * F.silu(gate.float())
        return self.weight * self.normalise(u).to(x.dtype)


NORMS = [
    (RMS(), "rms_norm"),
    (RMS(48, 0.1), "rms_norm"),
    (Gemma(), "rms_norm (1 + weight, fp32)"),
    (Wide(), "rms_norm (fp32)"),
    (Weightless(), "rms_norm"),
    (Centred(), "layer_norm"),
    (GatedAfter(), "gated_rms_norm"),
    (GatedBefore(), "gated_rms_norm (gate first)"),
    (nn.LayerNorm(32), "layer_norm"),
    (nn.LayerNorm(32, bias=False), "layer_norm"),
    (nn.LayerNorm(32, elementwise_affine=False), "layer_norm"),
    (nn.RMSNorm(32, eps=1e-6), "rms_norm (fp32)"),
]


@pytest.mark.parametrize(
    ("norm", "name"), NORMS, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_norms_are_recognised(norm, name):
    norm = copy.deepcopy(norm)
    original = copy.deepcopy(norm)
    size = next((p.numel() for p in norm.parameters()), 32)
    inputs = [torch.randn(3, 5, size) for _ in range(2 if "gated" in name else 1)]
    report = patch(nn.ModuleList([norm]), loss_head=False)
    assert [entry.replaced_by for entry in report.entries] == [name]
    torch.testing.assert_close(norm(*inputs), original(*inputs), rtol=1e-5, atol=1e-6)
    if name.endswith("(gate first)"):
        assert torch.equal(norm(inputs[0]), original(inputs[0]))  # the original's business
        torch.testing.assert_close(norm(inputs[0], gate=inputs[1]), original(*inputs), rtol=1e-5, atol=1e-6)


def near_miss(name, **members):
    return type(name, (RMS,), members)()


def _count(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return RMS.forward(self, x)


def _count_elsewhere(self, x):
    self.variance_epsilon  # noqa: B018
    self.seen.append(1)
    return RMS.forward(self, x)


class Cached(RMS):
    def __init__(self):
        super().__init__()
        self.seen = []

    forward = _count_elsewhere


class Biased(RMS):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        return super().forward(x) + self.bias


class Buffered(RMS):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


NEAR_MISSES = [
    near_miss("FrozenWeight", forward=lambda self, x: self.weight.detach() * self.normalise(x.float()).to(x.dtype)),
    near_miss("InputClamped", forward=lambda self, x: RMS.forward(self, x.clamp(-60000, 60000))),
    near_miss("OutputClamped", forward=lambda self, x: RMS.forward(self, x).clamp(-20, 20)),
    near_miss("Dropped", forward=lambda self, x: F.dropout(RMS.forward(self, x), 0.1, self.training)),
    near_miss("Noisy", forward=lambda self, x: RMS.forward(self, x) + 0 * torch.randn(1)),
    near_miss("OtherEps", normalise=lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2e-5)),
    near_miss(
        "Unbiased",
        normalise=lambda self, x: (
            x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + self.variance_epsilon)
        ),
    ),
    near_miss("Scaled", forward=lambda self, x: RMS.forward(self, x) * 1.0001),
    near_miss("Shifted", forward=lambda self, x: RMS.forward(self, x) + 1e-4),
    near_miss("LowPrecision", forward=lambda self, x: self.weight * self.normalise(x)),
    near_miss("OutputInFloat", forward=lambda self, x: self.weight * self.normalise(x.float())),
    near_miss("EvaluationOnly", forward=lambda self, x: RMS.forward(self, x) if self.training else x),
    near_miss("TrainingOnly", forward=lambda self, x: RMS.forward(self, x) * (1 if self.training else 1.01)),
    near_miss("InferenceOnly", forward=lambda self, x: RMS.forward(self, x) * (1 if torch.is_grad_enabled() else 1.01)),
    near_miss(
        "WeightClamped", forward=lambda self, x: self.weight.clamp(-10, 10) * self.normalise(x.float()).to(x.dtype)
    ),
    near_miss("InPlace", forward=lambda self, x: self.weight * x.copy_(self.normalise(x.float()).to(x.dtype))),
    near_miss("Counting", forward=_count),
    near_miss("Pair", forward=lambda self, x: (RMS.forward(self, x), x)),
    near_miss("ExtraGradient", forward=lambda self, x: RMS.forward(self, x) + 0.01 * (x - x.detach())),
    near_miss("GateSwapped", forward=lambda self, gate, x: (RMS.forward(self, x) * F.silu(gate.float())).to(x.dtype)),
    near_miss(
        "SigmoidGate", forward=lambda self, x, gate: (RMS.forward(self, x) * torch.sigmoid(gate.float())).to(x.dtype)
    ),
    Cached(),
    Biased(),
    Buffered(),
    nn.LayerNorm((4, 32)),
    nn.GroupNorm(1, 32),
    nn.BatchNorm1d(32),
    nn.PReLU(32),
    nn.Identity(),
    nn.Softmax(-1),
]


@pytest.mark.parametrize("module", NEAR_MISSES, ids=lambda module: type(module).__name__)
def test_near_misses_of_norms_are_left(module):
    before = {name: value.clone() for name, value in module.state_dict().items()}
    attributes = copy.deepcopy({k: v for k, v in vars(module).items() if not k.startswith("_")})
    report = patch(nn.ModuleList([module]), loss_head=False)
    assert replacement_of(module) is None, replacement_of(module)
    assert all(entry.reason for entry in report.entries)
    assert attributes == {k: v for k, v in vars(module).items() if not k.startswith("_")}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_what_was_changed_by_hand_is_left():
    def hooked(register):
        module = RMS()
        getattr(module, register)(lambda *args: None)
        return module

    replaced = RMS()
    replaced.forward = lambda x: x
    quantised = RMS()
    quantised.weight = nn.Parameter(torch.ones(32, dtype=torch.int8), requires_grad=False)
    subclassed = RMS()
    subclassed.weight = type("Special", (nn.Parameter,), {})(torch.ones(32))
    compiled = RMS()
    compiled.compile(backend="eager")
    parametrized = nn.utils.parametrizations.weight_norm(RMS(), dim=None)
    registers = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
    modules = [*map(hooked, registers), replaced, quantised, subclassed, compiled, parametrized]
    report = patch(nn.ModuleList(modules), loss_head=False)
    assert not report.replaced
    reasons = [entry.reason for entry in report.left]
    assert sum("hooks" in reason for reason in reasons) == 3
    for part in ("on the instance", "int8", "Special", "compiled"):
        assert any(part in reason for reason in reasons), reasons


def test_a_norm_whose_weight_is_elsewhere():
    module = RMS()
    module.weight = nn.Parameter(torch.empty(0))
    module.weight.ds_shape = torch.Size([32])  # as DeepSpeed leaves it between uses
    assert len(patch(module, loss_head=False).replaced) == 1
    module.weight = nn.Parameter(torch.randn(32))
    x = torch.randn(3, 32)
    torch.testing.assert_close(module(x), RMS.forward(module, x))
