"""What is read of, and added to, the head's rows of labels, against float64."""

import pytest
import torch

from liger_losses.chunked.accelerators.label_rows import add_to_label_rows_, label_logits, scale_and_add_label_rows_
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from tests.kernels.cases import DEVICE, HALF, head

pytest.importorskip("triton")


@HALF
@pytest.mark.parametrize(("tokens", "hidden_size", "columns"), [(1, 5, 3), (40, 70, 6), (9, 1030, 50)])
def test_label_rows(tokens, hidden_size, columns, dtype):
    hidden, weight, labels, _, _ = head(tokens, hidden_size, columns, dtype)
    scale, coef = torch.linspace(-1, 1, 2 * tokens, device=DEVICE).split(tokens)
    bias = torch.linspace(-1, 1, columns, device=DEVICE)
    for transform, b in ((LogitTransform(), None), (LogitTransform(0.7, 1.2, 8.0), bias)):
        projected = (hidden.double() * weight.double()[labels]).sum(-1)
        exact = transform(projected, None if b is None else b.double()[labels])
        found = label_logits(hidden, weight, labels, Epilogue(transform, b))
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)

    out = torch.randn(tokens, hidden_size, device=DEVICE)
    exact = scale.double()[:, None] * out.double() + coef.double()[:, None] * weight.double()[labels]
    scale_and_add_label_rows_(out, scale, coef, weight, labels)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-5)

    grad, coef[::3] = weight.clone(), 0.0
    exact = weight.double().index_add(0, labels, coef.double()[:, None] * hidden.double())
    add_to_label_rows_(grad, labels, coef, hidden)
    torch.testing.assert_close(grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
