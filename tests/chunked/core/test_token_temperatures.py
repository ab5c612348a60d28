"""A temperature per token: values and gradients are those of each token's own logits, by every route."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from liger_losses import (
    DistillationLoss,
    Divergence,
    Head,
    LogitTransform,
    Teacher,
    TeacherTopK,
    linear_divergence,
    linear_logps,
    linear_statistics,
)
from liger_losses.integrations import megatron, verl
from tests.losses import CE, GRPO, SimPO
from tests.reference import assert_close_gradients, gradients, problem


def temperatures(shape, seed=5, dtype=torch.float32):
    return (0.4 + 1.6 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def test_distillation():
    """The soft loss times each token's temperature squared; a hard loss at temperature 1; a teacher of all columns."""
    hidden, weight, labels, _ = problem(12, 8, 40)
    states, other, _, _ = (part if part is None else part.detach() for part in problem(12, 6, 40, seed=1))
    t, mask, logits, theirs = temperatures(12), labels != -100, hidden @ weight.T, states @ other.T
    log_p, log_q = (logits / t[:, None]).log_softmax(-1), (theirs / t[:, None]).log_softmax(-1)
    each = (log_q.exp() * (log_q - log_p)).sum(-1)
    hard = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    sparse = TeacherTopK(*log_q.topk(40), "renormalize")
    for teacher, squared in ((Teacher(states, other), True), (Teacher(states, other), False), (sparse, False)):
        loss = DistillationLoss(Divergence.forward_kl(), 0.3, 0.7, temperature_squared=squared, chunk_size=5)
        found = loss(weight, hidden, labels, teacher, temperature=torch.where(mask, t, -1.0))[0]
        soft = each * t.square() if squared else each
        expected = (0.3 * hard + 0.7 * soft)[mask].mean()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        both = gradients(found, (hidden, weight)), gradients(expected, (hidden, weight))
        torch.testing.assert_close(*both, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"importance_sampling_level": "sequence", "loss_type": "grpo"}])
def test_grpo(options):
    """The same loss as with the temperature folded into the hidden states of policy and reference."""
    hidden, weight, labels, _ = problem(8, 8, 40, shape=(3, 6), masked=0.0)
    ref, ref_weight, _, _ = problem(8, 8, 40, shape=(3, 6), seed=1)
    mask, advantages = torch.ones(3, 6), torch.tensor([1.0, -1.0, 0.5])
    mask[1, 4:] = 0
    t = temperatures((3, 6))
    old = torch.randn(3, 6) - 3
    loss = GRPO(beta=0.1, **options)

    def value(hidden, ref, **more):
        return loss(
            hidden, weight, labels, mask, advantages, ref_input=ref.detach(), ref_weight=ref_weight.detach(),
            old_per_token_logps=old, **more,
        )  # fmt: skip

    found, metrics = value(hidden, ref, temperature=torch.where(mask == 0, 0.0, t))
    expected, others = value(hidden / t[..., None], ref / t[..., None])
    torch.testing.assert_close((found, metrics), (expected, others), rtol=1e-4, atol=1e-6)
    assert_close_gradients(found, expected, (hidden, weight), rtol=1e-3, atol=1e-6)


