"""Products and softmax in one kernel, end to end in half precision; in Triton's interpreter where there is no GPU."""

import pytest
import torch

from liger_losses import EngineOptions, LogitTransform, linear_statistics, linear_token_loss
from liger_losses.kernels import label_rows, linear_exp, linear_grad
from liger_losses.kernels._triton import INTERPRETED
from tests.reference import assert_as_exact_as_plain, double, plain_statistics, problem

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.usefixtures("small_tiles")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Of several tiles.
TOKENS, COLUMNS = (40, 77) if INTERPRETED else (150, 203)


def on_device(*sizes, **options):
    tensors = problem(*sizes, dtype=torch.bfloat16, **options)
    return [None if t is None else t.detach().to(DEVICE).requires_grad_(t.requires_grad) for t in tensors]


def total(values, names):
    return sum(
        (values[name] * torch.cos(torch.arange(len(values[name]), device=DEVICE) + i)).sum()
        for i, name in enumerate(names)
    )


def ours(names, hidden, weight, labels, bias=None, transform=None, **options):
    """The statistics' weighted sum and its gradients."""
    transform, separable = LogitTransform(**(transform or {})), options.get("strategy") == "one_pass"
    engine_options = EngineOptions(backend="triton", **options)
    leaves = [tensor for tensor in (hidden, weight) if tensor.requires_grad]
    if separable:
        weights = {f"w{i}": torch.cos(torch.arange(len(labels), device=DEVICE) + i) for i in range(len(names))}

        def token_loss(s, labels, **w):
            return sum(getattr(s, name) * w[f"w{i}"] for i, name in enumerate(names))

        loss, values = linear_token_loss(
            hidden,
            weight,
            labels,
            token_loss,
            names,
            token_inputs=weights,
            bias=bias,
            transform=transform,
            options=engine_options,
        )
        return values._asdict(), torch.autograd.grad(loss, leaves)
    values = linear_statistics(
        hidden, weight, labels, names, bias=bias, transform=transform, options=engine_options
    )._asdict()
    return values, torch.autograd.grad(total(values, names), leaves)


def compare(names, hidden, weight, labels, bias=None, transform=None, **options):
    values, grads = ours(names, hidden, weight, labels, bias, transform, **options)
    references = []
    for h, w, b in ((hidden, weight, bias), double(hidden, weight, bias)):
        leaves = [tensor for tensor in (h, w) if tensor.requires_grad]
        expected = plain_statistics(h, w, labels, b, **(transform or {}))
        references.append((expected, torch.autograd.grad(total(expected, names), leaves)))
    (plain, plain_grads), (exact, exact_grads) = references
    for name in names:
        assert_as_exact_as_plain(values[name], plain[name], exact[name], name)
    for i, (a, p, e) in enumerate(zip(grads, plain_grads, exact_grads, strict=True)):
        assert_as_exact_as_plain(a, p, e, f"gradient {i}")


STRATEGIES = {
    "one_pass": {"strategy": "one_pass", "chunk_size": 32 if INTERPRETED else 128},
    "resident": {"strategy": "resident"},
    "two_pass": {"strategy": "two_pass"},
    "tiles": {"strategy": "two_pass", "workspace": 12_000 if INTERPRETED else 120_000},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hopeless_labels(strategy):
    """A label whose probability is below what any float holds: gradients stay finite and right."""
    hidden, weight, labels, _ = on_device(TOKENS, 24, COLUMNS, masked=0.0)
    with torch.no_grad():
        hidden[3] *= 100
        labels[3] = (hidden[3].float() @ weight.float().t()).argmin()
    compare(("logp",), hidden, weight, labels, **STRATEGIES[strategy])


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
    monkeypatch.setattr(linear_exp, "hopper_tiles", lambda *call: None)  # has a kernel of its own
    for module in (label_rows, linear_exp, linear_grad):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Spy(getattr(module, name), name, ran))
    hidden, weight, labels, _ = on_device(20, 24, 203)
    ours(("logp",), hidden, weight, labels, **options)
    assert kernels <= ran


class Spy:
    def __init__(self, kernel, name, ran):
        self.kernel, self.name, self.ran = kernel, name, ran

    def __getitem__(self, grid):
        self.ran.add(self.name)
        return self.kernel[grid]


@pytest.mark.parametrize("strategy", ["one_pass", "two_pass"])
def test_entropy_as_a_metric_of_kept_exponentials(strategy):
    """It takes no logits in memory: gradients are those without it, bit for bit."""
    hidden, weight, labels, _ = on_device(40, 16, 70)
    options = EngineOptions(backend="triton", strategy=strategy)
    found = []
    for metrics in ((), ("entropy",)):
        if strategy == "one_pass":
            loss, values = linear_token_loss(
                hidden, weight, labels, lambda s, y: -s.logp, metrics=metrics, options=options
            )
        else:
            values = linear_statistics(hidden, weight, labels, metrics=metrics, options=options)
            loss = values.logp.sum()
        found.append(torch.autograd.grad(loss, (hidden, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    h, w = double(hidden, weight)
    exact = torch.special.entr((h @ w.T).softmax(-1)).sum(-1) * (labels != -100)
    torch.testing.assert_close(values.entropy.double(), exact, rtol=1e-5, atol=1e-5)
