"""Divergences of rows of logits and their gradients where these are extreme."""

import math

import pytest
import torch

from liger_losses.kernels import BACKENDS
from liger_losses.kernels.divergence import Coefficients, Logits, divergence_gradient_into, divergence_sums, square_sums
from liger_losses.kernels.logit_transform import Epilogue
from tests.reference import DIVERGENCES, divergence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["cosine", *DIVERGENCES]


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_that_the_student_finds_all_but_impossible(backend):
    """The forward Kullback-Leibler divergence grows with the logit's distance, however large that is."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    student, teacher = torch.zeros(1, 20, device=device), torch.zeros(1, 20, device=device)
    student[0, 3] = -24_000.0
    sides = [Logits(logits, logits.logsumexp(-1), Epilogue()) for logits in (student, teacher)]
    value = divergence_sums(*sides, divergence("forward KL"), backend=backend)[0]
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
    which, coefficients = divergence(name), Coefficients(torch.ones(4, device=device))
    squares = square_sums(*sides, backend=backend) if name == "cosine" else None
    value, h = divergence_sums(*sides, which, squares=squares, backend=backend)
    out = torch.empty(4, 130, device=device)
    divergence_gradient_into(out, *sides, which, coefficients, h, squares=squares, backend=backend)
    assert value.isfinite().all()
    assert out.isfinite().all()
    assert (value >= 0).all()
