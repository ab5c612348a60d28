"""Layers whose residual additions are fused with their norms: what must be recognised, what must not."""

import copy
import functools
import inspect
import random
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_losses.kernels import rms_norm as kernel
from liger_losses.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_and_input
from liger_losses.modules import RMSNorm
from liger_losses.patching import residuals
from liger_losses.patching.patch import patch as patch_pieces
from liger_losses.patching.patch import unpatch
from liger_losses.patching.residuals import Residuals
from liger_losses.patching.swap import replacement_of

H = 16
patch = functools.partial(patch_pieces, residuals=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.seen = nn.Linear(H, H), []

    def forward(self, hidden_states, mask=None, scale=1.0, **kwargs):
        self.seen.append((mask, scale, kwargs))
        return self.proj(hidden_states) * scale, None


class Layer(nn.Module):
    """Llama's, in parts that others below replace."""

    def __init__(self, norm=RMSNorm):
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Linear(H, H)
        self.first, self.second = norm(H), norm(H)

    def attend(self, hidden_states, mask, scale, **kwargs):
        return self.attn(hidden_states=self.first(hidden_states), mask=mask, scale=scale, **kwargs)[0]

    def add(self, residual, hidden_states):
        return residual + hidden_states

    def forward(self, hidden_states, mask=None, scale=0.5, **kwargs):
        hidden_states = self.add(hidden_states, self.attend(hidden_states, mask, scale, **kwargs))
        return self.add(hidden_states, self.mlp(self.second(hidden_states)))


def layer(name="Layer", base=Layer, **members):
    return type(name, (base,), members)


class FourNorms(Layer):
    """Gemma 2's."""

    def __init__(self):
        super().__init__()
        self.third, self.fourth = RMSNorm(H), RMSNorm(H)

    def forward(self, hidden_states, mask=None, scale=0.5, **kwargs):
        hidden_states = hidden_states + self.third(self.attend(hidden_states, mask, scale, **kwargs))
        return hidden_states + self.fourth(self.mlp(self.second(hidden_states)))


def made(make, dtype=torch.float64):
    torch.manual_seed(0)
    found = make().to(dtype)
    for weight in found.parameters():
        nn.init.normal_(weight)
    return found


def results(module, x, *args, run=lambda module, *args, **kwargs: module(*args, **kwargs), **kwargs):
    module.zero_grad()
    x = x.detach().requires_grad_()
    out = run(module, x, *args, **kwargs)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(weight.grad for weight in module.parameters())]


def same(actual, expected, tolerance=1e-11):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


X = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("make", [Layer, FourNorms])
def test_fused_layers_are_the_layers(make):
    plain = made(make)
    ours = copy.deepcopy(plain)
    report = patch(nn.ModuleList([ours]), loss_head=False)
    assert report.counts["add + rms_norm"] == 1
    mask, other = object(), object()
    for args, kwargs in (((), {}), ((mask,), {"other": other}), ((), {"scale": 0.1, "mask": mask})):
        same(results(ours, X, *args, **kwargs), results(plain, X, *args, **kwargs))
        assert ours.attn.seen[-1] == plain.attn.seen[-1]
    for reentrant in (True, False):
        through = lambda module, x: checkpoint(module, x, use_reentrant=reentrant)  # noqa: B023, E731
        same(results(ours, X, run=through), results(plain, X))
    same(results(ours, X, run=lambda module, x: module(hidden_states=x)), results(plain, X))
    with torch.no_grad():
        assert torch.equal(ours(X), plain(X))
    unpatch(ours)
    assert type(ours) is make


