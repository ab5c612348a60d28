"""Norms, gated units and rotary embeddings: as exact as eager PyTorch, by every backend, in every dtype it serves."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_losses.kernels._triton import INTERPRETED
from liger_losses.kernels.activations import ACTIVATIONS
from liger_losses.kernels.glu import glu, glu_fused, glu_linear
from liger_losses.kernels.layer_norm import layer_norm
from liger_losses.kernels.rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from liger_losses.kernels.rope import rope
from liger_losses.kernels.rows import LONGEST_ROW
from tests.reference import assert_as_exact_as_plain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    return request.param


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request, backend):
    if request.param == "bfloat16" and backend == "triton" and INTERPRETED:
        pytest.skip("the interpreter truncates where a GPU rounds to bfloat16")
    return getattr(torch, request.param)


def normal(*shape, dtype=torch.float32, seed=0, scale=1.0, grad=True):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=g) * scale).to(DEVICE, dtype).requires_grad_(grad)


def run(function, inputs):
    """Outputs, and the gradients of all inputs that require one for fixed random upstream gradients."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [normal(*out.shape, seed=i + 7, grad=False).to(out.dtype) for i, out in enumerate(outputs)]
    needed = [x for x in inputs if x is not None and x.requires_grad]
    return outputs, torch.autograd.grad(outputs, needed, upstream)


def check(ours, plain, inputs, scale=0.0):
    """Dtypes and shapes equal the plain formula's, errors of outputs and gradients are at most twice its errors,
    inputs are left alone, and a second run gives the same bits. ``scale`` is of terms that cancel."""
    before = [None if x is None else x.detach().clone() for x in inputs]
    exact_inputs = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    found, again, expected, exact = run(ours, inputs), run(ours, inputs), run(plain, inputs), run(plain, exact_inputs)
    for kind, *values in zip(("output", "gradient"), found, again, expected, exact, strict=True):
        for i, (a, b, c, d) in enumerate(zip(*values, strict=True)):
            assert a.dtype == c.dtype
            assert a.shape == c.shape
            assert torch.equal(a, b)
            assert_as_exact_as_plain(a, c, d.detach(), f"{kind} {i}", scale=scale)
    assert all(x is None or torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


# --- Norms ------------------------------------------------------------------------------------------------------------


def plain_rms_norm(x, weight, eps=1e-6, offset=0.0, multiply="cast_first", gate=None, gate_first=False):
    u = wide(x) if gate is None or not gate_first else wide(x) * F.silu(wide(gate))
    y = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)
    if multiply == "cast_first":
        y = y.to(x.dtype)
        y = y if weight is None else (weight + offset if offset else weight) * y
    else:
        y = y if weight is None else y * (offset + wide(weight))
    if gate is not None and not gate_first:
        y = y * F.silu(wide(gate))
    return y if multiply == "cast_first" and (gate is None or gate_first) else y.to(x.dtype)


@pytest.mark.parametrize("columns", [1, 33, 128, 4097])
@pytest.mark.parametrize("options", [{}, {"multiply": "fp32"}, {"multiply": "fp32", "offset": 1.0}, {"offset": 1.0}])
def test_rms_norm(backend, dtype, options, columns):
    x, weight = normal(2, 3, columns, dtype=dtype), normal(columns, dtype=dtype)
    check(
        lambda x, w: rms_norm(x, w, 1e-5, backend=backend, **options),
        lambda x, w: plain_rms_norm(x, w, 1e-5, **options),
        (x, weight),
        scale=1.0 if columns == 1 else 0.0,
    )


@pytest.mark.parametrize("multiply", ["cast_first", "fp32"])
def test_rms_norm_without_a_weight(backend, dtype, multiply):
    check(
        lambda x: rms_norm(x, None, multiply=multiply, backend=backend),
        lambda x: plain_rms_norm(x, None, multiply=multiply),
        (normal(5, 40, dtype=dtype),),
    )


