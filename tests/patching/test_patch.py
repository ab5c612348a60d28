"""Patching: what must be recognised, what must not, and that a patched model is the model."""

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.coverage import model_zoo
from benchmarks.coverage.patches import check, loss_and_grads
from liger_losses.patching.mlps import GatedExperts, GatedMLP
from liger_losses.patching.norms import Norm
from liger_losses.patching.patch import AutoLigerModelForCausalLM, patch, unpatch
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.report import Entry, PatchReport
from liger_losses.patching.rotations import match as match_rotation
from liger_losses.patching.swap import replacement_of

pytest.importorskip("transformers")

FAMILIES = "llama qwen3 gemma2 gemma3_text phi3 mistral cohere olmo2 granite gpt_neox mixtral qwen3_next deepseek_v3"


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


class Statistics:
    count = 0


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
    near_miss(
        "Detached",
        forward=lambda self, x: (
            self.weight
            * (x.float() * torch.rsqrt(x.float().detach().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(
                x.dtype
            )
        ),
    ),
    near_miss("FrozenWeight", forward=lambda self, x: self.weight.detach() * self.normalise(x.float()).to(x.dtype)),
    near_miss("InputClamped", forward=lambda self, x: RMS.forward(self, x.clamp(-60000, 60000))),
    near_miss("OutputClamped", forward=lambda self, x: RMS.forward(self, x).clamp(-20, 20)),
    near_miss("Dropped", forward=lambda self, x: F.dropout(RMS.forward(self, x), 0.1, self.training)),
    near_miss("DroppedBefore", forward=lambda self, x: RMS.forward(self, F.dropout(x, 0.1, self.training))),
    near_miss("Noisy", forward=lambda self, x: RMS.forward(self, x) + 0 * torch.randn(1)),
    near_miss("OtherEps", normalise=lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2e-5)),
    near_miss(
        "EpsOutside", normalise=lambda self, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
    ),
    near_miss(
        "EpsAsFloor",
        normalise=lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=self.variance_epsilon)),
    ),
    near_miss(
        "Unbiased",
        normalise=lambda self, x: (
            x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + self.variance_epsilon)
        ),
    ),
    near_miss("Scaled", forward=lambda self, x: RMS.forward(self, x) * 1.0001),
    near_miss("Shifted", forward=lambda self, x: RMS.forward(self, x) + 1e-4),
    near_miss("Residual", forward=lambda self, x: RMS.forward(self, x) + 1e-4 * x),
    near_miss("LowPrecision", forward=lambda self, x: self.weight * self.normalise(x)),
    near_miss(
        "RoundedStd",
        forward=lambda self, x: (
            self.weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon).to(x.dtype))
        ),
    ),
    near_miss("OutputInFloat", forward=lambda self, x: self.weight * self.normalise(x.float())),
    near_miss(
        "OtherDimension",
        normalise=lambda self, x: x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + self.variance_epsilon),
    ),
    near_miss("EvaluationOnly", forward=lambda self, x: RMS.forward(self, x) if self.training else x),
    near_miss("TrainingOnly", forward=lambda self, x: RMS.forward(self, x) * (1 if self.training else 1.01)),
    near_miss("InferenceOnly", forward=lambda self, x: RMS.forward(self, x) * (1 if torch.is_grad_enabled() else 1.01)),
    near_miss("WeightCubed", forward=lambda self, x: self.weight**3 * self.normalise(x.float()).to(x.dtype)),
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
    near_miss(
        "GroupedGate",
        forward=lambda self, x, gate: (
            self.weight
            * self.normalise((x.float() * F.silu(gate.float())).unflatten(-1, (2, -1))).flatten(-2).to(x.dtype)
        ),
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
    mlp("HalfDetached", product=lambda self, gate, up: self.act(gate) * (0.5 * up + 0.5 * up.detach())),
    mlp("InFloat", product=lambda self, gate, up: (self.act(gate.float()) * up.float()).to(gate.dtype)),
    mlp("UpClamped", product=lambda self, gate, up: self.act(gate) * up.clamp(-100, 100)),
    mlp("GateClamped", product=lambda self, gate, up: self.act(gate.clamp(max=20)) * up),
    mlp("Added", product=lambda self, gate, up: self.act(gate) + up),
    mlp("NoActivation", product=lambda self, gate, up: gate * up),
    mlp("Residual", forward=lambda self, x: MLP.forward(self, x) + x),
    mlp(
        "InnerResidual",
        forward=lambda self, x: self.down_proj(F.pad(x, (0, 16)) + self.product(self.gate_proj(x), self.up_proj(x))),
    ),
    mlp("OutputScaled", forward=lambda self, x: MLP.forward(self, x) * 1.0001),
    mlp("InputScaled", forward=lambda self, x: MLP.forward(self, 1.0001 * x)),
    mlp(
        "InputDetached",
        forward=lambda self, x: self.down_proj(self.product(self.gate_proj(x.detach()), self.up_proj(x))),
    ),
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


# Rotary embedding


def _half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _rotation(turn=_half, scale=1.0, cast=False):
    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(
            ((x.float() * cos + turn(x.float()) * sin).to(x.dtype) if cast else x * cos + turn(x) * sin) * scale
            for x in (q, k)
        )

    return rotate


def _partial(tail=False):
    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin, width = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), cos.shape[-1]
        rotated = []
        for x in (q, k):
            first, second = x.split((x.shape[-1] - width, width) if tail else (width, x.shape[-1] - width), -1)
            parts = [first, second * cos + _half(second) * sin] if tail else [first * cos + _half(first) * sin, second]
            rotated.append(torch.cat(parts, -1))
        return tuple(rotated)

    return rotate