class Additions(TorchDispatchMode):
    """How many sums of whole tensors are computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            self.count += isinstance(args[1], torch.Tensor) and args[0].shape == args[1].shape == X.shape
        return func(*args, **(kwargs or {}))


def test_sums_that_are_left(monkeypatch):
    """Of two in forward and two in backward, where each norm branches off, the kernels of the norms take three."""

    def quiet(function):
        def call(*args):
            before = additions.count
            found = function(*args)
            additions.count = before
            return found

        return call

    for name in ("_forward_torch", "_backward_torch"):
        monkeypatch.setattr(kernel, name, quiet(getattr(kernel, name)))
    counts = []
    for fuse in (False, True):
        ours = made(Layer, torch.float32)
        patch(ours, residuals=fuse)
        with Additions() as additions:
            out = ours(X.float().requires_grad_())
            forward = additions.count
            out.backward(torch.ones_like(out))
        counts.append((forward, additions.count - forward))
    assert counts == [(2, 2), (1, 0)]


def test_bf16_and_autocast():
    for autocast in (True, False):
        plain = made(Layer, torch.float32 if autocast else torch.bfloat16)
        ours = copy.deepcopy(plain)
        patch(ours, loss_head=False)
        x = X.float() if autocast else X.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, expected = results(ours, x), results(plain, x)
        for a, e in zip(found, expected, strict=True):
            assert a.dtype == e.dtype
            assert (a - e).norm() <= 0.02 * e.norm()


def _attend_changed(self, hidden_states, mask, scale, **kwargs):
    out = Layer.attend(self, hidden_states, mask, scale, **kwargs)
    return out + 1 if mask is None else out


def _in_place(self, residual, hidden_states):
    with torch.no_grad():
        hidden_states += residual
    return hidden_states


def _last_in_place(self, hidden_states, mask=None):
    hidden_states = hidden_states + self.attend(hidden_states, mask, 1.0)
    return _in_place(self, hidden_states, self.mlp(self.second(hidden_states)))


def _passes_more(self, hidden_states, mask=None):
    """What the first child returns beside its output may be anything."""
    out, more = self.attn(self.first(hidden_states), mask)
    hidden_states = hidden_states + out
    return hidden_states + self.mlp(self.second(hidden_states), more)


def _kept(self, residual, hidden_states):
    self.kept = residual + hidden_states
    return self.kept


def _may_skip(self, hidden_states, mask=None, **kwargs):
    after = hidden_states + self.attend(hidden_states, mask, 1.0, **kwargs)
    return after if kwargs.get("skip_mlp") else after + self.mlp(self.second(after))


def _random_depth(self, hidden_states):
    skipped = random.random() < 1e-9
    return hidden_states if skipped else Layer.forward(self, hidden_states)


def _by_class(self, hidden_states):
    after = hidden_states + self.attend(hidden_states, None, 1.0)
    return after + (0.5 if isinstance(self.mlp, nn.Linear) else 1.0) * self.mlp(self.second(after))


def _by_attribute(self, hidden_states):
    after = hidden_states + self.attend(hidden_states, None, 1.0)
    return after + getattr(self.mlp, "in_features", 1) * self.mlp(self.second(after))


NEAR_MISSES = [
    layer("Viewed", add=lambda self, residual, x: residual + x.view(residual.shape)),  # Llama 4's, of flat experts
    layer("PassesMore", forward=_passes_more),
    layer("Scaled", add=lambda self, residual, x: residual + 0.5 * x),
    layer("Subtracted", add=lambda self, residual, x: residual - x),
    layer("OfTheResidual", add=lambda self, residual, x: residual + x.to(residual.dtype)),
    layer("InFloat", add=lambda self, residual, x: (residual.float() + x.float()).to(x.dtype)),
    layer("Clamped", add=lambda self, residual, x: (residual + x).clamp(-6e4, 6e4)),
    layer("ClampedHalf", add=lambda self, r, x: (r + x).clamp(-6e4, 6e4) if r.dtype == torch.float16 else r + x),
    layer("Detached", add=lambda self, residual, x: residual.detach() + x),
    layer("HalfDetached", add=lambda self, residual, x: residual + (0.5 * x + 0.5 * x.detach())),
    layer("Dropped", add=lambda self, residual, x: residual + F.dropout(x, 0.1, self.training)),
    layer("InTraining", add=lambda self, residual, x: residual + x if self.training else residual + 2 * x),
    layer("NearlyOne", add=lambda self, residual, x: residual + 1.001 * x),
    layer("InPlace", add=_in_place),
    layer("LastInPlace", forward=_last_in_place),
    layer("Defaulted", attend=lambda self, x, mask, scale, **kw: self.attn(self.first(x), mask, mask and scale)[0]),
    layer("Masked", attend=_attend_changed),
    layer(
        "AttentionTwice", attend=lambda self, *args, **kw: Layer.attend(self, *args, **kw) + 0 * self.attn(args[0])[0]
    ),
    layer("MakesAnArgument", attend=lambda self, x, mask, scale, **kw: self.attn(self.first(x), mask, [scale])[0]),
    layer("OfTheShape", attend=lambda self, x, mask, scale, **kw: self.attn(self.first(x), mask, x.shape[1])[0]),
    layer("Keeps", add=_kept),
    layer("MaySkip", forward=_may_skip),
    layer("RandomDepth", forward=_random_depth),
    layer("ByClass", forward=_by_class),
    layer("ByAttribute", forward=_by_attribute),
    layer("ReadsItsConfig", config={}, add=lambda self, r, x: r + x * self.config.get("factor", 1)),
    layer("Pair", forward=lambda self, hidden_states: (Layer.forward(self, hidden_states), None)),
    layer("NoResidual", forward=lambda self, hidden_states: self.mlp(self.second(self.first(hidden_states)))),
]


@pytest.mark.parametrize("make", NEAR_MISSES, ids=lambda make: make.__name__)
def test_near_misses_are_left(make):
    ours = made(make, torch.float32)
    patch(ours, loss_head=False)
    assert not isinstance(replacement_of(ours), Residuals)
    assert replacement_of(ours.first) is not None


def test_a_tuple_is_passed_on_whole_or_its_first_value():
    class Angles(nn.Module):
        def forward(self, x):
            return x.cos(), x.sin()

    class Rotated(Attention):
        def forward(self, hidden_states, angles):
            cos, sin = angles
            return self.proj(hidden_states) * cos + sin, None

    class Routed(nn.Linear):
        def forward(self, x):
            return super().forward(x), "router logits"

    class WithAngles(Layer):
        def __init__(self):
            super().__init__()
            self.attn, self.angles, self.mlp = Rotated(), Angles(), Routed(H, H)

        def forward(self, hidden_states):
            angles = self.angles(hidden_states)
            hidden_states = hidden_states + self.attn(self.first(hidden_states), angles)[0]
            out = self.mlp(self.second(hidden_states))
            if isinstance(out, tuple):
                out, _ = out
            return hidden_states + out

    plain = made(WithAngles)
    ours = copy.deepcopy(plain)
    assert "add + rms_norm" in patch(ours, loss_head=False).counts
    same(results(ours, X), results(plain, X))
    ours.mlp.__class__ = plain.mlp.__class__ = nn.Linear
    same(results(ours, X), results(plain, X))


def test_attributes_that_change_after_patching():
    class Weighed(Layer):
        factor, gradient_checkpointing = 1.0, False

        def add(self, residual, x):
            return residual + x if self.factor == 1.0 else residual + x * self.factor

    plain = made(Weighed)
    ours = copy.deepcopy(plain)
    assert "add + rms_norm" in patch(ours, loss_head=False).counts
    for factor in (1.0, 0.5):
        ours.factor = plain.factor = factor
        same(results(ours, X), results(plain, X))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_is_enabled_later(monkeypatch, reentrant):
    """The layer is checkpointed, and the additions are still fused: in the forward, if it has a graph, and again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": H, "intermediate_size": H, "num_attention_heads": 2, "num_key_value_heads": 2}
    plain = made(lambda: LlamaForCausalLM(LlamaConfig(vocab_size=9, num_hidden_layers=1, **sizes)), torch.float32)
    ours, calls = copy.deepcopy(plain), []
    patch(ours, loss_head=False)
    monkeypatch.setattr(residuals, "add_rms_norm", lambda *args, **kw: calls.append(1) or add_rms_norm(*args, **kw))
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    run = lambda module, x: module(inputs_embeds=x, use_cache=False).logits  # noqa: E731
    found, expected = (results(module, X.float(), run=run) for module in (ours, plain))
    same(found, expected, 1e-3)
    assert len(calls) == 2 - reentrant


