"""Statistics of rows of logits and their gradients, by every backend, against float64 and autograd."""

import itertools

import pytest
import torch

from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import STATISTICS, softmax_statistics
from tests.kernels.cases import DEVICE, TRANSFORMS, Differentiable, exact_statistics, inputs
from tests.reference import NAMES


def padded_rows(block, width):
    """The same block at the beginning of wider rows, as the engine's buffers have them."""
    buffer = torch.full((block.shape[0], width), float("nan"), device=block.device)
    buffer[:, : block.shape[1]] = block
    return buffer


@pytest.mark.parametrize("columns", [1, 64, 2100])
@pytest.mark.parametrize(("class_weighted", "with_bias"), [(False, False), (True, True)])
@pytest.mark.parametrize("options", TRANSFORMS, ids=str)
def test_statistics_and_their_closed_form_gradients(backend, options, class_weighted, with_bias, columns):
    projected, labels, bias, c = inputs(5, columns)
    bias, c = bias if with_bias else None, c if class_weighted else None
    wide = projected.double().requires_grad_()
    exact = exact_statistics(
        wide, labels, Differentiable(**options), bias if bias is None else bias.double(), c if c is None else c.double()
    )
    buffer = padded_rows(projected, -(-columns // 64) * 64)
    transform = LogitTransform(**options)
    found = softmax_statistics(
        buffer[:, :columns],
        labels,
        frozenset(STATISTICS),
        Epilogue(transform, bias, c),
        scratch=1000,
        backend=backend,
    )
    for name, value in exact.items():
        torch.testing.assert_close(found[name].double(), value.detach(), rtol=1e-5, atol=2e-5)
    assert torch.equal(found["argmax"], transform(projected, bias).argmax(-1))

    g = {name: torch.linspace(0.5, 1.5, 5, device=DEVICE) * (i + 1) for i, name in enumerate(NAMES)}
    whole, thirds = [0, columns], sorted({0, columns // 3, columns // 2, columns})
    # Dtypes and cuts are tested with all coefficients at once.
    alone = [((name,), torch.float32, whole) for name in NAMES]
    for names, dtype, cuts in (*alone, *itertools.product([NAMES], [torch.float32, torch.bfloat16], [whole, thirds])):
        (expected,) = torch.autograd.grad(sum((exact[n] * g[n]).sum() for n in names), wide, retain_graph=True)
        coefficients = SoftmaxGradient.of({n: g[n] for n in names}, found, c)
        parts = []
        for start, stop in itertools.pairwise(cuts):
            tile = padded_rows(projected[:, start:stop], -(-(stop - start) // 64) * 64)
            grad_bias = torch.ones(stop - start, device=DEVICE)
            part = softmax_gradient_into(
                tile.view(dtype)[:, : stop - start],  # over the memory of the projections
                tile[:, : stop - start],
                found["lse"],
                labels,
                coefficients,
                Epilogue(transform, bias, c).columns(slice(start, stop)),
                first_column=start,
                vocab_size=columns,
                grad_bias=grad_bias,
                scratch=1000,
                backend=backend,
            )
            # The sum is as exact in half precision: nothing is rounded before it.
            torch.testing.assert_close(grad_bias.double() - 1, expected[:, start:stop].sum(0), rtol=1e-4, atol=1e-4)
            parts.append(part)
        ours = torch.cat(parts, 1).double()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours, expected, rtol=max(eps, 1e-5), atol=2e-5)


def test_every_statistic_has_a_test_and_a_closed_form():
    assert set(STATISTICS) == {*NAMES, "argmax"}


def test_no_rows(backend):
    projected, labels, _, _ = inputs(0, 7)
    found = softmax_statistics(projected, labels, frozenset(STATISTICS), backend=backend)
    assert all(value.shape == (0,) for value in found.values())
    softmax_gradient_into(projected, projected, found["lse"], labels, SoftmaxGradient(), backend=backend)


def test_extreme_logits_give_finite_statistics_and_gradients(backend):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 0.0, 3e4], [0.0, float("-inf"), 1.0]], device=DEVICE)
    labels = torch.tensor([0, 2, 2], device=DEVICE)
    names = frozenset({"logp", "entropy", "lse", "log_sum_sq_probs"})
    value = softmax_statistics(logits, labels, names, backend=backend)
    assert value["logp"][0] == 0
    for name, v in value.items():
        assert v.isfinite().all(), name
        coefficients = SoftmaxGradient.of({name: torch.ones(3, device=DEVICE)}, value)
        grad = softmax_gradient_into(
            torch.empty_like(logits), logits, value["lse"], labels, coefficients, backend=backend
        )
        assert grad.isfinite().all(), name


def test_argmax_is_the_first_maximum(backend):
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [5, 8000]] = 3.0
    logits[1, 8999] = 1.0
    labels = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert softmax_statistics(logits, labels, frozenset({"argmax"}), backend=backend)["argmax"].tolist() == [5, 8999]
