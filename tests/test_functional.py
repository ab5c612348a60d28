"""Losses as functions of log-probabilities, beside their golden results."""

import pytest
import torch

from liger_losses import functional


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


def test_kto_compares_log_ratios_with_the_divergence():
    logps, ref, desirable = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), torch.tensor([True, False])
    found = functional.kto_loss(logps, ref, desirable, kl=0.4, beta=0.3)
    torch.testing.assert_close(found, 1 - torch.sigmoid(0.3 * torch.tensor([0.5 - 0.4, 1.0 + 0.4])))
