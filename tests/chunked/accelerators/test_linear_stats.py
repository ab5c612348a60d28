"""Statistics of ``hidden @ weight.T`` in the product's epilogue, against float64."""

import pytest
import torch

from liger_losses.chunked.accelerators.linear_stats import linear_softmax_statistics
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.softmax_stats import STATISTICS, softmax_statistics
from tests.kernels.cases import HALF, SIZES, doubled, head
from tests.kernels.conftest import loads  # noqa: F401


@SIZES
@HALF
@pytest.mark.usefixtures("loads")
def test_statistics_without_logits(tokens, hidden_size, columns, dtype):
    hidden, weight, labels, bias, c = head(tokens, hidden_size, columns, dtype)
    projected = hidden.double() @ weight.double().t()
    for epilogue in (Epilogue(), Epilogue(LogitTransform(0.7, 1.2, 8.0), bias, c)):
        found = linear_softmax_statistics(hidden, weight, labels, frozenset(STATISTICS), epilogue)
        exact = softmax_statistics(projected, labels, frozenset(STATISTICS), doubled(epilogue))
        for name, value in exact.items():
            torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-5, atol=1e-4, msg=name)
