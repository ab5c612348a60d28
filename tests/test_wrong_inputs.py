"""Wrong inputs of the public API: each is an error before any work that says what was given and what was expected."""

import importlib
import math

import numpy as np
import pytest
import torch

from liger_losses import (
    Completions,
    Divergence,
    Head,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearSimPOLoss,
    Teacher,
    TeacherLogits,
    TeacherTopK,
    TokenSupport,
    functional,
    linear_divergence_loss,
    linear_logps,
    linear_statistics,
    linear_token_loss,
    patch,
)
from liger_losses.trl import enable
from tests.reference import problem

CE, DPO, GRPO = LigerFusedLinearCrossEntropyLoss, LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss
JSD, KTO, F = LigerFusedLinearJSDLoss, LigerFusedLinearKTOLoss, functional
NAN, PER_TOKEN, ONES = math.nan, torch.zeros(4, 5), torch.ones(4)
MASK = torch.ones(4, 5, dtype=torch.bool)


def policy(h, w, y, advantages=ONES, **options):
    return GRPO(beta=0.0)(h, w, y.clamp(min=0), MASK, advantages, **options)


def one_token(statistics, labels):
    return statistics.logp


WRONG = {
    # options
    "z-loss": (lambda h, w, y: CE(lse_square_scale=NAN), r"lse_square_scale must lie in \[0.0, inf\), got nan"),
    "z-loss as text": (lambda h, w, y: CE(lse_square_scale="x"), "lse_square_scale must be a number, got 'x'"),
    "compact": (lambda h, w, y: CE(compact="no"), "compact must be True or False, got 'no'"),
    "a flag as text": (lambda h, w, y: DPO(use_ref_model="false"), "use_ref_model must be True or False, got 'false'"),
    "shifts": (lambda h, w, y: DPO(shift=[1, 2]), "shift=.1, 2. needs lists of hidden states"),
    "alpha": (lambda h, w, y: DPO(alpha=NAN), r"alpha must lie in \[0.0, inf\), got nan"),
    "loss weights": (lambda h, w, y: DPO(loss_weights=1.0), "loss_weights must have one entry per loss_type"),
    "a loss weight": (lambda h, w, y: DPO(loss_weights=[NAN]), "each of loss_weights must be a finite number, got nan"),
    "loss type": (lambda h, w, y: DPO(loss_type=3), "unknown loss_type 3"),
    "f-alpha": (lambda h, w, y: DPO(f_alpha_divergence_coef=NAN), "f_alpha_divergence_coef must be a finite number"),
    "gamma": (lambda h, w, y: LigerFusedLinearSimPOLoss(gamma="x"), "gamma must be a number"),
    "AlphaPO's alpha": (
        lambda h, w, y: LigerFusedLinearCPOLoss(reward_alpha=NAN),
        "reward_alpha must be a finite number",
    ),
    "a form": (lambda h, w, y: Divergence("kl"), r"unknown divergence 'kl'; use a constructor.*reverse_kl\(\)"),
    "a mixture": (lambda h, w, y: Divergence.mixture(NAN, 1, 1), "parameters of a divergence must be finite"),
    "a head's transform": (lambda h, w, y: Head(w, transform=0.7), r"must be a liger_losses.LogitTransform\(...\)"),
    "streaming": (lambda h, w, y: linear_statistics(h, w, y, options={}), r"must be liger_losses.EngineOptions\(...\)"),
    # tensors
    "NumPy": (lambda h, w, y: CE()(w, h.numpy(), y), r"hidden_states must be a tensor, got ndarray; pass torch.as_t"),
    "nested": (
        lambda h, w, y: CE()(w, torch.nested.nested_tensor([h[0], h[1]]), y),
        r"nested tensor; pass hidden_states.to_padded_tensor",
    ),
    "complex weights": (lambda h, w, y: CE()(w, h, y, token_weights=PER_TOKEN * 1j), "token_weights must be real"),
    "statistics": (lambda h, w, y: linear_statistics(h, w, y, 3), r"names, such as \('logp', 'entropy'\); got 3"),
    "columns elsewhere": (
        lambda h, w, y: linear_statistics(h, w, y, "selected_logps", selected=y[..., None].to("meta")),
        "selected is on meta, the weight on cpu",
    ),
    "no token loss": (lambda h, w, y: linear_token_loss(h, w, y, None), "token_loss must be a function"),
    "a token loss of nothing": (lambda h, w, y: linear_token_loss(h, w, y, lambda s, l: None), "got NoneType"),
    "token inputs elsewhere": (
        lambda h, w, y: linear_token_loss(h, w, y, one_token, token_inputs={"x": PER_TOKEN.to("meta")}),
        "x is on meta",
    ),
    "weights elsewhere": (
        lambda h, w, y: linear_divergence_loss(
            h, w, y, Teacher(h, w), Divergence.forward_kl(), {"divergence": PER_TOKEN.to("meta")}
        ),
        "divergence is on meta",
    ),
    "a teacher's list": (lambda h, w, y: JSD()(w, h, y, TeacherLogits([1.0])), r"takes logits \[..., Vt\].*got list"),
    "a teacher's number": (lambda h, w, y: JSD()(w, h, y, TeacherLogits(ONES[0])), "got Tensor without dimensions"),
    "a teacher's columns": (lambda h, w, y: JSD()(w, h, y, TeacherLogits(lambda at: at, "61")), "needs columns="),
    "integer log-probabilities": (
        lambda h, w, y: DPO()(w, *[Completions(h, y, ref_logps=ONES.long())] * 2),
        "ref_logps of the chosen completions must be floating point, got torch.int64",
    ),
    "completions for KL": (
        lambda h, w, y: KTO()(w, (h, y), preference_labels=ONES > 0, kl_completions=h),
        "kl_completions must be Completions",
    ),
    "integer old log-probabilities": (
        lambda h, w, y: policy(h, w, y, old_per_token_logps=y),
        "old_per_token_logps must be floating point, got torch.int64",
    ),
    "complex advantages": (lambda h, w, y: policy(h, w, y, ONES * 1j), "advantages must be floating point"),
    "a head first": (
        lambda h, w, y: linear_logps(w, h, y),
        r"\(4, 5, 24\); were weight and hidden states swapped\? linear_logps .* take hidden_states, lm_head, labels;",
    ),
    "a layer first": (
        lambda h, w, y: linear_logps(torch.nn.Linear(24, 61), w, y),
        "hidden_states must be a tensor, got Linear; a layer .*take hidden_states, lm_head, labels; most losses",
    ),
    "a reference's head alone": (
        lambda h, w, y: DPO()(w, (h, y), (h, y), ref_weight=w),
        "a ref_weight=, but no hidden states of the reference that it multiplies; give them to Completions as",
    ),
    "few labels beside a reference": (
        lambda h, w, y: DPO()(w, *[Completions(h, y[:, :3], h)] * 2, ref_weight=w),
        r"hidden_states \(4, 5, 24\) need labels of shape \(4, 5\), got \(4, 3\)\. Give positions without",
    ),
    "labels without the first": (
        lambda h, w, y: CE()(w, h, y[:, 1:]),
        r"got \(4, 4\)\. Shorten neither: with shift=True, each position predicts the next one's label",
    ),
    "few hidden states of a reference": (
        lambda h, w, y: DPO()(w, *[Completions(h, y, h[:, 1:])] * 2, ref_weight=w),
        r"the reference's hidden states must be \[4, 5, hidden_size\], one for each label, got \(4, 4, 24\)",
    ),
    # names
    "a misspelt loss": (
        lambda h, w, y: DPO(loss_type="sigmoidd"),
        r"'sigmoidd' \(did you mean 'sigmoid'\?\); it must be",
    ),
    "GSPO": (lambda h, w, y: GRPO(loss_type="gspo"), "'gspo'; use importance_sampling_level='sequence' with"),
    "RLOO": (lambda h, w, y: GRPO(loss_type="rloo"), "use importance_sampling_level='sequence_sum'"),
    "unpaired DPO": (lambda h, w, y: DPO(loss_type="kto_pair"), "use LigerFusedLinearKTOLoss, of single"),
    "a piece": (
        lambda h, w, y: patch(w, mlp=True),
        r"no mlp= \(did you mean 'mlps'\?\); its arguments are model,",
    ),
    "kernels of patch": (
        lambda h, w, y: patch(w, kernel=True),
        r"no kernel=; its arguments are model,.*\. kernels= is an argument of liger_losses.trl.enable; patch uses",
    ),
    "TRL": (lambda h, w, y: enable(kernel=True), r"no kernel= \(did you mean 'kernels'\?\); its arguments are kernels"),
    "no labels": (
        lambda h, w, y: DPO()(w, (h, y)),
        "required argument: 'rejected'; .* arguments are head, chosen",
    ),
    # functions
    "a list": (lambda h, w, y: F.dpo_loss([1.0], ONES, ONES, ONES), "chosen_logps must be a tensor, got list"),
    "shapes": (
        lambda h, w, y: F.dpo_loss(ONES, ONES[:2], ONES, ONES),
        r"rejected_logps must be \[4\], as chosen_logps",
    ),
    "lengths": (
        lambda h, w, y: F.dpo_loss(*[ONES] * 4, loss_type="ipo", chosen_lengths=[1], rejected_lengths=[1]),
        "chosen_lengths must be a tensor",
    ),
    "negative beta": (lambda h, w, y: F.cpo_loss(ONES, ONES, beta=-1), r"beta must lie in \(0.0, inf\), got -1"),
    "smoothing": (lambda h, w, y: F.simpo_loss(ONES, ONES, label_smoothing=3), "label_smoothing must lie in"),
    "ORPO": (lambda h, w, y: F.orpo_loss([1.0], ONES), "chosen_logps must be a tensor"),
    "marks": (lambda h, w, y: F.kto_loss(ONES, ONES, ONES), "desirable must be bool, got torch.float32; compare"),
    "signs": (lambda h, w, y: F.bco_loss(ONES, ONES, -ONES.long()), "desirable must be bool, got torch.int64; compare"),
    "negative KL": (lambda h, w, y: F.kto_loss(ONES, ONES, ONES > 0, -1.0), r"kl must lie in \[0.0, inf\)"),
    "BCO": (lambda h, w, y: F.bco_loss(ONES, ONES, ONES[:2] > 0), r"desirable must be \[4\], as rewards, got \[2\]"),
    "sequences": (lambda h, w, y: F.sequence_logps(PER_TOKEN, MASK[:, 1:]), r"mask must be \[4, 5\], as logps"),
    "acting tokens": (
        lambda h, w, y: F.grpo_loss(PER_TOKEN, ONES, MASK, acting=PER_TOKEN),
        "acting must be bool, or integers, got torch.float32",
    ),
    "a group": (lambda h, w, y: F.grpo_loss(PER_TOKEN, ONES, MASK, group="cp"), "group must be a torch.distributed"),
    "a share": (lambda h, w, y: F.high_entropy_mask(PER_TOKEN, MASK, 2.0), r"share must lie in \(0.0, 1.0\]"),
    "mean log-probabilities": (lambda h, w, y: F.cross_entropy(ONES, label_smoothing=0.1), "needs mean_logps="),
    "a discount": (lambda h, w, y: F.minillm_returns(PER_TOKEN, MASK, 2.0), r"gamma must lie in \[0.0, 1.0\]"),
    "columns": (lambda h, w, y: F.forward_kl(PER_TOKEN, PER_TOKEN[:, 1:]), r"log_q must be \[4, 5\], as log_p"),
    "a divergence's name": (lambda h, w, y: F.divergence(PER_TOKEN, PER_TOKEN, "kl"), "must be a Divergence, such"),
    "a tail": (
        lambda h, w, y: F.sparse_divergence(PER_TOKEN, PER_TOKEN, Divergence.forward_kl(), "x"),
        "unknown tail 'x'; it must be one of bucket, lump, renormalize, none",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_named(name):
    call, message = WRONG[name]
    hidden, weight, labels, _ = problem(shape=(4, 5), masked=0.2)
    with pytest.raises((TypeError, ValueError), match=message):
        call(hidden.detach(), weight, labels)


def test_a_loss_on_pairs_shifts_by_any_number():
    hidden, weight, labels, _ = problem(shape=(4, 5), masked=0.2)
    moved = torch.cat([labels[:, 2:], labels.new_full((4, 2), -100)], 1)
    found, expected = (DPO(use_ref_model=False, shift=s)(weight, hidden, y)[0] for s, y in ((2, labels), (0, moved)))
    torch.testing.assert_close(found, expected)


def test_options_of_trl():
    pytest.importorskip("trl")
    with pytest.raises(TypeError, match="kernels must be True or False, got 'x'"):
        importlib.import_module("liger_losses.trl").enable(kernels="x")


def test_what_is_right_stays_right():
    hidden, weight, labels, _ = problem(shape=(4, 5), masked=0.2)
    assert torch.isfinite(functional.dpo_loss(ONES, ONES, ONES[0] * 0, ONES[0] * 0)).all()
    assert torch.isfinite(policy(hidden, weight, labels, ONES.long())[0])
    assert linear_logps(hidden, weight, labels, shift=1).shape == labels.shape
    logits, types, weights = torch.zeros(4, 5, 61), np.array(["sigmoid", "hinge"]), np.array([1.0, 0.5])
    JSD()(weight, hidden, labels, TeacherLogits(lambda at: logits.flatten(0, 1)[: len(at)], np.int64(61)))
    DPO(shift=np.int64(1), compact=np.True_, loss_type=types, loss_weights=weights)
    linear_logps(hidden, weight, labels, shift=np.int64(1))
    assert torch.equal(F.sequence_logps(PER_TOKEN, 3 * MASK.int()), F.sequence_logps(PER_TOKEN, MASK))
    acted = [F.grpo_loss(PER_TOKEN, ONES, MASK, acting=acting) for acting in (MASK, MASK.int())]
    assert torch.equal(*acted)


def test_values_expand_to_the_shape_of_the_first():
    logps, teacher = torch.randn(4, 5), torch.randn(5).log_softmax(-1)
    for weights in (torch.rand(5), torch.rand(4, 1), MASK):
        found = F.sequence_logps(logps, MASK[0], weights=weights, average=True)
        torch.testing.assert_close(found, (logps * weights).mean(1), check_dtype=False)
    everything = torch.tensor(True)
    torch.testing.assert_close(F.sequence_logps(logps, everything, average=True), logps.mean(1), check_dtype=False)
    torch.testing.assert_close(F.kto_loss(ONES, ONES, ONES > 0, ONES[:1]), F.kto_loss(ONES, ONES, ONES > 0, 1.0))
    torch.testing.assert_close(F.forward_kl(logps, teacher), F.forward_kl(logps, teacher.expand(4, 5)))
    with pytest.raises(ValueError, match=r"ref_logps must be \[4\], as logps, got \[4, 1\]"):
        F.bco_loss(ONES, ONES[:, None], ONES > 0)


def test_numbers_may_be_on_the_cpu():
    rewards = torch.ones(4, device="meta")
    assert F.bco_loss(rewards, rewards, rewards > 0, torch.tensor(0.5)).device == rewards.device
    with pytest.raises(ValueError, match="shift is on cpu, rewards on meta"):
        F.bco_loss(rewards, rewards, rewards > 0, ONES)


ON_META = {
    "cross-entropy": lambda h, w, y: CE()(w, h, y),
    "many heads": lambda h, w, y: CE()([w, w], h, y),
    "per token": lambda h, w, y: CE(reduction="none", compact=False)(w, h, y),
    "DPO": lambda h, w, y: DPO(use_ref_model=False)(w, h, y),
    "KTO": lambda h, w, y: KTO()(h, w, y, preference_labels=ONES.to("meta") > 0, kl=0.3),
    "GRPO": lambda h, w, y: GRPO(beta=0.0)(h, w, y, MASK.to("meta"), ONES.to("meta")),
    "JSD": lambda h, w, y: JSD()(w, h, y, Teacher(h.detach(), w.detach())),
    "KL, top-k": lambda h, w, y: LigerFusedLinearKLLoss()(w, h, y, TeacherTopK(h[..., :1].detach(), y[..., None])),
    "log-probabilities": lambda h, w, y: linear_logps(h, w, y),
    "kept columns": lambda h, w, y: linear_logps(h, w, y, support=TokenSupport(y[..., None])),
    "a loss of one's own": lambda h, w, y: linear_token_loss(h, w, y, lambda s, labels: -s.logp),
}


@pytest.mark.parametrize("name", ON_META)
def test_tensors_without_values(name):
    tensors = [tensor.detach().to("meta") for tensor in problem(20, 8, 30, shape=(4, 5))[:3]]
    with pytest.raises(ValueError, match=r"on the meta device, where tensors have a shape and no values.*to_empty"):
        ON_META[name](*tensors)