def test_a_forward_that_the_class_gets_later():
    class Own(Layer):
        pass

    plain = made(Own)
    ours = copy.deepcopy(plain)
    patch(ours, loss_head=False)
    Own.forward = lambda self, *args, **kwargs: 2 * Layer.forward(self, *args, **kwargs)
    same(results(ours, X), results(plain, X))


def test_wrong_calls_are_the_errors_of_the_layer():
    ours = made(layer("Strict", forward=lambda self, hidden_states, mask: Layer.forward(self, hidden_states, mask)))
    assert "add + rms_norm" in patch(ours, loss_head=False).counts
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'mask'"):
        ours(X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        ours(X, None, other=1)
    with pytest.raises(TypeError, match="multiple values for argument 'hidden_states'"):
        ours(X, None, hidden_states=X)


def test_layer_norms_are_left():
    ours = made(lambda: Layer(nn.LayerNorm), torch.float32)
    patch(ours)
    assert replacement_of(ours) is None


def test_hooks_on_norms_are_called():
    plain = made(Layer)
    ours = copy.deepcopy(plain)
    patch(ours, loss_head=False)
    calls = []
    for norm in (ours.first, ours.second):
        norm.register_forward_hook(lambda module, args, out: calls.append(module))
    same(results(ours, X), results(plain, X))
    assert calls == [ours.first, ours.second]


def test_no_value_lives_longer_than_it_is_used():
    """The attention's output is gone when the MLP runs."""
    ours, alive = made(Layer), []
    patch(ours, loss_head=False)
    ours.attn.register_forward_hook(lambda module, args, out: alive.append(weakref.ref(out[0])))
    ours.mlp.register_forward_pre_hook(lambda module, args: alive.append(alive[0]() is not None))
    ours(X.requires_grad_())
    X.requires_grad_(False)
    assert alive[1] is False


def test_unpatching_what_fully_shard_has_made_a_unit():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = made(Layer, torch.float32)
        ours = copy.deepcopy(plain)
        patch(ours, loss_head=False)
        fully_shard(ours)
        assert isinstance(replacement_of(ours), Residuals)
        torch.testing.assert_close(ours(X.float()), plain(X.float()))
        unpatch(ours)
        assert replacement_of(ours) is None
        assert inspect.getattr_static(type(ours), "forward") is Layer.forward
        torch.testing.assert_close(ours(X.float()), plain(X.float()))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_norm_and_its_input(backend):
    dtype = torch.float64 if backend == "torch" else torch.float32
    x, weight = X.to(dtype).requires_grad_(), torch.linspace(0, 2, H, dtype=dtype).requires_grad_()
    y, again = rms_norm_and_input(x, weight, backend=backend)
    assert torch.equal(again, x)
    plain = rms_norm(x, weight, backend="torch")
    for upstream in ((1.0, 2.0), (0.0, 1.0), (1.0, 0.0)):
        loss = sum((part.sin() * factor).sum() for part, factor in zip((y, again), upstream, strict=True) if factor)
        wanted = sum((part.sin() * factor).sum() for part, factor in zip((plain, x), upstream, strict=True) if factor)
        found = torch.autograd.grad(loss, (x, weight), retain_graph=True, allow_unused=True)
        expected = torch.autograd.grad(wanted, (x, weight), retain_graph=True, allow_unused=True)
        for a, e in zip(found, expected, strict=True):
            assert (a is None) == (e is None)
            if a is not None:
                torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
