"""The calls that TRL up to 1.12 made to liger-kernel's classes, made to both."""

import inspect

import pytest
import torch

import liger_losses
from liger_losses.chunked.losses.dpo import DPO_LOSSES

chunked_loss = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
pytestmark = pytest.mark.peers

ROWS, TOKENS, HIDDEN, VOCAB = 4, 9, 12, 37


def both(name, **options):
    """Ours and theirs, built by the same keywords; compilation is theirs alone and changes no result."""
    return [
        getattr(package, name)(**{**options, **({"compiled": False} if package is chunked_loss else {})})
        for package in (liger_losses, chunked_loss)
    ]


def problem(seed, bias=True, hidden=HIDDEN):
    """A model's head and hidden states, all of which are trained."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(ROWS, TOKENS + 1, hidden, generator=g)[:, :-1].requires_grad_()  # not contiguous, as theirs
    weight = (torch.randn(VOCAB, hidden, generator=g) / 3).requires_grad_()
    return states, weight, torch.randn(VOCAB, generator=g).requires_grad_() if bias else None


def labels(seed=5):
    g = torch.Generator().manual_seed(seed)
    found = torch.randint(VOCAB, (ROWS, TOKENS), generator=g)
    return found.masked_fill(torch.rand(ROWS, TOKENS, generator=g) < 0.4, -100)


def compare(losses, call, inputs, skip=()):
    """Losses, metrics but those at ``skip``, and gradients."""
    trained = [tensor for tensor in inputs if tensor is not None]
    found = []
    for loss_function in losses:
        result = call(loss_function)
        loss, *metrics = result if isinstance(result, tuple) else (result,)
        metrics = metrics[0] if metrics and isinstance(metrics[0], (tuple, list)) else metrics
        found.append((loss.detach(), list(metrics), torch.autograd.grad(loss, trained)))
    (ours, our_metrics, our_gradients), (theirs, their_metrics, their_gradients) = found
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_gradients, their_gradients, rtol=1e-3, atol=1e-6)
    assert len(our_metrics) == len(their_metrics)
    for i, (a, b) in enumerate(zip(our_metrics, their_metrics, strict=True)):
        if i not in skip:
            torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=1e-4, atol=1e-4, msg=f"metric {i}")


#: Loss types that mean something else there, or that there are not.
OTHERS = {"ipo", "aot", "aot_unpaired", "sft", "sigmoid_norm"}


@pytest.mark.parametrize("loss_type", sorted(set(DPO_LOSSES) - OTHERS))
def test_dpo_by_position(loss_type):
    bias = loss_type in ("sigmoid", "hinge")
    hidden, weight, lm_head_bias = problem(0, bias)
    ref_hidden, ref_weight, ref_bias = (None if t is None else t.detach() for t in problem(1, bias))
    target = labels()

    def call(loss_function):
        loss, metrics = loss_function(
            weight, hidden.contiguous(), target, lm_head_bias, ref_hidden.contiguous(), ref_weight, ref_bias
        )
        (
            chosen_logps,
            rejected_logps,
            _chosen_logits_mean,
            _rejected_logits_mean,
            _nll_loss,
            chosen_rewards,
            rejected_rewards,
        ) = metrics
        assert chosen_logps.shape == rejected_logps.shape == chosen_rewards.shape == rejected_rewards.shape == (2,)
        for metric in metrics:  # each is gathered over processes
            assert isinstance(metric, torch.Tensor)
        return loss, metrics

    # There, sigmoid ignores label smoothing. The negative log-likelihood is no part of one loss, and is of the others.
    options = {"loss_type": loss_type, "label_smoothing": 0.0 if loss_type == "sigmoid" else 0.1}
    losses = both("LigerFusedLinearDPOLoss", beta=0.3, compute_nll_loss=loss_type != "hinge", **options)
    # Their mean logits are over prompts and padding too.
    compare(losses, call, (hidden, weight, lm_head_bias), skip=(2, 3, *([4] if loss_type == "hinge" else [])))


@pytest.mark.parametrize("name", ["CPO", "SimPO", "ORPO"])
def test_losses_without_a_reference(name):
    hidden, weight, bias = problem(0)
    hidden = hidden.contiguous().detach().requires_grad_()
    losses = both(f"LigerFusedLinear{name}Loss")
    compare(losses, lambda loss: loss(weight, hidden, labels(), bias), (hidden, weight, bias), skip=(2, 3))


@pytest.mark.parametrize(("bias", "average"), [(True, False), (False, True)])
@pytest.mark.parametrize("kl", [torch.zeros(1), torch.tensor(0.7)], ids=["no kl", "kl"])
@pytest.mark.parametrize("use_ref_model", [False, True])
def test_kto_by_keyword(use_ref_model, kl, bias, average):
    hidden, weight, lm_head_bias = problem(0, bias)
    ref = [None if t is None or not use_ref_model else t.detach() for t in problem(1, bias)]
    target = labels()
    target[:, 0] = 3  # theirs divides by the number of tokens

    def call(loss_function):
        loss, metrics = loss_function(
            _input=hidden,
            lin_weight=weight,
            target=target,
            bias=lm_head_bias,
            preference_labels=torch.tensor([True, False, False, True]),
            ref_input=ref[0],
            ref_weight=ref[1],
            ref_bias=ref[2],
            kl=kl,
        )
        assert len(metrics) == 6  # sums of log-probabilities, logits, rewards: chosen and rejected
        for metric in metrics:  # what the trainer does with each
            assert torch.isfinite(metric.nansum())
        return loss.squeeze(), metrics

    losses = both("LigerFusedLinearKTOLoss", beta=0.2, use_ref_model=use_ref_model, average_log_prob=average)
    compare(losses, call, (hidden, weight, lm_head_bias), skip=(2, 3))  # their logits are of prompts and padding too


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
    ratio = torch.where(mask != 0, 0.5 + torch.rand(ROWS, TOKENS, generator=g), 1.0)

    def call(loss_function):
        loss, metrics = loss_function(
            _input=hidden,
            lin_weight=weight,
            selected_token_ids=ids,
            attention_mask=mask,
            advantages=torch.tensor([1.0, -0.5, 0.3, -1.0]),
            bias=bias,
            old_per_token_logps=old,
            ref_per_token_logps=ref if beta else None,
            vllm_is_ratio=ratio,
            num_items_in_batch=items,
        )
        mean_kl, clip_ratio = metrics[0] if beta else None, metrics[-1]
        assert mean_kl is None or mean_kl.numel() == 1
        assert clip_ratio.numel() == 1
        return loss, metrics

    given = {"epsilon_low": 0.2, "epsilon_high": 0.2, "temperature": 1.0, "max_completion_length": TOKENS}
    losses = both("LigerFusedLinearGRPOLoss", beta=beta, use_ref_model=beta != 0.0, **{**given, **options})
    compare(losses, call, (hidden, weight, bias))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("kind", "beta", "temperature", "soft_hard"),
    [
        *(("JSD", beta, t, False) for beta, t in ((0.0, 1.0), (0.5, 0.9), (1.0, 1.0))),
        *((kind, beta, 2.0, True) for kind, beta in (("JSD", 0.1), ("JSD", 0.9), ("CosineSimilarity", 0.5))),
    ],
)
def test_distillation_by_keyword(kind, beta, temperature, soft_hard, flat):
    hidden, weight, bias = problem(3)
    teacher, teacher_weight, teacher_bias = (t.detach() for t in problem(4, hidden=2 * HIDDEN))
    target = labels()
    # The distillation trainer gives tokens, GKD's sequences.
    shape = (lambda t: t.reshape(-1, t.shape[-1])) if flat else (lambda t: t)

    def call(loss_function):
        return loss_function(
            student_input=shape(hidden),
            student_weight=weight,
            teacher_input=shape(teacher),
            teacher_weight=teacher_weight,
            true_labels=target.reshape(-1) if flat else target,
            student_bias=bias,
            teacher_bias=teacher_bias,
        )

    options = {"ignore_index": -100, "temperature": temperature, "weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    if soft_hard:
        options |= {"weight_hard_loss": 0.3, "weight_soft_loss": 0.7, "return_soft_hard_loss": True}
    losses = both(f"LigerFusedLinear{kind}Loss", beta=beta, **options)
    compare(losses, call, (hidden, weight, bias))
    assert type(losses[0])(beta=beta, compiled=False, **options).compiled is False


@pytest.mark.parametrize("name", [name for name in dir(chunked_loss) if name.startswith("LigerFusedLinear")])
def test_every_class_of_theirs_is_here_with_its_keywords(name):
    ours, theirs = (getattr(package, name) for package in (liger_losses, chunked_loss))
    for function in (lambda c: c.__init__, lambda c: c.forward):
        takes = inspect.signature(function(ours)).parameters
        missing = set(inspect.signature(function(theirs)).parameters) - set(takes)
        assert not missing or any(p.kind is p.VAR_KEYWORD for p in takes.values()), missing
