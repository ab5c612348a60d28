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


def test_bad_bias():
    hidden, weight, labels = good()
    with pytest.raises(ValueError, match=r"bias must be \[61\]"):
        linear_logps(hidden, weight, labels, bias=torch.zeros(60))


def test_workspace_that_cannot_hold_a_row():
    hidden, weight, labels = good()
    with pytest.raises(ValueError, match=r"workspace=100 bytes is too small.*give at least \d+ bytes"):
        linear_logps(hidden, weight, labels, workspace=100)


def test_unknown_names_list_the_known_ones():
    hidden, weight, labels = good()
    with pytest.raises(ValueError, match="unknown differentiable statistic 'logit'.*logp, entropy"):
        linear_statistics(hidden, weight, labels, ("logit",))
    with pytest.raises(ValueError, match="unknown differentiable statistic 'argmax'"):
        linear_statistics(hidden, weight, labels, ("argmax",))
    with pytest.raises(ValueError, match="unknown loss_type 'dpo'.*sigmoid.*apo_zero"):
        LigerFusedLinearDPOLoss(loss_type="dpo")
    with pytest.raises(ValueError, match="unknown loss_type 'orpo'.*simpo"):
        LigerFusedLinearCPOLoss(loss_type="orpo")
    with pytest.raises(ValueError, match="f_divergence_type.*js_divergence"):
        LigerFusedLinearDPOLoss(f_divergence_type="kl")


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


def test_alphapo_needs_its_alpha():
    with pytest.raises(ValueError, match=r"reward_alpha.*0\.25"):
        LigerFusedLinearCPOLoss(loss_type="alphapo")


def test_preference_inputs():
    hidden, weight, labels = good()
    free = LigerFusedLinearDPOLoss(use_ref_model=False)
    with pytest.raises(ValueError, match="odd number, 3"):
        free(weight, hidden[:3], labels[:3])
    with pytest.raises(ValueError, match="as many chosen as rejected"):
        free(weight, (hidden[:2], labels[:2]), (hidden[2:3], labels[2:3]))
    with pytest.raises(TypeError, match="rejected must be Completions"):
        free(weight, (hidden[:2], labels[:2]), hidden[2:])
    with pytest.raises(TypeError, match="target must be a tensor"):
        free(weight, hidden, (hidden, labels))
    with pytest.raises(ValueError, match="stacked form takes hidden states"):
        free(weight, hidden.reshape(20, 24), labels.reshape(20))
    with pytest.raises(ValueError, match="nll_target must have the shape"):
        LigerFusedLinearORPOLoss()(weight, hidden, labels, None, labels[:, :3])


def test_references():
    hidden, weight, labels = good()
    ref = torch.zeros(2)
    module = LigerFusedLinearDPOLoss()
    with pytest.raises(ValueError, match=r"chosen completions have none.*ref_logps.*use_ref_model=False"):
        module(weight, hidden, labels)
    with pytest.raises(ValueError, match="rejected completions have none"):
        module(weight, Completions(hidden[:2], labels[:2], ref_logps=ref), (hidden[2:], labels[2:]))
    with pytest.raises(ValueError, match="no ref_weight="):
        module(weight, hidden, labels, None, hidden)
    with pytest.raises(ValueError, match="both ref_hidden_states and ref_logps"):
        module(weight, hidden, labels, None, hidden, weight, ref_chosen_logps=ref, ref_rejected_logps=ref)
    with pytest.raises(ValueError, match=r"must be \[2\].*or \(2, 5\).*got \(3,\)"):
        module(weight, hidden, labels, ref_chosen_logps=torch.zeros(3), ref_rejected_logps=ref)
    with pytest.raises(ValueError, match="built without one"):
        LigerFusedLinearDPOLoss(use_ref_model=False)(weight, hidden, labels, None, hidden, weight)
    with pytest.raises(ValueError, match="for both the chosen and the rejected"):
        module(
            weight,
            Completions(hidden[:2], labels[:2], hidden[:2]),
            Completions(hidden[2:], labels[2:], ref_logps=ref),
            ref_weight=weight,
        )
    with pytest.raises(ValueError, match="reference's hidden states must be"):
        module(weight, hidden, labels, None, hidden[:, :3], weight)
    with pytest.raises(ValueError, match="with pairs"):
        module(weight, (hidden[:2], labels[:2]), (hidden[2:], labels[2:]), ref_input=hidden)


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


def test_wrong_kinds_of_arguments():
    hidden, weight, labels = good()
    free = LigerFusedLinearDPOLoss(use_ref_model=False)
    for call, message in (
        (lambda: linear_logps(hidden, weight, labels.tolist(), shift=True), "labels must be a tensor, got list"),
        (lambda: linear_logps(None, weight, labels), "hidden_states must be a tensor, got NoneType"),
        (lambda: linear_logps(hidden, weight, labels, ignore_index=None), "ignore_index must be an integer"),
        (lambda: linear_logps(hidden, weight, labels, softcap="30"), "softcap must be a number"),
        (lambda: linear_logps(hidden, weight.to(torch.uint8), labels), "weight must be floating point.*dequantize"),
        (lambda: free(weight, (hidden, [1]), (hidden, labels)), "labels must be a tensor"),
        (lambda: LigerFusedLinearDPOLoss()(weight, hidden, labels, ref_chosen_logps=[1.0]), "ref_chosen_logps must be"),
        (lambda: LigerFusedLinearORPOLoss()(weight, hidden, labels, None, [[1]]), "must be a tensor, got list"),
        (lambda: LigerFusedLinearDPOLoss(beta="0.1"), "beta must be a number"),
        (lambda: LigerFusedLinearCrossEntropyLoss(ce_weight=[1.0]), "ce_weight must be a tensor"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    assert linear_statistics(hidden, weight, labels, "logp").logp.shape == labels.shape


CE, DPO = LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearDPOLoss(use_ref_model=False)
GRPO, JSD, KTO = LigerFusedLinearGRPOLoss(beta=0.0), LigerFusedLinearJSDLoss(), LigerFusedLinearKTOLoss()
#: Calls with arguments in another order or of another kind, and what the error says.
MISTAKES = {
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
    "no tensors": (lambda h, w, y: linear_statistics([], w, []), "empty sequence; give one tensor"),
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
    with pytest.raises((TypeError, ValueError), match=message):
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


def test_own_losses():
    hidden, weight, labels = good()
    with pytest.raises(NotImplementedError, match="must define loss"):
        ChunkedLoss()(weight, hidden, labels)
    with pytest.raises(ValueError, match="one value per token"):
        linear_token_loss(hidden, weight, labels, lambda s, y: s.logp.sum())
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\)"):
        linear_token_loss(
            hidden, weight, labels, lambda s, y, advantages: s.logp, token_inputs={"advantages": torch.ones(3)}
        )
