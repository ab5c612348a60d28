"""Distillation beside its golden results: on the student's own tokens, of several teachers, with weights of tokens."""

import math

import pytest
import torch
import torch.nn.functional as F

import liger_losses as ll
from tests.losses import JSD, ReverseKL
from tests.reference import DIVERGENCES, gradients, jsd, relative_error

B, T, HS, HT, V = 3, 7, 16, 24, 101


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


#: A divergence, and its formula of (log p, log q).
KINDS = {name: DIVERGENCES[f"{name} KL"] for name in ("forward", "reverse")}
KINDS["mixed"] = (ll.Divergence.mixture(0.3, 0.3, 0.7), jsd(0.3, 0.3, 0.7))


def compare(loss, exact, leaves, tolerance):
    assert relative_error(loss, exact) < tolerance
    for ours, true in zip(gradients(loss, leaves), gradients(exact, leaves), strict=True):
        assert ours.isfinite().all()
        assert relative_error(ours, true) < tolerance


@pytest.mark.parametrize("of", ["student", "teacher"])
@pytest.mark.parametrize("columns", [V - 6, V + 6])
def test_the_largest_columns_of_a_padded_vocabulary(columns, of):
    """Of columns that both models have, as if neither had others; logits of padding would be the largest."""
    hidden, weight, labels, (states, _), _ = problem()
    wide, common = torch.randn(columns, HT, generator=torch.Generator().manual_seed(2)).double(), min(V, columns)
    head, wide = (torch.cat([x[:common], 9 * x[common:]]) for x in (weight.detach(), wide))
    loss, head = ReverseKL(top_k=5, top_k_of=of, temperature=1.5), head.requires_grad_()
    found = []
    for student, teacher in ((head, ll.Teacher(states, wide, columns_correspond=True)), (head[:common], wide[:common])):
        taught = teacher if isinstance(teacher, ll.Teacher) else ll.Teacher(states, teacher)
        found.append(torch.autograd.grad(loss(student, hidden, labels % common, taught)[0], (head, hidden)))
    torch.testing.assert_close(*found)
    if of == "student":
        logits = ll.TeacherLogits(states @ wide.t(), columns_correspond=True)
        function = ll.TeacherLogits(lambda at: logits.logits.flatten(0, 1)[at], columns, columns_correspond=True)
        for taught in (logits, function):
            values = torch.autograd.grad(loss(head, hidden, labels % common, taught)[0], (head, hidden))
            torch.testing.assert_close(values, found[0])
        hard = ReverseKL(0.5, 1.0, top_k=5)(head, hidden, labels % common, logits)[1].hard_loss
        whole = -ll.linear_logps(hidden, head, labels % common).mean()
        torch.testing.assert_close(hard, whole.detach())


def test_the_reverse_kl_has_no_hard_loss_unless_asked_for():
    hidden, weight, labels, teacher, _ = problem()
    loss, metrics = ReverseKL()(weight, hidden, labels, ll.Teacher(*teacher))
    assert metrics.hard_loss is None
    assert loss == metrics.soft_loss


