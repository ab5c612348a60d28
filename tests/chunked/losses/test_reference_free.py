"""CPO, SimPO and ORPO against their papers' formulas in float64."""

import math

import torch
import torch.nn.functional as F

from tests.chunked.losses.test_dpo import BETA, FORMULAS, B, V, batch, s, sums
from tests.losses import CPO, ORPO, SimPO
from tests.reference import assert_close_gradients


def test_cpo_simpo_orpo_equal_their_formulas():
    hidden, weight, labels, _, _ = batch()
    logp, total, lengths = sums(hidden, weight, labels)
    mean = total / lengths
    nll = -logp[:B].sum() / lengths[:B].sum()
    (sw, sl), (w, l) = total.chunk(2), mean.chunk(2)
    reward = (1 - mean.exp() ** -0.25) / 0.25
    odds = mean.exp() / (1 - mean.exp())
    cases = [
        (CPO(beta=BETA), -s(BETA * (sw - sl)).log() + nll),
        (CPO(beta=BETA, label_smoothing=0.2), FORMULAS["sigmoid"](sw - sl, 0.2) + nll),
        (CPO(beta=BETA, loss_type="hinge", alpha=0.1), FORMULAS["hinge"](sw - sl, 0) + 0.1 * nll),
        (CPO(beta=BETA, loss_type="ipo"), (w - l - 1 / (2 * BETA)) ** 2 + nll),
        (CPO(beta=BETA, loss_type="simpo", gamma=0.7, compute_nll_loss=False), -s(BETA * (w - l) - 0.7).log()),
        (
            CPO(beta=BETA, loss_type="alphapo", reward_alpha=0.25, compute_nll_loss=False),
            -s(BETA * (reward[:B] - reward[B:]) - 0.5).log(),
        ),
        (SimPO(beta=BETA, gamma=0.7), -s(BETA * (w - l) - 0.7).log() + nll),
        (ORPO(beta=BETA), -BETA * s((odds[:B] / odds[B:]).log()).log() + nll),
    ]
    for module, exact in cases:
        ours, _ = module(weight, hidden, labels)
        torch.testing.assert_close(ours, exact.mean(), msg=lambda m, module=module: f"{module}: {m}")
        assert_close_gradients(ours, exact.mean(), (hidden, weight))
    metrics = cases[-1][0](weight, hidden, labels)[1]
    torch.testing.assert_close(metrics.log_odds_chosen, (odds[:B] / odds[B:]).log().mean().detach())
    torch.testing.assert_close(metrics.log_odds_ratio, F.logsigmoid((odds[:B] / odds[B:]).log()).mean().detach())


def certain(labels, sign=1.0):
    """Hidden states and weight under which every label has probability 1 (or, with ``sign=-1``, next to 0)."""
    weight = torch.eye(V).mul_(40.0).requires_grad_()
    hidden = (F.one_hot(labels.clamp(min=0), V).float() * sign).requires_grad_()
    return hidden, weight


def test_orpo_as_probabilities_reach_one():
    labels = torch.randint(0, V, (2, 4))
    hidden, weight = certain(labels)
    loss, metrics = ORPO(beta=1.0, compute_nll_loss=False)(weight, hidden, labels)
    assert metrics.chosen_logps == 0  # p = 1 exactly, in fp32
    torch.testing.assert_close(loss, torch.tensor(math.log(2.0)))  # both sides equally certain
    half = torch.stack([labels[0], (labels[0] + 1) % V])
    hidden = F.one_hot(labels[:1].expand(2, -1), V).float().requires_grad_()
    good, _ = ORPO(beta=1.0, compute_nll_loss=False)(weight, hidden, half)
    bad, _ = ORPO(beta=1.0, compute_nll_loss=False)(weight, hidden, half.flip(0))
    assert 0 <= good < 1e-10
    # chosen: log p = -40 and so log-odds -40; rejected: p = 1, whose log-odds end at 15.94
    torch.testing.assert_close(bad, torch.tensor(40 + 23 * math.log(2.0)), rtol=1e-5, atol=0.0)
    for value in (loss, good, bad):
        assert all(g.isfinite().all() for g in torch.autograd.grad(value, (weight,)))
