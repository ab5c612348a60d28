"""Each kernel's torch reference against float64 and autograd."""

import pytest
import torch

from liger_losses.kernels.matmul import matmul_into
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient
from liger_losses.kernels.softmax_stats import STATISTICS, softmax_statistics
from tests.reference import NAMES


@pytest.mark.parametrize("class_weighted", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_statistic_and_its_closed_form_gradient(name, class_weighted):
    torch.manual_seed(0)
    logits = torch.randn(5, 17, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 17, (5,))
    c = torch.rand(17, dtype=torch.float64) if class_weighted else None
    value = softmax_statistics(logits.detach(), labels, frozenset(STATISTICS), c)
    log_p = logits.log_softmax(-1)
    exact = {
        "logp": log_p.gather(1, labels[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": logits.logsumexp(-1),
        "mean_logp": (log_p if c is None else c * log_p).mean(-1),
        "log_sum_sq_probs": log_p.exp().square().sum(-1).log(),
        "mean_logit": logits.mean(-1),
    }[name]
    torch.testing.assert_close(value[name], exact.detach())

    g = torch.randn(5, dtype=torch.float64)
    (expected,) = torch.autograd.grad((exact * g).sum(), logits)
    coefficients = SoftmaxGradient.of({name: g}, value, c)
    whole = softmax_gradient(logits.detach(), value["lse"], labels, coefficients, class_weight=c)
    torch.testing.assert_close(whole, expected)
    parts = [
        softmax_gradient(
            logits.detach()[:, a:b],
            value["lse"],
            labels,
            coefficients,
            first_column=a,
            vocab_size=17,
            class_weight=None if c is None else c[a:b],
        )
        for a, b in ((0, 7), (7, 8), (8, 17))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected)


def test_every_statistic_has_a_test_and_a_closed_form():
    assert set(STATISTICS) == {*NAMES, "argmax"}


def test_extreme_logits_give_finite_statistics_and_gradients():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 0.0, 3e4], [0.0, float("-inf"), 1.0]])
    labels = torch.tensor([0, 2, 2])
    value = softmax_statistics(logits, labels, frozenset({"logp", "entropy", "lse", "log_sum_sq_probs"}))
    assert value["logp"][0] == 0
    for name, v in value.items():
        assert v.isfinite().all(), name
        grad = softmax_gradient(logits, value["lse"], labels, SoftmaxGradient.of({name: torch.ones(3)}, value))
        assert grad.isfinite().all(), name


def test_argmax_is_the_first_maximum():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0]])
    assert softmax_statistics(logits, torch.zeros(2, dtype=torch.int64), frozenset({"argmax"}))["argmax"].tolist() == [
        1,
        0,
    ]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul_rounds_once(dtype, out_dtype, accumulate):
    torch.manual_seed(0)
    a, b, start = torch.randn(7, 300).to(dtype), torch.randn(300, 5).to(dtype), torch.randn(7, 5).to(out_dtype)
    exact = a.double() @ b.double() + (start.double() if accumulate else 0)
    out = matmul_into(start.clone(), a, b, accumulate=accumulate)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(out_dtype).eps, atol=1e-4)


def test_matmul_into_strided_output():
    a, b = torch.randn(6, 4), torch.randn(4, 3)
    buffer = torch.zeros(6, 8)
    matmul_into(buffer[:, 2:5], a, b)
    torch.testing.assert_close(buffer[:, 2:5], a @ b)
    assert (buffer[:, [0, 1, 5, 6, 7]] == 0).all()
