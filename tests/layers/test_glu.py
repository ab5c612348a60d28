"""Gated units: as exact as eager PyTorch, by every backend, in every dtype it serves."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_losses.layers import glu as glu_module
from liger_losses.layers.activations import ACTIVATIONS
from liger_losses.layers.glu import glu, glu_fused, glu_linear, glu_mlp
from liger_losses.layers.rope import rope
from tests.kernels.cases import DEVICE
from tests.layers.eager import check, normal, run

ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def plain_glu(gate, up, activation, limit=None, alpha=1.0, up_offset=0.0):
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    value = ACTS[activation](gate) if alpha == 1.0 else gate * torch.sigmoid(gate * alpha)
    return value * (up + up_offset if up_offset else up)


FORMS = [{"activation": name, "limit": limit} for name in ACTIVATIONS for limit in (None, 1.3)]
FORMS += [{"activation": "silu", "limit": 1.5, "alpha": 1.702, "up_offset": 1.0}]


#: How gate and up are given, and in how many tensors: two, or one that has them as halves or in turns.
LAYERS = {"two": 2, "halves": 1, "interleaved": 1}


def plain_of(inner, layout, **form):
    if layout != "two":
        (both,) = inner
        inner = (both[..., ::2], both[..., 1::2]) if layout == "interleaved" else both.chunk(2, -1)
    return plain_glu(*inner, **form)


def inner_of(layout, *shape, dtype):
    """Gate and up of ``shape``."""
    *rows, columns = shape
    count = LAYERS[layout]
    return [normal(*rows, columns * 2 // count, dtype=dtype, scale=2.0, seed=i) for i in range(count)]


@pytest.mark.parametrize(
    ("form", "layout", "columns"),
    [(form, "two", 33) for form in FORMS]
    + [(form, layout, 33) for form in FORMS[::3] for layout in ("halves", "interleaved")]
    + [(FORMS[0], layout, columns) for layout in LAYERS for columns in (1, 2500)],
    ids=str,
)
def test_glu(backend, dtype, form, layout, columns):
    def ours(*inner):
        if layout == "two":
            return glu(*inner, backend=backend, **form)
        return glu_fused(*inner, interleaved=layout == "interleaved", backend=backend, **form)

    inner = inner_of(layout, 2, 3 if columns > 1 else 30, columns, dtype=dtype)
    check(ours, lambda *inner: plain_of(inner, layout, **form), inner)


@pytest.mark.parametrize("limit", [1.3, 1.302, 1.5, 2.0, 7.0])
def test_glu_has_a_gradient_where_torch_clamp_has_one(backend, dtype, limit):
    """At the limit, which each dtype rounds, and at its neighbors; torch 2.15 has another rule than torch 2.13."""
    near = torch.tensor(limit, dtype=dtype) * (1 + torch.arange(-3, 4) * torch.finfo(dtype).eps / 2).to(dtype)
    gate, up = near.to(DEVICE).requires_grad_(), torch.cat([near[:4], -near[4:]]).to(DEVICE).requires_grad_()
    ours = torch.autograd.grad(glu(gate, up, limit=limit, backend=backend).sum(), (gate, up))
    plain = torch.autograd.grad(plain_glu(gate, up, "silu", limit).sum(), (gate, up))
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a != 0, b != 0)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_glu_rounds_where_eager_pytorch_rounds(backend, form):
    """Almost all results have the same bits: fp32 intermediates may differ in the last place."""
    gate, up = (normal(64, 128, dtype=torch.float16, seed=i, grad=False) for i in range(2))
    same = glu(gate, up, backend=backend, **form) == plain_glu(gate, up, **form)
    assert same.float().mean() > 0.995


@pytest.mark.parametrize("layout", LAYERS)
@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_glu_linear(backend, dtype, form, layout):
    def ours(*inputs):
        gate, up = (inputs[0], inputs[1]) if layout == "two" else (inputs[0], None)
        return glu_linear(gate, up, *inputs[-2:], interleaved=layout == "interleaved", backend=backend, **form)

    inner = inner_of(layout, 2, 5, 33, dtype=dtype)
    layer = normal(7, 33, dtype=dtype, seed=5), normal(7, dtype=dtype, seed=6)
    check(ours, lambda *inputs: F.linear(plain_of(inputs[:-2], layout, **form), *inputs[-2:]), (*inner, *layer))


def test_glu_linear_keeps_no_product(backend):
    """Of [4, 40] alone there are gate and up; the product would be a third."""
    saved = []
    gate, up, weight = normal(4, 40), normal(4, 40), normal(3, 40)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = glu_linear(gate, up, weight, backend=backend)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (gate, up, weight)}
    expected = torch.autograd.grad(F.linear(F.silu(gate) * up, weight).sum(), (gate, up))
    frozen = glu_linear(gate, up, weight.detach(), backend=backend)
    torch.testing.assert_close(torch.autograd.grad(frozen.sum(), (gate, up)), expected)
    (alone,) = torch.autograd.grad(out.sum(), (weight,))
    torch.testing.assert_close(alone, (F.silu(gate) * up).sum(0).expand(3, 40))


@pytest.mark.parametrize("whole", [False, True])
def test_checkpointing_stops_before_the_linear_layer_of_a_product(whole):
    """As it does without the kernels: what is saved last is saved before that layer runs."""
    x, *weights = (normal(*shape, seed=i) for i, shape in enumerate(((6, 8), (8, 12), (8, 12), (5, 12))))

    def ours(x, gate, up, down):
        if whole:
            return glu_mlp(x, (gate.t(), None), (up.t(), None), (down, None))
        return glu_linear(x @ gate, x @ up, down)

    def plain(x, gate, up, down):
        return F.linear(F.silu(x @ gate) * (x @ up), down)

    flops = []
    for function in (plain, ours):
        with FlopCounterMode(display=False) as counter:
            out = checkpoint(function, x, *weights, use_reentrant=False)
            grads = torch.autograd.grad(out.square().sum(), (x, *weights))
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1]
    expected = torch.autograd.grad(plain(x, *weights).square().sum(), (x, *weights))
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-4)


def mlp_of(layout, dtype=torch.float32, bias=True):
    """The input of an MLP, and weight and bias of each of its layers, the last of which is down."""
    inputs = [normal(2, 5, 8, dtype=dtype, seed=9)]
    for i, shape in enumerate([(66 // LAYERS[layout], 8)] * LAYERS[layout] + [(7, 33)]):
        inputs += [normal(*shape, dtype=dtype, seed=i), normal(shape[0], dtype=dtype, seed=i + 5) if bias else None]
    return inputs


def plain_mlp(x, *tensors, layout, activation="silu", **form):
    *inner, down = zip(tensors[::2], tensors[1::2], strict=True)
    return F.linear(plain_of([F.linear(x, *layer) for layer in inner], layout, activation=activation, **form), *down)


def our_mlp(x, *tensors, layout, **options):
    gate, *up, down = zip(tensors[::2], tensors[1::2], strict=True)
    return glu_mlp(x, gate, *up or [None], down, interleaved=layout == "interleaved", **options)


@pytest.mark.parametrize(
    ("form", "layout", "bias"),
    [(form, layout, True) for form in FORMS[::3] for layout in LAYERS]
    + [(FORMS[0], layout, False) for layout in LAYERS],
    ids=str,
)
def test_glu_mlp(backend, dtype, form, layout, bias):
    given = {"layout": layout, **form}
    check(partial(our_mlp, backend=backend, **given), partial(plain_mlp, **given), mlp_of(layout, dtype, bias))


@pytest.mark.parametrize("layout", LAYERS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_backward_of_an_mlp_writes_over_what_its_forward_allocated_and_nothing_else(backend, layout, checkpointed):
    """Over the outputs of its inner layers; backward again finds them again, to the bit."""
    leaves, saved = mlp_of(layout), []
    before = [leaf.detach().clone() for leaf in leaves]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t, t.detach().clone())) or t, lambda t: t):
        function = partial(our_mlp, layout=layout, backend=backend)
        out = checkpoint(function, *leaves, use_reentrant=False) if checkpointed else function(*leaves)
        found = [torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for _ in range(2)]
    torch.autograd.grad(out.sum(), leaves[-1], retain_graph=True)  # which changes nothing of the others
    found.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(torch.equal(a, b) for grads in found[1:] for a, b in zip(found[0], grads, strict=True))
    assert all(torch.equal(leaf, old) for leaf, old in zip(leaves, before, strict=True))
    changed = [tensor for tensor, old in saved if not torch.equal(tensor, old)]
    if not checkpointed:
        assert len(changed) == LAYERS[layout]
    assert all(tensor.shape[-1] == 66 // LAYERS[layout] for tensor in changed)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), leaves[0])


#: What is trained, of the input, the tensors of the inner layers, and weight and bias of the last one.
TRAINED = {
    "layers": lambda x, inner, down: [*inner, *down],
    "input and last layer": lambda x, inner, down: [x, *down],
    "all but the last layer": lambda x, inner, down: [x, *inner],
    "one bias": lambda x, inner, down: inner[-1:],
    "input": lambda x, inner, down: [x],
    "input and the last bias": lambda x, inner, down: [x, down[1]],
}


@pytest.mark.parametrize("layout", LAYERS)
@pytest.mark.parametrize("trained", TRAINED)
def test_gradients_of_some_tensors_of_an_mlp(backend, trained, layout, monkeypatch):
    """Where the weights are frozen, of some rows at a time."""
    monkeypatch.setattr(glu_module, "_FROZEN_ROWS", 3)
    inputs = mlp_of(layout)
    leaves = TRAINED[trained](inputs[0], inputs[1:-2], inputs[-2:])
    for tensor in inputs:
        tensor.requires_grad_(any(tensor is leaf for leaf in leaves))
    ours, theirs = our_mlp(*inputs, layout=layout, backend=backend), plain_mlp(*inputs, layout=layout)
    found = [torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for out in (ours, ours, theirs)]
    assert all(torch.equal(a, b) for a, b in zip(*found[:2], strict=True))
    torch.testing.assert_close(*found[1:], rtol=1e-4, atol=1e-4)


def test_glu_linear_under_autocast():
    x, w = normal(4, 40), normal(3, 40, seed=1)
    with torch.autocast(x.device.type, torch.bfloat16):
        for up in (x, x.bfloat16()):
            out = glu_linear(up, up, w)
            assert out.dtype == torch.bfloat16
            expected = F.linear(F.silu(up) * up, w)
            torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
            torch.testing.assert_close(
                *(torch.autograd.grad(z.sum(), (x, w)) for z in (out, expected)), rtol=0.05, atol=0.05
            )
        inputs = mlp_of("two")
        found = [f(*inputs, layout="two") for f in (our_mlp, plain_mlp)]
        assert found[0].dtype == torch.bfloat16
        assert torch.equal(*found)
        for a, b in zip(*(torch.autograd.grad(z.sum(), inputs[:2]) for z in found), strict=True):
            assert a.dtype == torch.float32
            assert (a - b).norm() <= 0.02 * b.norm()


def test_glu_of_two_dtypes(backend):
    inputs = (normal(4, 24, dtype=torch.float16), normal(4, 24))
    check(lambda g, u: glu(g, u, backend=backend), lambda g, u: plain_glu(g, u, "silu"), inputs)


def test_glu_of_large_entries_is_finite(backend):
    gate = torch.tensor([[-1e4, -200.0, -50.0, 50.0, 200.0, 1e4]], device=DEVICE, requires_grad=True)
    up = torch.ones_like(gate, requires_grad=True)
    for activation in ACTIVATIONS:
        out, grads = run(lambda g, u: glu(g, u, activation, backend=backend), (gate, up))  # noqa: B023
        assert all(t.isfinite().all() for t in (*out, *grads))
        torch.testing.assert_close(out[0], gate.detach().clamp(min=0), rtol=1e-6, atol=1e-6)


def test_glu_keeps_nan(backend):
    nan = torch.full((1, 3), float("nan"), device=DEVICE)
    one = torch.ones_like(nan)
    assert glu(nan, one, limit=1.0, backend=backend).isnan().all()
    assert glu(one, nan, limit=1.0, backend=backend).isnan().all()


@pytest.mark.parametrize("used", [0, 1])
def test_what_is_not_used_has_no_gradient(backend, used):
    """As in eager PyTorch: an optimizer does nothing to a parameter whose gradient is None, and decays one of 0."""
    q, k, angles = normal(2, 4, 5, 8), normal(2, 2, 5, 8, seed=1), normal(2, 5, 4, seed=2, grad=False).repeat(1, 1, 2)
    out = rope(q, k, angles.cos(), angles.sin(), backend=backend)[used]
    out.square().sum().backward()
    unused, x = (k, q) if used == 0 else (q, k)
    assert unused.grad is None
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=1e-4, atol=1e-4)
