"""DPO and its variants against their papers' formulas in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from liger_losses.chunked.losses.dpo import DPO_LOSSES, F_DIVERGENCES
from tests.losses import DPO
from tests.reference import assert_close_gradients, plain_statistics, problem

B, T, H, V = 3, 9, 12, 37
BETA = 0.3


def batch(seed=0, dtype=torch.float64, scale=1.0):
    """Stacked hidden states, weight, labels (prompt, padding), and a reference's hidden states and weight."""
    hidden, weight, labels, _ = problem(shape=(2 * B, T), h=H, v=V, dtype=dtype, masked=0.0, seed=seed, scale=scale)
    labels[:, :2] = -100
    labels[1, 5:] = -100
    labels[4, 7:] = -100
    ref_hidden, ref_weight, _, _ = problem(shape=(2 * B, T), h=H, v=V, dtype=dtype, seed=seed + 1)
    return hidden, weight, labels, ref_hidden.detach(), ref_weight.detach()


def sums(hidden, weight, labels):
    logp = plain_statistics(hidden, weight, labels)["logp"]
    lengths = (labels != -100).sum(-1)
    return logp, logp.sum(-1), lengths


# The papers' formulas, written on their own: (chosen logratio, rejected logratio, lengths, ...) -> [B]
def s(x):
    return torch.sigmoid(x)


