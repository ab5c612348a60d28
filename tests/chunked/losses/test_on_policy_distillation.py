"""Distillation on the student's own tokens against its definitions in float64: values and gradients."""

import math

import pytest
import torch

from liger_losses import (
    DistillationLoss,
    Divergence,
    EngineOptions,
    Head,
    Teacher,
    TeacherLogits,
    Teachers,
    TeacherTopK,
    functional,
    linear_divergence,
    linear_labels_loss,
    linear_logps,
    projected_teacher,
    teacher_topk,
)
from tests.losses import JSD, ReverseKL
from tests.reference import relative_error

B, T, HS, HT, V = 3, 7, 16, 24, 101
BACKENDS = ("torch", "triton")


def problem(dtype=torch.float64, seed=0, scale=1.5):
    g = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    hidden, weight = normal(B, T, HS), normal(V, HS) * HS**-0.5 * scale
    taught, other = (normal(B, T, HT), normal(V, HT) * HT**-0.5 * scale), (normal(B, T, 8), normal(V, 8) * 8**-0.5)
    labels = torch.randint(V, (B, T), generator=g)
    labels[torch.rand(B, T, generator=g) < 0.3] = -100
    labels[1] = -100  # a row without tokens
    cast = [x.to(dtype) for x in (hidden, weight, *taught, *other)]
    return cast[0].requires_grad_(), cast[1].requires_grad_(), labels, cast[2:4], cast[4:]


def log_softmaxes(hidden, weight, teacher, temperature=1.0):
    pairs = (hidden, weight), teacher
    return [(h.double() @ w.double().t() / temperature).log_softmax(-1) for h, w in pairs]


def terms(which, log_p, log_q):
    """Each column's term, as the divergence is written."""
    p, q = log_p.exp(), log_q.exp()
    if which.startswith("forward"):
        return q * (log_q - log_p)
    if which.startswith("reverse"):
        return p * (log_p - log_q)
    log_m = (0.3 * q + 0.7 * p).log()
    return 0.3 * q * (log_q - log_m) + 0.7 * p * (log_p - log_m)


KINDS = {"forward": Divergence.forward_kl(), "reverse": Divergence.reverse_kl()}
KINDS["mixed"] = Divergence.mixture(0.3, 0.3, 0.7)


def compare(loss, exact, leaves, exact_leaves, tolerance=1e-5):
    assert relative_error(loss, exact) < tolerance
    found, expected = (torch.autograd.grad(x, y, retain_graph=True) for x, y in ((loss, leaves), (exact, exact_leaves)))
    for ours, true in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        assert relative_error(ours.cpu(), true) < tolerance


def over_columns(which, tail, logps, teacher_logps):
    """A divergence over k columns and their tail."""
    if tail == "renormalize":
        logps, teacher_logps = logps.log_softmax(-1), teacher_logps.log_softmax(-1)
    elif tail != "none":
        rest = [(1 - x.exp().sum(-1, keepdim=True)).log() for x in (logps, teacher_logps)]
        logps, teacher_logps = (torch.cat(pair, -1) for pair in zip((logps, teacher_logps), rest, strict=True))
    return terms(which, logps, teacher_logps).sum(-1)


@pytest.mark.parametrize("tail", ["lump", "renormalize", "none"])
@pytest.mark.parametrize("of", ["student", "teacher"])
@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize(("hard", "temperature"), [(0.0, 1.0), (0.25, 1.0), (0.25, 2.0)])
def test_the_largest_columns(which, of, tail, hard, temperature):
    hidden, weight, labels, teacher, _ = problem(torch.float32)
    mask = labels != -100
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p, log_q = log_softmaxes(*exact, teacher, temperature)
    columns = (log_p if of == "student" else log_q).topk(5, -1).indices
    soft = over_columns(which, tail, log_p.gather(-1, columns), log_q.gather(-1, columns))
    ce = -log_softmaxes(*exact, teacher)[0].gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = ((1 - hard) * soft + hard * ce)[mask].mean()
    loss = DistillationLoss(KINDS[which], hard, 1 - hard, temperature=temperature, top_k=5, top_k_of=of, tail=tail)
    for given in (Teacher(*teacher), TeacherLogits(teacher[0] @ teacher[1].t())):
        if of == "teacher" and isinstance(given, TeacherLogits):
            continue
        value, metrics = loss(weight, hidden, labels, given)
        assert relative_error(metrics.soft_loss, soft[mask].mean().detach()) < 1e-4
        compare(value, expected, (hidden, weight), exact, 1e-4)


