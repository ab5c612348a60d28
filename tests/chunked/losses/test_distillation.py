"""Distillation against its definitions in float64, and against Liger and TRL."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses import (
    DistillationLoss,
    Divergence,
    EngineOptions,
    Head,
    Teacher,
    TeacherLogits,
    TeacherTopK,
    linear_divergence,
    linear_divergence_loss,
)
from tests.losses import JSD, KL, TVD, AlphaBeta, Cosine, ReverseKL
from tests.reference import (
    DIVERGENCES,
    assert_close_gradients,
    formula,
    relative_error,
    rounding,
)

BACKENDS = ("torch", "triton")
B, T, HS, HT, V = 3, 11, 16, 24, 101


NAMES = ["cosine", *DIVERGENCES]


def problem(dtype=torch.float64, distance=1.0, vocab=V, teacher_vocab=V, bias=True):
    g = torch.Generator().manual_seed(1)

    def normal(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    hidden, weight = normal(B, T, HS), normal(vocab, HS) * 0.4
    labels = torch.randint(vocab, (B, T), generator=g)
    labels[torch.rand(B, T, generator=g) < 0.3] = -100
    teacher_hidden, teacher_weight = normal(B, T, HT), normal(teacher_vocab, HT) * 0.4
    tensors = [hidden, weight, teacher_hidden, teacher_weight, normal(vocab), normal(teacher_vocab)]
    hidden, weight, teacher_hidden, teacher_weight, b, tb = (t.to(dtype) for t in tensors)
    student = [t.requires_grad_() for t in (hidden, weight, b)]
    return *student, labels, teacher_hidden, teacher_weight, tb


def test_the_hard_loss_is_the_same_for_dense_and_sparse_teachers():
    """The student has more columns than the teacher, and some tokens' labels are among these."""
    hidden, weight, bias, labels, *teacher = problem(vocab=V + 27)
    logps, indices = F.linear(teacher[0], *teacher[1:]).log_softmax(-1).topk(V)
    mask, head = labels != -100, Head(weight, bias)
    expected = F.cross_entropy(F.linear(hidden, weight, bias)[mask], labels[mask])
    found = [
        KL()(head, hidden, labels, given)[1]
        for given in (Teacher(*teacher), TeacherTopK(logps, indices, tail="renormalize"))
    ]
    for metrics in found:
        torch.testing.assert_close(metrics.hard_loss, expected)
    torch.testing.assert_close(found[0].soft_loss, found[1].soft_loss)
    both = linear_divergence(hidden, head, labels, Teacher(*teacher), Divergence.forward_kl(), logp=True)
    torch.testing.assert_close(-both.logp[mask].mean(), expected)
    (grad,) = torch.autograd.grad(both.divergence.sum(), weight, retain_graph=True)
    assert not grad[V:].any()
    torch.testing.assert_close(*(torch.autograd.grad(x, weight)[0] for x in (both.logp.sum(), -expected * mask.sum())))


@pytest.mark.parametrize(
    "options", [{"logit_scale": 0.7}, {"softcap": 3.0}, {"softcap": 3.0, "logit_scale": 0.7}], ids=str
)
def test_transforms_of_both_models(options):
    hidden, weight, bias, labels, *teacher = problem()
    theirs = {"softcap": 2.0, "logit_scale": 1.1}
    loss = JSD(temperature=1.7, temperature_squared=True, **options)
    value, _ = loss(weight, hidden, labels, Teacher(*teacher, **theirs), bias=bias)

    def logits(projected, logit_scale=1.0, softcap=None):
        scaled = projected * logit_scale
        return scaled if softcap is None else softcap * (scaled / softcap).tanh()

    student, theirs = logits(F.linear(hidden, weight, bias), **options), logits(F.linear(*teacher), **theirs)
    mask = labels != -100
    soft = torch.where(mask, formula("JSD", student / 1.7, theirs / 1.7), 0.0).sum() * 1.7**2
    expected = (soft + F.cross_entropy(student.flatten(0, 1), labels.flatten(), reduction="sum")) / 2 / mask.sum()
    torch.testing.assert_close(value, expected)
    inputs = (hidden, weight, bias)
    assert_close_gradients(value, expected, inputs, rtol=1e-8, atol=1e-10)


