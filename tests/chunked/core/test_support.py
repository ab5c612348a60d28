"""Softmaxes over kept columns, on which no other column has an influence."""

import pytest
import torch

from liger_losses import TokenSupport, linear_logps
from tests.reference import gradients, problem, weighted
from tests.seam import BACKENDS, read_rows_up_to


@pytest.fixture(params=[1, 1000], ids=["products", "rows"], autouse=True)
def way(request):
    with read_rows_up_to(request.param):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_is_not_hidden(backend):
    hidden, weight, _, _ = problem(4, 4, 20)
    labels = torch.tensor([1, 2, 3, 4])
    with torch.no_grad():
        hidden[0] = weight[6] = float("nan")  # a token; a column that another keeps
    ids = torch.stack([labels, torch.tensor([7, 6, 9, 10]), torch.full((4,), -1)], 1)
    found = linear_logps(hidden, weight, labels, support=TokenSupport(ids), entropy=True, lse=True, backend=backend)
    for value in (found.logp, found.entropy, found.lse):
        assert value.isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("other", [1e6, torch.inf, torch.nan])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_in_other_columns_and_logits_of_minus_infinity(backend, other, softcap):
    hidden, weight, labels, bias = problem(6, 6, 30, bias=True, masked=0.3)
    bias.data[[3, 4]], bias.data[20] = -torch.inf, other
    labels = labels % 3
    labels[0] = -100
    ids = torch.arange(8).repeat(len(labels), 1)
    ids[:, 4:6] = -1
    columns, given = [0, 1, 2, 3, 6, 7], {"softcap": softcap, "temperature": 0.7, "entropy": True, "lse": True}
    found = linear_logps(hidden, weight, labels, bias=bias, support=TokenSupport(ids), backend=backend, **given)
    exact = linear_logps(hidden, weight[columns], labels, bias=bias[columns], **given)
    torch.testing.assert_close(found[:3], exact[:3])
    ours, theirs = (gradients(weighted(values[:3]), (hidden, weight, bias)) for values in (found, exact))
    torch.testing.assert_close(ours, theirs)
    assert not ours[1][8:].any()
    assert not ours[2][8:].any()