@pytest.mark.parametrize("active", [1, 0])
@pytest.mark.parametrize("compact", [True, False])
def test_the_temperature_of_a_masked_token_may_be_anything(compact, active):
    hidden, weight, labels, teacher, _ = problem()
    labels[:] = -100
    labels[2, :active] = 5
    loss = ReverseKL(0.0, 1.0, top_k=4, compact=compact)
    found = [
        loss(weight, hidden, labels, Teacher(*teacher), temperature=torch.where(labels < 0, of_masked, 2.0).double())
        for of_masked in (1.0, math.nan)
    ]
    torch.testing.assert_close(*(value for value, _ in found))
    torch.testing.assert_close(*(torch.autograd.grad(value, (hidden, weight)) for value, _ in found))


def test_the_largest_columns_in_half_precision_and_in_parts():
    hidden, weight, labels, teacher, _ = problem(torch.bfloat16)
    values = []
    for options in ({}, {"workspace": 30_000}, {"chunk_size": 2}):
        loss = ReverseKL(0.0, 1.0, top_k=8, tail="none", **options)
        value, _ = loss(weight, hidden, labels, Teacher(*teacher))
        values.append((value, *torch.autograd.grad(value, (hidden, weight))))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p, log_q = log_softmaxes(*exact, teacher)
    columns = log_p.topk(8, -1).indices
    expected = terms("reverse", log_p.gather(-1, columns), log_q.gather(-1, columns)).sum(-1)[labels != -100].mean()
    for found in values:
        for ours, true in zip(found, (expected, *torch.autograd.grad(expected, exact, retain_graph=True)), strict=True):
            assert relative_error(ours, true) < 2e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [0.003, 0.05])
@pytest.mark.parametrize("which", KINDS)
def test_a_limit_for_each_column(which, limit, backend):
    """OPSD (arXiv:2601.18734): each column's term is cut before the sum, which may then be negative."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    hidden, weight, labels, teacher, _ = problem(torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = terms(which, *log_softmaxes(*exact, teacher)).clamp(max=limit).sum(-1)[labels != -100].mean()
    given = [x.detach().to(device).requires_grad_() for x in (hidden, weight)]
    loss = DistillationLoss(KINDS[which], 0.0, 1.0, entry_limit=limit, backend=backend)
    value, _ = loss(given[1], given[0], labels.to(device), Teacher(*[x.to(device) for x in teacher]))
    compare(value.cpu(), expected, given, exact, 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"workspace": 40_000}, {"temperature": 1.5}], ids=str)
def test_divergences_by_the_teachers_entropy(options, backend):
    """Entropy-aware distillation (arXiv:2603.07079): the forward KL is added where the teacher is unsure."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    hidden, weight, labels, teacher, _ = problem(torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p, log_q = log_softmaxes(*exact, teacher, options.get("temperature", 1.0))
    entropy = -(log_q.exp() * log_q).sum(-1)
    threshold = float(entropy[labels != -100].sort().values[3:5].mean())
    each = terms("reverse", log_p, log_q).sum(-1) + 0.6 * (entropy > threshold) * terms("forward", log_p, log_q).sum(-1)
    which = Divergence.kl_by_entropy(threshold, 0.6)
    given = [x.detach().to(device).requires_grad_() for x in (hidden, weight)]
    loss = DistillationLoss(which, 0.0, 1.0, backend=backend, **options)
    value, _ = loss(given[1], given[0], labels.to(device), Teacher(*[x.to(device) for x in teacher]))
    compare(value.cpu(), each[labels != -100].mean(), given, exact, 1e-4)
    torch.testing.assert_close(functional.divergence(log_p.detach(), log_q.detach(), which), each.detach())


