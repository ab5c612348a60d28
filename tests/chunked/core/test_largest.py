"""The largest log-probabilities, streamed: against dense logits in float64."""

import pytest
import torch

from liger_losses import EngineOptions, Head, LogitTransform, linear_topk
from liger_losses.chunked.core import rows as row_functions
from liger_losses.kernels import BACKENDS
from liger_losses.kernels.logit_transform import Epilogue


@pytest.mark.parametrize(("columns", "k"), [(700, 1), (2048, 3), (9000, 16), (61, 61), (8500, 33), (130, 100)])
def test_largest_of_rows(columns, k):
    g = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = torch.randn(5, columns + 3, generator=g).to(device)[:, :columns] - 6  # no logit is above 0
    rows[:, -1] += 4  # the last part, which is not full, has one of the largest
    rows[:, 9:19] += 7  # one part has more than its share
    bias = torch.randn(columns, generator=g).to(device)
    temperature = torch.linspace(0.5, 2, 5, device=device)
    epilogue = Epilogue(LogitTransform(temperature=temperature, softcap=4.0), bias)
    exact = (4 * torch.tanh((rows + bias) / 4) / temperature[:, None]).topk(k, -1)
    torch.testing.assert_close(row_functions.largest(rows, epilogue, k), tuple(exact))
    rows[:, ::7] = 3.0  # many are equal
    rows[0, 5], rows[1, 6], rows[2] = float("nan"), float("inf"), -float("inf")
    values, ids = row_functions.largest(rows, Epilogue(), k)
    torch.testing.assert_close(values, rows.topk(k, -1).values, equal_nan=True)
    torch.testing.assert_close(rows.gather(1, ids), values, rtol=0, atol=0, equal_nan=True)
    assert all(len(row.unique()) == k for row in ids)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "given", [{}, {"logit_scale": 0.7, "softcap": 3.0}, {"temperature": 0.5}, {"logit_scale": -0.7}], ids=str
)
def test_the_rest_of_rows(given, backend):
    """Also where the largest have nearly all of the probability."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight = torch.eye(13, device=device), torch.randn(5000, 13, generator=torch.Generator().manual_seed(0))
    weight = weight.to(device)
    weight[7] = 40.0
    head = Head(weight, weight[:, 0].flip(0).contiguous() if given else None, LogitTransform(**given))
    logits = head.transform(weight.t().double(), None if head.bias is None else head.bias.double())
    exact = logits.log_softmax(-1).scatter(1, logits.topk(3, -1).indices, -torch.inf).logsumexp(1)
    found = linear_topk(hidden, head, 3, rest=True, options=EngineOptions(backend=backend)).rest
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


def test_without_labels_no_token_is_masked():
    assert linear_topk(torch.randn(3, 4), torch.randn(9, 4), 2, options=EngineOptions(ignore_index=0)).logps.all()