def _one_by_one(x, cos, sin, unsqueeze_dim=1):
    return x * cos.unsqueeze(unsqueeze_dim) + _half(x) * sin.unsqueeze(unsqueeze_dim)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_rotation(), {"interleaved": False, "cast_back": False}),
        (_rotation(_pairs), {"interleaved": True, "cast_back": False}),
        (_rotation(cast=True), {"interleaved": False, "cast_back": True}),
        (_partial(), {"interleaved": False, "angles": "full"}),
        (_one_by_one, {"tensors": 1}),
    ],
)
def test_rotations_are_recognised(function, expected):
    rotation = match_rotation(function)
    assert {name: getattr(rotation, name) for name in expected} == expected


@pytest.mark.parametrize(
    "function",
    [
        _rotation(lambda x: -_half(x)),
        _rotation(lambda x: _half(x).detach()),
        _rotation(scale=1.0001),
        _rotation(lambda x: x.flip(-1)),
        _rotation(lambda x: _half(x.clamp(-2, 2))),
        _partial(tail=True),
        lambda q, k, cos, sin: _rotation()(k, q, cos, sin),
        lambda q, k, cos, sin: _rotation()(q, k, sin, cos),
        lambda q, k, cos, sin: (_rotation()(q, k, cos, sin)[0], k),
        lambda q, k, cos, sin: list(_rotation()(q, k, cos, sin)),
        lambda q, k, sin, cos: _rotation()(q, k, cos, sin),
        lambda q, k, cos, sin, position_ids: _rotation()(q, k, cos, sin),
        lambda q, k, cos, sin: (q * cos + _half(q) * sin, k * cos + _half(k) * sin),
        lambda q, k, cos, sin: _rotation()(q, k, cos.mul_(1.0), sin.add_(0.1)),
    ],
)
def test_near_misses_of_rotations_are_left(function):
    with pytest.raises(Mismatch):
        match_rotation(function)


def test_a_rotation_stays_until_its_last_model_goes():
    from transformers.models.llama import modeling_llama

    gc.collect()  # models that other tests have patched
    original = modeling_llama.apply_rotary_pos_emb
    one, other, third = (model_zoo.build("llama") for _ in range(3))
    patch(one, loss_head=False)
    patch(one, loss_head=False)
    patch(other, loss_head=False)
    patch(third, loss_head=False)
    unpatch(one)
    assert modeling_llama.apply_rotary_pos_emb is not original
    unpatch(other)
    assert modeling_llama.apply_rotary_pos_emb is not original
    del third
    gc.collect()
    assert modeling_llama.apply_rotary_pos_emb is original


# Models


@pytest.mark.parametrize("model_type", FAMILIES.split())
def test_a_patched_model_is_the_model(model_type):
    result = check(model_type)
    assert result["status"] == "ok", result
    assert result["restored"]
    assert result["norm"]
    assert result["rope"]
    assert result["glu"] or model_type == "gpt_neox"
    assert not result["left"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "llama4_text",
        "granite",
        "olmo2",
        "cohere2",
        "deepseek_v3",
        "glm4_moe",
        "falcon_h1",
        "jamba",
        "nemotron",
        "zamba2",
    ],
)
def test_layers_of_other_structures(model_type):
    """Experts whose output is flat, multipliers of residuals, norms of outputs, layers of several kinds."""
    result = check(model_type)
    assert result["status"] == "ok", result
    assert result["restored"] or not result["deterministic"]


@pytest.mark.parametrize("model_type", ["florence2", "llava", "qwen2_vl", "qwen3_vl_moe", "smolvlm"])
def test_a_patched_image_text_model_is_the_model(model_type):
    result = check(model_type, image_text=True)
    assert result["status"] == "ok", result
    assert result["restored"]
    assert result["norm"]
    assert result["images"] or model_type == "florence2"


@pytest.fixture
def llama():
    model = model_zoo.build("llama")
    yield model
    unpatch(model)


