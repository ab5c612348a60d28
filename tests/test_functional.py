"""Losses as functions of log-probabilities, against formulas in float64; classes have golden results."""

import pytest
import torch

import liger_losses
from liger_losses import functional
from tests.reference import kl

B, T, C = 5, 6, 11


def randn(*shape, seed=0, requires_grad=False):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_(requires_grad)


def same(ours, exact, *inputs):
    """Values and gradients."""
    torch.testing.assert_close(ours, exact)
    weights = torch.linspace(0.5, 1.5, ours.numel(), dtype=torch.float64).view(ours.shape)
    first, second = (torch.autograd.grad((x * weights).sum(), inputs, retain_graph=True) for x in (ours, exact))
    torch.testing.assert_close(first, second)


def sums():
    return (
        randn(B, seed=1, requires_grad=True),
        randn(B, seed=2, requires_grad=True),
        randn(B, seed=3),
        randn(B, seed=4),
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda *logps: functional.dpo_loss(*logps, loss_type="hinge", beta=0.2).sum(),
        lambda logps, old, *_: functional.grpo_loss(
            logps[:, None], old, torch.ones(B, 1, dtype=torch.bool), old_logps=old[:, None], loss_type="gmpo", beta=0.0
        ),
    ],
)
def test_functions_with_options_are_traced(loss):
    inputs = sums()
    same(torch.compile(loss, fullgraph=True, backend="eager")(*inputs), loss(*inputs), inputs[0])


def test_dpo_loss_of_several_types():
    chosen, rejected, *refs = sums()
    types = {"loss_type": ("sigmoid", "sft"), "loss_weights": (0.8, 0.1), "chosen_nll": torch.tensor(0.7)}
    both = functional.dpo_loss(chosen, rejected, *refs, **types)
    same(both, 0.8 * functional.dpo_loss(chosen, rejected, *refs) + 0.07, chosen, rejected)


@pytest.mark.parametrize("gap", [-40.0, -3.0, 1e-3, 0.5, 18.0, 30.0, 60.0])
def test_the_corrected_divergence_keeps_its_digits(gap):
    """``r k3(d)`` with ``r = p / p_old`` and ``d = log p_ref - log p`` has the derivative ``-r d`` by log p."""
    logps = torch.full((1, 2), -70.0, requires_grad=True)
    old, ref = torch.tensor([[-73.0, -69.5]]), logps.detach() + gap
    ratio, d = (logps.detach() - old).exp(), ref - logps.detach()
    options = {"loss_type": "bnpo", "beta": 1.0, "use_bias_correction_kl": True}
    loss = functional.grpo_loss(logps, torch.zeros(1), torch.ones(1, 2), old_logps=old, ref_logps=ref, **options)
    (grad,) = torch.autograd.grad(loss, logps)
    torch.testing.assert_close(loss, (ratio * (torch.expm1(d) - d)).mean().detach())
    torch.testing.assert_close(grad, -ratio * d / 2, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_sparse_divergence(tail):
    logits, q = randn(2, B, C, requires_grad=True), randn(2, B, C, seed=1).log_softmax(-1)

    def whole(logps):
        if tail == "renormalize":
            return logps.log_softmax(-1)
        return torch.cat([logps, (1 - logps.exp().sum(-1, keepdim=True)).log()], -1)

    p = logits.log_softmax(-1)
    ours = functional.sparse_divergence(p[..., :4], q[..., :4], liger_losses.Divergence.reverse_kl(), tail)
    same(ours, kl(whole(p[..., :4]), whole(q[..., :4])), logits)


def test_it_is_documented_and_its_example_runs():
    for name in functional.__all__:
        assert getattr(functional, name).__doc__, name
    lines = functional.__doc__.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    "))
    end = next(i for i, line in enumerate(lines) if i > start and line and not line.startswith("    "))
    code = "\n".join(line[4:] for line in lines[start:end])
    names: dict = {}
    exec(code, names)
    assert names["chosen"].grad.isfinite().all()
