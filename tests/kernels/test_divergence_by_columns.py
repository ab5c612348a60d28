"""Divergences and their gradients from slices of the vocabulary."""

import pytest
import torch

from liger_losses import LogitTransform
from liger_losses.kernels.divergence import Coefficients, Logits, RowSums, divergence_into, square_sums
from liger_losses.kernels.logit_transform import Epilogue
from tests.chunked.losses.test_distillation import divergence

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