def same(model, expected, inputs, tolerance=1e-5):
    loss, grads = loss_and_grads(model, inputs)
    torch.testing.assert_close(loss, expected[0], rtol=tolerance, atol=tolerance)
    assert grads.keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (grads[name] - grad).abs().max() <= 10 * tolerance * grad.abs().max() + 1e-7, name


def kinds(model):
    return [type(replacement_of(module)) for module in model.modules() if replacement_of(module) is not None]


def test_copies_and_pickles_stay_patched(llama):
    inputs = model_zoo.inputs_of(llama)
    patch(llama, loss_head=False)
    expected, names = loss_and_grads(llama, inputs), kinds(llama)
    assert {Norm, GatedMLP} == set(names)
    saved = io.BytesIO()
    torch.save(llama, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(llama),
        pickle.loads(pickle.dumps(llama)),
        torch.load(saved, weights_only=False),
    ):
        assert kinds(other) == names
        norm = other.model.norm
        assert norm.weight is not llama.model.norm.weight
        with torch.no_grad():
            norm.weight.mul_(2)  # a copy that ran the original's forward would not notice
        assert not torch.equal(other(**inputs).loss, expected[0])
        with torch.no_grad():
            norm.weight.div_(2)
        same(other, expected, inputs)
        unpatch(other)
        assert not kinds(other)


def test_saving_and_loading(llama, tmp_path):
    inputs = model_zoo.inputs_of(llama)
    expected, state = loss_and_grads(llama, inputs), list(llama.state_dict())
    patch(llama, loss_head=False)
    assert list(llama.state_dict()) == state
    llama.save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not kinds(loaded)
    same(loaded.train(), expected, inputs)
    loaded = AutoLigerModelForCausalLM.from_pretrained(tmp_path, patch_options={"loss_head": False})
    assert kinds(loaded) == kinds(llama)
    assert loaded.liger_report.counts["rms_norm"] == 9
    same(loaded.train(), expected, inputs)
    made = AutoLigerModelForCausalLM.from_config(llama.config, patch_options={"loss_head": False, "norms": False})
    assert set(kinds(made)) == {GatedMLP}
    assert AutoLigerModelForCausalLM.register  # what else the class has is there


def test_gradient_checkpointing(llama):
    inputs = model_zoo.inputs_of(llama)
    expected = loss_and_grads(llama, inputs)
    patch(llama, loss_head=False)
    for reentrant in (True, False):
        llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
        same(llama, expected, inputs)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "cohere", "qwen3_next"])
def test_bfloat16_and_autocast(model_type):
    model = model_zoo.build(model_type)
    inputs = model_zoo.inputs_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_grads(model, inputs)
        patch(model, loss_head=False)
        same(model, expected, inputs, tolerance=5e-3)
    unpatch(model)
    model.bfloat16()
    expected = loss_and_grads(model, inputs)
    patch(model, loss_head=False)
    same(model, expected, inputs, tolerance=5e-3)
    unpatch(model)


