"""Preference losses against their papers' formulas in float64, and where others break."""

import math

import pytest
import torch
import torch.nn.functional as F

from liger_losses import (
    Completions,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
    Pairs,
    PreferenceLoss,
)
from liger_losses.chunked.losses.dpo import DPO_LOSSES, F_DIVERGENCES, DPOOptions
from tests.reference import plain_statistics, problem

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
    module = LigerFusedLinearDPOLoss(
        beta=BETA, loss_type=name, label_smoothing=0.1, compute_nll_loss=True, alpha=0.5, chunk_size=1
    )
    ours, metrics = module(weight, hidden, labels, None, ref_hidden, ref_weight)
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(exact, (hidden, weight))
    )
    torch.testing.assert_close(metrics.chosen_rewards, BETA * w.detach())
    torch.testing.assert_close(metrics.rejected_rewards, BETA * l.detach())
    torch.testing.assert_close(metrics.chosen_logps, policy[:B].detach())
    torch.testing.assert_close(metrics.chosen_nll_loss, nll.detach())
    mean_logit = plain_statistics(hidden, weight, labels)["mean_logit"]
    torch.testing.assert_close(metrics.chosen_logits_mean, (mean_logit[:B].sum() / lengths[:B].sum()).detach())
    assert not any(m.requires_grad for m in metrics)


def test_gradcheck_of_every_dpo_loss():
    hidden, weight, labels, _, _ = batch()
    ref = torch.randn(2, B, dtype=torch.float64)
    for name in DPO_LOSSES:
        module = LigerFusedLinearDPOLoss(beta=BETA, loss_type=name, label_smoothing=0.1, discopop_tau=1.0)

        def function(h, w, module=module):
            return module(w, h, labels, ref_chosen_logps=ref[0], ref_rejected_logps=ref[1])[0]

        assert torch.autograd.gradcheck(function, (hidden, weight), fast_mode=True), name


@pytest.mark.parametrize("name", DPO_LOSSES)
def test_pairs_equal_stacked(name):
    hidden, weight, labels, ref_hidden, ref_weight = batch()
    labels[B:, 6:] = -100  # so that the rejected side can be shorter
    module = LigerFusedLinearDPOLoss(loss_type=name, label_smoothing=0.1, ld_alpha=0.3)
    stacked, stacked_metrics = module(weight, hidden, labels, None, ref_hidden, ref_weight)
    chosen = Completions(hidden[:B], labels[:B], ref_hidden[:B])
    rejected = Completions(hidden[B:, :6], labels[B:, :6], ref_hidden[B:, :6])
    apart, metrics = module(weight, chosen, rejected, ref_weight=ref_weight)
    torch.testing.assert_close(apart, stacked)
    torch.testing.assert_close(tuple(metrics), tuple(stacked_metrics))
    torch.testing.assert_close(
        torch.autograd.grad(apart, (hidden, weight)), torch.autograd.grad(stacked, (hidden, weight))
    )


def test_the_three_kinds_of_reference_agree():
    hidden, weight, labels, ref_hidden, ref_weight = batch()
    per_token, per_sequence, _ = sums(ref_hidden, ref_weight, labels)
    module = LigerFusedLinearDPOLoss()
    expected = module(weight, hidden, labels, None, ref_hidden, ref_weight)[0]
    for ref in (per_sequence, per_token):
        ours = module(weight, hidden, labels, ref_chosen_logps=ref[:B], ref_rejected_logps=ref[B:])[0]
        torch.testing.assert_close(ours, expected)
        sides = (Completions(hidden[r], labels[r], ref_logps=ref[r]) for r in (slice(B), slice(B, None)))
        torch.testing.assert_close(module(weight, *sides)[0], expected)
    none = LigerFusedLinearDPOLoss(use_ref_model=False)(weight, hidden, labels)[0]
    zero = module(weight, hidden, labels, ref_chosen_logps=torch.zeros(B), ref_rejected_logps=torch.zeros(B))[0]
    torch.testing.assert_close(none, zero)


def test_a_single_pair_without_batch_dimension():
    hidden, weight, labels, _, _ = batch()
    module = LigerFusedLinearDPOLoss(use_ref_model=False)
    single = module(weight, (hidden[0], labels[0]), (hidden[1, :6], labels[1, :6]))[0]
    batched = module(weight, (hidden[:1], labels[:1]), (hidden[1:2, :6], labels[1:2, :6]))[0]
    torch.testing.assert_close(single, batched)
    ref = torch.tensor([0.3, -0.2], dtype=torch.float64)
    module = LigerFusedLinearDPOLoss()
    assert module(
        weight, Completions(hidden[0], labels[0], ref_logps=ref[0]), Completions(hidden[1], labels[1], ref_logps=ref[1])
    )[0].isfinite()


