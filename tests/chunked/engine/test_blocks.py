"""Products and softmax in one kernel, end to end in half precision; in Triton's interpreter where there is no GPU."""

import pytest
import torch

from liger_losses import EngineOptions, linear_statistics, linear_token_loss
from liger_losses.kernels import label_rows, linear_exp, linear_grad
from tests.reference import assert_as_exact_as_plain, double, plain_statistics, problem

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.usefixtures("small_tiles")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(*sizes, **options):
    tensors = problem(*sizes, dtype=torch.bfloat16, **options)
    return [None if t is None else t.detach().to(DEVICE).requires_grad_(t.requires_grad) for t in tensors]


def test_coefficients_that_cancel():
    """Of the logit itself, the gradient is the label's own term alone."""
    hidden, weight, labels, _ = on_device(20, 24, 203, masked=0.0)
    exact_in = double(hidden, weight)

    def loss_of(s):
        return s["logp"] + s["lse"]  # the logit itself: the softmax cancels

    def token_loss(s, labels):
        return s.logp + s.lse

    options = EngineOptions(backend="triton")
    loss, _ = linear_token_loss(hidden, weight, labels, token_loss, ("logp", "lse"), options=options)
    grads = torch.autograd.grad(loss, (hidden, weight))
    plain = torch.autograd.grad(loss_of(plain_statistics(hidden, weight, labels)).sum(), (hidden, weight))
    exact = torch.autograd.grad(loss_of(plain_statistics(*exact_in, labels)).sum(), exact_in)
    for a, p, e in zip(grads, plain, exact, strict=True):
        assert_as_exact_as_plain(a, p, e)


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({"strategy": "one_pass"}, {"_exponentials_kernel", "_add_to_label_rows_kernel"}),
        ({"strategy": "two_pass"}, {"_exponentials_kernel", "_linear_gradient_kernel"}),
    ],
)
def test_the_fused_kernels_run(options, kernels, monkeypatch):
    """So that the tests above do not compare the reference with itself."""
    ran = set()
    for module in (label_rows, linear_exp, linear_grad):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Spy(getattr(module, name), name, ran))
    hidden, weight, labels, _ = on_device(20, 24, 203)
    given = {"options": EngineOptions(backend="triton", **options)}
    if options["strategy"] == "one_pass":
        linear_token_loss(hidden, weight, labels, lambda s, y: s.logp, **given)[0].backward()
    else:
        linear_statistics(hidden, weight, labels, **given).logp.sum().backward()
    assert kernels <= ran


class Spy:
    def __init__(self, kernel, name, ran):
        self.kernel, self.name, self.ran = kernel, name, ran

    def __getitem__(self, grid):
        self.ran.add(self.name)
        return self.kernel[grid]
