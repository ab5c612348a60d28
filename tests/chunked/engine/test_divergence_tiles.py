"""Losses that small workspaces compute in tiles of the vocabulary."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses import DistillationLoss, EngineOptions, Head, Teacher, linear_divergence
from liger_losses.chunked.engine import decision, divergence_tiles, plan
from liger_losses.chunked.engine.call import make_call
from liger_losses.chunked.engine.query import Comparison, Query
from tests.chunked.losses.test_distillation import divergence, formula
from tests.reference import assert_as_exact_as_plain, relative_error, rounding

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Bytes in which tiles fit: several blocks of tokens, and several tiles of columns; and all columns of 4 tokens.
SMALL = 42_000


@pytest.fixture
def in_tiles(monkeypatch, request):
    """The number of blocks that took their gradients in tiles, and their statistics from rows of logits or in tiles."""
    taken, gradients = [], divergence_tiles.DivergenceTiles.gradients
    by_rows = getattr(request, "param", "rows") == "rows"
    for name in ("TILE", "HALF_TILE"):
        monkeypatch.setattr(plan, name, 4 if by_rows else 64)
    decision._decisions.clear()

    def counted(self, *arguments):
        if self.call.plan.tiled:
            taken.append(arguments)
            assert (self.call.plan.part_rows > 0) == by_rows
        return gradients(self, *arguments)

    monkeypatch.setattr(divergence_tiles.DivergenceTiles, "gradients", counted)
    yield taken
    decision._decisions.clear()


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


@pytest.mark.parametrize(
    ("case", "in_tiles"),
    [(case, "rows") for case in CASES if case != "cosine"]
    + [("reverse KL, a wider student", "tiles"), ("cosine", "tiles")],
    indirect=["in_tiles"],
)
def test_loss_and_gradients(case, in_tiles):
    name, sizes, options, hard = CASES[case]
    student, labels, teacher = models(**sizes)
    settings = {"temperature": 1.0, **options}
    wide = double(student), labels, double(teacher)
    rough, exact = plain(name, student, labels, teacher, hard, **settings), plain(name, *wide, hard, **settings)
    loss = DistillationLoss(divergence(name), hard, 0.7, **settings, workspace=SMALL, backend="triton")
    value, metrics = loss(student[1], student[0], labels, Teacher(*teacher), bias=student[2])
    grads = torch.autograd.grad(value, student[:2])
    assert len(in_tiles) > 1
    assert relative_error(value, exact) < 1e-6
    torch.testing.assert_close(hard * (metrics.hard_loss or 0) + 0.7 * metrics.soft_loss, value.detach())
    rough_grads, exact_grads = torch.autograd.grad(rough, student[:2]), torch.autograd.grad(exact, wide[0][:2])
    for ours, rounded, right in zip(grads, rough_grads, exact_grads, strict=True):
        assert_as_exact_as_plain(ours, rounded, right)


@pytest.mark.parametrize("workspace", [SMALL, None], ids=["tiles", "rows"])
def test_a_sum_of_log_probabilities(workspace, in_tiles):
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
    assert bool(in_tiles) == bool(workspace)


@pytest.mark.parametrize("name", [pytest.param("forward KL", marks=pytest.mark.slow), "JSD"])
def test_close_teachers_keep_their_digits(name, in_tiles):
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
    assert in_tiles


def plan_of(tokens=2000, **options):
    student, labels, teacher = models(tokens=tokens)
    query = Query(("divergence",), comparison=Comparison(Teacher(*teacher), divergence("JSD")))
    return make_call(student[0], Head(student[1]), labels, query, EngineOptions(backend="triton", **options))[1].plan


def test_only_small_workspaces_take_tiles():
    assert not plan_of().tiled
    assert not plan_of(workspace=10 * 2**20).tiled
    assert plan_of(workspace=2**20).tiled
    assert not plan_of(workspace=2**20, chunk_size=100).tiled  # which asks for whole rows
    assert not plan_of(workspace=2**20, tokens=50).tiled  # all of which fit
    found = plan_of(workspace=2**20)
    assert found.tile_rows * (32 * 4 + found.tile_columns * (4 + 4 + 2)) < 2**20
    assert found.part_rows == 0  # of so few, reading the heads would take longer
    assert plan_of(workspace=11 * 2**17).part_rows == 128