@pytest.mark.parametrize("per_token", [False, True])
def test_teachers_by_row_or_token(per_token):
    hidden, weight, labels, first, second = problem()
    which = torch.randint(2, (B, T) if per_token else (B,), generator=torch.Generator().manual_seed(1))
    both = [log_softmaxes(hidden, weight, teacher) for teacher in (first, second)]
    each = torch.stack([terms("mixed", *pair).sum(-1) for pair in both])
    chosen = torch.where((which if per_token else which[:, None]) == 0, each[0], each[1])
    poisoned = []
    for i, (states, head) in enumerate((first, second)):  # what belongs to another teacher may hold anything
        own = (which if per_token else which[:, None].expand(B, T)) == i
        poisoned.append(Teacher(torch.where(own[..., None], states, math.nan), head))
    loss = JSD(0.0, 1.0, beta=0.3)
    value, _ = loss(weight, hidden, labels, Teachers(poisoned, which))
    mask = labels != -100
    compare(value, chosen[mask].mean(), (hidden, weight), (hidden, weight), 1e-6)
    found = linear_divergence(hidden, weight, labels, Teachers(poisoned, which), KINDS["mixed"], logp=True)
    torch.testing.assert_close(found.divergence, torch.where(mask, chosen, 0.0))
    logp = both[0][0].gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(found.logp, torch.where(mask, logp, 0.0))
    with pytest.raises(ValueError, match=r"which must be in \[0, 2\)"):
        loss(weight, hidden, labels, Teachers(poisoned, which + 1))
    with pytest.raises(ValueError, match="which must be integers"):
        loss(weight, hidden, labels, Teachers(poisoned, which[:2]))
    with pytest.raises(TypeError, match="takes a list of Teacher"):
        loss(weight, hidden, labels, Teachers([hidden], which))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("which", KINDS)
def test_a_teacher_with_another_tokenizer(which, temperature):
    hidden, weight, labels, _, _ = problem()
    g = torch.Generator().manual_seed(3)
    states, head = torch.randn(B, T, HT, generator=g).double(), torch.randn(77, HT, generator=g).double()
    shares = torch.rand(V, 77, generator=g).double() * (torch.rand(V, 77, generator=g) < 0.05)
    shares[:, 0] = 1 / V  # every column of the student has a share
    teacher = projected_teacher(states, head, shares.to_sparse_csr(), temperature=temperature)
    q = (states @ head.t() / temperature).softmax(-1) @ shares.t()
    log_q = (q / q.sum(-1, keepdim=True)).log()
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    expected = terms(which, log_p, log_q).sum(-1)[labels != -100].mean()
    loss = DistillationLoss(KINDS[which], 0.0, 1.0, temperature=temperature, workspace=60_000)
    value, _ = loss(weight, hidden, labels, teacher)
    compare(value, expected, (hidden, weight), (hidden, weight), 1e-6)


def test_wrong_projections_are_refused():
    states, head = torch.randn(B, T, HT), torch.randn(77, HT)
    with pytest.raises(TypeError, match="sparse tensor"):
        projected_teacher(states, head, torch.ones(V, 77))
    with pytest.raises(ValueError, match="this teacher has 77"):
        projected_teacher(states, head, torch.ones(V, 78).to_sparse())