@pytest.mark.parametrize("active", [1, 0])
@pytest.mark.parametrize("compact", [True, False])
def test_the_temperature_of_a_masked_token_may_be_anything(compact, active):
    hidden, weight, labels, teacher, _ = problem()
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
    [*(w.limited(limit) for w, _ in KINDS.values() for limit in (0.003, 0.05)), ll.Divergence.kl_by_entropy(3.5, 0.6)],
    ids=str,
)
def test_forms_of_a_column_or_a_token_of_their_own(which):
    """In Triton, and of parts of the vocabulary, as in PyTorch, whose values the golden results have."""
    hidden, weight, labels, teacher, _ = problem(torch.float32)
    found = []
    for options in ({}, {"workspace": 40_000}, {"backend": "triton"}):
        device = "cuda" if "backend" in options and torch.cuda.is_available() else "cpu"
        given = [x.detach().to(device).requires_grad_() for x in (weight, hidden)]
        loss = ll.DistillationLoss(which, 0.0, 1.0, temperature=1.5, **options)
        value, _ = loss(*given, labels.to(device), ll.Teacher(*[x.to(device) for x in teacher]))
        found.append([x.cpu() for x in (value, *torch.autograd.grad(value, given))])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)
    log_p, log_q = log_softmaxes(hidden, weight, teacher, 1.5)
    each = ll.functional.divergence(log_p, log_q, which)
    torch.testing.assert_close(found[0][0].double(), each[labels != -100].mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_teachers_by_row_or_token(per_token):
    hidden, weight, labels, first, second = problem()
    which = torch.randint(2, (B, T) if per_token else (B,), generator=torch.Generator().manual_seed(1))
    both = [log_softmaxes(hidden, weight, teacher) for teacher in (first, second)]
    each = torch.stack([KINDS["mixed"][1](*pair) for pair in both])
    chosen = torch.where((which if per_token else which[:, None]) == 0, each[0], each[1])
    poisoned = []
    for i, (states, head) in enumerate((first, second)):  # what belongs to another teacher may hold anything
        own = (which if per_token else which[:, None].expand(B, T)) == i
        poisoned.append(ll.Teacher(torch.where(own[..., None], states, math.nan), head))
    loss = JSD(0.0, 1.0, beta=0.3)
    value, _ = loss(weight, hidden, labels, ll.Teachers(poisoned, which))
    mask = labels != -100
    compare(value, chosen[mask].mean(), (hidden, weight), 1e-6)
    found = ll.linear_divergence(hidden, weight, labels, ll.Teachers(poisoned, which), KINDS["mixed"][0], logp=True)
    torch.testing.assert_close(found.divergence, torch.where(mask, chosen, 0.0))
    logp = both[0][0].gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(found.logp, torch.where(mask, logp, 0.0))
    with pytest.raises(ValueError, match=r"which must be in \[0, 2\)"):
        loss(weight, hidden, labels, ll.Teachers(poisoned, which + 1))
    with pytest.raises(ValueError, match="which must be integers"):
        loss(weight, hidden, labels, ll.Teachers(poisoned, which[:2]))
    with pytest.raises(TypeError, match="takes a list of Teacher"):
        loss(weight, hidden, labels, ll.Teachers([hidden], which))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("which", KINDS)
def test_a_teacher_with_another_tokenizer(which, temperature):
    hidden, weight, labels, _, _ = problem()
    g = torch.Generator().manual_seed(3)
    states, head = torch.randn(B, T, HT, generator=g).double(), torch.randn(77, HT, generator=g).double()
    shares = torch.rand(V, 77, generator=g).double() * (torch.rand(V, 77, generator=g) < 0.05)
    shares[:, 0] = 1 / V  # every column of the student has a share
    teacher = ll.projected_teacher(states, head, shares.to_sparse_csr(), temperature=temperature)
    q = (states @ head.t() / temperature).softmax(-1) @ shares.t()
    log_q = (q / q.sum(-1, keepdim=True)).log()
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    which, formula = KINDS[which]
    expected = formula(log_p, log_q)[labels != -100].mean()
    loss = ll.DistillationLoss(which, 0.0, 1.0, temperature=temperature, workspace=60_000)
    value, _ = loss(weight, hidden, labels, teacher)
    compare(value, expected, (hidden, weight), 1e-6)


def test_wrong_projections_are_refused():
    states, head = torch.randn(B, T, HT), torch.randn(77, HT)
    with pytest.raises(TypeError, match="sparse tensor"):
        ll.projected_teacher(states, head, torch.ones(V, 77))
    with pytest.raises(ValueError, match="77], of this teacher"):
        ll.projected_teacher(states, head, torch.ones(V, 78).to_sparse())


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


def test_several_labels_of_a_row():
    """Weights of masked labels may be anything; in two passes too, and as log-probabilities of several labels."""
    hidden, weight, _, _, _ = problem()
    g = torch.Generator().manual_seed(5)
    labels = torch.randint(V, (B, T, 4), generator=g)
    labels[torch.rand(B, T, 4, generator=g) < 0.4] = -100
    labels[0, 1] = labels[0, 1, 0]  # the same label several times
    weights, mask = torch.randn(B, T, 4, generator=g).double(), labels != -100
    logps = ll.linear_logps(hidden, weight, labels)
    expected, weights = -(logps * weights).sum(), torch.where(mask, weights, math.nan)
    for options in (ll.EngineOptions(), ll.EngineOptions(strategy="two_pass")):
        loss, found = ll.linear_labels_loss(hidden, weight, labels, weights, options=options)
        torch.testing.assert_close(found, logps.detach())
        compare(loss, expected, (hidden, weight), 1e-9)
    with pytest.raises(ValueError, match="weights must be"):
        ll.linear_labels_loss(hidden, weight, labels, weights[..., :1])


def test_extremes_are_finite():
    """Log-ratios of 30 nats, and probabilities that are 0 in fp32."""
    for which in (
        *(w for kind, _ in KINDS.values() for w in (kind, kind.limited(0.1))),
        ll.Divergence.kl_by_entropy(0.1),
    ):
        log_p = torch.tensor([[-0.0, -30.0, -120.0], [-120.0, -30.0, -0.0]]).log_softmax(-1).requires_grad_()
        log_q = torch.tensor([[-30.0, -0.0, -60.0], [-120.0, -30.0, -0.0]]).log_softmax(-1)
        for tail in ("none", "renormalize", "bucket"):
            if which.by_entropy and tail == "none":
                continue
            value = ll.functional.sparse_divergence(log_p, log_q, which, tail)
            (grad,) = torch.autograd.grad(value.sum(), log_p)
            assert value.isfinite().all()
            assert grad.isfinite().all()


@pytest.mark.parametrize("over", ["all", "largest"])
def test_weights_of_tokens(over):
    """Which may be anything at masked ones; ``shift`` moves them with the labels."""
    hidden, weight, labels, teacher, _ = problem()
    g, (b, t) = torch.Generator().manual_seed(0), labels.shape
    weights = torch.rand(b, t, generator=g).masked_fill_(labels < 0, torch.nan)
    weights[:, 3] = 0.0
    loss = JSD(0.4, 0.6, **({"top_k": 7, "tail": "renormalize"} if over == "largest" else {}))
    call = lambda loss, *given, **more: loss(weight, hidden, *given, ll.Teacher(*teacher), **more)  # noqa: E731
    each = [torch.where(torch.arange(b * t).view(b, t) == i, labels, -100) for i in range(b * t)]
    parts = [call(loss, one, num_items_in_batch=(labels >= 0).sum())[0] for one in each]
    kept = [w * part for w, part in zip(weights.flatten(), parts, strict=True) if not w.isnan()]
    value, metrics = call(loss, labels, token_weights=weights)
    torch.testing.assert_close(value, torch.stack(kept).sum())
    torch.testing.assert_close(metrics, call(loss, labels)[1])
    grads = torch.autograd.grad(value, (hidden, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(torch.stack(kept).sum(), (hidden, weight)))
    before, of_before = (F.pad(x[:, :-1], (1, 0), value=fill) for x, fill in ((labels, -100), (weights, 0.0)))
    shifted = call(loss.replace(shift=True), before, token_weights=of_before)[0]
    last = labels.clone()
    last[:, -1] = -100
    torch.testing.assert_close(shifted, call(loss, last, token_weights=weights)[0])


def test_token_scaling_of_distillation():
    hidden, weight, labels, teacher, _ = problem()
    for options in (
        {"token_scaling": "entropy"},
        {"token_scaling": "probability", "top_k": 3},
        {"weight_hard_loss": 0.0, "token_scaling": "probability"},
    ):
        with pytest.raises(ValueError, match="token_scaling="):
            JSD(**options)(weight, hidden, labels, ll.Teacher(*teacher))
