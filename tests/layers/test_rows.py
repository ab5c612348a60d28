"""What all kernels of rows do: empty, strided, frozen and long ones, and errors."""

from functools import partial

import pytest
import torch

from liger_losses.kernels.targets import target_of
from liger_losses.layers.glu import glu, glu_fused, glu_linear
from liger_losses.layers.layer_norm import layer_norm
from liger_losses.layers.rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from liger_losses.layers.rope import rope
from tests.kernels.cases import DEVICE
from tests.layers.eager import check, normal

LONGEST, MANY = target_of(torch.device(DEVICE)).tiling.longest_row, 4097 if DEVICE == "cuda" else 67
NORMS = {
    "rms_norm": lambda x, w, **o: rms_norm(x, w, **o),
    "add_rms_norm": lambda x, w, **o: add_rms_norm(x, x, w, **o)[0],
    "gated_rms_norm": lambda x, w, **o: gated_rms_norm(x, x, w, **o),
    "layer_norm": lambda x, w, **o: layer_norm(x, w, w, **o),
}


def _rotated(x, weight, **options):
    heads, angles = x.unflatten(-1, (2, -1)), weight[: x.shape[-1] // 2].expand(x.shape[1], -1)
    return torch.cat(rope(heads, heads[:, :, :1], angles, angles, unsqueeze_dim=2, **options), 2)


ALL = {
    **NORMS,
    "glu": lambda x, w, **o: glu(x, x, **o),
    "glu_fused": lambda x, w, **o: glu_fused(x, **o),
    "glu_fused, interleaved": lambda x, w, **o: glu_fused(x, interleaved=True, **o),
    "rope": _rotated,
}


@pytest.mark.parametrize("kernel", ALL.values(), ids=ALL)
def test_nothing(kernel, backend):
    x, weight = normal(2, 0, 8), normal(8, grad=kernel is not _rotated)
    y = kernel(x, weight, backend=backend)
    y.sum().backward()
    assert y.numel() == 0
    assert x.grad.shape == x.shape
    assert weight.grad is None or torch.equal(weight.grad, torch.zeros_like(weight))


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


@pytest.mark.parametrize("kernel", ALL.values(), ids=ALL)
def test_results_of_any_strides_are_those_of_contiguous_tensors(kernel, backend):
    """Without gradients, what is prepared for tensors of one kind serves others of that kind, and none of another."""
    whole, weight = normal(4, 6, 40, grad=False), normal(32, grad=kernel is not _rotated)[::2]
    wholes = (whole, 2 * whole)
    views = [v for w in wholes for v in (w[..., :16], w[..., 4:36:2], w.transpose(0, 1)[..., 8:24], w[1:, ::2, 8:24])]
    for view in (v.requires_grad_() for v in views):
        copy = view.detach().contiguous().requires_grad_()
        found, expected = (kernel(x, weight, backend=backend) for x in (view, copy))
        torch.testing.assert_close(found, expected)
        with torch.no_grad():
            without = kernel(view, weight, backend=backend)
        torch.testing.assert_close(without, expected, check_stride=kernel is not _rotated)
        upstream = normal(*found.shape, seed=3, grad=False).transpose(0, 1).contiguous().transpose(0, 1)
        (found_grad,) = torch.autograd.grad(found, view, upstream)
        (expected_grad,) = torch.autograd.grad(expected, copy, upstream)
        torch.testing.assert_close(found_grad, expected_grad)


@pytest.mark.parametrize(("rows", "columns"), [(MANY, 1024), (2, 8192), (2, 16384), (2, LONGEST)])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_of_many_rows_and_of_long_ones(norm, rows, columns, backend):
    """More tiles than persistent programs, and a last tile that is not full; or longer than what the tiles in flight
    have shared memory for."""
    if columns > 8192 and backend == "triton" and DEVICE == "cpu":
        pytest.skip("takes the interpreter minutes")
    x, weight = normal(rows, columns), normal(columns)
    check(lambda x, w: norm(x, w, backend=backend), lambda x, w: norm(x, w, backend="torch"), (x, weight))


X, WEIGHT = normal(2, 8), normal(8)
Q, COS = normal(2, 3, 5, 8), normal(5, 8, grad=False)
#: Functions with wrong arguments, and what is said.
WRONG = [
    (partial(rms_norm, X, WEIGHT, multiply="first"), "multiply must be one of cast_first, fp32, got 'first'"),
    (partial(rms_norm, X, WEIGHT[:7]), "one entry for each of the 8"),
    (partial(layer_norm, X, WEIGHT, WEIGHT[:7]), "bias must have one entry"),
    (partial(add_rms_norm, X, X[:1], WEIGHT), "residual must have the shape of x"),
    (partial(gated_rms_norm, X, X[:1], WEIGHT), "gate must have the shape of x"),
    (partial(glu, X, X, "relu"), "activation must be one of silu, gelu, gelu_tanh, got 'relu'"),
    (partial(glu, X, X[:1]), "the same shape"),
    (partial(glu_linear, X, X[:1], X), "the same shape"),
    (partial(glu_linear, X[:, :7], None, X), "even number of columns, got 7"),
    (partial(glu_fused, X[:, :7]), "even number of columns, got 7"),
    (partial(glu, X, X, "gelu", alpha=2.0), "alpha belongs to silu"),
    (partial(glu, X, X, limit=-1.0), "limit must be positive"),
    (partial(rope, Q, Q, COS[:4], COS[:4]), r"must be \[2 or 1, 5, R\]"),
    (partial(rope, Q, Q, COS[:, :7], COS[:, :7]), "even width of at most 8"),
    (partial(rope, Q, Q[..., :4], COS[:, :4], COS[:, :4]), "only in the number of heads"),
    (partial(rope, Q[0], Q[0], COS, COS), "4 dimensions"),
    (partial(rope, Q, Q, COS, COS, unsqueeze_dim=3), "1 or 2, got 3"),
]


@pytest.mark.usefixtures("with_gradients_or_without")
@pytest.mark.parametrize(("call", "message"), WRONG)
def test_errors_name_what_was_given(call, message, backend):
    with pytest.raises(ValueError, match=message):
        call(backend=backend)


def test_a_backend_that_there_is_not():
    with pytest.raises(ValueError, match="backend must be one of torch, triton, got 'cuda'"):
        rms_norm(X, WEIGHT, backend="cuda")


def test_what_triton_cannot_serve_is_refused_when_asked_for():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="float64"):
        rms_norm(normal(2, 8).double(), None, backend="triton")
    with pytest.raises(ValueError, match="longer than"):
        rms_norm(normal(1, LONGEST + 1), None, backend="triton")


@pytest.mark.gpu
def test_no_silent_fallback_on_a_gpu():
    pytest.importorskip("triton")
    with pytest.warns(RuntimeWarning, match="float64"):
        rms_norm(normal(2, 8).double(), None)


@pytest.mark.gpu
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
