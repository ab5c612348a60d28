"""Bad input is refused before any work, with what was given, what was expected and what to do."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from liger_losses import (
    ChunkedLoss,
    Completions,
    Divergence,
    Head,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    Teacher,
    functional,
    linear_divergence,
    linear_logps,
    linear_statistics,
    linear_token_loss,
)
from tests.reference import problem


def good():
    hidden, weight, labels, _ = problem(shape=(4, 5), masked=0.2)
    return hidden, weight, labels


def test_bad_labels_are_found_before_any_projection(monkeypatch):
    hidden, weight, labels = good()
    labels[0, 0] = 61

    def refuse(*_, **__):
        raise AssertionError("the projection was computed")

    monkeypatch.setattr("liger_losses.chunked.engine.weights.matmul_into", refuse)
    for call in (
        lambda: linear_logps(hidden, weight, labels),
        lambda: LigerFusedLinearCrossEntropyLoss(ce_weight=torch.ones(61))(weight, hidden, labels),
        lambda: LigerFusedLinearDPOLoss(use_ref_model=False)(weight, hidden, labels),
    ):
        with pytest.raises(ValueError, match="labels must be in"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta must lie in"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "below 0.5"),
        ({"loss_type": "exo_pair"}, "above 0 .*1e-3"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "one entry per loss_type"),
        ({"loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "sigmoid, sigmoid_norm"),
        ({"ld_alpha": 2.0}, "ld_alpha"),
        ({"loss_type": "aot", "use_weighting": True}, "sort away"),
        ({"loss_type": "ipo", "average_log_prob": True}, "twice"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"discopop_tau": 0.0}, "discopop_tau"),
        ({"loss_type": []}, "unknown loss_type"),
        ({"beta": float("inf")}, "beta must lie in"),
    ],
)
def test_bad_dpo_options(options, message):
    with pytest.raises(ValueError, match=message):
        LigerFusedLinearDPOLoss(**options)


def test_a_reference_that_does_not_fit_is_found_before_any_projection(monkeypatch):
    hidden, weight, labels = good()

    def refuse(*_, **__):
        raise AssertionError("the projection was computed")

    monkeypatch.setattr("liger_losses.chunked.engine.weights.matmul_into", refuse)
    with pytest.raises(ValueError, match=r"of the reference model.*hidden_states must be \[..., 7\]"):
        LigerFusedLinearDPOLoss()(weight, hidden, labels, None, hidden, torch.randn(61, 7))


def test_labels_are_checked_without_compaction_too():
    hidden, weight, labels = good()
    labels[0, 0] = 61
    with pytest.raises(ValueError, match="labels must be in"):
        linear_logps(hidden, weight, labels, compact=False)


CE, DPO = LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearDPOLoss(use_ref_model=False)
GRPO, JSD, KTO = LigerFusedLinearGRPOLoss(beta=0.0), LigerFusedLinearJSDLoss(), LigerFusedLinearKTOLoss()
Reference, ZEROS = LigerFusedLinearDPOLoss, torch.zeros(2)
#: Calls with arguments in another order, of another kind or value, and what the error says.
MISTAKES = {
    "a bias": (lambda h, w, y: linear_logps(h, w, y, bias=torch.zeros(60)), r"bias must be \[61\]"),
    "a workspace without a row": (
        lambda h, w, y: linear_logps(h, w, y, workspace=100),
        r"workspace=100 bytes is too small.*give at least \d+ bytes",
    ),
    "a statistic": (
        lambda h, w, y: linear_statistics(h, w, y, ("logit",)),
        "unknown differentiable statistic 'logit'.*logp, entropy",
    ),
    "a metric": (lambda h, w, y: linear_statistics(h, w, y, ("argmax",)), "unknown differentiable statistic 'argmax'"),
    "a loss type": (lambda h, w, y: Reference(loss_type="dpo"), "unknown loss_type 'dpo'.*sigmoid.*apo_zero"),
    "a loss type of CPO": (lambda h, w, y: LigerFusedLinearCPOLoss(loss_type="orpo"), "loss_type 'orpo'.*simpo"),
    "an f-divergence": (lambda h, w, y: Reference(f_divergence_type="kl"), "f_divergence_type.*js_divergence"),
    "AlphaPO without its alpha": (lambda h, w, y: LigerFusedLinearCPOLoss(loss_type="alphapo"), r"reward_alpha.*0\.25"),
    "an odd number": (lambda h, w, y: DPO(w, h[:3], y[:3]), "odd number, 3"),
    "fewer rejected": (lambda h, w, y: DPO(w, (h[:2], y[:2]), (h[2:3], y[2:3])), "as many chosen as rejected"),
    "rejected alone": (lambda h, w, y: DPO(w, (h[:2], y[:2]), h[2:]), "rejected must be Completions"),
    "a target of two": (lambda h, w, y: DPO(w, h, (h, y)), "target must be a tensor"),
    "flat pairs": (lambda h, w, y: DPO(w, h.reshape(20, 24), y.reshape(20)), "stacked form takes hidden states"),
    "labels of the likelihood": (
        lambda h, w, y: LigerFusedLinearORPOLoss()(w, h, y, None, y[:, :3]),
        "nll_target must have the shape",
    ),
    "no reference": (
        lambda h, w, y: Reference()(w, h, y),
        r"chosen completions have none.*ref_logps.*use_ref_model=False",
    ),
    "one reference": (
        lambda h, w, y: Reference()(w, Completions(h[:2], y[:2], ref_logps=ZEROS), (h[2:], y[2:])),
        "rejected completions have none",
    ),
    "a reference's states alone": (lambda h, w, y: Reference()(w, h, y, None, h), "no ref_weight="),
    "two references": (
        lambda h, w, y: Reference()(w, h, y, None, h, w, ref_chosen_logps=ZEROS, ref_rejected_logps=ZEROS),
        "both ref_hidden_states and ref_logps",
    ),
    "a reference's log-probabilities": (
        lambda h, w, y: Reference()(w, h, y, ref_chosen_logps=torch.zeros(3), ref_rejected_logps=ZEROS),
        r"must be \[2\].*or \(2, 5\).*got \(3,\)",
    ),
    "a reference that was declined": (lambda h, w, y: DPO(w, h, y, None, h, w), "built without one"),
    "references of two kinds": (
        lambda h, w, y: Reference()(
            w, Completions(h[:2], y[:2], h[:2]), Completions(h[2:], y[2:], ref_logps=ZEROS), ref_weight=w
        ),
        "for both the chosen and the rejected",
    ),
    "a shorter reference": (
        lambda h, w, y: Reference()(w, h, y, None, h[:, :3], w),
        "reference's hidden states must be",
    ),
    "a stacked reference of pairs": (
        lambda h, w, y: Reference()(w, (h[:2], y[:2]), (h[2:], y[2:]), ref_input=h),
        "with pairs",
    ),
    "no ignored label": (lambda h, w, y: linear_logps(h, w, y, ignore_index=None), "ignore_index must be an integer"),
    "a cap as text": (lambda h, w, y: linear_logps(h, w, y, softcap="30"), "softcap must be a number"),
    "codes": (lambda h, w, y: linear_logps(h, w.to(torch.uint8), y), "weight must be floating point.*dequantize"),
    "a list of labels": (lambda h, w, y: DPO(w, (h, [1]), (h, y)), "labels must be a tensor"),
    "a list of a reference": (lambda h, w, y: Reference()(w, h, y, ref_chosen_logps=[1.0]), "ref_chosen_logps must be"),
    "a list of other labels": (
        lambda h, w, y: LigerFusedLinearORPOLoss()(w, h, y, None, [[1]]),
        "must be a tensor, got list",
    ),
    "beta as text": (lambda h, w, y: Reference(beta="0.1"), "beta must be a number"),
    "a list of class weights": (lambda h, w, y: LigerFusedLinearCrossEntropyLoss(ce_weight=[1.0]), "must be a tensor"),
    "a loss without a loss": (lambda h, w, y: ChunkedLoss()(w, h, y), "must define loss"),
    "a sum of tokens": (lambda h, w, y: linear_token_loss(h, w, y, lambda s, y: s.logp.sum()), "one value per token"),
    "token inputs": (
        lambda h, w, y: linear_token_loss(
            h, w, y, lambda s, y, advantages: s.logp, token_inputs={"advantages": torch.ones(3)}
        ),
        r"advantages has shape \(3,\)",
    ),
    "weight and hidden states": (lambda h, w, y: CE(h, w, y), "were weight and hidden states swapped"),
    "the other way round": (lambda h, w, y: linear_logps(w, h, y), "were weight and hidden states swapped"),
    "rows of both": (lambda h, w, y: linear_logps(w, h[0], y[0]), "were swapped: there are labels"),
    "labels and hidden states": (lambda h, w, y: CE(w, y, h), "unless these are hidden states"),
    "completions": (lambda h, w, y: DPO(w, (y, h), (y, h)), r"completions are \(hidden_states, labels\)"),
    "tokens and mask": (lambda h, w, y: GRPO(h, w, (y > 0).float(), y, torch.ones(4)), "or a mask"),
    "KTO's weight": (lambda h, w, y: KTO(w, h, y), r"in the form loss\(_input, weight, target\)"),
    "a layer as bias": (lambda h, w, y: CE(w, h, y, nn.Linear(24, 61)), "such as model.lm_head goes where the weight"),
    "a layer as hidden states": (lambda h, w, y: linear_logps(nn.Linear(24, 61), w, y), "goes where the weight goes"),
    "raw logits": (lambda h, w, y: JSD(w, h, y, h @ w.t()), r"TeacherLogits\(logits\).*got Tensor"),
    "raw logits by name": (lambda h, w, y: JSD(w, h, y, teacher=h @ w.t()), r"TeacherLogits\(logits\).*got Tensor"),
    "a tuple as teacher": (lambda h, w, y: JSD(w, h, y, (h, w)), r"Teacher\(hidden_states, weight\).*got tuple"),
    "labels last": (lambda h, w, y: JSD(w, h, Teacher(h, w), y), "the teacher must be"),
    "raw logits alone": (
        lambda h, w, y: linear_divergence(h, w, y, h @ w.t(), Divergence.forward_kl()),
        r"TeacherLogits\(logits\), got Tensor",
    ),
    "a sparse weight": (lambda h, w, y: CE(w.detach().to_sparse(), h, y), r"weight is a sparse.*weight.to_dense\(\)"),
    "logits": (lambda h, w, y: CE(w, h @ w.t(), y), r"look like logits: pass the last hidden states; loss_inputs"),
    "all layers": (lambda h, w, y: CE(w, (h, h, h), y), r"a tuple of 3 .*hidden_states\[-1\]; for .* pass a list"),
    "all layers of an operation": (lambda h, w, y: linear_logps((h, h), w, y), r"outputs.hidden_states\[-1\]"),
    "all layers of completions": (lambda h, w, y: DPO(w, ((h, h), y), (h, y)), r"outputs.hidden_states\[-1\]"),
    "a model's output": (
        lambda h, w, y: CE(w, SimpleNamespace(last_hidden_state=h), y),
        r"pass its .last_hidden",
    ),
    "an output with logits": (lambda h, w, y: CE(w, SimpleNamespace(logits=h), y), "loss_inputs.* gives head, hidden"),
    "hidden states of pairs": (
        lambda h, w, y: DPO(w, h, h),
        r"target must be labels.* Completions\(hidden_",
    ),
    "a reference's vocabulary": (
        lambda h, w, y: LigerFusedLinearDPOLoss()(w, h, y, None, h, w[:20]),
        r"^of the reference model.* labels must be in \[0, 20\)",
    ),
    "no tensors": (lambda h, w, y: linear_statistics([], w, []), "empty sequence; pass at least one tensor"),
    "shapes of a function": (
        lambda h, w, y: functional.grpo_loss(h[..., 0], torch.ones(4), y[:, 1:]),
        r"logps and mask must both be \[B, T\], got \(4, 5\) and \(4, 4\)",
    ),
}
for _name in ("old_logps", "ref_logps", "sampling_logps", "is_ratio"):
    MISTAKES[f"{_name} of a function"] = (
        lambda h, w, y, name=_name: functional.grpo_loss(h[..., 0], torch.ones(4), y, **{name: torch.ones(3)}),
        f"^{_name} must be",
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    call, message = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        call(*good())


@pytest.mark.parametrize("items", [torch.tensor([3, 4]), -1, -2.0, torch.tensor(-1), float("nan"), [3], True])
def test_num_items_in_batch_is_one_number_that_is_not_negative(items):
    hidden, weight, labels = good()
    given, mask = {"num_items_in_batch": items}, labels >= 0
    for call in (
        lambda: CE(weight, hidden, labels, **given),
        lambda: JSD(weight, hidden, labels, Teacher(hidden, weight), **given),
        lambda: GRPO(hidden, weight, labels, mask, torch.ones(4), **given),
        lambda: functional.grpo_loss(hidden[..., 0], torch.ones(4), mask, **given),
    ):
        with pytest.raises((TypeError, ValueError), match="num_items_in_batch must (be|lie)"):
            call()
    same = [CE(weight, hidden, labels, num_items_in_batch=n) for n in (7, np.int64(7), torch.tensor([[7]]))]
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])


def test_a_weight_of_which_there_is_a_part_is_refused(one_process):
    hidden, weight, labels = good()
    part = distribute_tensor(weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
    for call in (lambda: CE(part, hidden, labels), lambda: linear_logps(hidden, part, labels)):
        with pytest.raises(TypeError, match=r"weight is a DTensor.*liger_losses.patch.*weight.full_tensor\(\)"):
            call()
    CE(part.full_tensor(), hidden, labels)


def test_temperatures_of_another_shape_where_ranks_share_the_vocabulary(one_process):
    """Ranks compare temperatures before they are gathered."""
    hidden, weight, labels = good()
    head = Head(weight, group=dist.group.WORLD)
    for wrong in (torch.ones(len(labels)), torch.ones(labels.numel() + 1), torch.ones(labels.shape, device="meta")):
        with pytest.raises(ValueError, match="temperature (must be a number, or a tensor|is on meta)"):
            linear_logps(hidden, head, labels, temperature=wrong)


def test_numbers_of_numpy_are_numbers_and_bools_are_not():
    hidden, weight, labels = good()
    for number in (np.float32(0.5), np.float64(0.5)):
        for build in (
            lambda x: LigerFusedLinearDPOLoss(use_ref_model=False, beta=x, softcap=x)(weight, hidden, labels)[0],
            lambda x: LigerFusedLinearCrossEntropyLoss(label_smoothing=x, temperature=x)(weight, hidden, labels),
            lambda x: LigerFusedLinearJSDLoss(beta=x)(weight, hidden, labels, Teacher(hidden, weight))[0],
            lambda x: linear_logps(hidden, weight, labels, logit_scale=x, chunk_size=np.int64(2)),
            lambda x: functional.grpo_loss(hidden[..., 0], torch.ones(4), labels >= 0, beta=x, epsilon_low=x),
        ):
            torch.testing.assert_close(build(number), build(0.5))
    for name in ("softcap", "temperature", "logit_scale"):
        with pytest.raises(TypeError, match=f"{name} must be a number, got True"):
            linear_logps(hidden, weight, labels, **{name: True})