def test_what_is_refused():
    hidden, weight, labels, _ = problem(6, 8, 31, masked=0.0)
    t = temperatures(6)
    for given, error, words in (
        (t[:5], ValueError, r"one for each hidden state, \[6\], got shape \[5\]"),
        (t[:, None], ValueError, r"got shape \[6, 1\]"),
        (t.long(), TypeError, "floating-point tensor with one for each token"),
        (t.clone().requires_grad_(), ValueError, r"pass temperature.detach\(\)"),
        (
            t.index_fill(0, torch.tensor([2]), 0.0),
            ValueError,
            "positive and finite for every token.*got 0.0 for 1 of 6",
        ),
        (t * float("nan"), ValueError, "positive and finite"),
        (t.to("meta"), ValueError, "temperature is on meta"),
    ):
        with pytest.raises(error, match=words):
            linear_logps(hidden, weight, labels, temperature=given)
    with pytest.raises(ValueError, match=r"one for each hidden state, \[3\], got shape \[6\]"):  # of all tensors
        linear_statistics([hidden, hidden[:3]], weight, [labels, labels[:3]], transform=LogitTransform(t))
    with pytest.raises(ValueError, match="temperature was given twice"):
        linear_logps(hidden, Head(weight, transform=LogitTransform(0.5)), labels, temperature=t)
    arguments = hidden[None], weight, labels[None], torch.ones(1, 6), torch.ones(1)
    with pytest.raises(ValueError, match="built with 0.5, and the call has one per token"):
        GRPO(beta=0.0, temperature=0.5)(*arguments, temperature=t[None])
    with pytest.raises(ValueError, match="temperature one per token, which must be 1"):
        teacher = Teacher(hidden.detach(), Head(weight.detach(), transform=LogitTransform(t)))
        linear_divergence(hidden, weight, labels, teacher, Divergence.forward_kl())
    teacher, loss = Teacher(hidden.detach(), weight.detach()), DistillationLoss(Divergence.forward_kl())
    for given, error, words in (
        (t.long(), TypeError, "floating-point tensor with one for each token"),
        (t.clone().requires_grad_(), ValueError, r"pass temperature.detach\(\)"),
    ):
        with pytest.raises(error, match=words):
            loss(weight, hidden, labels, teacher, temperature=given)
        with pytest.raises(error, match=words):
            linear_divergence(hidden, weight, labels, teacher, Divergence.forward_kl(), temperature=given)


def test_what_is_refused_where_ranks_work_together(one_process):
    hidden, weight, labels, _ = problem(6, 8, 31, masked=0.0, shape=(2, 3))
    wrong = temperatures((2, 3)).index_fill(0, torch.tensor([1]), 0.0)
    teacher, head = Teacher(hidden.detach(), weight.detach()), Head(weight, transform=LogitTransform(wrong))
    group = dist.group.WORLD
    distillation = DistillationLoss(Divergence.forward_kl(), group=group)
    for call in (
        lambda: distillation(weight, hidden, labels, teacher, temperature=wrong),
        lambda: CE(group=group)(head, hidden, labels),
        lambda: SimPO(group=group)(head, hidden, labels),
    ):
        with pytest.raises(ValueError, match="positive and finite"):
            call()
    shared = Head(weight, transform=LogitTransform(wrong.flatten()), group=group)
    with pytest.raises(ValueError, match=r"one for each hidden state, \[2, 3\], got shape \[6\]"):
        linear_logps(hidden, shared, labels)


def test_in_the_places_of_other_heads():
    hidden, weight, labels, _ = problem(6, 8, 31, shape=(2, 3))
    t = temperatures((2, 3))
    expected = linear_logps(hidden, weight, labels, temperature=t)
    logps, _ = verl.linear_cross_entropy(hidden, weight, labels.flatten(), t)
    torch.testing.assert_close(logps.view(2, 3), expected)
    layer = SimpleNamespace(weight=weight, bias=None, tp_group=SimpleNamespace(size=lambda: 1))
    losses = megatron.output_processor(
        hidden_states=hidden.transpose(0, 1), output_layer=layer, output_weight=None, labels=labels,
        context=megatron.OutputOptions(temperature=t),
    )  # fmt: skip
    torch.testing.assert_close(-losses, expected)


def test_a_changed_temperature_does_not_reach_backward():
    hidden, weight, labels, _ = problem(6, 8, 31, masked=0.0)
    t = temperatures(6)
    (expected,) = gradients(linear_logps(hidden, weight, labels, temperature=t.clone()).sum(), (weight,))
    logps = linear_logps(hidden, weight, labels, temperature=t)
    t.fill_(3.0)
    torch.testing.assert_close(gradients(logps.sum(), (weight,))[0], expected)