def test_several_losses_at_once():
    args = batch()
    args = (args[1], args[0], args[2], None, args[3], args[4])
    names, weights = ("sigmoid", "sft", "bco_pair"), (0.8, 1.0, 0.2)
    together = LigerFusedLinearDPOLoss(loss_type=names, loss_weights=weights)(*args)[0]
    apart = sum(x * LigerFusedLinearDPOLoss(loss_type=n)(*args)[0] for n, x in zip(names, weights, strict=True))
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
    module = LigerFusedLinearDPOLoss(beta=BETA, f_divergence_type=divergence, f_alpha_divergence_coef=0.4)
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
    ours = LigerFusedLinearDPOLoss(beta=BETA, ld_alpha=0.25)(weight, hidden, labels, None, ref_hidden, ref_weight)[0]
    torch.testing.assert_close(ours, -F.logsigmoid(BETA * (w - l)).mean())


def test_wpo_weighting():
    hidden, weight, labels, ref_hidden, ref_weight = batch()
    values = plain_statistics(hidden, weight, labels)
    lengths = (labels != -100).sum(-1)
    aligned = ((values["logp"] - values["log_sum_sq_probs"]).sum(-1) / lengths).exp().detach()
    ref = plain_statistics(ref_hidden, ref_weight, labels)["logp"].sum(-1)
    w, l = (values["logp"].sum(-1) - ref).chunk(2)
    exact = (-F.logsigmoid(BETA * (w - l)) * aligned[:B] * aligned[B:]).mean()
    ours = LigerFusedLinearDPOLoss(beta=BETA, use_weighting=True)(weight, hidden, labels, None, ref_hidden, ref_weight)
    torch.testing.assert_close(ours[0], exact)
    torch.testing.assert_close(
        torch.autograd.grad(ours[0], (hidden, weight)), torch.autograd.grad(exact, (hidden, weight))
    )


def test_cpo_simpo_orpo_equal_their_formulas():
    hidden, weight, labels, _, _ = batch()
    logp, total, lengths = sums(hidden, weight, labels)
    mean = total / lengths
    nll = -logp[:B].sum() / lengths[:B].sum()
    (sw, sl), (w, l) = total.chunk(2), mean.chunk(2)
    reward = (1 - mean.exp() ** -0.25) / 0.25
    odds = mean.exp() / (1 - mean.exp())
    cases = [
        (LigerFusedLinearCPOLoss(beta=BETA), -s(BETA * (sw - sl)).log() + nll),
        (LigerFusedLinearCPOLoss(beta=BETA, label_smoothing=0.2), FORMULAS["sigmoid"](sw - sl, 0.2) + nll),
        (LigerFusedLinearCPOLoss(beta=BETA, loss_type="hinge", alpha=0.1), FORMULAS["hinge"](sw - sl, 0) + 0.1 * nll),
        (LigerFusedLinearCPOLoss(beta=BETA, loss_type="ipo"), (w - l - 1 / (2 * BETA)) ** 2 + nll),
        (
            LigerFusedLinearCPOLoss(beta=BETA, loss_type="simpo", gamma=0.7, compute_nll_loss=False),
            -s(BETA * (w - l) - 0.7).log(),
        ),
        (
            LigerFusedLinearCPOLoss(beta=BETA, loss_type="alphapo", reward_alpha=0.25, compute_nll_loss=False),
            -s(BETA * (reward[:B] - reward[B:]) - 0.5).log(),
        ),
        (LigerFusedLinearSimPOLoss(beta=BETA, gamma=0.7), -s(BETA * (w - l) - 0.7).log() + nll),
        (LigerFusedLinearORPOLoss(beta=BETA), -BETA * s((odds[:B] / odds[B:]).log()).log() + nll),
    ]
    for module, exact in cases:
        ours, _ = module(weight, hidden, labels)
        torch.testing.assert_close(ours, exact.mean(), msg=lambda m, module=module: f"{module}: {m}")
        torch.testing.assert_close(
            torch.autograd.grad(ours, (hidden, weight)),
            torch.autograd.grad(exact.mean(), (hidden, weight), retain_graph=True),
        )
    metrics = cases[-1][0](weight, hidden, labels)[1]
    torch.testing.assert_close(metrics.log_odds_chosen, (odds[:B] / odds[B:]).log().mean().detach())
    torch.testing.assert_close(metrics.log_odds_ratio, F.logsigmoid((odds[:B] / odds[B:]).log()).mean().detach())


