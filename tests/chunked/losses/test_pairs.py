"""Pairs of completions beside their golden results: forms of a call, references, masks and extreme margins."""

import math

import pytest
import torch
import torch.nn.functional as F

from liger_losses import Completions, PreferenceLoss
from liger_losses.chunked.losses.dpo import DPO_LOSSES
from tests.losses import CPO, DPO, GRPO, KTO, ORPO, SimPO
from tests.reference import assert_close_gradients, plain_statistics, problem

B, T, H, V = 3, 9, 12, 37
BETA = 0.3


def batch():
    """Stacked hidden states, weight, labels (prompt, padding), and a reference's hidden states and weight."""
    hidden, weight, labels, _ = problem(shape=(2 * B, T), h=H, v=V, dtype=torch.float64, masked=0.0)
    labels[:, :2] = labels[1, 5:] = labels[4, 7:] = -100
    ref_hidden, ref_weight, _, _ = problem(shape=(2 * B, T), h=H, v=V, dtype=torch.float64, seed=1)
    return hidden, weight, labels, ref_hidden.detach(), ref_weight.detach()


class TokenDPO(PreferenceLoss):
    """TDPO-like: the sum of each token's log-ratio, clipped."""

    def pair_loss(self, pairs):
        w, l = pairs.chosen_token_logps, pairs.rejected_token_logps
        ratios = (w - pairs.ref_chosen_token_logps).clamp(-1, 1), (l - pairs.ref_rejected_token_logps).clamp(-1, 1)
        sums = [(r * m).sum(-1) for r, m in zip(ratios, (pairs.chosen_mask, pairs.rejected_mask), strict=True)]
        return -F.logsigmoid(self.beta * (sums[0] - sums[1]))


def test_a_pair_loss_reads_tokens():
    hidden, weight, labels, ref_hidden, ref_weight = batch()
    labels[B:, 6:] = -100
    models = (hidden, weight), (ref_hidden, ref_weight)
    logp, ref = (plain_statistics(*model, labels)["logp"] for model in models)
    for refs in (ref, torch.zeros_like(ref)):
        clipped = (logp - refs).clamp(-1, 1).sum(-1)
        exact = -F.logsigmoid(BETA * (clipped[:B] - clipped[B:])).mean()
        loss = TokenDPO(beta=BETA, use_ref_model=refs is ref)
        given = {"ref_weight": ref_weight} if refs is ref else {}
        ref_states = (ref_hidden[:B], ref_hidden[B:, :6]) if refs is ref else (None, None)
        sides = (hidden[:B], labels[:B], ref_states[0]), (hidden[B:, :6], labels[B:, :6], ref_states[1])
        value, _ = loss(weight, *[Completions(*side) for side in sides], **given)
        torch.testing.assert_close(value, exact)
        assert_close_gradients(value, exact, (hidden, weight))
    loss = TokenDPO(use_ref_model=True)
    with pytest.raises(ValueError, match="give ref_logps of each token"):
        loss(weight, hidden, labels, ref_chosen_logps=torch.zeros(B), ref_rejected_logps=torch.zeros(B))


class AnchoredHinge(PreferenceLoss):
    """A reference of chosen completions alone."""

    needs_reference = None

    def pair_loss(self, pairs):
        return (1 - (pairs.chosen_logps - pairs.ref_chosen_logps)).clamp(min=0) + pairs.rejected_logps


def test_a_reference_of_one_group():
    hidden, weight, labels, *_ = batch()
    refs, loss = torch.linspace(-9.0, -5.0, B), AnchoredHinge(use_ref_model=True)
    logps = plain_statistics(hidden, weight, labels)["logp"].sum(-1)
    exact = ((1 - (logps[:B] - refs)).clamp(min=0) + logps[B:]).mean()
    apart = Completions(hidden[:B], labels[:B], ref_logps=refs), (hidden[B:], labels[B:])
    for value, _ in (loss(weight, hidden, labels, ref_chosen_logps=refs), loss(weight, *apart)):
        torch.testing.assert_close(value, exact)
        assert_close_gradients(value, exact, (hidden, weight))


