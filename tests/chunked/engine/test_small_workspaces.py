"""Divergences within small workspaces, of which fewer tokens' logits exist at a time."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses import DistillationLoss, EngineOptions, Teacher, linear_divergence
from liger_losses.chunked.engine import two_models
from tests.reference import assert_as_exact_as_plain, divergence, formula, relative_error, rounding

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Bytes in which some tokens' gradients fit, and fewer tokens' logits.
SMALL = 25_000


@pytest.fixture
def parts(monkeypatch):
    """The numbers of tokens whose logits exist at a time."""
    taken, fill = [], two_models.TwoModels._fill_rows

    def counted(self, part, *arguments):
        taken.append(len(part.hidden))
        fill(self, part, *arguments)

    monkeypatch.setattr(two_models.TwoModels, "_fill_rows", counted)
    return taken


def models(dtype=torch.bfloat16, tokens=19, vocab=200, teacher_vocab=200, bias=False):
    g = torch.Generator().manual_seed(0)

    def normal(*size, scale=0.3):
        return (torch.randn(*size, generator=g) * scale).to(dtype).to(DEVICE)

    labels = torch.randint(vocab, (tokens,), generator=g).to(DEVICE)
    labels[:5] = -100
    student = normal(tokens, 32, scale=1.0).requires_grad_(), normal(vocab, 32).requires_grad_()
    teacher = normal(tokens, 48, scale=1.0), normal(teacher_vocab, 48)
    biases = [normal(n, scale=1.0) if bias else None for n in (vocab, teacher_vocab)]
    return (*student, biases[0]), labels, (*teacher, biases[1])


def plain(name, student, labels, teacher, hard, temperature, logit_scale=1.0, softcap=None):
    """The loss from logits in the inputs' dtype."""
    logits, theirs = (
        F.linear(h, w, b).to(torch.promote_types(h.dtype, torch.float32)) for h, w, b in (student, teacher)
    )
    logits = logits * logit_scale
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    columns, active = min(logits.shape[1], theirs.shape[1]), labels != -100
    ce = F.cross_entropy(logits, labels, reduction="sum")
    soft = formula(name, logits[:, :columns] / temperature, theirs[:, :columns] / temperature)[active].sum()
    return (hard * ce + 0.7 * soft) / active.sum()


def double(tensors):
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


CASES = {
    "JSD, soft-cap": ("JSD", {"bias": True}, {"softcap": 3.0, "logit_scale": 0.7}, 0.3),
    "forward KL, temperature, fp16": ("forward KL", {"dtype": torch.float16}, {"temperature": 2.0}, 0.3),
    "reverse KL, a wider student": ("reverse KL", {"vocab": 240}, {}, 0.3),
    "cosine": ("cosine", {}, {}, 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case, parts):
    name, sizes, options, hard = CASES[case]
    student, labels, teacher = models(**sizes)
    settings = {"temperature": 1.0, **options}
    wide = double(student), labels, double(teacher)
    rough, exact = plain(name, student, labels, teacher, hard, **settings), plain(name, *wide, hard, **settings)
    loss = DistillationLoss(divergence(name), hard, 0.7, **settings, workspace=SMALL, backend="triton")
    value, metrics = loss(student[1], student[0], labels, Teacher(*teacher), bias=student[2])
    grads = torch.autograd.grad(value, student[:2])
    assert len(parts) > 1
    assert relative_error(value, exact) < 1e-6
    torch.testing.assert_close(hard * (metrics.hard_loss or 0) + 0.7 * metrics.soft_loss, value.detach())
    rough_grads, exact_grads = torch.autograd.grad(rough, student[:2]), torch.autograd.grad(exact, wide[0][:2])
    for ours, rounded, right in zip(grads, rough_grads, exact_grads, strict=True):
        assert_as_exact_as_plain(ours, rounded, right)


@pytest.mark.parametrize("workspace", [SMALL, None])
def test_a_sum_of_log_probabilities(workspace, parts):
    """Its gradients reach backward as one number with a stride of 0."""
    student, labels, teacher = models(tokens=14)
    options = EngineOptions(workspace=workspace, backend="triton")
    found = linear_divergence(
        *student[:2], labels.clamp(min=0), Teacher(*teacher), divergence("forward KL"), logp=True, options=options
    )
    wide = double(student)
    exact = F.linear(*wide).log_softmax(1).gather(1, labels.clamp(min=0)[:, None]).sum()
    pairs = zip(torch.autograd.grad(found.logp.sum(), student[:2]), torch.autograd.grad(exact, wide[:2]), strict=True)
    for ours, right in pairs:
        assert relative_error(ours, right) < 4 * rounding(torch.bfloat16)
    assert (len(parts) > 2) == bool(workspace)


@pytest.mark.parametrize("name", [pytest.param("forward KL", marks=pytest.mark.slow), "JSD"])
def test_close_teachers_keep_their_digits(name, parts):
    """Where the student differs from the teacher in one rounding of one dimension, bf16 logits would be the same."""
    _, labels, teacher = models()
    hidden, weight = teacher[0].clone(), teacher[1]
    hidden[:, 0] *= 1 + 2**-7
    inputs = hidden.requires_grad_(), weight.clone().requires_grad_(), None
    loss = DistillationLoss(divergence(name), 0.0, 0.7, workspace=SMALL, backend="triton")
    value, _ = loss(inputs[1], inputs[0], labels, Teacher(teacher[0], weight))
    wide = double(inputs)
    exact = plain(name, wide, labels, double(teacher), 0.0, 1.0)
    assert 0 < exact < 1e-5
    assert relative_error(value, exact) < 1e-4
    pairs = zip(torch.autograd.grad(value, inputs[:2]), torch.autograd.grad(exact, wide[:2]), strict=True)
    for ours, right in pairs:
        assert relative_error(ours, right) < 4 * rounding(torch.bfloat16)
    assert len(parts) > 1