def test_compiling(llama):
    inputs = model_zoo.inputs_of(llama)
    expected = loss_and_grads(llama, inputs)
    patch(llama, loss_head=False)
    torch._dynamo.reset()
    compiled = torch.compile(llama, backend="eager")
    loss = compiled(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected[0], rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(llama)(**inputs)
    assert explained.graph_break_count == 0, explained.break_reasons
    calls = [str(node.target) for graph in explained.graphs for node in graph.graph.nodes]
    assert (
        sum(call.startswith("liger_losses.forward") for call in calls) == 9 + 4 + 4
    )  # norms, gates, rotations: none fell back
    torch._dynamo.reset()


@pytest.mark.parametrize("adapters_first", [True, False])
def test_adapters(llama, adapters_first):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["gate_proj", "up_proj", "down_proj", "q_proj"], init_lora_weights=False
    )
    plain = copy.deepcopy(llama)
    inputs = model_zoo.inputs_of(llama)
    torch.manual_seed(0)
    expected_model = peft.get_peft_model(plain, config)
    expected = loss_and_grads(expected_model, inputs)
    if not adapters_first:
        patch(llama, loss_head=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(llama, config)
    report = patch(model, loss_head=False)
    assert report.counts == {"glu (silu)": 4, "rms_norm": 9, "rope": 1}
    same(model, expected, inputs)
    unpatch(model)
    unpatch(llama)
    assert not kinds(model)
    loss, _ = loss_and_grads(model, inputs)
    assert torch.equal(loss, expected[0])


def test_stacked_experts():
    model = model_zoo.build("mixtral")
    report = patch(model, loss_head=False)
    assert report.counts["experts' glu_fused (silu)"] == 4
    assert GatedExperts in kinds(copy.deepcopy(model))
    unpatch(model)


def test_patching_again_changes_nothing(llama):
    first = patch(llama, loss_head=False)
    classes = [type(module) for module in llama.modules()]
    again = patch(llama, loss_head=False)
    assert again.entries == first.entries
    assert [type(module) for module in llama.modules()] == classes
    llama.model.layers[0].mlp = copy.deepcopy(MLP(size=64))
    assert len(patch(llama, loss_head=False).replaced) == len(first.replaced)
    assert kinds(llama).count(GatedMLP) == 4


def test_unpatching_restores_classes(llama):
    classes = [type(module) for module in llama.modules()]
    patch(llama, loss_head=False)
    assert [type(module) for module in llama.modules()] != classes
    assert [type(module).__name__ for module in llama.modules()] == [kind.__name__ for kind in classes]
    unpatch(llama)
    assert [type(module) for module in llama.modules()] == classes
    unpatch(llama)


def test_what_changed_since_is_not_undone_by_mistake(llama):
    patch(llama, loss_head=False)
    nn.utils.parametrizations.weight_norm(llama.model.norm, dim=None)
    with pytest.raises(RuntimeError, match=r"model\.norm cannot be unpatched.*Parametrized"):
        unpatch(llama)
    assert len(kinds(llama)) == 13
    nn.utils.parametrize.remove_parametrizations(llama.model.norm, "weight")
    unpatch(llama)
    assert not kinds(llama)


def test_functions_of_one_kind_are_told_apart():
    class Activated(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    functions = (F.silu, F.gelu, F.relu, lambda x: F.silu(x))
    report = patch(nn.ModuleList([MLP(Activated(function)) for function in functions]), loss_head=False)
    assert [entry.replaced_by for entry in report.entries] == ["glu (silu)", "glu (gelu)", None, "glu (silu)"]


def test_choosing_what_to_patch(llama):
    report = patch(llama, loss_head=False, norms=False, rope=False)
    assert report.counts == {"glu (silu)": 4}
    unpatch(llama)
    asked = []

    def only_the_first_layer(module, name):
        asked.append((module, name))
        return "layers.0." in name

    report = patch(llama, loss_head=False, filter_fn=only_the_first_layer)
    assert {entry.path for entry in report.replaced if entry.replaced_by == "rms_norm"} == {
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
    }
    assert {entry.reason for entry in report.left} == {"left out by filter_fn"}
    assert all(dict(llama.named_modules())[name] is module for module, name in asked)


def test_patching_leaves_everything_else_alone(llama):
    state = {name: value.clone() for name, value in llama.state_dict().items()}
    grads_needed = [p.requires_grad for p in llama.parameters()]
    before = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        report = patch(llama.eval(), loss_head=False)
        assert not torch.is_grad_enabled()
    assert len(report.replaced) == len(report.entries)
    assert torch.equal(before, torch.get_rng_state())
    assert not llama.training
    assert [p.requires_grad for p in llama.parameters()] == grads_needed
    assert all(p.grad is None for p in llama.parameters())
    assert all(torch.equal(value, state[name]) for name, value in llama.state_dict().items())


def test_a_model_without_weights_can_be_patched():
    with torch.device("meta"):
        model = model_zoo.build("llama")
    assert len(kinds(model)) == 0
    patch(model, loss_head=False)
    assert len(kinds(model)) == 13
    unpatch(model)


def test_frozen_and_evaluated(llama):
    inputs = model_zoo.inputs_of(llama)
    llama.requires_grad_(False).eval()
    with torch.inference_mode():
        expected = llama(**inputs).logits
        patch(llama, loss_head=False)
        torch.testing.assert_close(llama(**inputs).logits, expected, rtol=1e-5, atol=1e-5)


def test_what_is_no_model_is_refused():
    for function in (patch, unpatch):
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module.*got str.*AutoLigerModelForCausalLM"):
            function("meta-llama/Llama-3.2-1B")
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoLigerModelForCausalLM()


def test_the_report_prints_as_a_table():
    report = PatchReport(
        [Entry(f"layers.{i}.norm", "Norm", "rms_norm") for i in range(3)] + [Entry("head.2", "Odd", None, "it is odd")]
    )
    lines = str(report).splitlines()
    assert lines[0].split() == ["module", "class", "count", "replaced", "by", "reason"]
    assert lines[1].split() == ["layers.*.norm", "Norm", "3", "rms_norm"]
    assert lines[2].split() == ["head.*", "Odd", "1", "-", "it", "is", "odd"]
    assert lines[3] == "3 of 4 pieces replaced: rms_norm 3, left 1"


def test_what_is_hung_on_the_last_layer_of_an_mlp_later_is_called():
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": mlp("Hung")})
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
    watched(nn.modules.module.register_module_forward_hook)
    original = nn.Linear.forward
    layer.forward = lambda x: calls.append(x) or original(layer, x)
    torch.testing.assert_close(model["mlp"](x), expected)
    assert calls
