"""Distillation beside its golden results: temperatures of masked tokens, limited divergences, and known tails."""

import math
from unittest import mock

import pytest
import torch

import liger_losses as ll
from liger_losses.chunked.core import stream
from tests.losses import ReverseKL
from tests.reference import relative_error

B, T, HS, HT, V = 3, 7, 16, 24, 101


def problem(dtype=torch.float64):
    """Hidden states, weight and labels; a teacher's hidden states and weight."""
    g = torch.Generator().manual_seed(0)
    sizes, scales = ((B, T, HS), (V, HS), (B, T, HT), (V, HT)), (1.0, 1.5 * HS**-0.5, 1.0, 1.5 * HT**-0.5)
    hidden, weight, *teacher = (
        (torch.randn(*size, generator=g, dtype=torch.float64) * scale).to(dtype)
        for size, scale in zip(sizes, scales, strict=True)
    )
    labels = torch.randint(V, (B, T), generator=g)
    labels[torch.rand(B, T, generator=g) < 0.3] = labels[1] = -100  # a row without tokens
    return hidden.requires_grad_(), weight.requires_grad_(), labels, teacher


KINDS = ll.Divergence.forward_kl(), ll.Divergence.reverse_kl(), ll.Divergence.mixture(0.3, 0.3, 0.7)


@pytest.mark.parametrize("of", ["student", "teacher"])
def test_the_largest_columns_with_any_ignored_label(of):
    """Of the label 0, as of any other, whatever stands for the active tokens in the other model's pass."""
    hidden, weight, labels, (states, teacher) = problem()
    labels = torch.where(labels == 0, 1, labels)
    for taught in [ll.Teacher(states, teacher)] + [ll.TeacherLogits(states @ teacher.t())] * (of == "student"):
        found = []
        for ignored in (-100, 0):
            loss = ReverseKL(0.5, 1.0, top_k=5, top_k_of=of, ignore_index=ignored)
            with mock.patch.object(stream, "_count", wraps=stream._count) as count:
                value, _ = loss(weight, hidden, torch.where(labels == -100, ignored, labels), taught)
            assert count.call_count == 1 + (of == "teacher")  # for which the host waits
            found.append((value, *torch.autograd.grad(value, (hidden, weight))))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("active", [1, 0])
@pytest.mark.parametrize("compact", [True, False])
def test_the_temperature_of_a_masked_token_may_be_anything(compact, active):
    hidden, weight, labels, teacher = problem()
    labels[:] = -100
    labels[2, :active] = 5
    loss = ReverseKL(0.0, 1.0, top_k=4, compact=compact)
    found = [
        loss(weight, hidden, labels, ll.Teacher(*teacher), temperature=torch.where(labels < 0, of_masked, 2.0).double())
        for of_masked in (1.0, math.nan)
    ]
    torch.testing.assert_close(*(value for value, _ in found))
    torch.testing.assert_close(*(torch.autograd.grad(value, (hidden, weight)) for value, _ in found))


@pytest.mark.parametrize(
    "which",
    [*(which.limited(limit) for which in KINDS for limit in (0.003, 0.05)), ll.Divergence.kl_by_entropy(3.5, 0.6)],
    ids=str,
)
def test_forms_of_a_column_or_a_token_of_their_own(which):
    """In Triton, and of parts of the vocabulary, as in PyTorch, whose values the golden results have."""
    hidden, weight, labels, teacher = problem(torch.float32)
    found = []
    for options in ({}, {"workspace": 40_000}, {"backend": "triton"}):
        device = "cuda" if "backend" in options and torch.cuda.is_available() else "cpu"
        given = [x.detach().to(device).requires_grad_() for x in (weight, hidden)]
        loss = ll.DistillationLoss(which, 0.0, 1.0, temperature=1.5, **options)
        value, _ = loss(*given, labels.to(device), ll.Teacher(*[x.to(device) for x in teacher]))
        found.append([x.cpu() for x in (value, *torch.autograd.grad(value, given))])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)
    models = (hidden, weight), teacher
    log_p, log_q = ((h.double() @ w.double().t() / 1.5).log_softmax(-1) for h, w in models)
    each = ll.functional.divergence(log_p, log_q, which)
    torch.testing.assert_close(found[0][0].double(), each[labels != -100].mean(), rtol=1e-4, atol=1e-6)


def test_a_tail_that_is_known_keeps_its_digits():
    """A teacher whose 8 largest have all but 1e-6 of the probability, and a student who is not sure."""
    g = torch.Generator().manual_seed(0)
    weight, states = torch.randn(V, HT, generator=g), torch.randn(B, T, HT, generator=g) * 3
    labels, student = torch.zeros(B, T, dtype=torch.long), torch.randn(B, T, HT, generator=g) * 0.3
    sparse = ll.teacher_topk(ll.Teacher(states, weight), 8, labels, temperature=0.5)
    log_q, log_p = ((x.double() @ weight.double().t() / 0.5).log_softmax(-1) for x in (states, student))
    found, indices = log_q.topk(8, -1)
    rest = log_q.scatter(-1, indices, -math.inf).logsumexp(-1)
    torch.testing.assert_close(sparse.logps.double(), found, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sparse.tail_logps.double(), rest, rtol=1e-5, atol=1e-5)
    own = log_p.gather(-1, indices)
    tail = (1 - own.exp().sum(-1)).log()
    exact = (own.exp() * (own - found)).sum(-1) + tail.exp() * (tail - rest)
    errors = []
    for teacher in (sparse, ll.TeacherTopK(sparse.logps, sparse.indices)):
        loss = ReverseKL(0.0, 1.0, temperature=0.5)
        errors.append(relative_error(loss(weight, student, labels, teacher)[0], exact.mean()))
    assert errors[0] < 1e-5
    assert errors[1] > 1e-3  # without it, the digits are lost
