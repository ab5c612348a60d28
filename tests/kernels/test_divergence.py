"""Divergences of rows of logits and their gradients, against float64."""

import math

import pytest
import torch

from liger_losses import Divergence, LogitTransform
from liger_losses.kernels import BACKENDS
from liger_losses.kernels.divergence import Coefficients, Logits, RowSums, divergence_into, square_sums
from liger_losses.kernels.divergence_terms import summed_terms
from liger_losses.kernels.logit_transform import Epilogue
from tests.reference import DIVERGENCES, divergence, formula, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["cosine", *DIVERGENCES]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("distance", [3.0, 1e-1, 1e-3])
@pytest.mark.parametrize("name", NAMES)
def test_divergence_and_gradient_of_logits(name, distance, backend):
    """fp32 logits are enough however close the student is; with their rounding to bf16 nothing would be left."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    teacher = torch.randn(5, 331, generator=g, dtype=torch.float64) * 2
    student = (teacher + distance * torch.randn(5, 331, generator=g, dtype=torch.float64)).float().double()
    teacher = teacher.float().double()
    student.requires_grad_()
    exact = formula(name, student / 2, teacher / 2)
    weights = torch.rand(5, generator=g)
    (expected,) = torch.autograd.grad((exact * weights).sum(), student)
    transform = LogitTransform(2.0)
    sides = []
    for logits in (student, teacher):
        projected = logits.detach().float().to(device)
        sides.append(Logits(projected, (projected / 2).logsumexp(-1), Epilogue(transform)))
    value, out = torch.empty(5, device=device), torch.empty(5, 331, device=device)
    given = Coefficients(weights.to(device))
    divergence_into(value, *sides, divergence(name), out=out, coefficients=given, scratch=10**4, backend=backend)
    alone = divergence_into(torch.empty_like(value), *sides, divergence(name), backend=backend)
    torch.testing.assert_close(alone, value, rtol=1e-5, atol=0)
    assert (value >= 0).all()
    # What remains of fp32 logits of this size, whose own rounding is 1e-7 of them.
    assert relative_error(value.cpu(), exact.detach()) < 1e-6 + 5e-7 / distance
    if name != "total variation":  # whose gradient jumps where p = q
        assert relative_error(out.cpu(), expected) < 1e-6 + 2e-6 / distance


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_that_the_student_finds_all_but_impossible(backend):
    """The forward Kullback-Leibler divergence grows with the logit's distance, however large that is."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    student, teacher = torch.zeros(1, 20, device=device), torch.zeros(1, 20, device=device)
    student[0, 3] = -24_000.0
    sides = [Logits(logits, logits.logsumexp(-1), Epilogue()) for logits in (student, teacher)]
    value = divergence_into(torch.empty(1, device=device), *sides, divergence("forward KL"), backend=backend)
    assert value.item() == pytest.approx(24_000 / 20 + math.log(19 / 20), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_extreme_logits(name, backend):
    """Masked columns, one-hot softmaxes and columns without any probability: no NaN."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    student = torch.randn(4, 130, generator=torch.Generator().manual_seed(0))
    teacher = student.flip(1).clone()
    if name != "cosine":
        teacher[0, 5] = student[0, 5] = -math.inf
        student[1, 3] = -3e4
    student[2, 7], teacher[2, 8] = 400.0, 500.0
    sides = [Logits(part.to(device), part.to(device).logsumexp(-1)) for part in (student, teacher)]
    value, out = torch.empty(4, device=device), torch.empty(4, 130, device=device)
    given = Coefficients(torch.ones(4, device=device))
    divergence_into(value, *sides, divergence(name), out=out, coefficients=given, backend=backend)
    assert value.isfinite().all()
    assert out.isfinite().all()
    assert (value >= 0).all()


@pytest.mark.parametrize("shape", [(37, 5), (3, 2, 64), (2, 2500), (0, 7), (4, 0)], ids=str)
@pytest.mark.parametrize("name", ["reverse KL", "JSD", "KL by entropy"])
def test_summed_terms(name, shape):
    """The kernel's, with a parameter of each row where the divergence has one, against the reference's in float64."""
    pytest.importorskip("triton", reason="triton is not installed")
    g = torch.Generator(DEVICE).manual_seed(0)
    log_q = torch.randn(shape, device=DEVICE, generator=g) - 4
    log_p = log_q + 0.7 * torch.randn(shape, device=DEVICE, generator=g).round()  # some are equal
    which = Divergence.kl_by_entropy(0.8) if name == "KL by entropy" else divergence(name)
    parameter = torch.rand(shape[:-1], device=DEVICE, generator=g) if which.by_entropy else None
    wide = None if parameter is None else parameter.double()
    exact = summed_terms(which, log_p.double(), log_q.double(), wide, "torch")
    for found, right in zip(summed_terms(which, log_p, log_q, parameter, "triton"), exact, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "hard", "backend", "programs"),
    [
        ("forward KL", False, "torch", 8),
        ("forward KL", False, "triton", 8),
        ("JSD", True, "triton", 8),
        ("JSD", True, "triton", 0),
        ("cosine", True, "torch", 8),
        ("cosine", True, "triton", 8),
        pytest.param("total variation", False, "triton", 8, marks=pytest.mark.slow),
    ],
)
def test_divergence_and_gradient_by_columns(name, hard, programs, backend, monkeypatch):
    """Of two slices of the vocabulary, against the same from all logits in float64; few rows are summed in parts."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("liger_losses.kernels.divergence._BLOCK", 32)
    monkeypatch.setattr("liger_losses.kernels.divergence._PROGRAMS", programs)
    g = torch.Generator().manual_seed(0)

    def normal(*size):
        return (torch.randn(*size, generator=g) / 2).to(DEVICE)

    rows, vocab, biases = 5, 150, [None, None]
    projections = [4 * normal(rows, vocab + 4)[:, :vocab] for _ in range(2)]
    if hard:
        biases = [normal(vocab) for _ in range(2)]
    labels = torch.randint(vocab, (rows,), generator=g).to(DEVICE)
    transform = LogitTransform(0.7, 1.2, 8.0) if hard else LogitTransform()
    exact = []
    for projected, bias in zip(projections, biases, strict=True):
        epilogue = Epilogue(transform, None if bias is None else bias.double())
        exact.append(Logits(projected.double(), epilogue(projected.double()).logsumexp(1), epilogue))
    coefficients = Coefficients(torch.linspace(0.5, 1.5, rows, device=DEVICE))
    if hard:
        lse = (exact[0].logits() * transform.temperature).logsumexp(1)
        factors = torch.linspace(0, 1, 2 * rows, device=DEVICE).split(rows)
        coefficients = coefficients._replace(hard_p=factors[0], hard_label=-factors[1], hard_lse=lse.float())
    which, wide = divergence(name), Coefficients(*(None if c is None else c.double() for c in coefficients))
    expected = torch.empty(rows, dtype=torch.float64, device=DEVICE), torch.empty_like(exact[0].projected)
    divergence_into(expected[0], *exact, which, out=expected[1], coefficients=wide, labels=labels, backend="torch")

    def slices():
        for columns in (slice(0, 97), slice(97, vocab)):
            yield (
                columns,
                *(
                    Logits(projected[:, columns], right.lse.float(), Epilogue(transform, bias).columns(columns))
                    for projected, bias, right in zip(projections, biases, exact, strict=True)
                ),
            )

    value, part = torch.zeros(rows, device=DEVICE), torch.empty(rows, device=DEVICE)
    sums, outs = RowSums(torch.zeros(rows, device=DEVICE)), []
    if name == "cosine":
        sums = sums._replace(squares=sum(square_sums(*models, backend=backend) for _, *models in slices()))
        torch.testing.assert_close(sums.squares.double(), square_sums(*exact), rtol=1e-5, atol=1e-5)
    for _, *models in slices():
        found = sums._replace(h=torch.empty(rows, device=DEVICE))
        divergence_into(part, *models, which, sums=found, backend=backend)
        value += part
        sums.h.add_(found.h)
    torch.testing.assert_close(value.double(), expected[0], rtol=1e-5, atol=1e-6)
    of_gradients = torch.zeros_like(value)
    for columns, *models in slices():
        width = columns.stop - columns.start
        out = torch.full((rows, vocab + 4), float("nan"), dtype=torch.half, device=DEVICE)[:, :width]
        inside = (labels >= columns.start) & (labels < columns.stop)
        given = {"coefficients": coefficients, "labels": torch.where(inside, labels - columns.start, width)}
        divergence_into(part, *models, which, out=out, sums=sums, **given, backend=backend)
        of_gradients += part
        outs.append(out)
    torch.testing.assert_close(of_gradients.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(outs, 1).double(), expected[1], rtol=2e-3, atol=3e-6)