def test_nll_over_other_tokens():
    hidden, weight, labels, _, _ = batch()
    nll_target = labels.clone()
    nll_target[:, :2] = 5  # the prompts
    nll_target[0, 4] = 3  # another label than the preference's
    nll_target[2, 5] = -100  # a token that only the preference scores
    exact_logp = plain_statistics(hidden, weight, nll_target)["logp"][:B]
    exact_nll = -exact_logp.sum() / (nll_target[:B] != -100).sum()
    preference = LigerFusedLinearORPOLoss(beta=BETA, compute_nll_loss=False)(weight, hidden, labels)[0]
    exact = preference + exact_nll
    for args in (
        (weight, hidden, labels, None, nll_target),
        (weight, (hidden[:B], labels[:B]), (hidden[B:], labels[B:]), None, nll_target[:B]),
    ):
        ours, metrics = LigerFusedLinearORPOLoss(beta=BETA)(*args)
        torch.testing.assert_close(ours, exact)
        torch.testing.assert_close(metrics.chosen_nll_loss, exact_nll.detach())
        torch.testing.assert_close(
            torch.autograd.grad(ours, (hidden, weight)),
            torch.autograd.grad(exact, (hidden, weight), retain_graph=True),
        )


def test_nll_leaves_out_a_token_without_probability():
    """It is a token that only the preference scores; 0 times its log-probability, -inf, would be NaN."""
    hidden, weight, labels, _, _ = batch()
    labels[labels == 6] = 5
    labels[0, 4], bias = 6, torch.zeros(V, dtype=torch.float64)
    bias[6] = -math.inf
    nll_target = labels.masked_fill(labels == 6, -100)
    exact_logp = plain_statistics(hidden, weight, nll_target, bias)["logp"][:B]
    _, metrics = LigerFusedLinearORPOLoss(beta=BETA)(weight, hidden, labels, bias, nll_target)
    torch.testing.assert_close(metrics.chosen_nll_loss, -exact_logp.sum().detach() / (nll_target[:B] != -100).sum())


def test_shift():
    hidden, weight, labels, ref_hidden, ref_weight = batch()
    module = LigerFusedLinearDPOLoss(shift=True)
    ours = module(weight, hidden, labels, None, ref_hidden, ref_weight)[0]
    by_hand = LigerFusedLinearDPOLoss()(weight, hidden[:, :-1], labels[:, 1:], None, ref_hidden[:, :-1], ref_weight)[0]
    torch.testing.assert_close(ours, by_hand)


# --- Where others give NaN ------------------------------------------------------------------------------------------

ALL = [
    *[(f"dpo-{n}", LigerFusedLinearDPOLoss(loss_type=n, label_smoothing=0.1)) for n in DPO_LOSSES],
    *[(f"dpo-{n}", LigerFusedLinearDPOLoss(f_divergence_type=n, f_alpha_divergence_coef=2.0)) for n in F_DIVERGENCES],
    ("dpo-wpo", LigerFusedLinearDPOLoss(use_weighting=True)),
    ("dpo-ld", LigerFusedLinearDPOLoss(ld_alpha=0.5)),
    ("dpo-average", LigerFusedLinearDPOLoss(average_log_prob=True, compute_nll_loss=True)),
    *[(f"cpo-{n}", LigerFusedLinearCPOLoss(loss_type=n)) for n in ("sigmoid", "hinge", "ipo", "simpo")],
    ("alphapo", LigerFusedLinearCPOLoss(loss_type="alphapo", reward_alpha=0.25)),
    ("simpo", LigerFusedLinearSimPOLoss()),
    ("orpo", LigerFusedLinearORPOLoss()),
]


def run(module, hidden, weight, labels):
    inputs = {}
    if module.use_ref_model:
        rows = labels.shape[0] // 2
        inputs = {"ref_chosen_logps": torch.zeros(rows), "ref_rejected_logps": torch.zeros(rows)}
    loss, metrics = module(weight, hidden, labels, **inputs)
    grads = torch.autograd.grad(loss, (hidden, weight))
    for what, value in (
        ("loss", loss),
        ("grad_hidden", grads[0]),
        ("grad_weight", grads[1]),
        *metrics._asdict().items(),
    ):
        assert value.isfinite().all(), what
    return loss


@pytest.mark.parametrize(("name", "module"), ALL, ids=[n for n, _ in ALL])
def test_finite_where_others_are_not(name, module):
    hidden, weight, labels, _, _ = batch(dtype=torch.float32)
    for rows in ([0], [4], [0, 1, 2], [3, 4, 5], [0, 3], range(6)):
        masked = labels.clone()
        masked[list(rows)] = -100
        run(module, hidden, weight, masked)
    for scale in (1e-6, 30.0, 3e3):  # log-probs from uniform to -1e4 a token
        run(module, *[(t.detach() * scale).requires_grad_() for t in (hidden, weight)], labels)
    empty = torch.zeros(0, T, H, requires_grad=True)
    assert run(module, empty, weight, torch.zeros(0, T, dtype=torch.int64)) == 0