@pytest.mark.parametrize("multiply", ["cast_first", "fp32"])
@pytest.mark.parametrize("wide_weight", [True, False])
def test_rms_norm_with_a_weight_in_another_dtype(backend, dtype, wide_weight, multiply):
    if dtype == torch.float32:
        pytest.skip("the same dtype")
    dtypes = (dtype, torch.float32) if wide_weight else (torch.float32, dtype)
    check(
        lambda x, w: rms_norm(x, w, multiply=multiply, backend=backend),
        lambda x, w: plain_rms_norm(x, w, multiply=multiply),
        (normal(5, 40, dtype=dtypes[0]), normal(40, dtype=dtypes[1])),
    )


@pytest.mark.parametrize("columns", [33, 256])
@pytest.mark.parametrize("options", [{}, {"multiply": "fp32", "offset": 1.0}])
def test_add_rms_norm(backend, dtype, options, columns):
    inputs = (normal(7, columns, dtype=dtype), normal(7, columns, dtype=dtype, seed=1), normal(columns, dtype=dtype))
    check(
        lambda x, r, w: add_rms_norm(x, r, w, backend=backend, **options),
        lambda x, r, w: (plain_rms_norm(x + r, w, **options), x + r),
        inputs,
    )


@pytest.mark.parametrize("used", [0, 1])
def test_add_rms_norm_with_one_output_used(backend, used):
    x, residual, weight = normal(3, 16), normal(3, 16, seed=1), normal(16)
    ours = add_rms_norm(x, residual, weight, backend=backend)[used].square().sum()
    plain = (plain_rms_norm(x + residual, weight), x + residual)[used].square().sum()
    found = torch.autograd.grad(ours, (x, residual, weight), allow_unused=True)
    expected = torch.autograd.grad(plain, (x, residual, weight), allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_add_rms_norm_of_two_dtypes(backend):
    inputs = (normal(4, 24, dtype=torch.float16), normal(4, 24), normal(24, dtype=torch.float16))
    check(
        lambda x, r, w: add_rms_norm(x, r, w, backend=backend),
        lambda x, r, w: (plain_rms_norm(x + r, w), x + r),
        inputs,
    )


@pytest.mark.parametrize("multiply", ["cast_first", "fp32"])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weighted", [True, False])
def test_gated_rms_norm(backend, dtype, weighted, gate_first, multiply):
    x, gate = normal(2, 5, 33, dtype=dtype), normal(2, 5, 33, dtype=dtype, seed=1)
    options = {"gate_first": gate_first, "multiply": multiply}
    check(
        lambda x, z, w: gated_rms_norm(x, z, w, backend=backend, **options),
        lambda x, z, w: plain_rms_norm(x, w, gate=z, **options),
        (x, gate, normal(33, dtype=dtype) if weighted else None),
    )


@pytest.mark.parametrize("columns", [1, 33, 128, 4097])
@pytest.mark.parametrize("vectors", ["both", "weight", "bias", "neither"])
def test_layer_norm(backend, dtype, vectors, columns):
    weight = normal(columns, dtype=dtype) if vectors in ("both", "weight") else None
    bias = normal(columns, dtype=dtype, seed=1) if vectors in ("both", "bias") else None
    check(
        lambda x, w, b: layer_norm(x, w, b, backend=backend),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        (normal(2, 3, columns, dtype=dtype), weight, bias),
        scale=1000.0 if columns == 1 else 0.0,  # 1 / sqrt(eps), times terms that cancel
    )


def test_layer_norm_far_from_zero(backend):
    x = (normal(4, 300, grad=False) + 1000).requires_grad_()
    check(
        lambda x, w, b: layer_norm(x, w, b, backend=backend),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        (x, normal(300), normal(300, seed=1)),
    )


def test_layer_norm_under_autocast(backend):
    x, weight, bias = normal(3, 20, dtype=torch.bfloat16), normal(20), normal(20, seed=1)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = layer_norm(x, weight, bias, backend=backend)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, F.layer_norm(x.float(), (20,), weight, bias))