@pytest.mark.parametrize("kind", [DPO, CPO, SimPO, KTO, GRPO])
def test_stacked_losses_without_a_reference_ignore_one(kind):
    """As liger-kernel does."""
    hidden, weight, labels, *_ = batch()
    call = {"_input": hidden, "lin_weight": weight, "target": labels}
    if kind is KTO:
        call |= {"preference_labels": torch.arange(len(labels)) % 2 == 0, "kl": 0.0}
    if kind is GRPO:
        call |= {"selected_token_ids": call.pop("target"), "attention_mask": labels >= 0, "advantages": torch.ones(6)}
    loss = kind(use_ref_model=False)
    for reference in ({"ref_input": hidden}, {}):
        found = loss(**call, ref_weight=weight, **reference)[0]
        torch.testing.assert_close(found, loss(**call)[0], rtol=0, atol=0)


def test_nll_leaves_out_a_token_without_probability():
    """It is a token that only the preference scores; 0 times its log-probability, -inf, would be NaN."""
    hidden, weight, labels, _, _ = batch()
    labels[labels == 6] = 5
    labels[0, 4], bias = 6, torch.zeros(V, dtype=torch.float64)
    bias[6] = -math.inf
    nll_target = labels.masked_fill(labels == 6, -100)
    exact_logp = plain_statistics(hidden, weight, nll_target, bias)["logp"][:B]
    _, metrics = ORPO(beta=BETA)(weight, hidden, labels, bias, nll_target)
    torch.testing.assert_close(metrics.chosen_nll_loss, -exact_logp.sum().detach() / (nll_target[:B] != -100).sum())


def test_a_single_pair_without_batch_dimension():
    """It takes one reference log-probability, and its own labels of the likelihood."""
    hidden, weight, labels, _, _ = batch()
    pair = ((hidden[0], labels[0]), (hidden[3, :6], labels[3, :6]))
    of_batch = [(states[None], y[None]) for states, y in pair]
    for loss in (DPO(use_ref_model=False), ORPO()):
        torch.testing.assert_close(loss(weight, *pair)[0], loss(weight, *of_batch)[0])
    torch.testing.assert_close(ORPO()(weight, *pair, None, labels[0])[0], ORPO()(weight, *pair)[0])
    for shape in ((), (1,)):
        ref = torch.full(shape, -20.0, dtype=torch.float64)
        assert DPO()(weight, *(Completions(*side, ref_logps=ref) for side in pair))[0].isfinite()


def test_metrics_of_a_loss_of_ones_own_come_beside_the_losses():
    class Confident(DPO):
        metrics = ("entropy",)

        def sequence_weight(self, statistics, mask):
            return (-statistics.entropy.sum(-1) / mask.sum(-1)).exp()

    hidden, weight, labels, _ = problem(shape=(4, 7), masked=0.0)
    pairs = [Completions(h, y, ref_logps=torch.zeros(2)) for h, y in zip(hidden.chunk(2), labels.chunk(2), strict=True)]
    loss, metrics = Confident()(weight, *pairs)
    assert loss.isfinite()
    assert metrics.chosen_logits_mean.isfinite()


@pytest.mark.peers
def test_every_dpo_loss_type_of_trl_is_here():
    dpo_config = pytest.importorskip("trl", reason="TRL is not installed").DPOConfig
    text = dpo_config.__dataclass_fields__["loss_type"].metadata["help"]
    named = {name for name in DPO_LOSSES if f"`'{name}'`" in text}
    assert named == set(DPO_LOSSES), set(DPO_LOSSES) - named
    mentioned = {part.split("`")[0].strip("'") for part in text.split("`'")[1:]}
    assert mentioned <= set(DPO_LOSSES), mentioned - set(DPO_LOSSES)