def test_close_teachers_keep_their_digits():
    """Gradients of a student next to its teacher: bf16 inputs, exact to bf16's rounding of the result."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(517, 64, generator=g).bfloat16().float()
    teacher = torch.randn(40, 64, generator=g).bfloat16().float()
    labels = torch.zeros(40, dtype=torch.long)
    for distance in (1e-1, 1e-2, 1e-3):
        hidden = (teacher + distance * torch.randn(40, 64, generator=g)).requires_grad_()
        loss, _ = JSD(0.0, 1.0)(weight, hidden, labels, Teacher(teacher, weight))
        (ours,) = torch.autograd.grad(loss, hidden)
        double = hidden.detach().double().requires_grad_()
        log_p, log_q = (t @ weight.double().t() for t in (double, teacher.double()))
        exact = formula("JSD", log_p, log_q).mean()
        (expected,) = torch.autograd.grad(exact, double)
        assert loss >= 0
        assert relative_error(loss, exact.detach()) < 1e-4
        assert relative_error(ours, expected) < rounding(torch.bfloat16)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (JSD(beta=0.0), Divergence.forward_kl()),
        (JSD(beta=1.0, convention="interpolated"), Divergence.reverse_kl()),
        (JSD(beta=0.3, convention="interpolated"), Divergence.mixture(0.3, 0.7, 0.3)),
        (KL(), Divergence.forward_kl()),
        (KL(skew=0.1), Divergence.mixture(0.1, 1.0, 0.0)),
        (ReverseKL(), Divergence.reverse_kl()),
        (ReverseKL(skew=0.25), Divergence.mixture(0.75, 0.0, 1.0)),
        (TVD(), Divergence.total_variation()),
        (AlphaBeta(0.2, 0.7), Divergence.alpha_beta(0.2, 0.7)),
        (AlphaBeta(0.25), Divergence.alpha_beta(0.25, 0.75)),
        (AlphaBeta(1.0), Divergence.alpha_beta(1.0, 0.0)),
    ],
)
def test_named_losses(loss, expected):
    assert loss.divergence == expected


def test_limits_of_alpha_beta_are_the_kullback_leibler_divergences():
    hidden, weight, bias, labels, *teacher = problem()

    def value(which):
        return DistillationLoss(which, 0.0, 1.0)(weight, hidden, labels, Teacher(*teacher), bias=bias)[0]

    torch.testing.assert_close(value(Divergence.alpha_beta(1, 0)), value(Divergence.forward_kl()))
    torch.testing.assert_close(value(Divergence.alpha_beta(0, 1)), value(Divergence.reverse_kl()))
    torch.testing.assert_close(
        value(Divergence.alpha_beta(1 - 1e-6, 1e-6)), value(Divergence.forward_kl()), rtol=1e-4, atol=0
    )


@pytest.mark.peers
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_equals_trl(beta):
    peer = pytest.importorskip("trl.experimental.gkd", reason="trl is not installed")
    hidden, weight, bias, labels, *teacher = problem(torch.float32)
    student, theirs = F.linear(hidden, weight, bias), F.linear(*teacher)
    expected = peer.GKDTrainer.generalized_jsd_loss(student, theirs, labels, beta=beta, temperature=2.0)
    loss = JSD(0.0, 1.0, beta, temperature=2.0)
    value, _ = loss(weight, hidden, labels, Teacher(*teacher), bias=bias)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_bad_input_is_refused():
    hidden, weight, _, labels, states, rows, theirs = problem(torch.float32)
    loss, good = JSD(), Teacher(states, rows, theirs)

    def refuses(message, teacher=good, error=ValueError, **changed):
        given = {"weight": weight, "hidden": hidden, "labels": labels, **changed}
        with pytest.raises(error, match=message):
            loss(given["weight"], given["hidden"], given["labels"], teacher)

    refuses("have .* tokens", Teacher(states[:, :-1], rows))
    refuses("do not fit its weight", Teacher(states, rows[:, :-1]))
    refuses("bias must be", Teacher(states, rows, theirs[:-1]))
    refuses("floating point", Teacher(states.long(), rows), TypeError)
    refuses("have .* tokens", TeacherLogits(F.linear(states, rows)[:, 1:]))
    refuses("needs columns=", TeacherLogits(lambda positions: None))
    refuses("must return logits", TeacherLogits(lambda positions: torch.zeros(2, 2), columns=V))
    refuses("labels must be in", labels=labels + V)
    logps, indices = F.linear(states, rows).log_softmax(-1).topk(4)
    refuses("indices must be in", TeacherTopK(logps, indices + V))
    refuses("twice", TeacherTopK(logps, indices[..., :1].expand_as(indices)))
    refuses("at most 0", TeacherTopK(-logps, indices))
    refuses("int64", TeacherTopK(logps, indices.int()), TypeError)
    refuses("unknown tail", TeacherTopK(logps, indices, tail="drop"))
    refuses("have .* tokens", TeacherTopK(logps[1:], indices[1:]))
    with pytest.raises(ValueError, match="there is no teacher"):
        loss(weight, hidden, labels)
    with pytest.raises(ValueError, match="given twice"):
        loss(weight, hidden, labels, good, teacher=good)
    with pytest.raises(ValueError, match="cosine needs"):
        Cosine()(weight, hidden, labels, TeacherTopK(logps, indices))
    with pytest.raises(ValueError, match="too small"):
        JSD(workspace=5000)(weight, hidden, labels, good)
    with pytest.raises(ValueError, match="has shape"):
        linear_divergence_loss(
            hidden,
            weight,
            labels,
            good,
            Divergence.forward_kl(),
            {"divergence": torch.ones(B)},
            options=EngineOptions(),
        )
