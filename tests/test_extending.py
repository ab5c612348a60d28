"""What CONTRIBUTING.md promises of new losses: a pair loss is one class of under 10 lines, and gets everything else."""

import inspect

import torch
import torch.nn.functional as F

from liger_losses import Completions, Head, PreferenceLoss
from tests.reference import plain_statistics, problem


class SquaredMarginLoss(PreferenceLoss):
    """``(beta (logratio_w - logratio_l) - 1)^2``."""

    def __init__(self, beta=0.1, **options):
        super().__init__(beta=beta, use_ref_model=True, **options)

    def pair_loss(self, pairs):
        return (self.beta * (pairs.chosen_logratios - pairs.rejected_logratios) - 1).square()


def test_a_new_pair_loss_takes_under_ten_lines_and_equals_plain_pytorch():
    assert len([line for line in inspect.getsource(SquaredMarginLoss).splitlines() if line.strip()]) < 10
    hidden, weight, labels, bias = problem(shape=(6, 7), dtype=torch.float64, bias=True)
    ref_hidden, ref_weight, _, _ = (None if t is None else t.detach() for t in problem(shape=(6, 7), seed=1))
    ref_hidden, ref_weight = ref_hidden.double(), ref_weight.double()
    ratios = plain_statistics(hidden, weight, labels, bias, softcap=5.0)["logp"].sum(-1) - plain_statistics(
        ref_hidden, ref_weight, labels, softcap=5.0
    )["logp"].sum(-1)
    exact = (0.3 * (ratios[:3] - ratios[3:]) - 1).square().mean()
    expected = torch.autograd.grad(exact, (hidden, weight, bias))
    loss = SquaredMarginLoss(beta=0.3, softcap=5.0, workspace=100_000)
    sides = [Completions(hidden[rows], labels[rows], ref_hidden[rows]) for rows in (slice(3), slice(3, None))]
    for given in ((weight, hidden, labels, bias, ref_hidden), (Head(weight, bias), *sides)):
        value, metrics = loss(*given, ref_weight=ref_weight)
        torch.testing.assert_close(value, exact)
        torch.testing.assert_close(torch.autograd.grad(value, (hidden, weight, bias)), expected)
        torch.testing.assert_close(metrics.chosen_rewards, 0.3 * ratios[:3].detach())
    loss.beta = 0.7
    torch.testing.assert_close(
        loss(*given, ref_weight=ref_weight)[0], (0.7 * (ratios[:3] - ratios[3:]) - 1).square().mean()
    )


def test_a_loss_with_options_of_its_own_checks_them_when_they_are_set():
    class Smoothed(PreferenceLoss):
        def __init__(self, floor=0.0, **options):
            self.floor = floor
            super().__init__(**options)

        def check_options(self):
            super().check_options()
            if self.floor < 0:
                raise ValueError("floor must not be negative.")

        def pair_loss(self, pairs):
            return F.relu(pairs.rejected_logps - pairs.chosen_logps - self.floor)

    hidden, weight, labels, _ = problem(shape=(4, 5))
    loss = Smoothed(floor=1e9)
    assert loss(weight, hidden, labels)[0] == 0
    for value in (-1.0, 0.0):
        try:
            loss.floor = value
        except ValueError:
            assert loss.floor == 1e9
    assert loss.floor == 0.0
