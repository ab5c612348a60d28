"""Sums over rows of both models' logits, against float64; and the divergences that take log-sum-exps from them."""

import pytest
import torch

from liger_losses.kernels import sums_of_both as module
from liger_losses.kernels.divergence import Coefficients, Logits, divergence_into, divergence_sums_into
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.sums_of_both import log_sum_exp, sums_of_both
from tests.chunked.losses.test_distillation import BACKENDS, divergence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def models(rows, columns, every_option):
    """Rows of a wider matrix each; one of -inf, two with inf. The second model has no bias."""
    g = torch.Generator(DEVICE).manual_seed(0)
    epilogues = [Epilogue(), Epilogue()]
    if every_option:
        bias = torch.randn(columns, device=DEVICE, generator=g)
        bias[columns // 4 : columns * 3 // 4] = float("-inf")
        temperature = torch.linspace(0.5, 2.0, rows, device=DEVICE)
        epilogues = [Epilogue(LogitTransform(temperature, 1.2), bias), Epilogue(LogitTransform(temperature, 1.0, 9.0))]
    both = [30 * torch.randn(rows, columns + 7, device=DEVICE, generator=g)[:, :columns] for _ in range(2)]
    for projected in both[: 1 if every_option else 2]:  # a soft-cap has no logits of inf
        projected[1], projected[2, 3], projected[3, -1] = float("-inf"), float("inf"), float("inf")
    return both, epilogues


@pytest.mark.parametrize("every_option", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_sum_exps(backend, every_option, monkeypatch):
    """Of several parts, of which some have only logits of -inf, and the last one is short."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(module, "_COLUMNS", 32)
    both, epilogues = models(5, 150, every_option)
    sums = sums_of_both(*both, *epilogues, backend=backend)
    assert sums.shape == (2, 2, 5, 5 if backend == "triton" else 1)
    assert sums[:, 0].isfinite().all()
    for found, projected, (transform, bias, _) in zip(sums, both, epilogues, strict=True):
        exact = transform(projected.double(), None if bias is None else bias.double()).logsumexp(1)
        torch.testing.assert_close(log_sum_exp(found).double(), exact, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend):
    empty = torch.empty(0, 40, device=DEVICE)
    assert sums_of_both(empty, empty, backend=backend).shape[2] == 0


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_divergences_take_them(backend, gradient, monkeypatch):
    """They write the log-sum-exps, in few rows' several programs and in one, and find what they find of given ones."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(module, "_COLUMNS", 32)
    monkeypatch.setattr("liger_losses.kernels.divergence._BLOCK", 32)
    g = torch.Generator(DEVICE).manual_seed(0)
    both = [4 * torch.randn(3, 70, device=DEVICE, generator=g) for _ in range(2)]
    epilogue = Epilogue(LogitTransform(1.7))
    sums = sums_of_both(*both, epilogue, epilogue, backend=backend)
    given = [Logits(part, (part.double() / 1.7).logsumexp(1).float(), epilogue) for part in both]
    taken = [
        Logits(part, torch.full((3,), float("nan"), device=DEVICE), epilogue, sums[i]) for i, part in enumerate(both)
    ]
    outs = [torch.empty(3, 70, device=DEVICE) for _ in range(2)]
    values = []
    for sides, out in zip((given, taken), outs, strict=True):
        value = torch.empty(3, device=DEVICE)
        options = {"out": out, "coefficients": Coefficients(torch.ones_like(value))} if gradient else {}
        values.append(divergence_into(value, *sides, divergence("JSD"), **options, backend=backend))
    for ours, right in zip(taken, given, strict=True):
        torch.testing.assert_close(ours.lse, right.lse, rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-6)
    if gradient:
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_some_rows_among_those_of_all(backend, programs, monkeypatch):
    """Where a tensor has the parts of all rows, those of other rows are left as they are."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("liger_losses.kernels.divergence._BLOCK", 32)
    g = torch.Generator(DEVICE).manual_seed(0)
    both = [4 * torch.randn(3, 150, device=DEVICE, generator=g) for _ in range(2)]
    sums = sums_of_both(*both, backend=backend)
    sides = [Logits(part, torch.empty(3, device=DEVICE), sums=sums[i]) for i, part in enumerate(both)]
    found = torch.full((2, programs, 8), float("nan"), device=DEVICE)
    divergence_sums_into(found[:, :, 2:5], *sides, divergence("reverse KL"), backend=backend)
    assert found[:, :, :2].isnan().all()
    assert found[:, :, 5:].isnan().all()
    exact = [part.double().log_softmax(1) for part in both]
    right = (exact[0].exp() * (exact[0] - exact[1])).sum(1)
    for sums_of_rows in found[:, :, 2:5].sum(1):  # of reverse KL, h is the divergence's own term but for p - q
        torch.testing.assert_close(sums_of_rows.double(), right, rtol=1e-5, atol=1e-5)