NORMS = {
    "rms_norm": lambda x, w, **o: rms_norm(x, w, **o),
    "add_rms_norm": lambda x, w, **o: add_rms_norm(x, x, w, **o)[0],
    "gated_rms_norm": lambda x, w, **o: gated_rms_norm(x, x, w, **o),
    "layer_norm": lambda x, w, **o: layer_norm(x, w, w, **o),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_of_nothing(norm, backend):
    x, weight = normal(2, 0, 8), normal(8)
    y = norm(x, weight, backend=backend)
    y.sum().backward()
    assert y.shape == x.grad.shape == (2, 0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_with_a_frozen_weight_give_no_gradient_to_it(norm, backend):
    x, weight = normal(3, 8), normal(8)
    norm(x, weight, backend=backend).square().sum().backward()
    frozen = x.detach().clone().requires_grad_()
    norm(frozen, weight.detach(), backend=backend).square().sum().backward()
    assert torch.equal(x.grad, frozen.grad)
    only_weight = weight.detach().clone().requires_grad_()
    norm(x.detach(), only_weight, backend=backend).square().sum().backward()
    assert torch.equal(only_weight.grad, weight.grad)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_of_any_strides_equal_those_of_contiguous_tensors(norm, backend):
    whole, weight = normal(4, 6, 40, grad=False), normal(32)[::2]
    views = (whole[..., :16], whole[..., 3:35:2], whole.transpose(0, 1)[..., 8:24], whole[:, ::2, 8:24])
    for view in (v.requires_grad_() for v in views):
        upstream = normal(*view.shape, seed=3, grad=False).transpose(0, 1).contiguous().transpose(0, 1)
        copy = view.detach().contiguous().requires_grad_()
        found = norm(view, weight, backend=backend)
        expected = norm(copy, weight, backend=backend)
        torch.testing.assert_close(found, expected)
        (found_grad,) = torch.autograd.grad(found, view, upstream)
        (expected_grad,) = torch.autograd.grad(expected, copy, upstream)
        torch.testing.assert_close(found_grad, expected_grad)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_of_many_rows(norm, backend):
    """More tiles than persistent programs, and a last tile that is not full."""
    rows = 4097 if DEVICE == "cuda" else 67
    x, weight = normal(rows, 1024), normal(1024)
    check(lambda x, w: norm(x, w, backend=backend), lambda x, w: norm(x, w, backend="torch"), (x, weight))


def test_saved_memory_of_rms_norm_is_its_input_and_a_number_per_row(backend):
    sizes = []
    x, weight = normal(32, 64), normal(64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        rms_norm(x, weight, backend=backend)
    assert sorted(sizes) == [32, 64, 32 * 64]


def test_errors_of_norms_name_what_was_given(backend):
    x, weight = normal(2, 8), normal(8)
    with pytest.raises(ValueError, match="multiply must be one of cast_first, fp32, got 'first'"):
        rms_norm(x, weight, multiply="first", backend=backend)
    with pytest.raises(ValueError, match="one entry for each of the 8"):
        rms_norm(x, weight[:7], backend=backend)
    with pytest.raises(ValueError, match="bias must have one entry"):
        layer_norm(x, weight, weight[:7], backend=backend)
    with pytest.raises(ValueError, match="residual must have the shape of x"):
        add_rms_norm(x, x[:1], weight, backend=backend)
    with pytest.raises(ValueError, match="gate must have the shape of x"):
        gated_rms_norm(x, x[:1], weight, backend=backend)
    with pytest.raises(ValueError, match="backend must be one of torch, triton, got 'cuda'"):
        rms_norm(x, weight, backend="cuda")


def test_what_triton_cannot_serve_is_refused_when_asked_for():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="float64"):
        rms_norm(normal(2, 8).double(), None, backend="triton")
    with pytest.raises(ValueError, match="longer than"):
        rms_norm(normal(1, LONGEST_ROW + 1), None, backend="triton")


# --- Gated linear units -----------------------------------------------------------------------------------------------

ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def plain_glu(gate, up, activation, limit=None, alpha=1.0, up_offset=0.0):
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    value = ACTS[activation](gate) if alpha == 1.0 else gate * torch.sigmoid(gate * alpha)
    return value * (up + up_offset if up_offset else up)


FORMS = [{"activation": name, "limit": limit} for name in ACTIVATIONS for limit in (None, 1.3)]
FORMS += [{"activation": "silu", "limit": 1.5, "alpha": 1.702, "up_offset": 1.0}]


@pytest.mark.parametrize("columns", [1, 33, 2500])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_glu(backend, dtype, form, columns):
    rows = 6 if columns > 1 else 500
    inputs = (normal(rows, columns, dtype=dtype, scale=2.0), normal(rows, columns, dtype=dtype, seed=1))
    check(lambda g, u: glu(g, u, backend=backend, **form), lambda g, u: plain_glu(g, u, **form), inputs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [1, 33, 2500])
@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_glu_fused(backend, dtype, form, columns, interleaved):
    def plain(both):
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        return plain_glu(gate, up, **form)

    def ours(both):
        return glu_fused(both, interleaved=interleaved, backend=backend, **form)

    check(ours, plain, (normal(2, 3 if columns > 1 else 60, 2 * columns, dtype=dtype, scale=2.0),))


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


@pytest.mark.parametrize("layout", ["two", "halves", "interleaved"])
@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_glu_linear(backend, dtype, form, layout):
    def plain(*inputs):
        *inner, weight, bias = inputs
        if layout != "two":
            (both,) = inner
            inner = (both[..., ::2], both[..., 1::2]) if layout == "interleaved" else both.chunk(2, -1)
        return F.linear(plain_glu(*inner, **form), weight, bias)

    def ours(*inputs):
        gate, up = (inputs[0], inputs[1]) if layout == "two" else (inputs[0], None)
        return glu_linear(gate, up, *inputs[-2:], interleaved=layout == "interleaved", backend=backend, **form)

    width = 33 if layout == "two" else 66
    inner = [normal(2, 5, width, dtype=dtype, scale=2.0, seed=i) for i in range(2 if layout == "two" else 1)]
    check(ours, plain, (*inner, normal(7, 33, dtype=dtype, seed=5), normal(7, dtype=dtype, seed=6)))


def test_glu_linear_keeps_no_product(backend):
    """Of [4, 40] alone there are gate and up; the product would be a third."""
    saved = []
    gate, up, weight = normal(4, 40), normal(4, 40), normal(3, 40)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = glu_linear(gate, up, weight, backend=backend)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (gate, up, weight)}
    expected = torch.autograd.grad(F.linear(F.silu(gate) * up, weight).sum(), (gate, up))
    frozen = glu_linear(gate, up, weight.detach(), backend=backend)
    for a, b in zip(torch.autograd.grad(frozen.sum(), (gate, up)), expected, strict=True):
        torch.testing.assert_close(a, b)
    (alone,) = torch.autograd.grad(out.sum(), (weight,))
    torch.testing.assert_close(alone, (F.silu(gate) * up).sum(0).expand(3, 40))


def test_checkpointing_stops_before_the_linear_layer_of_a_product():
    """As it does without the kernels: what is saved last is saved before that layer runs."""
    x, *weights = (normal(*shape, seed=i) for i, shape in enumerate(((6, 8), (8, 12), (8, 12), (5, 12))))

    def ours(x, gate, up, down):
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
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_second_backward_of_glu_linear(backend):
    gate, up, weight = normal(4, 40), normal(4, 40, seed=1), normal(3, 40, seed=2)
    out = glu_linear(gate, up, weight, backend=backend).square().sum()
    first = torch.autograd.grad(out, (gate, up, weight), retain_graph=True)
    second = torch.autograd.grad(out, (gate, up, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, (gate, up, weight))
    out = glu_linear(gate, up, weight, backend=backend)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("layout", ["two", "halves", "interleaved"])
def test_glu_linear_writes_gradients_over_gate_and_up(backend, layout):
    """In place, the step holds one tensor fewer; results are those without."""
    x, weight, down = (normal(*shape, seed=i) for i, shape in enumerate(((6, 8), (80, 8), (3, 40))))
    found = []
    for keep in (True, False):
        inner = F.linear(x, weight).chunk(2, -1) if layout == "two" else (F.linear(x, weight),)
        inner = [part.clone() for part in inner]
        gate, up = inner if layout == "two" else (inner[0], None)
        out = glu_linear(gate, up, down, interleaved=layout == "interleaved", backend=backend)
        places, written = [part.data_ptr() for part in inner], []
        for part in inner:
            part.register_hook(lambda grad: written.append(grad.data_ptr()))  # noqa: B023
        del inner, part, gate, up
        gc.collect()  # Triton's interpreter leaves what refers to the storages
        found.append(torch.autograd.grad(out.square().sum(), (x, weight, down), retain_graph=keep))
        assert (sorted(places) == sorted(written)) is not keep
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


#: What else reads the gate; it returns the gate of the MLP, and what is added to the loss.
OTHER_READERS = {
    "a variable": lambda gate: (gate, gate),
    "a view": lambda gate: (gate, gate[:1]),
    "the backward that made it": lambda gate: (gate.tanh(), gate.new_zeros(())),
    "another backward": lambda gate: (gate, gate.square()),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reader", OTHER_READERS)
def test_what_something_else_refers_to_is_not_overwritten(backend, reader, checkpointed):
    x, a, b, down = (normal(*shape, seed=i) for i, shape in enumerate(((6, 8), (40, 8), (40, 8), (3, 40))))

    def mlp(x, plain):
        up = F.linear(x, b)
        gate, other = OTHER_READERS[reader](F.linear(x, a))
        return F.linear(F.silu(gate) * up, down) if plain else glu_linear(gate, up, down, backend=backend), other

    grads = []
    for plain in (True, False):
        out, other = checkpoint(mlp, x, plain, use_reentrant=False) if checkpointed else mlp(x, plain)
        before = other.detach().clone()
        grads.append(torch.autograd.grad(out.square().sum() + other.sum(), (x, a, b, down)))
        assert torch.equal(other, before)
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=float(1e-5 * expected.abs().max()))


def test_hooks_on_saved_tensors_keep_what_they_were_given():
    x, a, down = (normal(*shape, seed=i) for i, shape in enumerate(((6, 8), (40, 8), (3, 40))))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or len(kept) - 1, kept.__getitem__):
        out = glu_linear(F.linear(x, a), F.linear(x, a), down)
    before = [t.detach().clone() for t in kept]
    out.sum().backward()
    assert all(torch.equal(t, old) for t, old in zip(kept, before, strict=True))


def test_storages_keep_what_they_hold(backend):
    x, a, down = (normal(*shape, seed=i) for i, shape in enumerate(((6, 8), (40, 8), (3, 40))))
    gate = F.linear(x, a).clone()
    before, kept = gate.detach().clone(), gate.untyped_storage()
    out = glu_linear(gate, F.linear(x, a), down, backend=backend)
    del gate
    out.sum().backward()
    assert torch.equal(before.new_empty(0).set_(kept).view_as(before), before)


def test_a_backward_of_what_was_overwritten_is_an_error(backend):
    """Where autograd does not notice by itself: the bias's gradient frees nothing that was saved."""
    x, a, down, bias = (normal(*shape, seed=i) for i, shape in enumerate(((6, 8), (40, 8), (3, 40), (3,))))
    out = glu_linear(F.linear(x, a), F.linear(x, a), down, bias, backend=backend)
    first, second = out.sum(), out.sum()
    gc.collect()  # Triton's interpreter leaves what refers to the storages
    torch.autograd.grad(first, bias)
    with pytest.raises(RuntimeError, match="second time.*retain_graph=True"):
        second.backward()


def test_a_second_derivative_is_an_error(backend):
    """Also where the upstream gradient is a constant."""
    x, w = normal(4, 40), normal(3, 40, seed=1)
    functions = (
        lambda: glu_linear(x, x, w, backend=backend),
        lambda: glu(x, x, backend=backend),
        lambda: rms_norm(x, None, backend=backend),
        lambda: layer_norm(x, backend=backend),
    )
    for function in functions:
        (gradient,) = torch.autograd.grad(function().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()


def test_glu_linear_under_autocast():
    x, w = normal(4, 40), normal(3, 40, seed=1)
    with torch.autocast(x.device.type, torch.bfloat16):
        for up in (x, x.bfloat16()):
            out = glu_linear(up, up, w)
            assert out.dtype == torch.bfloat16
            expected = F.linear(F.silu(up) * up, w)
            torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
            for a, b in zip(*(torch.autograd.grad(z.sum(), (x, w)) for z in (out, expected)), strict=True):
                torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


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


def test_glu_of_any_strides(backend):
    whole = normal(4, 6, 40, grad=False)
    for view in (whole[..., :16], whole[..., 3:35:2], whole.transpose(0, 1), whole[:, ::2, 8:24]):
        x = view.requires_grad_()
        copy = view.detach().contiguous().requires_grad_()
        for function in (lambda x: glu(x, x, backend=backend), lambda x: glu_fused(x, backend=backend)):
            (a,), (grad_a,) = run(function, (x,))
            (b,), (grad_b,) = run(function, (copy,))
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(grad_a, grad_b)


def test_glu_of_nothing(backend):
    x = normal(0, 8)
    glu(x, x, backend=backend).sum().backward()
    glu_fused(x, backend=backend).sum().backward()
    assert x.grad.shape == (0, 8)
    weight = normal(3, 8)
    glu_linear(x, x, weight, backend=backend).sum().backward()
    assert not weight.grad.any()


def test_errors_of_glu_name_what_was_given(backend):
    x = normal(2, 7)
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, gelu_tanh, got 'relu'"):
        glu(x, x, "relu", backend=backend)
    with pytest.raises(ValueError, match="the same shape"):
        glu(x, x[:1], backend=backend)
    with pytest.raises(ValueError, match="the same shape"):
        glu_linear(x, x[:1], x, backend=backend)
    with pytest.raises(ValueError, match="even number of columns, got 7"):
        glu_linear(x, None, x, backend=backend)
    with pytest.raises(ValueError, match="even number of columns, got 7"):
        glu_fused(x, backend=backend)
    with pytest.raises(ValueError, match="alpha belongs to silu"):
        glu(x, x, "gelu", alpha=2.0, backend=backend)
    with pytest.raises(ValueError, match="limit must be positive"):
        glu(x, x, limit=-1.0, backend=backend)


# --- Rotary embeddings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [0, 1])
def test_what_is_not_used_has_no_gradient(backend, used):
    """As in eager PyTorch: an optimizer does nothing to a parameter whose gradient is None, and decays one of 0."""
    q, k, angles = normal(2, 4, 5, 8), normal(2, 2, 5, 8, seed=1), normal(2, 5, 4, seed=2, grad=False).repeat(1, 1, 2)
    out = rope(q, k, angles.cos(), angles.sin(), backend=backend)[used]
    out.square().sum().backward()
    unused, x = (k, q) if used == 0 else (q, k)
    assert unused.grad is None
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=1e-4, atol=1e-4)


def plain_rope(q, k, cos, sin, interleaved=False, unsqueeze_dim=1):
    cos, sin = (x.unsqueeze(unsqueeze_dim) if x.dim() == 3 else x[None].unsqueeze(unsqueeze_dim) for x in (cos, sin))

    def turn(x):
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    def rotate(x):
        x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat((x * cos + turn(x) * sin, rest), -1)

    return rotate(q), rotate(k)


@pytest.mark.parametrize("rotated", [2, 12, 20])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("angles", ["each", "shared", "flat"])
def test_rope(backend, dtype, angles, interleaved, unsqueeze_dim, rotated):
    """Also with angles that differ between the halves, which only the transpose gets right."""
    q, k = normal(2, 5, 3, 20, dtype=dtype), normal(2, 5, 1, 20, dtype=dtype)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    shape = {"each": (2, 5), "shared": (1, 5), "flat": (5,)}[angles]
    cos, sin = (normal(*shape, rotated, dtype=dtype, seed=i, grad=False) for i in range(2))
    options = {"interleaved": interleaved, "unsqueeze_dim": unsqueeze_dim}
    check(
        lambda q, k: rope(q, k, cos.to(q.dtype), sin.to(q.dtype), backend=backend, **options),
        lambda q, k: plain_rope(q, k, cos.to(q.dtype), sin.to(q.dtype), **options),
        (q, k),
    )


def test_rope_promotes_as_eager_pytorch(backend):
    q, k = normal(1, 3, 4, 8, dtype=torch.float16), normal(1, 3, 4, 8, dtype=torch.float16, seed=1)
    cos, sin = normal(4, 8, grad=False), normal(4, 8, seed=1, grad=False)
    check(
        lambda q, k: rope(q, k, cos.to(q.dtype) if q.dtype == torch.float64 else cos, sin, backend=backend),
        lambda q, k: plain_rope(q, k, cos.to(q.dtype) if q.dtype == torch.float64 else cos, sin),
        (q, k),
    )


def test_rope_with_many_heads(backend):
    q, k = normal(1, 41, 2, 256), normal(1, 7, 2, 256)
    cos, sin = normal(2, 256, grad=False), normal(2, 256, seed=1, grad=False)
    check(
        lambda q, k: rope(q, k, cos.to(q.dtype), sin.to(q.dtype), backend=backend),
        lambda q, k: plain_rope(q, k, cos.to(q.dtype), sin.to(q.dtype)),
        (q, k),
    )


def test_rope_keeps_the_layout_and_leaves_inputs_alone(backend):
    qkv = normal(2, 5, 9, 8, grad=False)
    q, k = qkv[:, :, :6].transpose(1, 2), qkv[:, :, 6:].transpose(1, 2)
    before, cos, sin = qkv.clone(), normal(5, 8, grad=False), normal(5, 8, seed=1, grad=False)
    found = rope(q, k, cos, sin, backend=backend)
    assert torch.equal(qkv, before)
    for a, b in zip(found, plain_rope(q, k, cos, sin), strict=True):
        torch.testing.assert_close(a, b)
    dense = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert rope(dense, dense, cos, sin, backend=backend)[0].stride() == dense.stride()


def test_rope_of_nothing(backend):
    q = normal(0, 2, 5, 8)
    cos = normal(5, 8, grad=False)
    found = rope(q, q, cos, cos, backend=backend)
    assert found[0].shape == found[1].shape == q.shape


@pytest.mark.filterwarnings("ignore:A slower torch kernel")
def test_rope_gives_gradients_to_angles_that_ask(backend):
    q, k, cos, sin = normal(1, 2, 5, 8), normal(1, 1, 5, 8), normal(5, 8), normal(5, 8, seed=1)
    check(lambda *x: rope(*x, backend=backend), plain_rope, (q, k, cos, sin))


def test_errors_of_rope_name_what_was_given(backend):
    q, cos = normal(2, 3, 5, 8), normal(5, 8, grad=False)
    with pytest.raises(ValueError, match=r"must be \[2 or 1, 5, R\]"):
        rope(q, q, cos[:4], cos[:4], backend=backend)
    with pytest.raises(ValueError, match="even width of at most 8"):
        rope(q, q, cos[:, :7], cos[:, :7], backend=backend)
    with pytest.raises(ValueError, match="number of heads alone"):
        rope(q, q[..., :4], cos[:, :4], cos[:, :4], backend=backend)
    with pytest.raises(ValueError, match="4 dimensions"):
        rope(q[0], q[0], cos, cos, backend=backend)
    with pytest.raises(ValueError, match="1 or 2, got 3"):
        rope(q, q, cos, cos, unsqueeze_dim=3, backend=backend)


# --- All of them ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_no_silent_fallback_on_a_gpu():
    pytest.importorskip("triton")
    with pytest.warns(RuntimeWarning, match="float64"):
        rms_norm(normal(2, 8).double(), None)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_offsets_beyond_32_bits():
    rows, columns = 2**19 + 3, 4096
    x = torch.zeros(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    x[-1] = normal(columns, grad=False)
    last = x[-1:].clone()
    cos = normal(1, 128, grad=False)

    def rotate(x):
        heads = x.view(1, -1, 32, 128)
        return rope(heads, heads, cos.expand(len(x), -1), cos.expand(len(x), -1), unsqueeze_dim=2)[0].view(-1, columns)

    for function in (lambda x: rms_norm(x, None), layer_norm, lambda x: glu(x, x), glu_fused, rotate):
        assert torch.equal(function(x)[-1:], function(last))
        torch.cuda.empty_cache()


@pytest.mark.parametrize("columns", [8192, 16384, LONGEST_ROW])
def test_long_rows(backend, columns):
    """Longer than what the tiles in flight have shared memory for."""
    if columns > 8192 and backend == "triton" and DEVICE == "cpu":
        pytest.skip("takes the interpreter minutes")
    x, weight = normal(3, columns), normal(columns)
    for norm in NORMS.values():
        check(lambda x, w: norm(x, w, backend=backend), lambda x, w: norm(x, w, backend="torch"), (x, weight))  # noqa: B023