FORMULAS = {
    "sigmoid": lambda d, e: -(1 - e) * s(BETA * d).log() - e * s(-BETA * d).log(),
    "hinge": lambda d, e: (1 - BETA * d).clamp(min=0),
    "robust": lambda d, e: (-(1 - e) * s(BETA * d).log() + e * s(-BETA * d).log()) / (1 - 2 * e),
    "exo_pair": lambda d, e: (
        s(BETA * d) * (s(BETA * d).log() - math.log(1 - e)) + s(-BETA * d) * (s(-BETA * d).log() - math.log(e))
    ),
    "discopop": lambda d, e: s(BETA * d / 0.05) * (-BETA * d).exp() - (1 - s(BETA * d / 0.05)) * s(BETA * d).log(),
}
PAIR_FORMULAS = {
    "nca_pair": lambda w, l: -s(BETA * w).log() - 0.5 * s(-BETA * w).log() - 0.5 * s(-BETA * l).log(),
    "bco_pair": lambda w, l: -s(BETA * w).log() - s(-BETA * l).log(),
    "sppo_hard": lambda w, l: (w - 1 / (2 * BETA)) ** 2 + (l + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda w, l: 1 - s(BETA * w) + s(BETA * l),
    "apo_down": lambda w, l: s(BETA * w) + 1 - s(BETA * (w - l)),
}


def formula(name, w, l, pol, ref, lengths, nll, e):
    if name in FORMULAS:
        return FORMULAS[name](w - l, e)
    if name in PAIR_FORMULAS:
        return PAIR_FORMULAS[name](w, l)
    per_token = w / lengths[:B] - l / lengths[B:]
    if name == "ipo":
        return (per_token - 1 / (2 * BETA)) ** 2
    if name == "sigmoid_norm":
        return FORMULAS["sigmoid"](per_token, e)
    if name == "aot":
        return FORMULAS["sigmoid"]((pol[:B] - pol[B:]).sort().values - (ref[:B] - ref[B:]).sort().values, e)
    if name == "aot_unpaired":
        return FORMULAS["sigmoid"](w.sort().values - l.sort().values, e)
    assert name == "sft"
    return nll.expand(B)


@pytest.mark.parametrize("name", DPO_LOSSES)
def test_dpo_equals_its_formula(name):
    hidden, weight, labels, ref_hidden, ref_weight = batch()
    logp, policy, lengths = sums(hidden, weight, labels)
    _, ref, _ = sums(ref_hidden, ref_weight, labels)
    nll = -logp[:B].sum() / lengths[:B].sum()
    w, l = (policy - ref).chunk(2)
    exact = formula(name, w, l, policy, ref, lengths, nll, 0.1).mean() + 0.5 * nll
    module = DPO(beta=BETA, loss_type=name, label_smoothing=0.1, compute_nll_loss=True, alpha=0.5, chunk_size=1)
    ours, metrics = module(weight, hidden, labels, None, ref_hidden, ref_weight)
    torch.testing.assert_close(ours, exact)
    assert_close_gradients(ours, exact, (hidden, weight))
    torch.testing.assert_close(metrics.chosen_rewards, BETA * w.detach())
    torch.testing.assert_close(metrics.rejected_rewards, BETA * l.detach())
    torch.testing.assert_close(metrics.chosen_logps, policy[:B].detach())
    torch.testing.assert_close(metrics.chosen_nll_loss, nll.detach())
    mean_logit = plain_statistics(hidden, weight, labels)["mean_logit"]
    torch.testing.assert_close(metrics.chosen_logits_mean, (mean_logit[:B].sum() / lengths[:B].sum()).detach())
    assert not any(m.requires_grad for m in metrics)


def test_several_losses_at_once():
    args = batch()
    args = (args[1], args[0], args[2], None, args[3], args[4])
    names, weights = ("sigmoid", "sft", "bco_pair"), (0.8, 1.0, 0.2)
    together = DPO(loss_type=names, loss_weights=weights)(*args)[0]
    apart = sum(x * DPO(loss_type=n)(*args)[0] for n, x in zip(names, weights, strict=True))
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize(
    ("divergence", "derivative"),
    [
        ("reverse_kl", lambda t: t.log()),
        ("forward_kl", lambda t: 1 - 1 / t),
        ("js_divergence", lambda t: (2 * t / (t + 1)).log()),
        ("alpha_divergence", lambda t: (t ** (0.4 - 1) - 1) / (0.4 - 1)),
    ],
)
def test_f_divergences(divergence, derivative):
    hidden, weight, labels, ref_hidden, ref_weight = batch()
    _, policy, _ = sums(hidden, weight, labels)
    _, ref, _ = sums(ref_hidden, ref_weight, labels)
    w, l = derivative((policy - ref).exp()).chunk(2)
    module = DPO(beta=BETA, f_divergence_type=divergence, f_alpha_divergence_coef=0.4)
    ours = module(weight, hidden, labels, None, ref_hidden, ref_weight)[0]
    torch.testing.assert_close(ours, -F.logsigmoid(BETA * (w - l)).mean())


def test_alpha_divergence_at_one_is_reverse_kl():
    u = torch.randn(5)
    assert torch.equal(F_DIVERGENCES["alpha_divergence"](u, 1.0), u)


def test_length_desensitised():
    hidden, weight, labels, ref_hidden, ref_weight = batch()
    logp, _, lengths = sums(hidden, weight, labels)
    ref, _, _ = sums(ref_hidden, ref_weight, labels)
    ratio = []
    for row in range(2 * B):
        shared = min(lengths[row % B], lengths[row % B + B])
        at = [t for t in range(T) if labels[row, t] != -100]
        ratio.append(sum((logp - ref)[row, t] * (1.0 if i < shared else 0.25) for i, t in enumerate(at)))
    w, l = torch.stack(ratio).chunk(2)
    ours = DPO(beta=BETA, ld_alpha=0.25)(weight, hidden, labels, None, ref_hidden, ref_weight)[0]
    torch.testing.assert_close(ours, -F.logsigmoid(BETA * (w - l)).mean())


def test_wpo_weighting():
    hidden, weight, labels, ref_hidden, ref_weight = batch()
    values = plain_statistics(hidden, weight, labels)
    lengths = (labels != -100).sum(-1)
    aligned = ((values["logp"] - values["log_sum_sq_probs"]).sum(-1) / lengths).exp().detach()
    ref = plain_statistics(ref_hidden, ref_weight, labels)["logp"].sum(-1)
    w, l = (values["logp"].sum(-1) - ref).chunk(2)
    exact = (-F.logsigmoid(BETA * (w - l)) * aligned[:B] * aligned[B:]).mean()
    ours = DPO(beta=BETA, use_weighting=True)(weight, hidden, labels, None, ref_hidden, ref_weight)
    torch.testing.assert_close(ours[0], exact)
    assert_close_gradients(ours[0], exact, (hidden, weight))
