"""Divergences in the epilogue of both models' products, against float64."""

import pytest
import torch

from liger_losses import (
    LogitTransform,
)
from liger_losses.kernels.divergence import Coefficients, Logits, RowSums, divergence_into, square_sums
from liger_losses.kernels.linear_divergence import Product, add_square_sums_, is_balanced, linear_divergence_into
from liger_losses.kernels.logit_transform import Epilogue
from tests.chunked.engine.test_divergence_tiles import DEVICE
from tests.chunked.losses.test_distillation import divergence

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(params=["torch", "tma", "pointers"])
def backend(request, monkeypatch):
    """The reference; and the kernel, through the tensor memory accelerator and through pointers."""
    for module in ("_tiles", "linear_divergence"):
        monkeypatch.setattr(f"liger_losses.kernels.{module}.has_tma", lambda device: request.param == "tma")
    return "torch" if request.param == "torch" else "triton"


@pytest.mark.parametrize(
    ("name", "hard"), [("forward KL", False), ("JSD", True), ("total variation", False), ("cosine", True)]
)
def test_divergence_and_gradient_by_columns(name, hard, backend):
    """Of two slices of the vocabulary, against the same from all logits in float64."""
    g = torch.Generator().manual_seed(0)

    def normal(*size):
        return (torch.randn(*size, generator=g) / 2).to(DEVICE)

    rows, vocab = 130, 400
    hidden, weight, bias = normal(rows, 40).half(), normal(vocab, 40).half(), normal(vocab) if hard else None
    projections, teacher_bias = 4 * normal(rows, 404)[:, :vocab], normal(vocab) if hard else None
    labels = torch.randint(vocab, (rows,), generator=g).to(DEVICE)
    transform = LogitTransform(0.7, 1.2, 8.0) if hard else LogitTransform()
    sides = Epilogue(transform, bias), Epilogue(transform, teacher_bias)
    exact = []
    for projected, (own, vector, _) in zip(
        (hidden.double() @ weight.double().T, projections.double()), sides, strict=True
    ):
        epilogue = Epilogue(own, None if vector is None else vector.double())
        exact.append(Logits(projected, epilogue(projected.clone()).logsumexp(1), epilogue))
    coefficients = Coefficients(torch.linspace(0.5, 1.5, rows, device=DEVICE))
    if hard:
        lse = (exact[0].logits() * transform.temperature).logsumexp(1)
        factors = torch.linspace(0, 1, 2 * rows, device=DEVICE).split(rows)
        coefficients = coefficients._replace(hard_p=factors[0], hard_label=-factors[1], hard_lse=lse.float())
    which, wide = divergence(name), Coefficients(*(None if c is None else c.double() for c in coefficients))
    expected = torch.empty(rows, dtype=torch.float64, device=DEVICE), torch.empty_like(exact[0].projected)
    divergence_into(expected[0], *exact, which, out=expected[1], coefficients=wide, labels=labels, backend="torch")

    value, sums, outs = torch.zeros(rows, device=DEVICE), RowSums(torch.zeros(rows, device=DEVICE)), []

    def slices():
        for columns in (slice(0, 260), slice(260, vocab)):
            own, theirs = (side.columns(columns) for side in sides)
            product = Product(hidden, weight[columns], exact[0].lse.float(), own)
            yield columns, product, Logits(projections[:, columns], exact[1].lse.float(), theirs)

    if name == "cosine":
        sums = sums._replace(squares=torch.zeros(2, rows, device=DEVICE))
        for _, student, teacher in slices():
            add_square_sums_(sums.squares, student, teacher, backend=backend)
        torch.testing.assert_close(sums.squares.double(), square_sums(*exact), rtol=1e-5, atol=1e-5)
    if not is_balanced(which):
        for _, student, teacher in slices():
            linear_divergence_into(value, student, teacher, which, sums, backend=backend)
    for columns, student, teacher in slices():
        out = torch.full((rows, 404), float("nan"), dtype=torch.half, device=DEVICE)[:, : columns.stop - columns.start]
        given = {"coefficients": coefficients, "labels": labels if hard else None, "first_column": columns.start}
        linear_divergence_into(value, student, teacher, which, sums, out=out, **given, backend=backend)
        outs.append(out)
    torch.testing.assert_close(value.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(outs, 1).double(), expected[1], rtol=2e-3, atol=3e-6)
