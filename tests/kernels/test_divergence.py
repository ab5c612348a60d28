"""Divergences of rows of logits and their gradients, against float64."""

import math

import pytest
import torch

from liger_losses import (
    LogitTransform,
)
from liger_losses.kernels.divergence import Coefficients, Logits, divergence_into
from liger_losses.kernels.logit_transform import Epilogue
from tests.chunked.losses.test_distillation import BACKENDS, NAMES, divergence, formula
from tests.reference import relative_error


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("distance", [3.0, 1e-1, 1e-3])
@pytest.mark.parametrize("name", NAMES)
def test_divergence_and_gradient_of_logits(name, distance, backend):
    """fp32 logits are enough however close the student is; with their rounding to bf16 nothing would be left."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    teacher = torch.randn(5, 1031, generator=g, dtype=torch.float64) * 2
    student = (teacher + distance * torch.randn(5, 1031, generator=g, dtype=torch.float64)).float().double()
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
    value, out = torch.empty(5, device=device), torch.empty(5, 1031, device=device)
    given = Coefficients(weights.to(device))
    divergence_into(value, *sides, divergence(name), out=out, coefficients=given, scratch=10**5, backend=backend)
    alone = divergence_into(torch.empty_like(value), *sides, divergence(name), backend=backend)
    torch.testing.assert_close(alone, value, rtol=1e-5, atol=0)
    assert (value >= 0).all()
    # What remains of fp32 logits of this size, whose own rounding is 1e-7 of them.
    assert relative_error(value.cpu(), exact.detach()) < 1e-6 + 5e-7 / distance
    if name != "total variation":  # whose gradient jumps where p = q
        assert relative_error(out.cpu(), expected) < 1e-6 + 2e-6 / distance


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