def test_a_tail_that_is_known_keeps_its_digits():
    """A teacher whose 8 largest have all but 1e-6 of the probability, and a student who is not sure."""
    g = torch.Generator().manual_seed(0)
    weight, states = torch.randn(V, HT, generator=g), torch.randn(B, T, HT, generator=g) * 3
    labels, student = torch.zeros(B, T, dtype=torch.long), torch.randn(B, T, HT, generator=g) * 0.3
    sparse = teacher_topk(Teacher(states, weight), 8, labels, temperature=0.5)
    log_q, log_p = ((x.double() @ weight.double().t() / 0.5).log_softmax(-1) for x in (states, student))
    found, indices = log_q.topk(8, -1)
    rest = log_q.scatter(-1, indices, -math.inf).logsumexp(-1)
    torch.testing.assert_close(sparse.logps.double(), found, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sparse.tail_logps.double(), rest, rtol=1e-5, atol=1e-5)
    own = log_p.gather(-1, indices)
    tail = (1 - own.exp().sum(-1)).log()
    exact = (own.exp() * (own - found)).sum(-1) + tail.exp() * (tail - rest)
    errors = []
    for teacher in (sparse, TeacherTopK(sparse.logps, sparse.indices)):
        loss = ReverseKL(0.0, 1.0, temperature=0.5)
        errors.append(relative_error(loss(weight, student, labels, teacher)[0], exact.mean()))
    assert errors[0] < 1e-5
    assert errors[1] > 1e-3  # without it, the digits are lost


def test_several_labels_of_a_row():
    hidden, weight, _, _, _ = problem()
    g = torch.Generator().manual_seed(5)
    labels = torch.randint(V, (B, T, 4), generator=g)
    labels[torch.rand(B, T, 4, generator=g) < 0.4] = -100
    labels[0, 0] = -100
    labels[0, 1] = labels[0, 1, 0]  # the same label several times
    weights, mask = torch.randn(B, T, 4, generator=g).double(), labels != -100
    log_p = (hidden @ weight.t()).log_softmax(-1)
    logps = torch.where(mask, log_p.gather(-1, labels.clamp(min=0)), 0.0)
    weights = torch.where(mask, weights, math.nan)
    expected = -(logps * weights.nan_to_num()).sum()
    loss, found = linear_labels_loss(hidden, weight, labels, weights)
    torch.testing.assert_close(found, logps.detach())
    compare(loss, expected, (hidden, weight), (hidden, weight), 1e-9)
    twice, _ = linear_labels_loss(hidden, weight, labels, weights, options=EngineOptions(strategy="two_pass"))
    compare(twice, expected, (hidden, weight), (hidden, weight), 1e-9)
    streamed = linear_logps(hidden, Head(weight), labels, entropy=True)
    torch.testing.assert_close(streamed.logp, logps)
    entropy = -(log_p.exp() * log_p).sum(-1) * mask.any(-1)
    torch.testing.assert_close(streamed.entropy, entropy)
    compare((streamed.logp.exp()).sum(), logps.exp().sum(), (hidden, weight), (hidden, weight), 1e-9)
    with pytest.raises(ValueError, match="weights must be"):
        linear_labels_loss(hidden, weight, labels, weights[..., :1])


def test_extremes_are_finite():
    """Log-ratios of 30 nats, and probabilities that are 0 in fp32."""
    for which in (*KINDS.values(), *(w.limited(0.1) for w in KINDS.values()), Divergence.kl_by_entropy(0.1)):
        log_p = torch.tensor([[-0.0, -30.0, -120.0], [-120.0, -30.0, -0.0]]).log_softmax(-1).requires_grad_()
        log_q = torch.tensor([[-30.0, -0.0, -60.0], [-120.0, -30.0, -0.0]]).log_softmax(-1)
        for tail in ("none", "renormalize", "lump"):
            if which.by_entropy and tail == "none":
                continue
            value = functional.sparse_divergence(log_p, log_q, which, tail)
            (grad,) = torch.autograd.grad(value.sum(), log_p)
            assert value.isfinite().all()
            assert grad.isfinite().all()