@pytest.mark.parametrize("name", DPO_LOSSES)
@pytest.mark.parametrize("margin", [-1e6, 1e6])
def test_any_margin(name, margin):
    w, l = (torch.full((2,), side * margin / 2, dtype=torch.float64, requires_grad=True) for side in (1, -1))
    zero, length = torch.zeros(2, dtype=torch.float64), torch.tensor([3, 1])
    pairs = Pairs(w, l, zero, zero, length, length, w.mean())
    losses = DPO_LOSSES[name](pairs, w - l, DPOOptions(beta=0.1, label_smoothing=0.1))
    assert losses.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(losses.sum(), (w, l), materialize_grads=True))


def certain(labels, sign=1.0):
    """Hidden states and weight under which every label has probability 1 (or, with ``sign=-1``, next to 0)."""
    weight = torch.eye(V).mul_(40.0).requires_grad_()
    hidden = (F.one_hot(labels.clamp(min=0), V).float() * sign).requires_grad_()
    return hidden, weight


def test_orpo_as_probabilities_reach_one():
    labels = torch.randint(0, V, (2, 4))
    hidden, weight = certain(labels)
    loss, metrics = LigerFusedLinearORPOLoss(beta=1.0, compute_nll_loss=False)(weight, hidden, labels)
    assert metrics.chosen_logps == 0  # p = 1 exactly, in fp32
    torch.testing.assert_close(loss, torch.tensor(math.log(2.0)))  # both sides equally certain
    half = torch.stack([labels[0], (labels[0] + 1) % V])
    hidden = F.one_hot(labels[:1].expand(2, -1), V).float().requires_grad_()
    good, _ = LigerFusedLinearORPOLoss(beta=1.0, compute_nll_loss=False)(weight, hidden, half)
    bad, _ = LigerFusedLinearORPOLoss(beta=1.0, compute_nll_loss=False)(weight, hidden, half.flip(0))
    assert 0 <= good < 1e-10
    # chosen: log p = -40 and so log-odds -40; rejected: p = 1, whose log-odds end at 15.94
    torch.testing.assert_close(bad, torch.tensor(40 + 23 * math.log(2.0)), rtol=1e-5, atol=0.0)
    for value in (loss, good, bad):
        assert all(g.isfinite().all() for g in torch.autograd.grad(value, (weight,)))


def test_a_completion_without_tokens_has_log_probability_zero():
    hidden, weight, labels, _, _ = batch()
    labels[0] = -100
    for module in (LigerFusedLinearDPOLoss(use_ref_model=False), LigerFusedLinearSimPOLoss()):
        assert module(weight, hidden, labels)[1].chosen_logps[0] == 0


def test_reference_log_probs_may_be_anything_at_masked_tokens():
    hidden, weight, labels, _, _ = batch()
    module = LigerFusedLinearDPOLoss()
    ref = torch.full(labels.shape, -1.0, dtype=torch.float64)
    clean = module(weight, hidden, labels, ref_chosen_logps=ref[:B], ref_rejected_logps=ref[B:])[0]
    ref[labels == -100] = -math.inf
    torch.testing.assert_close(
        module(weight, hidden, labels, ref_chosen_logps=ref[:B], ref_rejected_logps=ref[B:])[0], clean
    )


def test_a_single_completion_takes_one_reference_log_prob_and_its_own_nll_labels():
    hidden, weight, labels, _, _ = batch()
    for shape in ((), (1,)):
        ref = torch.full(shape, -20.0, dtype=torch.float64)
        sides = (Completions(hidden[i], labels[i], ref_logps=ref) for i in (0, 3))
        assert LigerFusedLinearDPOLoss()(weight, *sides)[0].isfinite()
    pair = ((hidden[0], labels[0]), (hidden[3], labels[3]))
    plain = LigerFusedLinearORPOLoss()(weight, *pair)[0]
    torch.testing.assert_close(LigerFusedLinearORPOLoss()(weight, *pair, None, labels[0])[0], plain)


def test_attributes_are_those_that_were_given():
    module = LigerFusedLinearDPOLoss(loss_type="ipo", label_smoothing=0.1, discopop_tau=0.2, beta=0.3)
    assert (module.loss_type, module.label_smoothing, module.discopop_tau, module.beta) == ("ipo", 0.1, 0.2, 0.3)


# --- One's own -------------------------------------------------------------------------------------------------------


def test_a_loss_of_ones_own():
    class Margin(PreferenceLoss):
        def pair_loss(self, pairs: Pairs):
            return (pairs.rejected_logps - pairs.chosen_logps).relu()

    hidden, weight, labels, _, _ = batch()
    loss, metrics = Margin()(weight, hidden, labels)
    torch.testing.assert_close(loss.detach(), (metrics.rejected_logps - metrics.chosen_logps).relu().mean())
