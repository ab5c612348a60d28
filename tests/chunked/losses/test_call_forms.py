"""The calls that TRL up to 1.12 made to liger-kernel's classes, made to both."""

import inspect

import pytest
import torch

import liger_losses
from liger_losses.chunked.losses.dpo import DPO_LOSSES

chunked_loss = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
pytestmark = pytest.mark.peers

ROWS, TOKENS, HIDDEN, VOCAB = 4, 9, 12, 37
MARKS, ADVANTAGES = torch.tensor([True, False, False, True]), torch.tensor([1.0, -0.5, 0.3, -1.0])


def problem(seed, bias=True, hidden=HIDDEN):
    """A model's hidden states and head, all of which are trained."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(ROWS, TOKENS, hidden, generator=g).requires_grad_()
    weight = (torch.randn(VOCAB, hidden, generator=g) / 3).requires_grad_()
    return states, weight, torch.randn(VOCAB, generator=g).requires_grad_() if bias else None


def frozen(seed, bias=True, hidden=HIDDEN):
    return tuple(None if t is None else t.detach() for t in problem(seed, bias, hidden))


def labels(seed=5):
    g = torch.Generator().manual_seed(seed)
    found = torch.randint(VOCAB, (ROWS, TOKENS), generator=g)
    return found.masked_fill(torch.rand(ROWS, TOKENS, generator=g) < 0.4, -100)


def check(name, options, trained, *arguments, skip=(), **keywords):
    """Ours and theirs, built and called in the same way: losses, metrics but those at ``skip``, and gradients."""
    found = []
    for package, own in ((liger_losses, {}), (chunked_loss, {"compiled": False})):
        result = getattr(package, f"LigerFusedLinear{name}Loss")(**options, **own)(*arguments, **keywords)
        loss, *metrics = result if isinstance(result, tuple) else (result,)
        metrics = metrics[0] if metrics and isinstance(metrics[0], (tuple, list)) else metrics
        gradients = torch.autograd.grad(loss.sum(), [tensor for tensor in trained if tensor is not None])
        found.append((loss.detach(), list(metrics), gradients))
    (ours, our_metrics, our_gradients), (theirs, their_metrics, their_gradients) = found
    torch.testing.assert_close(ours, theirs.view_as(ours), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_gradients, their_gradients, rtol=1e-3, atol=1e-6)
    assert len(our_metrics) == len(their_metrics)
    for i, (a, b) in enumerate(zip(our_metrics, their_metrics, strict=True)):
        assert isinstance(a, torch.Tensor)  # each is gathered over processes
        if i not in skip:
            torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=1e-4, atol=1e-4, msg=f"metric {i}")


#: Loss types that mean something else there, or that there are not.
OTHERS = {"ipo", "aot", "aot_unpaired", "sft", "sigmoid_norm"}


@pytest.mark.parametrize("loss_type", sorted(set(DPO_LOSSES) - OTHERS))
def test_dpo_by_position(loss_type):
    bias = loss_type in ("sigmoid", "hinge")
    (hidden, weight, lm_head_bias), (ref_hidden, *ref_head) = problem(0, bias), frozen(1, bias)
    # There, sigmoid ignores label smoothing. The negative log-likelihood is no part of one loss, and is of the others.
    options = {"beta": 0.3, "loss_type": loss_type, "label_smoothing": 0.0 if loss_type == "sigmoid" else 0.1}
    options["compute_nll_loss"] = loss_type != "hinge"
    given = weight, hidden, labels(), lm_head_bias, ref_hidden, *ref_head
    # Their mean logits are over prompts and padding too.
    skip = (2, 3, 4) if loss_type == "hinge" else (2, 3)
    check("DPO", options, (hidden, weight, lm_head_bias), *given, skip=skip)


@pytest.mark.parametrize("name", ["CPO", "SimPO", "ORPO"])
def test_losses_without_a_reference(name):
    hidden, weight, bias = problem(0)
    check(name, {}, (hidden, weight, bias), weight, hidden, labels(), bias, skip=(2, 3))


@pytest.mark.parametrize(("bias", "average"), [(True, False), (False, True)])
@pytest.mark.parametrize("kl", [torch.zeros(1), torch.tensor(0.7)], ids=["no kl", "kl"])
@pytest.mark.parametrize("use_ref_model", [False, True])
def test_kto_by_keyword(use_ref_model, kl, bias, average):
    trained, target = problem(0, bias), labels()
    target[:, 0] = 3  # theirs divides by the number of tokens
    given = dict(zip(("_input", "lin_weight", "bias"), trained, strict=True)) | {"target": target, "kl": kl}
    given["preference_labels"] = MARKS
    if use_ref_model:
        given |= dict(zip(("ref_input", "ref_weight", "ref_bias"), frozen(1, bias), strict=True))
    options = {"beta": 0.2, "use_ref_model": use_ref_model, "average_log_prob": average}
    check("KTO", options, trained, **given, skip=(2, 3))  # their logits are of prompts and padding too


@pytest.mark.parametrize("items", [None, torch.tensor(50.0)], ids=["", "items"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo"},
        {"loss_type": "bnpo", "delta": 1.5},
        {"loss_type": "dr_grpo"},
        {"loss_type": "dapo", "importance_sampling_level": "sequence"},
        {"loss_type": "dapo", "use_bias_correction_kl": True},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo"},
        {"loss_type": "vespo"},
        {"loss_type": "bnpo", "importance_sampling_level": "sequence", "epsilon_high": 0.28, "epsilon_low": 0.1},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "temperature": 0.7},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_grpo_by_keyword(options, beta, items):
    hidden, weight, bias = problem(2)
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCAB, (ROWS, TOKENS), generator=g)
    mask = (torch.arange(TOKENS) < torch.tensor([9, 4, 6, 1])[:, None]).int()
    with torch.no_grad():
        now = torch.log_softmax(hidden @ weight.T + bias, -1).gather(-1, ids[..., None])[..., 0]
    old, ref = (now + 0.3 * torch.randn(ROWS, TOKENS, generator=g) for _ in range(2))
    given = {"_input": hidden, "lin_weight": weight, "bias": bias, "selected_token_ids": ids, "attention_mask": mask}
    given |= {"advantages": ADVANTAGES, "old_per_token_logps": old, "num_items_in_batch": items}
    given["vllm_is_ratio"] = torch.where(mask != 0, 0.5 + torch.rand(ROWS, TOKENS, generator=g), 1.0)
    given["ref_per_token_logps"] = ref if beta else None
    common = {"epsilon_low": 0.2, "epsilon_high": 0.2, "temperature": 1.0, "max_completion_length": TOKENS}
    common |= {"beta": beta, "use_ref_model": beta != 0.0}
    check("GRPO", {**common, **options}, (hidden, weight, bias), **given)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("kind", "beta", "temperature", "soft_hard"),
    [
        *(("JSD", beta, t, False) for beta, t in ((0.0, 1.0), (0.5, 0.9), (1.0, 1.0))),
        *((kind, beta, 2.0, True) for kind, beta in (("JSD", 0.1), ("JSD", 0.9), ("CosineSimilarity", 0.5))),
    ],
)
def test_distillation_by_keyword(kind, beta, temperature, soft_hard, flat):
    """The distillation trainer gives tokens, GKD's sequences."""
    hidden, weight, bias = problem(3)
    teacher, teacher_weight, teacher_bias = frozen(4, hidden=2 * HIDDEN)
    states = {"student_input": hidden, "teacher_input": teacher, "true_labels": labels()}
    given = {name: value.flatten(0, 1) if flat else value for name, value in states.items()}
    given |= {"student_weight": weight, "student_bias": bias}
    given |= {"teacher_weight": teacher_weight, "teacher_bias": teacher_bias}
    options = {"beta": beta, "ignore_index": -100, "temperature": temperature}
    options |= {"weight_hard_loss": 0.3 * soft_hard, "weight_soft_loss": 1.0 - 0.3 * soft_hard}
    options |= {"return_soft_hard_loss": True} if soft_hard else {}
    check(kind, options, (hidden, weight, bias), **given)


@pytest.mark.parametrize("name", [name for name in dir(chunked_loss) if name.startswith("LigerFusedLinear")])
def test_every_class_of_theirs_is_here_with_its_keywords(name):
    ours, theirs = (getattr(package, name) for package in (liger_losses, chunked_loss))
    for function in (lambda c: c.__init__, lambda c: c.forward):
        takes = inspect.signature(function(ours)).parameters
        missing = set(inspect.signature(function(theirs)).parameters) - {*takes, *ours.parameters_named}
        assert not missing or any(p.kind is p.VAR_KEYWORD for p in takes.values()), missing
