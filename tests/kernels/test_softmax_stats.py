"""Statistics of rows of logits and their gradients, by every backend, against float64 and autograd."""

import torch

from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import STATISTICS, softmax_statistics
from tests.kernels.cases import DEVICE, inputs
from tests.reference import NAMES


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
